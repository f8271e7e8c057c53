"""Waiting for what no event tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LONGEST_S = 60.0
"""A bound for a hang, no measure: what is waited for takes milliseconds where the machine is idle."""
AGAIN_S = 0.002


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition is true of what other threads, processes or tasks do; TimeoutError after LONGEST_S."""
    async with asyncio.timeout(LONGEST_S):
        while not condition():  # noqa: ASYNC110 - whoever has an event waits for that
            await asyncio.sleep(AGAIN_S)
