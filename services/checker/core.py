"""What a run must satisfy, judged from its records alone (docs/protocol.md, last section; DESIGN 7 and 11). Pure.

Written apart from what it checks: it shares the wire types with it and nothing else. Each rule looks for one way in
which a trajectory can be lost or counted twice, a token be made twice, or a batch be too stale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from messages.agent import AttemptLogged, RequestInterrupted, TurnFinished
from messages.pipeline_scheduler import BatchItem, BatchReady, StepFinished, TrajectoryCompleted

EVALUATION: Final = "eval-"
"""Trajectories of this prefix are held-out episodes: they belong to no batch and are not counted."""
ENDED: Final = ("stop", "length")

Try = tuple[str, int]
"""One try at a trajectory: its id and retry number."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What the job was configured to do, and which records are still there."""

    batch_trajectories: int
    group_size: int
    staleness: int
    journal_from: int = 1
    """Lowest journal sequence that was not purged; what is said about older ones is not held against the journal."""
    whole_from: int = 0
    """First batch all of whose events are still in the stream. What only trimmed events could show of earlier ones is unseen."""
    rewound: int = 0
    """How often the broker came back without its last moments (`store.rewound/1`): what it lost was done again, which is counted."""
    attempts_logged: bool = True
    """False where no attempt logs are to be had: what a worker did is then not judged."""


class Journalled(msgspec.Struct, frozen=True):
    """A record of the journal and its stream sequence."""

    seq: int
    record: TurnFinished | RequestInterrupted


class Violation(msgspec.Struct, frozen=True):
    """One broken rule. `rule` is one word for machines."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


class Trimmed(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that does not begin with its first message any more: limits, or a purge, took the oldest."""

    stream: str
    gone: int  # messages before the oldest that is left
    from_ms: int = 0  # Unix ms of that one; 0: none is left

    def __str__(self) -> str:
        if not self.from_ms:
            return f"{self.stream}: nothing is left; {self.gone} messages were not seen"
        moment = datetime.fromtimestamp(self.from_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"{self.stream}: checked from {moment} on; {self.gone} earlier messages were trimmed, and not seen"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the records show. Held-out episodes are checked and not counted; tokens are reply tokens."""

    completed: int  # trajectories that ended, completed or truncated
    failed: int  # tries that ended as failed
    lost: int  # trajectories that a batch counts on, or that were begun in a trained batch, without an end
    duplicated: int  # ends, journal records or batch items that are there more than once
    delivered: int  # tokens of finished turns
    regenerated: int  # tokens made again although the client had them
    undelivered: int  # tokens that workers made and that reached no client (they died, or it had gone on)
    lost_with_edge: int  # tokens that reached a client which ended before it journalled them
    interrupted: int  # attempts that ended early
    redone: int = 0  # tokens of turns whose journal the broker lost: they were made again
    forgotten: int = 0  # train steps whose batch, or whose end, the broker lost
    staleness_max: int  # of any token in a batch; 0 if there is none
    batches: int
    trained: int
    strays: int = 0  # messages in the run's streams that cannot be read or were refused: no record of anything
    stray: tuple[str, ...] = ()  # the first of them
    unseen: int = 0  # trajectories of batches whose end was trimmed: neither lost nor checked
    trimmed: tuple[Trimmed, ...] = ()  # streams of which only the newest messages could be checked
    violations: tuple[Violation, ...] = ()

    @property
    def ok(self) -> bool:
        """No rule is broken."""
        return not self.violations


class _Found:
    """Violations and counts while they are gathered."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.lost: set[str] = set()
        self.duplicated = self.regenerated = self.undelivered = self.lost_with_edge = self.staleness_max = 0
        self.redone = self.forgotten = self.unseen = 0

    def add(self, rule: str, text: str) -> None:
        self.violations.append(Violation(rule, text))

    def again(self, rule: str, text: str) -> None:
        self.duplicated += 1
        self.add(rule, text)


def check(
    expected: Expected,
    *,
    journal: Iterable[Journalled],
    attempts: Iterable[AttemptLogged],
    ends: Iterable[TrajectoryCompleted],
    batches: Iterable[BatchReady],
    steps: Iterable[StepFinished],
) -> Report:
    """Judge a run, finished or not. Every record as it is in its stream, in stream order, repetitions included."""
    found = _Found()
    records, logged, steps = tuple(journal), tuple(attempts), tuple(steps)
    turns = [(entry.seq, entry.record) for entry in records if isinstance(entry.record, TurnFinished)]
    interruptions = [entry.record for entry in records if isinstance(entry.record, RequestInterrupted)]
    by_try = _unique_ends(found, ends)
    by_batch = _unique_batches(found, batches)
    _check_steps(found, expected, steps, by_batch)
    _check_turns(found, turns)
    _check_ends(found, expected, by_try, dict(turns))
    _check_batches(found, expected, by_batch, by_try)
    _check_requests(found, expected, [record for _, record in turns], interruptions, logged, by_try)
    _check_staleness(found, expected, by_batch, by_try, [record for _, record in turns])
    _check_left_behind(found, by_batch, by_try, [record for _, record in turns])
    counted = [end for end in by_try.values() if not end.trajectory.startswith(EVALUATION)]
    return Report(
        completed=len({end.trajectory for end in counted if end.status != "failed"}),
        failed=sum(end.status == "failed" for end in counted),
        lost=len(found.lost),
        duplicated=found.duplicated,
        delivered=sum(len(record.reply) for _, record in turns),
        regenerated=found.regenerated,
        undelivered=found.undelivered,
        lost_with_edge=found.lost_with_edge,
        interrupted=len(interruptions),
        redone=found.redone,
        forgotten=found.forgotten,
        unseen=found.unseen,
        staleness_max=found.staleness_max,
        batches=len(by_batch),
        trained=len({step.batch for step in steps}),
        violations=tuple(found.violations),
    )


# --- trajectories


def _unique_ends(found: _Found, ends: Iterable[TrajectoryCompleted]) -> dict[Try, TrajectoryCompleted]:
    by_try: dict[Try, TrajectoryCompleted] = {}
    for end in ends:
        key = (end.trajectory, end.retry)
        if key in by_try:
            found.again("ended_twice", f"{end.trajectory} try {end.retry} ended more than once")
        by_try.setdefault(key, end)
    return by_try


def _check_turns(found: _Found, turns: Sequence[tuple[int, TurnFinished]]) -> None:
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


def _check_ends(
    found: _Found, expected: Expected, by_try: dict[Try, TrajectoryCompleted], turns: dict[int, TurnFinished]
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


# --- batches


def _unique_batches(found: _Found, batches: Iterable[BatchReady]) -> dict[int, BatchReady]:
    by_batch: dict[int, BatchReady] = {}
    for batch in batches:
        known = by_batch.setdefault(batch.batch, batch)
        if known != batch:  # the same message once more, after a restart, is harmless
            found.again("batch_twice", f"batch {batch.batch} was made ready with two contents")
    return by_batch


def _check_batches(
    found: _Found, expected: Expected, by_batch: dict[int, BatchReady], by_try: dict[Try, TrajectoryCompleted]
) -> None:
    """Exactly its groups of exactly their size; each item one trajectory that ended, and no other batch's."""
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
            _check_item(found, expected, number, item, by_try)
        wrong = {group: size for group, size in sizes.items() if size != expected.group_size}
        if wrong:
            found.add("group_size", f"batch {number}: groups of other size than {expected.group_size}: {wrong}")
        if len(batch.items) != expected.batch_trajectories:
            found.add("batch_size", f"batch {number}: {len(batch.items)} of {expected.batch_trajectories} trajectories")
        for group in sizes:
            if groups_of.setdefault(group, number) != number:
                found.again("group_twice", f"group {group} is in batch {groups_of[group]} and {number}")


def _check_item(
    found: _Found, expected: Expected, number: int, item: BatchItem, by_try: dict[Try, TrajectoryCompleted]
) -> None:
    tries = [end for (trajectory, _), end in by_try.items() if trajectory == item.trajectory]
    if not tries and number < expected.whole_from:
        found.unseen += 1
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


def _check_steps(
    found: _Found, expected: Expected, steps: Iterable[StepFinished], by_batch: dict[int, BatchReady]
) -> None:
    """Batches are trained once each, in order, each ready before. What the broker lost of them is counted."""
    due = 0 if not expected.whole_from else None  # None: the first that is left may be any
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


def _check_left_behind(
    found: _Found,
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


# --- staleness


def _check_staleness(
    found: _Found,
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


# --- requests


class _Attempt(msgspec.Struct):
    """What a worker wrote about one attempt. `generated` and `finish` are None until it ended."""

    worker: str
    start: int
    generated: int | None = None


def _attempts(found: _Found, logged: Iterable[AttemptLogged]) -> dict[tuple[str, int], list[_Attempt]]:
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


def _check_requests(
    found: _Found,
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
        received = _check_chain(found, request, chain)
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


def _check_chain(found: _Found, request: str, chain: Sequence[RequestInterrupted]) -> int:
    """Interruptions follow on one another. Returns the tokens that had arrived after the last."""
    received = last = 0
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
    found: _Found,
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
