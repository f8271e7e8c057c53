"""Runs the pipeline scheduler's core, and lets the journal go once nobody needs it.

Owns: task groups, staleness, batches, policy versions (all in the core). Never talks to the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib

from messages.agent import RolloutTask
from messages.envelope import UndecodableMessage
from messages.pipeline_scheduler import TrajectoryCompleted
from messages.subjects import decode_on, event_subject, stream
from services.connect import connect
from services.jobfile import JobFile
from services.pipeline_scheduler.config import Config
from services.pipeline_scheduler.core import PipelineSchedulerCore, PipelineState, TasksLost
from services.replica import replica_of
from services.runtime.bus import Bus, BusUnavailable
from services.runtime.host import CoreHost

LOOK_EVERY_S = 10.0
"""A task that the broker lost is given out again after twice this."""
PURGE_EVERY_S = 5.0
"""The journal is bounded by its stream anyway; purging it late costs only disk."""


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Serve until `stop`."""
    bus = await connect(job, "pipeline_scheduler")
    replica = replica_of(bus, job.job.name)
    try:
        await replica.start(bus, job.job.name)
        core = PipelineSchedulerCore(Config.of(job))
        host = CoreHost(core, bus, job_name=job.job.name, replica=replica)
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(_look_after_tasks(job, bus, core, host))
            purging = None if job.pipeline.keep_journal else tasks.create_task(_purge(job, bus, host))
            await host.run(stop)
            looking.cancel()
            if purging is not None:
                purging.cancel()
    finally:
        await bus.close()


async def _look_after_tasks(job: JobFile, bus: Bus, core: PipelineSchedulerCore, host: CoreHost[PipelineState]) -> None:
    """Tell the core, every LOOK_EVERY_S, of tasks in flight that are nowhere any more."""
    before: frozenset[tuple[str, int]] = frozenset()
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        with contextlib.suppress(BusUnavailable):
            before, found = await look(job.job.name, bus, core.in_flight(host.state), before)
            for message in found:
                host.feed(message)


async def look(
    job: str, bus: Bus, in_flight: frozenset[tuple[str, int]], before: frozenset[tuple[str, int]]
) -> tuple[frozenset[tuple[str, int]], tuple[TrajectoryCompleted | TasksLost, ...]]:
    """Tasks (trajectory, retry) of `in_flight` that are missing from the queue now, and what to tell of those missing `before` too.

    Twice in a row, since what ended a moment ago, or is being given out, looks the same. Some have an end in the stream: an
    agent that outlived a broker's loss may end a trajectory that the core, begun anew, gives out only afterwards. The
    others are lost. Raises BusUnavailable.
    """
    missing = await missing_tasks(job, bus, in_flight)
    ends: list[TrajectoryCompleted] = []
    lost: set[tuple[str, int]] = set()
    for trajectory, retry in sorted(missing & before):
        end = await end_of(job, bus, trajectory)
        if end is not None and end.retry >= retry:
            ends.append(end)
        else:
            lost.add((trajectory, retry))
    return missing, (*ends, *((TasksLost(frozenset(lost)),) if lost else ()))


async def missing_tasks(job: str, bus: Bus, in_flight: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    """Those of `in_flight` that the queue does not have, neither waiting nor held by an agent. Raises BusUnavailable."""
    queued: set[tuple[str, int]] = set()
    async for delivery in bus.read(stream(job, "task"), f"pearl.{job}.task.*"):
        with contextlib.suppress(UndecodableMessage):
            task = decode_on(job, delivery.subject, delivery.data, RolloutTask)
            queued.add((task.trajectory, task.retry))
    return in_flight - queued


async def end_of(job: str, bus: Bus, trajectory: str) -> TrajectoryCompleted | None:
    """The newest end of a trajectory in the stream. Raises BusUnavailable."""
    last = await bus.last(stream(job, "ev"), event_subject(job, TrajectoryCompleted, trajectory))
    if last is not None:
        with contextlib.suppress(UndecodableMessage):
            return decode_on(job, last.subject, last.data, TrajectoryCompleted)
    return None


async def _purge(job: JobFile, bus: Bus, host: CoreHost[PipelineState]) -> None:
    """Delete journal entries below the floor that the core has committed to."""
    done = 0
    while True:
        await asyncio.sleep(PURGE_EVERY_S)
        floor = host.state.journal_floor
        if floor > done:
            with contextlib.suppress(BusUnavailable):
                await bus.purge(stream(job.job.name, "journal"), below_seq=floor + 1)
                done = floor
