"""Disaggregated workers as real processes on a real server, with the real router and edge: kills, then a change of roles."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from messages.agent import AttemptLogged, RequestInterrupted, TurnFinished
from messages.envelope import Message, decode, encode
from messages.ids import (
    Activity,
    Epoch,
    Gpu,
    GroupId,
    Incarnation,
    NodeId,
    PolicyVersion,
    RequestId,
    Role,
    RoleGeneration,
    TrajectoryId,
    WorkerId,
    Zone,
)
from messages.orchestrator import RoleSet, WeightsApplied, WorkerDrained, WorkerReady
from messages.rollout_worker import Drain, SetRole, UpdateWeights
from messages.subjects import event_subject, stream, subject_of
from pearl_state.model import Move, RoleTable, Row, change, with_rows
from pearl_state.store import TableStore
from pearl_state.watch import Replica
from services import jobfile
from services.checker.collect import frames
from services.checker.core import check
from services.checker.core_report import Expected, Journalled
from services.connect import connect, connect_tables
from services.edge.request import Interruption, Reply, RequestEdge, RequestSpec
from services.jobfile import JobFile
from services.models import initial_model, read_weights
from services.nats_server.process import EmbeddedServer
from services.rollout_worker.engines.base import GenerateSpec
from services.rollout_worker.engines.torch_engine import TorchEngine
from services.router.config import Config
from services.router.service import Router
from services.runtime.bus import Bus
from services.snapshot import Snapshot, write_snapshot
from tests.waiting import until

JOB = """
[job]
name = "pd"
data_dir = "{folder}"
[model]
device = "cpu"
[[nodes]]
name = "n1"
zone = "reserved"
gpus = 4
[[nodes]]
name = "t1"
zone = "training"
gpus = 1
[rollout]
pace_prefill_us_per_token = 1500
pace_decode_ms = 6
prefill_chunk_tokens = 16
max_running = 16
[agent]
silence_ms = 3000
"""
SLOTS = ("n1-w0", "n1-w1", "n1-w2", "n1-w3")  # two prefill, two decode
VOCAB = 40
PROMPT = [(7 * index) % VOCAB for index in range(60)]
TOKENS = 60
M = TypeVar("M", bound=Message)


class Cluster:
    """Worker processes, one router, one edge, and a test in the place of orchestrator and executors."""

    vocabulary = VOCAB

    def __init__(self, job: JobFile, path: Path) -> None:
        self.job = job
        self.path = path
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.edge: RequestEdge
        self.router: Router
        self.store: TableStore
        self.table: RoleTable
        self.bus: Bus  # the executor's
        self.eyes: Bus  # sees everything
        self.snapshot: Snapshot
        self.interruptions: list[Interruption] = []

    async def start(self, stack: AsyncExitStack) -> None:
        server = EmbeddedServer(self.job)
        stack.push_async_callback(server.stop)
        await server.start()
        await server.prepare()
        for slot in SLOTS:
            self.processes[slot] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.cli", "service", "rollout_worker", "-c", str(self.path)),
                *("--worker", slot, "--incarnation", "1"),
                stdout=(log := (self.path.parent / f"{slot}.log").open("ab")),
                stderr=log,
            )
        stack.push_async_callback(self.end_processes)
        folder = initial_model(self.job, self.vocabulary)
        self.snapshot = write_snapshot(read_weights(folder), self.job.run_dir / "snapshots", 0, folder)
        self.bus, self.eyes = await connect(self.job, "cluster_rebuilder"), await connect(self.job, "cli")
        tables = await connect_tables(self.job)
        self.store = TableStore(tables, "pd")
        await self.store.restore()
        ready = await self.facts(WorkerReady, 4)
        assert all(fact.endpoint.startswith("127.0.0.1:") for fact in ready.values())
        for slot in SLOTS:
            await self.say(
                UpdateWeights(
                    worker=WorkerId(slot),
                    incarnation=Incarnation(1),
                    version=PolicyVersion(0),
                    uri=self.snapshot.uri,
                    manifest_sha256=self.snapshot.manifest_sha256,
                )
            )
        await self.facts(WeightsApplied, 4)
        roles = dict(zip(SLOTS, (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE), strict=True))
        await self.set_roles(roles, 1)
        rows = tuple(
            Row(
                worker=WorkerId(slot),
                gpus=(Gpu(NodeId("n1"), index),),
                zone=Zone.RESERVED,
                role=roles[slot],
                activity=Activity.ACTIVE,
                incarnation=Incarnation(1),
                role_generation=RoleGeneration(1),
                version=PolicyVersion(0),
                endpoint=ready[slot].endpoint,
            )
            for index, slot in enumerate(SLOTS)
        )
        self.table = RoleTable(job="pd", epoch=Epoch(1), rows=rows)
        await self.store.write(self.table)
        replicas = Replica(), Replica()
        stop = asyncio.Event()
        for replica, user in zip(replicas, ("router", "agent"), strict=True):
            bus = await connect(self.job, user)
            stack.push_async_callback(bus.close)
            stack.push_async_callback(replica.stop)
            if user == "router":
                self.router = Router(Config.of(self.job), bus, "pd")
                replica.on_change(self.router.on_table)
                running = asyncio.create_task(self.router.run(stop))
            else:
                self.edge = RequestEdge(bus, "pd", "edge", silence_ms=3000, replica=replica)
                await self.edge.start()
            await replica.start(bus, "pd")
        for end in (self.bus.close, self.eyes.close, tables.close):
            stack.push_async_callback(end)
        stack.push_async_callback(self.edge.stop)
        stack.callback(running.cancel)

    async def end_processes(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def say(self, message: Message) -> None:
        await self.bus.publish(subject_of("pd", message), encode(message))

    async def facts(self, kind: type[M], count: int, holds: Callable[[Any], bool] = lambda _: True) -> dict[str, M]:
        """Facts of `count` workers."""
        async with asyncio.timeout(90):
            while True:
                found: dict[str, M] = {}
                async for delivery in self.eyes.read(stream("pd", "ev"), event_subject("pd", kind)):
                    fact: Any = decode(delivery.data, kind)
                    if holds(fact):
                        found[fact.worker] = fact
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.02)

    async def set_roles(self, roles: dict[str, Role], generation: int) -> None:
        for slot, role in roles.items():
            await self.say(
                SetRole(
                    worker=WorkerId(slot),
                    incarnation=Incarnation(1),
                    role=role,
                    role_generation=RoleGeneration(generation),
                )
            )
        await self.facts(RoleSet, len(roles), lambda fact: fact.role_generation == generation)

    async def move(self, slots: Iterable[str], move: Move, **more: Any) -> None:
        """One epoch in which these rows make this move."""
        rows = [change(self.table.by_worker[WorkerId(slot)], move, **more) for slot in slots]
        self.table = msgspec.structs.replace(with_rows(self.table, rows), epoch=Epoch(self.table.epoch + 1))
        await self.store.write(self.table)

    async def kill(self, slot: str) -> None:
        os.kill(self.processes[slot].pid, signal.SIGKILL)
        await self.processes[slot].wait()

    async def reply(self, index: int) -> Reply:
        async def keep(interruption: Interruption) -> None:
            self.interruptions.append(interruption)

        return await self.edge.generate(request(index), keep)

    def logged(self) -> list[AttemptLogged]:
        files = sorted((self.job.run_dir / "attempts").glob("*.msgpack"))
        return [entry for file in files for entry in frames(file.read_bytes())]


def request(index: int) -> RequestSpec:
    return RequestSpec(
        request=RequestId(f"t{index}/0/0"),
        session=TrajectoryId(f"t{index}"),
        prompt=PROMPT[index % 20 :],
        max_new_tokens=TOKENS,
        temperature=float(index % 2),
        seed=index,
        stop_ids=[],
        min_version=PolicyVersion(0),
    )


async def truth(job: JobFile, folder: str, count: int) -> list[tuple[list[int], list[float]]]:
    """The same replies from one colocated engine."""
    engine = TorchEngine(msgspec.structs.replace(job.rollout, pace_decode_ms=0.0, pace_prefill_us_per_token=0.0), "cpu")
    await engine.start()
    await engine.load_snapshot(folder, PolicyVersion(0))

    async def one(spec: RequestSpec) -> tuple[list[int], list[float]]:
        asked = GenerateSpec(
            request=spec.request,
            attempt=1,
            prompt=spec.prompt,
            prefix=[],
            max_new_tokens=spec.max_new_tokens,
            temperature=spec.temperature,
            seed=spec.seed,
            stop_ids=[],
        )
        chunks = [chunk async for chunk in engine.generate(asked)]
        return [t for chunk in chunks for t in chunk.tokens], [p for chunk in chunks for p in chunk.logprobs]

    found = await asyncio.gather(*(one(request(index)) for index in range(count)))
    await engine.stop()
    return list(found)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(folder=tmp_path))
    made = Cluster(jobfile.load(path), path)
    async with AsyncExitStack() as stack:
        await made.start(stack)
        yield made


async def test_kills_on_either_side_and_a_change_of_roles(cluster: Cluster) -> None:
    """DESIGN 7, 11.4: whoever dies, the reply is the colocated one, and no token that arrived is made again."""
    replies = [asyncio.create_task(cluster.reply(index)) for index in range(16)]
    states = cluster.edge._running
    await until(lambda: any(each.state.assignment is not None for each in states.values()))
    assert all(held.prefill_endpoint and held.room >= 0 for each in states.values() if (held := each.state.assignment))
    # A prefill worker dies with hand-overs under way.
    await until(lambda: sum(len(each.state.tokens) > 0 for each in states.values()) >= 3)
    unbegun = {name for name, each in states.items() if not each.state.tokens}
    assert unbegun
    await cluster.kill("n1-w0")
    await cluster.move(["n1-w0"], Move.LOSE)
    # A decode worker dies with replies half made.
    await until(lambda: any(5 < len(each.state.tokens) < 40 and _on(each, "n1-w2") for each in states.values()))
    await cluster.kill("n1-w2")
    await cluster.move(["n1-w2"], Move.LOSE)
    await until(lambda: any(10 < len(each.state.tokens) < 30 and _on(each, "n1-w3") for each in states.values()))
    # The others become colocated: drained first, in the same processes.
    left = ("n1-w1", "n1-w3")
    await cluster.move(left, Move.SWITCH)
    for slot in left:
        await cluster.say(Drain(worker=WorkerId(slot), incarnation=Incarnation(1), role_generation=RoleGeneration(2)))
    await cluster.facts(WorkerDrained, 2)
    await cluster.set_roles(dict.fromkeys(left, Role.COLOCATED), 3)
    await cluster.move(left, Move.ADMIT, role=Role.COLOCATED, generation=RoleGeneration(3))
    done = await asyncio.gather(*replies)
    # Replies are the colocated engine's, whoever made them.
    expected = await truth(cluster.job, cluster.snapshot.uri, len(done))
    for reply, (tokens, logprobs) in zip(done, expected, strict=True):
        assert reply.tokens == tokens
        assert reply.logprobs == pytest.approx(logprobs, abs=1e-4)
    causes = {cut.cause for cut in cluster.interruptions}
    assert {"interrupted", "worker_gone"} <= causes
    assert any(cut.received for cut in cluster.interruptions)
    # Both sides of each attempt agree on where it began; only decode and colocated workers log any.
    logged = cluster.logged()
    assert not {entry.worker for entry in logged if entry.attempt == 1} & {"n1-w0", "n1-w1"}
    report = check(
        Expected(batch_trajectories=16, group_size=16, staleness=1),
        journal=[Journalled(seq + 1, record) for seq, record in enumerate(records(cluster, done))],
        attempts=logged,
        ends=(),
        batches=(),
        steps=(),
    )
    assert [each for each in report.violations if each.rule != "unended"] == []
    assert (report.regenerated, report.duplicated) == (0, 0)
    assert report.delivered == 16 * TOKENS


def _on(running: Any, worker: str) -> bool:
    return running.state.assignment is not None and running.state.assignment.worker == worker


def records(cluster: Cluster, done: list[Reply]) -> list[RequestInterrupted | TurnFinished]:
    """What an agent would have journalled."""
    cuts = [
        RequestInterrupted(
            trajectory=TrajectoryId(cut.request.split("/")[0]),
            request=cut.request,
            attempt=cut.attempt,
            retry=0,
            worker=cut.worker,
            prefix_len=cut.prefix_len,
            received=cut.received,
            cause=cut.cause,
        )
        for cut in cluster.interruptions
    ]
    turns = [
        TurnFinished(
            trajectory=request(index).session,
            group=GroupId("g"),
            batch=0,
            retry=0,
            turn=0,
            request=request(index).request,
            attempts=reply.attempts,
            prompt_new=request(index).prompt,
            reply=reply.tokens,
            logprobs=reply.logprobs,
            spans=reply.spans,
            finish=reply.finish,
            action="",
            env_s=0.0,
            wall_s=0.0,
            worker=reply.worker,
        )
        for index, reply in enumerate(done)
    ]
    return [*cuts, *turns]
