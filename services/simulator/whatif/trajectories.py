"""Recorded trajectories as the numbers that a simulated episode needs. Pure.

Whole trajectories are resampled, so that turn counts, lengths and delays stay correlated. Which one an episode plays follows
from its task's seeds alone, exactly as in `services.environments.replay`: every policy sees the same episodes.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from messages.agent import RolloutTask
from services.environments.workload import Trajectory, Workload


class Turn(NamedTuple):
    """A request: it continues a context of `context` tokens, of which `new` came since the last reply, by `reply` tokens."""

    context: int
    new: int
    reply: int
    env_s: float


class Plan(NamedTuple):
    """What an episode does. `truncated`: its context reached the limit, so the recorded reward was not earned."""

    turns: tuple[Turn, ...]
    reward: float
    truncated: bool

    @property
    def tokens(self) -> int:
        """Of the finished trajectory: what training sees."""
        return self.turns[-1].context + self.turns[-1].reply


class Episodes:
    """The plans of a workload, cut at `max_context_tokens`."""

    def __init__(self, workload: Workload, max_context_tokens: int) -> None:
        self.plans = [plan_of(each, workload.delay_share, max_context_tokens) for each in workload.trajectories]

    def of(self, task: RolloutTask) -> Plan:
        """The trajectory that a task plays."""
        digest = hashlib.blake2b(f"{task.task_seed}/{task.sample_seed}".encode(), digest_size=8).digest()
        return self.plans[int.from_bytes(digest, "big") % len(self.plans)]


def plan_of(trajectory: Trajectory, delay_share: float, limit: int) -> Plan:
    """Contexts only grow, as in `replay`: where the recorded one shrank, this one catches up later."""
    turns: list[Turn] = []
    context = 0
    for recorded in trajectory.turns:
        new = max(1, recorded.prompt_tokens - context)
        if context + new >= limit:
            break
        context += new
        reply = max(1, recorded.completion_tokens)
        cut = min(reply, limit - context)
        turns.append(Turn(context, new, cut, recorded.env_time_s * delay_share))
        context += cut
        if cut < reply:
            break
    if not turns:  # the first prompt alone is too long: one token of it is answered
        turns.append(Turn(limit - 1, limit - 1, 1, 0.0))
    truncated = len(turns) < len(trajectory.turns) or turns[-1].context + turns[-1].reply >= limit
    return Plan(tuple(turns), 0.0 if truncated else trajectory.reward, truncated)
