"""The wall clock, in one place: shells take it as an argument, so that tests pass their own."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Unix time in milliseconds."""


def now_ms() -> int:
    """Unix time in milliseconds, now."""
    return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that moves only when told to; for tests."""

    def __init__(self, at_ms: int = 1_000_000) -> None:
        self.at_ms = at_ms

    def __call__(self) -> int:
        return self.at_ms

    def advance(self, ms: int) -> None:
        """Move forward by `ms`."""
        assert ms >= 0, f"a clock does not go back ({ms} ms)"
        self.at_ms += ms
