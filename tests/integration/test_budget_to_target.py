"""Elastic scheduler, decision engine and runtime tracker under their hosts on one in-memory bus: stages 1 and 2 of 4.1.2."""

from __future__ import annotations

import asyncio

from messages.decision_engine import BudgetChanged, WorkloadProfile
from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import Message, decode, encode
from messages.ids import NodeId, PolicyVersion, Zone
from messages.monitor import DeadLetter, DecisionRecord
from messages.orchestrator import TargetConfiguration
from messages.pipeline_scheduler import StepFinished
from messages.subjects import event_subject, state_bucket, stream, subject_of, telemetry_subject
from services.decision_engine.config import Config as DecisionConfig
from services.decision_engine.core import DecisionEngineCore
from services.elastic_scheduler.config import Config as ElasticConfig
from services.elastic_scheduler.core import ElasticSchedulerCore
from services.jobfile import JobFile, JobSection, NodeSection, TimeoutSection
from services.runtime.bus import BucketSpec, Bus, StreamSpec
from services.runtime.bus_memory import MemoryBroker
from services.runtime.host import CoreHost
from services.runtime_tracker.config import Config as TrackerConfig
from services.runtime_tracker.core import RuntimeTrackerCore

JOB = JobFile(
    job=JobSection(name="t"),
    nodes=(
        NodeSection(name="r0", zone=Zone.RESERVED, gpus=1),
        NodeSection(name="p0", zone=Zone.PREEMPTIBLE, gpus=2),
    ),
    timeouts=TimeoutSection(coalesce_ms=5),
)


def hosts(broker: MemoryBroker) -> list[CoreHost]:
    telemetry = tuple(telemetry_subject("t", kind) for kind in RuntimeTrackerCore.telemetry)
    return [
        CoreHost(ElasticSchedulerCore(ElasticConfig.of(JOB)), broker.connect(), job_name="t", tick_ms=5),
        CoreHost(DecisionEngineCore(DecisionConfig.of(JOB)), broker.connect(), job_name="t", tick_ms=5),
        CoreHost(
            RuntimeTrackerCore(TrackerConfig.of(JOB)), broker.connect(), job_name="t", tick_ms=5, telemetry=telemetry
        ),
    ]


async def read(bus: Bus, kind: type[Message]) -> list:
    return [decode(each.data, kind) async for each in bus.read(stream("t", "ev"), event_subject("t", kind))]


async def wait_for(bus: Bus, kind: type[Message], count: int) -> list:
    async with asyncio.timeout(10):
        while len(found := await read(bus, kind)) < count:  # noqa: ASYNC110 - the bus has no condition to wait on
            await asyncio.sleep(0.005)
    return found


async def say(bus: Bus, message: Message, msg_id: str) -> None:
    await bus.publish_durable(subject_of("t", message), encode(message), msg_id=msg_id)


async def test_events_become_budgets_and_targets_across_a_restart() -> None:
    broker = MemoryBroker()
    bus = broker.connect()
    await bus.ensure_stream(StreamSpec(name=stream("t", "ev"), subjects=("pearl.t.ev.>",)))
    await bus.ensure_stream(StreamSpec(name=stream("t", "dead"), subjects=("pearl.t.dead.>",)))
    await bus.ensure_bucket(BucketSpec(name=state_bucket("t")))

    stop = asyncio.Event()
    running = [asyncio.create_task(host.run(stop)) for host in hosts(broker)]
    (first,) = await wait_for(bus, TargetConfiguration, 1)
    assert (first.colocated, first.usable) == (1, ("r0-w0",))
    await say(bus, GpuAvailable(node=NodeId("p0"), gpus=(0, 1)), "e1")
    targets = await wait_for(bus, TargetConfiguration, 2)
    assert (targets[1].colocated, targets[1].usable) == (3, ("r0-w0", "p0-w0", "p0-w1"))
    stop.set()
    await asyncio.gather(*running)

    await say(bus, GpuReclaimed(node=NodeId("p0"), gpus=(1,), notice_ms=1000), "e2")
    await say(bus, GpuReclaimed(node=NodeId("nowhere"), gpus=(1,)), "e3")
    step = StepFinished(
        batch=0,
        version=PolicyVersion(1),
        train_s=1.0,
        trained_tokens=1,
        reward_mean=0.0,
        reward_std=0.0,
        loss=0.0,
        grad_norm=0.0,
        zero_variance_groups=0,
    )
    await say(bus, step, "e4")
    stop = asyncio.Event()
    running = [asyncio.create_task(host.run(stop)) for host in hosts(broker)]
    targets = await wait_for(bus, TargetConfiguration, 3)
    (profile,) = await wait_for(bus, WorkloadProfile, 1)
    stop.set()
    await asyncio.gather(*running)
    assert [leave.worker for leave in targets[2].leaving] == ["p0-w1"] and targets[2].colocated == 2
    assert [budget.budget_id for budget in await read(bus, BudgetChanged)] == [1, 2, 3]
    assert [record.decision_id for record in await read(bus, DecisionRecord)] == ["d1", "d2", "d3"]
    assert profile.train_step == 0
    letters = [decode(each.data, DeadLetter) async for each in bus.read(stream("t", "dead"), "pearl.t.dead.>")]
    assert [letter.receiver for letter in letters] == ["elastic_scheduler"] and "nowhere" in letters[0].reason
