"""Recorded trajectories played through real agents, routers and workers: their turns, context growth, reply lengths and delays.

What is said does not matter, only how long it is: an observation is made-up text of as many tokens as the recorded context
grew by beyond the reply, a character a token; and the reply is asked to be as long as the recorded one. Meant for the
emulated engine, which makes replies of exactly the length that it is asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from typing import ClassVar, Final

from services.environments.base import StepResult
from services.environments.workload import Trajectory, load
from services.jobfile import ConfigError

PRINTABLE: Final = range(32, 127)
"""Ids of the tokenizer's characters; below 128, so that a token is a byte on the wire."""
_TEXT: Final = "".join(random.Random(0).choices([chr(each) for each in PRINTABLE], k=1 << 14))


class Replay:
    """One recorded trajectory. `workload`: a built-in name or a CSV file (services/environments/workload.py).

    Which one follows from the task and the sample seed: members of a group share the first prompt's text, and differ in
    what they do with it. `delay_share` of each recorded delay is waited (by default the workload's own share), `time_scale`
    recorded seconds a second. The reward, at the end, is the recorded one. Raises ConfigError.
    """

    replayable: ClassVar[bool] = True

    def __init__(
        self, workload: str = "swebench-mini", delay_share: float | None = None, time_scale: float = 1.0
    ) -> None:
        if not isinstance(workload, str):  # pyright: ignore[reportUnnecessaryIsInstance] - a job file may hold anything
            raise ConfigError(f"environment.options: workload = {workload!r} must be a name or a path")
        if delay_share is not None and not 0 <= delay_share <= 1e6:
            raise ConfigError(f"environment.options: delay_share = {delay_share} must be at least 0")
        self._workload = load(workload)
        share = self._workload.delay_share if delay_share is None else delay_share
        self._pace = share / time_scale
        self._trajectory: Trajectory = self._workload.trajectories[0]
        self._task_seed = 0
        self._turn = 0
        self._context = 0
        self.sample_seed = 0
        """Of this member of its group; set by the agent before `reset`."""

    @property
    def max_new_tokens(self) -> int:
        """How long the coming reply is."""
        return max(1, self._trajectory.turns[self._turn].completion_tokens)

    async def reset(self, task_seed: int) -> str:
        """Choose the trajectory; its first prompt."""
        self._task_seed = task_seed
        chosen = _seed(task_seed, self.sample_seed) % len(self._workload.trajectories)
        self._trajectory = self._workload.trajectories[chosen]
        self._turn = 0
        self._context = self._trajectory.turns[0].prompt_tokens
        return _text(_seed(task_seed, "prompt"), self._context)

    async def step(self, action: str) -> StepResult:
        """Wait as long as the recorded environment took; whatever the action, what follows is what followed."""
        turn = self._trajectory.turns[self._turn]
        await asyncio.sleep(turn.env_time_s * self._pace)
        self._context += max(1, turn.completion_tokens)
        self._turn += 1
        if self._turn == len(self._trajectory.turns):
            self._turn -= 1  # max_new_tokens stays defined
            return StepResult(observation="", reward=self._trajectory.reward, done=True)
        # Where the recorded context shrank (its agent left something out), ours, which only grows, catches up later.
        new = max(1, self._trajectory.turns[self._turn].prompt_tokens - self._context)
        self._context += new
        return StepResult(observation=_text(_seed(self._task_seed, self.sample_seed, self._turn), new))

    async def close(self) -> None:
        """Nothing to give back."""


class ReplayTokenizer:
    """A printable character a token. The turn-ending id is one that is never made up."""

    eos_id = 127
    vocab_size = 128

    def encode(self, text: str) -> list[int]:
        """A token a character; what is not ASCII counts as "?"."""
        return list(text.encode("ascii", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """The characters; "?" for an id that is none."""
        return "".join(chr(each) if each in PRINTABLE else "?" for each in ids)


def _seed(*parts: object) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _text(seed: int, length: int) -> str:
    """Text of so many characters that begins as no other seed's does."""
    begin = f"{seed:016x}"
    offset = seed % len(_TEXT)
    rest = max(0, length - len(begin))
    repeated = _TEXT[offset:] + _TEXT * (rest // len(_TEXT) + 1)
    return (begin + repeated[:rest])[:length]
