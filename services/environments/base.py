"""The environment interface: what a user implements, in one file, to train on their own task.

An environment is token-level text in, text out. It must be *replayable* for an episode to resume after its
agent died: `reset` with the same task seed and the same actions must lead to the same observations.
Environments that cannot (say they change the world) set `replayable = False`; their episodes restart.

An environment may have two attributes more. `sample_seed`: set before `reset`, other for each member of a group (which share
the task seed). `max_new_tokens`: the longest reply that the coming turn may have, within `pipeline.max_new_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment answers to an action. `observation` is appended to the context if not `done`."""

    observation: str
    reward: float = 0.0
    done: bool = False
    truncated: bool = False


class Environment(Protocol):
    """One episode. Rewards add up over the episode."""

    replayable: ClassVar[bool]

    async def reset(self, task_seed: int) -> str:
        """Begin the task that this seed stands for; returns the first observation (the initial prompt)."""
        ...

    async def step(self, action: str) -> StepResult:
        """Act. Bad actions are the environment's to judge (a reward, a hint), never an exception."""
        ...

    async def close(self) -> None: ...


class Tokenizer(Protocol):
    """Text to ids and back. `eos_id` ends a turn."""

    eos_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...
