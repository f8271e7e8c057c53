"""The rollout tasks of one gateway's sessions: taken from the queue that agents take from, kept by progress reports as agents keep theirs.

Owns: each task's newest delivery, by the session that plays it. Never decides what becomes of a task: `trajectories.py` says which
are acknowledged and which come again.
"""

from __future__ import annotations

import asyncio
from typing import Final

from messages.agent import RolloutTask
from messages.envelope import UndecodableMessage
from messages.subjects import decode_on, stream_of
from services.edge.tasks import problem_of_task, refuse
from services.router.gateway.config import Config
from services.runtime.bus import Bus, BusError, Consumer, Delivery
from services.runtime.log import get_logger

PROGRESS_SHARE: Final = 3
"""A task's acknowledgement is extended this often within its wait."""

log = get_logger("gateway")


class TaskQueue:
    """`next`, then `hold`, then `done`; `keep` now and then."""

    def __init__(self, config: Config, bus: Bus) -> None:
        self.held: dict[str, Delivery] = {}  # by session: the newest delivery of its task
        self._config = config
        self._bus = bus
        self._consumer: Consumer | None = None
        self._kept_ms = 0

    async def next(self, wait_s: float) -> tuple[Delivery, RolloutTask] | None:
        """A task; None: none came for so long. Those that make no sense are refused on the way. Raises BusError."""
        if self._consumer is None:
            stream = stream_of(self._config.job, RolloutTask)
            assert stream is not None
            self._consumer = await self._bus.consume(
                stream,
                "agents",
                (f"pearl.{self._config.job}.task.*",),
                ack_wait_s=self._config.ack_wait_s,
                max_ack_pending=self._config.max_ack_pending,
            )
        while True:
            deliveries = await asyncio.shield(_fetch_one(self._consumer, wait_s))
            if not deliveries:
                return None
            delivery = deliveries[0]
            try:
                task = decode_on(self._config.job, delivery.subject, delivery.data, RolloutTask)
            except UndecodableMessage as error:
                problem = error.reason
            else:
                problem = problem_of_task(task, self._config.newest_version)
                if not problem:
                    return delivery, task
            await refuse(self._bus, self._consumer, self._config.job, "gateway", delivery, problem)

    def hold(self, session: str, delivery: Delivery) -> None:
        """The session plays it; a newer delivery of the same task takes the older one's place."""
        self.held[session] = delivery

    async def done(self, session: str, again_s: float | None) -> None:
        """What the session holds, if anything: acknowledged (None), or to be delivered again after so long."""
        delivery = self.held.pop(session, None)
        if delivery is not None:
            await self.give_back(delivery, again_s)

    async def give_back(self, delivery: Delivery, again_s: float | None) -> None:
        """The same for a delivery that no session holds."""
        assert self._consumer is not None
        try:
            if again_s is None:
                await self._consumer.ack(delivery)
            else:
                await self._consumer.nak(delivery, again_s)
        except BusError as error:  # it is delivered again, and found ended
            log.warning(str(error), action="ack_lost")

    async def keep(self, now_ms: int) -> None:
        """What is held is not delivered to others meanwhile."""
        if self._consumer is None or now_ms - self._kept_ms < self._config.ack_wait_s * 1000 / PROGRESS_SHARE:
            return
        self._kept_ms = now_ms
        for delivery in list(self.held.values()):
            try:
                await self._consumer.progress(delivery)
            except BusError as error:
                log.warning(str(error), action="progress_lost")
                break

    async def stop(self) -> None:
        """Give every task back: another process begins them anew."""
        for session in tuple(self.held):
            await self.done(session, 0.0)
        if self._consumer is not None:
            await self._consumer.stop()


async def _fetch_one(consumer: Consumer, wait_s: float) -> list[Delivery]:
    return list(await consumer.fetch(1, wait_s))
