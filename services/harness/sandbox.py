"""Commands in a working copy with limits: what a harness and the model's actions run in.

It keeps honest programs in bounds and leaves nothing behind: own folders, an environment that inherits nothing, limits of time,
output, memory and file size, and the end of every process that was begun. It is no jail: commands run as the same user, see the
file system and the network, and may begin any number of processes. `Limits.wrapper` puts one around them (bubblewrap, a container).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from services.harness.core import Ran

MARKER: Final = "PEARL_SANDBOX"
"""Environment variable by which processes that left their group are found."""
SHELL: Final = "/bin/bash"
GRACE_S: Final = 2.0
"""Longest wait, after a command's processes were killed, for the end of its output."""
_READ: Final = 65536
_LIMITED: Final = 'ulimit -c 0; ulimit -v "$1"; ulimit -f "$2"; shift 2; exec "$@"'
"""Limits set by a shell, since code of ours between fork and exec could deadlock in a process that has threads."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one command. `output_bytes`: what is kept; a command that writes more is ended. 0: no limit of that kind."""

    seconds: float
    output_bytes: int
    memory_bytes: int = 0  # address space of each process
    file_bytes: int = 0  # of each file that it writes
    wrapper: tuple[str, ...] = ()  # put before the command; "{folder}" in it is the working copy's parent


class Folders(msgspec.Struct, frozen=True):
    """An episode's own folders, below one root."""

    root: Path

    @property
    def work(self) -> Path:
        """The working copy."""
        return self.root / "work"

    def make(self) -> None:
        """Empty ones. Raises OSError."""
        for folder in (self.work, self.root / "home", self.root / "tmp"):
            folder.mkdir(parents=True)

    def environment(self, marker: str) -> dict[str, str]:
        """All that a command inherits."""
        return {
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.defpath, "/usr/local/bin")),
            "HOME": str(self.root / "home"),
            "TMPDIR": str(self.root / "tmp"),
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            MARKER: marker,
        }


async def run(
    command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], limits: Limits, stdin: bytes = b""
) -> Ran:
    """Run a command to its end or a limit's; every process of its group is killed before it returns. Raises OSError where it cannot begin.

    What it leaves in the background ends with it. Cancelled, it ends the command first.
    """
    wrapper = [each.replace("{folder}", str(cwd.parent)) for each in limits.wrapper]
    most = [str(value // 1024) if value else "unlimited" for value in (limits.memory_bytes, limits.file_bytes)]
    # A pipe of our own: asyncio's would have `wait` wait for all that hold it.
    inner, outer = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(SHELL, "-c", _LIMITED, "sandbox", *most, *wrapper, *command),
            cwd=cwd,
            env=dict(environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=outer,
            stderr=outer,
            start_new_session=True,
        )
    except (OSError, ValueError):
        os.close(inner)
        raise
    finally:
        os.close(outer)
    output = bytearray()
    full = asyncio.Event()
    reading = asyncio.create_task(_read(inner, output, limits.output_bytes, full))
    waiting = asyncio.create_task(process.wait())
    filling = asyncio.create_task(full.wait())
    ended_by = ""
    try:
        await _feed(process, stdin)
        ended, _ = await asyncio.wait(
            {waiting, filling}, timeout=limits.seconds or None, return_when=asyncio.FIRST_COMPLETED
        )
        if not ended:
            ended_by = "time"
    finally:
        filling.cancel()
        _kill_group(process.pid)
        await waiting
        await asyncio.wait({reading}, timeout=GRACE_S)  # a process that left the group may hold the pipe
        reading.cancel()
    if full.is_set():
        ended_by = "output"
    kept = output[: limits.output_bytes] if limits.output_bytes else output
    return Ran(returncode=waiting.result(), output=kept.decode("utf-8", "replace"), ended_by=ended_by)


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it reads nothing
        process.stdin.write(data)  # short: what a pipe holds
        process.stdin.close()


async def _read(pipe: int, output: bytearray, most: int, full: asyncio.Event) -> None:
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", 0)
    )
    try:
        while piece := await stream.read(_READ):
            output += piece
            if most and len(output) > most:
                full.set()
                return
    finally:
        transport.close()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # none is left
        os.killpg(leader, signal.SIGKILL)


def sweep(marker: str) -> int:
    """Kill the processes whose environment has this marker, or one that begins with it and "/"; how many there were.

    For those that left their group, and those of a runner that died. One that also cleared its environment is not found.
    """
    killed = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found = process.environ().get(MARKER, "")
            if found == marker or found.startswith(f"{marker}/"):
                process.kill()
                killed += 1
    return killed


class CopyError(Exception):
    """A working copy cannot be copied: the message says why."""


def copy_tree(source: Path, target: Path, most_bytes: int) -> None:
    """Copy folders, regular files and symbolic links (as links). Raises CopyError for more than `most_bytes`, or what is unreadable."""
    left = most_bytes
    try:
        target.mkdir()
        for folder, folders, files in os.walk(source):
            inside = target / Path(folder).relative_to(source)
            for name in [*folders, *files]:
                entry, copy = Path(folder) / name, inside / name
                mode = entry.lstat().st_mode
                if stat.S_ISLNK(mode):
                    copy.symlink_to(entry.readlink())
                elif stat.S_ISDIR(mode):
                    copy.mkdir()
                elif stat.S_ISREG(mode):
                    left -= entry.lstat().st_size
                    if left < 0:
                        raise CopyError(f"it holds more than {most_bytes} bytes")
                    shutil.copy(entry, copy, follow_symlinks=False)
    except OSError as error:
        raise CopyError(f"{error.strerror}: {error.filename}") from error


def remove(path: Path) -> None:
    """Remove whatever is there, also what was made unreadable. Best effort."""

    def make_writable(function: object, name: str, error: object) -> None:
        with contextlib.suppress(OSError):
            Path(name).parent.chmod(0o700)
            Path(name).chmod(0o700)
            Path(name).unlink()

    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
        return
    shutil.rmtree(path, onerror=make_writable)
    shutil.rmtree(path, ignore_errors=True)
