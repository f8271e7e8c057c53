"""How long a batch takes on given workers, request by request: the judge of what the decision engine predicted. Pure.

Every worker is an engine model of `engine.py`, which a test holds to `services.timing.engine.EngineModel`, the model of the
emulated engine: iterations, chunked prefill beside decoding, prefix cache, KV capacity. Requests are placed as the router places them (least loaded, unless the worker with the
session's prefix is not clearly more loaded). Disaggregated, the decode worker reserves room first, then the prefill worker
computes what neither has cached, and the KV cache of what the decode worker lacks goes over the prefill worker's link, one
hand-over after the other, while later chunks are computed.

What no predictor is told: each worker's speed differs a little (`Noise.speed`), and each turn loses a little at its edge.
The decision engine's predictors share nothing with this file or with `services.timing`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random

import msgspec

from services.simulator.whatif.engine import NEVER, Costs, FastEngine, Work
from services.timing.hardware import Hardware

TOKENS_PER_REQUEST = 4096
"""As the router: a prefix of so many tokens is worth about one more request in a worker."""


class Turn(msgspec.Struct, frozen=True):
    """`new` prompt tokens join the context, `reply` are generated, then the environment takes `env_s`.

    `fresh`: the agent has rewritten its history, as long as before: no cached prefix fits it.
    """

    new: int
    reply: int
    env_s: float
    fresh: bool = False


Trajectory = tuple[Turn, ...]


class Workers(msgspec.Struct, frozen=True):
    """A configuration: so many workers in each role."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.colocated


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers have in common."""

    hardware: Hardware
    max_running: int = 64
    chunk_tokens: int = 2048
    kv_tokens: int = 0  # of one worker; 0: the hardware's

    @property
    def capacity(self) -> int:
        return self.kv_tokens or self.hardware.kv_capacity_tokens


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """What no model knows. `speed`: standard deviation of a worker's speed; `edge_s`: mean seconds that a turn loses."""

    speed: float = 0.0
    edge_s: float = 0.0


class Change(msgspec.Struct, frozen=True):
    """Workers that come while a batch runs, `delay_s` after `remaining` trajectories are left."""

    remaining: int
    delay_s: float
    workers: Workers


class Measured(msgspec.Struct, frozen=True):
    """Seconds from the batch's start: its end, and each trajectory's, in order. `change_s`: when `Change` was due."""

    makespan_s: float
    ends_s: tuple[float, ...]
    change_s: float = 0.0
    decoded: int = 0
    iterations: int = 0
    decode_s: float = 0.0
    prefilled: int = 0
    prefill_s: float = 0.0


class _Seat:
    """A worker: its engine on a clock of its own speed, the requests here, its outgoing link."""

    __slots__ = ("engine", "link_s", "load", "speed", "stamp")

    def __init__(self, site: Site, costs: Costs, speed: float, prefill_only: bool) -> None:
        self.engine = FastEngine(
            costs, max_running=site.max_running, chunk_tokens=site.chunk_tokens, kv_tokens=site.capacity
        )
        self.engine.prefill_only = prefill_only
        self.speed = speed
        self.load = 0
        self.link_s = 0.0
        self.stamp = 0


class _Session:
    """A trajectory under way."""

    __slots__ = (
        "attempt",
        "cached",
        "context",
        "decode",
        "name",
        "prefill",
        "remote",
        "started_s",
        "turn",
        "turns",
        "work",
    )

    def __init__(self, turns: Trajectory, index: int) -> None:
        self.turns = turns
        self.name = str(index)
        self.turn = 0
        self.context = 0
        self.attempt = 0  # hand-overs begun
        self.cached = 0
        self.decode = -1
        self.prefill = -1
        self.started_s = 0.0
        self.work: Work | None = None  # in its decode or colocated worker
        self.remote: Work | None = None  # in its prefill worker


class Judge:
    """One batch on one configuration. `measure` runs it to its end."""

    def __init__(self, site: Site, workers: Workers, *, noise: Noise, seed: int, most_in_flight: int) -> None:
        assert workers.colocated == 0 or workers.prefill + workers.decode == 0
        assert workers.colocated or (workers.prefill and workers.decode)
        self._site = site
        self._costs = _costs(site.hardware, site.max_running, site.chunk_tokens)
        self._noise = noise
        self._random = Random(seed)
        self._limit = min(site.hardware.max_context_tokens, site.capacity)
        self._most = most_in_flight
        self._seats: list[_Seat] = []
        self._decoders: list[int] = []
        self._prefillers: list[int] = []
        self._add(workers)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = 0
        self._sessions: list[_Session] = []
        self._now_s = 0.0

    def _add(self, workers: Workers) -> None:
        roles = [True] * workers.prefill + [False] * (workers.decode + workers.colocated)
        for prefill_only in roles:
            speed = math.exp(self._random.gauss(0.0, self._noise.speed)) if self._noise.speed else 1.0
            (self._prefillers if prefill_only else self._decoders).append(len(self._seats))
            self._seats.append(_Seat(self._site, self._costs, speed, prefill_only))

    def measure(self, batch: Sequence[Trajectory], change: Change | None = None) -> Measured:
        """Run all trajectories, the first `most_in_flight` at once, each next one as a slot frees up."""
        waiting = list(range(len(batch)))[::-1]
        self._sessions = [_Session(turns, index) for index, turns in enumerate(batch)]
        ends: list[float] = []
        change_s = 0.0

        def add() -> None:
            assert change is not None
            self._add(change.workers)

        def finished() -> None:
            nonlocal change_s
            ends.append(self._now_s)
            if waiting:
                self._next_turn(waiting.pop())
            if change is not None and len(batch) - len(ends) == change.remaining:
                change_s = self._now_s
                self._at(self._now_s + change.delay_s, add)

        self._finished = finished
        if change is not None and change.remaining >= len(batch):
            self._at(change.delay_s, add)
        for _ in range(min(self._most, len(batch))):
            self._next_turn(waiting.pop())
        events = self._events
        while events:
            self._now_s, _, act = heapq.heappop(events)
            act()
        assert len(ends) == len(batch), "every trajectory ends"
        sums = [seat.engine.sums for seat in self._seats]
        return Measured(
            self._now_s,
            tuple(ends),
            change_s,
            sum(each.decoded for each in sums),
            sum(each.iterations for each in sums),
            sum(each.decode_s for each in sums),
            sum(each.prefilled for each in sums),
            sum(each.prefill_s for each in sums),
        )

    # ---- the clock ----

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        self._ties += 1
        heapq.heappush(self._events, (at_s, self._ties, act))

    def _wake(self, index: int) -> None:
        """Look at a worker again when something can have happened there."""
        seat = self._seats[index]
        seat.stamp += 1
        stamp = seat.stamp
        due = seat.engine.next_s
        if due == NEVER:
            return

        def look() -> None:
            if seat.stamp == stamp:
                self._advance(index)
                self._wake(index)

        self._at(max(self._now_s, due / seat.speed), look)

    def _advance(self, index: int) -> None:
        """Run a worker's engine until now, and take what happened there."""
        seat = self._seats[index]
        engine = seat.engine
        engine.advance(self._now_s * seat.speed)
        while engine.reserved or engine.dropped or engine.ended:
            if engine.dropped:  # before `reserved`: it may have room again already
                self._drop(engine.dropped.pop(0))
            elif engine.reserved:
                self._prefill(engine.reserved.pop(0))
            else:
                _, work = engine.ended.pop(0)
                key = work.of
                assert isinstance(key, int)
                if engine.prefill_only:
                    self._handed_over(index, key)
                else:
                    self._replied(index, key)

    # ---- a turn ----

    def _next_turn(self, key: int) -> None:
        session = self._sessions[key]
        turn = session.turns[session.turn]
        session.context += turn.new
        if turn.fresh:
            session.name += "'"
        room = self._limit - session.context - turn.reply
        if room < 1:  # the context is full: the trajectory is truncated here
            self._finished()
            return
        index = session.decode = self._choose(self._decoders, session.decode, session.context)
        seat = self._seats[index]
        seat.load += 1
        self._advance(index)
        total = session.context + turn.reply
        session.work = Work(session.name, session.context, total, key, remote=bool(self._prefillers))
        seat.engine.submit(session.work)
        self._advance(index)
        self._wake(index)

    def _choose(self, able: list[int], affine: int, context: int) -> int:
        seats = self._seats
        least = min(able, key=lambda index: seats[index].load)
        if affine < 0:
            return least
        worth = min(self._site.max_running // 2, 1 + context // TOKENS_PER_REQUEST)
        return affine if seats[affine].load <= seats[least].load + worth else least

    def _prefill(self, work: Work) -> None:
        """The decode worker has room: a prefill worker computes the context."""
        key = work.of
        assert isinstance(key, int)
        session = self._sessions[key]
        index = session.prefill = self._choose(self._prefillers, session.prefill, session.context)
        seat = self._seats[index]
        session.started_s = self._now_s
        session.cached = work.cached
        seat.load += 1
        self._advance(index)
        session.remote = Work(session.name, session.context, session.context + 1, key)
        seat.engine.submit(session.remote)
        self._wake(index)

    def _drop(self, work: Work) -> None:
        """The decode worker gave the room to another: the hand-over begins anew when it has room again."""
        key = work.of
        assert isinstance(key, int)
        session = self._sessions[key]
        seat = self._seats[session.prefill]
        self._advance(session.prefill)
        if session.remote is not None and session.remote.engine is not None:
            seat.engine.end(session.remote)
            seat.load -= 1
        session.attempt += 1
        self._wake(session.prefill)

    def _handed_over(self, index: int, key: int) -> None:
        """The context is computed: what has not gone yet goes, after what others send."""
        session, seat, hardware = self._sessions[key], self._seats[index], self._site.hardware
        seat.load -= 1
        volume = max(1, session.context - session.cached)
        whole_s = volume * hardware.kv_bytes_per_token / hardware.transfer_bytes_per_s.value
        tail_s = min(volume, self._site.chunk_tokens) / volume * whole_s
        seat.link_s = max(seat.link_s, session.started_s) + whole_s
        at_s = max(self._now_s + tail_s, seat.link_s) + hardware.transfer_fixed_s.value
        attempt = session.attempt
        self._at(at_s, lambda: self._arrived(key, attempt))

    def _arrived(self, key: int, attempt: int) -> None:
        session = self._sessions[key]
        if session.attempt != attempt:
            return
        index = session.decode
        self._advance(index)
        if session.attempt != attempt:  # it has lost its room just now
            self._wake(index)
            return
        work = session.work
        assert work is not None
        if self._seats[index].engine.arrived(work):
            self._replied(index, key)
        self._wake(index)

    def _replied(self, index: int, key: int) -> None:
        session = self._sessions[key]
        self._seats[index].load -= 1
        turn = session.turns[session.turn]
        session.context += turn.reply
        session.turn += 1
        away_s = turn.env_s
        if self._noise.edge_s:
            away_s += self._random.expovariate(1 / self._noise.edge_s)
        if session.turn == len(session.turns):
            self._at(self._now_s + away_s, self._finished)
        else:
            self._at(self._now_s + away_s, lambda: self._next_turn(key))


@lru_cache(maxsize=8)
def _costs(hardware: Hardware, max_running: int, chunk_tokens: int) -> Costs:
    return Costs(hardware, max_running, chunk_tokens)
