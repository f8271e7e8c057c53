"""Environments written for verifiers through the gateway, with the real verifiers, in an environment of its own.

verifiers wants other versions of PEARL's libraries, so it is not installed with them. Where `PEARL_VERIFIERS_PYTHON` names an
interpreter that has it, the first test plays with it; else it is skipped. `make verifiers-test` makes the one and runs the other.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from messages.rollout_worker import Generate
from services.environments.byte_tokenizer import ByteTokenizer
from services.harness import verifiers_episode
from tests.gateway_world import said
from tests.integration.test_harness_runner import many

PYTHON = os.environ.get("PEARL_VERIFIERS_PYTHON", "")
PROGRAM = "{harness}/verifiers_episode.py"
ENV = {"taskset": {"id": "verifiers-sums"}, "agent": {"runtime": {"type": "subprocess"}}}


def answers(message: Generate) -> list[int]:
    """Right the first time, for a sum of two equal numbers; then unsure."""
    text = ByteTokenizer().decode(message.prompt)
    number = int(text.partition("What is ")[2].partition(" ")[0])
    return said("Perhaps not." if "sure?" in text else f"It is {2 * number}.")


@pytest.mark.skipif(not PYTHON, reason="PEARL_VERIFIERS_PYTHON names no interpreter with verifiers")
async def test_an_environment_of_verifiers_is_played_and_rewarded(tmp_path: Path) -> None:
    harness = {
        "command": (PYTHON, PROGRAM),
        "reward": "program",
        "options": {"env": ENV},
        "environment": {"PYTHONPATH": str(Path(__file__).parents[1])},
    }
    async with many(tmp_path, answers, harness) as run:
        await run.give(3)
        ends = await run.ended(3)
        assert [(end.status, end.reward, end.turns) for end in ends] == [("completed", 0.5, 2)] * 3
        turns = await run.world.turns()
        asked = {turn.trajectory: ByteTokenizer().decode(turn.prompt_new) for turn in turns if turn.turn == 0}
        assert [asked[end.trajectory].count(f"What is {seed} + {seed}?") for seed, end in enumerate(ends)] == [1] * 3
        assert {turn.action for turn in turns if turn.turn == 1} == {"Perhaps not."}
        report = await run.world.report()
        assert report.ok, report.violations


def test_a_seed_stands_for_a_task() -> None:
    class Bounded(list[str]):
        bounded = True

    class Endless:
        bounded = False

        def __iter__(self) -> Iterator[int]:
            return itertools.count(10)

    assert [verifiers_episode.task_of(Bounded("abc"), seed, 2) for seed in (0, 2, 4)] == ["a", "c", "b"]
    assert [verifiers_episode.task_of(Endless(), seed, 5) for seed in (0, 4, 12)] == [10, 14, 12]
    with pytest.raises(RuntimeError, match="empty"):
        verifiers_episode.task_of(Bounded(), 1, 2)


@pytest.mark.parametrize(
    ("options", "said_why"), [({}, "has no env"), ({"env": ENV}, "install verifiers and the taskset")]
)
async def test_what_is_missing_is_said(tmp_path: Path, options: dict[str, object], said_why: str, capsys) -> None:
    """With this interpreter, which has no verifiers."""
    harness = {"command": ("{python}", PROGRAM), "reward": "program", "options": options}
    async with many(tmp_path, answers, harness) as run:
        await run.give(1)
        (end,) = await run.ended(1)
        assert end.status == "failed"
    assert said_why in capsys.readouterr().err
