"""Gymnasium environments as environments of PEARL's agents, and environments that are only like them."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import pytest

from services.environments.gymnasium_text import GymnasiumText
from services.environments.loading import environment_factory
from services.jobfile import ConfigError, EnvironmentSection, JobFile

LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "observe": "render",
    "actions": ["left", "down", "right", "up"],
    "make": {"render_mode": "ansi", "is_slippery": False},
    "instructions": "Walk to G, not into H.",
}
WAY = ["down", "Down, I think", "left or right? right", "right", "down", "right"]
ENTRY = "services.environments.gymnasium_text:GymnasiumText"


class Echo(gymnasium.Env):
    """Text in, text out: says backwards what it is told; over when it is told to be, cut at five turns."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.turns = 0
        return f"word {self.np_random.integers(1000)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return action[::-1], float(len(action)), action == "stop", self.turns == 5, {}


class Old:
    """As Gym was: `reset` of one value, `step` of four."""

    def __init__(self, most: int = 2) -> None:
        self.most = most

    def reset(self, seed: int) -> str:
        self.seed = seed
        return f"seed {seed}"

    def step(self, action: str) -> tuple[str, int, bool, dict[str, Any]]:
        self.most -= 1
        return action.upper(), 1, self.most == 0, {}


def made(**options: Any) -> GymnasiumText:
    job = JobFile(environment=EnvironmentSection(entry=ENTRY, options=options))
    environment = environment_factory(job)()
    assert isinstance(environment, GymnasiumText)
    return environment


async def test_a_game_is_rendered_and_won_by_names() -> None:
    lake = made(**LAKE)
    first = await lake.reset(7)
    assert first.startswith("Walk to G, not into H.\n\n") and "SFFF" in first.replace("\x1b[41m", "").replace(
        "\x1b[0m", ""
    )
    hint = await lake.step("north by north-west, leftover")
    assert "left, down, right, up" in hint.observation and not hint.done
    results = [await lake.step(reply) for reply in WAY]
    assert [result.done for result in results] == [False] * 5 + [True]
    assert sum(result.reward for result in results) == 1.0 and not results[-1].truncated
    await lake.close()


async def test_an_episode_follows_from_seed_and_actions() -> None:
    slippery = {**LAKE, "make": {"render_mode": "ansi", "is_slippery": True}}
    told: list[list[str]] = []
    for seed in (3, 3, 4):
        lake = made(**slippery)
        told.append([await lake.reset(seed)])
        for _ in range(12):
            result = await lake.step("right")
            told[-1].append(result.observation)
            if result.done:
                break
        await lake.close()
    assert told[0] == told[1] != told[2]
    assert lake.replayable and not made(**slippery, replayable=False).replayable


async def test_discrete_actions_without_names_are_numbers() -> None:
    taxi = made(id="CliffWalking-v1")
    first = await taxi.reset(2**53 + 5)
    assert first == "36"
    assert (await taxi.step("I go 0")).observation == "24"
    for reply in ("4", "-1", "up", "99999999999999999999999"):
        hint = await taxi.step(reply)
        assert "Actions: 0 to 3" in hint.observation and hint.reward == 0.0 and not hint.done


async def test_text_environments_are_given_the_reply_or_a_part_of_it() -> None:
    echo = made(entry=f"{__name__}:Echo", pattern=r"\[(.*?)\]", invalid_reward=-1.0)
    assert (await echo.reset(1)).startswith("word ") and await echo.reset(1) == await echo.reset(1)
    assert (await echo.step("I say [ab c]")).observation == "c ba"
    nothing = await echo.step("I say nothing")
    assert nothing.reward == -1.0 and "No action" in nothing.observation
    ended = await echo.step("[stop]")
    assert ended.done and not ended.truncated
    plain = made(entry=f"{__name__}:Echo")
    await plain.reset(1)
    results = [await plain.step(f" {index} ") for index in range(5)]
    assert results[0].observation == "0" and results[-1].done and results[-1].truncated


async def test_environments_as_gym_had_them() -> None:
    old = made(entry=f"{__name__}:Old", make={"most": 2})
    assert await old.reset(2**31 + 9) == "seed 9"
    assert (await old.step("a")).done is False
    last = await old.step("b")
    assert (last.observation, last.reward, last.done, last.truncated) == ("B", 1.0, True, False)
    await old.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "either id"),
        ({"id": "FrozenLake-v1", "entry": "a:b"}, "either id"),
        ({"id": "NoSuchLake-v1"}, "NoSuchLake"),
        ({"id": "FrozenLake-v1", "observe": "smell"}, "observe"),
        ({"id": "FrozenLake-v1", "pattern": "("}, "pattern"),
        ({"id": "FrozenLake-v1", "pattern": "x"}, "no group"),
        ({"id": "FrozenLake-v1", "modules": ["no_such_module"]}, "no_such_module"),
        ({"entry": "nothing"}, "module:callable"),
        ({"entry": f"{__name__}:Nothing"}, "no callable"),
        ({"id": "FrozenLake-v1", "speed": 2}, "takes no speed"),
    ],
)
def test_options_that_are_wrong_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        made(**options)


def test_without_gymnasium_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"pearl-rl\[gym\]"):
        made(id="FrozenLake-v1")
    made(entry=f"{__name__}:Old")
