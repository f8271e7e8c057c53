"""A store that went back: what shows it, and the table that is made anew from what workers report."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from messages import subjects
from messages.envelope import Message, decode, encode
from messages.ids import Activity, Epoch, Incarnation, PolicyVersion, Residency, Role, RoleGeneration, WorkerId, Zone
from messages.monitor import StoreRewound
from messages.orchestrator import TableAhead, WorkerReleased
from messages.runtime_tracker import NodeHeartbeat, WorkerHeartbeat
from pearl_state.codec import decode_table
from pearl_state.invariants import violations
from pearl_state.model import RoleTable
from services.durable import durable_state
from services.orchestrator import core_lending
from services.orchestrator.config import Config
from services.orchestrator.core import OrchestratorCore
from services.orchestrator.core_rebuild import Evidence, WorkerReport, adopted, rebuilt, why_rewound
from services.orchestrator.service import Orchestrator
from services.runtime.bus import BucketSpec, Bus
from services.runtime.bus_memory import MemoryBroker
from services.runtime.core import Input, Tick
from tests.unit.fake_cluster import FakeCluster, job_of
from tests.unit.test_orchestrator_service import JOB, R, grow, say, stored, target, until, weights

SERVING = WorkerReport(WorkerId("r0-w0"), 3, True, Role.DECODE, 9, 4)


def old_table() -> RoleTable:
    cluster = FakeCluster()
    cluster.feed(weights(1))
    return cluster.table


def test_nothing_shows_a_rewind_where_everything_fits():
    table = old_table()
    rows = tuple((row.worker, int(row.incarnation)) for row in table.rows)
    assert why_rewound(table, Evidence(seen_epoch=table.epoch, newest=rows, last_event=table.writer.cursor)) == ""


def test_an_epoch_an_event_or_an_incarnation_beyond_the_store_shows_it():
    table = old_table()
    end = table.writer.cursor
    assert end > 0
    assert "has been seen" in why_rewound(table, Evidence(seen_epoch=table.epoch + 1, last_event=end))
    assert "the stream ends at" in why_rewound(table, Evidence(last_event=end - 1))
    ahead = ((WorkerId("s0-w0"), 1),)
    assert "incarnation 1" in why_rewound(table, Evidence(newest=ahead, last_event=end))
    trainer = next(row.worker for row in table.rows if row.zone is Zone.TRAINING)
    assert why_rewound(table, Evidence(newest=((trainer, 50),), last_event=end)) == "", "its node agent counts those"


def test_a_worker_that_serves_goes_on_and_everything_else_begins_above_what_was_given_out():
    table = old_table()
    evidence = Evidence(
        seen_epoch=70,
        newest=((WorkerId("s0-w0"), 5), (WorkerId("t0-w0"), 2)),
        reports=(SERVING, WorkerReport(WorkerId("s0-w0"), 5, False, Role.COLOCATED, 3, 4)),
        last_event=9,
    )
    made = rebuilt(table, evidence, 7, 5_000_000)
    assert violations(made) == ()
    assert (made.epoch, made.plan, made.writer.target, made.writer.cursor) == (71, None, None, 7)
    assert made.policy_version == 4, "the version that workers serve has been published"
    assert adopted(made) == ("r0-w0",)
    row = made.by_worker[WorkerId("r0-w0")]
    assert (row.incarnation, row.role, row.role_generation, row.version) == (3, Role.DECODE, 9, 4)
    idle = made.by_worker[WorkerId("s0-w0")]
    assert (idle.activity, idle.incarnation) == (Activity.INACTIVE, 5)
    assert idle.role_generation > 3
    assert made.writer.plans > table.writer.plans, (
        "no plan id is used twice: reports about the lost ones may still come"
    )


def test_training_gpus_are_believed_to_nobody():
    """A new process in the overlap slot, which holds nothing; then the trainer is asked before anything is lent again."""
    cluster = FakeCluster()
    evidence = Evidence(newest=((WorkerId("t0-w0"), 2),), last_event=cluster.table.writer.cursor)
    made = rebuilt(cluster.table, evidence, 0, 5_000_000)
    row = made.by_worker[WorkerId("t0-w0")]
    pair = next(pair for pair in made.pairs if pair.overlap == "t0-w0")
    assert (row.incarnation, row.ready, pair.residency, pair.unsure) == (3, False, Residency.DRAINING, True)
    assert not core_lending.may_train(made), "training waits until rollout's memory is given back for sure"
    core = OrchestratorCore(Config.of(job_of()))
    fact = WorkerReleased(
        worker=row.worker, incarnation=row.incarnation, role_generation=row.role_generation, freed_bytes=0, took_ms=0
    )
    after, _ = core.step(made, Input(5_000_001, fact, 1))
    pair = next(pair for pair in after.pairs if pair.overlap == "t0-w0")
    assert (pair.residency, pair.unsure) == (Residency.TRAINING, False), "lent again only after the trainer has let go"


reports = st.builds(
    WorkerReport,
    st.sampled_from([row.worker for row in FakeCluster().table.rows if row.zone is not Zone.TRAINING]),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from([Role.PREFILL, Role.DECODE, Role.COLOCATED, Role.UNKNOWN]),
    st.integers(0, 20),
    st.integers(-1, 6),
)


@given(
    st.lists(reports, max_size=8),
    st.integers(0, 200),
    st.lists(st.tuples(st.just(WorkerId("t0-w0")), st.integers(1, 9))),
)
def test_whatever_is_reported_the_table_is_whole_and_nothing_falls(
    said: list[WorkerReport], seen: int, newest: list[tuple[WorkerId, int]]
):
    table = old_table()
    made = rebuilt(table, Evidence(seen_epoch=seen, reports=tuple(said), newest=tuple(newest)), 0, 5_000_000)
    assert violations(made) == ()
    assert made.epoch > max(seen, table.epoch)
    for old, new in zip(table.rows, made.rows, strict=True):
        assert new.incarnation >= old.incarnation and new.role_generation >= old.role_generation
    core = OrchestratorCore(Config.of(job_of()))
    after, _ = core.step(made, Input(5_000_001, Tick()))
    assert violations(after) == ()


# -- over the bus


async def make_broker() -> tuple[MemoryBroker, Bus]:
    broker = MemoryBroker()
    bus = broker.connect()
    for entry in durable_state(JOB):
        await (bus.ensure_bucket(entry.spec) if isinstance(entry.spec, BucketSpec) else bus.ensure_stream(entry.spec))
    return broker, bus


@contextlib.asynccontextmanager
async def in_charge(broker: MemoryBroker, holder: str):
    core = OrchestratorCore(Config.of(job_of()))
    orchestrator = Orchestrator(core, broker.connect(), broker.connect(), tick_ms=20, holder=holder, listen_s=0.1)
    stop = asyncio.Event()
    task = asyncio.create_task(orchestrator.run(stop))
    try:
        yield orchestrator
    finally:
        stop.set()
        async with asyncio.timeout(5):
            await task


@contextlib.asynccontextmanager
async def heard(bus: Bus, *messages: Message):
    """Telemetry that is said again and again, as heartbeats are."""

    async def speak() -> None:
        while True:
            for message in messages:
                await bus.publish(subjects.subject_of(JOB, message), encode(message))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(speak())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def beat(worker: str, table: RoleTable) -> WorkerHeartbeat:
    row = table.by_worker[WorkerId(worker)]
    return WorkerHeartbeat(
        worker=row.worker,
        incarnation=row.incarnation,
        running=0,
        queued=0,
        version=row.version,
        serving=True,
        decode_iterations=0,
        decode_tokens=0,
        decode_s=0,
        decode_batch_sum=0,
        prefill_tokens=0,
        prefill_s=0,
        refused=0,
        rss_bytes=0,
        role=row.role,
        role_generation=row.role_generation,
    )


async def rewound_events(bus: Bus) -> list[StoreRewound]:
    subject = subjects.event_subject(JOB, StoreRewound)
    return [decode(each.data, StoreRewound) async for each in bus.read(f"{JOB}_EV", subject)]


async def grown(broker: MemoryBroker, bus: Bus) -> tuple[object, RoleTable]:
    """An orchestrator grows the job after a snapshot was taken; returns the snapshot and the table that it does not have."""
    async with in_charge(broker, "first"):
        await until(bus, lambda t: t.epoch == 1)
        await say(bus, weights(0))
        snapshot = broker.snapshot()
        await say(bus, target(usable=R, colocated=2))
        return snapshot, await grow(bus)


async def test_an_orchestrator_that_remembers_more_raises_the_epoch_and_adopts_who_serves():
    broker, bus = await make_broker()
    async with in_charge(broker, "one"):
        await until(bus, lambda t: t.epoch == 1)
        await say(bus, weights(0))
        snapshot = broker.snapshot()
        await say(bus, target(usable=R, colocated=2))
        lost = await grow(bus)
        broker.go_down()
        broker.go_back(snapshot)
        async with heard(bus, *(beat(worker, lost) for worker in R)):
            await broker.come_up()
            table = await until(bus, lambda t: t.epoch > lost.epoch)
        assert {row.worker for row in table.rows if row.activity is Activity.ACTIVE} == set(R)
        assert [table.by_worker[WorkerId(w)].role_generation for w in R] == [
            lost.by_worker[WorkerId(w)].role_generation for w in R
        ], "their requests are not disturbed"
        (said,) = await rewound_events(bus)
        assert (said.seen_epoch, said.epoch, set(said.adopted)) == (lost.epoch, table.epoch, set(R))
        # It goes on: the target that was lost is said again by the decision engine, and nothing has to change for it.
        await say(bus, msgspec.structs.replace(target(usable=R, colocated=2), budget_id=1))
        await until(bus, lambda t: t.writer.target is not None and t.plan is None)


async def test_one_that_remembers_nothing_is_told_by_a_watcher():
    broker, bus = await make_broker()
    snapshot, lost = await grown(broker, bus)
    broker.go_down()
    broker.go_back(snapshot)
    await broker.come_up()
    async with (
        heard(bus, TableAhead(epoch=lost.epoch), *(beat(worker, lost) for worker in R)),
        in_charge(broker, "two"),
    ):
        table = await until(bus, lambda t: t.epoch > lost.epoch)
        assert {row.worker for row in table.rows if row.activity is Activity.ACTIVE} == set(R)


async def test_one_that_remembers_nothing_sees_it_by_an_incarnation_that_it_never_gave_out():
    broker, bus = await make_broker()
    snapshot, _ = await grown(broker, bus)
    broker.go_down()
    broker.go_back(snapshot)
    await broker.come_up()
    node = NodeHeartbeat(node="r0", workers=((WorkerId(R[0]), 1),), ended=((WorkerId(R[1]), 1),))
    async with heard(bus, node), in_charge(broker, "two"):
        await until(bus, lambda t: t.row(R[0]) is not None and t.by_worker[WorkerId(R[0])].incarnation == 1)
        await say(bus, target(usable=R, colocated=2))
        table = await until(bus, lambda t: t.plan is not None)
        assert table.plan is not None
        assert [assign.incarnation for assign in table.plan.add] == [2, 2], "no incarnation is given out twice"


async def test_nonsense_about_epochs_and_incarnations_is_refused():
    broker, bus = await make_broker()
    absurd = (
        TableAhead(epoch=Epoch(2**60)),
        NodeHeartbeat(node="r0", workers=((WorkerId(R[0]), 2**40), (WorkerId("s0-w0"), 7))),
    )
    async with heard(bus, *absurd), in_charge(broker, "one"):
        await until(bus, lambda t: t.epoch >= 1)
        await say(bus, weights(3))
        table = await until(bus, lambda t: t.policy_version == 3)
        assert table.epoch < 10 and await rewound_events(bus) == []
        assert all(row.incarnation <= Incarnation(1) for row in table.rows)


async def test_a_broker_that_lost_nothing_changes_nothing():
    broker, bus = await make_broker()
    async with in_charge(broker, "one"):
        await say(bus, weights(0), target(usable=R, colocated=2))
        table = await grow(bus)
        broker.go_down()
        broker.go_back(broker.snapshot())
        await broker.come_up()
        await say(bus, weights(1))
        await until(bus, lambda t: t.policy_version == PolicyVersion(1))
        assert await rewound_events(bus) == []
        after = await stored(bus)
        assert after is not None and after.epoch == table.epoch + 1
        entry = await bus.get(subjects.roles_bucket(JOB), subjects.TABLE_KEY)
        assert entry is not None and decode_table(entry.data, JOB).rows[0].role_generation == RoleGeneration(
            table.rows[0].role_generation
        )
