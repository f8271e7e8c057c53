"""Runs the pipeline scheduler's core, and lets the journal go once nobody needs it.

Owns: task groups, staleness, batches, policy versions (all in the core). Never talks to the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib

from messages.subjects import stream
from services.connect import connect
from services.jobfile import JobFile
from services.pipeline_scheduler.config import Config
from services.pipeline_scheduler.core import PipelineSchedulerCore, PipelineState
from services.replica import replica_of
from services.runtime.bus import Bus, BusUnavailable
from services.runtime.host import CoreHost

PURGE_EVERY_S = 5.0
"""The journal is bounded by its stream anyway; purging it late costs only disk."""


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Serve until `stop`."""
    bus = await connect(job, "pipeline_scheduler")
    replica = replica_of(bus, job.job.name)
    try:
        await replica.start(bus, job.job.name)
        host = CoreHost(PipelineSchedulerCore(Config.of(job)), bus, job_name=job.job.name, replica=replica)
        async with asyncio.TaskGroup() as tasks:
            purging = None if job.pipeline.keep_journal else tasks.create_task(_purge(job, bus, host))
            await host.run(stop)
            if purging is not None:
                purging.cancel()
    finally:
        await bus.close()


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
