"""How a service gets on the bus: where the server is, as which user, with which inbox.

Service names are those of the folders in `services/`, and "feed" (the preemption feed), "cli" and "monitor".
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from messages.subjects import APP_API_PREFIX, ROLES_API_PREFIX
from services.jobfile import ConfigError, JobFile
from services.nats_server.keys import seed_path
from services.nats_server.permissions import ADMIN, SENDS, TABLES_USER, inbox_prefix
from services.nats_server.process import keys_dir, read_running, running_file
from services.runtime import bus_nats
from services.runtime.bus import Bus, BusUnavailable

SERVER_WAIT_S: Final = 30.0
"""How long a service waits for the embedded server of its job; they are started together."""
_POLL_S: Final = 0.1
_ALIASES: Final = {"preemption_feed": "feed"}


async def connect(job: JobFile, service: str) -> Bus:
    """Connect as the user of a service. Raises ConfigError, BusUnavailable."""
    user = _ALIASES.get(service, service)
    if user not in SENDS:
        raise ConfigError(f"no user for service {service!r}: one of {', '.join(sorted(SENDS))}")
    return await connect_user(job, user)


async def connect_tables(job: JobFile) -> Bus:
    """Connect as the role table's writer, in account CTRL. For the orchestrator only."""
    return await connect_user(job, TABLES_USER)


async def connect_user(job: JobFile, user: str) -> Bus:
    """Connect as a user by name. Services use `connect`; administration uses this."""
    url = await server_url(job)  # its keys are there once the server is
    seed = _seed_file(job, user)
    in_ctrl = user in (TABLES_USER, *ADMIN.values())
    return await bus_nats.connect(
        url,
        name=f"pearl-{job.job.name}-{user}",
        inbox_prefix=inbox_prefix(user),
        seed_file=seed,
        roles_api_prefix="" if in_ctrl else ROLES_API_PREFIX,
        # Without authorization there are no accounts, and nothing to reach across.
        info_api_prefix=APP_API_PREFIX if user == "monitor" and seed is not None else "$JS.API",
    )


async def server_url(job: JobFile) -> str:
    """Where the servers are: `nats.url`, `nats.cluster`, or what the embedded server wrote, for which this waits a bounded time."""
    if not job.nats.local:
        return job.nats.address
    give_up = time.monotonic() + SERVER_WAIT_S
    while (running := read_running(job)) is None:
        if time.monotonic() >= give_up:
            raise BusUnavailable(
                f"no embedded NATS server: {running_file(job)} did not appear within {SERVER_WAIT_S:.0f} s; "
                "start one with `pearl service nats_server`, or set nats.url"
            )
        await asyncio.sleep(_POLL_S)
    return running.url


def _seed_file(job: JobFile, user: str) -> Path | None:
    """The user's seed; None where the job brings its own server and names no keys (one without authorization)."""
    if not job.nats.embedded and not job.nats.keys_dir:
        return None
    path = seed_path(keys_dir(job), user)
    if not path.is_file():
        raise ConfigError(f"{path} is missing: it is made when the server is started; see nats.keys_dir")
    return path
