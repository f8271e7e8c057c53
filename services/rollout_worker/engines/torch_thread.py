"""The embedded engine's thread: it computes, and alone touches replies, KV cache and weights (`torch_engine.py`).

The event loop's side hands it commands, run between two iterations (`post`, `call`), and is told of what came of them (`Told`) in the
event loop, which is woken at most once an iteration. The thread sleeps when there is nothing to do.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

import psutil
import torch
from torch import Tensor

from messages.ids import PolicyVersion, Role
from services.jobfile import ConfigError, RolloutSection
from services.models import Decoder, ModelConfig
from services.models.files import apply_weights
from services.rollout_worker.engines.base import EngineError, Load, Tokens
from services.rollout_worker.engines.batching import Batcher, Reply
from services.rollout_worker.engines.kv_cache import BLOCK, BlockPool, KvCache
from services.rollout_worker.engines.kv_protocol import SEND_BODY, First, Hello, Pages, digest
from services.rollout_worker.engines.kv_transfer import Sender
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

T = TypeVar("T")


class Told(Protocol):
    """What is told of, in the event loop. Requests are named by their numbers (`Reply.stream`)."""

    def deliver(self, chunks: list[tuple[int, Tokens]]) -> None:
        """Chunks of replies, in order."""
        ...

    def start_receiving(self, number: int, lease: int, hello: Hello) -> None:
        """There is room for a request's whole context: fetch its KV. What comes is taken only under this lease."""
        ...

    def stop_receiving(self, number: int) -> None:
        """The room is gone."""
        ...

    def fail(self, why: str) -> None:
        """The thread has ended by itself."""
        ...


class EngineThread:
    """See the module's docstring. Attributes may be read anywhere; methods other than `start`, `stop`, `post`, `call` and `occupied`
    are the thread's own."""

    def __init__(self, rollout: RolloutSection, device: torch.device, told: Told) -> None:
        self.role = Role.COLOCATED
        self.version = NO_WEIGHTS
        self.model: Decoder | None = None
        self.config: ModelConfig | None = None
        self.cache: KvCache | None = None
        self.released = False
        self._rollout = rollout
        self._device = device
        self._told = told
        self.batcher = self._new_batcher(1)
        self.replies: dict[int, Reply] = {}
        self.senders: dict[int, Sender] = {}  # where the KV of these replies goes
        self._paused = False
        self._idle = False  # all that is there waits for a command
        self._outbox: list[tuple[int, Tokens]] = []
        # Of the iteration that runs, in order: told of at its end, as if it had taken until then.
        self._made: list[tuple[int, Tokens]] = []
        self._sends: list[tuple[Sender, Pages | First, memoryview | bytes]] = []
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._iterations = self._decoded = self._batch_sum = self._prefilled = 0
        self._decode_s = self._prefill_s = 0.0

    # ---- for the event loop ----

    async def start(self) -> None:
        """It runs, and answers."""
        assert self._thread is None, "started twice"
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        await self.call(lambda: None)

    async def stop(self) -> None:
        """Ends what runs, then itself."""
        if self._thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def post(self, command: Callable[[], None]) -> None:
        """Run `command` on the thread between two iterations."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    async def call(self, command: Callable[[], T]) -> T:
        """The same, and wait for its result; its exception is the caller's."""
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

        self.post(run)
        return await future

    def occupied(self) -> int:
        """Bytes in use as the driver, or on a CPU the operating system, sees them."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free
        return psutil.Process().memory_info().rss

    def load(self) -> Load:
        """Requests, and what was done since the start."""
        return Load(
            running=len(self.batcher.running),
            queued=len(self.batcher.waiting),
            decode_iterations=self._iterations,
            decode_tokens=self._decoded,
            decode_s=self._decode_s,
            decode_batch_sum=self._batch_sum,
            prefill_tokens=self._prefilled,
            prefill_s=self._prefill_s,
        )

    # ---- the thread ----

    def _run(self) -> None:
        torch.set_num_threads(self._rollout.threads)
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
            self.abort(None)
            self._deliver_soon()
        finally:
            # The thread is the engine: whatever ends it ends the worker. Python prints the traceback.
            error = sys.exception()
            if error is not None:
                self._tell(self._told.fail, f"{type(error).__name__}: {error}")

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
            self._made, self._outbox = self._outbox, []
            self._pace(due)
            self._made, self._outbox = [], [*self._made, *self._outbox]
            self._deliver_soon()
            self._send_soon()
        else:
            self._deliver_soon()
        return True

    @property
    def _ready(self) -> bool:
        return self.batcher.busy and not self._idle and not self._paused and self.model is not None

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
            if not self._paused and self.model is not None:
                # A context that is to come from elsewhere can be on its way while this iteration goes on.
                self.batcher.admit()
                self._ask_for_arrivals()
            self._deliver_soon()

    def _obey(self, command: Callable[[], None]) -> None:
        self._idle = False
        command()

    def _iterate(self) -> float:
        """One prefill chunk and one decode; returns the least time they are to take, in seconds."""
        least = 0.0
        moves = self.batcher.moves
        chunk = self.batcher.next_prefill()
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
        batch = self.batcher.next_decode()
        self._drop_dropped()
        self._idle = not chunk and not batch and self.batcher.moves == moves
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
            self._send_pages(reply)
        self._send_soon()  # what the cache had: it travels while the rest is computed
        logits = self._forward(inputs)
        for reply, count in chunk:
            self.batcher.advance(reply, count)
            self._send_pages(reply)
        return logits, complete

    def _decode(self, batch: list[Reply]) -> Tensor:
        """Compute the last token of each context; logits of the next one [N,V]."""
        logits = self._forward(decode_inputs(batch))
        for reply in batch:
            self.batcher.advance(reply, 1)
        return logits

    def _forward(self, inputs: Inputs) -> Tensor:
        assert self.model is not None and self.cache is not None
        return forward(self.model, self.cache, self._device, inputs)

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
            if reply.stream in self.senders:
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
        elif reply.index >= reply.spec.max_new_tokens or len(reply.tokens) >= self.batcher.context_limit:
            self._end(reply, "length")

    def _hand_out_due(self) -> None:
        now = time.perf_counter()
        for reply in self.batcher.running:
            held = len(reply.logprobs)
            if held >= FLUSH_TOKENS or (held and now - reply.sent_at >= FLUSH_S):
                self._hand_out(reply)

    def _hand_out(self, reply: Reply, finish: str = "", reason: str = "") -> None:
        offset = reply.sent - reply.prompt_len
        chunk = Tokens(
            offset=offset,
            tokens=reply.tokens[reply.sent :],
            logprobs=reply.logprobs,
            version=self.version,
            finish=finish,
            reason=reason,
            cached_tokens=max(reply.cached, 0) if offset == len(reply.spec.prefix) else 0,
        )
        reply.sent = len(reply.tokens)
        reply.logprobs = []
        self._outbox.append((reply.stream, chunk))

    def _deliver_soon(self) -> None:
        """Chunks go out; before those that a command ended what had been made for the same replies."""
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            ended = {number for number, _ in outbox}
            before = [made for made in self._made if made[0] in ended]
            self._made = [made for made in self._made if made[0] not in ended]
            self._tell(self._told.deliver, [*before, *outbox])

    # ---- hand-over, on the engine thread ----

    def attach(self, reply: Reply, sender: Sender) -> None:
        """A prefill engine's request has met its receiver: compute it, if what that holds and wants fits."""
        hello = sender.hello
        reason = ""
        if self.model is None or self.cache is None:
            reason = "the prefill side has no weights"
        elif hello.version != self.version:
            reason = f"the prefill side has version {self.version}, the decode side {hello.version}"
        elif hello.layout != self.cache.layout:
            reason = f"the prefill side's KV is {self.cache.layout}, the decode side's {hello.layout}"
        elif not 0 <= hello.cached < len(reply.tokens):
            reason = f"the decode side claims KV of {hello.cached} of {len(reply.tokens)} tokens"
        if reason:
            self._hand_out(reply, "refused", reason)
            return
        self.replies[reply.stream] = reply
        self.senders[reply.stream] = sender
        self.batcher.waiting.append(reply)

    def _send_soon(self) -> None:
        """What was computed for other engines leaves."""
        sends, self._sends = self._sends, []
        for sender, what, data in sends:
            self._tell(sender.send, what, data)

    def _send_pages(self, reply: Reply) -> None:
        """What is computed and not sent yet, copied: the blocks may be used anew at once."""
        sender = self.senders.get(reply.stream)
        if sender is None:
            return
        assert self.cache is not None
        most = max(1, SEND_BODY // self.cache.token_bytes)
        while reply.sent_kv < reply.computed:
            pages = Pages(start=reply.sent_kv, count=min(most, reply.computed - reply.sent_kv))
            self._sends.append((sender, pages, self.cache.read(self._slots(reply, pages))))
            reply.sent_kv += pages.count

    def _hand_over(self, reply: Reply, token: int, logprob: float) -> None:
        """The context is computed and on its way; so is the token after it, and nothing is held for it here."""
        sender = self.senders.pop(reply.stream)
        self._sends.append((sender, First(token=token, logprob=logprob, cached=max(reply.cached, 0)), b""))
        del self.replies[reply.stream]
        self.batcher.end(reply)

    def _slots(self, reply: Reply, pages: Pages) -> Tensor:
        return slots_of(reply, pages.start, pages.count).to(self._device)

    def _ask_for_arrivals(self) -> None:
        """Fetch the KV of what a decode engine has just admitted."""
        for reply in self.batcher.arrivals:
            assert self.cache is not None
            hello = Hello(
                room=reply.spec.bootstrap_room,
                request=reply.spec.request,
                attempt=reply.spec.attempt,
                context=digest(reply.tokens),
                version=self.version,
                cached=reply.computed,
                layout=self.cache.layout,
            )
            self._tell(self._told.start_receiving, reply.stream, reply.lease, hello)
        self.batcher.arrivals.clear()

    def _drop_dropped(self) -> None:
        for reply in self.batcher.dropped:
            self._tell(self._told.stop_receiving, reply.stream)
        self.batcher.dropped.clear()

    def _leased(self, number: int, lease: int) -> Reply | None:
        """The request that still receives into the blocks it had under this lease; None: they may be another's."""
        reply = self.replies.get(number)
        return reply if reply is not None and reply.receiving and reply.lease == lease else None

    def take_pages(self, number: int, lease: int, pages: Pages, data: bytes) -> None:
        reply = self._leased(number, lease)
        if reply is None:
            return
        assert self.cache is not None
        end = pages.start + pages.count
        fits = pages.start == reply.computed and pages.count > 0 and end <= len(reply.tokens)
        if not fits or len(data) != pages.count * self.cache.token_bytes:
            self._end(reply, "interrupted", f"KV of {pages.count} tokens from {pages.start} does not fit")
            return
        self.cache.write(self._slots(reply, pages), data)
        self.batcher.advance(reply, pages.count)

    def take_first(self, number: int, lease: int, first: First) -> None:
        reply = self._leased(number, lease)
        if reply is None:
            return
        assert self.config is not None
        if reply.computed != len(reply.tokens) or not 0 <= first.token < self.config.vocab_size:
            self._end(reply, "interrupted", f"a first token after KV of {reply.computed} of {len(reply.tokens)} tokens")
            return
        reply.receiving = reply.remote = False
        reply.cached = first.cached
        self._record(reply, first.token, first.logprob, time.perf_counter())

    def receive_failed(self, number: int, lease: int, finish: str, reason: str) -> None:
        reply = self._leased(number, lease)
        if reply is not None:
            self._end(reply, finish, reason)

    def _break_off(self, reason: str) -> None:
        """End what is on its way from or to another engine."""
        for reply in tuple(self.replies.values()):
            if reply.receiving or reply.stream in self.senders:
                self._end(reply, "interrupted", reason)

    def set_role(self, role: Role) -> None:
        if role is not self.role and self.replies:
            raise EngineError(f"{len(self.replies)} requests run: abort them before a change of role")
        self.role = role
        self.batcher.prefill_only = role is Role.PREFILL

    # ---- commands, on the engine thread ----

    def submit(self, reply: Reply) -> None:
        if self.model is None:  # released since it was accepted
            self._hand_out(reply, "interrupted", "no weights loaded")
            return
        self.replies[reply.stream] = reply
        self.batcher.waiting.append(reply)

    def _end(self, reply: Reply, finish: str, reason: str = "") -> None:
        del self.replies[reply.stream]
        self.senders.pop(reply.stream, None)
        self.batcher.end(reply)
        self._hand_out(reply, finish, reason)

    def cancel(self, number: int) -> None:
        reply = self.replies.pop(number, None)
        if reply is not None:
            self.senders.pop(number, None)
            self.batcher.end(reply)

    def abort(self, request: str | None) -> int:
        if request is None:  # a drain does not wait for the end of an iteration that has made what it makes
            self._made, self._outbox = [], [*self._made, *self._outbox]
            self._send_soon()
        chosen = [reply for reply in self.replies.values() if request in (None, reply.spec.request)]
        for reply in chosen:
            self._end(reply, "interrupted", "aborted")
        return len(chosen)

    def pause(self, mode: str) -> None:
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self._break_off("the worker pauses")
            self.batcher.retract_all()
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def load_weights(self, config: ModelConfig, tensors: Mapping[str, Tensor], version: PolicyVersion) -> None:
        for reply in self.batcher.running:
            if reply.logprobs:
                self._hand_out(reply)  # under the version that made them
        for reply in self.batcher.waiting:
            if reply.logprobs:
                self._hand_out(reply)
        model = self.model
        if model is not None and config != self.config:
            raise EngineError(f"version {version} has another configuration than version {self.version}")
        self._break_off(f"the weights changed to version {version}")
        if model is None:
            dtype = torch.float32 if self._device.type == "cpu" else getattr(torch, config.dtype, torch.bfloat16)
            model = Decoder(config).to(device=self._device, dtype=dtype).requires_grad_(False).eval()
            blocks = self._rollout.kv_cache_tokens // BLOCK + 1
            cache = KvCache(config, blocks, dtype, self._device)
            apply_weights(model, tensors)
            batcher = self._new_batcher(blocks, config.max_position_embeddings)
            model.position_limit = batcher.context_limit
            self.model, self.config, self.cache, self.batcher = model, config, cache, batcher
        else:
            apply_weights(model, tensors)
            self.batcher.new_weights()
        self.version = version

    def _new_batcher(self, blocks: int, context_limit: int = 0) -> Batcher:
        rollout = self._rollout
        batcher = Batcher(
            BlockPool(max(blocks, 2)),
            max_running=rollout.max_running,
            chunk_tokens=rollout.prefill_chunk_tokens,
            context_limit=context_limit,
        )
        batcher.prefill_only = self.role is Role.PREFILL
        return batcher

    def release(self) -> int:
        if self.replies:
            raise EngineError(f"{len(self.replies)} requests run: abort them before releasing the device memory")
        before = self.occupied()
        self.released = True
        self.model = self.cache = None
        self.batcher = self._new_batcher(1)
        self.version = NO_WEIGHTS
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # else the allocator keeps what is freed
        return max(0, before - self.occupied())

    def restore(self) -> None:
        self.released = False
