"""Gather what a run wrote down: its streams, and its workers' attempt logs below `<run_dir>/attempts/`.

Reads only. What is read later may tell of more than what was read before, never of less: batches, then ends, then the
journal, then the workers' logs. So a run can be checked while it goes on.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from messages.agent import AttemptLogged, RequestInterrupted, TurnFinished
from messages.envelope import MAX_MESSAGE_BYTES, Message, UndecodableMessage, decode
from messages.monitor import DeadLetter, StoreRewound
from messages.pipeline_scheduler import BatchReady, StepFinished, TrajectoryCompleted
from messages.subjects import decode_on, event_subject, stream
from services.checker.core import check as judge
from services.checker.core_batches import CLOCKS_APART_MS
from services.checker.core_doubt import without_doubtful
from services.checker.core_report import Expected, Journalled, Report, Trimmed, Violation
from services.jobfile import JobFile
from services.runtime.bus import Bus, Delivery

LENGTH = struct.Struct(">I")
"""Before each frame of an attempt log: its length in bytes, big-endian."""

JUDGE = "pipeline_scheduler"
"""It decides which ends and train steps count."""
STRAYS_NAMED = 20
"""Messages that are no record of the run, named in the report; all are counted."""

M = TypeVar("M", bound=Message)


class TornLogError(ValueError):
    """An attempt log that is broken other than at its end; the message says where."""


async def check(bus: Bus, job: JobFile) -> Report:
    """Check a job's run as far as it has come. Raises BusError, OSError.

    What cannot be read, or was refused by the one it was for, is no record of the run: it is counted, and whatever should
    have been there in its place is missing. Only a broken attempt log is a violation by itself.
    """
    unread: list[Violation] = []
    strays: list[str] = []
    name = job.job.name
    ev, kept, dead = stream(name, "ev"), stream(name, "journal"), stream(name, "dead")
    refused = await refused_events(bus, name, JUDGE)
    # Looked at after the letters were read: what is trimmed on the way is in doubt.
    letters = await _trimmed(bus, dead, f"pearl.{name}.dead.*")
    doubtful_to_ms = 0
    if letters is not None:
        doubtful_to_ms = (letters.from_ms or (await bus.bounds(dead)).last_ms) + CLOCKS_APART_MS

    async def events(kind: type[M]) -> list[tuple[Delivery, M]]:
        found = [found async for found in _messages(bus, name, ev, event_subject(name, kind), strays, kind)]
        strays.extend(f"{ev} {each.seq}: refused" for each, _ in found if each.seq in refused)
        return [(each, message) for each, message in found if each.seq not in refused]

    rewound = await events(StoreRewound)
    batches = [message for _, message in await events(BatchReady)]
    all_steps, all_ends = await events(StepFinished), await events(TrajectoryCompleted)
    steps = [(each, step) for each, step in all_steps if each.at_ms > doubtful_to_ms]
    ends = without_doubtful(
        [end for each, end in all_ends if each.at_ms <= doubtful_to_ms],
        [end for each, end in all_ends if each.at_ms > doubtful_to_ms],
        batches,
    )
    # Looked at last: what is trimmed on the way is not held against the run.
    events_gone = await _trimmed(bus, ev, f"pearl.{name}.ev.>")
    whole_from = 0
    if events_gone is not None:
        # Batch k was admitted after batch k - staleness - 1 was trained: with that train step, all of it is there.
        left = [step.batch for each, step in steps if each.seq > events_gone.gone]
        whole_from = min(left) + 1 + job.pipeline.staleness if left else sys.maxsize
    journal = [
        Journalled(each.seq, record, each.at_ms)
        async for each, record in _messages(
            bus, name, kept, f"pearl.{name}.journal.*", strays, TurnFinished, RequestInterrupted
        )
    ]
    attempts, files = read_attempt_logs(job.run_dir / "attempts", unread)
    journal_from = 1
    if not job.pipeline.keep_journal:
        # Purged from below, or to its end.
        journal_from = journal[0].seq if journal else (await bus.bounds(kept)).gone + 1
    report = judge(
        Expected(
            batch_trajectories=job.pipeline.batch_trajectories,
            group_size=job.pipeline.group_size,
            staleness=job.pipeline.staleness,
            journal_from=journal_from,
            whole_from=whole_from,
            unjudged=len(all_steps) - len(steps) + len(all_ends) - len(ends),
            events_gone=0 if events_gone is None else events_gone.gone,
            events_from_ms=0 if events_gone is None else events_gone.from_ms,
            rewound=len(rewound),
            attempts_logged=files > 0,
        ),
        journal=journal,
        attempts=attempts,
        ends=ends,
        batches=batches,
        steps=[step for _, step in steps],
    )
    ready = {batch.batch for batch in batches}
    trained = {step.batch for _, step in steps} | {step.batch for _, step in all_steps if step.batch in ready}
    trimmed = [
        events_gone,
        await _trimmed(bus, kept, f"pearl.{name}.journal.*"),
        letters,
    ]
    return msgspec.structs.replace(
        report,
        trained=len(trained),
        strays=len(strays),
        stray=tuple(strays[:STRAYS_NAMED]),
        trimmed=tuple(each for each in trimmed if each is not None),
        violations=(*unread, *report.violations),
    )


async def _trimmed(bus: Bus, name: str, subject: str) -> Trimmed | None:
    """What a stream has lost at its beginning, or None. One with nothing left is not one that was never used."""
    async for oldest in bus.read(name, subject):
        return Trimmed(stream=name, gone=oldest.seq - 1, from_ms=oldest.at_ms) if oldest.seq > 1 else None
    bounds = await bus.bounds(name)
    return Trimmed(stream=name, gone=bounds.gone) if bounds.gone else None


def read_attempt_logs(folder: Path, unread: list[Violation]) -> tuple[list[AttemptLogged], int]:
    """All entries of all logs, each log in order, and how many logs there are. Broken logs go to `unread`."""
    entries: list[AttemptLogged] = []
    files = sorted(folder.glob("*.msgpack"))
    for path in files:
        try:
            entries.extend(frames(path.read_bytes()))
        except TornLogError as error:
            unread.append(Violation("log_unreadable", f"{path}: {error}"))
    return entries, len(files)


def frames(data: bytes) -> Iterator[AttemptLogged]:
    """Entries of one log. A last frame that is not all there is left out: its worker died writing it. Raises TornLogError."""
    at = 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        if length > MAX_MESSAGE_BYTES:
            raise TornLogError(f"byte {at}: a frame of {length} bytes")
        begin, at = at + LENGTH.size, at + LENGTH.size + length
        if at > len(data):
            return
        try:
            yield decode(data[begin:at], AttemptLogged)
        except UndecodableMessage as error:
            raise TornLogError(f"byte {begin}: {error.reason}") from error


async def refused_events(bus: Bus, name: str, receiver: str = "*") -> set[int]:
    """Sequences in the event stream of what a receiver (by default any) refused. Raises BusError."""
    found: set[int] = set()
    async for delivery in bus.read(stream(name, "dead"), f"pearl.{name}.dead.{receiver}"):
        with contextlib.suppress(UndecodableMessage):
            letter = decode_on(name, delivery.subject, delivery.data, DeadLetter)
            if letter.seq and letter.subject.startswith(f"pearl.{name}.ev."):
                found.add(letter.seq)
    return found


async def _messages(
    bus: Bus, name: str, stream_name: str, subject: str, strays: list[str], *kinds: type[M]
) -> AsyncIterator[tuple[Delivery, M]]:
    async for delivery in bus.read(stream_name, subject):
        try:
            yield delivery, decode_on(name, delivery.subject, delivery.data, *kinds)
        except UndecodableMessage as error:
            strays.append(f"{stream_name} {delivery.seq} on {delivery.subject}: {error.reason}")
