"""Feeds a `Board` from the bus: history first, then what comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from messages.envelope import Message, UndecodableMessage
from messages.pipeline_scheduler import StepFinished
from messages.runtime_tracker import WorkerHeartbeat
from messages.subjects import decode_on, stream, telemetry_subject
from pearl_state.model import RoleTable
from pearl_state.peers import wrong_batch
from pearl_state.watch import Replica
from services.jobfile import JobFile
from services.monitor.board import KINDS, Board
from services.runtime.bus import Bus, BusUnavailable, Delivery
from services.runtime.clock import now_ms
from services.runtime.follow import Follower

DURABLE = tuple(kind for kind in KINDS if kind is not WorkerHeartbeat)


class Collector:
    """Keeps a board current until stopped. Reads only."""

    def __init__(self, bus: Bus, job: JobFile, *, on_message: Callable[[int, object], None] | None = None) -> None:
        self.board = Board(job)
        self._bus = bus
        self._job = job.job.name
        self._on_message = on_message
        self._train_steps = job.pipeline.train_steps
        self._events = Follower(bus, stream(self._job, "ev"), f"pearl.{self._job}.ev.>")
        self._replica = Replica()

    async def start(self, tasks: asyncio.TaskGroup | None = None) -> None:
        """Take in the history and the current table."""
        await self._replica.start(self._bus, self._job)
        self._replica.on_change(lambda table: self._take(now_ms(), table))
        if self._replica.table is not None:
            self._take(now_ms(), self._replica.table)
        await self.catch_up()

    async def catch_up(self) -> None:
        """Read what is new in the event stream. Losing the connection costs nothing: the next call goes on."""
        async for delivery in self._events.more():
            self._take_delivery(delivery, DURABLE)

    async def follow(self, stop: asyncio.Event, *, poll_s: float = 0.3) -> None:
        """Until `stop`: heartbeats as they come, events by reading on every `poll_s`."""
        heartbeats = await self._bus.subscribe(telemetry_subject(self._job, WorkerHeartbeat))
        try:
            while not stop.is_set():
                with contextlib.suppress(BusUnavailable):  # the broker is away: the next round reads on
                    await self.catch_up()
                deadline = now_ms() + round(poll_s * 1000)
                while (left := deadline - now_ms()) > 0:
                    delivery = await heartbeats.next(left / 1000)
                    if delivery is not None:
                        self._take_delivery(delivery, (WorkerHeartbeat,))
        finally:
            await heartbeats.stop()

    def _take_delivery(self, delivery: Delivery, kinds: tuple[type[Message], ...]) -> None:
        try:
            message = decode_on(self._job, delivery.subject, delivery.data, *kinds)
        except UndecodableMessage:
            return
        if isinstance(message, StepFinished) and wrong_batch(message.batch, self._train_steps):
            return
        self._take(delivery.at_ms, message)

    def _take(self, at_ms: int, message: Message | RoleTable) -> None:
        self.board.take(at_ms, message)
        if self._on_message is not None:
            self._on_message(at_ms, message)
