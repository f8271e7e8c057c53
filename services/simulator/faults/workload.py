"""What the simulated agents work on: errands of a few turns, whose length and replies follow from their seed alone.

A reply's tokens follow from the request's seed too (`token_of`), so that a resumed reply can be told from a wrong one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import ClassVar, Final

from services.environments.base import StepResult

VOCABULARY: Final = 1000
EOS: Final = 0
MOST_TURNS: Final = 3
REPLY_TOKENS: Final = (4, 20)
"""Shortest and longest reply, its end included."""
STEP_S: Final = (0.005, 0.15)
"""Shortest and longest step of the environment."""


def mixed(*parts: object) -> int:
    """A number that depends on all parts and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


def reply_length(seed: int) -> int:
    """Tokens of the reply that this request's seed stands for."""
    return REPLY_TOKENS[0] + mixed("length", seed) % (REPLY_TOKENS[1] - REPLY_TOKENS[0] + 1)


def token_of(seed: int, index: int) -> int:
    """Token `index` of that reply; its last one ends it."""
    if index == reply_length(seed) - 1:
        return EOS
    return 1 + (seed + index * 7919) % (VOCABULARY - 1)


ACCIDENTS: Final = 40
"""One step in so many fails its episode; another sample may get through."""


class Errand:
    """One episode: 1 to `MOST_TURNS` turns. The reward is a matter of the sample, so that groups have variance."""

    replayable: ClassVar[bool] = True

    def __init__(self) -> None:
        self.sample_seed = 0
        self._task = 0
        self._turn = 0

    async def reset(self, task_seed: int) -> str:
        """The first observation."""
        self._task, self._turn = task_seed, 0
        return self._observation()

    async def step(self, action: str) -> StepResult:
        """Act, which takes a while."""
        shortest, longest = STEP_S
        await asyncio.sleep(shortest + (longest - shortest) * (mixed(self._task, self._turn, action) % 100) / 100)
        self._turn += 1
        if mixed("accident", self.sample_seed, self._turn) % ACCIDENTS == 0:
            raise RuntimeError("the environment has had an accident")
        if self._turn > mixed("turns", self._task) % MOST_TURNS:
            return StepResult(observation="", reward=float(mixed(self.sample_seed) % 2), done=True)
        return StepResult(observation=self._observation())

    async def close(self) -> None:
        """Nothing to give back."""

    def _observation(self) -> str:
        return " ".join(str(1 + mixed(self._task, self._turn, word) % (VOCABULARY - 1)) for word in range(4))


class Numerals:
    """A token a number."""

    def __init__(self) -> None:
        self.eos_id = EOS
        self.vocab_size = VOCABULARY

    def encode(self, text: str) -> list[int]:
        """Ids of the numbers in a text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers, with a space between."""
        return " ".join(map(str, ids))
