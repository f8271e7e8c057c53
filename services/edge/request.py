"""The edge of a request: who holds a reply's state for its client, and brings it to an end whatever workers do.

Owns: requests that run here, the one subscription on which their tokens come back. Never decides where a request runs
(routers do) and knows nothing of what a reply is for. Driven by: `generate`, token chunks, the role table.
What a request does next, and the invariants, are in `request_state.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from messages.agent import Assignment, NotNow, TokenChunk
from messages.envelope import UndecodableMessage, decode, encode, part_of, tag_of
from messages.router import AssignRequest
from messages.subjects import subject_of
from pearl_state.model import RoleTable
from services.edge.request_state import (
    BARREN_MS,
    Ask,
    Cancel,
    Effect,
    Elapsed,
    Event,
    Interruption,
    Journal,
    NoAnswer,
    Reply,
    RequestSpec,
    RequestState,
    Run,
    Unreadable,
    WorkerLost,
    is_lost,
)
from services.runtime.bus import Bus, BusError, BusUnavailable, Delivery, NoReply, Subscription
from services.runtime.log import get_logger

__all__ = [
    "Interruption",
    "NoTokenError",
    "OnInterruption",
    "OnTokens",
    "PolicyMovedError",
    "Reply",
    "RequestEdge",
    "RequestFailedError",
    "RequestSpec",
    "RequestState",
]

ASSIGN_TIMEOUT_S: Final = 2.0
"""A router answers within milliseconds; one that died with the question in hand is asked again after this."""
GONE_GRACE_S: Final = 0.02
"""A worker that drained said so on another subject than the table that shows it gone: its last chunk is let in first."""
FEW: Final = 4
"""So many requests or fewer: each message goes out at once. With more, those of several requests go out together."""
GATHER_S: Final = 0.005
"""For so long messages gather then: one write for many requests costs the sender, the broker and the worker little more than one
for one (docs/gateway.md), and no reply of a model is so short that its client would notice."""

CHUNK: Final = tag_of(TokenChunk)

log = get_logger("edge")


class RequestFailedError(Exception):
    """No worker could get on with this request; the message says what the last ones answered."""


class PolicyMovedError(RequestFailedError):
    """The policy became newer than the request allows."""


class NoTokenError(RequestFailedError):
    """There was no first token within the request's `queue_ms`."""


class TableReplica(Protocol):
    """What is needed of a replica of the role table."""

    @property
    def table(self) -> RoleTable | None: ...

    def on_change(self, callback: Callable[[RoleTable], None]) -> object: ...


OnTokens = Callable[[RequestState], int | None]
"""Called with the state after tokens came. An int: so many are enough, the reply ends there. Must not block or raise."""

AskRouter = Callable[[AssignRequest], Assignment | NotNow]
"""A router in the same process, which is asked without a message."""

TellRouter = Callable[[Assignment], None]
"""The same is told that an attempt which it placed has ended, however it did."""


class _Running:
    """A request that runs here: its state, what its events asked for, and who waits for that."""

    def __init__(self, state: RequestState, on_tokens: OnTokens | None = None) -> None:
        self.state = state
        self.on_tokens = on_tokens
        self.placed: Assignment | None = None  # of the attempt whose end the router was not told of
        self.effects: list[Effect] = []
        self.wake: asyncio.Future[None] | None = None

    def take(self, event: Event, now_ms: float) -> None:
        """Step; wake the waiter only if there is something to do."""
        known = len(self.state.tokens)
        effects = self.state.step(event, now_ms)
        if self.on_tokens is not None and len(self.state.tokens) > known:
            enough = self.on_tokens(self.state)
            if enough is not None:
                effects = self.state.stop_at(enough, effects)
        self.effects += effects
        if (effects or self.state.done) and self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


OnInterruption = Callable[[Interruption], Awaitable[None]]


class RequestEdge:
    """Runs requests to their end. `start` before use; one a process is enough."""

    def __init__(
        self,
        bus: Bus,
        job: str,
        edge: str,
        *,
        silence_ms: float,
        replica: TableReplica | None = None,
        make_state: type[RequestState] = RequestState,
        ask_router: AskRouter | None = None,
        tell_router: TellRouter | None = None,
    ) -> None:
        """`make_state`: what holds a request (a subclass may watch it)."""
        self.late_chunks = 0  # of attempts that are no longer wanted
        self.undecodable = 0
        self._bus = bus
        self._job = job
        self._reply_to = f"pearl.{job}.tok.{edge}"
        self._silence_ms = silence_ms
        self._replica = replica
        self._make_state = make_state
        self._ask_router = ask_router
        self._tell_router = tell_router
        self._loop: asyncio.AbstractEventLoop  # since `start`; asking for it costs a system call each time
        self._running: dict[str, _Running] = {}
        self._subscription: Subscription | None = None
        self._reader: asyncio.Task[None] | None = None
        self._gathered: list[tuple[str, bytes]] = []
        self._gathering = False
        self._sender: asyncio.Task[None] | None = None
        if replica is not None:
            replica.on_change(self._on_table)

    async def start(self) -> None:
        """Subscribe; requests may follow."""
        self._loop = asyncio.get_running_loop()
        self._subscription = await self._bus.subscribe(self._reply_to)
        self._reader = self._loop.create_task(self._read(self._subscription), name="request-edge")

    async def stop(self) -> None:
        """Stop reading. Requests that still run must have been cancelled."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        if self._subscription is not None:
            await self._subscription.stop()

    @property
    def running(self) -> int:
        """Requests that run here."""
        return len(self._running)

    async def generate(
        self, spec: RequestSpec, on_interruption: OnInterruption, on_tokens: OnTokens | None = None
    ) -> Reply:
        """The whole reply, exactly once. Waits as long as it takes while no worker serves.

        `on_interruption` must have stored its argument when it returns; what it raises ends the request. Raises
        RequestFailedError. Cancelling the caller cancels the attempt.
        """
        assert spec.request not in self._running, f"request {spec.request} runs here already"
        made = self._make_state(spec, reply_to=self._reply_to, silence_ms=self._silence_ms)
        running = _Running(made, on_tokens)
        state = running.state
        self._running[spec.request] = running
        try:
            running.effects += state.begin(self._now_ms())
            while True:
                while running.effects:
                    await self._execute(running, running.effects.pop(0), on_interruption)
                if state.reply is not None:
                    return state.reply
                if state.failed:
                    kind = RequestFailedError
                    if state.moved or state.overdue:
                        kind = PolicyMovedError if state.moved else NoTokenError
                    raise kind(f"request {spec.request}: {state.failed}")
                await self._wait(running)
        finally:
            del self._running[spec.request]
            self._attempt_ended(running)
            self.late_chunks += state.late
            cancel = state.cancellation()
            if cancel is not None:
                await self._cancel(cancel)

    def abort(self, request: str) -> bool:
        """End a request's reply with the tokens it has, as "abort". False if it does not run here."""
        running = self._running.get(request)
        if running is None or running.state.done:
            return running is not None
        pending = tuple(running.effects)
        running.effects = list(running.state.stop_at(len(running.state.tokens), pending, "abort"))
        if running.wake is not None and not running.wake.done():
            running.wake.set_result(None)
        return True

    async def _execute(self, running: _Running, effect: Effect, on_interruption: OnInterruption) -> None:
        match effect:
            case Ask():
                self._attempt_ended(running)
                answer = await self._ask(effect.message)
                if isinstance(answer, Assignment):
                    running.placed = answer
                table = self._replica.table if self._replica is not None else None
                if table is not None and isinstance(answer, Assignment) and _assigned_lost(table, answer):
                    # The router has not seen this table yet.
                    answer = NotNow(
                        request=answer.request, attempt=answer.attempt, retry_after_ms=BARREN_MS, reason="worker gone"
                    )
                running.take(answer, self._now_ms())
            case Run():
                for message in effect.messages:
                    # One that is lost, here or later, shows as silence.
                    await self._send(subject_of(self._job, message), encode(message))
            case Cancel():
                await self._cancel(effect)
            case Journal():
                await on_interruption(effect.interruption)

    def _attempt_ended(self, running: _Running) -> None:
        if running.placed is not None and self._tell_router is not None:
            self._tell_router(running.placed)
        running.placed = None

    async def _ask(self, message: AssignRequest) -> Assignment | NotNow | NoAnswer:
        if self._ask_router is not None:
            return self._ask_router(message)
        try:
            answer = await self._bus.request(subject_of(self._job, message), encode(message), ASSIGN_TIMEOUT_S)
            return decode(answer.data, Assignment, NotNow)
        except UndecodableMessage:
            self.undecodable += 1
        except (NoReply, BusUnavailable):
            pass
        return NoAnswer()

    async def _cancel(self, cancel: Cancel) -> None:
        for worker in cancel.workers:
            await self._send(f"pearl.{self._job}.gen.{worker}", encode(cancel.message))

    async def _send(self, subject: str, data: bytes) -> None:
        """What is lost here shows as silence, as what is lost later does."""
        if len(self._running) <= FEW and not self._gathering:
            with contextlib.suppress(BusUnavailable):
                await self._bus.publish(subject, data)
            return
        self._gathered.append((subject, data))
        if not self._gathering:
            self._gathering = True
            self._loop.call_later(GATHER_S, self._send_later)

    def _send_later(self) -> None:
        self._sender = self._loop.create_task(self._send_gathered(), name="request-edge-send")

    async def _send_gathered(self) -> None:
        while self._gathered:
            messages, self._gathered = self._gathered, []
            for subject, data in messages:
                try:
                    await self._bus.publish(subject, data)
                except BusError as error:
                    log.warning(f"a message on {subject} was lost: {error}", action="edge.lost")
        self._gathering = False

    async def _read(self, subscription: Subscription) -> None:
        async for delivery in subscription:
            self._on_delivery(delivery)

    def _on_delivery(self, delivery: Delivery) -> None:
        try:
            chunk = decode(delivery.data, TokenChunk)
        except UndecodableMessage as error:
            self.undecodable += 1
            if self.undecodable.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...: a flood is told of, not copied
                text = f"refused a message on {delivery.subject} ({self.undecodable} so far): {error.reason}"
                log.warning(text, action="chunk_refused")
            part = part_of(delivery.data, Unreadable)
            running = self._running.get(part.request) if part is not None and part.kind == CHUNK else None
            if part is not None and running is not None:
                running.take(part, self._now_ms())
            return
        running = self._running.get(chunk.request)
        if running is None:
            self.late_chunks += 1
        else:
            running.take(chunk, self._now_ms())

    def _on_table(self, table: RoleTable) -> None:
        lost = [(running, running.state.attempt) for running in self._running.values() if running.state.lost_in(table)]
        if lost:
            self._loop.call_later(GONE_GRACE_S, self._declare_lost, lost)

    def _declare_lost(self, lost: Sequence[tuple[_Running, int]]) -> None:
        for running, attempt in lost:
            if running.state.attempt == attempt:
                running.take(WorkerLost(), self._now_ms())

    async def _wait(self, running: _Running) -> None:
        """Until an event left something to do, or the deadline as it is now; a deadline that moved is waited for again."""
        due_ms = running.state.due_ms
        wake: asyncio.Future[None] = self._loop.create_future()
        running.wake = wake
        timer = None if due_ms is None else self._loop.call_at(due_ms / 1000, self._elapsed, running, wake)
        try:
            await wake
        finally:
            running.wake = None
            if timer is not None:
                timer.cancel()

    def _elapsed(self, running: _Running, wake: asyncio.Future[None]) -> None:
        running.take(Elapsed(), self._now_ms() + 1)  # timers may fire a clock's resolution early
        if not wake.done():
            wake.set_result(None)

    def _now_ms(self) -> float:
        return self._loop.time() * 1000


def _assigned_lost(table: RoleTable, held: Assignment) -> bool:
    return is_lost(table, held.worker, held.incarnation, held.role_generation) or (
        held.prefill_worker != ""
        and is_lost(table, held.prefill_worker, held.prefill_incarnation, held.prefill_role_generation)
    )
