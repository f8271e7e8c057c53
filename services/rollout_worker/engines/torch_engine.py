"""The embedded engine: a small continuous-batching engine in torch, in one thread of the worker's process.

Owns the model's weights, the KV cache and the engine thread; the worker's service drives it through `Engine`. Never
touches the bus. Invariants: only the engine thread computes or touches replies, and it sleeps when there is nothing to
do; the event loop is woken at most once an iteration; a chunk holds tokens of one version; weights change between
iterations, all at once; KV computed with other weights is never found by a new request.

Disaggregated (paper 4.2), a prefill engine computes a request's context once its decode engine has blocks for all of it,
and sends the KV while it computes on; the decode engine writes what comes into those blocks, on its engine thread, after
checking that the request still has them (`Reply.lease`), and goes on from there. Both swap weights between iterations,
and a swap on either side ends what is on its way. The sockets are `kv_transfer`'s, in the event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final, TypeVar

import psutil
import torch
from torch import Tensor

from messages.ids import PolicyVersion, Role
from services.jobfile import ConfigError, RolloutSection
from services.models import Decoder, ModelConfig, read_weights
from services.models.files import apply_weights
from services.rollout_worker.engines.base import EngineError, GenerateSpec, Load, Tokens
from services.rollout_worker.engines.batching import Batcher, Reply
from services.rollout_worker.engines.ends import end_of, finish_of
from services.rollout_worker.engines.kv_cache import BLOCK, BlockPool, KvCache
from services.rollout_worker.engines.kv_protocol import (
    SEND_BODY,
    First,
    Hello,
    Pages,
    ProtocolError,
    digest,
)
from services.rollout_worker.engines.kv_transfer import HandOverError, Limits, PrefillSide, Sender, receive
from services.rollout_worker.engines.sampling import sample
from services.rollout_worker.engines.torch_forward import (
    Inputs,
    decode_inputs,
    forward,
    prefill_inputs,
    slots_of,
)

NO_WEIGHTS: Final = PolicyVersion(-1)
FLUSH_TOKENS: Final = 32
FLUSH_S: Final = 0.03
"""A reply's tokens are handed out at its end, or when there are so many or they are so old: a chunk costs about as
much as a decoded token, and replies here are often three tokens long."""
QUEUE_FACTOR: Final = 8
"""Requests that may wait, in units of `max_running`; more are refused, so that the router hears of it."""

LIMITS: Final = Limits()

T = TypeVar("T")


class _Stream:
    """Chunks of one reply on their way to its reader, in the event loop."""

    __slots__ = ("chunks", "spec", "waiter")

    def __init__(self, spec: GenerateSpec) -> None:
        self.spec = spec
        self.chunks: deque[Tokens] = deque()
        self.waiter: asyncio.Future[None] | None = None

    def put(self, chunk: Tokens) -> None:
        self.chunks.append(chunk)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def get(self) -> Tokens:
        while not self.chunks:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        return self.chunks.popleft()


class TorchEngine:
    """See `Engine`. `device`: "cpu", "cuda", or "auto". `address`: where other engines reach this one."""

    def __init__(
        self,
        rollout: RolloutSection,
        device: str = "auto",
        *,
        address: str = "127.0.0.1",
        limits: Limits = LIMITS,
    ) -> None:
        self._rollout = rollout
        self._address = address
        self._limits = limits
        self._role = Role.COLOCATED
        self._device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self._version = NO_WEIGHTS
        self._model: Decoder | None = None
        self._config: ModelConfig | None = None
        self._cache: KvCache | None = None
        self._batcher = self._new_batcher(1)
        self._replies: dict[int, Reply] = {}  # of the engine thread
        self._senders: dict[int, Sender] = {}  # of the engine thread: where the KV of these replies goes
        self._streams: dict[int, _Stream] = {}  # of the event loop
        self._receiving: dict[int, asyncio.Task[None]] = {}  # of the event loop
        self._prefill_side = PrefillSide(limits, met=self._met, gone=self._gone, expired=self._expired)
        self._numbers = itertools.count(1)
        self._paused = False
        self._idle = False  # all that is there waits for a command
        self._released = False
        self._outbox: list[tuple[int, Tokens]] = []
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: asyncio.Future[str] | None = None
        self._iterations = self._decoded = self._batch_sum = self._prefilled = 0
        self._decode_s = self._prefill_s = 0.0

    # ---- the worker's side: coroutines of the event loop ----

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def endpoint(self) -> str:
        return self._prefill_side.endpoint

    async def start(self) -> None:
        assert self._thread is None, "started twice"
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        try:
            await self._prefill_side.start(self._address)
        except OSError as error:
            raise EngineError(f"cannot listen on {self._address!r} (the node's address): {error}") from error
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        await self._call(lambda: None)

    async def stop(self) -> None:
        if self._thread is None:
            return
        await self._prefill_side.stop()
        for task in tuple(self._receiving.values()):
            task.cancel()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def failed(self) -> str:
        assert self._failure is not None, "not started"
        return await asyncio.shield(self._failure)

    async def set_role(self, role: Role) -> None:
        if role not in (Role.COLOCATED, Role.PREFILL, Role.DECODE):
            raise EngineError(f"an engine cannot serve role {role.value!r}")
        if self._prefill_side.waiting:
            raise EngineError(f"{len(self._prefill_side.waiting)} requests wait: abort them before a change of role")
        await self._call(lambda: self._set_role(role))

    async def generate(self, spec: GenerateSpec) -> AsyncGenerator[Tokens, None]:
        refusal = self._refusal(spec)
        at_once = refusal or finish_of(spec)
        if at_once:
            finish = "refused" if refusal else at_once
            yield Tokens(
                offset=len(spec.prefix), tokens=[], logprobs=[], version=self._version, finish=finish, reason=refusal
            )
            return
        number = next(self._numbers)
        stream = self._streams[number] = _Stream(spec)
        role, last = self._role, None
        try:
            if role is Role.PREFILL:
                self._expect(number, spec)
            else:
                remote = role is Role.DECODE
                self._post(lambda: self._submit(Reply(spec, number, remote=remote)))
            while last is None or not last.finish:
                last = await stream.get()
                yield last
        finally:
            del self._streams[number]
            if number in self._receiving:
                self._receiving.pop(number).cancel()
            if last is None or not last.finish or role is Role.PREFILL:
                self._post(lambda: self._cancel(number))
            if role is Role.PREFILL:
                self._prefill_side.leave(number, end_of(last))

    async def abort(self, request: str | None = None) -> int:
        count = 0
        for number in self._prefill_side.waiting:  # of which the engine thread knows nothing yet
            if request in (None, self._streams[number].spec.request):
                self._finish_here(number, "interrupted", "aborted")
                count += 1
        return count + await self._call(lambda: self._abort(request))

    async def pause(self, mode: str) -> None:
        if mode not in ("abort", "retract", "in_place"):
            raise EngineError(f"pause mode {mode!r} is none of abort, retract, in_place")
        await self._call(lambda: self._pause(mode))

    async def resume(self) -> None:
        await self._call(lambda: setattr(self, "_paused", False))

    async def load_snapshot(self, directory: str, version: PolicyVersion) -> None:
        if self._released:
            raise EngineError("the device memory is released: restore it first")
        try:
            config = await asyncio.to_thread(ModelConfig.load, directory)
            tensors = await asyncio.to_thread(read_weights, directory)
            await self._call(lambda: self._load(config, tensors, version))
        except ConfigError as error:
            raise EngineError(str(error)) from error

    async def release(self) -> int:
        return await self._call(self._release)

    async def restore(self) -> None:
        await self._call(self._restore)

    def occupied(self) -> int:
        """Bytes in use as the driver, or on a CPU the operating system, sees them."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free
        return psutil.Process().memory_info().rss

    def load(self) -> Load:
        return Load(
            running=len(self._batcher.running),
            queued=len(self._batcher.waiting),
            decode_iterations=self._iterations,
            decode_tokens=self._decoded,
            decode_s=self._decode_s,
            decode_batch_sum=self._batch_sum,
            prefill_tokens=self._prefilled,
            prefill_s=self._prefill_s,
        )

    def _refusal(self, spec: GenerateSpec) -> str:
        """Why a request cannot run here, "" if it can."""
        config = self._config
        if self._model is None or config is None:
            return "no weights loaded"
        if not spec.prompt:
            return "the prompt is empty"
        limit = self._batcher.context_limit
        if len(spec.prompt) + len(spec.prefix) >= limit:
            return f"prompt and prefix of {len(spec.prompt) + len(spec.prefix)} tokens leave no room in a context of {limit}"
        tokens = [*spec.prompt, *spec.prefix]
        if min(tokens) < 0 or max(tokens) >= config.vocab_size:
            return f"token ids must be within 0..{config.vocab_size - 1}"
        if self._role is not Role.COLOCATED and spec.bootstrap_room < 0:
            return f"a {self._role.value} engine needs the bootstrap triple"
        # Requests that wait for their receivers are bounded by the rooms, and cost nothing.
        if self._role is not Role.PREFILL and len(self._streams) >= self._rollout.max_running * (1 + QUEUE_FACTOR):
            return "the queue is full"
        return ""

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    async def _call(self, command: Callable[[], T]) -> T:
        """Run `command` on the engine thread between two iterations; its exception is the caller's."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if not future.done():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)  # pyright: ignore[reportArgumentType] - T may be None

        def run() -> None:
            try:
                result = command()
            except (EngineError, ConfigError) as error:
                loop.call_soon_threadsafe(settle, None, error)
            else:
                self._deliver_soon()  # what the command ended must arrive before its answer
                loop.call_soon_threadsafe(settle, result, None)

        self._post(run)
        return await future

    def _deliver(self, outbox: list[tuple[int, Tokens]]) -> None:
        for number, chunk in outbox:
            stream = self._streams.get(number)
            if stream is not None:
                stream.put(chunk)

    # ---- hand-over, in the event loop ----

    def _expect(self, number: int, spec: GenerateSpec) -> None:
        """A prefill engine's request waits for its receiver."""
        key = (spec.bootstrap_room, spec.request, spec.attempt)
        try:
            self._prefill_side.expect(number, key, [*spec.prompt, *spec.prefix])
        except ProtocolError as error:
            self._finish_here(number, "refused", str(error))

    def _met(self, number: int, sender: Sender) -> None:
        spec = self._streams[number].spec
        self._post(lambda: self._attach(Reply(spec, number, sent_kv=sender.hello.cached), sender))

    def _gone(self, number: int, handed_over: bool) -> None:
        self._finish_here(number, "handed_over" if handed_over else "abandoned", "")

    def _expired(self, number: int) -> None:
        self._finish_here(number, "interrupted", f"no decode engine came within {self._limits.join_s:g} s")

    def _finish_here(self, number: int, finish: str, reason: str) -> None:
        """End a prefill engine's request from the event loop; its stream cleans up."""
        stream = self._streams.get(number)
        if stream is not None:
            last = Tokens(
                offset=len(stream.spec.prefix),
                tokens=[],
                logprobs=[],
                version=self._version,
                finish=finish,
                reason=reason,
            )
            stream.put(last)
            self._prefill_side.leave(number, end_of(last))

    def _start_receiving(self, number: int, lease: int, hello: Hello) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            task = asyncio.ensure_future(self._receive(stream.spec, number, lease, hello))
            self._receiving[number] = task
            task.add_done_callback(lambda done: self._received(number, done))

    def _received(self, number: int, task: asyncio.Task[None]) -> None:
        if self._receiving.get(number) is task:
            del self._receiving[number]

    def _stop_receiving(self, number: int) -> None:
        if number in self._receiving:
            self._receiving.pop(number).cancel()

    async def _receive(self, spec: GenerateSpec, number: int, lease: int, hello: Hello) -> None:
        def take(pages: Pages, data: bytes) -> None:
            self._post(lambda: self._take_pages(number, lease, pages, data))

        try:
            first = await receive(spec.bootstrap_host, spec.bootstrap_port, hello, self._limits, take)
        except HandOverError as error:
            finish, reason = error.finish, str(error)
            self._post(lambda: self._receive_failed(number, lease, finish, reason))
        else:
            self._post(lambda: self._take_first(number, lease, first))

    # ---- the engine thread ----

    def _run(self) -> None:
        torch.set_num_threads(self._rollout.threads)
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
            self._abort(None)
            self._deliver_soon()
        finally:
            # The thread is the engine: whatever ends it ends the worker. Python prints the traceback.
            error = sys.exception()
            if error is not None:
                self._tell(self._fail, f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_result(why)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _turn(self) -> bool:
        """Commands, then one iteration if there is work; False at the end."""
        with self._wake:
            while not self._inbox and not self._stopping and not self._ready:
                self._wake.wait()
            if self._stopping:
                return False
            commands, self._inbox = self._inbox, []
        for command in commands:
            self._obey(command)
        if self._ready:
            began = time.perf_counter()
            due = began + self._iterate()
            self._hand_out_due()
            self._deliver_soon()
            self._pace(due)
        else:
            self._deliver_soon()
        return True

    @property
    def _ready(self) -> bool:
        return self._batcher.busy and not self._idle and not self._paused and self._model is not None

    def _pace(self, due: float) -> None:
        """Wait out the least time of an iteration. Commands are served meanwhile: a drain must not wait for it."""
        while (left := due - time.perf_counter()) > 0:
            with self._wake:
                if not self._inbox and not self._stopping:
                    self._wake.wait(left)
                if self._stopping:
                    return
                commands, self._inbox = self._inbox, []
            for command in commands:
                self._obey(command)
            if not self._paused and self._model is not None:
                # A context that is to come from elsewhere can be on its way while this iteration goes on.
                self._batcher.admit()
                self._ask_for_arrivals()
            self._deliver_soon()

    def _obey(self, command: Callable[[], None]) -> None:
        self._idle = False
        command()

    def _iterate(self) -> float:
        """One prefill chunk and one decode; returns the least time they are to take, in seconds."""
        least = 0.0
        moves = self._batcher.moves
        chunk = self._batcher.next_prefill()
        self._ask_for_arrivals()
        if chunk:
            began = time.perf_counter()
            logits, complete = self._prefill(chunk)
            if complete:
                self._emit(complete, logits)
            tokens = sum(count for _, count in chunk)
            pace = tokens * self._rollout.pace_prefill_us_per_token / 1e6
            least += pace
            self._prefilled += tokens
            self._prefill_s += max(pace, time.perf_counter() - began)
        batch = self._batcher.next_decode()
        self._drop_dropped()
        self._idle = not chunk and not batch and self._batcher.moves == moves
        if batch:
            began = time.perf_counter()
            self._emit(batch, self._decode(batch))
            pace = (self._rollout.pace_decode_ms + self._rollout.pace_decode_ms_per_sequence * len(batch)) / 1e3
            least += pace
            self._iterations += 1
            self._decoded += len(batch)
            self._batch_sum += len(batch)
            self._decode_s += max(pace, time.perf_counter() - began)
        return least

    def _prefill(self, chunk: list[tuple[Reply, int]]) -> tuple[Tensor, list[Reply]]:
        """Compute chunks of contexts; logits of those now complete [N,V], and which they are."""
        inputs, complete = prefill_inputs(chunk)
        for reply, _ in chunk:
            self._send_pages(reply)  # what the cache had; it travels while the rest is computed
        logits = self._forward(inputs)
        for reply, count in chunk:
            self._batcher.advance(reply, count)
            self._send_pages(reply)
        return logits, complete

    def _decode(self, batch: list[Reply]) -> Tensor:
        """Compute the last token of each context; logits of the next one [N,V]."""
        logits = self._forward(decode_inputs(batch))
        for reply in batch:
            self._batcher.advance(reply, 1)
        return logits

    def _forward(self, inputs: Inputs) -> Tensor:
        assert self._model is not None and self._cache is not None
        return forward(self._model, self._cache, self._device, inputs)

    def _emit(self, replies: list[Reply], logits: Tensor) -> None:
        """Draw and record each reply's next token; end those that are finished."""
        tokens, logprobs = sample(
            logits,
            [reply.spec.temperature for reply in replies],
            [reply.spec.seed for reply in replies],
            [reply.index for reply in replies],
        )
        now = time.perf_counter()
        for reply, token, logprob in zip(replies, tokens, logprobs, strict=True):
            if reply.stream in self._senders:
                self._hand_over(reply, token, logprob)
            else:
                self._record(reply, token, logprob, now)

    def _record(self, reply: Reply, token: int, logprob: float, now: float) -> None:
        reply.tokens.append(token)
        if not reply.logprobs:
            reply.sent_at = now
        reply.logprobs.append(logprob)
        if token in reply.stop_ids:
            self._end(reply, "stop")
        elif reply.index >= reply.spec.max_new_tokens or len(reply.tokens) >= self._batcher.context_limit:
            self._end(reply, "length")

    def _hand_out_due(self) -> None:
        now = time.perf_counter()
        for reply in self._batcher.running:
            held = len(reply.logprobs)
            if held >= FLUSH_TOKENS or (held and now - reply.sent_at >= FLUSH_S):
                self._hand_out(reply)

    def _hand_out(self, reply: Reply, finish: str = "", reason: str = "") -> None:
        offset = reply.sent - reply.prompt_len
        chunk = Tokens(
            offset=offset,
            tokens=reply.tokens[reply.sent :],
            logprobs=reply.logprobs,
            version=self._version,
            finish=finish,
            reason=reason,
            cached_tokens=max(reply.cached, 0) if offset == len(reply.spec.prefix) else 0,
        )
        reply.sent = len(reply.tokens)
        reply.logprobs = []
        self._outbox.append((reply.stream, chunk))

    def _deliver_soon(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._tell(self._deliver, outbox)

    # ---- hand-over, on the engine thread ----

    def _attach(self, reply: Reply, sender: Sender) -> None:
        """A prefill engine's request has met its receiver: compute it, if what that holds and wants fits."""
        hello = sender.hello
        reason = ""
        if self._model is None or self._cache is None:
            reason = "the prefill side has no weights"
        elif hello.version != self._version:
            reason = f"the prefill side has version {self._version}, the decode side {hello.version}"
        elif hello.layout != self._cache.layout:
            reason = f"the prefill side's KV is {self._cache.layout}, the decode side's {hello.layout}"
        elif not 0 <= hello.cached < len(reply.tokens):
            reason = f"the decode side claims KV of {hello.cached} of {len(reply.tokens)} tokens"
        if reason:
            self._hand_out(reply, "refused", reason)
            return
        self._replies[reply.stream] = reply
        self._senders[reply.stream] = sender
        self._batcher.waiting.append(reply)

    def _send_pages(self, reply: Reply) -> None:
        """Hand what is computed and not sent yet to the event loop, copied: the blocks may be used anew at once."""
        sender = self._senders.get(reply.stream)
        if sender is None:
            return
        assert self._cache is not None
        most = max(1, SEND_BODY // self._cache.token_bytes)
        while reply.sent_kv < reply.computed:
            pages = Pages(start=reply.sent_kv, count=min(most, reply.computed - reply.sent_kv))
            self._tell(sender.send, pages, self._cache.read(self._slots(reply, pages)))
            reply.sent_kv += pages.count

    def _hand_over(self, reply: Reply, token: int, logprob: float) -> None:
        """The context is computed and on its way; so is the token after it, and nothing is held for it here."""
        sender = self._senders.pop(reply.stream)
        self._tell(sender.send, First(token=token, logprob=logprob, cached=max(reply.cached, 0)))
        del self._replies[reply.stream]
        self._batcher.end(reply)

    def _slots(self, reply: Reply, pages: Pages) -> Tensor:
        return slots_of(reply, pages.start, pages.count).to(self._device)

    def _ask_for_arrivals(self) -> None:
        """Fetch the KV of what a decode engine has just admitted."""
        for reply in self._batcher.arrivals:
            assert self._cache is not None
            hello = Hello(
                room=reply.spec.bootstrap_room,
                request=reply.spec.request,
                attempt=reply.spec.attempt,
                context=digest(reply.tokens),
                version=self._version,
                cached=reply.computed,
                layout=self._cache.layout,
            )
            self._tell(self._start_receiving, reply.stream, reply.lease, hello)
        self._batcher.arrivals.clear()

    def _drop_dropped(self) -> None:
        for reply in self._batcher.dropped:
            self._tell(self._stop_receiving, reply.stream)
        self._batcher.dropped.clear()

    def _leased(self, number: int, lease: int) -> Reply | None:
        """The request that still receives into the blocks it had under this lease; None: they may be another's."""
        reply = self._replies.get(number)
        return reply if reply is not None and reply.receiving and reply.lease == lease else None

    def _take_pages(self, number: int, lease: int, pages: Pages, data: bytes) -> None:
        reply = self._leased(number, lease)
        if reply is None:
            return
        assert self._cache is not None
        end = pages.start + pages.count
        fits = pages.start == reply.computed and pages.count > 0 and end <= len(reply.tokens)
        if not fits or len(data) != pages.count * self._cache.token_bytes:
            self._end(reply, "interrupted", f"KV of {pages.count} tokens from {pages.start} does not fit")
            return
        self._cache.write(self._slots(reply, pages), data)
        self._batcher.advance(reply, pages.count)

    def _take_first(self, number: int, lease: int, first: First) -> None:
        reply = self._leased(number, lease)
        if reply is None:
            return
        assert self._config is not None
        if reply.computed != len(reply.tokens) or not 0 <= first.token < self._config.vocab_size:
            self._end(reply, "interrupted", f"a first token after KV of {reply.computed} of {len(reply.tokens)} tokens")
            return
        reply.receiving = reply.remote = False
        reply.cached = first.cached
        self._record(reply, first.token, first.logprob, time.perf_counter())

    def _receive_failed(self, number: int, lease: int, finish: str, reason: str) -> None:
        reply = self._leased(number, lease)
        if reply is not None:
            self._end(reply, finish, reason)

    def _break_off(self, reason: str) -> None:
        """End what is on its way from or to another engine."""
        for reply in tuple(self._replies.values()):
            if reply.receiving or reply.stream in self._senders:
                self._end(reply, "interrupted", reason)

    def _set_role(self, role: Role) -> None:
        if role is not self._role and self._replies:
            raise EngineError(f"{len(self._replies)} requests run: abort them before a change of role")
        self._role = role
        self._batcher.prefill_only = role is Role.PREFILL

    # ---- commands, on the engine thread ----

    def _submit(self, reply: Reply) -> None:
        if self._model is None:  # released since it was accepted
            self._hand_out(reply, "interrupted", "no weights loaded")
            return
        self._replies[reply.stream] = reply
        self._batcher.waiting.append(reply)

    def _end(self, reply: Reply, finish: str, reason: str = "") -> None:
        del self._replies[reply.stream]
        self._senders.pop(reply.stream, None)
        self._batcher.end(reply)
        self._hand_out(reply, finish, reason)

    def _cancel(self, number: int) -> None:
        reply = self._replies.pop(number, None)
        if reply is not None:
            self._senders.pop(number, None)
            self._batcher.end(reply)

    def _abort(self, request: str | None) -> int:
        chosen = [reply for reply in self._replies.values() if request in (None, reply.spec.request)]
        for reply in chosen:
            self._end(reply, "interrupted", "aborted")
        return len(chosen)

    def _pause(self, mode: str) -> None:
        if mode == "abort":
            self._abort(None)
        elif mode == "retract":
            self._break_off("the worker pauses")
            self._batcher.retract_all()
        self._paused = True

    def _load(self, config: ModelConfig, tensors: Mapping[str, Tensor], version: PolicyVersion) -> None:
        for reply in self._batcher.running:
            if reply.logprobs:
                self._hand_out(reply)  # under the version that made them
        for reply in self._batcher.waiting:
            if reply.logprobs:
                self._hand_out(reply)
        model = self._model
        if model is not None and config != self._config:
            raise EngineError(f"version {version} has another configuration than version {self._version}")
        self._break_off(f"the weights changed to version {version}")
        if model is None:
            dtype = torch.float32 if self._device.type == "cpu" else getattr(torch, config.dtype, torch.bfloat16)
            model = Decoder(config).to(device=self._device, dtype=dtype).requires_grad_(False).eval()
            blocks = self._rollout.kv_cache_tokens // BLOCK + 1
            cache = KvCache(config, blocks, dtype, self._device)
            apply_weights(model, tensors)
            batcher = self._new_batcher(blocks, config.max_position_embeddings)
            model.position_limit = batcher.context_limit
            self._model, self._config, self._cache, self._batcher = model, config, cache, batcher
        else:
            apply_weights(model, tensors)
            self._batcher.new_weights()
        self._version = version

    def _new_batcher(self, blocks: int, context_limit: int = 0) -> Batcher:
        rollout = self._rollout
        batcher = Batcher(
            BlockPool(max(blocks, 2)),
            max_running=rollout.max_running,
            chunk_tokens=rollout.prefill_chunk_tokens,
            context_limit=context_limit,
        )
        batcher.prefill_only = self._role is Role.PREFILL
        return batcher

    def _release(self) -> int:
        if self._replies:
            raise EngineError(f"{len(self._replies)} requests run: abort them before releasing the device memory")
        before = self.occupied()
        self._released = True
        self._model = self._cache = None
        self._batcher = self._new_batcher(1)
        self._version = NO_WEIGHTS
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # else the allocator keeps what is freed
        return max(0, before - self.occupied())

    def _restore(self) -> None:
        self._released = False
