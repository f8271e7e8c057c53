"""The agent process: takes tasks from the work queue and runs their episodes, as many at once as configured.

Owns: the tasks it holds. Never decides what is rolled out. Driven by the queue `<job>_TASKS`, whose durable consumer
all agents share, so that a task is with one agent at a time; with two for a moment, if one was thought dead.

Invariants: a task is acknowledged only when its trajectory's end is in the stream; a task held here is kept by
progress reports well within its acknowledgement wait, and given back at once when the process is told to stop.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

from messages.agent import RolloutTask
from messages.envelope import UndecodableMessage
from messages.subjects import decode_on, stream_of
from pearl_state.watch import Replica
from services.agent.config import PROGRESS_SHARE, Config
from services.agent.episode import Episode, SupersededError
from services.connect import connect
from services.edge.request import RequestEdge
from services.edge.tasks import problem_of_task, refuse
from services.environments.loading import environment_factory, load_tokenizer
from services.jobfile import JobFile
from services.replica import replica_of
from services.runtime.bus import Bus, BusError, Consumer, Delivery
from services.runtime.log import get_logger

FETCH_S: Final = 1.0
"""Longest wait for a task; also how late a stop may be seen."""
RETRY_S: Final = 1.0
"""A task whose episode met a bus that was away is offered again after this."""

log = get_logger("agent")


class _Held:
    """A task that runs here. `delivery` is its newest delivery, the one to acknowledge."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.episode: asyncio.Task[None] | None = None


class Agent:
    """One process's episodes. `run` until told to stop. Raises ConfigError from the constructor."""

    def __init__(self, job: JobFile, bus: Bus, replica: Replica | None, *, edge_name: str) -> None:
        self.config = Config.of(job)
        self.edge = RequestEdge(bus, job.job.name, edge_name, silence_ms=self.config.silence_ms, replica=replica)
        self._make_environment = environment_factory(job)
        self._tokenizer = load_tokenizer(job)
        self._bus = bus
        self._edge_name = edge_name
        self._held: dict[tuple[str, int], _Held] = {}
        self._holdings = 0
        self._freed = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Take tasks until `stop`; then give those that run back."""
        config = self.config
        stream = stream_of(config.job, RolloutTask)
        assert stream is not None
        consumer = await self._bus.consume(
            stream,
            "agents",
            (f"pearl.{config.job}.task.*",),
            ack_wait_s=config.ack_wait_s,
            max_ack_pending=config.max_ack_pending,
        )
        await self.edge.start()
        try:
            async with asyncio.TaskGroup() as group:
                keeper = group.create_task(self._keep(consumer), name="keep-tasks")
                taker = group.create_task(self._take(consumer, group), name="take-tasks")
                await stop.wait()
                keeper.cancel()
                taker.cancel()
                for held in list(self._held.values()):
                    assert held.episode is not None
                    held.episode.cancel()
        finally:
            await self.edge.stop()
            await consumer.stop()

    async def _take(self, consumer: Consumer, group: asyncio.TaskGroup) -> None:
        while True:
            self._freed.clear()
            free = self.config.concurrency - len(self._held)
            if free <= 0:
                await self._freed.wait()
                continue
            for delivery in await consumer.fetch(free, FETCH_S):
                await self._begin(consumer, group, delivery)

    async def _begin(self, consumer: Consumer, group: asyncio.TaskGroup, delivery: Delivery) -> None:
        try:
            task = decode_on(self.config.job, delivery.subject, delivery.data, RolloutTask)
        except UndecodableMessage as error:
            await refuse(self._bus, consumer, self.config.job, "agent", delivery, error.reason)
            return
        problem = problem_of_task(task, self.config.newest_version)
        if problem:
            await refuse(self._bus, consumer, self.config.job, "agent", delivery, problem)
            return
        key = (task.trajectory, task.retry)
        held = self._held.get(key)
        if held is not None:  # delivered again although it runs here: a progress report came too late
            held.delivery = delivery
            return
        self._held[key] = held = _Held(delivery)
        held.episode = group.create_task(self._run(consumer, task, held), name=f"episode-{task.trajectory}")

    async def _run(self, consumer: Consumer, task: RolloutTask, held: _Held) -> None:
        self._holdings += 1
        episode = Episode(
            task,
            bus=self._bus,
            edge=self.edge,
            make_environment=self._make_environment,
            tokenizer=self._tokenizer,
            config=self.config,
            holding=f"{task.retry}-{self._edge_name}-{self._holdings}",
            resumed=held.delivery.attempt > 1,
        )
        again_s: float | None = 0.0
        try:
            await episode.run()
            again_s = None
        except SupersededError as error:
            # The other writer goes on and will acknowledge; if it dies, the task comes back here or elsewhere.
            log.warning(str(error), action="superseded", trajectory=task.trajectory)
            again_s = self.config.ack_wait_s
        except BusError as error:
            log.warning(str(error), action="task_retry", trajectory=task.trajectory)
            again_s = RETRY_S
        finally:
            del self._held[task.trajectory, task.retry]
            self._freed.set()
            try:
                if again_s is None:
                    await consumer.ack(held.delivery)
                else:
                    await consumer.nak(held.delivery, again_s)
            except BusError as error:  # it is delivered again, and found ended
                log.warning(str(error), action="ack_lost", trajectory=task.trajectory)

    async def _keep(self, consumer: Consumer) -> None:
        while True:
            await asyncio.sleep(self.config.ack_wait_s / PROGRESS_SHARE)
            for held in list(self._held.values()):
                try:
                    await consumer.progress(held.delivery)
                except BusError as error:
                    log.warning(str(error), action="progress_lost")
                    break


async def serve(job: JobFile, stop: asyncio.Event, index: int = 0) -> None:
    """Run agent process `index` until `stop`. Raises ConfigError, BusUnavailable."""
    bus = await connect(job, "agent")
    try:
        replica = replica_of(bus, job.job.name)
        await replica.start(bus, job.job.name)
        try:
            agent = Agent(job, bus, replica, edge_name=f"agent{index}-{secrets.token_hex(4)}")
            await agent.run(stop)
        finally:
            await replica.stop()
    finally:
        await bus.close()
