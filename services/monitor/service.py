"""The decision log: every decision record of the job, one JSON object a line, in `<run>/decisions.jsonl`.

Owns: that file. Publishes nothing. Restarts where the file ends: a record is appended once. Some events are for people only
(`UNHEARD`): one that cannot be read is no service's to dead-letter, so it is logged here.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from messages.envelope import Message, UndecodableMessage, decode, encode
from messages.monitor import DecisionRecord, GpusReturned, StoreRewound
from messages.orchestrator import GpuFree
from messages.pipeline_scheduler import BatchReady, Evaluated
from messages.subjects import decode_on, event_subject, stream
from services.connect import connect
from services.jobfile import JobFile
from services.runtime.follow import Follower
from services.runtime.log import get_logger

POLL_S = 1.0
UNHEARD: tuple[type[Message], ...] = (DecisionRecord, Evaluated, GpuFree, BatchReady, GpusReturned, StoreRewound)
"""Events that no service consumes (the trainer reads a batch when it is told to train it)."""


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Append records until `stop`."""
    bus = await connect(job, "monitor")
    path = job.run_dir / "decisions.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = _written(path.read_bytes()) if path.exists() else set[str]()
    name, logger = job.job.name, get_logger("monitor")
    events = {kind: Follower(bus, stream(name, "ev"), event_subject(name, kind)) for kind in UNHEARD}
    try:
        while not stop.is_set():
            with path.open("ab") as log:
                for kind in UNHEARD:
                    async for delivery in events[kind].more():
                        try:
                            record = decode_on(name, delivery.subject, delivery.data, kind)
                        except UndecodableMessage as error:
                            text = f"unreadable event on {delivery.subject}: {error.reason}"
                            logger.warning(text, action="unreadable", seq=delivery.seq)
                            continue
                        if isinstance(record, DecisionRecord) and record.decision_id not in written:
                            log.write(encode(record) + b"\n")
                            written.add(record.decision_id)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), POLL_S)
    finally:
        await bus.close()


def _written(data: bytes) -> set[str]:
    """Ids already in the log; a torn last line (the process was killed in it) is not counted."""
    found: set[str] = set()
    for line in data.splitlines():
        with contextlib.suppress(msgspec.MsgspecError, UndecodableMessage):
            found.add(decode(line, DecisionRecord).decision_id)
    return found
