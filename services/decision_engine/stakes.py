"""What a change of configuration costs, and how long it is likely to pay. Pure.

A configuration lasts until the budget changes again. How long that is, and how long a preemptible worker stays, is estimated from the
changes seen so far, each as the mean of an exponential distribution with a prior that a few observations outweigh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

PRIOR_LIFE_S = 600.0
"""Expected time between two changes of the budget, before any was seen: counts as one observation."""
PRIOR_WORKER_LIFE_S = 4 * 3600.0
"""The same of a preemptible worker's stay."""
KEEP = 0.8
"""Weight of what was seen before, for each further change: markets change."""
MARGIN = 0.005
"""A change must win this share in any case: predictions of two configurations differ by that much by chance."""
BORROW_MARGIN = 0.0075
"""A borrow must win this share of a batch beyond what it costs: a batch that it makes longer is worse than a gain that is missed."""
FLOW_MARGIN = 0.02
"""The same where batches overlap: two configurations' predictions, from one sample, differ by 1 % (standard deviation) by chance."""


class Life(msgspec.Struct, frozen=True):
    """How often something ended in how much time: both sums decay together."""

    ends: float = 0.0
    time_s: float = 0.0

    def waited(self, seconds: float) -> Life:
        """So much time passed without an end."""
        return Life(self.ends, self.time_s + max(0.0, seconds))

    def ended(self, count: int = 1) -> Life:
        """So many ended now."""
        return Life(self.ends * KEEP + count, self.time_s * KEEP) if count else self

    def mean_s(self, prior_s: float) -> float:
        """Expected time to the next end."""
        return (self.time_s + prior_s) / (self.ends + 1)


class Stakes(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision weighs against the seconds it may win."""

    horizon_s: float = PRIOR_LIFE_S  # a configuration chosen now serves so long
    role_s: float = 10.0  # a worker that changes its role is away so long
    again_s: float = 0.0  # recomputing every session's KV cache, on all workers together
    worker_life_s: float = PRIOR_WORKER_LIFE_S  # a preemptible worker stays so long
    prepare_s: float = 60.0  # a new worker serves after that
    pause_s: float = 0.0  # for which admission is paused when new workers join
    margin: float = MARGIN

    def switch_s(self, moved: int, workers: int) -> float:
        """Seconds of the whole cluster's work that `moved` workers' change of role costs."""
        return moved / max(1, workers) * (self.role_s + self.again_s)

    def worth(self, share: float, moved: int, workers: int) -> bool:
        """Whether saving this share of the time until the horizon is worth the change."""
        return share > self.margin and share * self.horizon_s > self.switch_s(moved, workers)

    def growth_s(self, share: float, joiners: int) -> float:
        """What preparing `joiners` is expected to win, in seconds: they must all live to serve, and serve as long as they live."""
        rate = joiners / max(self.worker_life_s, 1e-9)
        serving_s = math.exp(-rate * self.prepare_s) / rate if joiners else 0.0
        return share * serving_s - self.pause_s

    def numbers(self) -> dict[str, float]:
        """As a decision record keeps them."""
        return {name: float(getattr(self, name)) for name in self.__struct_fields__}

    @staticmethod
    def of(numbers: Mapping[str, float]) -> Stakes:
        """From a record."""
        return Stakes(**{name: numbers[name] for name in Stakes.__struct_fields__ if name in numbers})
