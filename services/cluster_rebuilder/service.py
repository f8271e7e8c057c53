"""Cluster rebuilder process: hosts `core.py` on the bus.

Owns the execution of a plan's part in the reserved and preemptible zones. Never writes the role table, never
chooses a plan. Driven by the role table, by facts of workers and node agents, and by time.
"""

from __future__ import annotations

import asyncio

from services.cluster_rebuilder.config import Config
from services.cluster_rebuilder.core import ClusterRebuilderCore
from services.connect import connect
from services.jobfile import JobFile
from services.replica import replica_of
from services.runtime.host import CoreHost


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises ConfigError, BusUnavailable."""
    core = ClusterRebuilderCore(Config.of(job))
    bus = await connect(job, core.name)
    replica = replica_of(bus, job.job.name)
    try:
        await replica.start(bus, job.job.name)
        await CoreHost(core, bus, job_name=job.job.name, replica=replica).run(stop)
    finally:
        await replica.stop()
        await bus.close()
