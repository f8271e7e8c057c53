"""Elastic scheduler process: hosts `core.py` on the bus.

Owns the rollout budget. Never decides what runs on it. Driven by capacity events, training notifications and time.
"""

from __future__ import annotations

import asyncio

from services.connect import connect
from services.elastic_scheduler.config import Config
from services.elastic_scheduler.core import ElasticSchedulerCore
from services.jobfile import JobFile
from services.runtime.host import CoreHost


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises ConfigError, BusUnavailable."""
    config = Config.of(job)
    bus = await connect(job, "elastic_scheduler")
    try:
        await CoreHost(ElasticSchedulerCore(config), bus, job_name=job.job.name).run(stop)
    finally:
        await bus.close()
