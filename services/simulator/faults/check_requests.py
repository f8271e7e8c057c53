"""Promises about requests (DESIGN 7, 11.3, 11.4): where they run, under which fence, and that no token comes twice.

Positions count tokens of one reply. A request belongs to one holding of a turn by one agent, so one that takes a turn over
makes a request of its own; what the one before it had received and not journalled is `lost_with_edge`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from messages.agent import RequestInterrupted, RolloutTask, TurnFinished
from messages.ids import Activity, Role, WorkerId
from messages.orchestrator import RoleSet, WorkerDrained
from messages.rollout_worker import Generate
from pearl_state.model import Row
from services.simulator.faults.history import History, Process, Promise
from services.simulator.faults.record import (
    ActorBegan,
    Assigned,
    AttemptBegan,
    Generated,
    Received,
    Seen,
    Sent,
    Stored,
)

Attempt = tuple[str, int]
"""A request and the number of a try at it."""


class Routed(Promise):
    """A router places requests on workers that its table shows active, in the right role, at the version, unpaused."""

    name = "11.3 routed to active workers only"
    kinds = (Assigned, ActorBegan)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._epochs: dict[str, int] = {}

    def see(self, seen: Seen) -> Iterator[str]:
        if isinstance(seen, ActorBegan):
            self._epochs.pop(seen.actor, None)
            return
        assert isinstance(seen, Assigned)
        where = f"{seen.request} attempt {seen.attempt} by {seen.router} at epoch {seen.epoch}"
        if seen.epoch < self._epochs.get(seen.router, seen.epoch):
            yield f"{where}: it went by epoch {self._epochs[seen.router]} before"
        self._epochs[seen.router] = seen.epoch
        table = self.history.tables.get(seen.epoch)
        if table is None:
            yield f"{where}: no such table was ever written"
            return
        row = table.row(seen.worker)
        wanted = Role.DECODE if seen.prefill else Role.COLOCATED
        yield from self._wrong(where, seen.worker, row, wanted, seen.min_version)
        if row is not None and (row.incarnation, row.role_generation) != (seen.incarnation, seen.role_generation):
            yield f"{where}: the fence of {seen.worker} is another"
        if seen.prefill:
            yield from self._wrong(where, seen.prefill, table.row(seen.prefill), Role.PREFILL, seen.min_version)
        paused = table.admission_paused
        if paused is not None:
            since = seen.at_ms - self.history.paused_since[paused]
            if since < self.job.timeouts.admission_pause_ms:
                yield f"{where}: admission is paused for {paused} since {since} ms"

    def _wrong(self, where: str, worker: str, row: Row | None, role: Role, version: int) -> Iterator[str]:
        if row is None or row.activity is not Activity.ACTIVE:
            yield f"{where}: {worker} is not active"
        elif row.role is not role:
            yield f"{where}: {worker} is {row.role}, not {role}"
        elif row.version < version:
            yield f"{where}: {worker} is at version {row.version}, below {version}"


class Fenced(Promise):
    """A worker runs an attempt only under a fence it was placed with, was active with and has not been drained from."""

    name = "11.3 requests run under their fence only"
    kinds = (Assigned, AttemptBegan, Stored)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._placed: dict[Attempt, set[tuple[WorkerId, int, int]]] = defaultdict(set)
        self._prefill: dict[Attempt, set[str]] = defaultdict(set)
        self._over: dict[Process, int] = {}  # generations up to this one are over
        self._ran: dict[Attempt, str] = {}

    def see(self, seen: Seen) -> Iterator[str]:
        match seen:
            case Assigned():
                key = (seen.request, seen.attempt)
                self._placed[key].add((seen.worker, seen.incarnation, seen.role_generation))
                if seen.prefill:
                    self._prefill[key].add(seen.prefill)
            case Stored(message=WorkerDrained() as fact):
                self._end(fact.worker, fact.incarnation, fact.role_generation - 1)
            case Stored(message=RoleSet() as fact):
                self._end(fact.worker, fact.incarnation, fact.role_generation - 1)
            case AttemptBegan():
                yield from self._began(seen)
            case _:
                pass

    def _end(self, worker: WorkerId, incarnation: int, generation: int) -> None:
        process = (worker, incarnation)
        self._over[process] = max(generation, self._over.get(process, generation))

    def _began(self, seen: AttemptBegan) -> Iterator[str]:
        key, process = (seen.request, seen.attempt), (seen.worker, seen.incarnation)
        where = f"{seen.request} attempt {seen.attempt} on {seen.worker} #{seen.incarnation}"
        if seen.role is Role.PREFILL:
            if seen.worker not in self._prefill.get(key, ()):
                yield f"{where}: no router placed its prefill there"
        else:
            if (seen.worker, seen.incarnation, seen.role_generation) not in self._placed.get(key, ()):
                yield f"{where}: no router placed it there under generation {seen.role_generation}"
            if key in self._ran:
                yield f"{where}: it was run before, on {self._ran[key]}"
            self._ran[key] = seen.worker
        if (seen.worker, seen.incarnation, seen.role_generation, seen.role) not in self.history.served:
            yield f"{where}: never active as {seen.role} under generation {seen.role_generation}"
        if seen.role_generation <= self._over.get(process, -1):
            yield f"{where}: generation {seen.role_generation} was over"
        if process in self.history.ended:
            yield f"{where}: that process has ended"
        if seen.version < seen.min_version:
            yield f"{where}: weights of version {seen.version}, the request asks for {seen.min_version}"


class NoTokenTwice(Promise):
    """Each attempt starts exactly where the client's prefix ended; what a living client received is never made again."""

    name = "11.4 no delivered token is generated again"
    kinds = (Assigned, Sent, AttemptBegan, Generated, Received, Stored)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.lost_with_edge = 0  # tokens that a killed agent had received and not journalled
        self._have: dict[str, int] = {}  # tokens of a request that its client has
        self._owner: dict[str, tuple[str, int]] = {}  # the agent, and its life, that receives them
        self._asked: dict[Attempt, int] = {}
        self._started: dict[Attempt, int] = {}
        self._made: dict[Attempt, int] = {}  # where an attempt's tokens end
        self._got: dict[Attempt, int] = {}  # tokens received of an attempt
        self._done: set[str] = set()
        self._interrupted: dict[str, int] = {}  # newest attempt journalled as interrupted

    def see(self, seen: Seen) -> Iterator[str]:
        match seen:
            case Assigned():
                self._asked.setdefault((seen.request, seen.attempt), self._have.get(seen.request, 0))
            case Sent(message=Generate() as command):
                have = self._have.get(command.request, 0)
                if len(command.prefix) != have:
                    where = f"{command.request} attempt {command.attempt}"
                    yield f"{where}: asked from {len(command.prefix)}, {have} tokens had reached the client"
            case AttemptBegan():
                if seen.role is not Role.PREFILL:
                    yield from self._began(seen)
            case Generated():
                yield from self._generated(seen)
            case Received():
                yield from self._received(seen)
            case Stored(message=RequestInterrupted() as entry):
                yield from self._journalled(entry)
            case Stored(message=TurnFinished() as turn):
                yield from self._finished(turn)
            case _:
                pass

    def finish(self) -> Iterator[str]:
        for request, owner in self._owner.items():
            if request not in self._done and self.history.lives.get(owner[0], owner[1]) != owner[1]:
                self.lost_with_edge += self._have[request]
        yield from ()

    def _began(self, seen: AttemptBegan) -> Iterator[str]:
        key = (seen.request, seen.attempt)
        where = f"{seen.request} attempt {seen.attempt} on {seen.worker}"
        prefix = self._asked.get(key)
        if prefix is not None and seen.start < prefix:
            yield f"{where}: begins at {seen.start}, {prefix} tokens had reached the client"
        elif prefix is not None and seen.start > prefix:
            yield f"{where}: begins at {seen.start}, only {prefix} tokens had reached the client"
        self._started[key] = self._made[key] = seen.start

    def _generated(self, seen: Generated) -> Iterator[str]:
        key = (seen.request, seen.attempt)
        end = self._made.get(key)
        if end is None:
            yield f"{seen.request} attempt {seen.attempt}: {seen.worker} makes tokens and never began"
        elif seen.start != end:
            yield f"{seen.request} attempt {seen.attempt}: {seen.worker} goes on at {seen.start}, it was at {end}"
        self._made[key] = seen.start + seen.count

    def _received(self, seen: Received) -> Iterator[str]:
        key, owner = (seen.request, seen.attempt), (seen.agent, seen.life)
        where = f"{seen.request} attempt {seen.attempt} at {seen.agent}"
        if self._owner.setdefault(seen.request, owner) != owner:
            yield f"{where}: the request is {self._owner[seen.request][0]}'s, of another life or agent"
        if seen.life != self.history.lives.get(seen.agent, seen.life):
            yield f"{where}: received by an agent that was dead"
        have, end = self._have.get(seen.request, 0), seen.start + seen.count
        if seen.start < have:
            yield f"{where}: tokens from {seen.start} on taken again, it had {have}"
        elif seen.start > have:
            yield f"{where}: tokens from {seen.start} on taken, it had only {have}"
        if end > self._made.get(key, 0):
            yield f"{where}: tokens up to {end} taken, its worker made {self._made.get(key, 0)}"
        if seen.request in self._done:
            yield f"{where}: tokens after the reply was complete"
        self._have[seen.request] = end
        self._got[key] = self._got.get(key, 0) + seen.count

    def _journalled(self, entry: RequestInterrupted) -> Iterator[str]:
        where, key = f"{entry.request} attempt {entry.attempt}", (entry.request, entry.attempt)
        if entry.attempt <= self._interrupted.get(entry.request, 0):
            return  # the same once more
        self._interrupted[entry.request] = entry.attempt
        if entry.received != self._got.get(key, 0):
            yield f"{where}: {entry.received} tokens are journalled, {self._got.get(key, 0)} were received"
        start = self._started.get(key)
        if start is not None and start != entry.prefix_len:
            yield f"{where}: journalled as begun at {entry.prefix_len}, its worker began at {start}"

    def _finished(self, turn: TurnFinished) -> Iterator[str]:
        have = self._have.get(turn.request, 0)
        if len(turn.reply) != have:
            yield f"{turn.request}: a reply of {len(turn.reply)} tokens is journalled, {have} were received"
        self._done.add(turn.request)


class JournalFirst(Promise):
    """A turn is in the journal before the next one begins; a trajectory's turns are journalled once each, in order.

    An agent that replied to its environment, or went on, before the turn was kept would lose it with its life.
    """

    name = "11.4 the journal comes first"
    kinds = (Stored, Assigned)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._turns: dict[tuple[str, int], int] = {}  # (trajectory, retry) -> turns journalled
        self._requests: dict[tuple[str, int, int], str] = {}
        self._retry: dict[str, int] = {}  # the newest try that a task was given for

    def see(self, seen: Seen) -> Iterator[str]:
        match seen:
            case Stored(message=RolloutTask() as task):
                self._retry[task.trajectory] = max(task.retry, self._retry.get(task.trajectory, 0))
            case Stored(message=TurnFinished() as turn):
                yield from self._turn(turn)
            case Assigned():
                parts = seen.request.split("/")
                if len(parts) < 2 or not parts[1].isdecimal():
                    return
                trajectory, number = parts[0], int(parts[1])
                most = max((self._turns.get((trajectory, retry), 0) for retry in self._tries(trajectory)), default=0)
                if number > most:
                    yield f"{seen.request}: turn {number} is asked for, {most} turns are in the journal"
            case _:
                pass

    def _tries(self, trajectory: str) -> range:
        return range(self._retry.get(trajectory, 0) + 1)

    def _turn(self, turn: TurnFinished) -> Iterator[str]:
        key = (turn.trajectory, turn.retry)
        where = f"turn {turn.turn} of {turn.trajectory} try {turn.retry}"
        known = self._requests.setdefault((*key, turn.turn), turn.request)
        if known != turn.request:
            yield f"{where}: journalled by {known} and by {turn.request}"
        elif turn.turn > self._turns.get(key, 0):
            yield f"{where}: journalled when {self._turns.get(key, 0)} were"
        self._turns[key] = max(self._turns.get(key, 0), turn.turn + 1)
