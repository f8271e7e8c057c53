"""Replays recorded trajectories on a configuration, with a simplified model of the workers. Pure.

What the closed forms leave out is simply played: each trajectory waits for prefill, transfer, decode and environment one after
the other; requests queue; the longest trajectories end the batch; a prefix is computed again where it was evicted; how many
decode at once follows from the configuration instead of being measured under another one.

The model of a worker is coarser than an engine. Decoding sequences advance together; an iteration takes `A + c K` for the K
context tokens that they have together. Waiting prompts are computed in groups of one chunk, or one prompt if that is longer:
a group of P tokens takes `t_prefill P` more than the iterations that it is part of. Of the KV cache only sessions are known, the least
recently used going first. It shares no code with `services.timing`, which judges it (docs/decisions.md).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from services.decision_engine.predict_model import Flowed, Grow, Machine, Pipeline, Replayed, Turns

SLACK: Final = 1e-9
LEAST_S: Final = 1e-6
"""No iteration is taken to be shorter: constants that are 0 would let no time go by."""
NEVER: Final = float("inf")
GOLDEN: Final = 0.6180339887498949
SILVER: Final = 0.4142135623730951
TURN, WORKER, ARRIVAL, GROW = range(4)
"""Kinds of events."""


class _Worker:
    """`clock`: tokens that each decoding sequence has made here since the start."""

    __slots__ = (
        "at_s", "cached", "cached_tokens", "clock", "due_s", "ends", "group", "group_end_s", "kv", "link_s", "load", "prefills",
        "prompts", "queued_s", "rate", "stamp", "tie", "used", "waiting",
    )  # fmt: skip

    def __init__(self, prefills: bool = False) -> None:
        self.prefills = prefills
        self.at_s = 0.0
        self.clock = 0.0
        self.rate = 0.0  # tokens a second of each sequence
        self.kv = 0.0  # context tokens of those that decode
        self.ends: list[tuple[float, int]] = []  # (clock, session)
        self.prompts: deque[tuple[int, float]] = deque()  # (session, tokens to compute)
        self.group: list[int] = []  # sessions whose prompts are computed now
        self.group_end_s = 0.0
        self.waiting: deque[int] = deque()  # for KV cache or a place in the batch
        self.cached: OrderedDict[int, float] = OrderedDict()  # sessions not running: their tokens
        self.cached_tokens = 0.0
        self.used = 0.0  # tokens of running sessions
        self.load = 0
        self.link_s = 0.0
        self.due_s = 0.0  # something happens here then, in the order of `tie`
        self.tie = 0
        self.queued_s = NEVER  # the one event that counts is that of `stamp`, no later than what is due
        self.stamp = 0


class _Run:
    """One replay. Sessions are indices of `batch`.

    Thousands of events in some hundredths of a second: what is called for each of them holds its attributes in variables, and what
    a worker does next is one event, moved only when something is due earlier.
    """

    def __init__(self, batch: Sequence[Turns], machine: Machine, prefill: int, decode: int) -> None:
        self.machine = machine
        self.batch = batch
        self.disaggregated = prefill > 0
        self.prefillers = [_Worker(True) for _ in range(prefill)]
        self.decoders = [_Worker() for _ in range(decode)]
        count = len(batch)
        self.turn = [0] * count
        self.now_turn: list[tuple[int, int, float, int]] = [(0, 0, 0.0, 1)] * count
        self.rewritten = [False] * count  # the turn's prefix is a new one: spread evenly over sessions and turns
        self.context = [0.0] * count
        self.held = [0.0] * count  # tokens that a session has of its decoder's `used`
        self.home: list[_Worker | None] = [None] * count
        self.source: list[_Worker | None] = [None] * count
        self.begun_s = [0.0] * count
        self.lacking = [0.0] * count  # tokens of KV that the decoder lacks
        self.events: list[tuple[float, int, int, int, _Worker | None]] = []  # (at, tie, kind, session or stamp, worker)
        self.ties = 0
        self.ends_s: list[float] = []
        self.computed = 0.0

    def push(self, at_s: float, kind: int, value: int) -> None:
        self.ties += 1
        heapq.heappush(self.events, (at_s, self.ties, kind, value, None))

    def next(self) -> tuple[float, int, int] | None:
        """(now, kind, session) of the next trajectory that ends (TURN) or GROW. None: nothing happens any more."""
        events, turn, batch = self.events, self.turn, self.batch
        while events:
            now, tie, kind, value, worker = heapq.heappop(events)
            if worker is None:
                if kind == TURN and turn[value] < len(batch[value]):
                    self.request(value, now)
                elif kind == ARRIVAL:
                    self.arrived(value, now)
                else:
                    return now, kind, value
                continue
            if worker.stamp != value:
                continue  # something was due earlier
            if worker.tie != tie:  # put off since
                heapq.heappush(events, (worker.due_s, worker.tie, WORKER, value, worker))
                worker.queued_s = worker.due_s
                continue
            worker.queued_s = NEVER
            self.progress(worker, now)
            self.settle(worker, now)
        return None

    def run(self, in_flight: int, grow: Grow | None) -> Replayed:
        batch = self.batch
        count = len(batch)
        started = min(in_flight, count)
        left_s = -1.0
        for session in range(started):
            self.push(0.0, TURN, session)
        if grow is not None and grow.remaining >= count:
            left_s = 0.0
            self.push(grow.delay_s, GROW, 0)
        while (event := self.next()) is not None:
            now, kind, session = event
            if kind == GROW:
                if grow is not None:
                    self.add(grow)
            else:
                self.ends_s.append(now)
                if started < count:
                    self.push(now, TURN, started)
                    started += 1
                if grow is not None and left_s < 0 and count - len(self.ends_s) <= grow.remaining:
                    left_s = now
                    self.push(now + grow.delay_s, GROW, 0)
        return Replayed(self.ends_s[-1] if self.ends_s else 0.0, tuple(self.ends_s), max(left_s, 0.0), self.computed)

    def flow(self, pipeline: Pipeline) -> Flowed:
        """Sessions are those of batch after batch."""
        size, group = pipeline.size, pipeline.group
        count = len(self.batch) // size
        starts = [0.0] * (count * size)
        ends = [0.0] * (count * size)
        left = [size] * count
        begun: list[float] = []
        trained, running, started = 0, 0, 0
        now, free_s = 0.0, 0.0
        most = max(pipeline.in_flight, size)  # at least one batch fits, or none could be completed
        while True:
            while started < count * size and started // size < trained + pipeline.ahead and running + group <= most:
                for session in range(started, started + group):
                    starts[session] = now
                    self.push(now, TURN, session)
                started += group
                running += group
            event = self.next()
            if event is None:
                break
            now, kind, session = event
            if kind == GROW:
                trained += 1
            else:
                running -= 1
                ends[session] = now
                left[session // size] -= 1
                while len(begun) < count and not left[len(begun)]:
                    begun.append(max(now, free_s))
                    free_s = begun[-1] + pipeline.train_s
                    self.push(free_s, GROW, 0)
        batches = range(0, count * size, size)
        return Flowed(
            tuple(begun),
            tuple(tuple(starts[at : at + size]) for at in batches),
            tuple(tuple(ends[at : at + size]) for at in batches),
        )

    def add(self, grow: Grow) -> None:
        self.prefillers += [_Worker(True) for _ in range(grow.prefill)]
        self.decoders += [_Worker() for _ in range(grow.decode + grow.colocated)]

    # ---- a turn ----

    def request(self, session: int, now: float) -> None:
        """The next turn's prompt is there: place it, as the router does, and let it in."""
        number = self.turn[session]
        turn = self.now_turn[session] = self.batch[session][number]
        missed = self.machine.missed
        if missed > 0:
            self.rewritten[session] = (session * GOLDEN + number * SILVER) % 1.0 < missed
        context = self.context[session] = self.context[session] + turn[0]
        home = self.home[session] = self.place(self.decoders, self.home[session], context)
        home.load += 1
        ended = self.progress(home, now)
        home.waiting.append(session)
        self.admit(home, now)
        # What it does goes on as it was unless something ended, or a prompt came while none was computed.
        if ended or (home.prompts and not home.group):
            self.settle(home, now)

    def place(self, workers: list[_Worker], last: _Worker | None, context: float) -> _Worker:
        worth = 0.0
        if last is not None:
            worth = min(self.machine.max_running // 2, 1 + context // self.machine.tokens_per_request)
            if last.load <= worth:
                return last
        least = workers[0]
        lowest = least.load
        for worker in workers:
            if worker.load < lowest:
                least, lowest = worker, worker.load
        if last is None:
            return least
        return last if last.load <= lowest + worth else least

    def admit(self, home: _Worker, now: float) -> None:
        """Let waiting requests in while there is room in the batch and in the KV cache, evicting what is not in use."""
        machine, waiting, cached = self.machine, home.waiting, home.cached
        capacity = machine.capacity
        while waiting:
            session = waiting[0]
            need = self.context[session]
            used = home.used
            if used > 0 and (
                used + need > capacity or len(home.ends) + len(home.prompts) + len(home.group) >= machine.max_running
            ):
                return
            waiting.popleft()
            known = cached.pop(session, 0.0)
            home.cached_tokens -= known
            parts = 1
            if self.rewritten[session]:
                known, parts = 0.0, self.now_turn[session][3]
            used = home.used = used + need
            self.held[session] = need
            while home.cached_tokens > 0 and used + home.cached_tokens > capacity:
                _, gone = cached.popitem(last=False)
                home.cached_tokens -= gone
            missing = max(1.0, parts * (need - known))
            if self.disaggregated:
                self.lacking[session] = missing
                self.prefill(session, now)
            else:
                self.computed += missing
                home.prompts.append((session, missing))

    def prefill(self, session: int, now: float) -> None:
        """On a prefill worker, which knows the session's earlier prompts but not what was replied to the last one."""
        context = self.context[session]
        source = self.source[session] = self.place(self.prefillers, self.source[session], context)
        self.begun_s[session] = now
        source.load += 1
        ended = self.progress(source, now)
        known = source.cached.pop(session, 0.0)
        source.cached_tokens -= known
        parts = 1
        if self.rewritten[session]:
            known, parts = 0.0, self.now_turn[session][3]
        missing = max(1.0, parts * (context - known))
        self.computed += missing
        source.prompts.append((session, missing))
        if ended or not source.group:
            self.settle(source, now)

    def arrived(self, session: int, now: float) -> None:
        """The prompt's KV is with the decoder: the first token is made, it decodes the others."""
        home = self.home[session]
        assert home is not None
        self.progress(home, now)
        heapq.heappush(home.ends, (home.clock + self.now_turn[session][1] - 1, session))
        home.kv += self.context[session]
        self.settle(home, now)

    # ---- a worker ----

    def progress(self, worker: _Worker, now: float) -> bool:
        """Up to now: tokens that were made, replies and prompts that are complete. Whether any are."""
        ended = False
        ends = worker.ends
        if ends:
            elapsed = now - worker.at_s
            if elapsed > 0:
                tokens = elapsed * worker.rate
                worker.clock += tokens
                worker.kv += tokens * len(ends)
            made = worker.clock + 1e-6
            while ends and ends[0][0] <= made:
                self.replied(worker, heapq.heappop(ends)[1], now)
                ended = True
        worker.at_s = now
        group = worker.group
        if group and worker.group_end_s <= now + SLACK:
            worker.group = []
            ended = True
            if worker.prefills:
                for session in group:
                    self.handed_over(worker, session, now)
            else:
                context, clock = self.context, worker.clock
                for session in group:  # its prompt is computed, with the first token: it decodes the others
                    heapq.heappush(ends, (clock + self.now_turn[session][1] - 1, session))
                    worker.kv += context[session]
        return ended

    def replied(self, home: _Worker, session: int, now: float) -> None:
        _, reply, env_s, _ = self.now_turn[session]
        context = self.context[session] + reply
        home.kv -= context - 1
        home.load -= 1
        self.context[session] = context
        home.used -= self.held[session]
        home.cached[session] = context
        home.cached_tokens += context
        self.turn[session] += 1
        self.ties += 1
        heapq.heappush(self.events, (now + env_s, self.ties, TURN, session, None))
        if home.waiting:
            self.admit(home, now)

    def handed_over(self, source: _Worker, session: int, now: float) -> None:
        """What the decoder lacks goes over the worker's link, most of it while the rest was computed."""
        machine, cached = self.machine, source.cached
        source.load -= 1
        context = self.context[session]
        cached[session] = context
        source.cached_tokens += context
        while source.cached_tokens > machine.capacity and len(cached) > 1:
            _, gone = cached.popitem(last=False)
            source.cached_tokens -= gone
        lacking = self.lacking[session]
        link_s = source.link_s = max(source.link_s, self.begun_s[session]) + lacking * machine.transfer_s
        there_s = now + min(lacking, machine.chunk) * machine.transfer_s
        self.ties += 1
        heapq.heappush(self.events, (max(there_s, link_s), self.ties, ARRIVAL, session, None))

    def settle(self, worker: _Worker, now: float) -> None:
        """What it does from now on, until when."""
        ends = worker.ends
        if not worker.group:
            machine, kv = self.machine, worker.kv
            iteration_s = machine.kv_s * kv if kv > 0 else 0.0
            if ends or machine.fused:
                iteration_s += machine.fixed_s
            if worker.prompts:
                self.begin(worker, iteration_s, now)
            else:
                worker.rate = 1 / iteration_s if iteration_s > LEAST_S else 1 / LEAST_S
        due = worker.group_end_s if worker.group else -1.0
        if ends:
            left = ends[0][0] - worker.clock
            first = now + left / worker.rate if left > 0 else now
            if left > 0 and first == now:  # too little to tell: time must go on
                first = math.nextafter(now, math.inf)
            if due < 0 or first < due:
                due = first
        if due < 0:
            worker.stamp += 1
            worker.queued_s = NEVER
            return
        if due < now:
            due = now
        self.ties += 1
        worker.due_s, worker.tie = due, self.ties
        if due < worker.queued_s:
            worker.stamp += 1
            worker.queued_s = due
            heapq.heappush(self.events, (due, self.ties, WORKER, worker.stamp, worker))

    def begin(self, worker: _Worker, iteration_s: float, now: float) -> None:
        """Waiting prompts that one chunk holds are computed together."""
        prompts, chunk, group = worker.prompts, self.machine.chunk, worker.group
        tokens, iterations = 0.0, 1
        while prompts and (not tokens or tokens + prompts[0][1] <= chunk):
            session, more = prompts.popleft()
            tokens += more
            group.append(session)
            parts = self.now_turn[session][3]
            if parts > iterations:
                iterations = parts
        chunks = -int(-tokens // chunk)
        if chunks > iterations:
            iterations = chunks
        took_s = iterations * iteration_s + tokens * self.machine.prefill_s
        worker.group_end_s = now + took_s
        worker.rate = iterations / max(took_s, LEAST_S)


def replay(
    batch: Sequence[Turns],
    machine: Machine,
    prefill: int,
    decode: int,
    colocated: int,
    *,
    in_flight: int = 0,
    grow: Grow | None = None,
) -> Replayed:
    """Play `batch` from its beginning on these workers, at most `in_flight` trajectories at once (0: all)."""
    assert colocated > 0 or (prefill > 0 and decode > 0), "no worker serves"
    run = _Run(batch, machine, 0 if colocated else prefill, colocated or decode)
    return run.run(in_flight or len(batch), grow)


def flow(
    batches: Sequence[Turns], machine: Machine, prefill: int, decode: int, colocated: int, pipeline: Pipeline
) -> Flowed:
    """Play batch after batch, each of `pipeline.size` of these, on these workers; a batch that is not whole is not played."""
    assert colocated > 0 or (prefill > 0 and decode > 0), "no worker serves"
    assert pipeline.size % pipeline.group == 0, "a batch is made of whole groups"
    return _Run(batches, machine, 0 if colocated else prefill, colocated or decode).flow(pipeline)
