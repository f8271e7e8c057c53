"""Agents on a real NATS server: tasks are shared, survive an agent's death, and every turn is written once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest

from messages.agent import RequestInterrupted, TurnFinished
from messages.envelope import decode, encode
from messages.pipeline_scheduler import TrajectoryCompleted
from messages.subjects import message_id, subject_of
from services.agent.service import Agent
from services.checker.core import check
from services.checker.core_report import Expected, Journalled
from services.runtime import bus_nats
from tests.nats_fixture import NatsServer
from tests.scripted_cluster import Cluster, create_streams, task_of
from tests.unit.test_episode import job_of, true_answer

EPISODES = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


async def test_an_agent_dies_and_the_other_finishes_its_trajectories(server: NatsServer) -> None:
    buses = [
        await bus_nats.connect(server.url, name=name, inbox_prefix=f"_INBOX_{name}")
        for name in ("one", "two", "cluster")
    ]
    await create_streams(buses[2])
    cluster = Cluster(buses[2], true_answer, "cut:2", "refuse", "die:3", "whole", "cut:1", "lose")
    await cluster.start()
    job, stop = job_of(), asyncio.Event()
    doomed = asyncio.ensure_future(Agent(job, buses[0], None, edge_name="one").run(asyncio.Event()))
    survivor = asyncio.ensure_future(Agent(job, buses[1], None, edge_name="two").run(stop))
    for member in range(EPISODES):
        task = task_of(f"b0-g0-m{member}")
        await buses[2].publish_durable(subject_of("demo", task), encode(task), msg_id=message_id(task) or "")

    async def journal() -> list[Journalled]:
        return [
            Journalled(d.seq, decode(d.data, TurnFinished, RequestInterrupted))
            async for d in buses[2].read("demo_JOURNAL", "pearl.demo.journal.*")
        ]

    async def ends() -> list[TrajectoryCompleted]:
        subject = "pearl.demo.ev.trajectory_completed.*"
        return [decode(d.data, TrajectoryCompleted) async for d in buses[2].read("demo_EV", subject)]

    async with asyncio.timeout(30):
        while len(await journal()) < EPISODES:  # noqa: ASYNC110 - the streams have no event for it
            await asyncio.sleep(0.02)
        await buses[0].close()  # it can say nothing any more, not even that it gives its tasks back
        doomed.cancel()
        with suppress(BaseException):
            await doomed
        while len(await ends()) < EPISODES:  # noqa: ASYNC110 - the streams have no event for it
            await asyncio.sleep(0.05)
    stop.set()
    await survivor
    report = check(
        Expected(batch_trajectories=EPISODES, group_size=EPISODES, staleness=1),
        journal=await journal(),
        attempts=cluster.log,
        ends=await ends(),
        batches=(),
        steps=(),
    )
    assert report.violations == ()
    assert (report.completed, report.failed, report.lost, report.regenerated) == (EPISODES, 0, 0, 0)
    assert report.delivered == EPISODES * 3 * 5
    await cluster.stop()
    for bus in buses[1:]:
        await bus.close()
