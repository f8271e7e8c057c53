"""Rules of batches and train steps: whole groups, each trained once and in order, no token too stale. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from messages.agent import TurnFinished
from messages.pipeline_scheduler import BatchItem, BatchReady, StepFinished, TrajectoryCompleted
from services.checker.core_report import Expected, Found, Try

CLOCKS_APART_MS: Final = 60_000
"""Streams may have leaders on several machines: only moments further apart than this are told in order."""


def unique_batches(found: Found, batches: Iterable[BatchReady]) -> dict[int, BatchReady]:
    """Each batch by its number, the first where they differ: then the rule "batch_twice" is broken."""
    by_batch: dict[int, BatchReady] = {}
    for batch in batches:
        known = by_batch.setdefault(batch.batch, batch)
        if known != batch:  # the same message once more, after a restart, is harmless
            found.again("batch_twice", f"batch {batch.batch} was made ready with two contents")
    return by_batch


def check_batches(
    found: Found,
    expected: Expected,
    by_batch: dict[int, BatchReady],
    by_try: dict[Try, TrajectoryCompleted],
    stored_ms: Mapping[int, int],
) -> None:
    """Exactly its groups of exactly their size; each item one trajectory that ended, and no other batch's.

    `stored_ms`: when each turn of the journal was stored, by sequence.
    """
    unseen: list[str] = []
    batch_of: dict[str, int] = {}
    groups_of: dict[str, int] = {}
    for number in sorted(by_batch):
        batch = by_batch[number]
        sizes: dict[str, int] = defaultdict(int)
        for item in batch.items:
            sizes[item.group] += 1
            if item.trajectory in batch_of:
                found.again("counted_twice", f"{item.trajectory} is in batch {batch_of[item.trajectory]} and {number}")
            batch_of[item.trajectory] = number
            _check_item(found, expected, number, item, by_try, stored_ms, unseen)
        wrong = {group: size for group, size in sizes.items() if size != expected.group_size}
        if wrong:
            found.add("group_size", f"batch {number}: groups of other size than {expected.group_size}: {wrong}")
        if len(batch.items) != expected.batch_trajectories:
            found.add("batch_size", f"batch {number}: {len(batch.items)} of {expected.batch_trajectories} trajectories")
        for group in sizes:
            if groups_of.setdefault(group, number) != number:
                found.again("group_twice", f"group {group} is in batch {groups_of[group]} and {number}")
    found.unseen = min(len(unseen), expected.events_gone)
    if certain := unseen[found.unseen :]:
        found.lost.update(certain)  # as many as these; which of all, nobody can tell
        found.add(
            "end_missing",
            f"{len(unseen)} trajectories up to batch {expected.whole_from - 1} have no end, and {expected.events_gone} events "
            f"were trimmed: at least {len(certain)} never ended",
        )


def _check_item(
    found: Found,
    expected: Expected,
    number: int,
    item: BatchItem,
    by_try: dict[Try, TrajectoryCompleted],
    stored_ms: Mapping[int, int],
    unseen: list[str],
) -> None:
    tries = [end for (trajectory, _), end in by_try.items() if trajectory == item.trajectory]
    last_turn_ms = stored_ms.get(max(item.journal, default=0), 0)
    trimmed = number < expected.whole_from and last_turn_ms <= expected.events_from_ms + CLOCKS_APART_MS
    if not tries and trimmed:
        unseen.append(item.trajectory)
        return
    if not tries:
        found.lost.add(item.trajectory)
        found.add("end_missing", f"batch {number}: {item.trajectory} never ended")
        return
    if not any(
        (end.batch, end.group, end.status, end.reward, end.journal)
        == (number, item.group, item.status, item.reward, item.journal)
        for end in tries
    ):
        found.add("item_wrong", f"batch {number}: no end of {item.trajectory} is what the batch says")
    elif item.status == "failed":
        found.add("item_failed", f"batch {number}: {item.trajectory} failed")


def check_steps(
    found: Found, expected: Expected, steps: Iterable[StepFinished], by_batch: dict[int, BatchReady]
) -> None:
    """Batches are trained once each, in order, each ready before. What the broker lost of them is counted."""
    # None: the first that is left may be any
    due = 0 if not expected.whole_from and not expected.unjudged else None
    ready_from = min(by_batch, default=expected.whole_from) if expected.whole_from else 0
    seen: dict[int, StepFinished] = {}
    for step in steps:
        if step.batch in seen:
            if seen[step.batch] != step:  # the same message once more, after a restart, is harmless
                found.again("trained_twice", f"batch {step.batch} was trained more than once")
            continue
        seen[step.batch] = step
        if due is None:
            pass
        elif expected.rewound and step.batch > due:
            found.forgotten += step.batch - due
        elif step.batch != due:
            found.add("trained_unordered", f"batch {step.batch} was trained when {due} was due")
        due = step.batch + 1
        if step.version != step.batch + 1:
            found.add("version_wrong", f"batch {step.batch} made version {step.version}")
        if step.batch < min(ready_from, expected.whole_from):
            continue  # it was ready before what is left begins
        if step.batch not in by_batch and expected.rewound:
            found.forgotten += 1
        elif step.batch not in by_batch:
            found.add("trained_unready", f"batch {step.batch} was trained and never ready")


def check_left_behind(
    found: Found,
    by_batch: dict[int, BatchReady],
    by_try: dict[Try, TrajectoryCompleted],
    turns: Sequence[TurnFinished],
) -> None:
    """Of a group that a batch consists of, no member is missing from it, whether it ended or only began."""
    members = {item.trajectory for batch in by_batch.values() for item in batch.items}
    groups = {item.group for batch in by_batch.values() for item in batch.items}
    begun = [(end.trajectory, end.group) for end in by_try.values()] + [(turn.trajectory, turn.group) for turn in turns]
    for trajectory, group in sorted(set(begun)):
        if group in groups and trajectory not in members:
            found.lost.add(trajectory)
            found.add("left_behind", f"{trajectory} ran, its group {group} was trained without it")


def check_staleness(
    found: Found,
    expected: Expected,
    by_batch: dict[int, BatchReady],
    by_try: dict[Try, TrajectoryCompleted],
    turns: Sequence[TurnFinished],
) -> None:
    """Every token of batch k is of a version from k - staleness to k."""
    counted: dict[Try, int] = {}
    for number, batch in by_batch.items():
        items = {(item.trajectory, item.journal) for item in batch.items}
        counted.update({key: number for key, end in by_try.items() if (end.trajectory, end.journal) in items})
    versions: dict[Try, set[int]] = defaultdict(set)
    for key in counted:
        end = by_try[key]
        if end.generated_tokens:
            versions[key] |= {end.min_version, end.max_version}
    for turn in turns:
        key = (turn.trajectory, turn.retry)
        if key in counted:
            versions[key] |= {int(span.version) for span in turn.spans}
    for key in sorted(versions):
        number = counted[key]
        found.staleness_max = max(found.staleness_max, number - min(versions[key]))
        if min(versions[key]) < number - expected.staleness:
            found.add("too_stale", f"{key[0]} of batch {number} has tokens of version {min(versions[key])}")
        if max(versions[key]) > number:
            found.add("too_new", f"{key[0]} of batch {number} has tokens of version {max(versions[key])}")
