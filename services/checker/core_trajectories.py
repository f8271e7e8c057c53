"""Rules of trajectories: each try ends once, and its end counts all of its turns, which are whole. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from messages.agent import TurnFinished
from messages.pipeline_scheduler import TrajectoryCompleted
from services.checker.core_report import Expected, Found, Try

ENDED: Final = ("stop", "length")


def unique_ends(found: Found, ends: Iterable[TrajectoryCompleted]) -> dict[Try, TrajectoryCompleted]:
    """The end of each try, the first where there are several: then the rule "ended_twice" is broken."""
    by_try: dict[Try, TrajectoryCompleted] = {}
    for end in ends:
        key = (end.trajectory, end.retry)
        if key in by_try:
            found.again("ended_twice", f"{end.trajectory} try {end.retry} ended more than once")
        by_try.setdefault(key, end)
    return by_try


def check_turns(found: Found, turns: Sequence[tuple[int, TurnFinished]]) -> None:
    """One record a turn, in order, and each whole in itself."""
    seen: set[tuple[str, int, int]] = set()
    requests: set[str] = set()
    for seq, turn in turns:
        where = f"{turn.trajectory} try {turn.retry} turn {turn.turn} (journal {seq})"
        key = (turn.trajectory, turn.retry, turn.turn)
        if key in seen:
            found.again("turn_twice", f"{where}: a second record of this turn")
        elif turn.request in requests:
            found.again("reply_twice", f"{where}: request {turn.request} was delivered before")
        seen.add(key)
        requests.add(turn.request)
        if turn.finish not in ENDED:
            found.add("turn_unfinished", f"{where}: finish is {turn.finish!r}")
        if len(turn.logprobs) != len(turn.reply):
            found.add("turn_torn", f"{where}: {len(turn.reply)} tokens, {len(turn.logprobs)} log-probabilities")
        reached = 0
        for span in turn.spans:
            if span.start != reached or span.end <= span.start:
                break
            reached = span.end
        if reached != len(turn.reply):
            found.add("spans_torn", f"{where}: versions are known for {reached} of {len(turn.reply)} tokens in a row")


def check_ends(
    found: Found, expected: Expected, by_try: dict[Try, TrajectoryCompleted], turns: dict[int, TurnFinished]
) -> None:
    """Each end refers to all turns of its try, in order, and sums them up truthfully."""
    owners: dict[int, Try] = {}
    of_try: dict[Try, set[int]] = defaultdict(set)
    for seq, turn in turns.items():
        of_try[turn.trajectory, turn.retry].add(seq)
    for key, end in by_try.items():
        where = f"end of {end.trajectory} try {end.retry}"
        for seq in end.journal:
            if owners.setdefault(seq, key) != key:
                found.again("turn_shared", f"{where}: journal {seq} belongs to {owners[seq]}")
        if len(end.journal) != end.turns:
            found.add("end_wrong", f"{where}: {end.turns} turns, {len(end.journal)} journal entries")
        if any(seq < expected.journal_from for seq in end.journal):
            continue  # purged
        records = [turns.get(seq) for seq in end.journal]
        if any(record is None for record in records):
            missing = [seq for seq in end.journal if seq not in turns]
            found.lost.add(end.trajectory)
            found.add("journal_missing", f"{where}: no turns at {missing}")
            continue
        held = [record for record in records if record is not None]
        stray = of_try[key] - set(end.journal)
        # A failed try may end without the turns of an agent that died before.
        if stray and end.status != "failed":
            found.add("turn_stray", f"{where}: does not count its turns at {sorted(stray)}")
        if any((record.trajectory, record.retry) != key for record in held):
            found.add("journal_wrong", f"{where}: refers to another trajectory's turns")
        elif [record.turn for record in held] != list(range(len(held))):
            found.add("turns_unordered", f"{where}: turns are {[record.turn for record in held]}")
        if sum(len(record.reply) for record in held) != end.generated_tokens:
            found.add("end_wrong", f"{where}: its turns have not {end.generated_tokens} tokens")
        versions = [span.version for record in held for span in record.spans]
        if versions and (min(versions), max(versions)) != (end.min_version, end.max_version):
            found.add(
                "end_wrong",
                f"{where}: versions {min(versions)} to {max(versions)}, it says {end.min_version} to {end.max_version}",
            )
