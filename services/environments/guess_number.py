"""Guess a number from "higher" and "lower": the smallest task whose solution needs the observations.

A guess is one token. With 8 numbers and 4 guesses, a policy that does not look at the answers finds at most half of the
numbers; one that halves the range finds them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from services.environments.base import StepResult
from services.jobfile import ConfigError

NUMBERS: Final = 8
GUESSES: Final = 4
WORDS: Final = ("<pad>", "<bos>", "<eos>", "higher", "lower", "correct", "wrong", "invalid")


class GuessNumber:
    """One number between 1 and `numbers`, `guesses` tries. Reward 1 when found, else 0.

    Uninformative actions (no number, or one out of range) cost a guess and are answered "invalid". Raises ConfigError.

    Two options change the shape of the load and not the task: `preamble_tokens` words without meaning follow `<bos>`, and
    an action is `chatter_tokens` words longer, of which only the first is the guess.
    """

    replayable: ClassVar[bool] = True

    def __init__(
        self, numbers: int = NUMBERS, guesses: int = GUESSES, preamble_tokens: int = 0, chatter_tokens: int = 0
    ) -> None:
        if numbers < 2 or guesses < 1:
            raise ConfigError(
                f"environment.options: numbers = {numbers} must be at least 2 and guesses = {guesses} at least 1"
            )
        if min(preamble_tokens, chatter_tokens) < 0:
            raise ConfigError(
                f"environment.options: preamble_tokens = {preamble_tokens} and chatter_tokens = {chatter_tokens} must not "
                "be negative"
            )
        self._numbers = numbers
        self._guesses = guesses
        self._preamble = preamble_tokens
        self._chatter = chatter_tokens
        self._secret = 0
        self._left = 0

    async def reset(self, task_seed: int) -> str:
        """Choose the number: consecutive seeds go through all of them in turn."""
        self._secret = 1 + task_seed % self._numbers
        self._left = self._guesses
        return " ".join(("<bos>", *("<pad>",) * self._preamble))

    async def step(self, action: str) -> StepResult:
        """Judge the first number in the action; with `chatter_tokens`, the first word."""
        assert self._left > 0, "the episode is over"
        self._left -= 1
        words = action.split()[:1] if self._chatter else action.split()
        guess = next((int(word) for word in words if word.isdecimal()), None)
        if guess == self._secret:
            return StepResult(observation="correct", reward=1.0, done=True)
        if self._left == 0:
            return StepResult(observation="wrong", done=True)
        if guess is None or not 1 <= guess <= self._numbers:
            return StepResult(observation="invalid")
        return StepResult(observation="higher" if guess < self._secret else "lower")

    async def close(self) -> None:
        """Nothing to give back."""


class GuessTokenizer:
    """One token a word: `WORDS`, then the numbers from 1. A turn ends at a number, as at `<eos>`; with `chatter_tokens`
    only where `pipeline.max_new_tokens` ends it, so that all turns are equally long. As a chat: what was said, in turn."""

    chat_template: Final = "{% for message in messages %}{{ message.content }} {% endfor %}"

    def __init__(self, numbers: int = NUMBERS, chatter_tokens: int = 0) -> None:
        self._words = (*WORDS, *(str(number) for number in range(1, numbers + 1)))
        self._ids = {word: index for index, word in enumerate(self._words)}
        self.eos_id = self._ids["<eos>"]
        self.vocab_size = len(self._words)
        self.stop_ids = [] if chatter_tokens else [self.eos_id, *range(len(WORDS), self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        """Ids of the words of a text, which must all be known."""
        return [self._ids[word] for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """The words, with a space between. An id outside the vocabulary reads as `<pad>`."""
        return " ".join(self._words[index] if 0 <= index < self.vocab_size else "<pad>" for index in ids)


def blind_reward(options: Mapping[str, object]) -> float:
    """Expected reward of the best policy that does not look at what it is answered.

    Such a policy is a distribution over sequences of guesses. Each number is the secret with probability 1 / numbers,
    and a sequence finds it if it contains it, so the best sequences are those of distinct numbers: guesses / numbers,
    at most 1; mixing sequences gains nothing.
    """
    numbers, guesses = options.get("numbers", NUMBERS), options.get("guesses", GUESSES)
    assert isinstance(numbers, int) and isinstance(guesses, int), f"options {options!r}"
    return min(1.0, guesses / numbers)


def best_reward(options: Mapping[str, object]) -> float:
    """Expected reward of halving the range: g guesses tell 2^g - 1 numbers apart."""
    numbers, guesses = options.get("numbers", NUMBERS), options.get("guesses", GUESSES)
    assert isinstance(numbers, int) and isinstance(guesses, int), f"options {options!r}"
    return min(1.0, (2**guesses - 1) / numbers)
