"""Recorded workloads: reading them, and playing them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.environments.loading import environment_factory, load_tokenizer
from services.environments.replay import Replay, ReplayTokenizer
from services.environments.workload import WorkloadError, load, parse
from services.jobfile import EnvironmentSection, JobFile

HEADER = "traj,turn,prompt_tokens,completion_tokens,env_time_s\n"


def test_the_built_in_workload_is_the_recorded_one():
    workload = load("swebench-mini")
    turns = [turn for trajectory in workload.trajectories for turn in trajectory.turns]
    assert (len(workload.trajectories), len(turns)) == (500, 20163)
    assert sum(turn.completion_tokens for turn in turns) / len(turns) == pytest.approx(276, abs=1)
    finals = [each.turns[-1].prompt_tokens + each.turns[-1].completion_tokens for each in workload.trajectories]
    assert sum(finals) / 500 == pytest.approx(24_866, rel=0.02)
    assert {each.reward for each in workload.trajectories} == {0.0, 1.0}
    assert load("swebench-mini") is workload


def test_oddities_are_forgiven():
    text = (
        "\ufeff# mine\r\n\r\nenv_time_s, Turn,traj,completion_tokens,prompt_tokens,note\r\n"
        "1.5,1,b,3,50,\r\n,0,b,2,40,first\r\n 2 ,0,a,0,7,\r\n"
    )
    b, a = parse(text).trajectories
    assert (b.name, [turn.prompt_tokens for turn in b.turns], [turn.env_time_s for turn in b.turns]) == (
        "b",
        [40, 50],
        [0, 1.5],
    )
    assert a.turns[0].completion_tokens == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1: no column traj"),
        ("traj,turn,prompt_tokens\n", "no column completion_tokens, env_time_s"),
        (HEADER, "line 2: no data"),
        (HEADER + "a,0,5,1,0\na,0,6,1,0\n", "line 3: turn 0 of 'a' is there twice"),
        (HEADER + ",0,5,1,0\n", "line 2: no traj"),
        (HEADER + "a,0,many,1,0\n", "line 2: prompt_tokens 'many' is not a number"),
        (HEADER + "a,0,5,1.5,0\n", "completion_tokens 1.5 is not a whole number"),
        (HEADER + "a,0,0,1,0\n", "prompt_tokens 0 is not between"),
        (HEADER + "a,0,5,-1,0\n", "completion_tokens -1 is not between"),
        (HEADER + "a,0,5,1,nan\n", "env_time_s 'nan' is not finite"),
        (HEADER + "a,0,5,1,-2\n", "env_time_s -2 is not between"),
        (HEADER + "a,0,5\n", "line 2: completion_tokens '' is not a number"),
        (HEADER + 'a,0,"5\n', "line"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(text: str, reason: str):
    with pytest.raises(WorkloadError, match=reason):
        parse(text, "mine.csv")


def test_a_file_that_is_none(tmp_path: Path):
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("none.csv", "cannot be read"), ("binary.csv", "not UTF-8"), ("", "cannot be read")):
        with pytest.raises(WorkloadError, match=reason):
            load(str(tmp_path / name) if name else str(tmp_path))


async def play(environment: Replay, tokenizer: ReplayTokenizer, task_seed: int) -> list[tuple[int, int]]:
    """(context sent, reply length) of each turn."""
    observation = await environment.reset(task_seed)
    context, seen = 0, []
    while True:
        context += len(tokenizer.encode(observation))
        longest = environment.max_new_tokens
        seen.append((context, longest))
        context += longest
        result = await environment.step("x" * longest)
        if result.done:
            return seen
        observation = result.observation


async def test_the_recorded_lengths_are_played(tmp_path: Path):
    file = tmp_path / "mine.csv"
    file.write_text(HEADER + "a,0,100,10,0\na,1,150,20,0\na,2,160,5,0\na,3,400,1,0\n")
    environment = Replay(str(file))
    # Turn 2 was sent less than turn 1 and its reply: ours only grows, and is right again in turn 3.
    assert await play(environment, ReplayTokenizer(), 7) == [(100, 10), (150, 20), (171, 5), (400, 1)]


async def test_it_is_replayable_and_members_of_a_group_differ():
    tokenizer = ReplayTokenizer()

    async def begin(task_seed: int, sample_seed: int) -> str:
        environment = Replay(delay_share=0.0)
        environment.sample_seed = sample_seed
        return await environment.reset(task_seed)

    first, again, other, elsewhere = [await begin(*seeds) for seeds in ((1, 1), (1, 1), (1, 2), (2, 1))]
    assert first == again and first != elsewhere[: len(first)]
    shared = min(len(first), len(other))
    assert first[:shared] == other[:shared] and len(first) != len(other)
    environment = Replay(delay_share=0.0)
    played = await play(environment, tokenizer, 1)
    assert played == await play(Replay(delay_share=0.0), tokenizer, 1) and len(played) >= 13


def test_a_job_plays_it_at_its_time_scale():
    section = EnvironmentSection(
        entry="services.environments.replay:Replay",
        tokenizer="services.environments.replay:ReplayTokenizer",
        options={"workload": "swebench-mini"},
        time_scale=30.0,
    )
    job = JobFile(environment=section)
    environment = environment_factory(job)()
    assert environment._pace == pytest.approx(0.15 / 30)
    tokenizer = load_tokenizer(job)
    assert tokenizer.decode(tokenizer.encode("Aé~")) == "A?~"
