"""What an emulated model says, where made-up tokens would be no use: for tests and demonstrations of agents (`emulation.replies`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from services.environments.loading import load_class
from services.jobfile import ConfigError
from services.runtime.foreign import ForeignError, foreign_code


class Replies(Protocol):
    """A model without weights."""

    def reply(self, prompt: Sequence[int], seed: int) -> list[int]:
        """The whole reply to a prompt, its end-of-turn token included; at least one token. It must follow from the arguments: a
        worker that goes on where another stopped asks anew."""
        ...


def load_replies(entry: str) -> Replies | None:
    """What `emulation.replies` names, made without arguments; None for "". Raises ConfigError."""
    if not entry:
        return None
    cls = load_class(entry, "emulation.replies")
    if not hasattr(cls, "reply"):
        raise ConfigError(f"emulation.replies = {entry!r}: has no reply(prompt, seed)")
    try:
        with foreign_code():
            return cast(Replies, cls())
    except ForeignError as error:
        raise ConfigError(f"emulation.replies = {entry!r}: cannot be made: {error}") from error
