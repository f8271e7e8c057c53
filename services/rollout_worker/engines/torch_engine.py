"""The embedded engine: a small continuous-batching engine in torch, in one thread of the worker's process.

Here is the event loop's side: streams of chunks to their readers, and sockets; `torch_thread` has the weights, the KV cache and the
replies, and computes. The worker's service drives it through `Engine`. Never touches the bus. Invariants: a chunk holds tokens of one
version; weights change between iterations, all at once; KV computed with other weights is never found by a new request.

Disaggregated (paper 4.2), a prefill engine computes a request's context once its decode engine has blocks for all of it,
and sends the KV while it computes on; the decode engine writes what comes into those blocks, on its engine thread, after
checking that the request still has them (`Reply.lease`), and goes on from there. Both swap weights between iterations,
and a swap on either side ends what is on its way. The sockets are `kv_transfer`'s, in the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

import torch

from messages.ids import PolicyVersion, Role
from services.jobfile import ConfigError, RolloutSection
from services.models import ModelConfig, read_weights
from services.rollout_worker.engines.base import EngineError, GenerateSpec, Load, Tokens
from services.rollout_worker.engines.batching import Reply
from services.rollout_worker.engines.ends import end_of, finish_of, last_chunk
from services.rollout_worker.engines.kv_protocol import Hello, Pages, ProtocolError
from services.rollout_worker.engines.kv_transfer import HandOverError, Limits, PrefillSide, Sender, receive
from services.rollout_worker.engines.torch_thread import EngineThread

QUEUE_FACTOR: Final = 8
"""Requests that may wait, in units of `max_running`; more are refused, so that the router hears of it."""

LIMITS: Final = Limits()


class _Stream:
    """Chunks of one reply on their way to its reader."""

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
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._thread = EngineThread(rollout, torch.device(chosen), self)
        self._streams: dict[int, _Stream] = {}
        self._receiving: dict[int, asyncio.Task[None]] = {}
        self._prefill_side = PrefillSide(limits, met=self._met, gone=self._gone, expired=self._expired)
        self._numbers = itertools.count(1)
        self._failure: asyncio.Future[str] | None = None

    # ---- the worker's side: coroutines of the event loop ----

    @property
    def version(self) -> PolicyVersion:
        return self._thread.version

    @property
    def endpoint(self) -> str:
        return self._prefill_side.endpoint

    async def start(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        try:
            await self._prefill_side.start(self._address)
        except OSError as error:
            raise EngineError(f"cannot listen on {self._address!r} (the node's address): {error}") from error
        await self._thread.start()

    async def stop(self) -> None:
        await self._prefill_side.stop()
        for task in tuple(self._receiving.values()):
            task.cancel()
        await self._thread.stop()

    async def failed(self) -> str:
        assert self._failure is not None, "not started"
        return await asyncio.shield(self._failure)

    async def set_role(self, role: Role) -> None:
        if role not in (Role.COLOCATED, Role.PREFILL, Role.DECODE):
            raise EngineError(f"an engine cannot serve role {role.value!r}")
        if self._prefill_side.waiting:
            raise EngineError(f"{len(self._prefill_side.waiting)} requests wait: abort them before a change of role")
        await self._thread.call(lambda: self._thread.set_role(role))

    async def generate(self, spec: GenerateSpec) -> AsyncGenerator[Tokens, None]:
        refusal = self._refusal(spec)
        at_once = refusal or finish_of(spec)
        if at_once:
            yield last_chunk(len(spec.prefix), self._thread.version, "refused" if refusal else at_once, refusal)
            return
        number = next(self._numbers)
        stream = self._streams[number] = _Stream(spec)
        role, last = self._thread.role, None
        try:
            if role is Role.PREFILL:
                self._expect(number, spec)
            else:
                remote = role is Role.DECODE
                self._thread.post(lambda: self._thread.submit(Reply(spec, number, remote=remote)))
            while last is None or not last.finish:
                last = await stream.get()
                yield last
        finally:
            del self._streams[number]
            if number in self._receiving:
                self._receiving.pop(number).cancel()
            if last is None or not last.finish or role is Role.PREFILL:
                self._thread.post(lambda: self._thread.cancel(number))
            if role is Role.PREFILL:
                self._prefill_side.leave(number, end_of(last))

    async def abort(self, request: str | None = None) -> int:
        count = 0
        for number in self._prefill_side.waiting:  # of which the engine thread knows nothing yet
            if request in (None, self._streams[number].spec.request):
                self._finish_here(number, "interrupted", "aborted")
                count += 1
        return count + await self._thread.call(lambda: self._thread.abort(request))

    async def pause(self, mode: str) -> None:
        if mode not in ("abort", "retract", "in_place"):
            raise EngineError(f"pause mode {mode!r} is none of abort, retract, in_place")
        await self._thread.call(lambda: self._thread.pause(mode))

    async def resume(self) -> None:
        await self._thread.call(self._thread.resume)

    async def load_snapshot(self, directory: str, version: PolicyVersion) -> None:
        if self._thread.released:
            raise EngineError("the device memory is released: restore it first")
        try:
            config = await asyncio.to_thread(ModelConfig.load, directory)
            tensors = await asyncio.to_thread(read_weights, directory)
            await self._thread.call(lambda: self._thread.load_weights(config, tensors, version))
        except ConfigError as error:
            raise EngineError(str(error)) from error

    async def release(self) -> int:
        return await self._thread.call(self._thread.release)

    async def restore(self) -> None:
        await self._thread.call(self._thread.restore)

    def occupied(self) -> int:
        return self._thread.occupied()

    def load(self) -> Load:
        return self._thread.load()

    def _refusal(self, spec: GenerateSpec) -> str:
        """Why a request cannot run here, "" if it can."""
        config = self._thread.config
        if self._thread.model is None or config is None:
            return "no weights loaded"
        if not spec.prompt:
            return "the prompt is empty"
        limit = self._thread.batcher.context_limit
        if len(spec.prompt) + len(spec.prefix) >= limit:
            return f"prompt and prefix of {len(spec.prompt) + len(spec.prefix)} tokens leave no room in a context of {limit}"
        tokens = [*spec.prompt, *spec.prefix]
        if min(tokens) < 0 or max(tokens) >= config.vocab_size:
            return f"token ids must be within 0..{config.vocab_size - 1}"
        if self._thread.role is not Role.COLOCATED and spec.bootstrap_room < 0:
            return f"a {self._thread.role.value} engine needs the bootstrap triple"
        # Requests that wait for their receivers are bounded by the rooms, and cost nothing.
        most = self._rollout.max_running * (1 + QUEUE_FACTOR)
        if self._thread.role is not Role.PREFILL and len(self._streams) >= most:
            return "the queue is full"
        return ""

    # ---- told by the thread (`Told`) ----

    def deliver(self, chunks: list[tuple[int, Tokens]]) -> None:
        for number, chunk in chunks:
            stream = self._streams.get(number)
            if stream is not None:
                stream.put(chunk)

    def fail(self, why: str) -> None:
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_result(why)

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
        self._thread.post(lambda: self._thread.attach(Reply(spec, number, sent_kv=sender.hello.cached), sender))

    def _gone(self, number: int, handed_over: bool) -> None:
        self._finish_here(number, "handed_over" if handed_over else "abandoned", "")

    def _expired(self, number: int) -> None:
        self._finish_here(number, "interrupted", f"no decode engine came within {self._limits.join_s:g} s")

    def _finish_here(self, number: int, finish: str, reason: str) -> None:
        """End a prefill engine's request from the event loop; its stream cleans up."""
        stream = self._streams.get(number)
        if stream is not None:
            chunk = last_chunk(len(stream.spec.prefix), self._thread.version, finish, reason)
            stream.put(chunk)
            self._prefill_side.leave(number, end_of(chunk))

    def start_receiving(self, number: int, lease: int, hello: Hello) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            task = asyncio.ensure_future(self._receive(stream.spec, number, lease, hello))
            self._receiving[number] = task
            task.add_done_callback(lambda done: self._received(number, done))

    def _received(self, number: int, task: asyncio.Task[None]) -> None:
        if self._receiving.get(number) is task:
            del self._receiving[number]

    def stop_receiving(self, number: int) -> None:
        if number in self._receiving:
            self._receiving.pop(number).cancel()

    async def _receive(self, spec: GenerateSpec, number: int, lease: int, hello: Hello) -> None:
        def take(pages: Pages, data: bytes) -> None:
            self._thread.post(lambda: self._thread.take_pages(number, lease, pages, data))

        try:
            first = await receive(spec.bootstrap_host, spec.bootstrap_port, hello, self._limits, take)
        except HandOverError as error:
            finish, reason = error.finish, str(error)
            self._thread.post(lambda: self._thread.receive_failed(number, lease, finish, reason))
        else:
            self._thread.post(lambda: self._thread.take_first(number, lease, first))
