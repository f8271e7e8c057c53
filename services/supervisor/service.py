"""Starts, watches, restarts and stops the processes of a roster, the embedded NATS server among them.

Owns: operating-system processes of control services on this machine. Never takes part in any decision: a service
that dies is started again after a back-off, and rebuilds itself from JetStream. The supervisor is the one process whose
death PEARL does not survive by itself: under systemd or Kubernetes, that is their part (see deploy/). Killed, it leaves
nothing running: a guard process (`guard.py`) ends the job as a stop would have, for a job without a supervisor would be in the
way of the next one, and hold its GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from services.jobfile import ConfigError, JobFile
from services.nats_server.process import EmbeddedServer, ServerError
from services.runtime.log import get_logger
from services.supervisor.roster import ServiceProcess, roster

BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pause before the n-th restart in a row; the last one repeats. A process that lived for HEALTHY_S starts over."""
HEALTHY_S = 10.0
STOP_GRACE_S = 8.0
"""Between SIGTERM and SIGKILL at the end: node agents need it to end their workers."""


class Started(msgspec.Struct, frozen=True):
    """One process as it runs now."""

    name: str
    pid: int


class Supervisor:
    """One job's processes on this machine. What befalls them is logged: `services.runtime.log.told` tells people."""

    def __init__(self, job: JobFile, job_path: Path) -> None:
        self.job = job
        self.job_path = job_path
        self.log = get_logger("supervisor")
        self.server: EmbeddedServer | None = EmbeddedServer(job) if job.nats.local else None
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._lock: int | None = None
        self._guard: asyncio.subprocess.Process | None = None
        self.restarts: dict[str, int] = {}

    async def start(self, only: Sequence[str] | None = None) -> None:
        """Start NATS (if embedded), create streams and buckets, then every process of the roster.

        Raises ConfigError where another supervisor runs the job in the same folder; ServerError, BusError.
        """
        (self.job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.job)
        self._guard = await self._spawn_guard(self._lock)
        if self.server is not None:
            await self.server.start()
            await self.server.prepare()
            self._tasks.append(asyncio.create_task(self._watch_server(), name="nats-server"))
        for process in roster(self.job):
            if only is None or process.service in only:
                self._tasks.append(asyncio.create_task(self._keep(process), name=process.name))

    @property
    def started(self) -> bool:
        """Whether there may be something of this supervisor's to stop."""
        return self._lock is not None

    def processes(self) -> tuple[Started, ...]:
        """Processes that run now: services, the NATS server, and what node agents launched (from their pid files)."""
        services = [Started(name, child.pid) for name, child in self._children.items() if child.returncode is None]
        if self.server is not None and self.server.pid:
            services.append(Started("nats-server", self.server.pid))
        return tuple(sorted((*services, *_launched(self.job.run_dir)), key=lambda each: each.name))

    async def stop(self) -> None:
        """End everything: services (node agents end their workers), then what is left, then NATS."""
        self._stopping.set()
        if self._lock is None:
            return  # nothing was started: what runs here is another one's
        for child in self._children.values():
            _signal(child, signal.SIGTERM)
        if self._children:
            await asyncio.wait(
                [asyncio.create_task(child.wait()) for child in self._children.values()], timeout=STOP_GRACE_S
            )
        for child in self._children.values():
            _signal(child, signal.SIGKILL)
        for started in _launched(self.job.run_dir):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(started.pid, signal.SIGKILL)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.server is not None:
            await self.server.stop()
        await self._dismiss_guard()
        os.close(self._lock)
        self._lock = None

    async def _keep(self, process: ServiceProcess) -> None:
        """Run one process again and again until the end."""
        loop = asyncio.get_running_loop()
        failures = 0
        while not self._stopping.is_set():
            begun = loop.time()
            try:
                child = await self._spawn(process)
            except OSError as error:  # no memory, no descriptor, no room for its log
                failures += 1
                self.log.warning(
                    f"{process.name} cannot be started ({error.strerror}); trying again", action="service_unstartable"
                )
                await self._pause(failures)
                continue
            self._children[process.name] = child
            self._tell_guard(process.name, child.pid)
            status = await child.wait()
            if self._stopping.is_set():
                return
            if status == 0 and not process.essential:
                self.log.info(f"{process.name} is done", action="service_done")
                return
            if status == 2:
                self.log.error(
                    f"{process.name} refuses its configuration; see {self.log_file(process)}", action="refused"
                )
            failures = 0 if loop.time() - begun > HEALTHY_S else failures + 1
            self.restarts[process.name] = self.restarts.get(process.name, 0) + 1
            self.log.warning(
                f"{process.name} ended ({_status(status)}), restarting in {_backoff_s(failures)} s",
                action="service_restart",
            )
            await self._pause(failures)

    async def _pause(self, failures: int) -> None:
        """Before the next try, but not beyond the end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), _backoff_s(failures))

    async def _spawn(self, process: ServiceProcess) -> asyncio.subprocess.Process:
        with self.log_file(process).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.cli",
                "service",
                process.service,
                "-c",
                str(self.job_path),
                *process.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=surroundings(),
                start_new_session=True,
            )

    async def _spawn_guard(self, lock: int) -> asyncio.subprocess.Process:
        """It shares the lock: another supervisor begins when both have ended."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__).with_name("guard.py")),
            str(self.job.run_dir.resolve()),
            str(lock),
            str(STOP_GRACE_S),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(lock,),
            start_new_session=True,
        )

    def _tell_guard(self, name: str, pid: int) -> None:
        with contextlib.suppress(psutil.Error):  # it has ended already
            self._write_guard({"name": name, "pid": pid, "start_time": psutil.Process(pid).create_time()})

    def _write_guard(self, what: dict[str, object]) -> None:
        if self._guard is not None and self._guard.stdin is not None and not self._guard.stdin.is_closing():
            self._guard.stdin.write(msgspec.json.encode(what) + b"\n")

    async def _dismiss_guard(self) -> None:
        """All is ended: there is nothing to guard."""
        guard = self._guard
        if guard is None:
            return
        self._write_guard({"stopped": True})
        if guard.stdin is not None:
            with contextlib.suppress(OSError):  # somebody has killed it
                await guard.stdin.drain()
            guard.stdin.close()
        await guard.wait()
        self._guard = None

    async def _watch_server(self) -> None:
        """Restart the embedded NATS server, on the same port and store, when it dies; again and again where that fails."""
        assert self.server is not None
        failures = 0
        while not self._stopping.is_set():
            await self.server.wait_ended()
            if self._stopping.is_set():
                return
            self.log.warning("the NATS server ended; restarting it on the same store", action="nats_restart")
            self.restarts["nats-server"] = self.restarts.get("nats-server", 0) + 1
            try:
                await self.server.start()
                failures = 0
            except (ServerError, OSError) as error:
                failures += 1
                self.log.error(f"the NATS server does not start, trying again: {error}", action="nats_refused")
                await self._pause(failures)

    def log_file(self, process: ServiceProcess) -> Path:
        """Where a process's output goes."""
        return self.job.run_dir / "logs" / f"{process.name}.log"


def _backoff_s(failures: int) -> float:
    return BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]


class _PidFile(msgspec.Struct):
    pid: int
    start_time: float = 0.0


def _locked(job: JobFile) -> int:
    """The run's folder as one supervisor's own, until the descriptor is closed or the process ends. Raises ConfigError."""
    path = job.run_dir / "supervisor.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"job {job.job.name} runs already in {job.run_dir.absolute()} (process {holder}): stop it first, or give this one "
            "another job.name or job.data_dir"
        ) from error
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _launched(run_dir: Path) -> list[Started]:
    """Workers and trainers that node agents launched and that still run."""
    found: list[Started] = []
    for path in sorted((run_dir / "pids").glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError, psutil.Error):
            record = msgspec.json.decode(path.read_bytes(), type=_PidFile)
            same = abs(psutil.Process(record.pid).create_time() - record.start_time) < 1.0
            if same and psutil.Process(record.pid).status() != psutil.STATUS_ZOMBIE:
                found.append(Started(path.stem, record.pid))
    return found


def on_interrupt(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> None:
    """Call `stop` when the process is asked to end: by Ctrl-C, SIGTERM, or the end of its terminal (unless that is ignored).

    The processes of a job have sessions of their own, so nothing ends them but their supervisor.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop)


def surroundings() -> dict[str, str]:
    """The environment of a job's processes: they run this very code, whatever folder they are started in.

    Python puts the working directory first on its path for `-m`: a folder `services` or a file `signal.py` of the user's
    there would be taken for ours.
    """
    path = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    here = str(Path.cwd())
    if "" in sys.path or here in sys.path:
        path.append(here)
    path = [each for each in dict.fromkeys(path) if each]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def _signal(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)


def _status(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit {status}"
