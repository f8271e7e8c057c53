"""Episodes on the in-memory bus, with a router and a worker that do what a test tells them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from messages.agent import (
    RequestInterrupted,
    TurnFinished,
)
from messages.envelope import decode, encode
from messages.monitor import DeadLetter
from messages.rollout_worker import Generate
from messages.runtime_tracker import RequestFinished
from messages.subjects import message_id, subject_of
from services.agent.config import Config
from services.agent.episode import Episode, SupersededError
from services.agent.service import Agent
from services.edge.request import RequestEdge
from services.environments.base import StepResult
from services.jobfile import AgentSection, EnvironmentSection, JobFile, PipelineSection
from services.runtime.bus_memory import MemoryBroker
from services.runtime.clock import ManualClock
from tests.scripted_cluster import Cluster, Records, Table, create_streams, task_of
from tests.waiting import until

REPLY = 5
"""Tokens of a whole reply, the end of turn included."""


class Talk:
    """Three turns; the reward counts actions that are the ones a whole reply spells."""

    replayable = True
    made: list[Talk] = []

    def __init__(self, turns: int = 3, breaks_at: int = -1, hangs_at: int = -1) -> None:
        self.turns, self.breaks_at, self.hangs_at = turns, breaks_at, hangs_at
        self.actions: list[str] = []
        self.closed = False
        Talk.made.append(self)

    async def reset(self, task_seed: int) -> str:
        return f"2 {task_seed % 5 + 3}"

    async def step(self, action: str) -> StepResult:
        self.actions.append(action)
        turn = len(self.actions)
        if turn - 1 == self.breaks_at:
            raise ZeroDivisionError("the world broke")
        if turn - 1 == self.hangs_at:
            await asyncio.Event().wait()
        return StepResult(
            observation=f"{turn + 1}", reward=float(len(action.split()) == REPLY - 1), done=turn == self.turns
        )

    async def close(self) -> None:
        self.closed = True


class OneWay(Talk):
    """Cannot be replayed."""

    replayable = False


class Limited(Talk):
    """Says how long the coming reply may be, and is told its sample seed."""

    sample_seed = -1

    @property
    def max_new_tokens(self):
        return {0: 2, 1: 10**9, 2: self.turns}[len(self.actions)]


class Numbers:
    """A token is its number."""

    eos_id = 1
    vocab_size = 1000

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(str(index) for index in ids)


def job_of(entry="Talk", **options) -> JobFile:
    return JobFile(
        agent=AgentSection(silence_ms=40, task_ack_wait_ms=400, concurrency=4),
        environment=EnvironmentSection(
            entry=f"{__name__}:{entry}", tokenizer=f"{__name__}:Numbers", options=options, timeout_s=0.2
        ),
        pipeline=PipelineSection(
            batch_trajectories=1, group_size=1, max_turns=8, max_new_tokens=8, max_context_tokens=64
        ),
    )


def patient_job() -> JobFile:
    """In which no silence is ever taken for a worker's end."""
    job = job_of()
    return JobFile(agent=AgentSection(silence_ms=60_000), environment=job.environment, pipeline=job.pipeline)


def true_reply(seed: int) -> list[int]:
    return [100 + (seed + index) % 500 for index in range(REPLY - 1)] + [1]


def true_answer(message: Generate) -> list[int]:
    return true_reply(message.seed)


class World(Records):
    """Broker, cluster, one edge, and what came of them."""

    def __init__(self, *script: str, job: JobFile | None = None) -> None:
        self.job = job or job_of()
        self.broker = MemoryBroker(ManualClock())
        self.bus = self.broker.connect()
        self.cluster = Cluster(self.broker.connect(), true_answer, *script, chunk=1)
        self.table = Table()
        self.edges = 0

    async def __aenter__(self) -> World:
        Talk.made = []
        await create_streams(self.bus)
        await self.cluster.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cluster.stop()

    async def edge(self) -> RequestEdge:
        self.edges += 1
        edge = RequestEdge(self.bus, "demo", f"e{self.edges}", silence_ms=self.job.agent.silence_ms, replica=self.table)
        await edge.start()
        return edge

    def episode(self, edge, task=None, *, resumed=False) -> Episode:
        from services.environments.loading import environment_factory, load_tokenizer

        return Episode(
            task or task_of(),
            bus=self.bus,
            edge=edge,
            make_environment=environment_factory(self.job),
            tokenizer=load_tokenizer(self.job),
            config=Config.of(self.job),
            holding=f"h{self.edges}",
            resumed=resumed,
        )

    async def run(self, task=None, *, resumed=False) -> None:
        edge = await self.edge()
        try:
            await self.episode(edge, task, resumed=resumed).run()
        finally:
            await edge.stop()


async def test_an_episode_is_its_turns_and_one_end():
    async with World() as world:
        telemetry = await world.bus.subscribe("pearl.demo.tel.>")
        await world.run()
        turns, (end,) = await world.turns(), await world.ends()
        assert [turn.turn for turn in turns] == [0, 1, 2]
        assert [turn.prompt_new for turn in turns] == [[2, 7], [2], [3]]
        context = [2, 7]
        for turn, generate in zip(turns, world.cluster.generates, strict=True):
            assert generate.prompt == context
            assert turn.reply == true_reply(generate.seed) and len(turn.logprobs) == REPLY
            assert turn.action == " ".join(str(token) for token in turn.reply[:-1])
            context = [*context, *turn.reply, turn.turn + 2]
        assert (end.status, end.reward, end.turns, end.generated_tokens) == ("completed", 3.0, 3, 3 * REPLY)
        assert (end.journal, end.min_version, end.max_version) == ((1, 2, 3), 0, 0)
        told = [decode(d.data, RequestFinished) async for d in _drain(telemetry)]
        assert [(t.turn, t.generated_tokens, t.new_prompt_tokens) for t in told] == [(0, 5, 2), (1, 5, 1), (2, 5, 1)]
        assert [ask.last_worker for ask in world.cluster.asked] == ["", "a-w0", "a-w0"]
        assert Talk.made[-1].closed
        assert (await world.report()).violations == ()


async def _drain(subscription):
    while (delivery := await subscription.next(0.001)) is not None:
        yield delivery


@pytest.mark.parametrize(
    "incident", ["cut:3", "cut:0", "die:2", "die:0", "garble:2", "garble:0", "lose", "refuse", "not_now"]
)
async def test_an_incident_in_the_middle_changes_nothing_of_the_trajectory(incident):
    async with World() as calm, World("whole", incident) as world:
        await calm.run()
        await world.run()
        assert [turn.reply for turn in await world.turns()] == [turn.reply for turn in await calm.turns()]
        assert (await world.ends())[0].reward == 3.0
        cuts = [e.record for e in await world.journal() if isinstance(e.record, RequestInterrupted)]
        causes = {"cut": "interrupted", "die": "silence", "garble": "gap", "lose": "silence"}
        expected = causes.get(incident.partition(":")[0])
        assert [cut.cause for cut in cuts] == ([expected] if expected else [])
        report = await world.report()
        assert report.violations == () and report.regenerated == 0
        assert report.delivered == 3 * REPLY and report.lost == 0


async def test_a_worker_that_the_table_shows_gone_is_given_up_before_it_is_silent_for_long():
    async with World("die:2", job=patient_job()) as world:

        def gone_and_back() -> None:
            world.table.write(serving=False)
            world.table.write(serving=True)

        world.cluster.on_death = gone_and_back
        await asyncio.wait_for(world.run(), 5)
        cut = next(e.record for e in await world.journal() if isinstance(e.record, RequestInterrupted))
        assert (cut.cause, cut.prefix_len, cut.received) == ("worker_gone", 0, 2)
        assert (await world.report()).violations == ()


async def test_an_attempt_that_ended_by_itself_is_not_given_up_once_more_for_a_table_that_showed_it_gone(
    monkeypatch: pytest.MonkeyPatch,
):
    waits: list = []  # for the grace that such an attempt has, which ends when the test says so
    monkeypatch.setattr("services.edge.request.GONE_GRACE_S", 0)
    async with World("cut:1", "hold:1", job=patient_job()) as world:
        world.cluster.before = asyncio.Event()
        edge = await world.edge()
        give_up = edge._declare_lost
        monkeypatch.setattr(edge, "_declare_lost", waits.append)
        episode = asyncio.create_task(world.episode(edge).run())
        await until(lambda: world.cluster.generates)
        world.table.write(serving=False)
        world.table.write(serving=True)
        await until(lambda: waits)
        world.cluster.before.set()
        await world.cluster.reached.wait()
        give_up(*waits)
        world.cluster.release.set()
        await asyncio.wait_for(episode, 30)
        await edge.stop()
        assert [each.attempt for each in world.cluster.generates[:2]] == [1, 2] and len(world.cluster.generates) == 4
        (cut,) = [e.record for e in await world.journal() if isinstance(e.record, RequestInterrupted)]
        assert cut.cause == "interrupted"
        assert (await world.report()).violations == ()


async def test_a_chunk_that_cannot_be_read_is_not_waited_out_as_silence():
    async with World("garble:2", job=patient_job()) as world:
        edge = await world.edge()
        # Of a kind, a request or a form that is none of ours: counted, and nothing else.
        head = {"kind": "token.chunk/1", "request": "nobody's", "attempt": 1, "worker": "a-w0", "incarnation": 1}
        for nonsense in (
            b"",
            b"{",
            b"\x81",
            msgspec.msgpack.encode(head),
            msgspec.msgpack.encode({**head, "kind": "turn.finished/1"}),
        ):
            await world.bus.publish("pearl.demo.tok.e1", nonsense)
        await asyncio.wait_for(world.episode(edge).run(), 30)
        assert edge.undecodable == 6
        await edge.stop()
        (cut,) = [e.record for e in await world.journal() if isinstance(e.record, RequestInterrupted)]
        assert (cut.cause, cut.prefix_len, cut.received) == ("gap", 0, 2)
        assert [cancel.attempt for cancel in world.cluster.cancels] == [1]
        assert (await world.report()).violations == ()


async def test_many_incidents_of_all_kinds():
    async with World("die:1", "cut:2", "refuse", "not_now", "lose", "cut:1", "whole", "refuse", "cut:4") as world:
        await world.run()
        report = await world.report()
        assert report.violations == () and report.delivered == 3 * REPLY
        assert next(turn.attempts for turn in await world.turns()) == 6


async def test_a_redelivered_task_goes_on_from_the_journal():
    async with World("whole", "whole", "die:3") as world:
        world.cluster.on_death = lambda: doomed.cancel()
        doomed = asyncio.ensure_future(world.run())
        await asyncio.wait([doomed])
        assert doomed.cancelled() and len(await world.turns()) == 2 and await world.ends() == []
        await world.run(resumed=True)
        turns, (end,) = await world.turns(), await world.ends()
        assert [turn.turn for turn in turns] == [0, 1, 2]
        assert (end.reward, end.turns, end.generated_tokens) == (3.0, 3, 15)
        assert len(end.journal) == 3
        assert Talk.made[-1].actions == [turn.action for turn in turns]  # the actions were replayed
        last = world.cluster.generates[-1]
        assert last.prompt == [2, 7, *turns[0].reply, 2, *turns[1].reply, 3] and last.prefix == []
        report = await world.report()
        assert report.violations == () and report.completed == 1


async def test_a_trajectory_that_has_ended_is_not_run_again():
    async with World() as world:
        await world.run()
        asked = len(world.cluster.asked)
        await world.run(resumed=True)
        assert len(world.cluster.asked) == asked and len(await world.ends()) == 1


async def test_a_later_retry_has_records_and_an_end_of_its_own():
    job = job_of(breaks_at=1)
    async with World(job=job) as world:
        await world.run()
        (end,) = await world.ends()
        assert (end.status, end.turns, end.reason) == (
            "failed",
            1,
            "environment failed to step: ZeroDivisionError: the world broke",
        )
        world.job = job_of()
        await world.run(task_of(retry=1))
        _, end = await world.ends()
        assert (end.retry, end.status, end.turns) == (1, "completed", 3)
        assert [(turn.retry, turn.turn) for turn in await world.turns()] == [(0, 0), (1, 0), (1, 1), (1, 2)]
        assert (await world.report()).violations == ()


async def test_two_agents_with_one_trajectory_write_one_record_a_turn():
    async with World() as world:
        first, second = await world.edge(), await world.edge()
        one, two = world.episode(first), world.episode(second, resumed=True)
        two._holding = "other"
        results = await asyncio.gather(one.run(), two.run(), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["NoneType", "SupersededError"]
        assert [turn.turn for turn in await world.turns()] == [0, 1, 2]
        assert len({turn.request.rpartition("/")[2] for turn in await world.turns()}) == 1
        assert len(await world.ends()) == 1
        assert (await world.report()).violations == ()
        for edge in (first, second):
            await edge.stop()


async def test_an_agent_thought_dead_cannot_write_after_its_successor():
    async with World() as world:
        world.cluster.before = asyncio.Event()
        edge = await world.edge()
        zombie = asyncio.ensure_future(world.episode(edge).run())
        await until(lambda: world.cluster.generates)
        record = _turn(0)
        await world.bus.publish_durable(subject_of("demo", record), encode(record), msg_id=f"{message_id(record)}:x")
        world.cluster.before.set()
        with pytest.raises(SupersededError):
            await zombie
        assert len(await world.turns()) == 1 and await world.ends() == []
        await edge.stop()


def _turn(turn: int, **changes) -> TurnFinished:
    fields = {
        "trajectory": "b0-g0-m0", "group": "b0-g0", "batch": 0, "retry": 0, "turn": turn, "request": f"b0-g0-m0/{turn}/x",
        "attempts": 1, "prompt_new": [2, 7], "reply": [5, 1], "logprobs": [0.0, 0.0], "spans": (), "finish": "stop",
        "action": "5", "env_s": 0.0, "wall_s": 0.0, "worker": "a-w0",
    }  # fmt: skip
    return TurnFinished(**{**fields, **changes})


async def test_an_environment_that_cannot_be_replayed_starts_over_as_a_retry():
    async with World(job=job_of("OneWay")) as world:
        record = _turn(0)
        await world.bus.publish_durable(subject_of("demo", record), encode(record), msg_id="x")
        await world.run(resumed=True)
        (end,) = await world.ends()
        assert end.status == "failed" and "cannot be replayed" in end.reason and end.journal == ()


async def test_an_environment_that_answers_otherwise_on_replay_fails_the_try():
    async with World() as world:
        record = _turn(0, prompt_new=[9, 9])
        await world.bus.publish_durable(subject_of("demo", record), encode(record), msg_id="x")
        await world.run(resumed=True)
        (end,) = await world.ends()
        assert end.status == "failed" and "replayable = False" in end.reason


async def test_an_environment_that_hangs_fails_its_episode():
    async with World(job=job_of(hangs_at=0)) as world:
        await world.run()
        (end,) = await world.ends()
        assert end.status == "failed" and "environment.timeout_s = 0.2" in end.reason


async def test_a_context_that_is_full_truncates():
    job = job_of()
    pipeline = PipelineSection(batch_trajectories=1, group_size=1, max_new_tokens=8, max_context_tokens=8)
    async with World(job=JobFile(agent=job.agent, environment=job.environment, pipeline=pipeline)) as world:
        await world.run()
        (end,) = await world.ends()
        assert (end.status, end.reason, end.turns) == ("truncated", "context", 1)


async def test_too_many_turns_truncate():
    job = job_of(turns=100)
    pipeline = PipelineSection(batch_trajectories=1, group_size=1, max_turns=2, max_new_tokens=8)
    async with World(job=JobFile(agent=job.agent, environment=job.environment, pipeline=pipeline)) as world:
        await world.run()
        (end,) = await world.ends()
        assert (end.status, end.reason, end.turns) == ("truncated", "turns", 2)


async def test_an_environment_limits_replies_and_learns_its_sample_seed():
    async with World(job=job_of("Limited")) as world:
        await world.run()
        (end,) = await world.ends()
        assert (end.status, end.turns) == ("completed", 3)
        assert [each.max_new_tokens for each in world.cluster.generates] == [2, 8, 3]  # never beyond the job's 8
        assert Talk.made[-1].sample_seed == task_of().sample_seed


async def test_a_limit_that_makes_no_sense_fails_the_episode():
    async with World(job=job_of("Limited", turns=0)) as world:
        await world.run()
        (end,) = await world.ends()
        assert end.status == "failed" and "max_new_tokens = 0" in end.reason


# --- the process


async def test_an_agent_runs_tasks_side_by_side_and_acknowledges_them_at_their_end():
    async with World("cut:2", "refuse", "die:1") as world:
        stop = asyncio.Event()
        agent = Agent(world.job, world.bus, None, edge_name="e")
        running = asyncio.ensure_future(agent.run(stop))
        for member in range(9):
            task = task_of(f"b0-g0-m{member}")
            await world.bus.publish_durable(subject_of("demo", task), encode(task), msg_id=message_id(task))
        tasks = world.broker.streams["demo_TASKS"].messages
        await until(lambda: not tasks)
        stop.set()
        await running
        assert len(await world.ends()) == 9 and len(await world.turns()) == 27
        report = await world.report()
        assert report.violations == () and (report.completed, report.lost_with_edge) == (9, 0)


async def test_a_stopping_agent_gives_its_tasks_to_the_next():
    async with World() as world:
        world.cluster.before = asyncio.Event()
        stop = asyncio.Event()
        first = asyncio.ensure_future(Agent(world.job, world.bus, None, edge_name="e").run(stop))
        task = task_of()
        await world.bus.publish_durable(subject_of("demo", task), encode(task), msg_id=message_id(task))
        await until(lambda: world.cluster.generates)
        stop.set()
        await first
        world.cluster.before.set()
        await until(lambda: world.cluster.cancels)
        stop = asyncio.Event()
        second = asyncio.ensure_future(Agent(world.job, world.bus, None, edge_name="f").run(stop))
        await until(lambda: not world.broker.streams["demo_TASKS"].messages)
        stop.set()
        await second
        assert len(await world.ends()) == 1
        report = await world.report()
        assert report.violations == () and report.lost_with_edge == REPLY  # made for the first agent, which was gone


async def test_a_task_that_cannot_be_read_is_put_aside():
    async with World() as world:
        stop = asyncio.Event()
        running = asyncio.ensure_future(Agent(world.job, world.bus, None, edge_name="e").run(stop))
        await world.bus.publish_durable("pearl.demo.task.0", b"not a task", msg_id="x")
        await until(lambda: not world.broker.streams["demo_TASKS"].messages)
        stop.set()
        await running
        letters = [decode(d.data, DeadLetter) async for d in world.bus.read("demo_DEAD", "pearl.demo.dead.*")]
        assert [(letter.receiver, letter.size) for letter in letters] == [("agent", 10)]
