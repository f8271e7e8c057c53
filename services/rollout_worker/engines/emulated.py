"""The emulated engine: no arithmetic; it waits as a GPU worker would, by the timing model, on a clock that may run faster.

Owns one `EngineModel` and the replies in it. Everything the worker's process, the bus and the edges do is real; tokens are made
up, the same for the same (seed, index), so that a resumed reply goes on as an uninterrupted one would; weights are a version
number. A reply is as long as it was asked to be, unless a made-up token is one of its stop ids. With `replies`, they say what the
model answers, so that what needs sense (an agent's commands) can run on it.

Disaggregated, prefill and decode engines speak the torch engine's protocol over real connections, without pages: the time that
KV takes on its way is waited out before the first token. Only the last chunk's is: the chunks before it travel while the next is
computed. That the link is shared is not modelled.

All seconds that it reports are real ones: a job in which every part is scaled alike measures itself consistently.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final, Protocol

from messages.ids import PolicyVersion, Role
from services.jobfile import RolloutSection
from services.rollout_worker.engines.base import EngineError, GenerateSpec, Load, Tokens
from services.rollout_worker.engines.ends import end_of, finish_of, last_chunk
from services.rollout_worker.engines.kv_protocol import First, Hello, Pages, ProtocolError, digest
from services.rollout_worker.engines.kv_transfer import HandOverError, Limits, PrefillSide, Sender, receive
from services.rollout_worker.engines.replies import Replies
from services.snapshot import SnapshotError, version_of
from services.timing.engine import NEVER, EngineModel, Event
from services.timing.hardware import Hardware

NO_WEIGHTS: Final = PolicyVersion(-1)
TOKEN_IDS: Final = 1 << 31
"""Contexts are given to the model as arrays of 32 bits: a list takes two to nine times as much memory, and a fleet remembers many."""
FLUSH_S: Final = 0.1
"""Real seconds after which a running reply's tokens are handed out, but for the first, which is at once: a chunk costs worker and
edge about 0.1 ms each, and nobody reads along."""
QUEUE_FACTOR: Final = 8
"""Requests that may wait, in units of `max_running`, as in the torch engine."""
FIRST_ID: Final = 32
IDS: Final = 95
"""Ids that are made up: printable ASCII, one byte each on the wire."""
LOGPROB: Final = -1.0
LIMITS: Final = Limits()


class Clock(Protocol):
    """Emulated seconds."""

    def now(self) -> float: ...

    def real(self, seconds: float) -> float:
        """Real seconds that so many emulated ones take."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class ScaledClock:
    """`scale` emulated seconds a second of the event loop."""

    def __init__(self, scale: float) -> None:
        assert scale > 0
        self._scale = scale

    def now(self) -> float:
        """Since some moment."""
        return asyncio.get_running_loop().time() * self._scale

    def real(self, seconds: float) -> float:
        """Real seconds that so many emulated ones take."""
        return seconds / self._scale

    async def sleep(self, seconds: float) -> None:
        """For so many emulated seconds; none or fewer: not at all."""
        if seconds > 0:
            await asyncio.sleep(seconds / self._scale)


class _Reply:
    """A request: its stream, and what of it was handed out."""

    __slots__ = ("cached", "chunks", "finish", "prompt_len", "sent", "sent_at", "spec", "start", "tokens")

    def __init__(self, spec: GenerateSpec, tokens: list[int], finish: str, now: float) -> None:
        self.spec = spec
        self.tokens = tokens  # prompt, prefix and all that will be made
        self.finish = finish  # how it ends if nothing comes in between
        self.prompt_len = len(spec.prompt)
        self.start = self.sent = self.prompt_len + len(spec.prefix)
        self.sent_at = now
        self.cached = 0
        self.chunks: asyncio.Queue[Tokens] = asyncio.Queue()


def made_up(seed: int, index: int) -> int:
    """Token `index` of a reply with this seed."""
    mixed = (seed * 0x9E3779B97F4A7C15 + index * 0xC2B2AE3D27D4EB4F) & 0xFFFFFFFFFFFFFFFF
    return FIRST_ID + (((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) >> 32) % IDS


class EmulatedEngine:
    """See `Engine`. `address`: where other engines reach this one. `prepared_s`: emulated seconds of preparation before `start`."""

    def __init__(
        self,
        hardware: Hardware,
        rollout: RolloutSection,
        clock: Clock,
        *,
        address: str = "127.0.0.1",
        prepared_s: float = 0.0,
        limits: Limits = LIMITS,
        flush_s: float = FLUSH_S,
        replies: Replies | None = None,
    ) -> None:
        self.hardware = hardware
        self._rollout = rollout
        self._clock = clock
        self._address = address
        self._prepared_s = prepared_s
        self._limits = limits
        self._flush_s = flush_s
        self._script = replies  # None: tokens are made up
        self._model = EngineModel(
            hardware,
            max_running=rollout.max_running,
            chunk_tokens=rollout.prefill_chunk_tokens,
            kv_tokens=rollout.kv_cache_tokens,
        )
        self._version = NO_WEIGHTS
        self._role = Role.COLOCATED
        self._join_s: float | None = hardware.join_s  # what the first role takes after a start
        self._released = False
        self._holds = False  # device memory
        self._replies: dict[int, _Reply] = {}
        self._receiving: dict[int, asyncio.Task[None]] = {}  # contexts on their way here
        self._senders: dict[int, Sender] = {}  # where contexts that are computed here go
        self._prefill_side = PrefillSide(limits, met=self._met, gone=self._gone, expired=self._expired)
        self._numbers = itertools.count(1)
        self._wake: asyncio.Future[None] | None = None
        self._driver: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[str] | None = None

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def endpoint(self) -> str:
        return self._prefill_side.endpoint

    # ---- life ----

    async def start(self) -> None:
        assert self._driver is None, "started twice"
        await self._clock.sleep(self.hardware.prepare_s.value - self._prepared_s)
        try:
            await self._prefill_side.start(self._address)
        except OSError as error:
            raise EngineError(f"cannot listen on {self._address!r} (the node's address): {error}") from error
        self._failure = asyncio.get_running_loop().create_future()
        self._driver = asyncio.create_task(self._drive(), name="emulated-engine")
        self._driver.add_done_callback(self._driver_ended)

    async def stop(self) -> None:
        if self._driver is None:
            return
        await self._prefill_side.stop()
        self._abort(None)
        self._driver.cancel()
        await asyncio.wait([self._driver])

    async def failed(self) -> str:
        assert self._failure is not None, "not started"
        return await asyncio.shield(self._failure)

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self._failure is not None and not self._failure.done():
            error = task.exception()
            self._failure.set_result(f"{type(error).__name__}: {error}")

    async def set_role(self, role: Role) -> None:
        if role not in (Role.COLOCATED, Role.PREFILL, Role.DECODE):
            raise EngineError(f"an engine cannot serve role {role.value!r}")
        if self._replies and role is not self._role:
            raise EngineError(f"{len(self._replies)} requests wait or run: abort them before a change of role")
        if self._join_s is not None:
            await self._clock.sleep(self._join_s)
            self._join_s = None
        elif self._role is not role:
            await self._clock.sleep(self.hardware.set_role_s.value)
        self._role = role
        self._model.prefill_only = role is Role.PREFILL

    async def load_snapshot(self, directory: str, version: PolicyVersion) -> None:
        if self._released:
            raise EngineError("the device memory is released: restore it first")
        try:
            found = await asyncio.to_thread(version_of, Path(directory))
        except SnapshotError as error:
            raise EngineError(str(error)) from error
        if found != version:
            raise EngineError(f"{directory}: holds version {found}, not {version}")
        await self._clock.sleep(self.hardware.load_s)
        self._advance()
        self._hand_out_all()  # under the version that made them
        self._break_off(f"the weights changed to version {version}")
        self._model.new_weights()
        self._version, self._holds = version, True

    async def release(self) -> int:
        if self._replies:
            raise EngineError(f"{len(self._replies)} requests run: abort them before releasing the device memory")
        freed = self.occupied()
        self._released, self._holds = True, False
        self._version = NO_WEIGHTS
        self._model.clear()
        await self._clock.sleep(self.hardware.deactivate_s.value)
        return freed

    async def restore(self) -> None:
        await self._clock.sleep(self.hardware.activate_s.value - self.hardware.load_s)  # the weights follow
        self._released = False
        self._join_s = 0.0

    def occupied(self) -> int:
        kv_bytes = self._model.cache.capacity * self.hardware.kv_bytes_per_token
        return round(self.hardware.weights_bytes + kv_bytes) if self._holds else 0

    # ---- requests ----

    async def generate(self, spec: GenerateSpec) -> AsyncGenerator[Tokens, None]:
        refusal = self._refusal(spec)
        at_once = refusal or finish_of(spec) or self._said_all(spec)
        if at_once:
            yield last_chunk(len(spec.prefix), self._version, "refused" if refusal else at_once, refusal)
            return
        self._advance()
        number, role = next(self._numbers), self._role
        reply = self._replies[number] = self._reply(spec)
        last: Tokens | None = None
        try:
            if role is Role.PREFILL:
                self._expect(number, reply)
            else:
                self._model.submit(number, array("i", reply.tokens), reply.start, remote=role is Role.DECODE)
                self._wake_up()
            while last is None or not last.finish:
                last = await reply.chunks.get()
                yield last
        finally:
            self._free(number)
            if role is Role.PREFILL:
                self._prefill_side.leave(number, end_of(last))

    def _refusal(self, spec: GenerateSpec) -> str:
        """Why a request cannot run here, "" if it can."""
        role = self._role
        length, limit = len(spec.prompt) + len(spec.prefix), self._model.context_limit
        if self._version == NO_WEIGHTS:
            return "no weights loaded"
        if not spec.prompt:
            return "the prompt is empty"
        if length >= limit:
            return f"prompt and prefix of {length} tokens leave no room in a context of {limit}"
        if min(spec.prompt) < 0 or min(spec.prefix, default=0) < 0:
            return "token ids must not be negative"
        if max(spec.prompt) >= TOKEN_IDS or max(spec.prefix, default=0) >= TOKEN_IDS:
            return f"token ids must be below {TOKEN_IDS}"
        if role in (Role.PREFILL, Role.DECODE) and spec.bootstrap_room < 0:
            return f"a {role.value} engine needs the bootstrap triple"
        # Requests that wait for their receivers are bounded by the rooms, and cost nothing.
        if role is not Role.PREFILL and len(self._replies) >= self._rollout.max_running * (1 + QUEUE_FACTOR):
            return "the queue is full"
        return ""

    def _reply(self, spec: GenerateSpec) -> _Reply:
        """All tokens that a request will make here, and how it ends; on the prefill side that is one."""
        begin = len(spec.prefix)
        end = min(spec.max_new_tokens, self._model.context_limit - len(spec.prompt))
        end = begin + 1 if self._role is Role.PREFILL else end
        finish = "length"
        if self._script is not None:
            said = self._script.reply(spec.prompt, spec.seed)
            new = said[begin:end]
            finish = "stop" if len(said) <= end else finish
        else:
            new = [made_up(spec.seed, index) for index in range(begin, end)]
        stops = [new.index(token) for token in spec.stop_ids if token in new]
        if stops:
            new, finish = new[: min(stops) + 1], "stop"
        return _Reply(spec, [*spec.prompt, *spec.prefix, *new], finish, asyncio.get_running_loop().time())

    def _said_all(self, spec: GenerateSpec) -> str:
        """How a request ends whose prefix is all that the script has to say."""
        return (
            "stop"
            if self._script is not None and len(self._script.reply(spec.prompt, spec.seed)) <= len(spec.prefix)
            else ""
        )

    def _free(self, number: int) -> None:
        """Whatever there is of a request, if anything."""
        self._replies.pop(number, None)
        self._senders.pop(number, None)
        self._stop_receiving(number)
        if number in self._model:
            self._advance()
        if number in self._model:
            self._model.end(number)
            self._wake_up()

    async def abort(self, request: str | None = None) -> int:
        self._advance()
        return self._abort(request)

    def _abort(self, request: str | None) -> int:
        chosen = [number for number, reply in self._replies.items() if request in (None, reply.spec.request)]
        ended = [number for number in chosen if self._end(number, "interrupted", "aborted")]
        return len(ended)

    def _end(self, number: int, finish: str, reason: str) -> bool:
        """End a request early, with what it has; False if it has ended and its reader does not know yet."""
        reply = self._replies.get(number)
        if reply is None:
            return False
        made = self._model.end(number) if number in self._model else 0
        prefill = self._role is Role.PREFILL  # what it makes is its receiver's
        last = self._hand_out(reply, reply.start + (0 if prefill else made), finish=finish, reason=reason)
        del self._replies[number]
        self._senders.pop(number, None)
        self._stop_receiving(number)
        if prefill:
            self._prefill_side.leave(number, end_of(last))
        self._wake_up()
        return True

    async def pause(self, mode: str) -> None:
        if mode not in ("abort", "retract", "in_place"):
            raise EngineError(f"pause mode {mode!r} is none of abort, retract, in_place")
        self._advance()
        if mode == "abort":
            self._abort(None)
        elif mode == "retract":
            self._break_off("the worker pauses")
            self._model.retract()
        self._model.pause()

    async def resume(self) -> None:
        self._advance()
        self._model.resume()
        self._wake_up()

    def load(self) -> Load:
        sums, real = self._model.sums, self._clock.real
        return Load(
            running=self._model.running,
            queued=self._model.queued,
            decode_iterations=sums.iterations,
            decode_tokens=sums.decoded,
            decode_s=real(sums.decode_s),
            decode_batch_sum=sums.batch_sum,
            prefill_tokens=sums.prefilled,
            prefill_s=real(sums.prefill_s),
        )

    # ---- hand-over: the prefill side ----

    def _expect(self, number: int, reply: _Reply) -> None:
        """The request waits for its receiver."""
        spec = reply.spec
        try:
            key = (spec.bootstrap_room, spec.request, spec.attempt)
            self._prefill_side.expect(number, key, reply.tokens[: reply.start])
        except ProtocolError as error:
            self._end(number, "refused", str(error))

    def _met(self, number: int, sender: Sender) -> None:
        """It has met it: compute the context, if what the receiver holds and wants fits."""
        reply, hello = self._replies[number], sender.hello
        reason = ""
        if self._version == NO_WEIGHTS:
            reason = "the prefill side has no weights"
        elif hello.version != self._version:
            reason = f"the prefill side has version {self._version}, the decode side {hello.version}"
        elif hello.layout != self._layout:
            reason = f"the prefill side's KV is {self._layout}, the decode side's {hello.layout}"
        elif not 0 <= hello.cached < reply.start:
            reason = f"the decode side claims KV of {hello.cached} of {reply.start} tokens"
        if reason:
            self._end(number, "refused", reason)
            return
        self._senders[number] = sender
        self._advance()
        self._model.submit(number, array("i", reply.tokens), reply.start)
        self._wake_up()

    def _hand_over(self, number: int, reply: _Reply, sender: Sender) -> None:
        """The context is computed; what of it is still on its way, and the token after it, arrive a little later."""
        tail = min(reply.start - sender.hello.cached, self._rollout.prefill_chunk_tokens)
        first = First(token=reply.tokens[-1], logprob=LOGPROB, cached=reply.cached)
        wait_s = self._clock.real(self.hardware.transfer_s(tail))

        def send() -> None:
            if self._senders.pop(number, None) is sender:
                sender.send(first)

        asyncio.get_running_loop().call_later(wait_s, send)

    def _gone(self, number: int, handed_over: bool) -> None:
        self._end(number, "handed_over" if handed_over else "abandoned", "")

    def _expired(self, number: int) -> None:
        self._end(number, "interrupted", f"no decode engine came within {self._limits.join_s:g} s")

    # ---- hand-over: the decode side ----

    @property
    def _layout(self) -> str:
        return f"emulated:{self.hardware.name}"

    def _fetch(self, number: int, reply: _Reply, cached: int) -> None:
        """There is room for the context: ask for it."""
        hello = Hello(
            room=reply.spec.bootstrap_room,
            request=reply.spec.request,
            attempt=reply.spec.attempt,
            context=digest(reply.tokens[: reply.start]),
            version=self._version,
            cached=cached,
            layout=self._layout,
        )
        self._receiving[number] = asyncio.create_task(self._receive(number, reply, hello))

    async def _receive(self, number: int, reply: _Reply, hello: Hello) -> None:
        spec = reply.spec
        try:
            first = await receive(spec.bootstrap_host, spec.bootstrap_port, hello, self._limits, _no_pages)
        except HandOverError as error:
            self._receiving.pop(number, None)
            self._advance()
            self._end(number, error.finish, str(error))
            return
        self._receiving.pop(number, None)
        self._advance()
        if number not in self._model:
            return
        if first.token != reply.tokens[reply.start]:
            self._end(
                number, "interrupted", f"the prefill side made token {first.token}, not {reply.tokens[reply.start]}"
            )
            return
        reply.cached = first.cached
        if self._model.arrived(number):
            del self._replies[number]
            self._hand_out(reply, len(reply.tokens), finish=reply.finish)
        else:
            self._hand_out_running(number, reply)
        self._wake_up()

    def _stop_receiving(self, number: int) -> None:
        task = self._receiving.pop(number, None)
        if task is not None:
            task.cancel()

    def _break_off(self, reason: str) -> None:
        """End what is on its way from or to another engine."""
        for number in (*self._receiving, *self._senders):
            self._end(number, "interrupted", reason)

    # ---- the clock ----

    async def _drive(self) -> None:
        """Follow the model: at its events, and every `flush_s` while replies run."""
        loop = asyncio.get_running_loop()
        while True:
            self._advance()
            self._hand_out_due(loop.time())
            wait_s = self._wait_s()
            self._wake = loop.create_future()
            timer = None if wait_s is None else loop.call_later(wait_s, self._wake_up)
            await self._wake
            if timer is not None:
                timer.cancel()

    def _wait_s(self) -> float | None:
        next_s = self._model.next_event_s()
        if next_s == NEVER:
            return None
        return max(0.0, min(self._clock.real(next_s - self._clock.now()), self._flush_s))

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _advance(self) -> None:
        """Bring the model to now, and hand out what ended on the way."""
        for event in self._model.advance_to(self._clock.now()):
            reply = self._replies.get(event.key)
            if reply is not None:
                self._happened(event, reply)

    def _happened(self, event: Event, reply: _Reply) -> None:
        match event.kind:
            case "reserved":
                self._fetch(event.key, reply, event.cached)
            case "dropped":
                self._stop_receiving(event.key)
            case "first":
                reply.cached = event.cached
                if event.key not in self._senders:
                    self._hand_out_running(event.key, reply)  # at once: its edge measures the time until it
            case "end" if event.key in self._senders:
                self._hand_over(event.key, reply, self._senders[event.key])
            case "end":
                del self._replies[event.key]
                self._hand_out(reply, len(reply.tokens), finish=reply.finish)
            case _:
                pass

    # ---- chunks ----

    def _hand_out_due(self, now: float) -> None:
        for number, reply in self._replies.items():
            if now - reply.sent_at >= self._flush_s:
                self._hand_out_running(number, reply)

    def _hand_out_all(self) -> None:
        for number, reply in self._replies.items():
            self._hand_out_running(number, reply)

    def _hand_out_running(self, number: int, reply: _Reply) -> None:
        if self._role is Role.PREFILL or number not in self._model:
            return
        upto = reply.start + self._model.made(number)
        if upto > reply.sent:
            self._hand_out(reply, upto)

    def _hand_out(self, reply: _Reply, upto: int, *, finish: str = "", reason: str = "") -> Tokens:
        tokens = reply.tokens[reply.sent : upto]
        chunk = Tokens(
            offset=reply.sent - reply.prompt_len,
            tokens=tokens,
            logprobs=[LOGPROB] * len(tokens),
            version=self._version,
            finish=finish,
            reason=reason,
            cached_tokens=reply.cached if reply.sent == reply.start else 0,
        )
        reply.sent = upto
        reply.sent_at = asyncio.get_running_loop().time()
        reply.chunks.put_nowait(chunk)
        return chunk


def _no_pages(pages: Pages, data: bytes) -> None:
    """An emulated prefill side sends none; another's layout would have been refused."""
