"""`pearl bench turn` and `pearl bench memory`: what the processes of a running job use.

A job of real processes on the emulated engine, whose workers compute nothing, plays recorded trajectories. CPU time of
agents, routers and the NATS server over a span, divided by the turns journalled in it; each process's proportional set
size (shared pages are counted once over all processes) at its end. References: one request-reply and one stored message on
a bare server; an idle interpreter with asyncio, msgspec and nats imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from messages.agent import TurnFinished
from messages.envelope import UndecodableMessage, decode
from messages.subjects import stream
from services import jobfile
from services.bench.cell import bus_of, cpu_s, job_in, server
from services.bench.figures import Figure, figure
from services.jobfile import JobFile
from services.runtime.bus import Bus
from services.runtime.clock import now_ms
from services.supervisor.service import Supervisor

TARGET_TURN_MS = 5.0
COUNTED = ("agent", "router", "nats-server")
BARE_ROUNDS = 2000
_IDLE = "import asyncio, msgspec, nats, sys; print('up', flush=True); sys.stdin.read()"
_NUMBER = re.compile(r"[-.]?\d+$")


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a job used in a span."""

    turns: int
    seconds: float
    cpu_s: dict[str, float]  # by service, processes of a kind together
    pss_bytes: dict[str, tuple[int, ...]]  # by service, each process


async def observe(path: Path, *, warm_up_s: float = 15.0, seconds: float = 20.0) -> Usage:
    """Run the job of this file for so long, and stop it."""
    job = jobfile.load(path)
    supervisor = Supervisor(job, path)
    try:
        await supervisor.start()
        await asyncio.sleep(warm_up_s)
        begun, begun_ms, before = time.monotonic(), now_ms(), _cpu(supervisor)
        await asyncio.sleep(seconds)
        took, ended_ms, after = time.monotonic() - begun, now_ms(), _cpu(supervisor)
        pss = _pss(supervisor)
        async with bus_of(job, "monitor") as bus:
            turns = await _turns(bus, job, begun_ms, ended_ms)
    finally:
        await supervisor.stop()
    used: dict[str, float] = {}
    for (service, pid), cpu in after.items():
        used[service] = used.get(service, 0.0) + cpu - before.get((service, pid), 0.0)
    return Usage(turns=turns, seconds=took, cpu_s=used, pss_bytes=pss)


async def turn_figures(usage: Usage, folder: Path, rounds: int = BARE_ROUNDS) -> list[Figure]:
    """CPU milliseconds a turn, of each part and of all."""
    turns = max(1, usage.turns)
    bare = await bare_turn_ms(folder, rounds)
    reference = "bare request-reply and stored message"
    each = {service: usage.cpu_s.get(service, 0.0) / turns * 1e3 for service in COUNTED}
    case = f"all three, at {usage.turns / usage.seconds:.0f} turns/s"
    return [
        *(figure("turn", service, value, "ms CPU", bare, reference) for service, value in each.items()),
        figure("turn", case, sum(each.values()), "ms CPU", bare, reference, below=TARGET_TURN_MS),
    ]


def memory_figures(usage: Usage) -> list[Figure]:
    """MiB of the largest process of each service."""
    idle = idle_pss() / (1 << 20)
    return [
        figure("memory", f"{service} ({len(sizes)})", max(sizes) / (1 << 20), "MiB", idle, "idle interpreter")
        for service, sizes in sorted(usage.pss_bytes.items())
    ]


async def bare_turn_ms(folder: Path, rounds: int) -> float:
    """CPU milliseconds of one request-reply and one stored message: clients here and the server."""
    job, _ = job_in(folder, 1)
    async with server(job) as process, bus_of(job, "router") as answering, bus_of(job, "agent") as asking:
        subject = f"pearl.{job.job.name}.assign"
        subscription = await answering.subscribe(subject, queue="router")

        async def echo() -> None:
            async for delivery in subscription:
                await answering.publish(delivery.reply, delivery.data)

        echoing = asyncio.create_task(echo())
        await asyncio.sleep(0.2)
        before = cpu_s(process)
        for round_ in range(rounds):
            await asking.request(subject, bytes(400), 5.0)
            await asking.publish_durable(f"pearl.{job.job.name}.journal.bench", bytes(800), msg_id=f"m{round_}")
        used = cpu_s(process) - before
        await subscription.stop()
        echoing.cancel()
        await asyncio.wait([echoing])
    return used / rounds * 1e3


def idle_pss() -> int:
    """Bytes of an interpreter that has only imported what every service imports."""
    with subprocess.Popen([sys.executable, "-c", _IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        size = _size(psutil.Process(process.pid))
        process.stdin.close()
    return size


async def _turns(bus: Bus, job: JobFile, begun_ms: int, ended_ms: int) -> int:
    count = 0
    async for delivery in bus.read(stream(job.job.name, "journal"), f"pearl.{job.job.name}.journal.*"):
        if begun_ms <= delivery.at_ms < ended_ms:
            with contextlib.suppress(UndecodableMessage):
                decode(delivery.data, TurnFinished)
                count += 1
    return count


def _running(supervisor: Supervisor) -> Iterable[tuple[str, psutil.Process]]:
    for each in supervisor.processes():
        with contextlib.suppress(psutil.Error):
            yield service_of(each.name), psutil.Process(each.pid)


def service_of(process: str) -> str:
    """`agent-0` is an agent, `n1-w2.3` a rollout worker, `n1-t0.1` a trainer."""
    if re.search(r"-w\d+(\.\d+)?$", process):
        return "rollout_worker"
    if re.search(r"-t\d+(\.\d+)?$", process):
        return "trainer"
    return _NUMBER.sub("", process).partition(".")[0].partition("-")[0] if process != "nats-server" else process


def _cpu(supervisor: Supervisor) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = {}
    for service, process in _running(supervisor):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[service, process.pid] = times.user + times.system
    return found


def _pss(supervisor: Supervisor) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for service, process in _running(supervisor):
        with contextlib.suppress(psutil.Error):
            found[service] = (*found.get(service, ()), _size(process))
    return found


def _size(process: psutil.Process) -> int:
    full = process.memory_full_info()
    return int(getattr(full, "pss", full.uss))
