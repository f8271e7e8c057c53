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
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

Turns = Sequence[tuple[int, int, float, int]]
"""A trajectory: for each turn the new prompt tokens, the tokens of the reply, the environment's seconds after it; and how many turns
it stands for: where there are too many to replay, consecutive ones are taken together (`merged`)."""

SLACK = 1e-9
SHIFTS = 16
"""Orders in which a batch's trajectories are taken to start, where only how long its last ones last is asked."""
GOLDEN = 0.6180339887498949
SILVER = 0.4142135623730951


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs. Seconds, tokens."""

    fixed_s: float  # A: an iteration's, whatever it holds
    kv_s: float  # per context token of the sequences that decode in it
    prefill_s: float  # t_prefill
    transfer_s: float  # KV of a token, from a prefill worker to a decode worker
    capacity: float  # tokens of KV cache
    chunk: int  # prompt tokens computed in one iteration
    max_running: int  # requests decoded together
    tokens_per_request: int = 4096  # the router takes a cached prefix of so many tokens for worth one more request
    fused: bool = True  # an iteration has its fixed part whatever is in it; else only where something decodes
    missed: float = 0.0  # share of turns whose prefix no cache has, though nothing evicted it: the agent rewrote it


class Grow(msgspec.Struct, frozen=True):
    """More workers while the batch runs: `delay_s` after no more than `remaining` trajectories are left."""

    remaining: int
    delay_s: float
    prefill: int
    decode: int
    colocated: int


class Replayed(msgspec.Struct, frozen=True):
    """Seconds from the start: the end of the batch, of each trajectory in order; and when only `Grow.remaining` were left."""

    makespan_s: float
    ends_s: tuple[float, ...]
    left_s: float = 0.0
    computed: float = 0.0  # prompt tokens that were computed


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """How batches follow one another: `size` trajectories in groups that start together, at most `in_flight` at once, and none of
    a batch before all but `ahead - 1` of the earlier ones are trained, in `train_s` seconds each."""

    size: int
    group: int
    in_flight: int
    ahead: int
    train_s: float


class Flowed(msgspec.Struct, frozen=True):
    """Seconds from the start: when each batch's training began, and when each of its trajectories started and ended."""

    begun_s: tuple[float, ...]
    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]

    @property
    def period_s(self) -> float:
        """Seconds a batch."""
        return self.begun_s[-1] / len(self.begun_s) if self.begun_s else 0.0

    @property
    def stay_s(self) -> float:
        """Seconds a trajectory: how fast work goes on, whatever a batch waits for."""
        count = sum(len(batch) for batch in self.ends_s)
        stays = sum(sum(ends) - sum(starts) for starts, ends in zip(self.starts_s, self.ends_s, strict=True))
        return stays / count if count else 0.0

    def left_s(self, remaining: int) -> float:
        """Expected seconds to a batch's end, seen at any moment while so many of its trajectories were left: the longer they were left
        alone, the more likely is one to see them so. Of a batch of which all are left: the whole.

        A batch's last ones are few, and which trajectory starts last is chance: each batch counts with its trajectories in `SHIFTS`
        orders of starting.
        """
        total, weight = 0.0, 0.0
        for starts, ends in zip(self.starts_s, self.ends_s, strict=True):
            stays = [end - start for start, end in zip(starts, ends, strict=True)]
            size = len(stays)
            done = size - min(max(1, remaining), size)
            for shift in range(min(SHIFTS, size)):
                first = shift * size // min(SHIFTS, size)
                turned = stays[first:] + stays[:first]
                made = sorted([start + stay for start, stay in zip(starts, turned, strict=True)])
                from_s, until_s = made[done - 1] if done else made[0], made[done]
                total += (until_s - from_s) * (made[-1] - (from_s + until_s) / 2)
                weight += until_s - from_s
        return (
            total / weight
            if weight > 0
            else max(
                (ends[-1] - starts[0] for starts, ends in zip(self.starts_s, self.ends_s, strict=True)), default=0.0
            )
        )


class _Worker:
    """`clock`: tokens that each decoding sequence has made here since the start."""

    __slots__ = (
        "at_s",
        "cached",
        "cached_tokens",
        "clock",
        "ends",
        "group",
        "group_end_s",
        "kv",
        "link_s",
        "load",
        "prefills",
        "prompts",
        "rate",
        "stamp",
        "used",
        "waiting",
    )

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
        self.stamp = 0


class _Run:
    """One replay. Sessions are indices of `batch`."""

    def __init__(self, batch: Sequence[Turns], machine: Machine, prefill: int, decode: int) -> None:
        self.machine = machine
        self.batch = batch
        self.disaggregated = prefill > 0
        self.prefillers = [_Worker(True) for _ in range(prefill)]
        self.decoders = [_Worker() for _ in range(decode)]
        count = len(batch)
        self.turn = [0] * count
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

    # kinds of events
    TURN, WORKER, ARRIVAL, GROW = range(4)

    def push(self, at_s: float, kind: int, value: int, worker: _Worker | None = None) -> None:
        self.ties += 1
        heapq.heappush(self.events, (at_s, self.ties, kind, value, worker))

    def run(self, in_flight: int, grow: Grow | None) -> Replayed:
        batch, events = self.batch, self.events
        count = len(batch)
        started = min(in_flight, count)
        left_s = -1.0
        for session in range(started):
            self.push(0.0, self.TURN, session)
        if grow is not None and grow.remaining >= count:
            left_s = 0.0
            self.push(grow.delay_s, self.GROW, 0)
        now = 0.0
        while events:
            now, _, kind, value, worker = heapq.heappop(events)
            if worker is not None and worker.stamp != value:
                continue  # the worker has been looked at since
            if kind == self.GROW:
                if grow is not None:
                    self.add(grow)
            elif self.happens(kind, value, worker, now):
                self.ends_s.append(now)
                if started < count:
                    self.push(now, self.TURN, started)
                    started += 1
                if grow is not None and left_s < 0 and count - len(self.ends_s) <= grow.remaining:
                    left_s = now
                    self.push(now + grow.delay_s, self.GROW, 0)
        return Replayed(self.ends_s[-1] if self.ends_s else 0.0, tuple(self.ends_s), max(left_s, 0.0), self.computed)

    def happens(self, kind: int, value: int, worker: _Worker | None, now: float) -> bool:
        """Whether a trajectory ended with it."""
        if kind == self.WORKER:
            assert worker is not None
            self.progress(worker, now)
            self.settle(worker, now)
        elif kind == self.TURN:
            if self.turn[value] >= len(self.batch[value]):
                return True
            self.request(value, now)
        else:
            home = self.home[value]
            assert home is not None
            self.progress(home, now)
            self.join(home, value)
            self.settle(home, now)
        return False

    def flow(self, pipeline: Pipeline) -> Flowed:
        """Sessions are those of batch after batch."""
        size, group, events = pipeline.size, pipeline.group, self.events
        count = len(self.batch) // size
        starts = [0.0] * (count * size)
        ends = [0.0] * (count * size)
        left = [size] * count
        begun: list[float] = []
        trained, running, started = 0, 0, 0
        now, free_s = 0.0, 0.0
        while True:
            # At least one batch fits, or none could be completed.
            while (
                started < count * size
                and started // size < trained + pipeline.ahead
                and running + group <= max(pipeline.in_flight, size)
            ):
                for session in range(started, started + group):
                    starts[session] = now
                    self.push(now, self.TURN, session)
                started += group
                running += group
            if not events:
                break
            now, _, kind, value, worker = heapq.heappop(events)
            if worker is not None and worker.stamp != value:
                continue
            if kind == self.GROW:
                trained += 1
            elif self.happens(kind, value, worker, now):
                running -= 1
                ends[value] = now
                left[value // size] -= 1
                while len(begun) < count and not left[len(begun)]:
                    begun.append(max(now, free_s))
                    free_s = begun[-1] + pipeline.train_s
                    self.push(free_s, self.GROW, 0)
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
        self.context[session] += self.batch[session][self.turn[session]][0]
        home = self.place(self.decoders, self.home[session], self.context[session])
        if home is not self.home[session]:
            self.home[session] = home
        home.load += 1
        ended = self.progress(home, now)
        home.waiting.append(session)
        self.admit(home, now)
        # What it does goes on as it was unless something ended, or a prompt came while none was computed.
        if ended or (home.prompts and not home.group):
            self.settle(home, now)

    def place(self, workers: list[_Worker], last: _Worker | None, context: float) -> _Worker:
        least = workers[0]
        for worker in workers:
            if worker.load < least.load:
                least = worker
        if last is None:
            return least
        worth = min(self.machine.max_running // 2, 1 + context // self.machine.tokens_per_request)
        return last if last.load <= least.load + worth else least

    def admit(self, home: _Worker, now: float) -> None:
        """Let waiting requests in while there is room in the batch and in the KV cache, evicting what is not in use."""
        machine = self.machine
        while home.waiting:
            session = home.waiting[0]
            need = self.context[session]
            running = len(home.ends) + len(home.prompts) + len(home.group)
            if home.used > 0 and (running >= machine.max_running or home.used + need > machine.capacity):
                return
            home.waiting.popleft()
            known = home.cached.pop(session, 0.0)
            home.cached_tokens -= known
            parts = 1
            if self.rewritten(session):
                known, parts = 0.0, self.batch[session][self.turn[session]][3]
            home.used += need
            self.held[session] = need
            while home.cached_tokens > 0 and home.used + home.cached_tokens > machine.capacity:
                _, gone = home.cached.popitem(last=False)
                home.cached_tokens -= gone
            missing = max(1.0, parts * (need - known))
            if self.disaggregated:
                self.lacking[session] = missing
                self.prefill(session, now)
            else:
                self.computed += missing
                home.prompts.append((session, missing))

    def rewritten(self, session: int) -> bool:
        """Whether this turn's prefix is a new one: spread evenly over sessions and turns."""
        missed = self.machine.missed
        return missed > 0 and (session * GOLDEN + self.turn[session] * SILVER) % 1.0 < missed

    def prefill(self, session: int, now: float) -> None:
        """On a prefill worker, which knows the session's earlier prompts but not what was replied to the last one."""
        source = self.place(self.prefillers, self.source[session], self.context[session])
        self.source[session] = source
        self.begun_s[session] = now
        source.load += 1
        ended = self.progress(source, now)
        known = source.cached.pop(session, 0.0)
        source.cached_tokens -= known
        parts = 1
        if self.rewritten(session):
            known, parts = 0.0, self.batch[session][self.turn[session]][3]
        missing = max(1.0, parts * (self.context[session] - known))
        self.computed += missing
        source.prompts.append((session, missing))
        if ended or not source.group:
            self.settle(source, now)

    def join(self, home: _Worker, session: int) -> None:
        """Its prompt is computed, with the first token: it decodes the others."""
        reply = self.batch[session][self.turn[session]][1]
        heapq.heappush(home.ends, (home.clock + max(reply - 1, 0), session))
        home.kv += self.context[session]

    # ---- a worker ----

    def progress(self, worker: _Worker, now: float) -> bool:
        """Up to now: tokens that were made, replies and prompts that are complete. Whether any are."""
        ends = worker.ends
        elapsed = now - worker.at_s
        if elapsed > 0:
            worker.at_s = now
            if ends:
                tokens = elapsed * worker.rate
                worker.clock += tokens
                worker.kv += tokens * len(ends)
        ended = False
        while ends and ends[0][0] <= worker.clock + 1e-6:
            _, session = heapq.heappop(ends)
            self.replied(worker, session, now)
            ended = True
        if worker.group and worker.group_end_s <= now + SLACK:
            group, worker.group = worker.group, []
            ended = True
            if worker.prefills:
                for session in group:
                    self.handed_over(worker, session, now)
            else:
                for session in group:
                    self.join(worker, session)
        return ended

    def replied(self, home: _Worker, session: int, now: float) -> None:
        _, reply, env_s, _ = self.batch[session][self.turn[session]]
        context = self.context[session] + reply
        home.kv -= context - 1
        home.load -= 1
        self.context[session] = context
        home.used -= self.held[session]
        home.cached[session] = context
        home.cached_tokens += context
        self.turn[session] += 1
        self.push(now + env_s, self.TURN, session)
        if home.waiting:
            self.admit(home, now)

    def handed_over(self, source: _Worker, session: int, now: float) -> None:
        """What the decoder lacks goes over the worker's link, most of it while the rest was computed."""
        machine = self.machine
        source.load -= 1
        context = self.context[session]
        source.cached[session] = context
        source.cached_tokens += context
        while source.cached_tokens > machine.capacity and len(source.cached) > 1:
            _, gone = source.cached.popitem(last=False)
            source.cached_tokens -= gone
        lacking = self.lacking[session]
        source.link_s = max(source.link_s, self.begun_s[session]) + lacking * machine.transfer_s
        tail_s = min(lacking, machine.chunk) * machine.transfer_s
        self.push(max(now + tail_s, source.link_s), self.ARRIVAL, session)

    def settle(self, worker: _Worker, now: float) -> None:
        """What it does from now on, until when."""
        machine, ends = self.machine, worker.ends
        iteration_s = machine.kv_s * worker.kv if worker.kv > 0 else 0.0
        if ends or machine.fused:
            iteration_s += machine.fixed_s
        if not worker.group and worker.prompts:
            tokens, iterations = 0.0, 1
            prompts, batch, chunk = worker.prompts, self.batch, machine.chunk
            while prompts and (not tokens or tokens + prompts[0][1] <= chunk):
                session, more = prompts.popleft()
                tokens += more
                worker.group.append(session)
                parts = batch[session][self.turn[session]][3]
                if parts > iterations:
                    iterations = parts
            chunks = -int(-tokens // chunk)
            if chunks > iterations:
                iterations = chunks
            took_s = iterations * iteration_s + tokens * machine.prefill_s
            worker.group_end_s = now + took_s
            worker.rate = iterations / took_s if took_s > 0 else 1e12
        elif not worker.group:
            worker.rate = 1 / iteration_s if iteration_s > 0 else 1e12
        due = worker.group_end_s if worker.group else -1.0
        if ends:
            left = ends[0][0] - worker.clock
            first = now + left / worker.rate if left > 0 else now
            if due < 0 or first < due:
                due = first
        worker.stamp += 1
        if due >= 0:
            self.ties += 1
            heapq.heappush(self.events, (due if due > now else now, self.ties, self.WORKER, worker.stamp, worker))


def merged(turns: Turns, parts: int) -> Turns:
    """The same trajectory in turns that stand for `parts` consecutive ones each: the same sums, fewer events."""
    if parts <= 1:
        return turns
    found: list[tuple[int, int, float, int]] = []
    for at in range(0, len(turns), parts):
        span = turns[at : at + parts]
        found.append(
            (sum(t[0] for t in span), sum(t[1] for t in span), sum(t[2] for t in span), sum(t[3] for t in span))
        )
    return tuple(found)


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
