"""Rules of requests: each attempt starts where the client's prefix ended, and no token that arrived is made again. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from messages.agent import PLAIN, AttemptLogged, RequestInterrupted, TurnFinished
from messages.pipeline_scheduler import TrajectoryCompleted
from services.checker.core_report import Expected, Found, Try


class _Attempt(msgspec.Struct):
    """What a worker wrote about one attempt. `generated` and `finish` are None until it ended."""

    worker: str
    start: int
    generated: int | None = None


def _attempts(found: Found, logged: Iterable[AttemptLogged]) -> dict[tuple[str, int], list[_Attempt]]:
    """Attempts by request and number; more than one where two workers ran the same."""
    runs: dict[tuple[str, int, str, int], _Attempt] = {}
    for entry in logged:
        key = (entry.request, entry.attempt, entry.worker, entry.incarnation)
        attempt = runs.setdefault(key, _Attempt(entry.worker, entry.start_offset))
        if attempt.start != entry.start_offset:
            found.add("log_torn", f"{entry.request} attempt {entry.attempt}: {entry.worker} began it at two offsets")
        if entry.finish:
            attempt.generated = entry.generated
    by_attempt: dict[tuple[str, int], list[_Attempt]] = defaultdict(list)
    for (request, number, _, _), attempt in runs.items():
        by_attempt[request, number].append(attempt)
    return by_attempt


def check_requests(
    found: Found,
    expected: Expected,
    turns: Sequence[TurnFinished],
    interruptions: Sequence[RequestInterrupted],
    logged: Sequence[AttemptLogged],
    by_try: dict[Try, TrajectoryCompleted],
) -> None:
    """Each attempt starts where the client's prefix ended, and the client has what the workers made."""
    runs = _attempts(found, logged)
    cut: dict[str, list[RequestInterrupted]] = defaultdict(list)
    for record in interruptions:
        cut[record.request].append(record)
    finished: dict[str, TurnFinished] = {turn.request: turn for turn in turns}
    numbers: dict[str, set[int]] = defaultdict(set)
    for request, number in runs:
        numbers[request].add(number)
    ended = {trajectory for trajectory, _ in by_try}
    for request in sorted({*cut, *finished, *numbers}):
        chain = sorted(cut[request], key=lambda record: record.attempt)
        # Of agents' and sessions' requests all or nothing is purged: their records are written on the condition that the last is there.
        partly_gone = expected.journal_from > 1 and request.startswith(PLAIN)
        received = _check_chain(found, request, chain, partly_gone)
        turn = finished.get(request)
        if turn is not None and len(turn.reply) < received:
            found.add("prefix_lost", f"{request}: {received} tokens had reached the client, {len(turn.reply)} are kept")
        if not expected.attempts_logged:
            continue
        if expected.rewound and turn is None:
            # Its later records may be among what the broker lost. (Those of a finished turn are all there: one stream, in order.)
            found.redone += sum(run.generated or 0 for number in numbers[request] for run in runs[request, number])
            continue
        known = bool(chain) or turn is not None
        purged = not known and expected.journal_from > 1
        if not purged:
            _check_starts(found, request, chain, turn, numbers[request], runs)
        if turn is None and not purged and request.split("/", 1)[0] in ended:
            found.lost_with_edge += _left(chain, numbers[request], request, runs)


def _check_chain(found: Found, request: str, chain: Sequence[RequestInterrupted], partly_gone: bool) -> int:
    """Interruptions follow on one another. Returns the tokens that had arrived after the last. `partly_gone`: the first may be purged."""
    received = last = 0
    if partly_gone and chain and chain[0].attempt > 1:
        received = chain[0].prefix_len
    for record in chain:
        where = f"{request} attempt {record.attempt}"
        if record.attempt == last:
            found.again("interrupted_twice", f"{where}: interrupted more than once")
            continue
        last = record.attempt
        if record.prefix_len < received:
            found.regenerated += received - record.prefix_len
            found.add("regenerated", f"{where}: asked from {record.prefix_len}, {received} tokens had arrived")
        elif record.prefix_len > received:
            found.add("prefix_gap", f"{where}: asked from {record.prefix_len}, only {received} tokens had arrived")
        received = record.prefix_len + record.received
    return received


def _check_starts(
    found: Found,
    request: str,
    chain: Sequence[RequestInterrupted],
    turn: TurnFinished | None,
    numbers: set[int],
    runs: dict[tuple[str, int], list[_Attempt]],
) -> None:
    """What workers logged about a request against what its client journalled."""
    cut = {record.attempt: record for record in chain}
    for number in sorted(numbers | set(cut)):
        where = f"{request} attempt {number}"
        record = cut.get(number)
        prefix = (
            record.prefix_len
            if record is not None
            else max((other.prefix_len + other.received for other in chain if other.attempt < number), default=0)
        )
        attempts = runs.get((request, number), [])
        if len(attempts) > 1:
            found.again("attempt_twice", f"{where}: ran on {', '.join(sorted(run.worker for run in attempts))}")
        for run in attempts:
            if run.start < prefix:
                found.regenerated += prefix - run.start
                found.add("regenerated", f"{where}: {run.worker} began at {run.start}, the client had {prefix} tokens")
            elif run.start > prefix:
                found.add("start_gap", f"{where}: {run.worker} began at {run.start}, the client had {prefix} tokens")
        arrived = _arrived(record, turn, number, prefix)
        if not arrived:
            found.undelivered += sum(run.generated or 0 for run in attempts) if record is not None else 0
            continue
        if not attempts:
            found.add("unlogged", f"{where}: {arrived} tokens arrived of an attempt that no worker logged")
            continue
        made = [run.generated for run in attempts if run.generated is not None]
        if made and max(made) < arrived:
            found.add("invented", f"{where}: {arrived} tokens arrived, the worker made {max(made)}")
        elif made:
            extra = max(made) - arrived
            if record is None and extra:
                found.add("reply_short", f"{where}: the worker made {max(made)} tokens to the end, {arrived} are kept")
            found.undelivered += extra


def _arrived(record: RequestInterrupted | None, turn: TurnFinished | None, number: int, prefix: int) -> int:
    """Reply tokens of this attempt that its client journalled."""
    if record is not None:
        return record.received
    return len(turn.reply) - prefix if turn is not None and number == turn.attempts else 0


def _left(
    chain: Sequence[RequestInterrupted],
    numbers: set[int],
    request: str,
    runs: dict[tuple[str, int], list[_Attempt]],
) -> int:
    """Tokens of a request whose client ended before the turn did."""
    interrupted = {record.attempt for record in chain}
    received = sum(record.received for record in chain)
    return received + sum(
        run.generated or 0 for number in numbers - interrupted for run in runs.get((request, number), [])
    )
