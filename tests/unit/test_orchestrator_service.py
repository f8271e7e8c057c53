"""Orchestrator shell on the in-memory bus: write before publish before acknowledge, restart, standby, dead letters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from messages import subjects
from messages.elastic_scheduler import GpuAvailable
from messages.envelope import Message, decode, encode
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import Activity, NodeId, PolicyVersion, WorkerId
from messages.monitor import DeadLetter
from messages.orchestrator import PlanProgress, RoleSet, WeightsApplied, WorkerReady
from messages.pipeline_scheduler import WeightsPublished
from messages.runtime_tracker import NodeHeartbeat
from pearl_state.codec import decode_table, encode_table
from pearl_state.model import RoleTable
from pearl_state.store import Lease
from services.durable import durable_state
from services.orchestrator.config import Config
from services.orchestrator.core import OrchestratorCore
from services.orchestrator.service import Orchestrator
from services.runtime.bus import BucketSpec, Bus, Delivery
from services.runtime.bus_memory import MemoryBroker
from services.runtime.clock import now_ms
from services.runtime.core import Input
from tests.unit.fake_cluster import FakeCluster, job_of

JOB = "test"
R = ["r0-w0", "r0-w1"]


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    broker = MemoryBroker()
    bus = broker.connect()
    for entry in durable_state(JOB):
        if isinstance(entry.spec, BucketSpec):
            await bus.ensure_bucket(entry.spec)
        else:
            await bus.ensure_stream(entry.spec)
    yield bus
    await bus.close()


@contextlib.asynccontextmanager
async def running(bus: Bus, holder: str = "one", clock: Callable[[], int] | None = None) -> AsyncIterator[Orchestrator]:
    core = OrchestratorCore(Config.of(job_of()))
    orchestrator = (
        Orchestrator(core, bus, bus, tick_ms=20, holder=holder)
        if clock is None
        else Orchestrator(core, bus, bus, tick_ms=20, holder=holder, clock=clock)
    )
    stop = asyncio.Event()
    task = asyncio.create_task(orchestrator.run(stop))
    try:
        yield orchestrator
    finally:
        stop.set()
        async with asyncio.timeout(30):
            await task


async def say(bus: Bus, *messages: Message) -> None:
    for message in messages:
        await bus.publish_durable(
            subjects.subject_of(JOB, message), encode(message), msg_id=subjects.message_id(message) or ""
        )


async def stored(bus: Bus) -> RoleTable | None:
    entry = await bus.get(subjects.roles_bucket(JOB), subjects.TABLE_KEY, from_leader=True)
    return None if entry is None else decode_table(entry.data, JOB)


async def until(bus: Bus, condition: Callable[[RoleTable], bool]) -> RoleTable:
    """The stored table, as soon as it is as wanted."""
    async with asyncio.timeout(30):
        while True:
            table = await stored(bus)
            if table is not None and condition(table):
                return table
            await asyncio.sleep(0.005)


async def plans_said(bus: Bus) -> list[tuple[str, str]]:
    subject = subjects.event_subject(JOB, ReconfigurationPlan)
    found = [decode(each.data, ReconfigurationPlan) async for each in bus.read(f"{JOB}_EV", subject)]
    return [(plan.plan_id, plan.stage) for plan in found]


def weights(version: int) -> WeightsPublished:
    return WeightsPublished(version=PolicyVersion(version), uri=f"mem:{version}", manifest_sha256="", bytes=1)


async def grow(bus: Bus) -> RoleTable:
    """Play the executors for the plan in the table."""
    plan = (await until(bus, lambda t: t.plan is not None)).plan
    assert plan is not None
    for assign in plan.add:
        worker, number = assign.worker, assign.incarnation
        await say(bus, WorkerReady(worker=worker, incarnation=number, endpoint="e", pid=1, init_ms=1))
        await say(bus, WeightsApplied(worker=worker, incarnation=number, version=PolicyVersion(0)))
    await say(bus, PlanProgress(plan_id=plan.plan_id, part="rebuilder", report="prepared"))
    await until(bus, lambda t: t.plan is not None and t.plan.stage == "applying")
    for assign in plan.add:
        await say(
            bus,
            RoleSet(
                worker=assign.worker,
                incarnation=assign.incarnation,
                role=assign.role,
                role_generation=assign.role_generation,
            ),
        )
    await say(bus, PlanProgress(plan_id=plan.plan_id, part="rebuilder", report="applied"))
    return await until(bus, lambda t: t.plan is None)


def with_two_launched(table: RoleTable) -> RoleTable:
    """The table of a successor, two events later: it has a plan, and waits for two processes."""
    core = OrchestratorCore(Config.of(job_of()))
    for seq, message in enumerate((weights(0), target(usable=R, colocated=2)), 1):
        table, _ = core.step(table, Input(now_ms(), message, seq))
    return table


def ready(assign: Assign) -> WorkerReady:
    return WorkerReady(worker=assign.worker, incarnation=assign.incarnation, endpoint="here", pid=1, init_ms=1)


def target(**wanted: object):
    cluster = FakeCluster()
    return cluster.make_target(**wanted)  # type: ignore[arg-type]


async def test_first_table_then_a_growth_over_the_bus(bus: Bus):
    async with running(bus):
        table = await until(bus, lambda t: t.epoch == 1)
        assert all(row.activity is Activity.INACTIVE for row in table.rows)
        await say(bus, weights(0), target(usable=R, colocated=2))
        table = await grow(bus)
        assert [row.worker for row in table.rows if row.activity is Activity.ACTIVE] == R
        assert await plans_said(bus) == [("p1", "preparing"), ("p1", "applying")]
    # The lease is given up at a clean stop, so the next one need not wait for it to end.
    async with running(bus, "two"):
        await until(bus, lambda t: t.epoch == table.epoch)


async def test_restart_says_the_plan_again_and_goes_on(bus: Bus):
    # A predecessor died between its write and its publication; its inputs were never acknowledged.
    core = OrchestratorCore(Config.of(job_of()))
    wish = target(usable=R, colocated=2)
    await say(bus, weights(0), wish)
    table, _ = core.step(core.initial(), Input(now_ms(), weights(0), 1))
    table, _ = core.step(table, Input(now_ms(), wish, 2))
    await bus.put(subjects.roles_bucket(JOB), subjects.TABLE_KEY, encode_table(table), last_revision=0)
    async with running(bus):
        done = await grow(bus)
        assert done.epoch > table.epoch and done.writer.plans == 1
        assert await plans_said(bus) == [("p1", "preparing"), ("p1", "applying")]


async def test_what_a_predecessor_had_fetched_is_read_at_once(bus: Bus):
    from services.orchestrator import service

    dead = await bus.consume(
        f"{JOB}_EV", "orchestrator", [subjects.event_subject(JOB, k) for k in OrchestratorCore.inputs]
    )
    await say(bus, weights(0), target(usable=R, colocated=2))
    assert len(await dead.fetch(10, 1)) == 2  # and dies
    assert service.ACK_WAIT_S > 5
    async with running(bus):
        await until(bus, lambda t: t.plan is not None)


async def test_standby_takes_over_and_the_old_one_is_deposed(bus: Bus):
    async with running(bus, "one") as one:
        await until(bus, lambda t: t.epoch == 1)
        # Someone else writes the table, as if the lease had failed to keep it away.
        table = await stored(bus)
        assert table is not None
        entry = await bus.get(subjects.roles_bucket(JOB), subjects.TABLE_KEY)
        assert entry is not None
        core = OrchestratorCore(Config.of(job_of()))
        other, _ = core.step(table, Input(5, weights(7), 0))
        await bus.put(subjects.roles_bucket(JOB), subjects.TABLE_KEY, encode_table(other), last_revision=entry.revision)
        await say(bus, weights(8))
        # Deposed, it forgets what it held, stands by, takes over again: version 7 was not lost on the way to 8.
        final = await until(bus, lambda t: t.policy_version == 8)
        assert final.epoch == other.epoch + 1
        async with asyncio.timeout(30):
            while one.table != final:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("when", ["before a turn", "within a turn"])
async def test_what_it_fetched_is_for_its_successor_once_its_lease_does_not_count(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, when: str
):
    """By the table that it knows the event is about a process that there is not; by the successor's, one that it waits for."""
    lapsed = [False]

    def held(lease: Lease) -> bool:
        counts, lapsed[0] = not lapsed[0], False
        return counts

    monkeypatch.setattr(Lease, "held", property(held))
    async with running(bus) as orchestrator:
        table = with_two_launched(await until(bus, lambda t: t.epoch == 1))
        assert table.plan is not None
        step_all = orchestrator._core.step_all

        def stood_still(before: RoleTable, events: Sequence[Input]):
            if when == "within a turn" and before.epoch == 1:
                lapsed[0] = lapsed[0] or any(isinstance(event.message, WorkerReady) for event in events)
            return step_all(before, events)

        monkeypatch.setattr(orchestrator._core, "step_all", stood_still)
        lapsed[0] = when == "before a turn"
        entry = await bus.get(subjects.roles_bucket(JOB), subjects.TABLE_KEY)
        assert entry is not None
        await bus.put(subjects.roles_bucket(JOB), subjects.TABLE_KEY, encode_table(table), last_revision=entry.revision)
        first = table.plan.add[0]
        await say(
            bus,
            ready(first),
            GpuAvailable(node=NodeId("p0"), gpus=(0,)),  # the successor's table is of later than the event above
        )
        final = await until(bus, lambda t: t.epoch > table.epoch)
        row = final.row(first.worker)
        assert row is not None and row.endpoint == "here"


@pytest.mark.parametrize("lags", [False, True], ids=["one broker", "a replica of the broker lags"])
async def test_a_lease_that_was_gone_for_a_while_is_no_proof_that_nobody_wrote(lags: bool):
    """Another was in charge and is gone again when the lease is renewed: it is held, and the table is not the one that is known.

    Nor is what a replica of the broker has that lags behind the other's write: neither now nor when the table is read again.
    """
    now = [now_ms()]
    broker = MemoryBroker(lambda: now[0])
    bus = broker.connect()
    for entry in durable_state(JOB):
        await (bus.ensure_bucket if isinstance(entry.spec, BucketSpec) else bus.ensure_stream)(entry.spec)  # type: ignore[arg-type]
    async with running(bus, clock=lambda: now[0]) as orchestrator:
        table = with_two_launched(await until(bus, lambda t: t.epoch == 1))
        lease = orchestrator._lease
        assert lease is not None and table.plan is not None
        now[0] += 10_000
        if lags:
            broker.lag(subjects.roles_bucket(JOB), subjects.TABLE_KEY)
        entry = await bus.get(subjects.roles_bucket(JOB), subjects.TABLE_KEY)
        assert entry is not None
        await bus.put(subjects.roles_bucket(JOB), subjects.TABLE_KEY, encode_table(table), last_revision=entry.revision)
        await lease.renew()
        first = table.plan.add[0]
        await say(bus, ready(first), GpuAvailable(node=NodeId("p0"), gpus=(0,)))
        async with asyncio.timeout(30):
            while orchestrator.table is not None:  # noqa: ASYNC110 - until it is deposed
                await asyncio.sleep(0.005)
        now[0] += 10_000  # its own lease runs out
        final = await until(bus, lambda t: t.epoch > table.epoch)
        row = final.row(first.worker)
        assert row is not None and row.endpoint == "here"
        assert [letter async for letter in bus.read(f"{JOB}_DEAD", f"pearl.{JOB}.dead.*")] == []


async def test_what_was_acknowledged_is_not_given_back(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    acknowledged: set[int] = set()
    returned: set[int] = set()
    consume = bus.consume

    async def watched(*arguments: Any, **named: Any) -> Any:
        consumer = await consume(*arguments, **named)
        ack, nak = consumer.ack, consumer.nak

        async def noted_ack(delivery: Delivery) -> None:
            await ack(delivery)
            acknowledged.add(delivery.seq)

        async def noted_nak(delivery: Delivery, delay_s: float) -> None:
            returned.add(delivery.seq)
            await nak(delivery, delay_s)

        monkeypatch.setattr(consumer, "ack", noted_ack)
        monkeypatch.setattr(consumer, "nak", noted_nak)
        return consumer

    monkeypatch.setattr(bus, "consume", watched)
    async with running(bus):
        await say(bus, weights(0), target(usable=R, colocated=2))
        await grow(bus)
    assert acknowledged and not acknowledged & returned


async def test_senseless_and_unreadable_messages_become_dead_letters(bus: Bus):
    async with running(bus):
        await say(bus, target(usable=["x0-w0"], colocated=1))
        await bus.publish_durable(f"pearl.{JOB}.ev.worker_ready.x", b"{not json", msg_id="bad")
        letters: list[DeadLetter] = []
        async with asyncio.timeout(30):
            while len(letters) < 2:
                await asyncio.sleep(0.005)
                letters = [decode(d.data, DeadLetter) async for d in bus.read(f"{JOB}_DEAD", f"pearl.{JOB}.dead.*")]
        assert any("no slot x0-w0" in letter.reason for letter in letters)
        assert {letter.receiver for letter in letters} == {"orchestrator"}


async def test_lost_table_is_made_anew_without_using_ids_again(bus: Bus):
    async with running(bus):
        await say(bus, weights(0), target(usable=R, colocated=2))
        await grow(bus)
    entry = await bus.get(subjects.roles_bucket(JOB), subjects.TABLE_KEY)
    assert entry is not None
    fresh = MemoryBroker().connect()
    for spec in durable_state(JOB):
        await (fresh.ensure_bucket(spec.spec) if isinstance(spec.spec, BucketSpec) else fresh.ensure_stream(spec.spec))
    async for delivery in bus.read(f"{JOB}_EV", f"pearl.{JOB}.ev.>"):
        await fresh.publish_durable(delivery.subject, delivery.data, msg_id=f"copy{delivery.seq}")
    async with running(fresh):
        table = await until(fresh, lambda t: t.plan is not None)
        assert table.plan is not None and table.plan.plan_id == "p2"
        assert [assign.incarnation for assign in table.plan.add] == [2, 2]


async def test_silent_node_is_noticed(bus: Bus):
    now = [1_000_000]
    async with running(bus, clock=lambda: now[0]):
        await say(bus, weights(0), target(usable=R, colocated=2))
        await grow(bus)
        beat = NodeHeartbeat(node="r0", workers=tuple((WorkerId(worker), 1) for worker in R))
        for step in range(8):
            now[0] += 1000
            if step < 3:
                await bus.publish(subjects.subject_of(JOB, beat), encode(beat))
            await asyncio.sleep(0.06)
        table = await until(bus, lambda t: any(row.incarnation == 2 or row.activity != "active" for row in t.rows[:2]))
        assert {entry.worker for entry in table.writer.backoffs} <= set(R)
