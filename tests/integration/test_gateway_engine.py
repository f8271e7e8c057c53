"""The real engine behind both: the built-in agent, and the same agent loop over HTTP, on the same tasks and seeds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import openai

from messages.agent import RolloutTask, TurnFinished
from messages.envelope import encode
from messages.ids import Incarnation, PolicyVersion, Role, RoleGeneration, WorkerId
from messages.pipeline_scheduler import TrajectoryCompleted
from messages.rollout_worker import SetRole, UpdateWeights
from messages.subjects import subject_of
from services.agent.config import Config as AgentConfig
from services.agent.episode import Episode
from services.edge.request import RequestEdge
from services.environments.base import Environment, StepResult
from services.environments.byte_tokenizer import ByteTokenizer
from services.environments.guess_number import GuessNumber
from services.environments.loading import load_tokenizer
from services.jobfile import JobFile, JobSection
from services.models import initial_model, read_weights
from services.rollout_worker.config import Config as WorkerConfig
from services.rollout_worker.engines import make_engine
from services.rollout_worker.service import RolloutWorker
from services.snapshot import write_snapshot
from tests.gateway_world import MODEL, World, job_of, task_of
from tests.unit.test_gateway_sessions import guess_job, opened, play_by_http

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


Player = Callable[[World, RolloutTask], Awaitable[None]]
Found = dict[str, tuple[TrajectoryCompleted, list[TurnFinished]]]


async def played(job: JobFile, folder: Path, tasks: list[RolloutTask], play: Player) -> Found:
    """Play tasks one after another on a new engine: what a prefix cache holds shows in the last bits of log-probabilities."""
    job = msgspec.structs.replace(job, job=JobSection(name="demo", data_dir=str(folder)))
    async with World(job=job) as world:
        await world.cluster.stop()
        running, stop = await serve(world, folder)
        for task in tasks:
            await play(world, task)
        stop.set()
        await running
        ends, turns = await world.ends(), await world.turns()
    return {
        end.trajectory: (end, sorted((t for t in turns if t.trajectory == end.trajectory), key=lambda t: t.turn))
        for end in ends
    }


def built_in(make_environment: Callable[[], Environment]) -> Player:
    """PEARL's own agent."""

    async def play(world: World, task: RolloutTask) -> None:
        name = f"agent-{task.trajectory}"
        edge = RequestEdge(world.broker.connect(), "demo", name, silence_ms=60_000, ask_router=world.cluster.assign)
        await edge.start()
        episode = Episode(
            task,
            bus=world.bus,
            edge=edge,
            make_environment=make_environment,
            tokenizer=load_tokenizer(world.job),
            config=AgentConfig.of(world.job),
            holding=name,
            resumed=False,
        )
        await episode.run()
        await edge.stop()

    return play


async def both_ways(
    job: JobFile,
    folder: Path,
    tasks: list[RolloutTask],
    make_environment: Callable[[], Environment],
    play: Player,
    same_told: Callable[[list[TurnFinished]], bool] = lambda turns: True,
) -> list[list[TurnFinished]]:
    """Play each task by the built-in agent and over HTTP; the turns of each, which are found to be the same. Those are left out
    in which the environments, by the built-in agent's turns, would not say the same."""
    (folder / "agent").mkdir()
    (folder / "http").mkdir()
    ours = await played(job, folder / "agent", tasks, built_in(make_environment))
    theirs = await played(job, folder / "http", tasks, play)
    assert set(ours) == set(theirs) == {task.trajectory for task in tasks}
    compared = [name for name in ours if same_told(ours[name][1])]
    for name in compared:
        (one, turns), (two, others) = ours[name], theirs[name]
        assert one.status in ("completed", "truncated") and len(turns) == one.turns
        assert (one.reward, one.status, one.turns) == (two.reward, two.status, two.turns)
        for turn, other in zip(turns, others, strict=True):
            assert (turn.prompt_new, turn.reply, turn.logprobs, turn.spans, turn.finish, turn.action) == (
                other.prompt_new, other.reply, other.logprobs, other.spans, other.finish, other.action,
            )  # fmt: skip
    return [ours[name][1] for name in compared]


async def test_the_same_trajectories_token_for_token_and_log_probability_for_log_probability(tmp_path: Path) -> None:
    tasks = [task_of(f"b3-g0-m{member}", task_seed=member // 4, sample_seed=100 + member) for member in range(MEMBERS)]
    found = await both_ways(guess_job(), tmp_path, tasks, lambda: GuessNumber(preamble_tokens=2), play_by_http)
    assert len({tuple(turn.reply) for turns in found for turn in turns}) > 5, "they differ among themselves"


class Small:
    """A chat of three turns, whatever is said, by the template as it is after replies that are cut at their length."""

    replayable: ClassVar[bool] = True

    async def reset(self, task_seed: int) -> str:
        self.turns = 0
        return f"<|im_start|>user\nTask {task_seed}<|im_end|>\n<|im_start|>assistant\n"

    async def step(self, action: str) -> StepResult:
        self.turns += 1
        asked = f"<|im_end|>\n<|im_start|>user\nMore {self.turns}<|im_end|>\n<|im_start|>assistant\n"
        return StepResult(observation=asked, reward=float(len(action)), done=self.turns == 3)

    async def close(self) -> None:
        """Nothing to give back."""


async def chat_by_http(world: World, task: RolloutTask) -> None:
    """The same chat with the official client, which is told text and sends it back."""
    session, _ = await opened(world, task=msgspec.to_builtins(task))
    client = openai.AsyncOpenAI(base_url=f"{world.gateway.url}/v1", api_key=session["key"], max_retries=0)
    messages: list[Any] = [{"role": "user", "content": f"Task {task.task_seed}"}]
    reward = 0.0
    for turn in range(1, 4):
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        text = answer.choices[0].message.content or ""
        reward += len(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"More {turn}"}]
    await client.post(f"/sessions/{session['id']}/reward", body={"reward": reward}, cast_to=object)


async def test_the_same_where_text_says_less_than_tokens(tmp_path: Path) -> None:
    """An untrained model's bytes are seldom UTF-8: what its client is told cannot be tokenized back to what was said."""
    job = job_of()
    tasks = [task_of(f"b3-g0-m{member}", task_seed=member // 4, sample_seed=300 + member) for member in range(MEMBERS)]
    found = await both_ways(
        msgspec.structs.replace(job, pipeline=msgspec.structs.replace(job.pipeline, max_new_tokens=16)),
        tmp_path, tasks, Small, chat_by_http,
        lambda turns: all(turn.finish == "length" for turn in turns),
    )  # fmt: skip
    assert len(found) >= MEMBERS / 2
    tokenizer = ByteTokenizer()
    lossy = [turn for turns in found for turn in turns if tokenizer.encode(turn.action) != turn.reply]
    assert len(lossy) > MEMBERS, "the case that this is about"
    assert {len(turns) for turns in found} == {3}
