"""Decision engine process: hosts `core.py` on the bus.

Owns the choice of mode, counts and borrowing. Never touches the role table, of which it reads a replica. Driven by budgets,
workload profiles and batch progress.
"""

from __future__ import annotations

import asyncio

from services.connect import connect
from services.decision_engine.config import Config
from services.decision_engine.core import DecisionEngineCore
from services.jobfile import JobFile
from services.replica import replica_of
from services.runtime.host import CoreHost


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises ConfigError, BusUnavailable."""
    config = Config.of(job)
    bus = await connect(job, "decision_engine")
    replica = replica_of(bus, job.job.name)
    try:
        await replica.start(bus, job.job.name)
        await CoreHost(DecisionEngineCore(config), bus, job_name=job.job.name, replica=replica).run(stop)
    finally:
        await replica.stop()
        await bus.close()
