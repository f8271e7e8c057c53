"""`pearl tap`: live messages of a job, decoded."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import re
import sys
from typing import Final

import msgspec

import messages
from messages.envelope import UndecodableMessage, decode, kind_of
from services.cli.runs import connect_running, job_of
from services.jobfile import ConfigError, JobFile
from services.runtime.bus import Delivery

FILTER: Final = re.compile(r"(?:(?:[^\s.*>]+|\*)\.)*(?:[^\s.*>]+|[*>])")
"""What NATS takes for a subject filter."""


def run(arguments: argparse.Namespace) -> int:
    """Prints until Ctrl-C, or `--count` messages."""
    job = job_of(arguments)
    prefix = f"pearl.{job.job.name}."
    pattern = arguments.pattern if arguments.pattern.startswith("pearl.") else prefix + arguments.pattern
    if not pattern.startswith(prefix) or not FILTER.fullmatch(pattern):
        raise ConfigError(
            f"{arguments.pattern!r} is no subject of job {job.job.name}: give words with dots between, '*' for any word, "
            "'>' at the end for the rest, such as 'ev.>'"
        )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_tap(job, pattern, arguments.count, arguments.json))
    return 0


async def _tap(job: JobFile, pattern: str, count: int | None, as_json: bool) -> None:
    bus = await connect_running(job, "monitor")
    prefix = f"pearl.{job.job.name}."
    subscription = await bus.subscribe(pattern)
    seen = 0
    try:
        async for delivery in subscription:
            line = msgspec.json.encode(describe(delivery)) if as_json else _text(delivery, prefix)
            sys.stdout.write((line.decode() if isinstance(line, bytes) else line) + "\n")
            sys.stdout.flush()
            seen += 1
            if count is not None and seen >= count:
                return
    finally:
        await subscription.stop()
        await bus.close()


def describe(delivery: Delivery) -> dict[str, object]:
    """Subject and decoded body of a message; an undecodable one with the reason and its bytes."""
    try:
        kind = kind_of(delivery.data)
        cls = messages.envelope.registry().get(kind)
        body: object = msgspec.json.decode(delivery.data) if cls is None else decode(delivery.data, cls)
        return {"subject": delivery.subject, "at_ms": delivery.at_ms, "message": body}
    except (UndecodableMessage, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        data = base64.b64encode(delivery.data[:256]).decode()
        return {"subject": delivery.subject, "at_ms": delivery.at_ms, "undecodable": str(error), "data": data}


def _text(delivery: Delivery, prefix: str) -> str:
    described = describe(delivery)
    body = described.get("message", described.get("undecodable"))
    fields = msgspec.json.encode(body).decode() if not isinstance(body, str) else body
    return f"{delivery.subject.removeprefix(prefix):40} {fields if len(fields) <= 400 else fields[:400] + ' ...'}"
