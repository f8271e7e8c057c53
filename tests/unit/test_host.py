"""The host on the in-memory bus: what survives, in which order things happen, what is refused."""

# ruff: noqa: ASYNC110 - these loops yield to the host under test; there is nothing else to wait for

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from messages.decision_engine import BudgetChanged
from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, TrainingBegin
from messages.envelope import Message, decode, encode
from messages.ids import NodeId, PolicyVersion, RequestId, TrajectoryId
from messages.monitor import DeadLetter
from messages.router import AssignRequest
from messages.runtime_tracker import NodeHeartbeat
from messages.subjects import event_subject, state_bucket, stream, subject_of
from services.runtime.bus import BucketSpec, StreamSpec
from services.runtime.bus_memory import MemoryBroker, MemoryBus
from services.runtime.core import Effects, Input, Note, Refuse, Reply, Send, Tick
from services.runtime.host import Checkpoint, CoreHost, StoreWentBack, TakenOver

JOB = "job"
SOON_S = 3.0


class Seen(msgspec.Struct, frozen=True):
    """What the test core has seen, in order."""

    inputs: tuple[str, ...] = ()
    budgets: int = 0
    ticks: int = 0


class EchoCore:
    """Answers each GpuAvailable with a BudgetChanged; refuses the node "nowhere"; tells what it saw."""

    name = "echo"
    inputs: tuple[type[Message], ...] = (GpuAvailable, TrainingBegin)
    state_type = Seen

    def __init__(self, budget_at_tick: int = 0) -> None:
        self.budget_at_tick = budget_at_tick

    def initial(self) -> Seen:
        return Seen()

    def step(self, state: Seen, event: Input) -> tuple[Seen, Effects]:
        match event.message:
            case Tick():
                state = msgspec.structs.replace(state, ticks=state.ticks + 1)
                if state.ticks == self.budget_at_tick:
                    return self.budget(state, "tick")
                return state, ()
            case GpuAvailable(node="nowhere"):
                return msgspec.structs.replace(state, budgets=99), (Refuse("no such node: nowhere"),)
            case GpuAvailable(node=node):
                return self.budget(state, node)
            case AssignRequest() as request:
                return self.see(state, "request"), (Reply(request),)
            case Message() as message:
                return self.see(state, type(message).__name__), (Note("seen", "saw one"),)
            case other:
                return self.see(state, str(other)), ()

    def see(self, state: Seen, what: str) -> Seen:
        return msgspec.structs.replace(state, inputs=(*state.inputs, what))

    def budget(self, state: Seen, what: str) -> tuple[Seen, Effects]:
        state = msgspec.structs.replace(self.see(state, what), budgets=state.budgets + 1)
        message = BudgetChanged(
            budget_id=state.budgets, dedicated=(), overlap=(), leaving=(), training_batch=None, cause=what
        )
        return state, (Send(message),)


def gpu(node: str) -> GpuAvailable:
    return GpuAvailable(node=NodeId(node), gpus=(0,))


class Crash(Exception):
    """The process dies here."""


class CrashingBus:
    """A bus on which the process dies at one operation."""

    def __init__(self, bus: MemoryBus, at: str) -> None:
        self._bus = bus
        self._at = at

    def __getattr__(self, name: str) -> object:
        if name == self._at:
            raise Crash(name)
        return getattr(self._bus, name)

    async def consume(self, *args: object, **options: object) -> object:
        return CrashingBus(await self._bus.consume(*args, **options), self._at)  # type: ignore[arg-type]


class World:
    """A broker with the job's streams, and a user that watches."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = self.broker.connect()
        self.sent = 0

    async def open(self) -> None:
        for family in ("ev", "dead"):
            await self.bus.ensure_stream(StreamSpec(name=stream(JOB, family), subjects=(f"pearl.{JOB}.{family}.>",)))
        await self.bus.ensure_bucket(BucketSpec(name=state_bucket(JOB)))
        self.budgets = await self.bus.subscribe(event_subject(JOB, BudgetChanged))
        self.dead = await self.bus.subscribe(f"pearl.{JOB}.dead.*")

    async def say(self, message: Message) -> int:
        self.sent += 1
        return await self.bus.publish_durable(subject_of(JOB, message), encode(message), msg_id=f"m{self.sent}")

    async def next_budget(self) -> BudgetChanged:
        delivery = await self.budgets.next(SOON_S)
        assert delivery is not None, "no budget came"
        return decode(delivery.data, BudgetChanged)

    async def next_dead(self) -> DeadLetter:
        delivery = await self.dead.next(SOON_S)
        assert delivery is not None, "no dead letter came"
        return decode(delivery.data, DeadLetter)

    async def causes(self) -> list[str]:
        """Causes of all budgets in the stream."""
        found = self.bus.read(stream(JOB, "ev"), event_subject(JOB, BudgetChanged))
        return [decode(delivery.data, BudgetChanged).cause async for delivery in found]

    async def checkpoint(self) -> tuple[Seen, Checkpoint] | None:
        entry = await self.bus.get(state_bucket(JOB), EchoCore.name)
        if entry is None:
            return None
        saved = msgspec.msgpack.decode(entry.data, type=Checkpoint)
        return msgspec.msgpack.decode(saved.state, type=Seen), saved

    def host(self, core: EchoCore | None = None, bus: object = None, **options: object) -> CoreHost[Seen]:
        return CoreHost(
            core or EchoCore(),
            bus or self.broker.connect(),  # type: ignore[arg-type]
            job_name=JOB,
            **options,  # type: ignore[arg-type]
        )

    async def all_acknowledged(self) -> None:
        """Wait until the host's consumer has delivered everything, and all of it is acknowledged."""
        kept = self.broker.streams[stream(JOB, "ev")]
        async with asyncio.timeout(SOON_S):
            while not (
                (consumer := kept.consumers.get("echo")) and consumer.next_seq > kept.last_seq and not consumer.pending
            ):
                await asyncio.sleep(0)

    @asynccontextmanager
    async def running(self, host: CoreHost[Seen]) -> AsyncIterator[CoreHost[Seen]]:
        stop = asyncio.Event()
        task = asyncio.create_task(host.run(stop))
        try:
            yield host
        finally:
            stop.set()
            async with asyncio.timeout(SOON_S):
                await task

    async def crash(self, host: CoreHost[Seen]) -> None:
        with pytest.raises(Crash):
            async with asyncio.timeout(SOON_S):
                await host.run(asyncio.Event())


@pytest.fixture
async def world() -> World:
    made = World()
    await made.open()
    return made


async def test_inputs_are_stepped_in_order_and_effects_published(world: World) -> None:
    for node in "abc":
        await world.say(gpu(node))
    async with world.running(world.host()) as host:
        assert [(await world.next_budget()).cause for _ in "abc"] == ["a", "b", "c"]
        last = await world.say(gpu("d"))
        assert (await world.next_budget()).budget_id == 4
        await world.all_acknowledged()
    assert host.state.inputs == ("a", "b", "c", "d")
    assert host.cursor == last
    saved = await world.checkpoint()
    assert saved is not None and saved[0].budgets == 4 and saved[1].cursor == last


async def test_a_restart_continues_where_the_checkpoint_stands(world: World) -> None:
    await world.say(gpu("a"))
    async with world.running(world.host()):
        await world.next_budget()
    await world.say(gpu("b"))
    async with world.running(world.host()) as host:
        assert (await world.next_budget()).cause == "b"
    assert host.state.inputs == ("a", "b")
    assert await world.causes() == ["a", "b"]


async def test_a_crash_between_write_and_publish_loses_nothing(world: World) -> None:
    await world.say(gpu("a"))
    await world.crash(world.host(bus=CrashingBus(world.broker.connect(), "publish_durable")))
    saved = await world.checkpoint()
    assert saved is not None and len(saved[1].outbox) == 1, "the checkpoint carries what was to be said"
    assert await world.causes() == []
    async with world.running(world.host()) as host:
        assert (await world.next_budget()).cause == "a"
    assert host.state.inputs == ("a",), "the input is accounted for once"
    assert await world.causes() == ["a"]


async def test_a_crash_between_publish_and_acknowledge_repeats_nothing(world: World) -> None:
    await world.say(gpu("a"))
    await world.crash(world.host(bus=CrashingBus(world.broker.connect(), "ack")))
    assert await world.causes() == ["a"]
    consumer = world.broker.streams[stream(JOB, "ev")].consumers["echo"]
    for pending in consumer.pending.values():
        pending.due_ms = 0  # deliver again at once
    await world.say(gpu("b"))
    async with world.running(world.host()) as host:
        assert [(await world.next_budget()).cause for _ in "ab"] == ["a", "b"]
        await world.all_acknowledged()
    assert host.state.inputs == ("a", "b")


async def test_a_crash_before_the_write_leaves_the_input_for_the_next(world: World) -> None:
    await world.say(gpu("a"))
    await world.crash(world.host(bus=CrashingBus(world.broker.connect(), "put")))
    assert await world.checkpoint() is None
    async with world.running(world.host()) as host:
        assert (await world.next_budget()).cause == "a"
    assert host.state.inputs == ("a",)


async def test_a_delivery_lost_on_the_way_is_not_skipped(world: World) -> None:
    """A predecessor, or a connection that died, took "b"; "c" comes first. The stream shows what is missing."""
    async with world.running(world.host()) as host:
        await world.say(gpu("a"))
        await world.next_budget()
        await world.all_acknowledged()
        world.broker.up = False  # the host fetches nothing meanwhile
        kept = world.broker.streams[stream(JOB, "ev")]
        kept.store(subject_of(JOB, gpu("b")), encode(gpu("b")), {}, world.broker.clock(), "b", None)
        assert [delivery.data for delivery in kept.consumers["echo"].take(1, 0)] == [encode(gpu("b"))]
        world.broker.up = True
        await world.say(gpu("c"))
        assert [(await world.next_budget()).cause for _ in "bc"] == ["b", "c"]
    assert host.state.inputs == ("a", "b", "c")


async def test_what_cannot_be_read_is_dead_lettered_once(world: World) -> None:
    subject = event_subject(JOB, GpuAvailable, "n1")
    await world.bus.publish_durable(subject, b"not a message", msg_id="x1")
    await world.bus.publish_durable(subject, b'{"kind":"gpu.available/1","node":1}', msg_id="x2")
    await world.bus.publish_durable(subject, encode(GpuReclaimed(node=NodeId("n1"), gpus=(0,))), msg_id="x3")
    await world.say(gpu("a"))
    async with world.running(world.host()) as host:
        letters = [await world.next_dead() for _ in range(3)]
        assert (await world.next_budget()).cause == "a"
    assert {letter.receiver for letter in letters} == {"echo"} and {letter.subject for letter in letters} == {subject}
    assert host.state.inputs == ("a",)
    async with world.running(world.host()):
        assert await world.dead.next(0.05) is None


async def test_a_refused_input_is_dead_lettered_and_changes_nothing(world: World) -> None:
    await world.say(gpu("nowhere"))
    await world.say(gpu("a"))
    async with world.running(world.host()) as host:
        letter = await world.next_dead()
        assert (await world.next_budget()).budget_id == 1
        await world.all_acknowledged()
    assert letter.reason == "no such node: nowhere"
    assert host.state == msgspec.structs.replace(host.state, inputs=("a",), budgets=1)


async def test_a_second_instance_ends_the_first(world: World) -> None:
    first = world.host()
    task = asyncio.create_task(first.run(asyncio.Event()))
    await world.say(gpu("a"))
    await world.next_budget()
    entry = await world.bus.get(state_bucket(JOB), "echo")
    assert entry is not None
    # the other instance takes an input and writes its checkpoint
    await world.bus.put(state_bucket(JOB), "echo", b"other", last_revision=entry.revision)
    await world.say(gpu("b"))
    with pytest.raises(TakenOver):
        async with asyncio.timeout(SOON_S):
            await task
    assert await world.causes() == ["a"], "the loser published nothing"


async def test_ticks_alone_write_nothing_until_something_durable_is_said(world: World) -> None:
    async with world.running(world.host(EchoCore(budget_at_tick=3), tick_ms=5)) as host:
        assert (await world.next_budget()).cause == "tick"
    saved = await world.checkpoint()
    assert saved is not None and saved[0].ticks == 3 and host.state.ticks >= 3


async def test_telemetry_and_what_the_shell_feeds_reach_the_core(world: World) -> None:
    async with world.running(world.host(telemetry=(f"pearl.{JOB}.tel.>",))) as host:
        await world.say(gpu("a"))
        await world.next_budget()  # it runs, so it has subscribed
        await world.bus.publish(f"pearl.{JOB}.tel.node_heartbeat.n1", b"rubbish")
        heartbeat = NodeHeartbeat(node="n1", workers=())
        await world.bus.publish(subject_of(JOB, heartbeat), encode(heartbeat))
        assert (await world.next_dead()).receiver == "echo"
        host.feed("noticed")
        await world.say(gpu("b"))
        await world.next_budget()
    assert host.state.inputs == ("a", "NodeHeartbeat", "noticed", "b")


async def test_requests_are_answered_on_their_reply_subject(world: World) -> None:
    subject = f"pearl.{JOB}.assign"
    request = AssignRequest(
        request=RequestId("r"),
        trajectory=TrajectoryId("t"),
        attempt=1,
        min_version=PolicyVersion(0),
        context_tokens=1,
    )
    async with world.running(world.host(request_subject=subject)):
        await world.say(gpu("a"))
        await world.next_budget()
        answer = await world.bus.request(subject, encode(request), SOON_S)
    assert decode(answer.data, AssignRequest) == request


class FakeReplica:
    """A replica whose table the test sets."""

    def __init__(self) -> None:
        self.table: object = None
        self.callbacks: list[object] = []

    def on_change(self, callback: object) -> None:
        self.callbacks.append(callback)

    def change(self, table: object) -> None:
        self.table = table
        for callback in self.callbacks:
            callback(table)  # type: ignore[operator]


async def test_each_new_table_is_fed_once(world: World) -> None:
    replica = FakeReplica()
    replica.table = "table 1"
    async with world.running(world.host(replica=replica)) as host:
        await world.say(gpu("a"))
        await world.next_budget()
        replica.change("table 2")
        await asyncio.sleep(0)
        await world.say(gpu("b"))
        await world.next_budget()
    assert host.state.inputs == ("table 1", "a", "table 2", "b")


async def test_effects_wait_for_an_absent_broker(world: World) -> None:
    async with world.running(world.host(EchoCore(budget_at_tick=2), tick_ms=30)) as host:
        while host.state.ticks < 1:
            await asyncio.sleep(0)
        world.broker.go_down()
        while host.state.ticks < 2:
            await asyncio.sleep(0.001)
        await world.broker.come_up()
        assert (await world.next_budget()).cause == "tick"


async def test_a_host_that_waits_for_the_broker_can_be_stopped(world: World) -> None:
    world.broker.go_down()
    async with world.running(world.host()) as host:
        await asyncio.sleep(0)
    assert host.cursor == 0


# -- a store that lost its last moments


async def went_back(world: World, host: CoreHost[Seen], snapshot: object) -> None:
    """The store goes back under a running host; it must end for that reason."""
    stop = asyncio.Event()
    task = asyncio.create_task(host.run(stop))
    await world.say(gpu("lost"))
    assert (await world.next_budget()).cause == "lost"
    await world.all_acknowledged()
    world.broker.go_down()
    world.broker.go_back(snapshot)
    await world.broker.come_up()
    with pytest.raises(StoreWentBack):
        async with asyncio.timeout(4 * SOON_S):
            await task


async def test_a_host_that_remembers_more_than_the_store_begins_anew_from_the_store(world: World) -> None:
    await world.say(gpu("kept"))
    async with world.running(world.host()):
        assert (await world.next_budget()).cause == "kept"
        await world.all_acknowledged()
    snapshot = world.broker.snapshot()
    host = world.host()
    await went_back(world, host, snapshot)
    async with world.running(world.host()) as successor:
        # It reuses the lost event's sequence: a host that had kept its cursor would take it for a repetition.
        assert await world.say(gpu("new")) <= host.cursor
        assert (await world.next_budget()).cause == "new"
        assert successor.state.inputs == ("kept", "new")
    assert await world.causes() == ["kept", "new"]


async def test_a_checkpoint_beyond_the_stream_reads_on_where_the_stream_parted_from_it(world: World) -> None:
    """The bucket kept more than the stream: only the stream is put back."""
    now = [1_000_000]
    world.broker.clock = lambda: now[0]
    await world.say(gpu("kept"))
    async with world.running(world.host()):
        assert (await world.next_budget()).cause == "kept"
        await world.all_acknowledged()
        snapshot = world.broker.snapshot()
        now[0] += 1000
        for node in "xyz":
            await world.say(gpu(node))
            assert (await world.next_budget()).cause == node
        await world.all_acknowledged()
    buckets = world.broker.buckets
    world.broker.go_down()
    world.broker.go_back(snapshot)
    world.broker.buckets = buckets
    await world.broker.come_up()
    now[0] += 1000
    for node in "abcdefgh":
        await world.say(gpu(node))
    async with world.running(world.host()) as host:
        # "z" was in the outbox of the checkpoint, so it is said again; what the stream lost besides is not made up.
        assert [(await world.next_budget()).cause for _ in "zabcdefgh"] == list("zabcdefgh")
        assert host.state.inputs == ("kept", "x", "y", "z", *"abcdefgh")


async def test_a_restart_of_the_broker_that_lost_nothing_disturbs_no_host(world: World) -> None:
    async with world.running(world.host()) as host:
        await world.say(gpu("a"))
        assert (await world.next_budget()).cause == "a"
        world.broker.go_down()
        world.broker.go_back(world.broker.snapshot())
        await world.broker.come_up()
        await world.say(gpu("b"))
        assert (await world.next_budget()).cause == "b"
        assert host.state.inputs == ("a", "b")
