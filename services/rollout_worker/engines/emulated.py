"""The emulated engine: no arithmetic; it waits as a GPU worker would, by the timing model, on a clock that may run faster.

Owns one `EngineModel` and the replies in it. Everything the worker's process, the bus and the edges do is real; tokens are made
up, the same for the same (seed, index), so that a resumed reply goes on as an uninterrupted one would; weights are a version
number. A reply is as long as it was asked to be, unless a made-up token is one of its stop ids.

All seconds that it reports are real ones: a job in which every part is scaled alike measures itself consistently.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final, Protocol

from messages.ids import PolicyVersion, Role
from services.jobfile import RolloutSection
from services.rollout_worker.engines.base import EngineError, GenerateSpec, Load, Tokens
from services.snapshot import SnapshotError, version_of
from services.timing.engine import NEVER, EngineModel
from services.timing.hardware import Hardware

NO_WEIGHTS: Final = PolicyVersion(-1)
FLUSH_S: Final = 0.1
"""Real seconds after which a running reply's tokens are handed out: a chunk costs worker and edge about 0.1 ms each, and nobody
reads along."""
QUEUE_FACTOR: Final = 8
"""Requests that may wait, in units of `max_running`, as in the torch engine."""
VOCABULARY: Final = 96
"""Ids that are made up are below this: one byte each on the wire."""
LOGPROB: Final = -1.0
SHARE_FOR_PREFILL_CHUNK: Final = 1  # chunk_tokens is taken as it is; here for the reader: nothing is scaled but time


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
        return asyncio.get_running_loop().time() * self._scale

    def real(self, seconds: float) -> float:
        return seconds / self._scale

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            await asyncio.sleep(seconds / self._scale)


class _Reply:
    """A request in the model, and what of it was handed out."""

    __slots__ = ("chunks", "finish", "prompt_len", "sent", "sent_at", "spec", "start", "tokens")

    def __init__(self, spec: GenerateSpec, tokens: list[int], finish: str, now: float) -> None:
        self.spec = spec
        self.tokens = tokens  # prompt, prefix and all that will be made
        self.finish = finish  # how it ends if nothing comes in between
        self.prompt_len = len(spec.prompt)
        self.start = self.sent = self.prompt_len + len(spec.prefix)
        self.sent_at = now
        self.chunks: asyncio.Queue[Tokens] = asyncio.Queue()


def made_up(seed: int, index: int) -> int:
    """Token `index` of a reply with this seed."""
    mixed = (seed * 0x9E3779B97F4A7C15 + index * 0xC2B2AE3D27D4EB4F) & 0xFFFFFFFFFFFFFFFF
    return ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 >> 32) % VOCABULARY


class EmulatedEngine:
    """See `Engine`. `prepared_s`: emulated seconds of preparation that passed before `start`."""

    def __init__(self, hardware: Hardware, rollout: RolloutSection, clock: Clock, *, prepared_s: float = 0.0) -> None:
        self.hardware = hardware
        self._rollout = rollout
        self._clock = clock
        self._prepared_s = prepared_s
        self._model = EngineModel(
            hardware,
            max_running=rollout.max_running,
            chunk_tokens=rollout.prefill_chunk_tokens,
            kv_tokens=rollout.kv_cache_tokens or hardware.kv_capacity_tokens,
        )
        self._version = NO_WEIGHTS
        self._role: Role | None = None
        self._released = False
        self._replies: dict[int, _Reply] = {}
        self._numbers = itertools.count(1)
        self._wake: asyncio.Future[None] | None = None
        self._driver: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[str] | None = None

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def endpoint(self) -> str:
        return ""

    # ---- life ----

    async def start(self) -> None:
        assert self._driver is None, "started twice"
        await self._clock.sleep(self.hardware.prepare_s.value - self._prepared_s)
        self._failure = asyncio.get_running_loop().create_future()
        self._driver = asyncio.create_task(self._drive(), name="emulated-engine")
        self._driver.add_done_callback(self._driver_ended)

    async def stop(self) -> None:
        if self._driver is not None:
            self._abort(None)
            self._driver.cancel()
            await asyncio.wait([self._driver])

    async def failed(self) -> str:
        assert self._failure is not None, "not started"
        return await asyncio.shield(self._failure)

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self._failure is not None and not self._failure.done():
            self._failure.set_result(f"the emulated engine's loop ended: {task.exception()!r}")

    async def set_role(self, role: Role) -> None:
        if role is not Role.COLOCATED:
            raise EngineError(f"the emulated engine cannot serve role {role.value!r}; only 'colocated'")
        if self._replies:
            raise EngineError(f"{len(self._replies)} requests run: drain before a change of role")
        if self._role is None:
            await self._clock.sleep(self.hardware.join_s)
        elif self._role is not role:
            await self._clock.sleep(self.hardware.set_role_s.value)
        self._role = role

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
        self._model.new_weights()
        self._version = version

    async def release(self) -> int:
        if self._replies:
            raise EngineError(f"{len(self._replies)} requests run: abort them before releasing the device memory")
        self._released = True
        self._version = NO_WEIGHTS
        self._model.clear()
        await self._clock.sleep(self.hardware.deactivate_s.value)
        kv_bytes = self._model.cache.capacity * self.hardware.kv_bytes_per_token
        return round(self.hardware.weights_bytes + kv_bytes)

    async def restore(self) -> None:
        await self._clock.sleep(self.hardware.activate_s.value - self.hardware.load_s)  # the weights follow
        self._released = False

    # ---- requests ----

    async def generate(self, spec: GenerateSpec) -> AsyncGenerator[Tokens, None]:
        refusal = self._refusal(spec)
        at_once = refusal or _finish_of(spec)
        if at_once:
            finish = "refused" if refusal else at_once
            yield Tokens(
                offset=len(spec.prefix), tokens=[], logprobs=[], version=self._version, finish=finish, reason=refusal
            )
            return
        self._advance()
        number = next(self._numbers)
        reply = self._replies[number] = self._reply(spec)
        try:
            self._model.submit(number, reply.tokens, reply.start)
            self._wake_up()
            while True:
                chunk = await reply.chunks.get()
                yield chunk
                if chunk.finish:
                    return
        finally:
            if self._replies.pop(number, None) is not None:
                self._advance()
                if number in self._model:
                    self._model.end(number)
                    self._wake_up()

    def _refusal(self, spec: GenerateSpec) -> str:
        """Why a request cannot run here, "" if it can."""
        length, limit = len(spec.prompt) + len(spec.prefix), self._model.context_limit
        if self._version == NO_WEIGHTS:
            return "no weights loaded"
        if not spec.prompt:
            return "the prompt is empty"
        if length >= limit:
            return f"prompt and prefix of {length} tokens leave no room in a context of {limit}"
        if min(spec.prompt) < 0 or min(spec.prefix, default=0) < 0:
            return "token ids must not be negative"
        if len(self._replies) >= self._rollout.max_running * (1 + QUEUE_FACTOR):
            return "the queue is full"
        return ""

    def _reply(self, spec: GenerateSpec) -> _Reply:
        """All tokens that a request will make, and how it ends."""
        begin = len(spec.prefix)
        end = min(spec.max_new_tokens, self._model.context_limit - len(spec.prompt))
        new = [made_up(spec.seed, index) for index in range(begin, end)]
        finish = "length"
        stops = [new.index(token) for token in spec.stop_ids if token in new]
        if stops:
            new, finish = new[: min(stops) + 1], "stop"
        return _Reply(spec, [*spec.prompt, *spec.prefix, *new], finish, asyncio.get_running_loop().time())

    async def abort(self, request: str | None = None) -> int:
        self._advance()
        return self._abort(request)

    def _abort(self, request: str | None) -> int:
        chosen = [number for number, reply in self._replies.items() if request in (None, reply.spec.request)]
        for number in chosen:
            reply = self._replies[number]
            made = self._model.end(number)
            self._hand_out(reply, reply.start + made, cached=0, finish="interrupted", reason="aborted")
            del self._replies[number]
        self._wake_up()
        return len(chosen)

    async def pause(self, mode: str) -> None:
        if mode not in ("abort", "retract", "in_place"):
            raise EngineError(f"pause mode {mode!r} is none of abort, retract, in_place")
        self._advance()
        if mode == "abort":
            self._abort(None)
        elif mode == "retract":
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

    # ---- the clock ----

    async def _drive(self) -> None:
        """Follow the model: at its events, and every FLUSH_S while replies run."""
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
        return max(0.0, min(self._clock.real(next_s - self._clock.now()), FLUSH_S))

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _advance(self) -> None:
        """Bring the model to now, and hand out what ended on the way."""
        for event in self._model.advance_to(self._clock.now()):
            reply = self._replies.get(event.key)
            if reply is None:
                continue
            if event.kind == "end":
                del self._replies[event.key]
                self._hand_out(reply, len(reply.tokens), cached=reply.cached, finish=reply.finish)

    def _hand_out_due(self, now: float) -> None:
        for number, reply in self._replies.items():
            if now - reply.sent_at >= FLUSH_S:
                self._hand_out_running(number, reply)

    def _hand_out_all(self) -> None:
        for number, reply in self._replies.items():
            self._hand_out_running(number, reply)

    def _hand_out_running(self, number: int, reply: _Reply) -> None:
        made = self._model.made(number)
        if reply.start + made > reply.sent:
            self._hand_out(reply, reply.start + made, cached=self._model.cached(number))

    def _hand_out(self, reply: _Reply, upto: int, *, cached: int, finish: str = "", reason: str = "") -> None:
        tokens = reply.tokens[reply.sent : upto]
        chunk = Tokens(
            offset=reply.sent - reply.prompt_len,
            tokens=tokens,
            logprobs=[LOGPROB] * len(tokens),
            version=self._version,
            finish=finish,
            reason=reason,
            cached_tokens=max(cached, 0) if reply.sent == reply.start else 0,
        )
        reply.sent = upto
        reply.sent_at = asyncio.get_running_loop().time()
        reply.chunks.put_nowait(chunk)


def _finish_of(spec: GenerateSpec) -> str:
    """How a reply of which the prefix is all has ended, "" if it goes on."""
    if spec.prefix and spec.prefix[-1] in spec.stop_ids:
        return "stop"
    return "length" if len(spec.prefix) >= spec.max_new_tokens else ""
