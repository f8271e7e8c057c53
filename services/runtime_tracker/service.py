"""Runtime tracker process: hosts `core.py` on the bus.

Owns the workload profile and the learned costs. Telemetry that is lost costs accuracy only. Driven by telemetry, ends of
trajectories and train steps.
"""

from __future__ import annotations

import asyncio

from messages.subjects import telemetry_subject
from services.connect import connect
from services.jobfile import JobFile
from services.runtime.host import CoreHost
from services.runtime_tracker.config import Config
from services.runtime_tracker.core import RuntimeTrackerCore


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises ConfigError, BusUnavailable."""
    config = Config.of(job)
    bus = await connect(job, "runtime_tracker")
    telemetry = tuple(telemetry_subject(job.job.name, kind) for kind in RuntimeTrackerCore.telemetry)
    try:
        await CoreHost(RuntimeTrackerCore(config), bus, job_name=job.job.name, telemetry=telemetry).run(stop)
    finally:
        await bus.close()
