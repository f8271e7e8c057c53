"""Keeps the processes of three hosts running, as systemd would on each, and can hold one down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import msgspec
import psutil

from services.jobfile import JobFile
from services.nats_server.process import read_running
from services.supervisor.service import surroundings
from tests.integration.chaos.hosts import Host
from tests.integration.chaos.job import Spec

PAUSES_S = (0.2, 0.5, 1.0, 2.0)
HEALTHY_S = 10.0
STOP_S = 8.0


class _PidFile(msgspec.Struct):
    pid: int
    start_time: float = 0.0


class Keeper:
    """The service processes. Workers and trainers are the node agents'."""

    def __init__(self, job: JobFile, path: Path, hosts: tuple[Host, ...], specs: tuple[Spec, ...]) -> None:
        self.job = job
        self.specs = {spec.name: spec for spec in specs}
        self.restarts: Counter[str] = Counter()
        self.unasked: Counter[str] = Counter()  # ends that nobody here caused, by process and status
        self._path = path
        self._hosts = hosts
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._free: dict[str, asyncio.Event] = {name: asyncio.Event() for name in self.specs}
        self._killed: set[int] = set()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start everything."""
        (self.job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        for name in self.specs:
            self._free[name].set()
            self._tasks.append(asyncio.create_task(self._keep(self.specs[name]), name=name))

    async def _keep(self, spec: Spec) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while not self._stopping.is_set():
            await self._free[spec.name].wait()
            begun = loop.time()
            with (self.job.run_dir / "logs" / f"{spec.name}.log").open("ab") as log:
                child = await asyncio.create_subprocess_exec(
                    *self._hosts[spec.host].argv(
                        [sys.executable, "-m", "services.cli", "service", *spec.arguments, "-c", str(self._path)]
                    ),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=surroundings(),
                    start_new_session=True,
                )
            self._children[spec.name] = child
            status = await child.wait()
            if self._stopping.is_set():
                return
            self.restarts[spec.name] += 1
            if child.pid not in self._killed:
                self.unasked[f"{spec.name} ({status})"] += 1
            failures = 0 if loop.time() - begun > HEALTHY_S else failures + 1
            await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])

    def pid(self, name: str) -> int | None:
        """Process of a service, worker, trainer or NATS server (`server-0`) now."""
        if name.startswith("server-"):
            running = read_running(self.job, int(name.removeprefix("server-")))
            return running.pid if running is not None and lives(running.pid) else None
        child = self._children.get(name)
        if child is not None:
            return child.pid if child.returncode is None else None
        return launched(self.job.run_dir).get(name)

    def kill(self, name: str) -> int | None:
        """SIGKILL; returns the pid it had."""
        pid = self.pid(name)
        if pid is not None:
            self._killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid

    def signal(self, name: str, number: signal.Signals) -> int | None:
        """Signal it; returns its pid."""
        pid = self.pid(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid

    def hold(self, name: str) -> None:
        """Do not start it again until `release`."""
        self._free[name].clear()

    def release(self, name: str) -> None:
        """Start it again."""
        self._free[name].set()

    async def stop(self) -> None:
        """End everything, whatever state it is in."""
        self._stopping.set()
        everything = {name: child.pid for name, child in self._children.items() if child.returncode is None}
        for pid in (*everything.values(), *launched(self.job.run_dir).values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        servers = {name for name in everything if name.startswith("nats-")}
        for part in (set(everything) - servers, servers):
            for name in part:
                self.signal(name, signal.SIGTERM)
            waits = [asyncio.create_task(self._children[name].wait()) for name in part]
            if waits:
                await asyncio.wait(waits, timeout=STOP_S)
            for name in part:
                self.signal(name, signal.SIGKILL)
        for pid in launched(self.job.run_dir).values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for index in range(len(self.job.nats.cluster)):
            pid = self.pid(f"server-{index}")
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def launched(run_dir: Path) -> dict[str, int]:
    """Workers and trainers that live, from their node agents' pid files."""
    found: dict[str, int] = {}
    for path in sorted((run_dir / "pids").glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError, psutil.Error):
            record = msgspec.json.decode(path.read_bytes(), type=_PidFile)
            same = abs(psutil.Process(record.pid).create_time() - record.start_time) < 1.0
            if same and lives(record.pid):
                found[path.stem] = record.pid
    return found
