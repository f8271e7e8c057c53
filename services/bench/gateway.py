"""`pearl bench gateway`: what the HTTP gateway adds to a request, beside sglang-router and a direct connection.

All ways lead to the same emulated engine, in a process of its own (`gateway_peer`), through SGLang's `/generate`: straight to
it; through sglang-router 0.3.2, where an interpreter has it (this one, or the one that PEARL_SGLANG_ROUTER_PYTHON names); and
through a router process with a gateway, the NATS server and the engine's rollout worker. One client, here, speaks bare HTTP on
connections that stay open. The ways take turns request by request, or round by round, so that a busy machine disturbs all
alike. CPU time is that of what stands between: the router's process, or the gateway's and the NATS server's together.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from messages.envelope import Message, encode
from messages.ids import Incarnation, PolicyVersion, Role, RoleGeneration
from messages.rollout_worker import SetRole, UpdateWeights
from messages.subjects import subject_of
from pearl_state.store import TableStore
from services import jobfile
from services.bench import gateway_peer
from services.bench.cell import WORKER, bus_of, server, serving_table
from services.bench.figures import Figure, figure, percentile
from services.connect import connect_tables
from services.jobfile import JobFile
from services.snapshot import write_folder

JOB: Final = """
[job]
name = "bench"
data_dir = {data_dir}
[[nodes]]
name = "n"
zone = "reserved"
gpus = 1
[[nodes]]
name = "t"
zone = "training"
gpus = 1
[rollout]
engine = "emulated"
max_running = 64
kv_cache_tokens = 1000000
[pipeline]
max_context_tokens = 4096
[training]
engine = "emulated"
[emulation]
time_scale = 10.0
[environment]
tokenizer = "services.environments.byte_tokenizer:ByteTokenizer"
[gateway]
bind = "127.0.0.1:0"
"""
PROMPT: Final = 64
LATENCY_TOKENS: Final = 1
REPLY: Final = 16
STREAMED: Final = 128
CONCURRENT: Final = 32
STREAMS: Final = 16
READY_S: Final = 90.0
MOST_ADDED: Final = 1.5
LEAST_THROUGHPUT: Final = 0.5
ROUTER: Final = "sglang-router"
GATEWAY: Final = "gateway"
ROUTER_VARIABLE: Final = "PEARL_SGLANG_ROUTER_PYTHON"
NO_ROUTER: Final = "sglang-router 0.3.2 is not installed"


class Way(msgspec.Struct, frozen=True):
    """How to get to the engine: where to connect, and which processes stand between."""

    name: str
    port: int
    between: tuple[psutil.Process, ...]

    def cpu_s(self) -> tuple[float, ...]:
        """CPU seconds so far of each process that stands between."""
        return tuple(times.user + times.system for times in (process.cpu_times() for process in self.between))


class _Connection:
    """One connection that stays open, and the one request that it sends again and again."""

    def __init__(self, port: int, tokens: int, *, stream: bool) -> None:
        body = msgspec.json.encode(
            {
                "input_ids": [32 + index % 90 for index in range(PROMPT)],
                "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True},
                "stream": stream,
            }
        )
        head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._port = port
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        """Before the first `ask`."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)

    async def ask(self) -> float:
        """One whole reply; returns seconds."""
        begun = time.perf_counter()
        self._writer.write(self._request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise AssertionError(f"port {self._port}: {head[:200]!r} {(await self._reader.read(500))!r}")
        if b"content-length: " in head:
            await self._reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        else:
            while size := int(await self._reader.readline(), 16):
                await self._reader.readexactly(size + 2)
            await self._reader.readline()
        return time.perf_counter() - begun

    def close(self) -> None:
        """At the end."""
        self._writer.close()


async def measure(folder: Path, *, alone: int = 400, requests: int = 6400, streams: int = 192) -> list[Figure]:
    """Latency of one request at a time; CPU of `CONCURRENT` at once; CPU of a streamed token, `STREAMS` replies at once."""
    async with ways_in(folder) as (ways, missing):
        seconds = await _latencies(ways, alone)
        direct, *others = ways
        figures: list[Figure] = []
        for share, label, most in ((0.5, "p50", MOST_ADDED), (0.99, "p99", None)):
            base = percentile(seconds[direct.name], share) * 1e3
            figures.append(figure("gateway", f"direct connection, {label}", base, "ms"))
            added = {way.name: percentile(seconds[way.name], share) * 1e3 - base for way in others}
            figures += _beside(f"{label} added", "ms", added, ratio_to=most)
        rates = await _used(ways, requests, CONCURRENT, REPLY, stream=False)
        costs = await _used(ways, streams, STREAMS, STREAMED, stream=True)
        whole = {way.name: requests / (sum(rates[way.name]) or 1e-3) for way in others}
        token = {way.name: sum(costs[way.name]) / (streams * STREAMED) * 1e6 for way in others}
        figures += _beside(
            f"requests/s a core, {REPLY} tokens, {CONCURRENT} at once", "1/s", whole, ratio_from=LEAST_THROUGHPUT
        )
        figures += _beside(f"CPU a streamed token, {STREAMS} at once", "us", token)
        share = rates[GATEWAY][-1] / (sum(rates[GATEWAY]) or 1e-3) * 100
        figures.append(figure("gateway", "gateway: the NATS server's share of a request's CPU", share, "%"))
        if missing:
            print(f"{missing}: no figures beside it; see docs/gateway.md", file=sys.stderr)
    return figures


def _beside(
    case: str, unit: str, found: dict[str, float], *, ratio_to: float | None = None, ratio_from: float | None = None
) -> list[Figure]:
    """The gateway's figure beside sglang-router's, if there is one."""
    router = found.get(ROUTER)
    figures = [] if router is None else [figure("gateway", f"{ROUTER}: {case}", router, unit)]
    return [
        *figures,
        figure(
            "gateway",
            f"gateway: {case}",
            found[GATEWAY],
            unit,
            router,
            ROUTER,
            ratio_to=ratio_to,
            ratio_from=ratio_from,
        ),
    ]


async def _latencies(ways: Sequence[Way], count: int) -> dict[str, list[float]]:
    connections = [_Connection(way.port, LATENCY_TOKENS, stream=False) for way in ways]
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    for connection in connections:
        await connection.open()
        for _ in range(10):
            await connection.ask()
    for _ in range(count):
        for way, connection in zip(ways, connections, strict=True):
            seconds[way.name].append(await connection.ask())
    for connection in connections:
        connection.close()
    return seconds


async def _used(
    ways: Sequence[Way], count: int, at_once: int, tokens: int, *, stream: bool
) -> dict[str, tuple[float, ...]]:
    """CPU seconds of `count` requests by each way, of each process between, four rounds in turn."""
    found = {way.name: (0.0,) * len(way.between) for way in ways}
    rounds = 4
    for round_ in range(rounds + 1):
        for way in ways:
            connections = [_Connection(way.port, tokens, stream=stream) for _ in range(at_once)]
            for connection in connections:
                await connection.open()
            before = way.cpu_s()
            share = count // rounds // at_once
            await asyncio.gather(*(_several(connection, share) for connection in connections))
            if round_:  # the first is to warm up
                used = zip(found[way.name], before, way.cpu_s(), strict=True)
                found[way.name] = tuple(so_far + after - earlier for so_far, earlier, after in used)
            for connection in connections:
                connection.close()
    return found


async def _several(connection: _Connection, count: int) -> None:
    for _ in range(count):
        await connection.ask()


# --- what there is to measure


@contextlib.asynccontextmanager
async def ways_in(folder: Path) -> AsyncGenerator[tuple[list[Way], str]]:
    """The ways, and what is missing."""
    path = folder / "job.toml"
    path.write_text(JOB.format(data_dir=msgspec.json.encode(str(folder)).decode()), encoding="utf-8")
    job = jobfile.load(path)
    async with contextlib.AsyncExitStack() as stack:
        nats = await stack.enter_async_context(server(job))
        tables = await connect_tables(job)
        stack.push_async_callback(tables.close)
        store = TableStore(tables, job.job.name)
        await store.restore()
        await store.write(serving_table(job))
        peer = _start(stack, "-m", gateway_peer.__name__, str(path))
        await _make_serving(stack, job)
        peer_port = int(await asyncio.wait_for(asyncio.to_thread(_line, peer), READY_S))
        router = _start(stack, "-m", "services.cli", "service", "router", "-c", str(path))
        await _until(job.gateway_file().is_file)
        url = msgspec.json.decode(job.gateway_file().read_bytes(), type=dict[str, str | int])["url"]
        ways = [Way("direct", peer_port, ())]
        other, missing = await _sglang_router(stack, peer_port)
        if other is not None:
            ways.append(other)
        ways.append(Way(GATEWAY, int(str(url).rpartition(":")[2]), (psutil.Process(router.pid), nats)))
        await _until_serving(ways[-1])
        yield ways, missing


async def _make_serving(stack: contextlib.AsyncExitStack, job: JobFile) -> None:
    commands = await stack.enter_async_context(bus_of(job, "cluster_rebuilder"))

    def fill(draft: Path) -> None:
        (draft / "weights.txt").write_text("none\n", encoding="utf-8")

    snapshot = await asyncio.to_thread(write_folder, fill, job.run_dir / "snapshots", 0)
    update = UpdateWeights(
        worker=WORKER,
        incarnation=Incarnation(1),
        version=PolicyVersion(0),
        uri=snapshot.uri,
        manifest_sha256=snapshot.manifest_sha256,
    )
    role = SetRole(worker=WORKER, incarnation=Incarnation(1), role=Role.COLOCATED, role_generation=RoleGeneration(1))

    async def repeat(messages: Sequence[Message]) -> None:
        while True:
            for message in messages:
                await commands.publish(subject_of(job.job.name, message), encode(message))
            await asyncio.sleep(0.5)

    saying = asyncio.create_task(repeat((update, role)))
    stack.callback(saying.cancel)


async def _sglang_router(stack: contextlib.AsyncExitStack, worker_port: int) -> tuple[Way | None, str]:
    python = os.environ.get(ROUTER_VARIABLE, "")
    if not python:
        if importlib.util.find_spec("sglang_router") is None:
            return None, NO_ROUTER
        python = sys.executable
    port, metrics = _free_port(), _free_port()
    process = _start(
        stack,
        *("-m", "sglang_router.launch_router", "--worker-urls", f"http://127.0.0.1:{worker_port}"),
        *("--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error"),
        *("--prometheus-port", str(metrics)),
        python=python,
    )
    way = Way(ROUTER, port, (psutil.Process(process.pid),))
    try:
        await _until_serving(way)
    except TimeoutError:
        return None, f"{python} -m sglang_router.launch_router did not serve within {READY_S:g} s"
    return way, ""


async def _until_serving(way: Way) -> None:
    """Until a request by this way is answered."""
    async with asyncio.timeout(READY_S):
        while True:
            connection = _Connection(way.port, 1, stream=False)
            try:
                await connection.open()
                async with asyncio.timeout(5):
                    await connection.ask()
                return
            except (OSError, AssertionError, TimeoutError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.2)


def _start(stack: contextlib.AsyncExitStack, *arguments: str, python: str = sys.executable) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [python, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    process.kill()
    process.wait()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(READY_S):
        while not condition():  # noqa: ASYNC110 - another process writes the file
            await asyncio.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
