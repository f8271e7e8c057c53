"""What the planner's predictors share: a worker's needs, batches of recorded trajectories, and what a replay finds. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec

Turns = Sequence[tuple[int, int, float, int]]
"""A trajectory: for each turn the new prompt tokens, the tokens of the reply, the environment's seconds after it; and how many turns
it stands for: where there are too many to replay, consecutive ones are taken together (`merged`)."""

SHIFTS = 16
"""Orders in which a batch's trajectories are taken to start, where only how long its last ones last is asked."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs. Seconds, tokens."""

    fixed_s: float  # A: an iteration's, whatever it holds
    kv_s: float  # per context token of the sequences that decode in it
    prefill_s: float  # t_prefill
    transfer_s: float  # KV of a token, from a prefill worker to a decode worker
    capacity: float  # tokens of KV cache
    chunk: int  # prompt tokens computed in one iteration
    max_running: int  # requests decoded together
    tokens_per_request: int = 4096  # the router takes a cached prefix of so many tokens for worth one more request
    fused: bool = True  # an iteration has its fixed part whatever is in it; else only where something decodes
    missed: float = 0.0  # share of turns whose prefix no cache has, though nothing evicted it: the agent rewrote it


class Grow(msgspec.Struct, frozen=True):
    """More workers while the batch runs: `delay_s` after no more than `remaining` trajectories are left."""

    remaining: int
    delay_s: float
    prefill: int
    decode: int
    colocated: int


class Replayed(msgspec.Struct, frozen=True):
    """Seconds from the start: the end of the batch, of each trajectory in order; and when only `Grow.remaining` were left."""

    makespan_s: float
    ends_s: tuple[float, ...]
    left_s: float = 0.0
    computed: float = 0.0  # prompt tokens that were computed


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """How batches follow one another: `size` trajectories in groups that start together, at most `in_flight` at once, and none of
    a batch before all but `ahead - 1` of the earlier ones are trained, in `train_s` seconds each."""

    size: int
    group: int
    in_flight: int
    ahead: int
    train_s: float


class Flowed(msgspec.Struct, frozen=True):
    """Seconds from the start: when each batch's training began, and when each of its trajectories started and ended."""

    begun_s: tuple[float, ...]
    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]

    @property
    def period_s(self) -> float:
        """Seconds a batch."""
        return self.begun_s[-1] / len(self.begun_s) if self.begun_s else 0.0

    @property
    def stay_s(self) -> float:
        """Seconds a trajectory: how fast work goes on, whatever a batch waits for."""
        count = sum(len(batch) for batch in self.ends_s)
        stays = sum(sum(ends) - sum(starts) for starts, ends in zip(self.starts_s, self.ends_s, strict=True))
        return stays / count if count else 0.0

    def left_s(self, remaining: int) -> float:
        """Expected seconds to a batch's end, seen at any moment while so many of its trajectories were left: the longer they were left
        alone, the more likely is one to see them so. Of a batch of which all are left: the whole.

        A batch's last ones are few, and which trajectory starts last is chance: each batch counts with its trajectories in `SHIFTS`
        orders of starting.
        """
        total, weight = 0.0, 0.0
        for starts, ends in zip(self.starts_s, self.ends_s, strict=True):
            stays = [end - start for start, end in zip(starts, ends, strict=True)]
            size = len(stays)
            done = size - min(max(1, remaining), size)
            for shift in range(min(SHIFTS, size)):
                first = shift * size // min(SHIFTS, size)
                turned = stays[first:] + stays[:first]
                made = sorted([start + stay for start, stay in zip(starts, turned, strict=True)])
                from_s, until_s = made[done - 1] if done else made[0], made[done]
                total += (until_s - from_s) * (made[-1] - (from_s + until_s) / 2)
                weight += until_s - from_s
        return (
            total / weight
            if weight > 0
            else max(
                (ends[-1] - starts[0] for starts, ends in zip(self.starts_s, self.ends_s, strict=True)), default=0.0
            )
        )


def merged(turns: Turns, most: float) -> Turns:
    """The same trajectory in turns that stand for up to `most` consecutive ones each, in the mean, all for about as many: the same sums,
    fewer events."""
    spans = math.ceil(len(turns) / most)
    if spans >= len(turns):
        return turns
    edges = [at * len(turns) // spans for at in range(spans + 1)]
    found: list[tuple[int, int, float, int]] = []
    for first, last in pairwise(edges):
        span = turns[first:last]
        found.append(
            (sum(t[0] for t in span), sum(t[1] for t in span), sum(t[2] for t in span), sum(t[3] for t in span))
        )
    return tuple(found)
