"""The bus contract (services/runtime/bus.py), held against the in-memory bus and against a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from services.runtime import bus_nats
from services.runtime.bus import (
    Bounds,
    BucketSpec,
    Bus,
    BusUnavailable,
    Consumer,
    Delivery,
    Denied,
    NoReply,
    StreamSpec,
    WrongLastSequence,
)
from services.runtime.bus_memory import MemoryBroker
from services.runtime.wildcards import matches
from tests.nats_fixture import NatsServer

SOON_S = 3.0  # a delivery that will come comes by then, on a loaded machine too
ENOUGH_S = 0.15  # a delivery that will not come has not come by then

_numbers = count(1)


class Place:
    """A broker, a way to connect to it, and names nobody else uses."""

    def __init__(self, connect: Callable[[], Awaitable[Bus]]) -> None:
        self.connect = connect
        self.name = f"t{next(_numbers)}"

    async def stream(self, bus: Bus, retention: str = "limits") -> str:
        spec = StreamSpec(name=self.name, subjects=(f"{self.name}.s.>",), retention=retention, max_bytes=8 << 20)
        await bus.ensure_stream(spec)
        return self.name

    def subject(self, tail: str) -> str:
        return f"{self.name}.s.{tail}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["memory", "nats"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    opened: list[Bus] = []
    if request.param == "memory":
        broker = MemoryBroker()

        async def connect() -> Bus:
            opened.append(broker.connect())
            return opened[-1]
    else:
        server: NatsServer = request.getfixturevalue("server")

        async def connect() -> Bus:
            name = f"user{len(opened)}"
            opened.append(await bus_nats.connect(server.url, name=name, inbox_prefix=f"_INBOX_{name}", patience_s=2.0))
            return opened[-1]

    yield Place(connect)
    for bus in opened:
        await bus.close()


async def fetch_all(consumer: Consumer, wanted: int) -> list[Delivery]:
    """Fetch until `wanted` deliveries came."""
    found: list[Delivery] = []
    async with asyncio.timeout(SOON_S):
        while len(found) < wanted:
            found.extend(await consumer.fetch(wanted - len(found), 0.5))
    return found


async def read_all(bus: Bus, stream: str, subject: str, **bounds: int) -> list[Delivery]:
    return [delivery async for delivery in bus.read(stream, subject, **bounds)]


# -- core -----------------------------------------------------------------------------------------------------------


async def test_a_subscriber_gets_what_is_published_on_its_subject(place: Place) -> None:
    a, b = await place.connect(), await place.connect()
    exact = await b.subscribe(f"{place.name}.x.one")
    star = await b.subscribe(f"{place.name}.*.one")
    rest = await b.subscribe(f"{place.name}.>")
    other = await b.subscribe(f"{place.name}.x")
    await settle(b)
    await a.publish(f"{place.name}.x.one", b"hello", reply="back.to", headers={"Colour": "blue"})
    for subscription in (exact, star, rest):
        delivery = await subscription.next(SOON_S)
        assert delivery is not None
        assert (delivery.subject, delivery.data, delivery.reply) == (f"{place.name}.x.one", b"hello", "back.to")
        assert delivery.headers["Colour"] == "blue"
        assert delivery.seq == 0 and delivery.at_ms > 0
    assert await other.next(ENOUGH_S) is None


async def settle(bus: Bus) -> None:
    """Wait until the broker has taken the subscriptions: a round trip on the same connection."""
    with pytest.raises(NoReply):
        await bus.request("nobody.listens.here", b"", 1.0)


async def test_a_queue_group_gets_each_message_once(place: Place) -> None:
    a, b = await place.connect(), await place.connect()
    members = [await b.subscribe(f"{place.name}.work", queue="crew") for _ in range(3)]
    await settle(b)
    for number in range(30):
        await a.publish(f"{place.name}.work", b"%d" % number)
    await settle(a)
    found: list[bytes] = []
    while len(found) < 30:
        before = len(found)
        for member in members:
            delivery = await member.next(0.05)
            if delivery is not None:
                found.append(delivery.data)
        assert len(found) > before, f"only {len(found)} of 30 came"
    assert sorted(found, key=int) == [b"%d" % number for number in range(30)]


async def test_a_slow_reader_loses_the_oldest_and_it_is_counted(place: Place) -> None:
    a, b = await place.connect(), await place.connect()
    slow = await b.subscribe(f"{place.name}.flood", limit=10)
    last = await b.subscribe(f"{place.name}.last")
    await settle(b)
    for number in range(25):
        await a.publish(f"{place.name}.flood", b"%d" % number)
    await a.publish(f"{place.name}.last", b"")
    assert await last.next(SOON_S) is not None
    kept = [await slow.next(SOON_S) for _ in range(10)]
    assert [delivery.data for delivery in kept if delivery] == [b"%d" % number for number in range(15, 25)]
    assert slow.dropped == 15
    assert await slow.next(0.01) is None


async def test_iteration_ends_when_the_subscription_stops(place: Place) -> None:
    bus = await place.connect()
    subscription = await bus.subscribe(f"{place.name}.x")
    await settle(bus)
    await bus.publish(f"{place.name}.x", b"1")
    first = await subscription.next(SOON_S)
    assert first is not None
    await subscription.stop()
    assert [delivery async for delivery in subscription] == []


async def test_a_request_is_answered(place: Place) -> None:
    a, b = await place.connect(), await place.connect()
    requests = await b.subscribe(f"{place.name}.ask", queue="crew")
    await settle(b)

    async def serve() -> None:
        async for each in requests:
            await b.publish(each.reply, b"re:" + each.data)

    serving = asyncio.create_task(serve())
    answers = await asyncio.gather(*(a.request(f"{place.name}.ask", b"%d" % n, SOON_S) for n in range(20)))
    assert [answer.data for answer in answers] == [b"re:%d" % n for n in range(20)]
    serving.cancel()


async def test_a_request_without_an_answer_raises(place: Place) -> None:
    bus = await place.connect()
    with pytest.raises(NoReply):
        await bus.request(f"{place.name}.nobody", b"", SOON_S)
    await bus.subscribe(f"{place.name}.mute")
    await settle(bus)
    with pytest.raises(NoReply):
        await bus.request(f"{place.name}.mute", b"", ENOUGH_S)


# -- streams --------------------------------------------------------------------------------------------------------


async def test_durable_publishes_are_numbered_and_stored_once_per_id(place: Place) -> None:
    bus = await place.connect()
    stream = await place.stream(bus)
    first = await bus.publish_durable(place.subject("a"), b"1", msg_id="one")
    second = await bus.publish_durable(place.subject("b"), b"2", msg_id="two")
    assert (first, second) == (1, 2)
    assert await bus.publish_durable(place.subject("a"), b"1", msg_id="one") == 1
    found = await read_all(bus, stream, place.subject(">"))
    assert [(delivery.seq, delivery.subject, delivery.data) for delivery in found] == [
        (1, place.subject("a"), b"1"),
        (2, place.subject("b"), b"2"),
    ]
    assert all(delivery.at_ms > 1_600_000_000_000 for delivery in found)


async def test_many_durable_publishes_at_once(place: Place) -> None:
    bus = await place.connect()
    stream = await place.stream(bus)
    sequences = await asyncio.gather(
        *(bus.publish_durable(place.subject("a"), b"%d" % n, msg_id=f"n{n}") for n in range(300))
    )
    assert sorted(sequences) == list(range(1, 301))
    found = await read_all(bus, stream, place.subject("*"))  # more than one page
    assert [delivery.seq for delivery in found] == list(range(1, 301))


async def test_a_guarded_publish_loses_against_an_earlier_one(place: Place) -> None:
    bus = await place.connect()
    await place.stream(bus)
    subject = place.subject("t1")
    await bus.publish_durable(place.subject("other"), b"", msg_id="o")
    first = await bus.publish_durable(subject, b"1", msg_id="a", expected_last_on_subject=0)
    with pytest.raises(WrongLastSequence):
        await bus.publish_durable(subject, b"x", msg_id="b", expected_last_on_subject=0)
    # the retry of a guarded write that was stored is a duplicate, not a loss
    assert await bus.publish_durable(subject, b"1", msg_id="a", expected_last_on_subject=0) == first
    # also on a connection that has had no answer yet
    other = await place.connect()
    assert await other.publish_durable(subject, b"1", msg_id="a", expected_last_on_subject=0) == first
    second = await bus.publish_durable(subject, b"2", msg_id="c", expected_last_on_subject=first)
    assert second > first
    # but only while it is the newest: the server looks at the guard before it looks for duplicates
    with pytest.raises(WrongLastSequence):
        await bus.publish_durable(subject, b"1", msg_id="a", expected_last_on_subject=0)


async def test_no_stream_is_unavailable(place: Place) -> None:
    bus = await place.connect()
    with pytest.raises(BusUnavailable):
        await bus.publish_durable(f"{place.name}.nowhere", b"", msg_id="x")


async def test_read_bounds_and_last(place: Place) -> None:
    bus = await place.connect()
    stream = await place.stream(bus)
    for n in range(1, 7):
        await bus.publish_durable(place.subject("a" if n % 2 else "b"), b"%d" % n, msg_id=f"n{n}")
    assert [d.seq for d in await read_all(bus, stream, place.subject("a"))] == [1, 3, 5]
    assert [d.seq for d in await read_all(bus, stream, place.subject("*"), first_seq=3, last_seq=5)] == [3, 4, 5]
    assert [d.seq for d in await read_all(bus, stream, place.subject("a"), first_seq=6)] == []
    assert await read_all(bus, stream, place.subject("none")) == []
    last = await bus.last(stream, place.subject("b"))
    assert last is not None and (last.seq, last.data) == (6, b"6")
    assert await bus.last(stream, place.subject("none")) is None


async def test_purge(place: Place) -> None:
    bus = await place.connect()
    stream = await place.stream(bus)
    for n in range(1, 7):
        await bus.publish_durable(place.subject("a" if n % 2 else "b"), b"%d" % n, msg_id=f"n{n}")
    await bus.purge(stream, below_seq=4, subject=place.subject("a"))
    assert [d.seq for d in await read_all(bus, stream, place.subject(">"))] == [2, 4, 5, 6]
    await bus.purge(stream, below_seq=6)
    assert [d.seq for d in await read_all(bus, stream, place.subject(">"))] == [6]


async def test_bounds_tell_an_emptied_stream_from_one_never_used(place: Place) -> None:
    bus = await place.connect()
    stream = await place.stream(bus)
    assert await bus.bounds(stream) == Bounds(gone=0, last_seq=0, last_ms=0)
    for n in range(1, 4):
        await bus.publish_durable(place.subject("a"), b"%d" % n, msg_id=f"n{n}")
    newest = await bus.last(stream, place.subject("a"))
    assert newest is not None
    assert await bus.bounds(stream) == Bounds(gone=0, last_seq=3, last_ms=newest.at_ms)
    await bus.purge(stream, below_seq=3)
    assert await bus.bounds(stream) == Bounds(gone=2, last_seq=3, last_ms=newest.at_ms)
    await bus.purge(stream, below_seq=4)
    assert await bus.bounds(stream) == Bounds(gone=3, last_seq=3, last_ms=newest.at_ms)
    await bus.publish_durable(place.subject("a"), b"4", msg_id="n4")
    assert (await bus.bounds(stream)).gone == 3


async def test_ensuring_again_changes_and_keeps(place: Place) -> None:
    bus = await place.connect()
    stream = await place.stream(bus)
    await bus.publish_durable(place.subject("a"), b"1", msg_id="1")
    await bus.ensure_stream(
        StreamSpec(name=stream, subjects=(place.subject(">"), f"{place.name}.more"), max_bytes=4 << 20)
    )
    assert await bus.publish_durable(f"{place.name}.more", b"2", msg_id="2") == 2


# -- consumers ------------------------------------------------------------------------------------------------------


async def test_a_consumer_delivers_in_order_and_only_what_it_asked_for(place: Place) -> None:
    bus = await place.connect()
    stream = await place.stream(bus)
    consumer = await bus.consume(stream, "c", [place.subject("a.*"), place.subject("b")])
    assert len(await consumer.fetch(10, 0.01)) == 0
    for n in range(1, 10):
        await bus.publish_durable(place.subject(("a.x", "b", "c")[n % 3]), b"%d" % n, msg_id=f"n{n}")
    found = await fetch_all(consumer, 6)
    assert [d.seq for d in found] == [1, 3, 4, 6, 7, 9]
    assert [d.consumer_seq for d in found] == [1, 2, 3, 4, 5, 6]
    assert {d.attempt for d in found} == {1} and all(d.at_ms > 1_600_000_000_000 for d in found)
    assert len(await consumer.fetch(10, ENOUGH_S)) == 0


async def test_what_is_not_acknowledged_comes_again(place: Place) -> None:
    bus = await place.connect()
    stream = await place.stream(bus)
    consumer = await bus.consume(stream, "c", [place.subject(">")], ack_wait_s=0.5)
    for n in (1, 2, 3, 4):
        await bus.publish_durable(place.subject("a"), b"%d" % n, msg_id=f"n{n}")
    first = await fetch_all(consumer, 4)
    await consumer.ack(first[0])
    await consumer.term(first[1])
    await consumer.nak(first[2], 0.0)
    (again,) = await fetch_all(consumer, 1)
    assert (again.seq, again.attempt) == (3, 2)
    await consumer.ack(again)
    (unanswered,) = await fetch_all(consumer, 1)  # after ack_wait
    assert (unanswered.seq, unanswered.attempt) == (4, 2)
    await consumer.ack(unanswered)
    assert len(await consumer.fetch(10, 0.7)) == 0


async def test_progress_extends_the_acknowledgement_time(place: Place) -> None:
    bus = await place.connect()
    stream = await place.stream(bus)
    consumer = await bus.consume(stream, "c", [place.subject(">")], ack_wait_s=0.6)
    await bus.publish_durable(place.subject("a"), b"1", msg_id="1")
    (delivery,) = await fetch_all(consumer, 1)
    for _ in range(3):
        assert len(await consumer.fetch(1, 0.3)) == 0
        await consumer.progress(delivery)
    await consumer.ack(delivery)


async def test_a_durable_consumer_keeps_its_place_and_takes_new_filters(place: Place) -> None:
    a, b = await place.connect(), await place.connect()
    stream = await place.stream(a)
    consumer = await a.consume(stream, "c", [place.subject("a")])
    for n in (1, 2, 3):
        await a.publish_durable(place.subject("a"), b"%d" % n, msg_id=f"n{n}")
    for delivery in await fetch_all(consumer, 2):
        await consumer.ack(delivery)
    await consumer.stop()
    await a.publish_durable(place.subject("b"), b"4", msg_id="n4")
    successor = await b.consume(stream, "c", [place.subject("a"), place.subject("b")])
    assert [d.data for d in await fetch_all(successor, 2)] == [b"3", b"4"]


async def test_a_work_queue_shares_and_forgets(place: Place) -> None:
    a, b = await place.connect(), await place.connect()
    stream = await place.stream(a, "workqueue")
    for n in range(6):
        await a.publish_durable(place.subject("t"), b"%d" % n, msg_id=f"n{n}")
    one = await a.consume(stream, "crew", [place.subject("*")])
    two = await b.consume(stream, "crew", [place.subject("*")])
    mine, yours = await fetch_all(one, 3), await fetch_all(two, 3)
    assert sorted(d.data for d in [*mine, *yours]) == [b"%d" % n for n in range(6)]
    for delivery in mine:
        await one.ack(delivery)
    for delivery in yours:
        await two.ack(delivery)
    async with asyncio.timeout(SOON_S):  # acknowledgements are not answered
        while await read_all(a, stream, place.subject(">")):
            await settle(a)


async def test_a_fetch_waits_for_what_comes_and_never_returns_more(place: Place) -> None:
    bus = await place.connect()
    stream = await place.stream(bus)
    consumer = await bus.consume(stream, "c", [place.subject(">")])
    waiting = asyncio.create_task(consumer.fetch(2, SOON_S))
    await settle(bus)
    for n in range(5):
        await bus.publish_durable(place.subject("a"), b"%d" % n, msg_id=f"n{n}")
    found = list(await waiting)
    assert 1 <= len(found) <= 2
    while len(found) < 5:
        part = await consumer.fetch(2, SOON_S)
        assert 1 <= len(part) <= 2
        found.extend(part)
    assert [d.data for d in found] == [b"%d" % n for n in range(5)]


async def test_max_ack_pending_holds_deliveries_back(place: Place) -> None:
    bus = await place.connect()
    stream = await place.stream(bus)
    consumer = await bus.consume(stream, "c", [place.subject(">")], max_ack_pending=2)
    for n in range(4):
        await bus.publish_durable(place.subject("a"), b"%d" % n, msg_id=f"n{n}")
    first = await fetch_all(consumer, 2)
    assert len(await consumer.fetch(10, ENOUGH_S)) == 0
    for delivery in first:
        await consumer.ack(delivery)
    assert [d.data for d in await fetch_all(consumer, 2)] == [b"2", b"3"]


# -- buckets --------------------------------------------------------------------------------------------------------


async def test_a_bucket_value_is_guarded_by_its_revision(place: Place) -> None:
    bus = await place.connect()
    await bus.ensure_bucket(BucketSpec(name=place.name, max_bytes=1 << 20))
    assert await bus.get(place.name, "k") is None
    first = await bus.put(place.name, "k", b"1", last_revision=0)
    with pytest.raises(WrongLastSequence):
        await bus.put(place.name, "k", b"x", last_revision=0)
    other = await bus.put(place.name, "other", b"o", last_revision=None)
    assert other > first
    second = await bus.put(place.name, "k", b"2", last_revision=first)
    with pytest.raises(WrongLastSequence):
        await bus.put(place.name, "k", b"x", last_revision=first)
    entry = await bus.get(place.name, "k")
    assert entry is not None
    assert (entry.key, entry.data, entry.revision) == ("k", b"2", second)
    assert entry.at_ms > 1_600_000_000_000
    third = await bus.put(place.name, "k", b"3", last_revision=None)
    assert third > second


async def test_the_leader_of_a_bucket_has_what_was_put_last(place: Place) -> None:
    bus = await place.connect()
    await bus.ensure_bucket(BucketSpec(name=place.name, max_bytes=1 << 20, ttl_allowed=True))
    assert await bus.get(place.name, "k", from_leader=True) is None
    first = await bus.put(place.name, "k", b"", last_revision=0)
    binary = bytes(range(256))
    second = await bus.put(place.name, "k", binary, last_revision=first)
    entry = await bus.get(place.name, "k", from_leader=True)
    assert entry is not None and (entry.key, entry.data, entry.revision) == ("k", binary, second)
    assert entry == await bus.get(place.name, "k")
    await bus.put(place.name, "short", b"a", last_revision=0, ttl_s=1)
    assert await bus.get(place.name, "short", from_leader=True) is not None
    async with asyncio.timeout(6):
        while await bus.get(place.name, "short", from_leader=True) is not None:  # noqa: ASYNC110 - as below
            await asyncio.sleep(0.1)


async def test_a_replica_that_lags_answers_who_does_not_ask_the_leader() -> None:
    """In memory only: a real broker's replicas lag when they like."""
    broker = MemoryBroker()
    bus = broker.connect()
    await bus.ensure_bucket(BucketSpec(name="b"))
    broker.lag("b", "k")
    await bus.put("b", "k", b"1", last_revision=0)
    assert await bus.get("b", "k") is None
    entry = await bus.get("b", "k", from_leader=True)
    assert entry is not None and entry.data == b"1"
    broker.catch_up()
    assert await bus.get("b", "k") == entry


async def test_a_bucket_value_with_a_ttl_ends(place: Place) -> None:
    bus = await place.connect()
    await bus.ensure_bucket(BucketSpec(name=place.name, max_bytes=1 << 20, ttl_allowed=True))
    revision = await bus.put(place.name, "lease", b"a", last_revision=0, ttl_s=1)
    revision = await bus.put(place.name, "lease", b"a", last_revision=revision, ttl_s=1)
    assert await bus.get(place.name, "lease") is not None
    async with asyncio.timeout(6):
        while await bus.get(place.name, "lease") is not None:  # noqa: ASYNC110 - the server's clock cannot be injected
            await asyncio.sleep(0.1)
    await bus.put(place.name, "lease", b"b", last_revision=0, ttl_s=1)


async def test_a_bucket_is_republished(place: Place) -> None:
    bus = await place.connect()
    await bus.ensure_bucket(BucketSpec(name=place.name, max_bytes=1 << 20, republish=f"{place.name}.feed"))
    feed = await bus.subscribe(f"{place.name}.feed.table")
    await settle(bus)
    await bus.put(place.name, "table", b"epoch 1", last_revision=0)
    delivery = await feed.next(SOON_S)
    assert delivery is not None and delivery.data == b"epoch 1"
    assert delivery.headers["Nats-Subject"] == f"$KV.{place.name}.table"


# -- wildcards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "subject", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("*.b", "a.b", True),
        ("a.b.c", "a.b", False),
    ],
)
def test_wildcards(pattern: str, subject: str, fits: bool) -> None:
    assert matches(pattern, subject) is fits


# -- only the real one: the server dies -----------------------------------------------------------------------------


async def test_a_killed_server_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    server.start()
    try:
        bus = await bus_nats.connect(server.url, name="a", inbox_prefix="_INBOX_a")
        back = asyncio.Event()

        async def on_back() -> None:
            back.set()

        bus.on_reconnect(on_back)
        await bus.ensure_stream(StreamSpec(name="S", subjects=("s.>",), max_bytes=8 << 20))
        consumer = await bus.consume("S", "c", ["s.>"], ack_wait_s=0.5)
        heard = await bus.subscribe("core")
        await bus.publish_durable("s.a", b"1", msg_id="1")
        (first,) = await fetch_all(consumer, 1)
        await consumer.ack(first)
        await settle(bus)
        server.kill()
        assert len(await consumer.fetch(10, 0.3)) == 0
        waiting = [asyncio.create_task(bus.publish_durable("s.a", b"%d" % n, msg_id=str(n))) for n in range(2, 12)]
        with pytest.raises(NoReply):
            await bus.request("nobody", b"", 0.1)
        server.start()
        async with asyncio.timeout(15):
            assert sorted(await asyncio.gather(*waiting)) == list(range(2, 12))
            await back.wait()
            found: set[bytes] = set()
            while len(found - {b"1"}) < 10:
                found |= {d.data for d in await consumer.fetch(10, 0.5)}
        # "1" may come again: acknowledgements are not on disk at once
        assert found - {b"1"} == {b"%d" % n for n in range(2, 12)}
        await bus.publish("core", b"still subscribed")
        assert await heard.next(SOON_S) is not None
        await bus.close()
    finally:
        server.stop()


async def test_no_server_is_unavailable_within_the_patience() -> None:
    with pytest.raises(BusUnavailable):
        await bus_nats.connect("nats://127.0.0.1:9", name="a", inbox_prefix="_INBOX_a", patience_s=0.3)


async def test_what_a_user_may_not_do_is_said_at_once(tmp_path: Path) -> None:
    publish = '"s.ok", "$JS.API.CONSUMER.CREATE.S.c", "_INBOX_u.>"'
    server = NatsServer(
        tmp_path,
        "authorization { users: [ { user: admin, password: a }, { user: u, password: p, permissions: {"
        f' publish: {{ allow: [{publish}] }}, subscribe: {{ allow: ["_INBOX_u.>"] }} }} }} ] }}',
    )
    server.start()
    try:
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(Denied):
            await bus_nats.connect(f"nats://u:wrong@{address}", name="u", inbox_prefix="_INBOX_u")
        admin = await bus_nats.connect(f"nats://admin:a@{address}", name="admin", inbox_prefix="_INBOX_admin")
        await admin.ensure_stream(StreamSpec(name="S", subjects=("s.>",)))
        user = await bus_nats.connect(f"nats://u:p@{address}", name="u", inbox_prefix="_INBOX_u")
        async with asyncio.timeout(SOON_S):
            assert await user.publish_durable("s.ok", b"", msg_id="1") == 1
            with pytest.raises(Denied):
                await user.publish_durable("s.Secret", b"", msg_id="2")
            with pytest.raises(Denied):
                await user.request("s.Secret", b"", SOON_S)
            with pytest.raises(Denied):
                await user.last("S", "s.ok")
            with pytest.raises(Denied):
                await user.get("b", "k", from_leader=True)
            deaf = await user.subscribe("s.ok")
            with pytest.raises(Denied):
                await deaf.next(SOON_S)
            consumer = await user.consume("S", "c", ["s.>"])
            with pytest.raises(Denied):
                await consumer.fetch(1, SOON_S)
        assert user.denied["s.secret"] == 2
        await user.close()
        await admin.close()
    finally:
        server.stop()
