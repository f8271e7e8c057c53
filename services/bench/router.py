"""`pearl bench router`: assignments a second over the bus, beside a bare request and reply of the same size.

Router, or echo, and clients share this process and its event loop, so both are slower than with a core each; their
ratio is what an assignment costs beyond being asked and answering.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from messages.agent import Assignment
from messages.envelope import decode, encode
from messages.ids import Incarnation, PolicyVersion, RequestId, TrajectoryId, WorkerId
from messages.router import AssignRequest
from messages.runtime_tracker import WorkerHeartbeat
from messages.subjects import subject_of
from services.bench.cell import bus_of, job_in, server, serving_table
from services.bench.figures import Figure, figure
from services.jobfile import JobFile
from services.router.config import Config
from services.router.service import Router
from services.runtime.bus import Bus

CLIENTS = 32
TIMEOUT_S = 10.0
WARM_UP = 200
BEAT_S = 0.05
"""A worker takes 128 requests between two heartbeats; with 16, no run is that fast."""


async def measure(folder: Path, *, requests: int = 6000, workers: int = 16) -> list[Figure]:
    """Requests a second, `CLIENTS` at a time."""
    job, _ = job_in(folder, workers)
    async with (
        server(job),
        bus_of(job, "router") as routers,
        bus_of(job, "agent") as clients,
        bus_of(job, "rollout_worker") as loads,
    ):
        router = Router(Config.of(job), routers, job.job.name)
        router.on_table(serving_table(job))
        stop = asyncio.Event()
        serving = asyncio.create_task(router.run(stop))
        beating = asyncio.create_task(_beat(job, loads, workers))
        await asyncio.sleep(0.2)
        answer = await clients.request(*_asked(job, 0), TIMEOUT_S)
        decode(answer.data, Assignment)
        await _rate(job, clients, min(WARM_UP, requests))
        rate = await _rate(job, clients, requests)
        stop.set()
        beating.cancel()
        await asyncio.wait([serving, beating])
        assert (router.refused, router.not_now) == (0, 0)
        bare = await bare_rate(job, routers, clients, answer.data, requests)
    return [figure("router", f"assignments/s, {workers} workers", rate, "1/s", bare, "bare request-reply")]


async def bare_rate(job: JobFile, answering: Bus, asking: Bus, data: bytes, requests: int) -> float:
    """Requests a second that are answered with `data`, unread."""
    subscription = await answering.subscribe(f"pearl.{job.job.name}.assign", queue="router")

    async def echo() -> None:
        async for delivery in subscription:
            await answering.publish(delivery.reply, data)

    echoing = asyncio.create_task(echo())
    try:
        await asyncio.sleep(0.2)
        await _rate(job, asking, min(WARM_UP, requests))
        return await _rate(job, asking, requests)
    finally:
        await subscription.stop()
        echoing.cancel()
        await asyncio.wait([echoing])


async def _beat(job: JobFile, bus: Bus, workers: int) -> None:
    """Heartbeats of idle workers, so that none is ever full."""
    beat = WorkerHeartbeat(
        worker=WorkerId(""),
        incarnation=Incarnation(1),
        running=0,
        queued=0,
        version=0,
        serving=True,
        decode_iterations=0,
        decode_tokens=0,
        decode_s=0.0,
        decode_batch_sum=0,
        prefill_tokens=0,
        prefill_s=0.0,
        refused=0,
        rss_bytes=0,
    )
    while True:
        for index in range(workers):
            mine = msgspec.structs.replace(beat, worker=WorkerId(f"n-w{index}"))
            await bus.publish(subject_of(job.job.name, mine), encode(mine))
        await asyncio.sleep(BEAT_S)


def _asked(job: JobFile, number: int) -> tuple[str, bytes]:
    message = AssignRequest(
        request=RequestId(f"t{number}/1"),
        trajectory=TrajectoryId(f"t{number}"),
        attempt=1,
        min_version=PolicyVersion(0),
        context_tokens=512,
    )
    return subject_of(job.job.name, message), encode(message)


async def _rate(job: JobFile, bus: Bus, requests: int) -> float:
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            await bus.request(*_asked(job, number), TIMEOUT_S)

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return requests / (time.perf_counter() - begun)
