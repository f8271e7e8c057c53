"""The decision log: every decision record of the job, one JSON object a line, in `<run>/decisions.jsonl`.

Owns: that file. Publishes nothing. Restarts where the file ends: a record is appended once.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from messages.envelope import UndecodableMessage, decode, encode
from messages.monitor import DecisionRecord
from messages.subjects import event_subject, stream
from services.connect import connect
from services.jobfile import JobFile

POLL_S = 1.0


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Append records until `stop`."""
    bus = await connect(job, "monitor")
    path = job.run_dir / "decisions.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = _written(path.read_bytes()) if path.exists() else set[str]()
    seen = 0
    try:
        while not stop.is_set():
            with path.open("ab") as log:
                async for delivery in bus.read(
                    stream(job.job.name, "ev"), event_subject(job.job.name, DecisionRecord), first_seq=seen + 1
                ):
                    seen = delivery.seq
                    with contextlib.suppress(UndecodableMessage):
                        record = decode(delivery.data, DecisionRecord)
                        if record.decision_id not in written:
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
