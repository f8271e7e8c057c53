"""The real engine behind both: the built-in agent, and the same agent loop over HTTP, on the same tasks and seeds."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from messages.envelope import encode
from messages.ids import Incarnation, PolicyVersion, Role, RoleGeneration, WorkerId
from messages.rollout_worker import SetRole, UpdateWeights
from messages.subjects import subject_of
from services.agent.config import Config as AgentConfig
from services.agent.episode import Episode
from services.edge.request import RequestEdge
from services.environments.guess_number import GuessNumber
from services.environments.loading import load_tokenizer
from services.jobfile import JobSection
from services.models import initial_model, read_weights
from services.rollout_worker.config import Config as WorkerConfig
from services.rollout_worker.engines import make_engine
from services.rollout_worker.service import RolloutWorker
from services.snapshot import write_snapshot
from tests.gateway_world import World, task_of
from tests.unit.test_gateway_sessions import guess_job, play_by_http

WORKER, FIRST = WorkerId("a-w0"), Incarnation(1)
MEMBERS = 12


async def serve(world: World, folder: Path) -> tuple[asyncio.Task[None], asyncio.Event]:
    """A real worker in the place of the world's: the built-in model on the torch engine."""
    job = world.job
    initial = initial_model(job)
    snapshot = write_snapshot(read_weights(initial), folder / "snapshots", 3, initial)
    config = WorkerConfig.of(job, "a")
    worker = RolloutWorker(
        config, world.broker.connect(), make_engine(job.rollout, "cpu"), WORKER, FIRST, began=time.monotonic()
    )
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    update = UpdateWeights(
        worker=WORKER,
        incarnation=FIRST,
        version=PolicyVersion(3),
        uri=snapshot.uri,
        manifest_sha256=snapshot.manifest_sha256,
    )
    role = SetRole(worker=WORKER, incarnation=FIRST, role=Role.COLOCATED, role_generation=RoleGeneration(1))
    async with asyncio.timeout(60):
        while not worker.state.serving or worker.state.version < 3:
            assert not running.done(), running.exception()
            for message in (update, role):
                await world.bus.publish(subject_of("demo", message), encode(message))
            await asyncio.sleep(0.1)
    return running, stop


async def test_the_same_trajectories_token_for_token_and_log_probability_for_log_probability(tmp_path: Path) -> None:
    job = msgspec.structs.replace(guess_job(), job=JobSection(name="demo", data_dir=str(tmp_path)))
    async with World(job=job) as world:
        await world.fleet.stop()
        running, stop = await serve(world, tmp_path)
        edge = RequestEdge(world.broker.connect(), "demo", "agent", silence_ms=60_000, ask_router=world.fleet.assign)
        await edge.start()
        tasks = [
            task_of(f"b3-g0-m{member}", task_seed=member // 4, sample_seed=100 + member) for member in range(MEMBERS)
        ]
        for task in tasks:
            episode = Episode(
                task,
                bus=world.bus,
                edge=edge,
                make_environment=lambda: GuessNumber(preamble_tokens=2),
                tokenizer=load_tokenizer(job),
                config=AgentConfig.of(job),
                holding=f"built-in-{task.trajectory}",
                resumed=False,
            )
            await episode.run()
            await play_by_http(world, msgspec.structs.replace(task, trajectory=f"{task.trajectory}-http"))
        await edge.stop()
        stop.set()
        await running
        ends = {end.trajectory: end for end in await world.ends()}
        turns = {(turn.trajectory, turn.turn): turn for turn in await world.turns()}
    assert len(ends) == 2 * MEMBERS and {end.status for end in ends.values()} <= {"completed", "truncated"}
    drawn: set[tuple[int, ...]] = set()
    for task in tasks:
        ours, theirs = ends[task.trajectory], ends[f"{task.trajectory}-http"]
        assert (ours.reward, ours.status, ours.turns) == (theirs.reward, theirs.status, theirs.turns)
        for turn in range(ours.turns):
            one, two = turns[task.trajectory, turn], turns[f"{task.trajectory}-http", turn]
            assert (one.prompt_new, one.reply, one.logprobs, one.spans, one.finish, one.action) == (
                two.prompt_new, two.reply, two.logprobs, two.spans, two.finish, two.action,
            )  # fmt: skip
            drawn.add(tuple(one.reply))
    assert len(drawn) > 5, "they differ among themselves"
