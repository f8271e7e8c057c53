"""A task of your own, in one file: add two digits, with a second try.

An environment needs `replayable`, `reset`, `step` and `close`; the reward is whatever `step` says. A tokenizer needs
`eos_id`, `vocab_size`, `encode` and `decode`; with a model of your own, name its folder in the job file instead.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from services.environments.base import StepResult


class AddDigits:
    """`a + b =`, both from 0 to `largest`. Reward 1 for the sum at once, `second_try` for the sum after a hint."""

    # The same task seed and the same actions always lead to the same answers, so an episode whose process died goes on
    # elsewhere from its journal. Say False if that is not so: such an episode is started again.
    replayable = True

    def __init__(self, largest: int = 9, second_try: float = 0.5) -> None:
        self._largest = largest
        self._second_try = second_try

    async def reset(self, task_seed: int) -> str:
        """All members of a group get the same seed, hence the same sum."""
        chance = random.Random(task_seed)
        a, b = chance.randint(0, self._largest), chance.randint(0, self._largest)
        self._sum = a + b
        self._tried = False
        return f"{a} + {b} ="

    async def step(self, action: str) -> StepResult:
        """Compare. Whatever the model says must be judged here: never raise for a bad action."""
        words = action.split()
        if words and words[0] == str(self._sum):
            return StepResult(observation="right", reward=self._second_try if self._tried else 1.0, done=True)
        if self._tried:
            return StepResult(observation="wrong", done=True)
        self._tried = True
        said_less = bool(words) and words[0].isdecimal() and int(words[0]) < self._sum
        return StepResult(observation="more =" if said_less else "less =")

    async def close(self) -> None:
        """Give back what the episode holds (here nothing)."""


class AddTokenizer:
    """One token a word: a few signs, then the numbers a sum can be."""

    SIGNS = ("<pad>", "<eos>", "+", "=", "right", "wrong", "more", "less")

    def __init__(self, largest: int = 9) -> None:
        self._words = (*self.SIGNS, *(str(number) for number in range(2 * largest + 1)))
        self._ids = {word: index for index, word in enumerate(self._words)}
        self.eos_id = self._ids["<eos>"]
        self.vocab_size = len(self._words)

    def encode(self, text: str) -> list[int]:
        """Ids of the words of a text."""
        return [self._ids[word] for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """The words, with a space between."""
        return " ".join(self._words[index] for index in ids)
