"""A serving engine's timing, for millions of requests: `services.timing.engine.EngineModel` by lengths alone. Pure.

The same iterations at the same times (a test holds the two against each other), computed faster by three things: a context is
its session and a length, for a session's contexts only grow; a request that decodes is an entry in a heap by the iteration in
which it ends, so that nothing is touched for a token; and the iterations until the next event are one closed form.

What it leaves out: contexts of different sessions share no prefix (the members of a group do share their task's prompt: about a
fifteenth of what is prefilled).
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from services.timing.engine import Sums
from services.timing.hardware import Hardware

NEVER = math.inf
SLACK_S = 1e-9
"""Sums of floats: an iteration that ends so little after a moment ends at it."""


class Costs:
    """A hardware description as tables, by whole tokens: what an iteration costs. Shared by all engines."""

    def __init__(self, hardware: Hardware, max_running: int, chunk_tokens: int) -> None:
        host_s = hardware.host_s.value
        rows = max_running + 1
        self.linear_s = [host_s + hardware.linear.at(tokens) for tokens in range(max_running + chunk_tokens + 1)]
        self.head_s = [hardware.head.at(count) for count in range(2 * rows)]
        self.base_s = [linear + head for linear, head in zip(self.linear_s, self.head_s, strict=False)]
        self.prefill_s = None
        if hardware.prefill is not None:
            self.prefill_s = [hardware.prefill.at(tokens) for tokens in range(chunk_tokens + 1)]
        self.knee = hardware.attention_knee_tokens
        self.floor_s = hardware.attention_floor_s.value
        self.fixed_s = hardware.attention_fixed_s.value
        self.slope_s = hardware.attention_s_per_token.value
        self.pair_s = hardware.prefill_attention_s_per_pair.value

    def attention_s(self, kv_tokens: int) -> float:
        """Reading the KV cache of a decode iteration."""
        return max(self.floor_s, self.fixed_s + kv_tokens * self.slope_s) if kv_tokens > 0 else 0.0

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        """An iteration that only decodes."""
        return self.base_s[sequences] + self.attention_s(kv_tokens)


class Work:
    """A request in an engine: continue `start` tokens of a session's context until they are `total`."""

    __slots__ = (
        "cached", "computed", "end_at", "engine", "first_s", "length", "number", "of", "remote", "seen", "session", "shareable",
        "start", "total", "used_at", "version",
    )  # fmt: skip

    def __init__(self, session: str, start: int, total: int, of: object, *, remote: bool = False) -> None:
        self.session = session
        self.start = start
        self.total = total
        self.of = of  # its owner's
        self.remote = remote  # another engine computes the context; not there yet
        self.length = start  # while it decodes: without the tokens made since (see `FastEngine.length`)
        self.computed = 0
        self.cached = 0  # of the session's stored tokens: those that it runs on
        self.seen = -1  # tokens found cached when first admitted
        self.end_at = -1  # the engine's iteration in which it ends; -1: does not decode
        self.first_s = NEVER  # when its first token was made
        self.shareable = True
        self.engine: FastEngine | None = None
        self.version = -1
        self.number = 0  # in order of admission
        self.used_at = 0  # its session's prefix, when it was admitted


class FastEngine:
    """See the module. Call `advance(t)` before anything that is asked at `t`; times must not run backwards.

    `ended`, `reserved` and `dropped` collect what happened, for the caller to take; `next_s` is when it should look again. Those in
    `dropped` lost the room that the caller was told of; those in `reserved` have room now, be it again: take `dropped` first.
    """

    def __init__(self, costs: Costs, *, max_running: int, chunk_tokens: int, kv_tokens: int) -> None:
        self.costs = costs
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.capacity = kv_tokens
        self.prefill_only = False
        self.sums = Sums()
        self.firsts = 0  # first tokens made beside prefill, which `sums.decoded` does not count
        self.now_s = 0.0
        self.ended: list[tuple[float, Work]] = []
        self.reserved: list[Work] = []
        self.dropped: list[Work] = []
        self._waiting: deque[Work] = deque()
        self._running: dict[Work, None] = {}  # in order of admission
        self._prefilling: list[Work] = []  # of those: context not computed; in the same order
        self._heap: list[tuple[int, int, Work]] = []  # (iteration, number, work); some have left
        self._numbers = 0
        self._decoding = 0
        self._kv = 0  # tokens of all that decode
        self._counter = 0  # decode iterations so far
        self._at_s = 0.0  # the iteration that runs began then
        self._chunks: list[tuple[Work, int]] = []
        self._runs = False  # an iteration runs
        self._iteration_s = 0.0
        self._most = 0  # of a run of decode iterations: how many are alike
        self._passed = (
            False  # the iteration, or the last one, only computes prompts: so do engines that compute them apart
        )
        self._known: list[Work] = []  # let in with all their context: the next decode iteration makes their first token
        self._changed = False
        self._paused = False
        # memory: tokens stored by session, those not in use in order of last use
        self._stored = 0
        self._locked = 0
        self._held = 0
        self._sessions: dict[str, int] = {}
        self._used: dict[str, int] = {}  # of those: when last used
        self._clock = 0

    # ---- what is asked ----

    @property
    def requests(self) -> int:
        """All that are here."""
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def next_s(self) -> float:
        """When to look again."""
        if not self._runs:
            return self.now_s if self._changed and not self._paused else NEVER
        if self._changed or self._chunks:
            return self._at_s + self._iteration_s
        return self._at_s + self._decodes_s(self._most)

    def __contains__(self, work: Work) -> bool:
        return work.engine is self

    def works(self) -> list[Work]:
        """All requests here."""
        return [*self._running, *self._waiting]

    def length(self, work: Work) -> int:
        """Tokens that a request's context has by now."""
        return work.total - (work.end_at - self._counter) if work.end_at >= 0 else work.length

    def submit(self, work: Work) -> None:
        work.engine = self
        self._waiting.append(work)
        self._changed = True

    def arrived(self, work: Work) -> bool:
        """A remote context came, with one token more: True if that was the last."""
        work.remote = False
        self._changed = True
        if work not in self._running:
            return False
        work.computed = work.length
        work.length += 1
        work.first_s = self.now_s
        if not self._hold(1):
            self._make_room(1)
            if work not in self._running:
                return False
            self._hold(1)
        if work.length < work.total:
            self._decode(work)
            return False
        self.end(work)
        return True

    def end(self, work: Work) -> int:
        """The request is over, finished or not: tokens that it made. Its context stays cached."""
        length = self.length(work)
        if work in self._running:
            computed = 0 if work.remote else length - 1 if work.end_at >= 0 else work.computed
            work.length = length
            self._leave(work)
            self._give_back(work, computed)
        else:
            self._waiting.remove(work)
        work.engine = None
        self._changed = True
        return length - work.start

    def pause(self) -> None:
        """No iteration begins; the one that runs is dropped."""
        self._paused = True
        self._drop_iteration()

    def resume(self) -> None:
        self._paused = False
        self._changed = True

    def retract(self) -> None:
        """All running requests give their KV cache back and wait again."""
        while self._running:
            self._retract(next(reversed(self._running)))
        self._drop_iteration()

    def new_weights(self) -> None:
        """KV of the old weights serves those that have it, and no others."""
        self._sessions.clear()
        self._used.clear()
        self._stored = self._locked
        for work in self._running:
            work.shareable = False

    def clear(self) -> None:
        """Nothing runs, and nothing is cached."""
        assert not self._running and not self._waiting
        self._sessions.clear()
        self._used.clear()
        self._stored = self._locked = self._held = 0

    # ---- the clock ----

    def advance(self, now_s: float) -> None:
        """Run until then; an iteration that ends later goes on."""
        self.now_s = now_s
        while True:
            if not self._runs and not self._begin():
                self._at_s = now_s
                break
            room_s = now_s - self._at_s + SLACK_S
            if self._iteration_s > room_s:
                break
            if self._chunks:
                self._finish_mixed()
                continue
            most = 1 if self._changed else self._most
            if self._decodes_s(most) <= room_s:
                self._finish_decodes(most)
                continue
            self._finish_decodes(max(1, min(self._fitting(room_s), most - 1)))
            break

    # ---- iterations ----

    def _begin(self) -> bool:
        if self._paused:
            return False
        self._changed = False
        waiting, running = self._waiting, self._running
        while waiting and len(running) < self.max_running and self._admit(waiting[0]):
            work = waiting.popleft()
            running[work] = None
            self._numbers += 1
            work.number = self._numbers
            if work.remote:
                self.reserved.append(work)
            elif work.length - work.computed > (0 if self.prefill_only else 1):
                self._prefilling.append(work)
            else:
                self._decode(work)
                self._known.append(work)
        while self._decoding > self.capacity - self._held - self._locked:
            self._retract(next(reversed(running)))
        chunks: list[tuple[Work, int]] = []
        decoding, costs = self._decoding, self.costs
        apart = costs.prefill_s is not None
        if self._prefilling and apart and self._passed and decoding:
            self._changed = True  # after this iteration they go on
        elif self._prefilling:
            budget = self.chunk_tokens
            for work in self._prefilling:
                count = min(work.length - work.computed, budget)
                chunks.append((work, count))
                budget -= count
                if not budget:
                    break
        if not decoding and not chunks:
            return False
        self._passed = apart and bool(chunks)
        if chunks:
            new, completed, pairs = 0, 0, 0.0
            for work, count in chunks:
                new += count
                completed += count == work.length - work.computed
                pairs += count * (work.computed + (count + 1) / 2)
            if costs.prefill_s is None:
                seconds = costs.linear_s[decoding + new] + costs.head_s[decoding + completed]
                seconds += costs.attention_s(self._kv) if decoding else 0.0
            else:
                seconds = costs.prefill_s[new]
            self._iteration_s = seconds + costs.pair_s * pairs
        else:
            self._plan_run()
        if self._known and not self._passed:
            for work in self._known:
                if work.first_s == NEVER and work.end_at >= 0:
                    work.first_s = self._at_s + self._iteration_s
            self._known.clear()
        self._chunks = chunks
        self._runs = True
        return True

    def _plan_run(self) -> None:
        """How many decode iterations are alike from here, and what the first takes."""
        decoding, kv, costs, heap = self._decoding, self._kv, self.costs, self._heap
        self._iteration_s = costs.base_s[decoding] + costs.attention_s(kv)
        while heap[0][2].end_at != heap[0][0]:
            heapq.heappop(heap)
        most = heap[0][0] - self._counter
        room = self.capacity - self._held - self._locked
        if room < most * decoding:
            most = max(1, room // decoding)
        if kv < costs.knee < math.inf:
            most = min(most, max(1, int((costs.knee - kv) // decoding)))
        self._most = most

    def _decodes_s(self, count: int) -> float:
        if count == 1 or self._kv < self.costs.knee:
            return count * self._iteration_s
        return count * self._iteration_s + self._decoding * count * (count - 1) / 2 * self.costs.slope_s

    def _fitting(self, room_s: float) -> int:
        first_s = self._iteration_s
        half = 0.0 if self._kv < self.costs.knee else self._decoding * self.costs.slope_s / 2
        if half * room_s < 1e-12 * first_s * first_s:
            return int(room_s / first_s)
        linear = first_s - half
        return int((math.sqrt(linear * linear + 4 * half * room_s) - linear) / (2 * half))

    def _finish_decodes(self, count: int) -> None:
        if count == 1:
            # A context that arrived since the iteration began may have taken the room for its token.
            while self._decoding > self.capacity - self._held - self._locked:
                self._retract(next(reversed(self._running)))
            if not self._runs:
                return
        decoding, sums = self._decoding, self.sums
        seconds = self._decodes_s(count)
        made = decoding * count
        self._at_s += seconds
        sums.iterations += count
        sums.decoded += made
        sums.batch_sum += made
        sums.decode_s += seconds
        self._counter += count
        self._kv += made
        held = self._hold(made)
        assert held, "looked for room before"
        if self._heap[0][0] <= self._counter:
            self._close()
        if self._changed or self._decoding > self.capacity - self._held - self._locked:
            self._runs = False
            self._changed = True
        else:
            self._plan_run()

    def _finish_mixed(self) -> None:
        sums, decoding = self.sums, 0 if self._passed else self._decoding
        self._at_s += self._iteration_s
        decode_s = 0.0
        if decoding:
            decode_s = min(self.costs.decode_s(decoding, self._kv), self._iteration_s)
            sums.iterations += 1
            sums.decoded += decoding
            sums.batch_sum += decoding
            sums.decode_s += decode_s
        sums.prefill_s += self._iteration_s - decode_s
        self._runs, self._changed = False, True
        ready: list[Work] = []
        for work, count in self._chunks:
            sums.prefilled += count
            work.computed += count
            if work.computed == work.length:
                ready.append(work)
        self._chunks = []
        if decoding:
            self._counter += 1
            self._kv += decoding
        needed = decoding + len(ready)
        for work in ready:
            work.length += 1
        if not self._hold(needed):
            # Those that grow take their room in order of admission; the youngest make it.
            before = set(ready)
            while needed > self.capacity - self._held - self._locked:
                youngest = next(reversed(self._running))
                needed -= youngest.end_at >= 0 or youngest in before
                self._retract(youngest, grown=youngest.end_at >= 0 or youngest in before)
            self._hold(needed)
            ready = [work for work in ready if work in self._running]
        if decoding:
            self._close()
        if ready:
            self.firsts += len(ready)
            gone = set(ready)
            self._prefilling = [work for work in self._prefilling if work not in gone]
            for work in ready:
                if work.first_s == NEVER:
                    work.first_s = self._at_s
                if work.length == work.total:
                    self._finished(work)
                else:
                    self._decode(work)

    def _decode(self, work: Work) -> None:
        """It decodes from the next iteration on."""
        work.end_at = self._counter + work.total - work.length
        heapq.heappush(self._heap, (work.end_at, work.number, work))
        self._decoding += 1
        self._kv += work.length

    def _close(self) -> None:
        """End what is complete."""
        heap, counter = self._heap, self._counter
        while heap and heap[0][0] <= counter:
            end_at, _, work = heapq.heappop(heap)
            if work.end_at == end_at:
                if work.first_s == NEVER:
                    work.first_s = self._at_s
                self._finished(work)

    def _finished(self, work: Work) -> None:
        computed = work.computed if work.end_at < 0 else work.total - 1
        self._leave(work)
        work.length = work.total
        self._give_back(work, computed)
        work.engine = None
        self._changed = True
        self.ended.append((self._at_s, work))

    def _leave(self, work: Work) -> None:
        """Out of what runs; the iteration that runs goes on without it."""
        del self._running[work]
        if work.end_at >= 0:
            self._decoding -= 1
            self._kv -= work.total - (work.end_at - self._counter)
            work.end_at = -1
        elif work in self._prefilling:
            self._prefilling.remove(work)
            if self._chunks:
                self._chunks = [(each, count) for each, count in self._chunks if each is not work]
        if self._runs and not self._chunks and (self._passed or not self._decoding):
            self._drop_iteration()

    def _drop_iteration(self) -> None:
        self._runs, self._chunks, self._at_s = False, [], self.now_s
        self._changed = True

    # ---- memory ----

    def _admit(self, work: Work) -> bool:
        found = self._sessions.pop(work.session, 0)
        self._clock += 1
        cached = min(found, work.length - 1)
        spare = len(self._running)
        needed = work.length - cached + spare
        if needed > self.capacity - self._stored - self._held:
            short = needed - (self.capacity - self._stored - self._held)
            # What is locked for it stays; of its session's own tokens those beyond may go.
            if short > self._stored - self._locked - cached:
                if found:
                    self._sessions[work.session] = found
                    self._used[work.session] = self._clock
                return False
            if found > cached:
                beyond = min(found - cached, short)
                self._stored -= beyond
                found -= beyond
                short -= beyond
            self._evict(short)
        self._held += work.length - cached
        if found > cached:
            self._stored -= found - cached
        self._locked += cached
        work.computed = work.cached = cached
        work.used_at = self._clock
        work.shareable = True
        self.sums.cached += cached
        if work.seen < 0:
            work.seen = cached
        return True

    def _hold(self, tokens: int) -> bool:
        short = tokens - (self.capacity - self._stored - self._held)
        if short > 0:
            if short > self._stored - self._locked:
                return False
            self._evict(short)
        self._held += tokens
        return True

    def _evict(self, needed: int) -> None:
        """Forget the ends of the sessions used least recently."""
        sessions = self._sessions
        while needed > 0:
            session = next(iter(sessions))
            length = sessions[session]
            if length > needed:
                sessions[session] = length - needed
                self._stored -= needed
                return
            del sessions[session], self._used[session]
            self._stored -= length
            needed -= length

    def _make_room(self, tokens: int) -> None:
        while tokens > self.capacity - self._held - self._locked and self._running:
            self._retract(next(reversed(self._running)))

    def _retract(self, work: Work, *, grown: bool = False) -> None:
        work.length = self.length(work)
        self._leave(work)
        self._give_back(work, 0, grown=grown)
        work.computed = 0
        self._waiting.appendleft(work)
        if work.remote and work in self.reserved:
            self.reserved.remove(work)  # nobody has heard of that room
        elif work.remote:
            self.dropped.append(work)
        self._changed = True
        self.sums.retracted += 1

    def _give_back(self, work: Work, keep: int, *, grown: bool = False) -> None:
        """Release what it has (`grown`: but for the token it has just made); `keep` leading tokens stay cached."""
        cached = work.cached
        self._locked -= cached
        self._held -= work.length - cached - (1 if grown else 0)
        work.cached = 0
        if not work.shareable:
            self._stored -= cached
            return
        stored = max(keep, cached)
        if stored:
            self._stored += stored - cached
            self._sessions.pop(work.session, None)
            self._sessions[work.session] = stored
            if keep:
                self._clock += 1
                self._used[work.session] = self._clock
            else:  # retracted: its prefix was last used when it was admitted
                self._used[work.session] = work.used_at
                order = sorted(self._sessions, key=self._used.__getitem__)
                self._sessions = {session: self._sessions[session] for session in order}
