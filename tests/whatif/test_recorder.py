"""Recording a workload from a job's journal: what was journalled is what the file gives back."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages.agent import TurnFinished
from messages.envelope import encode
from messages.pipeline_scheduler import TrajectoryCompleted
from messages.subjects import message_id, stream, subject_of
from services.cli import demo
from services.cli.simulate_record import Follow, run
from services.environments.workload import Trajectory, Turn, as_csv, parse
from services.jobfile import ConfigError
from services.runtime.bus import StreamSpec
from services.runtime.bus_memory import MemoryBroker
from services.simulator.whatif.recorder import Recorder

JOB = "j"


def turn(name: str, number: int, new: int, reply: int, env_s: float, retry: int = 0) -> TurnFinished:
    return TurnFinished(
        trajectory=name,
        group="g",
        batch=0,
        retry=retry,
        turn=number,
        request=f"{name}/{number}/{retry}",
        attempts=1,
        prompt_new=[1] * new,
        reply=[2] * reply,
        logprobs=[0.0] * reply,
        spans=(),
        finish="stop",
        action="",
        env_s=env_s,
        wall_s=env_s + 1,
        worker="w",
    )


def end(name: str, seqs: list[int], reward: float, status: str = "completed", retry: int = 0) -> TrajectoryCompleted:
    return TrajectoryCompleted(
        trajectory=name,
        group="g",
        batch=0,
        retry=retry,
        status=status,
        reward=reward,
        turns=len(seqs),
        generated_tokens=0,
        min_version=0,
        max_version=0,
        journal=tuple(seqs),
        env_s=0.0,
        wall_s=0.0,
    )


turns = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 40), st.floats(0, 100).map(lambda value: round(value, 4))),
    min_size=1,
    max_size=6,
)
names = st.text(alphabet='ab/-,"#é1', min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(names, st.tuples(turns, st.floats(-5, 5)), min_size=1, max_size=5), st.randoms())
def test_the_file_gives_back_what_was_journalled(jobs: dict[str, tuple[list, float]], draw: object) -> None:
    """Trajectories interleaved in the journal, each with its context growing by what was added and replied."""
    recorder = Recorder()
    waiting = [(name, index) for name, (each, _) in jobs.items() for index in range(len(each))]
    order = sorted(waiting, key=lambda each: (each[1], draw.random()))  # type: ignore[attr-defined]
    seqs: dict[str, list[int]] = {}
    for seq, (name, index) in enumerate(order, start=1):
        recorder.turn(seq, turn(name, index, *jobs[name][0][index]))
        seqs.setdefault(name, []).append(seq)
    for name, (_, reward) in jobs.items():
        assert recorder.end(end(name, seqs[name], reward))
        assert not recorder.end(end(name, seqs[name], reward))
    read = {each.name: each for each in parse(as_csv(recorder.trajectories)).trajectories}
    assert set(read) == set(jobs)
    for name, (recorded, reward) in jobs.items():
        context = 0
        for found, (new, reply, env_s) in zip(read[name].turns, recorded, strict=True):
            assert found == Turn(context + new, reply, env_s)
            context += new + reply
        assert read[name].reward == reward


def test_failed_tries_are_left_out_and_gone_turns_counted() -> None:
    recorder = Recorder()
    recorder.turn(5, turn("a", 0, 3, 2, 1.0))
    assert not recorder.end(end("a", [5], 0.0, "failed"))
    recorder.turn(7, turn("a", 0, 4, 2, 1.0, retry=1))
    assert recorder.end(end("a", [7], 1.0, "truncated", retry=1))
    assert not recorder.end(end("b", [1, 2], 1.0))
    assert recorder.trajectories == [Trajectory("a", (Turn(4, 2, 1.0),), 1.0)]
    assert (recorder.failed, recorder.incomplete) == (1, 1)


async def test_following_a_live_journal_survives_its_purge() -> None:
    broker = MemoryBroker()
    bus = broker.connect()
    for name, subjects in (("ev", f"pearl.{JOB}.ev.>"), ("journal", f"pearl.{JOB}.journal.*")):
        await bus.ensure_stream(StreamSpec(name=stream(JOB, name), subjects=(subjects,)))

    async def publish(message: TurnFinished | TrajectoryCompleted) -> int:
        return await bus.publish_durable(
            subject_of(JOB, message), encode(message), msg_id=message_id(message) or f"{message}"
        )

    recorder = Recorder()
    follow = Follow(bus, JOB, recorder)
    first = await publish(turn("a", 0, 3, 2, 0.5))
    await follow.look()
    await bus.purge(
        stream(JOB, "journal"), below_seq=first + 1
    )  # not what the pipeline scheduler does so early, but it may
    second = await publish(turn("a", 1, 4, 2, 0.25))
    await publish(end("a", [first, second], 1.0))
    await follow.look()
    await follow.look()
    assert recorder.trajectories == [Trajectory("a", (Turn(3, 2, 0.5), Turn(9, 2, 0.25)), 1.0)]


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    job = Path(demo.__file__).with_name("demo.toml")
    arguments = argparse.Namespace(
        config=str(job), out=str(tmp_path / "no" / "w.csv"), trajectories=1, once=True, json=True
    )
    with pytest.raises(ConfigError, match="--out"):
        run(arguments)
