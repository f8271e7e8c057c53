"""The role table's writer, its lease and its replicas on the in-memory bus; the real one is in tests/integration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from messages.ids import Epoch, Gpu, NodeId, PolicyVersion, Role, WorkerId, Zone
from messages.subjects import LEASE_KEY, TABLE_KEY, lease_bucket, roles_bucket, roles_feed
from pearl_state.codec import UnreadableTableError, encode_table
from pearl_state.model import RoleTable, Row
from pearl_state.store import Deposed, Lease, TableStore
from pearl_state.watch import OLDER_SNAPSHOTS, Replica
from services.durable import durable_state
from services.runtime.bus import BucketSpec, BusUnavailable, Delivery
from services.runtime.bus_memory import MemoryBroker

JOB = "j"
ORIGIN = {"Nats-Subject": f"$KV.{roles_bucket(JOB)}.{TABLE_KEY}"}


def table(epoch: int, version: int = 0, rows: Sequence[Row] | None = None) -> RoleTable:
    row = Row(worker=WorkerId("n1-w0"), gpus=(Gpu(NodeId("n1"), 0),), zone=Zone.RESERVED, role=Role.COLOCATED)
    return RoleTable(
        job=JOB,
        epoch=Epoch(epoch),
        rows=(row,) if rows is None else tuple(rows),
        policy_version=PolicyVersion(version),
    )


class Now:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
async def broker(now: Now) -> AsyncIterator[MemoryBroker]:
    made = MemoryBroker(now)
    bus = made.connect()
    for entry in durable_state(JOB):
        if isinstance(entry.spec, BucketSpec):
            await bus.ensure_bucket(entry.spec)
    yield made
    await bus.close()


async def test_each_write_is_the_next_epoch_on_the_revision_last_seen(broker: MemoryBroker) -> None:
    store = TableStore(broker.connect(), JOB)
    assert await store.restore() is None
    await store.write(table(1))
    await store.write(table(2, version=1))
    again = TableStore(broker.connect(), JOB)
    assert await again.restore() == table(2, version=1)
    assert again.revision == store.revision
    for wrong in (table(2), table(4)):
        with pytest.raises(AssertionError):
            await again.write(wrong)


async def test_a_table_that_breaks_an_invariant_is_neither_written_nor_believed(broker: MemoryBroker) -> None:
    bus = broker.connect()
    store = TableStore(bus, JOB)
    await store.restore()
    row = table(1).rows[0]
    with pytest.raises(AssertionError, match="sorted"):
        await store.write(table(1, rows=(row, row)))
    await bus.put(roles_bucket(JOB), TABLE_KEY, encode_table(table(1, rows=(row, row))), last_revision=None)
    with pytest.raises(UnreadableTableError, match="sorted"):
        await store.restore()
    replica = Replica()
    await replica.start(bus, JOB)
    assert (replica.table, replica.refused) == (None, 1)
    await replica.stop()


async def test_the_slower_of_two_writers_is_deposed(broker: MemoryBroker) -> None:
    one, two = TableStore(broker.connect(), JOB), TableStore(broker.connect(), JOB)
    await one.restore()
    await two.restore()
    await one.write(table(1))
    with pytest.raises(Deposed):
        await two.write(table(1, version=1))


async def test_what_a_replica_that_lags_has_is_not_the_table(broker: MemoryBroker) -> None:
    store, late = TableStore(broker.connect(), JOB), TableStore(broker.connect(), JOB)
    await store.restore()
    await store.write(table(1))
    await late.restore()
    broker.lag(roles_bucket(JOB), TABLE_KEY)
    await store.write(table(2))
    with pytest.raises(Deposed):  # and not "the value read back fits the guard: try again"
        await late.write(table(2, version=1))
    assert await late.restore() == table(2)
    await late.write(table(3))


class LosesAnswers:
    """A bus whose first write is stored, but whose answer never arrives."""

    def __init__(self, broker: MemoryBroker, *, stores: bool) -> None:
        self._bus = broker.connect()
        self._stores = stores
        self._lost = False

    async def get(self, bucket: str, key: str, *, from_leader: bool = False):
        return await self._bus.get(bucket, key, from_leader=from_leader)

    async def put(
        self, bucket: str, key: str, data: bytes, *, last_revision: int | None, ttl_s: int | None = None
    ) -> int:
        if self._lost:
            return await self._bus.put(bucket, key, data, last_revision=last_revision, ttl_s=ttl_s)
        self._lost = True
        if self._stores:
            await self._bus.put(bucket, key, data, last_revision=last_revision, ttl_s=ttl_s)
        raise BusUnavailable("the answer was lost")


async def test_a_write_whose_answer_was_lost_has_succeeded(broker: MemoryBroker) -> None:
    store = TableStore(LosesAnswers(broker, stores=True), JOB)
    await store.restore()
    await store.write(table(1))
    await store.write(table(2))


async def test_a_write_that_was_lost_changes_nothing_and_may_be_repeated(broker: MemoryBroker) -> None:
    store = TableStore(LosesAnswers(broker, stores=False), JOB)
    await store.restore()
    with pytest.raises(BusUnavailable):
        await store.write(table(1))
    await store.write(table(1))


async def test_the_lease_is_one_processes_until_it_is_not_renewed(broker: MemoryBroker, now: Now) -> None:
    one, two = Lease(broker.connect(), JOB, "one"), Lease(broker.connect(), JOB, "two")
    assert await one.acquire()
    for _ in range(3):
        now.ms += 2000
        await one.renew()
        assert not await two.acquire()
    now.ms += 3000
    assert await two.acquire()
    for _ in range(2):  # whoever asks again hears the same
        with pytest.raises(Deposed):
            await one.renew()
    await two.renew()
    assert two.held and not one.held


class Slow:
    """A bus whose answer to a write is two seconds on its way, by a clock that only this moves."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._bus = broker.connect()
        self.now_s = 100.0

    async def get(self, bucket: str, key: str, *, from_leader: bool = False):
        return await self._bus.get(bucket, key, from_leader=from_leader)

    async def put(
        self, bucket: str, key: str, data: bytes, *, last_revision: int | None, ttl_s: int | None = None
    ) -> int:
        revision = await self._bus.put(bucket, key, data, last_revision=last_revision, ttl_s=ttl_s)
        self.now_s += 2.0
        return revision


async def test_a_lease_counts_from_before_the_broker_heard_of_it(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(broker)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: slow.now_s)
    lease = Lease(slow, JOB, "one", ttl_s=5)
    assert not lease.held
    assert await lease.acquire()
    slow.now_s = 104.9
    assert lease.held
    slow.now_s = 105.0
    assert not lease.held, "the broker may have forgotten it"
    await lease.renew()
    assert lease.held and slow.now_s == 107.0
    await lease.release()
    assert not lease.held


async def test_a_lease_that_ran_out_and_that_nobody_took_is_taken_again(broker: MemoryBroker, now: Now) -> None:
    lease = Lease(broker.connect(), JOB, "one")
    assert await lease.acquire()
    await lease.renew()
    assert lease.taken == 1
    now.ms += 60_000
    await lease.renew()
    assert lease.taken == 2, "someone else may have had it in between"
    assert not await Lease(broker.connect(), JOB, "two").acquire()


async def test_a_lease_given_up_is_free_within_a_second(broker: MemoryBroker, now: Now) -> None:
    stop = asyncio.Event()
    one, two = Lease(broker.connect(), JOB, "one"), Lease(broker.connect(), JOB, "two")
    assert await one.wait_acquire(stop)
    stop.set()
    await one.keep(stop)
    assert not await two.wait_acquire(stop)
    now.ms += 1000
    assert await two.acquire()
    assert await broker.connect().get(lease_bucket(JOB), LEASE_KEY) is not None


async def test_a_replica_follows_the_feed_and_tells(broker: MemoryBroker) -> None:
    store, replica = TableStore(broker.connect(), JOB), Replica()
    await store.restore()
    await store.write(table(1))
    told: list[int] = []
    replica.on_change(lambda changed: told.append(changed.epoch))
    await replica.start(broker.connect(), JOB)
    assert replica.table == table(1)
    waiting = asyncio.create_task(replica.wait_changed(1))
    await store.write(table(2))
    assert await waiting == table(2)
    assert await replica.wait_changed(0) == table(2)
    assert told == [1, 2]
    await replica.stop()


async def test_a_replica_reads_again_after_a_reconnection(broker: MemoryBroker) -> None:
    replica = Replica()
    await replica.start(broker.connect(), JOB)
    assert replica.table is None
    broker.go_down()
    # Written while this replica could hear nothing, hence not on its feed.
    feed, broker.subscriptions = broker.subscriptions, []
    broker.up = True
    store = TableStore(broker.connect(), JOB)
    await store.restore()
    await store.write(table(1))
    assert replica.table is None
    broker.subscriptions = feed
    await broker.come_up()
    assert replica.table == table(1)
    await replica.stop()


async def test_a_replica_keeps_what_it_knows_while_the_bus_is_away(broker: MemoryBroker) -> None:
    store, replica = TableStore(broker.connect(), JOB), Replica()
    await store.restore()
    await store.write(table(1))
    await replica.start(broker.connect(), JOB)
    broker.go_down()
    await replica.refresh()
    assert replica.table == table(1)
    await replica.stop()


@pytest.mark.parametrize(
    ("subject", "headers", "data"),
    [
        (roles_feed(JOB), {}, encode_table(table(9))),
        (roles_feed(JOB), {"Nats-Subject": "pearl.j.ev.trajectory_completed.-"}, encode_table(table(9))),
        ("pearl.j.roles.other", ORIGIN, encode_table(table(9))),
        (roles_feed(JOB), ORIGIN, b"{}"),
        (roles_feed(JOB), ORIGIN, b""),
        (roles_feed("k"), ORIGIN, encode_table(table(9))),
    ],
)
async def test_a_replica_believes_no_message_of_doubtful_origin(
    broker: MemoryBroker, subject: str, headers: dict[str, str], data: bytes
) -> None:
    replica = Replica()
    await replica.start(broker.connect(), JOB)
    replica.hear(Delivery(subject, data, headers))
    assert (replica.table, replica.refused) == (None, 1)
    assert replica.problem
    await replica.stop()


async def test_older_epochs_are_ignored_and_told_until_the_bucket_has_said_so_often(broker: MemoryBroker) -> None:
    told: list[int] = []

    async def tell(epoch: Epoch) -> None:
        told.append(epoch)

    store, replica = TableStore(broker.connect(), JOB), Replica(tell=tell)
    await store.restore()
    await store.write(table(1))
    await replica.start(broker.connect(), JOB)
    replica.hear(Delivery(roles_feed(JOB), encode_table(table(7)), ORIGIN))
    replica.hear(Delivery(roles_feed(JOB), encode_table(table(6)), ORIGIN))
    assert replica.table == table(7)
    for _ in range(OLDER_SNAPSHOTS - 1):
        await replica.refresh()
        assert replica.table == table(7)
    await replica.refresh()
    assert replica.table == table(1)
    assert told == [7] * OLDER_SNAPSHOTS
    await replica.stop()


async def test_a_replica_follows_an_epoch_that_was_raised_above_what_it_has_seen(broker: MemoryBroker) -> None:
    store, replica = TableStore(broker.connect(), JOB), Replica()
    await store.restore()
    await store.write(table(1))
    await replica.start(broker.connect(), JOB)
    replica.hear(Delivery(roles_feed(JOB), encode_table(table(7)), ORIGIN))
    await replica.refresh()
    assert replica.table == table(7)
    await store.write_rebuilt(table(8))
    await replica.refresh()
    assert replica.table == table(8)
    await replica.stop()
