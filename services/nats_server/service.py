"""`pearl service nats_server`: the server of a job, or one of its cluster, with its streams and buckets, until told to stop.

Drives nothing and decides nothing. `pearl up` and `pearl demo` start a single server themselves; this is for nodes on
which someone else supervises processes, and for a cluster, where each node runs one server with its `--index`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from services.jobfile import ConfigError, JobFile
from services.nats_server.process import EmbeddedServer, Running
from services.runtime.bus import BusError
from services.runtime.log import Logger, get_logger

PREPARE_AGAIN_S: Final = 2.0
"""Between attempts at creating streams, for which a cluster needs as many servers as there are replicas."""


async def serve(job: JobFile, stop: asyncio.Event, index: int = 0) -> None:
    """Run the server and start it again when it dies. `index` counts in `nats.cluster`, if there is one.

    Raises ConfigError, ServerError, and for a single server BusError.
    """
    if not job.nats.embedded:
        raise ConfigError("nats.embedded = false: this job uses the server at nats.url, there is none to run")
    if job.nats.cluster and not 0 <= index < len(job.nats.cluster):
        raise ConfigError(f"--index {index}: nats.cluster has servers 0 to {len(job.nats.cluster) - 1}")
    log = get_logger("nats_server")
    server = EmbeddedServer(job, index if job.nats.cluster else None)
    preparing: asyncio.Task[None] | None = None
    try:
        while not stop.is_set():
            running = await server.start()
            if job.nats.local:
                await server.prepare()
            elif preparing is None:
                # Not waited for: the others may be down, and this server must run for them to come up.
                preparing = asyncio.create_task(_prepare(server, log), name="prepare")
            _say(log, running)
            await _first(server, stop)
    finally:
        if preparing is not None:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
        await server.stop()


def _say(log: Logger, running: Running) -> None:
    log.info(f"serving at {running.url}", action="nats_serving", pid=running.pid)


async def _prepare(server: EmbeddedServer, log: Logger) -> None:
    """Until every stream and bucket is there."""
    while True:
        try:
            await server.prepare()
            log.info("streams and buckets are there", action="nats_prepared")
            return
        except BusError as error:
            log.warning(f"streams and buckets cannot be created yet: {error}", action="nats_unprepared")
        await asyncio.sleep(PREPARE_AGAIN_S)


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
