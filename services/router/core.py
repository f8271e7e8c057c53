"""Placement of requests (DESIGN 7): no I/O and no clock, but a mutable object rather than `step(state, event)`.

Thousands of requests a second must be placed, and nothing here needs to survive: the table comes from the replica,
loads from heartbeats, a session's worker from the request itself. So state is changed in place, and nothing is
checkpointed. The same calls in the same order give the same answers, which is what simulation needs.

A request goes to the worker that holds its session's prefix unless that one is clearly more loaded, else to the least
loaded. "Clearly" grows with the context that would be prefilled again. Load is what the last heartbeat said plus what
was assigned here since, less what ended since where that is known; other routers' assignments show in the next heartbeat.

Disaggregated (paper 4.2), that holds for either side: a prefill worker that has the session's prompts of earlier turns
computes only what is new, as the planner's model of it assumes.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter

from messages.agent import Assignment, NotNow
from messages.ids import Activity, Incarnation, PolicyVersion, Role, RoleGeneration, Zone
from messages.router import AssignRequest
from messages.runtime_tracker import WorkerHeartbeat
from pearl_state.model import RoleTable, Row
from services.router.config import Config

ROOMS = 1 << 31
"""Rooms a router numbers before it begins again: more than can be in flight."""
LONGEST_ID = 256
"""Characters of an id or worker name; longer ones are refused, since ids are kept in memory."""
MOST_AVOIDED = 1024
MOST_RANGES = 64
"""Of versions asked for, whose workers are remembered until the next table."""
_LOAD = attrgetter("load")


class Unplaceable(ValueError):
    """A readable request that makes no sense; the message says why. For the dead-letter stream."""


class Seat:
    """One serving worker as the router sees it."""

    __slots__ = ("assigned", "heard", "incarnation", "load", "row")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.incarnation = row.incarnation
        self.heard = 0  # running and queued, from the last heartbeat
        self.assigned = 0  # by this router since that heartbeat, less those known to have ended since
        self.load = 0  # both, and never less than none: read for every worker and request, so it is kept

    def hear(self, requests: int) -> None:
        """A heartbeat says how many it has."""
        self.heard, self.assigned = requests, 0
        self.load = requests

    def assign(self, more: int) -> None:
        """So many more than before, by this router."""
        self.assigned += more
        self.load = max(0, self.heard + self.assigned)


class RouterCore:
    """One router. `router_id` (31 bits, chosen by the shell) keeps the rooms of several routers apart."""

    def __init__(self, config: Config, router_id: int = 0) -> None:
        assert 0 <= router_id < ROOMS
        self.config = config
        self._most_in_flight = config.most_in_flight
        self._router_id = router_id
        self._rooms = 0
        self._turn = 0  # moves the window of workers compared, and breaks ties
        self._epoch = -1
        self._seats: dict[str, Seat] = {}
        self._decoders: list[Seat] = []  # colocated and decode workers, which a request can run on
        self._prefillers: dict[int, list[Seat]] = {}  # by version
        self._able_of: dict[tuple[int, int], list[Seat]] = {}  # oldest, newest version -> of those decoders (`_able`)
        self._sessions: OrderedDict[str, tuple[str, str]] = OrderedDict()  # -> decode or colocated, prefill worker
        self._paused_by = ""
        self._paused_since_ms = 0

    def on_table(self, table: RoleTable, now_ms: int) -> None:
        """Serve from this table. The replica only ever offers the one it believes in."""
        self._epoch = table.epoch
        old, self._seats = self._seats, {}
        for row in table.rows:
            if row.activity is not Activity.ACTIVE or row.zone is Zone.TRAINING:
                continue
            seat = old.get(row.worker)
            if seat is None or seat.incarnation != row.incarnation:
                seat = Seat(row)
            seat.row = row
            self._seats[row.worker] = seat
        seats = self._seats.values()
        self._decoders = [seat for seat in seats if seat.row.role in (Role.COLOCATED, Role.DECODE)]
        self._prefillers = {}
        for seat in seats:
            if seat.row.role is Role.PREFILL:
                self._prefillers.setdefault(seat.row.version, []).append(seat)
        self._able_of.clear()
        paused_by = table.admission_paused or ""
        if paused_by != self._paused_by:
            self._paused_by, self._paused_since_ms = paused_by, now_ms

    def on_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """Load of a worker; of one that does not serve, or of another incarnation, nothing."""
        seat = self._seats.get(heartbeat.worker)
        if seat is None or seat.incarnation != heartbeat.incarnation:
            return
        seat.hear(max(0, heartbeat.running) + max(0, heartbeat.queued))

    def assign(self, request: AssignRequest, now_ms: int) -> Assignment | NotNow:
        """Where the attempt is to run, or when to ask again. Raises Unplaceable."""
        problem = problem_of(request)
        if problem:
            raise Unplaceable(problem)
        if self._epoch < 0:
            return self._not_now(request, self.config.nobody_retry_ms, "no role table yet")
        if self._paused_by and now_ms - self._paused_since_ms < self.config.admission_pause_ms:
            return self._not_now(request, self.config.paused_retry_ms, "admission paused")
        if not self._decoders:
            return self._not_now(request, self.config.nobody_retry_ms, "no worker")
        affine = self._affine(request)
        able = self._able(request, affine)
        if not able:
            exact = request.max_version >= 0
            reason = f"no worker at version {request.min_version}{f' to {request.max_version}' if exact else ''}"
            return self._not_now(request, self.config.nobody_retry_ms, reason)
        if request.avoid:
            avoided = frozenset(request.avoid)
            able = [seat for seat in able if seat.row.worker not in avoided] or able
        seat = self._choose(able, affine, request.context_tokens)
        if seat is None:
            return self._not_now(request, self.config.full_retry_ms, "all workers full")
        if seat.row.role is Role.COLOCATED:
            return self._place(request, seat, None)
        prefiller = self._prefiller(seat.row.version, request)
        if prefiller is None:
            return self._not_now(request, self.config.full_retry_ms, "all prefill workers full")
        return self._place(request, seat, prefiller)

    def on_end(self, held: Assignment) -> None:
        """An attempt that was placed here has ended, as an edge in this process says; heartbeats say it of the others.

        Without it a worker would take `most_in_flight` requests a heartbeat at most, however short they are. Of the prefill
        worker nothing is said: its part ended long before.
        """
        seat = self._seats.get(held.worker)
        if seat is not None and seat.incarnation == held.incarnation:
            seat.assign(-1)

    def _affine(self, request: AssignRequest) -> Seat | None:
        """The worker that holds the session's prefix, as the client says, or as far as we remember."""
        worker = request.last_worker or self._sessions.get(request.trajectory, ("", ""))[0]
        return self._seats.get(worker)

    def _choose(self, seats: list[Seat], affine: Seat | None, context_tokens: int) -> Seat | None:
        """The least loaded, or the one with the prefix unless that is clearly more loaded. None: all are full."""
        most = self._most_in_flight
        least = min(seats, key=_LOAD)
        if least.load >= most:
            return None
        if affine is None or affine.load >= most or affine not in seats:
            return least
        worth = min(self.config.max_running // 2, 1 + context_tokens // self.config.tokens_per_request)
        return affine if affine.load <= least.load + worth else least

    def _able(self, request: AssignRequest, affine: Seat | None) -> list[Seat]:
        """Workers that may run the request: at its version, decode workers only with a prefill worker of theirs."""
        versions = (request.min_version, request.max_version)
        able = self._able_of.get(versions)
        if able is None:
            able = self._able_at(*versions)
            if len(self._able_of) >= MOST_RANGES:
                self._able_of.clear()
            self._able_of[versions] = able
        self._turn += 1
        start = self._turn % len(able) if able else 0
        window = (able[start:] + able[:start])[: self.config.most_compared]
        if affine is not None and affine not in window and affine in able:
            window.append(affine)
        return window

    def _able_at(self, oldest: int, newest: int) -> list[Seat]:
        return [
            seat
            for seat in self._decoders
            if seat.row.version >= oldest
            and not 0 <= newest < seat.row.version
            and (seat.row.role is Role.COLOCATED or seat.row.version in self._prefillers)
        ]

    def _prefiller(self, version: PolicyVersion, request: AssignRequest) -> Seat | None:
        """A prefill worker of exactly this version (KV of another is refused by its receiver) that is not full."""
        able = self._prefillers[version]  # of a decode worker that is able
        if request.avoid:
            able = [seat for seat in able if seat.row.worker not in request.avoid] or able
        affine = self._seats.get(self._sessions.get(request.trajectory, ("", ""))[1])
        return self._choose(able, affine, request.context_tokens)

    def _place(self, request: AssignRequest, seat: Seat, prefiller: Seat | None) -> Assignment:
        seat.assign(1)
        self._sessions[request.trajectory] = (seat.row.worker, prefiller.row.worker if prefiller is not None else "")
        self._sessions.move_to_end(request.trajectory)
        if len(self._sessions) > self.config.most_sessions:
            self._sessions.popitem(last=False)
        row = seat.row
        if prefiller is None:
            return Assignment(
                request=request.request,
                attempt=request.attempt,
                worker=row.worker,
                incarnation=row.incarnation,
                role_generation=row.role_generation,
            )
        prefiller.assign(1)
        self._rooms = (self._rooms + 1) % ROOMS
        return Assignment(
            request=request.request,
            attempt=request.attempt,
            worker=row.worker,
            incarnation=row.incarnation,
            role_generation=row.role_generation,
            prefill_worker=prefiller.row.worker,
            prefill_incarnation=Incarnation(prefiller.row.incarnation),
            prefill_role_generation=RoleGeneration(prefiller.row.role_generation),
            prefill_endpoint=prefiller.row.endpoint,
            room=self._router_id * ROOMS + self._rooms,
        )

    def _not_now(self, request: AssignRequest, retry_after_ms: int, reason: str) -> NotNow:
        return NotNow(request=request.request, attempt=request.attempt, retry_after_ms=retry_after_ms, reason=reason)


def problem_of(request: AssignRequest) -> str:
    """What makes a readable request senseless, or ""."""
    if not request.request or not request.trajectory:
        return "request and trajectory must not be empty"
    if max(len(request.request), len(request.trajectory), len(request.last_worker)) > LONGEST_ID:
        return f"an id is longer than {LONGEST_ID} characters"
    if len(request.avoid) > MOST_AVOIDED:
        return f"more than {MOST_AVOIDED} workers to avoid"
    if request.attempt < 1 or request.min_version < 0 or request.context_tokens < 0:
        return (
            f"attempt {request.attempt}, min_version {request.min_version}, context_tokens {request.context_tokens}: "
            "attempts count from 1, the others are not negative"
        )
    return ""
