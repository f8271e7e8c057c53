"""Router process: answers assignment requests from the replica of the role table and the workers' heartbeats. With
`gateway.bind` it has an HTTP gateway beside it (`gateway/`), which asks it without a message.

Owns nothing that must survive. Never talks to a worker, never sees a token. Driven by requests, heartbeats and table
changes. Many may run: they share the requests by queue group. A core subscription and no `CoreHost`: nothing is
checkpointed, and an answer must not wait for a write.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from messages.agent import Assignment, NotNow
from messages.envelope import UndecodableMessage, encode
from messages.router import AssignRequest
from messages.runtime_tracker import WorkerHeartbeat
from messages.subjects import decode_on, subject_of, telemetry_subject
from pearl_state.model import RoleTable
from services.connect import connect
from services.jobfile import JobFile
from services.replica import replica_of
from services.router.config import Config
from services.router.core import ROOMS, RouterCore, Unplaceable
from services.runtime.bus import Bus, BusError, Delivery, Subscription
from services.runtime.clock import Clock, now_ms
from services.runtime.dead_letters import dead_letter
from services.runtime.log import get_logger

QUEUE_GROUP = "router"
MOST_DEAD_WAITING = 256
"""Dead letters waiting to be stored; more are counted and dropped, so that a flood of nonsense delays no answer."""

log = get_logger("router")


async def serve(job: JobFile, stop: asyncio.Event, index: int = 0) -> None:
    """Answer until `stop` is set, as router process `index`. Raises ConfigError, BusUnavailable."""
    bus = await connect(job, "router")
    replica = replica_of(bus, job.job.name)
    try:
        router = Router(Config.of(job), bus, job.job.name)
        replica.on_change(router.on_table)
        await replica.start(bus, job.job.name)
        async with contextlib.AsyncExitStack() as stack:
            if job.gateway.bind:
                from services.router.gateway.service import (
                    serving,  # an HTTP server and templates: for those who use it
                )

                await stack.enter_async_context(serving(job, index, replica, router.place, router.core.on_end))
            await router.run(stop)
    finally:
        await replica.stop()
        await bus.close()


class Router:
    """One router on one bus. `run` it once; `on_table` may be called before and during it."""

    def __init__(self, config: Config, bus: Bus, job_name: str, clock: Clock = now_ms) -> None:
        self.core = RouterCore(config, secrets.randbelow(ROOMS))
        self.assigned = 0
        self.not_now = 0
        self.refused = 0
        self._bus = bus
        self._job = job_name
        self._clock = clock
        self._name = secrets.token_hex(4)  # makes dead letters' ids
        self._buried = 0
        self._dead: asyncio.Queue[tuple[Delivery, str]] = asyncio.Queue(MOST_DEAD_WAITING)

    def on_table(self, table: RoleTable) -> None:
        """The replica changed."""
        self.core.on_table(table, self._clock())

    async def run(self, stop: asyncio.Event) -> None:
        """Answer requests until `stop` is set."""
        requests = await self._bus.subscribe(f"pearl.{self._job}.assign", queue=QUEUE_GROUP)
        heartbeats = await self._bus.subscribe(telemetry_subject(self._job, WorkerHeartbeat))
        log.info("answering", action="router.started")
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._answer_all(requests)),
                group.create_task(self._hear_all(heartbeats)),
                group.create_task(self._bury_all()),
            ]
            await stop.wait()
            await requests.stop()
            await heartbeats.stop()
            for task in tasks[1:]:
                task.cancel()
            await asyncio.wait(tasks[:1], timeout=1.0)  # what was received is still answered
            tasks[0].cancel()
        text = f"{self.assigned} assigned, {self.not_now} not now, {self.refused} refused, {requests.dropped} dropped"
        log.info(text, action="router.stopped")

    def place(self, request: AssignRequest) -> Assignment | NotNow:
        """Answer an edge in this process."""
        return self._count(self.core.assign(request, self._clock()))

    def _count(self, reply: Assignment | NotNow) -> Assignment | NotNow:
        if isinstance(reply, Assignment):
            self.assigned += 1
        else:
            self.not_now += 1
        return reply

    async def answer(self, delivery: Delivery) -> None:
        """Answer one request, or put it aside for the dead-letter stream."""
        try:
            request = decode_on(self._job, delivery.subject, delivery.data, AssignRequest)
            reply = self.core.assign(request, self._clock())
        except UndecodableMessage as error:
            self._refuse(delivery, error.reason)
            return
        except Unplaceable as error:
            self._refuse(delivery, str(error))
            return
        if not delivery.reply:
            self._refuse(delivery, "an assignment request without a reply subject")
            return
        try:
            await self._bus.publish(delivery.reply, encode(self._count(reply)))
        except BusError as error:  # the client asks again
            log.warning(f"a reply was lost: {error}", action="router.reply_lost")

    def hear(self, delivery: Delivery) -> None:
        """Take one heartbeat; an unreadable one is the runtime tracker's to report."""
        try:
            self.core.on_heartbeat(decode_on(self._job, delivery.subject, delivery.data, WorkerHeartbeat))
        except UndecodableMessage:
            self.refused += 1

    async def _answer_all(self, requests: Subscription) -> None:
        async for delivery in requests:
            await self.answer(delivery)

    async def _hear_all(self, heartbeats: Subscription) -> None:
        async for delivery in heartbeats:
            self.hear(delivery)

    def _refuse(self, delivery: Delivery, reason: str) -> None:
        self.refused += 1
        if not self._dead.full():
            self._dead.put_nowait((delivery, reason))

    async def _bury_all(self) -> None:
        while True:
            delivery, reason = await self._dead.get()
            letter = dead_letter("router", delivery.subject, delivery.data, reason)
            self._buried += 1
            log.warning(f"refused a message on {letter.subject}: {letter.reason}", action="router.dead_letter")
            try:
                await self._bus.publish_durable(
                    subject_of(self._job, letter), encode(letter), msg_id=f"router:{self._name}:{self._buried}"
                )
            except BusError as error:
                log.warning(f"a dead letter was lost: {error}", action="router.dead_letter_lost")
