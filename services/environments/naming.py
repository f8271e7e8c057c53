"""A task in plain language, small enough for a small language model on a CPU: name one of something, in one word."""

from __future__ import annotations

import random
import re
from typing import Final

from services.environments.base import StepResult

KINDS: Final = {
    "a colour": (
        "red",
        "blue",
        "green",
        "yellow",
        "black",
        "white",
        "orange",
        "purple",
        "brown",
        "pink",
        "grey",
        "gray",
    ),
    "an animal": ("dog", "cat", "horse", "cow", "lion", "tiger", "elephant", "bird", "fish", "bear", "wolf", "mouse"),
    "a fruit": (
        "apple",
        "banana",
        "orange",
        "pear",
        "grape",
        "lemon",
        "mango",
        "peach",
        "cherry",
        "plum",
        "strawberry",
    ),
    "a day of the week": ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
    "a planet": ("mercury", "venus", "earth", "mars", "jupiter", "saturn", "uranus", "neptune"),
}
FORMAT: Final = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
"""How a question is put to a model that was tuned on ChatML."""
_WORDS: Final = re.compile(r"[a-z]+")


class Naming:
    """One question, one turn. Reward 1 for one right word alone, `wordy` if others are around it, else 0."""

    replayable = True

    def __init__(self, wordy: float = 0.3, form: str = FORMAT) -> None:
        self._wordy = wordy
        self._form = form
        self._right: frozenset[str] = frozenset()

    async def reset(self, task_seed: int) -> str:
        """The question of this seed."""
        kind = random.Random(task_seed).choice(sorted(KINDS))
        self._right = frozenset(KINDS[kind])
        return self._form.format(question=f"Name {kind}. Answer with one word.")

    async def step(self, action: str) -> StepResult:
        """Judge the answer; case and punctuation do not count."""
        words = _WORDS.findall(action.lower())
        found = bool(self._right.intersection(words))
        return StepResult(observation="", reward=float(found and (1.0 if len(words) == 1 else self._wordy)), done=True)

    async def close(self) -> None:
        """Nothing is held."""
