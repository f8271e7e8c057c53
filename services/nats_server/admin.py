"""Creates what is durable: every stream and bucket of a job, as the administrator of each account.

Idempotent; run at every start of a job (`pearl up`, `pearl demo`), before its services.
"""

from __future__ import annotations

from services.connect import connect_user
from services.durable import APP, CTRL, durable_state
from services.jobfile import JobFile
from services.nats_server.permissions import ADMIN
from services.runtime.bus import StreamSpec


async def ensure(job: JobFile) -> None:
    """Every stream and bucket exists as `services.durable` lists it. Raises BusError."""
    for account in (CTRL, APP):
        bus = await connect_user(job, ADMIN[account])
        try:
            for entry in durable_state(job.job.name, job.nats.replicas):
                if entry.account != account:
                    continue
                if isinstance(entry.spec, StreamSpec):
                    await bus.ensure_stream(entry.spec)
                else:
                    await bus.ensure_bucket(entry.spec)
        finally:
            await bus.close()
