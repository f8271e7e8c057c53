"""Toggle manager process: hosts `core.py` on the bus.

Owns the hand-over of training GPUs both ways and the word to the trainer to train. Never writes the role table,
never decides whether to borrow. Driven by the role table, by facts of workers, trainer and node agents, and by time.
"""

from __future__ import annotations

import asyncio

from services.connect import connect
from services.jobfile import JobFile
from services.replica import replica_of
from services.runtime.host import CoreHost
from services.toggle_manager.config import Config
from services.toggle_manager.core import ToggleManagerCore


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises ConfigError, BusUnavailable."""
    core = ToggleManagerCore(Config.of(job))
    bus = await connect(job, core.name)
    replica = replica_of(bus, job.job.name)
    try:
        await replica.start(bus, job.job.name)
        await CoreHost(core, bus, job_name=job.job.name, replica=replica).run(stop)
    finally:
        await replica.stop()
        await bus.close()
