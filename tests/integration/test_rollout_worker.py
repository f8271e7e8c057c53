"""A rollout worker with its real engine on the in-memory bus: commands, requests, drain, swap, loss of the bus."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from messages.agent import AttemptLogged, TokenChunk
from messages.envelope import Message, decode, encode, registry
from messages.ids import Incarnation, PolicyVersion, RequestId, Role, RoleGeneration, TrajectoryId, WorkerId
from messages.orchestrator import RoleSet, WeightsApplied, WorkerActivated, WorkerDrained, WorkerReady, WorkerReleased
from messages.rollout_worker import Activate, CancelRequest, Deactivate, Drain, Generate, SetRole, UpdateWeights
from messages.runtime_tracker import WorkerHeartbeat
from messages.subjects import event_subject, subject_of, telemetry_subject
from services.checker.collect import frames
from services.jobfile import AgentSection, JobFile, JobSection, RolloutSection, TimeoutSection
from services.models import initial_model, read_weights
from services.rollout_worker import service
from services.rollout_worker.config import LIVENESS_MS, Config
from services.rollout_worker.engines import make_engine, torch_thread
from services.rollout_worker.engines.torch_engine import TorchEngine
from services.rollout_worker.service import OrphanedError, RolloutWorker
from services.runtime.bus import Delivery, StreamSpec
from services.runtime.bus_memory import MemoryBroker
from services.snapshot import Snapshot, write_snapshot
from tests.waiting import until

WORKER, EDGE, JOB = WorkerId("n1-w0"), "pearl.demo.tok.edge", "demo"
M = TypeVar("M", bound=Message)


class World:
    """One worker process, and a client that can see everything."""

    def __init__(self, job: JobFile, broker: MemoryBroker) -> None:
        self.job = job
        self.broker = broker
        self.bus = broker.connect()
        self.stop = asyncio.Event()
        self.worker: RolloutWorker
        self.task: asyncio.Task[None]
        self.snapshots: list[Snapshot] = []
        self.sequence = 0

    async def start(self) -> None:
        await self.bus.ensure_stream(StreamSpec(name="demo_EV", subjects=("pearl.demo.ev.>",)))
        await self.bus.ensure_stream(StreamSpec(name="demo_DEAD", subjects=("pearl.demo.dead.*",)))
        config = Config.of(self.job, "n1")
        engine = make_engine(config.rollout, "cpu")
        self.worker = RolloutWorker(
            config, self.broker.connect(), engine, WORKER, Incarnation(1), began=asyncio.get_running_loop().time()
        )
        self.chunks = await self.bus.subscribe(EDGE)
        self.task = asyncio.create_task(self.worker.run(self.stop))
        folder = initial_model(self.job, 40)
        state = read_weights(folder)
        for version in (0, 1):
            root = self.job.run_dir / "snapshots"
            self.snapshots.append(write_snapshot(state, root, version, folder))
            state["model.norm.weight"] = state["model.norm.weight"] * 1.5

    async def end(self) -> None:
        self.stop.set()
        await self.task

    async def say(self, message: Message) -> None:
        await self.bus.publish(subject_of(JOB, message), encode(message))

    async def fact(self, kind: type[M], holds: Callable[[M], bool] = lambda _: True) -> M:
        """The first fact of a kind after those already seen."""
        async with asyncio.timeout(10):
            while True:
                async for delivery in self.bus.read("demo_EV", event_subject(JOB, kind)):
                    fact = decode(delivery.data, kind)
                    if delivery.seq > self.sequence and holds(fact):
                        self.sequence = delivery.seq
                        return fact
                await asyncio.sleep(0.005)

    def fence(self, generation: int) -> dict[str, Any]:
        return {"worker": WORKER, "incarnation": Incarnation(1), "role_generation": RoleGeneration(generation)}

    def update(self, version: int) -> UpdateWeights:
        snapshot = self.snapshots[version]
        return UpdateWeights(
            worker=WORKER,
            incarnation=Incarnation(1),
            version=PolicyVersion(version),
            uri=snapshot.uri,
            manifest_sha256=snapshot.manifest_sha256,
        )

    async def serve(self, generation: int = 1, role: Role = Role.COLOCATED) -> None:
        await self.fact(WorkerReady)
        await self.say(self.update(0))
        await self.fact(WeightsApplied)
        await self.say(SetRole(**self.fence(generation), role=role))
        await self.fact(RoleSet)

    def request(self, name: str = "t/0", generation: int = 1, **changes: Any) -> Generate:
        fields: dict[str, Any] = {
            "attempt": 1,
            "min_version": PolicyVersion(0),
            "prompt": [1, 2, 3],
            "prefix": [],
            "max_new_tokens": 8,
            "temperature": 1.0,
            "seed": 3,
            "stop_ids": [],
            "reply": EDGE,
            **self.fence(generation),
            **changes,
        }
        return Generate(request=RequestId(name), trajectory=TrajectoryId("t"), **fields)

    async def chunk(self) -> TokenChunk:
        delivery = await self.chunks.next(10)
        assert delivery is not None
        return decode(delivery.data, TokenChunk)

    async def reply(self) -> list[TokenChunk]:
        chunks = [await self.chunk()]
        while not chunks[-1].finish:
            chunks.append(await self.chunk())
        return chunks

    def attempts(self) -> list[AttemptLogged]:
        return list(frames((self.job.run_dir / "attempts" / "n1-w0.1.msgpack").read_bytes()))


def job_of(folder: Path, **sections: Any) -> JobFile:
    defaults: dict[str, Any] = {"rollout": RolloutSection(heartbeat_ms=20)}
    return JobFile(job=JobSection(name=JOB, data_dir=str(folder)), **{**defaults, **sections})


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    world = World(job_of(tmp_path, **getattr(request, "param", {})), MemoryBroker())
    await world.start()
    yield world
    if not world.task.done():
        await world.end()


SLOW = pytest.mark.parametrize("world", [{"rollout": RolloutSection(heartbeat_ms=20, pace_decode_ms=2)}], indirect=True)


async def test_a_reply_streams_and_is_logged(world: World):
    await world.serve()
    await world.say(world.request())
    chunks = await world.reply()
    assert sum(len(chunk.tokens) for chunk in chunks) == 8
    assert (chunks[-1].finish, chunks[0].offset, chunks[0].incarnation) == ("length", 0, 1)
    begin, end = world.attempts()
    assert (begin.finish, begin.start_offset, begin.generated) == ("", 0, 0)
    assert (end.finish, end.start_offset, end.generated) == ("length", 0, 8)


async def test_nothing_of_a_request_is_kept_once_it_has_ended(world: World):
    """A fleet of a thousand workers that each kept their last context would grow for an hour."""
    await world.serve()
    prompt = list(range(2, 38)) * 9
    await world.say(world.request(prompt=prompt, max_new_tokens=3))
    await world.reply()

    def kept() -> list[object]:
        gc.collect()
        found = gc.get_objects()
        messages = [each for each in found if type(each) is Delivery and each.subject == f"pearl.demo.gen.{WORKER}"]
        return messages + [each for each in found if type(each) is list and each == prompt and each is not prompt]

    await until(lambda: not kept())


async def test_a_request_that_the_network_brings_twice_runs_once(world: World):
    await world.serve()
    await world.say(world.request(max_new_tokens=3))
    first = await world.reply()
    await world.say(world.request(max_new_tokens=3))
    await world.say(world.request("t/1", max_new_tokens=3))
    other = await world.reply()
    assert {chunk.request for chunk in first} == {"t/0"} and {chunk.request for chunk in other} == {"t/1"}


async def test_of_the_attempts_that_it_remembers_it_forgets_the_oldest(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service, "MOST_ENDED", 2)
    await world.serve()
    for name in ("t/0", "t/1", "t/2"):
        await world.say(world.request(name, max_new_tokens=3))
        assert (await world.reply())[-1].request == name
    for name in ("t/1", "t/2", "t/0"):
        await world.say(world.request(name, max_new_tokens=3))
    assert {chunk.request for chunk in await world.reply()} == {"t/0"}, "copies of the last two are known"


@SLOW
async def test_one_that_was_silent_for_long_says_what_it_holds_back_and_says_it_once(world: World):
    await world.serve()
    await world.say(world.request(max_new_tokens=1000, hold_ms=1000))
    await until(lambda: any(each.offset > 0 for each in world.worker._attempts.values()))
    (attempt,) = world.worker._attempts.values()
    attempt.heard_of -= 10
    await world.worker._tell_who_waits()
    await world.worker._tell_who_waits()
    await world.say(world.request("other", generation=9))
    first, then = await world.chunk(), await world.chunk()
    assert first.offset == 0 and first.tokens and not first.finish
    assert (then.request, then.finish) == ("other", "refused")
    await world.say(Drain(**world.fence(2)))
    rest = await world.reply()
    assert rest[0].offset == len(first.tokens)


async def test_a_short_reply_is_one_chunk(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_thread, "FLUSH_S", 600.0)  # however slow the machine is
    await world.serve()
    await world.say(world.request(max_new_tokens=3))
    (chunk,) = await world.reply()
    assert len(chunk.tokens) == 3


async def test_requests_are_fenced(world: World):
    await world.fact(WorkerReady)
    await world.say(world.request("early"))
    assert ((await world.chunk()).finish, world.worker.refused) == ("refused", 1)
    await world.say(world.update(0))
    await world.fact(WeightsApplied)
    await world.say(SetRole(**world.fence(1), role=Role.COLOCATED))
    await world.fact(RoleSet)
    for changes, reason in (
        ({"generation": 2}, "role generation is 1, not 2"),
        ({"min_version": 1}, "version 0 is below 1"),
        ({"prompt": [99]}, "token ids"),
    ):
        await world.say(world.request(reason, **changes))
        chunk = await world.chunk()
        assert chunk.finish == "refused"
        assert reason in chunk.reason
    await world.say(world.request("t/9", incarnation=Incarnation(2), max_new_tokens=1))  # for another process: silence
    await world.say(world.request("early", max_new_tokens=1))  # a copy of what was refused: it has been answered
    await world.say(world.request(max_new_tokens=30))
    chunk = (await world.reply())[-1]
    assert (chunk.request, chunk.finish) == ("t/0", "length"), "those before it would have been shorter"
    assert {entry.attempt for entry in world.attempts()} == {1}
    assert len(world.attempts()) == 2


async def test_a_prefill_worker_only_says_that_it_will_not_or_stopped(world: World):
    """Its decode worker is waited for, longer than a queued request is silent; then come a cancel and a drain."""
    ready = await world.fact(WorkerReady)
    assert ready.endpoint.startswith("127.0.0.1:")
    world.sequence = 0
    await world.serve(role=Role.PREFILL)
    await world.say(world.request("no-room"))
    assert (await world.chunk()).finish == "refused"
    for name in ("t/1", "t/2"):
        await world.say(world.request(name, bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=5))
    await until(lambda: len(world.worker._attempts) == 2)
    for attempt in world.worker._attempts.values():
        attempt.heard_of -= 10
    await asyncio.sleep(1.1)  # LIVENESS_MS
    await world.bus.publish(f"pearl.demo.gen.{WORKER}", encode(CancelRequest(request=RequestId("t/1"), attempt=1)))
    await until(lambda: len(world.worker._attempts) == 1)
    await world.say(Drain(**world.fence(2)))
    chunk = await world.chunk()
    assert (chunk.request, chunk.finish, chunk.tokens, chunk.offset) == ("t/2", "interrupted", [], 0)
    assert (await world.fact(WorkerDrained)).interrupted == 1
    assert world.attempts() == []


@SLOW
async def test_a_drain_hands_out_partials_and_the_rest_resumes(world: World):
    await world.serve()
    await world.say(world.request(max_new_tokens=60))
    first = await world.chunk()
    await world.say(Drain(**world.fence(2)))
    chunks = [first, *await world.reply()]
    drained = await world.fact(WorkerDrained)
    assert (drained.interrupted, chunks[-1].finish) == (1, "interrupted")
    had = [token for chunk in chunks for token in chunk.tokens]
    assert 0 < len(had) < 60
    await world.say(world.request(generation=2))
    assert (await world.chunk()).reason == "not serving"
    await world.say(SetRole(**world.fence(3), role=Role.COLOCATED))
    await world.fact(RoleSet)
    await world.say(world.request(attempt=2, generation=3, prefix=had, max_new_tokens=60))
    rest = await world.reply()
    assert rest[0].offset == len(had)
    await world.say(world.request("whole", generation=3, max_new_tokens=60))
    whole = [token for chunk in await world.reply() for token in chunk.tokens]
    assert whole == had + [token for chunk in rest for token in chunk.tokens]


@SLOW
async def test_weights_change_under_a_stream(world: World):
    await world.serve()
    await world.say(world.request(max_new_tokens=100))
    chunks = [await world.chunk()]
    await world.say(world.update(1))
    await world.say(world.update(1))
    chunks += await world.reply()
    assert await world.fact(WeightsApplied)
    offset = 0
    for chunk in chunks:
        assert chunk.offset == offset
        offset += len(chunk.tokens)
    assert offset == 100
    assert [chunk.version for chunk in chunks] == sorted(chunk.version for chunk in chunks)
    assert {chunk.version for chunk in chunks} == {0, 1}


async def test_a_torn_snapshot_changes_nothing_until_it_is_whole(world: World):
    await world.serve()
    shard = Path(world.snapshots[1].uri) / "model.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1000])
    await world.say(world.update(1))
    await until(lambda: world.worker.state.loading is not None)
    await until(lambda: world.worker.state.loading is None)
    assert world.worker.state.version == 0
    shard.write_bytes(whole)
    await world.say(world.update(1))
    assert (await world.fact(WeightsApplied)).version == 1


async def test_a_toggle_gives_memory_back_and_serves_again(world: World):
    await world.serve()
    await world.say(Drain(**world.fence(2)))
    await world.fact(WorkerDrained)
    await world.say(Deactivate(**world.fence(2)))
    await world.fact(WorkerReleased)
    await world.say(Activate(**world.fence(3)))
    await world.fact(WorkerActivated)
    await world.say(world.update(0))
    assert (await world.fact(WeightsApplied)).version == 0  # the same fact as before, heard again
    await world.say(SetRole(**world.fence(3), role=Role.COLOCATED))
    await world.fact(RoleSet)
    await world.say(world.request(generation=3))
    assert (await world.reply())[-1].finish == "length"


@SLOW
async def test_a_cancelled_attempt_is_freed(world: World):
    await world.serve()
    await world.say(world.request(max_new_tokens=500))
    await world.chunk()
    cancel = CancelRequest(request=RequestId("t/0"), attempt=1)
    await world.bus.publish(f"pearl.demo.gen.{WORKER}", encode(cancel))
    await until(lambda: len(world.attempts()) == 2)
    assert world.attempts()[-1].finish == "cancelled"
    # cancelled before it could begin: nothing is left behind
    await world.say(world.request("t/1"))
    await world.bus.publish(f"pearl.demo.gen.{WORKER}", encode(CancelRequest(request=RequestId("t/1"), attempt=1)))
    await world.say(world.request("t/2", max_new_tokens=1))
    chunks = await world.reply()
    while chunks[-1].request != "t/2":
        chunks = await world.reply()
    await world.say(Drain(**world.fence(2)))
    assert (await world.fact(WorkerDrained)).interrupted == 0


async def test_nonsense_is_dead_lettered(world: World):
    await world.serve()
    for subject, data in (
        (f"pearl.demo.cmd.worker.{WORKER}", b"{not json"),
        (f"pearl.demo.gen.{WORKER}", encode(world.update(0))),
        (f"pearl.demo.gen.{WORKER}", encode(world.request(reply="pearl.demo.ev.gpu_free.x"))),
        (f"pearl.demo.gen.{WORKER}", encode(world.request(hold_ms=LIVENESS_MS + 1))),
        (f"pearl.demo.gen.{WORKER}", encode(world.request(hold_ms=-1))),
    ):
        await world.bus.publish(subject, data)
    await until(lambda: len(world.broker.streams["demo_DEAD"].messages) == 5)


async def test_heartbeats_tell_load_and_version(world: World):
    beats = await world.bus.subscribe(telemetry_subject(JOB, WorkerHeartbeat))
    await world.serve()
    await world.say(world.request())
    await world.reply()
    async with asyncio.timeout(5):
        async for delivery in beats:
            beat = decode(delivery.data, WorkerHeartbeat)
            if beat.decode_tokens >= 7:
                break
    assert (beat.serving, beat.version) == (True, 0)
    assert beat.rss_bytes > 0


@SLOW
async def test_the_worker_serves_on_while_the_broker_is_away(world: World):
    await world.serve()
    world.broker.go_down()
    await asyncio.sleep(0.1)
    await world.broker.come_up()
    await world.say(world.request())
    assert (await world.reply())[-1].finish == "length"


async def test_a_stop_interrupts_what_runs(tmp_path: Path):
    world = World(job_of(tmp_path, rollout=RolloutSection(pace_decode_ms=2)), MemoryBroker())
    await world.start()
    await world.serve()
    await world.say(world.request(max_new_tokens=1000))
    await world.chunk()
    await world.end()
    assert (await world.reply())[-1].finish == "interrupted"


async def test_an_orphan_ends_itself(tmp_path: Path):
    job = job_of(tmp_path, timeouts=TimeoutSection(orphan_ms=300), rollout=RolloutSection(heartbeat_ms=20))
    world = World(job, MemoryBroker())
    await world.start()
    await world.fact(WorkerReady)
    world.broker.go_down()
    with pytest.raises(OrphanedError, match="no sign of the bus for 3"):
        async with asyncio.timeout(10):
            await world.task


async def test_a_long_start_makes_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = job_of(tmp_path, timeouts=TimeoutSection(orphan_ms=60000), rollout=RolloutSection(heartbeat_ms=20))
    world = World(job, MemoryBroker())
    begin, beaten = TorchEngine.start, asyncio.Event()

    async def slow_start(engine: TorchEngine) -> None:
        await begin(engine)
        world.worker._heard -= 600  # as if it had taken ten minutes
        durable = world.worker._bus.publish_durable

        async def later(*arguments: Any, **named: Any) -> Any:
            await beaten.wait()  # the stream's answer comes after the first heartbeat
            return await durable(*arguments, **named)

        monkeypatch.setattr(world.worker._bus, "publish_durable", later)

    monkeypatch.setattr(TorchEngine, "start", slow_start)
    beats = await world.bus.subscribe(telemetry_subject(JOB, WorkerHeartbeat))
    await world.start()
    beat = asyncio.create_task(anext(aiter(beats)))
    await asyncio.wait((beat, world.task), return_when=asyncio.FIRST_COMPLETED, timeout=10)
    beaten.set()
    await world.serve()
    await world.end()


async def test_a_healthy_bus_keeps_an_idle_worker(tmp_path: Path):
    job = job_of(tmp_path, timeouts=TimeoutSection(orphan_ms=200), rollout=RolloutSection(heartbeat_ms=20))
    world = World(job, MemoryBroker())
    await world.start()
    await asyncio.sleep(0.5)
    assert not world.task.done()
    await world.end()


async def test_a_queued_request_says_that_it_lives(tmp_path: Path):
    job = job_of(tmp_path, agent=AgentSection(silence_ms=5000))
    world = World(job, MemoryBroker())
    await world.start()
    await world.serve()
    await world.worker._engine.pause("in_place")
    await world.say(world.request())
    chunk = await world.chunk()
    assert (chunk.tokens, chunk.finish, chunk.offset) == ([], "", 0)
    await world.worker._engine.resume()
    assert (await world.reply())[-1].finish == "length"
    await world.end()


def test_all_messages_are_known():
    assert "request.generate/1" in registry()
