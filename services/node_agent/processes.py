"""The operating system side of a node agent: start a process group, signal it, notice its end, find it again.

A process is identified by pid and start time, so that a recycled pid is never taken for it. Each leads a session of its
own; its end is reported when the whole group has ended, which is what makes its GPUs free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from messages.ids import Incarnation, WorkerId

POLL_S = 0.2
"""How often an end is looked for where the system has no pidfd (Linux before 5.3, macOS)."""
GROUP_S = 2.0
"""How long the rest of a killed group is waited for: SIGKILL takes effect when the kernel gets to it."""
_GROUP_POLL_S = 0.01
_SAME_START_S = 1.0
"""Start times are derived from the boot time, which moves when the clock is set."""


class PidFile(msgspec.Struct, frozen=True, kw_only=True):
    """`<run>/pids/<worker>.json`: what a restarted agent needs to find a process again."""

    worker: WorkerId
    incarnation: Incarnation
    pid: int
    start_time: float  # Unix seconds
    gpus: tuple[int, ...]
    service: str


class Process(Protocol):
    """What is started for a worker, as its agent sees it."""

    @property
    def record(self) -> PidFile: ...

    def signal(self, hard: bool) -> None:
        """SIGTERM, or SIGKILL if `hard`. One that has ended is no error."""
        ...

    async def ended(self) -> str:
        """Wait for the end and say how: "exit:1", "signal:9", "exit:unknown"."""
        ...


class Supervised:
    """A process this agent started (`child`) or adopted."""

    def __init__(self, record: PidFile, child: subprocess.Popen[bytes] | None) -> None:
        self.record = record
        self.child = child
        self._pidfd = -1

    @property
    def gone(self) -> bool:
        """The leader has ended."""
        if self.child is not None:
            return self.child.poll() is not None
        return not is_same(self.record)

    def signal(self, hard: bool) -> None:
        """Signal the whole group. One that has ended is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.record.pid, signal.SIGKILL if hard else signal.SIGTERM)

    async def ended(self) -> str:
        """Wait for the leader's end, end the rest of the group, and say how: "exit:1", "signal:9", "exit:unknown"."""
        await self._leader_ended()
        self.signal(hard=True)
        how = self._reap()
        for _ in range(int(GROUP_S / _GROUP_POLL_S)):
            if not group_lives(self.record.pid):
                break
            await asyncio.sleep(_GROUP_POLL_S)
        return how

    def _reap(self) -> str:
        """How the leader ended, once it has."""
        if self.child is not None:
            code = self.child.wait()
            return f"exit:{code}" if code >= 0 else f"signal:{-code}"
        with contextlib.suppress(ChildProcessError):  # not our child, or reaped by its owner
            os.waitpid(self.record.pid, os.WNOHANG)
        return "exit:unknown"

    async def _leader_ended(self) -> None:
        try:
            pidfd = os.pidfd_open(self.record.pid)
        except ProcessLookupError:
            return
        except (AttributeError, OSError):
            while not self.gone:  # noqa: ASYNC110 - nothing tells of it here
                await asyncio.sleep(POLL_S)
            return
        loop = asyncio.get_running_loop()
        try:
            if self.gone:  # looked at after opening: from here on the descriptor cannot mean another process
                return
            readable = asyncio.Event()
            loop.add_reader(pidfd, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(pidfd)
        finally:
            os.close(pidfd)


def is_same(record: PidFile) -> bool:
    """Whether the process of a pid file lives."""
    try:
        process = psutil.Process(record.pid)
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and abs(process.create_time() - record.start_time) <= _SAME_START_S
    except psutil.Error:
        return False


def group_lives(group: int) -> bool:
    """Whether a process group has a member that is not a zombie (an unreaped one holds no GPU)."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return True
    return False


class Pids:
    """The folders `pids` and `logs` of a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._pids = run_dir / "pids"
        self._logs = run_dir / "logs"

    def start(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        gpus: tuple[int, ...],
        service: str,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> Process:
        """Start a process in a session of its own, its output in a log file, its pid file written. Raises OSError."""
        self._pids.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        with (self._logs / f"{worker}.{incarnation}.log").open("ab") as log:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        try:
            start_time = psutil.Process(child.pid).create_time()
        except psutil.Error:
            start_time = 0.0  # ended already
        record = PidFile(
            worker=worker,
            incarnation=incarnation,
            pid=child.pid,
            start_time=start_time,
            gpus=gpus,
            service=service,
        )
        path = self._path(worker)
        draft = path.with_suffix(".json.new")
        draft.write_bytes(msgspec.json.encode(record))
        draft.replace(path)
        return Supervised(record, child)

    def adopt(self, record: PidFile) -> Process:
        """The process of a pid file, which another agent started."""
        return Supervised(record, None)

    def lives(self, record: PidFile) -> bool:
        """Whether it does."""
        return is_same(record)

    def read(self, worker: WorkerId, warn: Callable[[str], None]) -> PidFile | None:
        """The pid file of a worker; None if there is none, or it cannot be read (`warn` says why)."""
        path = self._path(worker)
        try:
            return msgspec.json.decode(path.read_bytes(), type=PidFile)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            warn(f"{path}: not a pid file ({error}); its process, if it lives, is not supervised")
            return None

    def forget(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """Remove the pid file, if it is still that of `incarnation`."""
        record = self.read(worker, lambda _: None)
        if record is not None and record.incarnation <= incarnation:
            self._path(worker).unlink(missing_ok=True)

    def _path(self, worker: WorkerId) -> Path:
        return self._pids / f"{worker}.json"
