"""Simulated machines: what node agents start on them, and what of it outlives whom.

A machine's pid files and processes outlive its node agent; its processes, but not its files, end with its power.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from messages.ids import Incarnation, RoleGeneration, WorkerId
from services.node_agent.processes import PidFile, Pids
from services.node_agent.processes import Process as Supervised
from services.simulator.faults.engine import Engine
from services.simulator.faults.loop import Process, VirtualLoop
from services.simulator.faults.trainer import Group

SIGNAL_S: Final = 0.004
"""How long a signal takes to take effect."""
EXIT_S: Final = 0.01
"""And the end of a process, to be noticed."""


class Started:
    """A process that a node agent started. `engine` or `group` is what it runs on, for whoever breaks it."""

    def __init__(self, record: PidFile, process: Process) -> None:
        self.record = record
        self.process = process
        self.stop = asyncio.Event()  # SIGTERM arrived
        self.stubborn = False  # it ignores SIGTERM
        self.how = ""  # it ended so; "" while it lives
        self.engine: Engine | None = None
        self.group: Group | None = None
        self.state: Any = None  # the shell within, for onlookers
        self.let_in: dict[tuple[str, int], RoleGeneration] = {}  # attempts, with the worker's generation at that time
        self.gone: list[asyncio.Future[str]] = []

    @property
    def alive(self) -> bool:
        return not self.how

    @property
    def worker(self) -> WorkerId:
        return self.record.worker

    @property
    def incarnation(self) -> Incarnation:
        return self.record.incarnation


Launch = Callable[["Machine", Started], Callable[[], Coroutine[Any, Any, None]]]
"""Makes what a process runs."""


class Machine:
    """One node. `launch` makes what runs in a process, `ended` is told of each end."""

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        launch: Launch,
        ended: Callable[[Machine, Started, BaseException | None], None],
    ) -> None:
        self.name = name
        self.files: dict[WorkerId, PidFile] = {}
        self.processes: dict[int, Started] = {}
        self.broken_starts = 0  # so many of the next processes cannot be started
        self.loop = loop
        self._launch = launch
        self._ended = ended
        self._pids = 0

    @property
    def living(self) -> list[Started]:
        return [each for each in self.processes.values() if each.alive]

    def start(self, worker: WorkerId, incarnation: Incarnation, gpus: tuple[int, ...], service: str) -> Started:
        """A new process. Raises OSError if the machine cannot."""
        if self.broken_starts > 0:
            self.broken_starts -= 1
            raise OSError("no memory for another process")
        self._pids += 1
        record = PidFile(
            worker=worker,
            incarnation=incarnation,
            pid=self._pids,
            start_time=self.loop.now_s,
            gpus=gpus,
            service=service,
        )
        started = Started(record, Process("trainer" if service == "trainer" else worker))
        self.processes[record.pid] = started
        self.files[worker] = record
        work = self._launch(self, started)
        task = self.loop.start(started.process, work)
        task.add_done_callback(lambda done: self._over(started, done), context=self.loop.world)
        return started

    def _over(self, started: Started, task: asyncio.Task[Any]) -> None:
        """Its first task has ended, and so has it."""
        if started.how:
            return
        error = None if task.cancelled() else task.exception()
        self._end(started, "exit:0" if error is None else "exit:1", error)

    def kill(self, started: Started, how: str = "signal:9") -> None:
        """End it, now."""
        if started.alive:
            self._end(started, how, None)

    def _end(self, started: Started, how: str, error: BaseException | None) -> None:
        started.how = how
        started.process.mute = True
        self.loop.kill(started.process)
        self._ended(self, started, error)
        for future in started.gone:
            if not future.done():
                self.loop.at(self.loop.now_s + EXIT_S, lambda future=future: _tell(future, how))

    def signal(self, started: Started, hard: bool) -> None:
        """SIGKILL or SIGTERM."""

        def arrive() -> None:
            if not started.alive:
                return
            if hard:
                self.kill(started)
            elif not started.stubborn:
                started.stop.set()

        self.loop.at(self.loop.now_s + SIGNAL_S, arrive)

    def power_off(self, *, files: bool) -> None:
        """Everything ends; `files`: its disk is gone too."""
        for started in self.living:
            self.kill(started)
        if files:
            self.files.clear()


def _tell(future: asyncio.Future[str], how: str) -> None:
    if not future.done():
        future.set_result(how)


class Watched:
    """A process as a node agent sees it: `services.node_agent.processes.Process`."""

    def __init__(self, machine: Machine, record: PidFile, *, child: bool) -> None:
        self.record = record
        self._machine = machine
        self._child = child

    def signal(self, hard: bool) -> None:
        started = self._machine.processes.get(self.record.pid)
        if started is not None:
            self._machine.signal(started, hard)

    async def ended(self) -> str:
        started = self._machine.processes.get(self.record.pid)
        if started is not None and started.alive:
            future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            started.gone.append(future)
            await future
        if started is None or not self._child:
            return "exit:unknown"
        return started.how


class Files(Pids):
    """A machine's pid files, as its node agent handles them. `agent`: the process it is, which may be dead by now."""

    def __init__(self, machine: Machine, agent: Process) -> None:
        self._machine = machine
        self._agent = agent

    def start(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        gpus: tuple[int, ...],
        service: str,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> Supervised:
        if self._agent.mute:
            raise asyncio.CancelledError
        return Watched(self._machine, self._machine.start(worker, incarnation, gpus, service).record, child=True)

    def adopt(self, record: PidFile) -> Supervised:
        return Watched(self._machine, record, child=False)

    def lives(self, record: PidFile) -> bool:
        started = self._machine.processes.get(record.pid)
        return started is not None and started.alive

    def read(self, worker: WorkerId, warn: Callable[[str], None]) -> PidFile | None:
        return self._machine.files.get(worker)

    def forget(self, worker: WorkerId, incarnation: Incarnation) -> None:
        record = self._machine.files.get(worker)
        if record is not None and record.incarnation <= incarnation and not self._agent.mute:
            del self._machine.files[worker]
