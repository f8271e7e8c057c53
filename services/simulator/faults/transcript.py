"""A run in words: what was seen and what services said of it, a line each, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import msgspec

from messages.envelope import Message, tag_of
from messages.ids import Activity
from pearl_state.model import RoleTable
from services.simulator.faults.loop import START_S
from services.simulator.faults.record import (
    ActorBegan,
    ActorEnded,
    Arrived,
    Assigned,
    AttemptBegan,
    FaultBegan,
    FaultEnded,
    FaultsStopped,
    Generated,
    MemoryHeld,
    ProcessBegan,
    ProcessEnded,
    Received,
    RunEnded,
    Seen,
    Sent,
    Stored,
    TableSeen,
    TableWritten,
    Violation,
)

START_MS = round(START_S * 1000)
DULL = frozenset(
    {"job", "kind", "manifest_sha256", "uri", "logprobs", "reply", "prompt", "prompt_new", "endpoint", "pid"}
)
"""Fields that say nothing to a reader."""
LONGEST = 220

Line = tuple[int, str, str, str]
"""At, actor, action, text: a service's log line."""


def transcript(
    record: Iterable[Seen], lines: Iterable[Line] = (), violations: Iterable[Violation] = (), *, tokens: bool = False
) -> Iterator[str]:
    """In order of time; times are milliseconds since the start. `tokens`: each chunk of tokens and each assignment too."""
    entries: list[tuple[int, int, str]] = [(seen.at_ms, 0, text) for seen, text in _told(record, tokens=tokens) if text]
    entries += [(at_ms, 1, f"  {actor}: {text}") for at_ms, actor, action, text in lines if action != "host.run"]
    entries += [(each.at_ms, 2, f"!! {each.invariant}: {each.detail}") for each in violations]
    entries.sort(key=lambda entry: entry[:2])
    for at_ms, _, text in entries:
        yield f"{at_ms - START_MS:>7} {text if len(text) <= LONGEST else text[:LONGEST] + ' ...'}"


def _told(record: Iterable[Seen], *, tokens: bool) -> Iterator[tuple[Seen, str]]:
    table: RoleTable | None = None
    for seen in record:
        if isinstance(seen, TableWritten):
            yield seen, _change(seen, table)
            table = seen.table
        else:
            yield seen, _line(seen, tokens)


def _line(seen: Seen, tokens: bool) -> str:
    match seen:
        case Stored():
            return f"{seen.sender} says {_message(seen.message)}"
        case Sent():
            return f"{seen.sender} sends {_message(seen.message)}" if tokens or not _is_request(seen.message) else ""
        case Arrived():
            return f"{seen.receiver} gets {_message(seen.message)}" if tokens or not _is_request(seen.message) else ""
        case FaultBegan():
            return f"** fault {seen.number}: {seen.detail}"
        case FaultEnded():
            return f"** fault {seen.number} is over"
        case FaultsStopped():
            return "** no more faults"
        case ActorBegan():
            return f"{seen.actor} starts (life {seen.life})"
        case ActorEnded():
            return f"{seen.actor} is dead"
        case ProcessBegan():
            return f"{seen.node}: {seen.service} {seen.worker} #{seen.incarnation} starts on GPUs {list(seen.gpus)}"
        case ProcessEnded():
            return f"{seen.node}: {seen.worker} #{seen.incarnation} ends"
        case MemoryHeld():
            return f"{seen.worker} #{seen.incarnation} {'takes' if seen.held else 'holds no'} device memory"
        case RunEnded():
            return "the run ends" if seen.finished else "the run is stopped, with work left"
        case AttemptBegan() | Generated() | Received() | Assigned() | TableSeen():
            return _struct(seen) if tokens else ""
        case TableWritten():
            raise AssertionError("told by what changed")


def _is_request(message: Message) -> bool:
    return tag_of(type(message)).startswith("request.")


def _change(written: TableWritten, before: RoleTable | None) -> str:
    """What an epoch changed."""
    table = written.table
    parts: list[str] = []
    rows = {} if before is None else before.by_worker
    for row in table.rows:
        old = rows.get(row.worker)
        if old == row:
            continue
        stage = "" if row.stage == "none" else f"/{row.stage}"
        role = "" if row.activity is Activity.INACTIVE else f" {row.role}"
        parts.append(
            f"{row.worker} {row.activity}{stage}{role} #{row.incarnation} g{row.role_generation} v{row.version}"
        )
    pairs = {} if before is None else {pair.overlap: pair for pair in before.pairs}
    for pair in table.pairs:
        old_pair = pairs.get(pair.overlap)
        if old_pair is None or old_pair.residency is not pair.residency:
            parts.append(f"{pair.overlap}'s GPUs: {pair.residency}")
    plan, old_plan = table.plan, None if before is None else before.plan
    if plan is not None and (old_plan is None or (plan.plan_id, plan.stage) != (old_plan.plan_id, old_plan.stage)):
        parts.append(f"plan {plan.plan_id} {plan.stage}")
    if plan is None and old_plan is not None:
        parts.append(f"plan {old_plan.plan_id} is over")
    if before is None or table.training_batch != before.training_batch:
        parts.append(f"training batch {table.training_batch}")
    if before is not None and table.policy_version != before.policy_version:
        parts.append(f"version {table.policy_version}")
    return f"== {written.writer} writes epoch {table.epoch}: {'; '.join(parts) or 'bookkeeping'}"


def _message(message: Message) -> str:
    return f"{tag_of(type(message)).partition('/')[0]} {_fields(message)}"


def _struct(seen: Seen) -> str:
    return f"{type(seen).__name__} {_fields(seen)}"


def _fields(struct: msgspec.Struct) -> str:
    named = [(name, getattr(struct, name)) for name in struct.__struct_fields__ if name not in DULL and name != "at_ms"]
    return " ".join(f"{name}={_value(value)}" for name, value in named if value not in ("", (), 0, 0.0, None, {}))


def _value(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return "(" + _fields(value) + ")"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_value(each) for each in cast("tuple[object, ...]", value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
