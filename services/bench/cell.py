"""A server with a job's users and streams, for benchmarks; and, in this process, a worker, a router and an edge on it.

What runs in this process shares its event loop, and so does each benchmark's reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import psutil

from messages.envelope import Message, encode
from messages.ids import Activity, Incarnation, PolicyVersion, Role, RoleGeneration, WorkerId, Zone
from messages.rollout_worker import SetRole, UpdateWeights
from messages.subjects import subject_of
from pearl_state.model import RoleTable
from services import jobfile
from services.connect import connect
from services.edge.request import RequestEdge
from services.jobfile import JobFile
from services.models import initial_model, read_weights
from services.nats_server.process import EmbeddedServer
from services.orchestrator.config import Config as OrchestratorConfig
from services.orchestrator.core import OrchestratorCore
from services.rollout_worker.config import Config as WorkerConfig
from services.rollout_worker.engines import make_engine
from services.rollout_worker.engines.base import Engine
from services.rollout_worker.service import RolloutWorker
from services.router.config import Config as RouterConfig
from services.router.service import Router
from services.runtime.bus import Bus
from services.snapshot import write_snapshot

JOB = """
[job]
name = "bench"
data_dir = {data_dir}
[model]
device = "cpu"
[[nodes]]
name = "n"
zone = "reserved"
gpus = {workers}
[[nodes]]
name = "t"
zone = "training"
gpus = 1
[rollout]
heartbeat_ms = 250
max_running = 64
[pipeline]
train_steps = 1000000
"""
WORKER = WorkerId("n-w0")
READY_S = 60.0
POLL_S = 0.005


def job_in(folder: Path, workers: int) -> tuple[JobFile, Path]:
    """The benchmarks' job file, written into `folder`."""
    path = folder / "job.toml"
    path.write_text(JOB.format(data_dir=msgspec.json.encode(str(folder)).decode(), workers=workers), encoding="utf-8")
    return jobfile.load(path), path


def serving_table(job: JobFile, epoch: int = 1) -> RoleTable:
    """A table in which every reserved worker serves, colocated, at version 0."""
    table = OrchestratorCore(OrchestratorConfig.of(job)).initial()
    rows = tuple(
        msgspec.structs.replace(
            row,
            role=Role.COLOCATED,
            activity=Activity.ACTIVE,
            incarnation=Incarnation(1),
            role_generation=RoleGeneration(1),
            version=PolicyVersion(0),
        )
        if row.zone is Zone.RESERVED
        else row
        for row in table.rows
    )
    return msgspec.structs.replace(table, rows=rows, epoch=epoch)


@contextlib.asynccontextmanager
async def server(job: JobFile) -> AsyncGenerator[psutil.Process]:
    """The job's embedded server with its streams; its process, to ask for CPU time."""
    embedded = EmbeddedServer(job)
    try:
        running = await embedded.start()
        await embedded.prepare()
        yield psutil.Process(running.pid)
    finally:
        await embedded.stop()


@contextlib.asynccontextmanager
async def bus_of(job: JobFile, service: str) -> AsyncGenerator[Bus]:
    """A connection as the user of a service."""
    bus = await connect(job, service)
    try:
        yield bus
    finally:
        await bus.close()


def cpu_s(server_process: psutil.Process) -> float:
    """CPU seconds so far, of this process with all its threads and of the server."""
    times = server_process.cpu_times()
    return time.process_time() + times.user + times.system


class Cell(msgspec.Struct, frozen=True):
    """One worker's engine, and the edge that reaches it over the bus."""

    engine: Engine
    edge: RequestEdge
    server: psutil.Process


@contextlib.asynccontextmanager
async def cell(job: JobFile) -> AsyncGenerator[Cell]:
    """Server, worker `n-w0` at version 0 of the built-in model, router and edge."""
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        process = await stack.enter_async_context(server(job))
        buses = [
            await stack.enter_async_context(bus_of(job, user))
            for user in ("rollout_worker", "router", "agent", "cluster_rebuilder")
        ]
        config = WorkerConfig.of(job, "n")
        engine = make_engine(config.rollout, config.device)
        worker = RolloutWorker(
            config, buses[0], engine, WORKER, Incarnation(1), began=asyncio.get_running_loop().time()
        )
        router = Router(RouterConfig.of(job), buses[1], job.job.name)
        router.on_table(serving_table(job))
        edge = RequestEdge(buses[2], job.job.name, "bench", silence_ms=job.agent.silence_ms)
        tasks = [asyncio.create_task(worker.run(stop)), asyncio.create_task(router.run(stop))]
        await edge.start()
        try:
            await _make_serving(job, worker, buses[3], tasks)
            yield Cell(engine, edge, process)
        finally:
            stop.set()
            await edge.stop()
            await asyncio.gather(*tasks)


async def _make_serving(job: JobFile, worker: RolloutWorker, commands: Bus, tasks: list[asyncio.Task[None]]) -> None:
    folder = await asyncio.to_thread(initial_model, job)
    state = await asyncio.to_thread(read_weights, folder)
    snapshot = await asyncio.to_thread(write_snapshot, state, job.run_dir / "snapshots", 0, folder)
    update = UpdateWeights(
        worker=WORKER,
        incarnation=Incarnation(1),
        version=PolicyVersion(0),
        uri=snapshot.uri,
        manifest_sha256=snapshot.manifest_sha256,
    )
    role = SetRole(worker=WORKER, incarnation=Incarnation(1), role=Role.COLOCATED, role_generation=RoleGeneration(1))

    async def say(message: Message) -> None:
        await commands.publish(subject_of(job.job.name, message), encode(message))

    async with asyncio.timeout(READY_S):
        for message in (update, role):
            while worker.state.version < 0 if message is update else not worker.state.serving:
                for task in tasks:
                    if task.done():
                        task.result()
                await say(message)
                await asyncio.sleep(20 * POLL_S)
