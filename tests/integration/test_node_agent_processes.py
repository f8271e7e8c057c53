"""A node agent with real processes on the in-memory bus: start, end, kill, adoption, reclaim."""
# ruff: noqa: ASYNC110 - the tests look at files and streams until they say what is awaited, within TEST_S

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, NodeUp
from messages.envelope import Message, decode, encode
from messages.ids import Incarnation, NodeId, WorkerId, Zone
from messages.node_agent import Kill, Launch
from messages.orchestrator import GpuFree, WorkerGone, WorkerReady
from messages.runtime_tracker import NodeHeartbeat
from messages.subjects import event_subject, stream, subject_of, telemetry_subject
from services.durable import durable_state
from services.jobfile import JobFile, JobSection, NodeSection
from services.node_agent.config import Config
from services.node_agent.service import NodeAgent
from services.runtime.bus import StreamSpec
from services.runtime.bus_memory import MemoryBroker, MemoryBus

IGNORE_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
)
SLEEP = "print('on', flush=True); import time; time.sleep(60)"
WITH_CHILD = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('on', flush=True); time.sleep(60)"
TEST_S = 20.0


class Node:
    """A node agent that can be stopped, or killed without a word, and what it says."""

    def __init__(self, job: JobFile, name: str, bus: MemoryBus, program: str) -> None:
        self.job, self.name, self.bus, self.program = job, name, bus, program
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        config = Config.of(self.job, self.name, "job.toml")

        def command(config: Config, service: str, worker: str, incarnation: Incarnation) -> tuple[str, ...]:
            return (sys.executable, "-S", "-c", self.program)

        self.stop = asyncio.Event()
        self.task = asyncio.create_task(NodeAgent(config, self.bus, "demo", command).run(self.stop))

    async def crash(self) -> None:
        assert self.task is not None
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def end(self) -> None:
        assert self.task is not None
        self.stop.set()
        await self.task

    async def command(self, message: Message) -> None:
        await self.bus.publish(subject_of("demo", message), encode(message))

    async def event(self, message: Message, msg_id: str) -> None:
        await self.bus.publish_durable(subject_of("demo", message), encode(message), msg_id=msg_id)

    async def said(self, kind: type[Message], key: str) -> list[Message]:
        subject = event_subject("demo", kind, key)
        return [decode(each.data, kind) async for each in self.bus.read(stream("demo", "ev"), subject)]

    async def gone(self, worker: str, count: int = 1) -> WorkerGone:
        """The newest `worker.gone`, once there are `count`, and each first one's `gpu.free` with it."""
        while True:
            found = await self.said(WorkerGone, worker)
            if len(found) >= count and await self.said(GpuFree, self.name):
                assert isinstance(found[-1], WorkerGone)
                return found[-1]
            await asyncio.sleep(0.01)

    async def up(self, count: int = 1) -> None:
        while len(await self.said(NodeUp, self.name)) < count:
            await asyncio.sleep(0.01)

    async def process(self, worker: str, incarnation: int = 1) -> psutil.Process:
        """The worker's process, once it has said that it is on."""
        run_dir = self.job.run_dir
        log, pids = run_dir / "logs" / f"{worker}.{incarnation}.log", run_dir / "pids" / f"{worker}.json"
        while not (log.is_file() and "on" in log.read_text() and pids.is_file()):
            await asyncio.sleep(0.01)
        record = json.loads(pids.read_text())
        assert record["incarnation"] == incarnation
        return psutil.Process(record["pid"])


@pytest.fixture
async def bus() -> MemoryBus:
    bus = MemoryBroker().connect()
    for entry in durable_state("demo"):
        if isinstance(entry.spec, StreamSpec):
            await bus.ensure_stream(entry.spec)
    return bus


@pytest.fixture
async def nodes(tmp_path: Path, bus: MemoryBus) -> AsyncIterator[list[Node]]:
    """Makes nodes (`make`), and ends what the test left."""
    made: list[Node] = []
    yield made
    for node in made:
        if node.task is not None and not node.task.done():
            await node.end()


def make(
    nodes: list[Node], bus: MemoryBus, tmp_path: Path, program: str = SLEEP, zone: Zone = Zone.PREEMPTIBLE
) -> Node:
    job = JobFile(job=JobSection(data_dir=str(tmp_path)), nodes=(NodeSection(name="n1", zone=zone, gpus=2),))
    node = Node(job, "n1", bus, program)
    nodes.append(node)
    node.start()
    return node


def launch(incarnation: int = 1, worker: str = "n1-w0") -> Launch:
    return Launch(worker=WorkerId(worker), incarnation=Incarnation(incarnation), gpus=(0,), service="rollout_worker")


def kill(incarnation: int = 1, grace_ms: int = 5_000) -> Kill:
    return Kill(worker=WorkerId("n1-w0"), incarnation=Incarnation(incarnation), grace_ms=grace_ms, reason="plan")


async def test_launch_exit_and_report(nodes: list[Node], bus: MemoryBus, tmp_path: Path) -> None:
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path, "print('on', flush=True); raise SystemExit(7)")
        await node.up()
        await node.command(launch())
        gone = await node.gone("n1-w0")
        assert (gone.incarnation, gone.reason) == (1, "exit:7")
        await node.command(launch())  # whoever asks again did not hear it: it is said again, and nothing is started
        assert (await node.gone("n1-w0", 2)).incarnation == 1
        await node.command(launch(2))
        assert (await node.gone("n1-w0", 3)).incarnation == 2
        assert len(await node.said(WorkerGone, "n1-w0")) == 3
        assert not list((tmp_path / "demo" / "pids").glob("*.json"))


async def test_kill_ends_the_whole_group_and_is_answered_again(
    nodes: list[Node], bus: MemoryBus, tmp_path: Path
) -> None:
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path, WITH_CHILD)
        await node.up()
        await node.command(launch())
        process = await node.process("n1-w0")
        (child,) = process.children()
        await node.command(kill())
        assert (await node.gone("n1-w0")).reason == "killed:plan"
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        await node.command(kill())
        assert (await node.gone("n1-w0", 2)).reason == "killed:plan"


async def test_sigkill_follows_where_sigterm_is_ignored(nodes: list[Node], bus: MemoryBus, tmp_path: Path) -> None:
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path, IGNORE_TERM)
        await node.up()
        await node.command(launch())
        process = await node.process("n1-w0")
        await node.command(kill(grace_ms=50))
        assert (await node.gone("n1-w0")).reason == "killed:plan"
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_a_newer_launch_ends_the_older_process_first(nodes: list[Node], bus: MemoryBus, tmp_path: Path) -> None:
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path)
        await node.up()
        await node.command(launch(1))
        old = await node.process("n1-w0")
        await node.command(launch(2))
        assert (await node.gone("n1-w0")).reason == "killed:superseded"
        assert not old.is_running() or old.status() == psutil.STATUS_ZOMBIE
        await node.command(launch(2))
        await node.process("n1-w0", 2)


async def test_a_restarted_agent_adopts_its_processes(nodes: list[Node], bus: MemoryBus, tmp_path: Path) -> None:
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path)
        await node.up()
        await node.command(launch())
        process = await node.process("n1-w0")
        await node.crash()
        assert process.is_running()
        beats = await bus.subscribe(telemetry_subject("demo", NodeHeartbeat))
        node.start()
        await node.up(2)
        beat = await beats.next(5.0)
        assert beat is not None and decode(beat.data, NodeHeartbeat).workers == (("n1-w0", 1),)
        await node.command(launch())
        process.kill()
        assert (await node.gone("n1-w0")).reason == "exit:unknown"


async def test_an_end_while_the_agent_was_away_is_reported(nodes: list[Node], bus: MemoryBus, tmp_path: Path) -> None:
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path)
        await node.up()
        await node.command(launch())
        process = await node.process("n1-w0")
        await node.crash()
        process.kill()
        node.start()
        assert (await node.gone("n1-w0")).incarnation == 1


async def test_a_ready_process_of_a_machine_that_lost_its_disk_is_reported(
    nodes: list[Node], bus: MemoryBus, tmp_path: Path
) -> None:
    """Nobody else can say so: the others would wait for a lease, or for a plan's deadline."""
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path)
        await node.up()
        await node.command(launch())
        process = await node.process("n1-w0")
        ready = WorkerReady(worker=WorkerId("n1-w0"), incarnation=Incarnation(1), endpoint="", pid=1, init_ms=1)
        await bus.publish_durable(subject_of(node.job.job.name, ready), encode(ready), msg_id="ready")
        await node.crash()
        process.kill()
        shutil.rmtree(tmp_path)
        node.start()
        gone = await node.gone("n1-w0")
        assert (gone.incarnation, gone.reason) == (1, "exit:unknown")


async def test_processes_of_an_earlier_job_of_this_name_are_ended(
    nodes: list[Node], bus: MemoryBus, tmp_path: Path
) -> None:
    """Its NATS data is gone, so its incarnations mean nothing: the new job's first launch must start."""
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path)
        await node.up()
        await node.command(launch(9))
        old = await node.process("n1-w0", 9)
        await node.crash()
        fresh = MemoryBroker().connect()
        for entry in durable_state("demo"):
            if isinstance(entry.spec, StreamSpec):
                await fresh.ensure_stream(entry.spec)
        node.bus = fresh
        node.start()
        await node.up()
        assert not old.is_running() or old.status() == psutil.STATUS_ZOMBIE
        await node.command(launch(1))
        await node.process("n1-w0", 1)
        assert await node.said(WorkerGone, "n1-w0") == []


async def test_a_reclaim_without_notice_kills_at_once(nodes: list[Node], bus: MemoryBus, tmp_path: Path) -> None:
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path, IGNORE_TERM)
        await node.up()
        await node.command(launch())
        await node.process("n1-w0")
        await node.event(GpuReclaimed(node=NodeId("n1"), gpus=(0,)), "r1")
        assert (await node.gone("n1-w0")).reason == "killed:reclaimed"
        await node.event(GpuAvailable(node=NodeId("n1"), gpus=(0,)), "a1")
        await node.command(launch(2))
        await node.process("n1-w0", 2)


async def test_what_remains_at_the_deadline_is_killed_by_a_restarted_agent_too(
    nodes: list[Node], bus: MemoryBus, tmp_path: Path
) -> None:
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path, IGNORE_TERM)
        await node.up()
        await node.command(launch())
        await node.process("n1-w0")
        await node.event(GpuReclaimed(node=NodeId("n1"), gpus=(0, 1), notice_ms=300), "r1")
        await node.crash()
        node.start()
        assert (await node.gone("n1-w0")).reason == "killed:reclaimed"


async def test_the_trainer_is_started_and_started_again_and_stop_ends_it(
    nodes: list[Node], bus: MemoryBus, tmp_path: Path
) -> None:
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path, zone=Zone.TRAINING)
        first = await node.process("n1-t0", 1)
        first.kill()
        assert (await node.gone("n1-t0")).reason == "signal:9"
        second = await node.process("n1-t0", 2)
        await node.end()
        assert not second.is_running() or second.status() == psutil.STATUS_ZOMBIE
        assert (await node.gone("n1-t0", 2)).reason == "killed:shutdown"


async def test_what_cannot_be_read_or_started_is_said(nodes: list[Node], bus: MemoryBus, tmp_path: Path) -> None:
    async with asyncio.timeout(TEST_S):
        node = make(nodes, bus, tmp_path)
        await node.up()
        await bus.publish("pearl.demo.cmd.node.n1", b"{}")
        await node.command(Launch(worker=WorkerId("n1-w0"), incarnation=Incarnation(1), gpus=(9,), service="trainer"))
        while len([each async for each in bus.read(stream("demo", "dead"), "pearl.demo.dead.>")]) < 2:
            await asyncio.sleep(0.01)
