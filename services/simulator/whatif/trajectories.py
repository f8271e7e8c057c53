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
    rewritten: int = 0  # times the history was rewritten before it: no KV cache from before the last one is of use


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

    def __init__(self, workload: Workload, max_context_tokens: int, prefix_reuse: float = 1.0) -> None:
        self.plans = [
            rewritten(plan_of(each, workload.delay_share, max_context_tokens), each.name, prefix_reuse)
            for each in workload.trajectories
        ]

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


def rewritten(plan: Plan, name: str, prefix_reuse: float) -> Plan:
    """The plan where, before a share of the turns, the whole history is rendered anew, so that no prefix is reused.

    Which turns follows from the trajectory's name: the same for every policy and seed.
    """
    if prefix_reuse >= 1:
        return plan
    turns: list[Turn] = []
    times = 0
    for index, turn in enumerate(plan.turns):
        digest = hashlib.blake2b(f"{name}/{index}".encode(), digest_size=8).digest()
        times += index > 0 and int.from_bytes(digest, "big") / 2**64 >= prefix_reuse
        turns.append(turn._replace(rewritten=times))
    return plan._replace(turns=tuple(turns))
