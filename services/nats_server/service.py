"""`pearl service nats_server`: the embedded server of a job, with its streams and buckets, until told to stop.

Drives nothing and decides nothing. `pearl up` and `pearl demo` start the server themselves; this is for nodes on
which someone else supervises processes.
"""

from __future__ import annotations

import asyncio
import contextlib

from services.jobfile import ConfigError, JobFile
from services.nats_server.process import EmbeddedServer
from services.runtime.log import get_logger


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Run the server and start it again when it dies. Raises ConfigError, ServerError, BusError."""
    if not job.nats.embedded:
        raise ConfigError("nats.embedded = false: this job uses the server at nats.url, there is none to run")
    log = get_logger("nats_server")
    server = EmbeddedServer(job)
    try:
        while not stop.is_set():
            running = await server.start()
            await server.prepare()
            log.info(f"serving at {running.url}", action="nats_serving", pid=running.pid)
            await _first(server, stop)
    finally:
        await server.stop()


async def _first(server: EmbeddedServer, stop: asyncio.Event) -> None:
    """Return when the server has ended or `stop` is set."""
    waits = [asyncio.create_task(server.wait_ended()), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
