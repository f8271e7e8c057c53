"""One serving engine as a queue on a clock: which iterations it runs, what is in them, how long they take (paper 2.2, 3.2, 4.3).

Continuous batching with chunked prefill: an iteration computes at most `chunk_tokens` tokens of contexts that are not computed
yet, first come first served, and one token of every other running request; what the chunk adds to its length is what prefill
costs decoding. Contexts start from their longest cached prefix. A request that runs out of KV cache makes the youngest one
give back what it holds and wait again.

Pure and synchronous: the caller has the clock. `advance_to(t)` returns what happened until t; nothing happens on its own before
`next_event_s()`. Iterations alike (the same requests decoding) are taken in one step, in closed form, so that the cost of
computing is a few microseconds an event, not a token. The worker's emulated engine and the simulator run the same model.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from services.timing.hardware import Hardware
from services.timing.prefix_cache import Node, PrefixCache, Tokens

NEVER = math.inf
_SLACK_S = 1e-9
"""Sums of floats: an iteration that ends so little after a moment ends at it."""


class Event(msgspec.Struct, frozen=True):
    """What happened to a request: "reserved" (a remote context has its room), "dropped" (and has lost it again), "first" (token
    of this submission), "end". `cached`: context tokens that it found computed when it was first let in."""

    at_s: float
    key: int
    kind: str
    cached: int = 0


class Sums(msgspec.Struct):
    """Since the model began; seconds of the caller's clock."""

    iterations: int = 0
    decoded: int = 0
    batch_sum: int = 0
    decode_s: float = 0.0
    prefilled: int = 0
    prefill_s: float = 0.0
    cached: int = 0  # context tokens that need not be computed
    retracted: int = 0


class _Work:
    """A request: `tokens` is all that it will ever be, of which the first `length` are its context now."""

    __slots__ = ("cached", "computed", "held", "key", "length", "node", "remote", "shareable", "start", "tokens")

    def __init__(self, key: int, tokens: Tokens, start: int, remote: bool) -> None:
        self.key = key
        self.tokens = tokens
        self.start = start
        self.length = start
        self.remote = remote  # another engine computes the context; not there yet
        self.cached = -1  # tokens found in the cache when first admitted
        self.computed = 0
        self.held = 0
        self.node: Node | None = None
        self.shareable = True

    @property
    def missing(self) -> int:
        """Context tokens without KV; the last one makes the next token, so 1 means that it decodes."""
        return self.length - self.computed


class _Iteration:
    """What runs now, and the like ones that may follow."""

    __slots__ = ("batch", "chunks", "kv_tokens", "seconds")

    def __init__(self, batch: list[_Work], chunks: list[tuple[_Work, int]], kv_tokens: int, seconds: float) -> None:
        self.batch = batch
        self.chunks = chunks
        self.kv_tokens = kv_tokens
        self.seconds = seconds  # of the first


class EngineModel:
    """See the module's docstring. Times are seconds of the caller's clock, which must not run backwards."""

    def __init__(self, hardware: Hardware, *, max_running: int, chunk_tokens: int, kv_tokens: int) -> None:
        assert max_running >= 1 and chunk_tokens >= 1 and kv_tokens >= 1
        self.hardware = hardware
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.prefill_only = False  # of a prefill engine: a context of one missing token counts as prefill, too
        self.cache = PrefixCache(kv_tokens)
        self.sums = Sums()
        self.now_s = 0.0  # the caller's clock, when it last said
        self._at_s = 0.0  # the iteration that runs began then; without one, the next begins then
        self._waiting: deque[_Work] = deque()
        self._running: list[_Work] = []
        self._works: dict[int, _Work] = {}
        self._iteration: _Iteration | None = None  # began at now_s
        self._changed = False  # since it began: others may join the next
        self._passed = False  # it, or the last one, only computes prompts: so do engines that compute them apart
        self._dropped: list[Event] = []  # to be told at the next advance
        self._paused = False

    # ---- what is asked ----

    @property
    def context_limit(self) -> int:
        """Tokens that a context and its reply may have together."""
        return min(self.hardware.max_context_tokens, self.cache.capacity)

    @property
    def running(self) -> int:
        """Requests that hold KV cache."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Requests that wait for it."""
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._works

    def requests(self) -> list[int]:
        """All requests here, in order of submission."""
        return list(self._works)

    def submit(self, key: int, tokens: Tokens, start: int, *, remote: bool = False) -> None:
        """At `now_s`: continue the context `tokens[:start]` until it is all of `tokens`.

        `remote`: another engine computes the context; "reserved" says when there is room for it, `arrived` that it came.
        """
        assert key not in self._works and 0 < start < len(tokens) <= self.context_limit, f"request {key}"
        work = self._works[key] = _Work(key, tokens, start, remote)
        self._waiting.append(work)
        self._changed = True

    def arrived(self, key: int) -> bool:
        """The KV of a remote context came, with one token more. True if that was the last: the request has ended.

        If its room was taken by another meanwhile, nothing came: the context is computed here.
        """
        work = self._works[key]
        if not work.remote:
            return False
        work.remote = False
        self._changed = True
        if work.node is None:
            return False
        work.computed = work.length
        work.length += 1
        self._hold(work)
        if work.length < len(work.tokens):
            return False
        self.end(key)
        return True

    def end(self, key: int) -> int:
        """At `now_s`: the request is over, finished or not; returns how many tokens it made. Its KV stays cached."""
        work = self._works.pop(key)
        if work.node is None:
            self._waiting.remove(work)
        else:
            self._running.remove(work)
            computed = 0 if work.remote else work.computed
            self._give_back(work, keep=computed)
        self._forget(work)
        return work.length - work.start

    def made(self, key: int) -> int:
        """Tokens that a request has made so far."""
        work = self._works[key]
        return work.length - work.start

    def cached(self, key: int) -> int:
        """Context tokens that it found computed when it was first let in; -1 before that."""
        return self._works[key].cached

    def pause(self) -> None:
        """No iteration begins; the one that runs is dropped, and computed again after `resume`."""
        self._paused = True
        self._drop_iteration()

    def resume(self) -> None:
        """Go on at `now_s`."""
        self._paused = False
        self._changed = True

    def retract(self) -> None:
        """All running requests give their KV cache back and wait again, the oldest first."""
        for work in self._running[::-1]:
            self._retract(work)
        self._drop_iteration()

    def new_weights(self) -> None:
        """KV of the old weights serves those that have it, and no others."""
        self.cache.flush()
        for work in self._running:
            work.shareable = False

    def clear(self) -> None:
        """Nothing runs; nothing is cached either."""
        assert not self._works, "end all requests first"
        self.cache = PrefixCache(self.cache.capacity)

    # ---- the clock ----

    def next_event_s(self) -> float:
        """Until then nothing happens that `advance_to` would tell, unless something is asked. It may be `now_s`."""
        iteration = self._iteration
        if iteration is None:
            return self.now_s if self._changed and not self._paused else NEVER
        return self._at_s + (
            iteration.seconds if iteration.chunks else self._decodes_s(iteration, self._most(iteration))
        )

    def advance_to(self, now_s: float) -> list[Event]:
        """Run until `now_s`; an iteration that ends later goes on."""
        self.now_s = max(self.now_s, now_s)
        events: list[Event] = []
        while True:
            iteration = self._iteration or self._begin(events)
            if self._dropped:
                events += self._dropped
                self._dropped.clear()
            if iteration is None:
                self._at_s = self.now_s
                return events
            room_s = self.now_s - self._at_s + _SLACK_S
            if iteration.chunks:
                if iteration.seconds > room_s:
                    return events
                self._finish_mixed(iteration, events)
                continue
            most = self._most(iteration)
            count = min(most, self._fitting(iteration, room_s))
            if count:
                self._finish_decodes(iteration, count, events)
            if count < most:
                return events

    # ---- iterations ----

    def _begin(self, events: list[Event]) -> _Iteration | None:
        """Let requests in and compose the next iteration, which begins now; None if there is nothing to do."""
        if self._paused:
            return None
        self._changed = False
        while self._waiting and len(self._running) < self.max_running and self._admit(self._waiting[0]):
            work = self._waiting.popleft()
            self._running.append(work)
            if work.remote:
                events.append(Event(self._at_s, work.key, "reserved", work.computed))
        batch = self._decoding()  # first: it may retract a request that would have had a chunk
        chunks: list[tuple[_Work, int]] = []
        budget = self.chunk_tokens
        least = 0 if self.prefill_only else 1
        for work in self._running:
            if work.missing > least and not work.remote and budget:
                count = min(work.missing, budget)
                budget -= count
                chunks.append((work, count))
        if not batch and not chunks:
            return None
        if self.hardware.prefill is not None:
            if batch and chunks and self._passed:
                chunks, self._changed = [], True  # after this iteration they go on
            self._passed = bool(chunks)
            batch = [] if chunks else batch
        kv_tokens = sum(work.length for work in batch)
        if chunks:
            shape = tuple((count, work.computed) for work, count in chunks)
            completed = sum(count == work.missing for work, count in chunks)
            seconds = self.hardware.iteration_s(len(batch), kv_tokens, shape, completed)
        else:
            seconds = self.hardware.decode_s(len(batch), kv_tokens)
        self._iteration = _Iteration(batch, chunks, kv_tokens, seconds)
        return self._iteration

    def _admit(self, work: _Work) -> bool:
        cache = self.cache
        node, cached = cache.match(work.tokens, work.length - 1)
        cache.lock(node)
        # Room for those that run to grow, else the newcomer would be retracted at once.
        spare = len(self._running)
        if not cache.hold(work.length - cached + spare):
            cache.unlock(node)
            return False
        cache.drop(spare)
        work.node, work.computed, work.held, work.shareable = node, cached, work.length - cached, True
        self.sums.cached += cached
        if work.cached < 0:
            work.cached = cached
        return True

    def _decoding(self) -> list[_Work]:
        """Who decodes next, each with room for one more token: if need be, from the youngest."""
        if self.prefill_only:
            return []
        batch = [work for work in self._running if work.missing == 1 and not work.remote]
        while len(batch) > self.cache.room:
            youngest = self._running[-1]
            assert youngest is not self._running[0], "one request within the context limit must fit"
            self._retract(youngest)
            batch = [work for work in batch if work is not youngest]
        return batch

    def _most(self, iteration: _Iteration) -> int:
        """Iterations from now on that are alike: until one request ends, memory is short, or the cost has its knee."""
        if self._changed:
            return 1
        batch = iteration.batch
        size = len(batch)
        if any(work.length == work.start for work in batch):
            return 1  # a first token
        most = min(len(work.tokens) - work.length for work in batch)
        most = min(most, max(1, self.cache.room // size))
        knee = self.hardware.attention_knee_tokens
        if iteration.kv_tokens < knee < math.inf:
            most = min(most, max(1, int((knee - iteration.kv_tokens) // size)))
        return most

    def _decodes_s(self, iteration: _Iteration, count: int) -> float:
        """The next `count` iterations together: each reads the KV that the one before made."""
        pairs = len(iteration.batch) * count * (count - 1) / 2
        return count * iteration.seconds + pairs * self._slope(iteration)

    def _slope(self, iteration: _Iteration) -> float:
        """What a token of KV cache more costs an iteration."""
        below = iteration.kv_tokens < self.hardware.attention_knee_tokens
        return 0.0 if below else self.hardware.attention_s_per_token.value

    def _fitting(self, iteration: _Iteration, room_s: float) -> int:
        """How many of them end within `room_s`."""
        half = len(iteration.batch) * self._slope(iteration) / 2
        if half * room_s < 1e-12 * iteration.seconds**2:
            return int(room_s / iteration.seconds)
        linear = iteration.seconds - half
        return int((math.sqrt(linear * linear + 4 * half * room_s) - linear) / (2 * half))

    def _finish_decodes(self, iteration: _Iteration, count: int, events: list[Event]) -> None:
        batch = iteration.batch
        seconds = self._decodes_s(iteration, count)
        self._at_s += seconds
        self._count_decodes(len(batch), count, seconds)
        self._iteration = None
        first = [work for work in batch if work.length == work.start]
        for work in batch:
            work.computed += count
            work.length += count
        if self.cache.hold(len(batch) * count):
            for work in batch:
                work.held += count
        else:
            assert count == 1, "looked for room before"
            self._hold_each(batch)
        self._close(batch, first, events)
        if len(batch) > self.cache.room:
            self._changed = True
        if not self._changed:
            iteration.kv_tokens += len(batch) * count
            iteration.seconds = self.hardware.decode_s(len(batch), iteration.kv_tokens)
            self._iteration = iteration

    def _finish_mixed(self, iteration: _Iteration, events: list[Event]) -> None:
        batch, sums = iteration.batch, self.sums
        self._at_s += iteration.seconds
        decode_s = min(self.hardware.decode_s(len(batch), iteration.kv_tokens), iteration.seconds) if batch else 0.0
        if batch:
            self._count_decodes(len(batch), 1, decode_s)
        sums.prefill_s += iteration.seconds - decode_s
        self._iteration = None
        self._changed = True
        ready: list[_Work] = []
        for work, count in iteration.chunks:
            sums.prefilled += count
            work.computed += count
            if not work.missing:
                ready.append(work)
        for work in batch:
            work.computed += 1
        works = batch + ready
        first = [work for work in works if work.length == work.start]
        for work in works:
            work.length += 1
        self._hold_each(works)
        self._close(works, first, events)

    def _count_decodes(self, size: int, count: int, seconds: float) -> None:
        sums = self.sums
        sums.iterations += count
        sums.decoded += size * count
        sums.batch_sum += size * count
        sums.decode_s += seconds

    def _close(self, works: list[_Work], first: list[_Work], events: list[Event]) -> None:
        """Tell of first tokens, and end what is complete."""
        events += [Event(self._at_s, work.key, "first", work.cached) for work in first]
        for work in works:
            if work.length == len(work.tokens):
                events.append(Event(self._at_s, work.key, "end", work.cached))
                self.end(work.key)

    # ---- memory ----

    def _hold_each(self, works: list[_Work]) -> None:
        for work in works:
            if work.node is not None:  # else it was retracted for the room of another
                self._hold(work)

    def _hold(self, work: _Work) -> None:
        """Room for one token more of a running request; if need be from the youngest, which may be this one."""
        while not self.cache.hold(1):
            youngest = self._running[-1]
            self._retract(youngest)
            if youngest is work:
                return
        work.held += 1

    def _retract(self, work: _Work) -> None:
        self._running.remove(work)
        self._waiting.appendleft(work)
        if work.remote:
            self._dropped.append(Event(self.now_s, work.key, "dropped"))
        self._give_back(work, keep=0)
        self._forget(work)
        self.sums.retracted += 1

    def _give_back(self, work: _Work, *, keep: int) -> None:
        """Release what a request has; `keep` leading tokens go to the prefix cache."""
        assert work.node is not None
        self.cache.unlock(work.node)
        self.cache.drop(work.held)
        if keep and work.shareable:
            self.cache.store(work.tokens[:keep])
        work.node, work.held, work.computed = None, 0, 0

    def _forget(self, work: _Work) -> None:
        """The iteration that runs goes on without it."""
        self._changed = True
        iteration = self._iteration
        if iteration is None:
            return
        if work in iteration.batch:
            iteration.batch.remove(work)
            iteration.kv_tokens -= work.length
        iteration.chunks = [(each, count) for each, count in iteration.chunks if each is not work]
        if not iteration.batch and not iteration.chunks:
            self._drop_iteration()

    def _drop_iteration(self) -> None:
        self._iteration, self._at_s = None, self.now_s
        self._changed = True
