"""What realised makespans say about the next predictions: a correction for each configuration, with its uncertainty. Pure.

The logarithm of realised over predicted is taken as a sum of four parts, each normal with mean 0: one that all configurations
share (constants that are wrong everywhere), one of the mode, one that is alike for like ratios and sizes, and noise of a
single batch. So a measurement corrects its own configuration most, its neighbours nearly as much, the other mode only by
what both have in common; and the posterior spread says which configuration was never tried. The posterior is that of a Gaussian
process: a linear system of as many equations as there are measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from messages.monitor import Observed

Counts = tuple[int, int, int]

SHARED: Final = 0.12
"""Standard deviations of the parts, as shares of a makespan: the most likely ones for 70 random settings of `pearl simulate selection`
(numbers 5000 to 5069), six batches each; `SHARED` somewhat larger, for constants are wrong by more than those were."""
MODE: Final = 0.01
RATIO: Final = 0.005
NOISE: Final = 0.025
"""Of one batch: other trajectories, stragglers, placement."""
FLOW_NOISE: Final = 0.15
"""Of the time between the ends of two batches that overlap: which of them its last trajectory delays is luck, too."""
RATIO_REACH: Final = 0.7
"""Difference of log(P/D) over which ratios stop being alike."""
SIZE_REACH: Final = 0.7
"""The same for the logarithm of the number of workers."""
FORGET: Final = 0.05
"""Variance, in units of NOISE squared times this, that each newer measurement adds to older ones: the workload drifts."""


REPLAY_NOISE: Final = 0.02
"""Of one replay: which trajectories happen to meet on a worker."""
REPLAY_MISSED: Final = 0.015
"""By how much the queueing network's curve over the ratios is bent, beyond a common factor."""
REPLAY_REACH: Final = 0.7
"""Difference of log(P/D) over which that is alike."""


class Correction(msgspec.Struct, frozen=True):
    """The posterior: `weights` of each measurement, and what the spread needs."""

    seen: tuple[Counts, ...] = ()
    weights: tuple[float, ...] = ()
    inverse: tuple[tuple[float, ...], ...] = ()

    def factor(self, counts: Counts) -> float:
        """What to multiply an uncorrected prediction by."""
        near = [_alike(counts, each) for each in self.seen]
        return math.exp(sum(a * w for a, w in zip(near, self.weights, strict=True)))

    def spread(self, counts: Counts) -> float:
        """Standard deviation, as a share, of what this configuration differs from its mode's common error."""
        near = [_alike(counts, each) for each in self.seen]
        explained = sum(
            a * b * c for a, row in zip(near, self.inverse, strict=True) for b, c in zip(near, row, strict=True)
        )
        return math.sqrt(max(0.0, _alike(counts, counts) - explained))


def correction(observed: Sequence[Observed], *, overlap: bool = False) -> Correction:
    """From measurements, the oldest first. `overlap`: they are of batches that do.

    Those without a prediction count for nothing, nor do those of workers that cannot serve by themselves: a configuration that
    lost its last decode worker says nothing of any that can be chosen.
    """
    noise = FLOW_NOISE if overlap else NOISE
    sound = [
        each
        for each in observed
        if each.predicted_s > 0 and each.realised_s > 0 and _serves((each.prefill, each.decode, each.colocated))
    ]
    if not sound:
        return Correction()
    seen = tuple((each.prefill, each.decode, each.colocated) for each in sound)
    logs = [math.log(each.realised_s / each.predicted_s) for each in sound]
    count = len(sound)
    matrix = [[_alike(a, b) for b in seen] for a in seen]
    for index in range(count):
        matrix[index][index] += noise**2 * (1 + FORGET * (count - 1 - index))
    inverse = _inverse(matrix)
    weights = tuple(sum(row[j] * logs[j] for j in range(count)) for row in inverse)
    return Correction(seen, weights, tuple(tuple(row) for row in inverse))


def smoothed(ratios: Mapping[Counts, float], at: Sequence[Counts]) -> dict[Counts, float]:
    """Replayed over ranked makespans of some ratios, with the replays' luck taken out, for those and for others.

    Neighbouring ratios take nearly equally long; a replay of each adds luck of its own. What is left of the differences is the
    posterior of a Gaussian process around their mean. Without any: 1.
    """
    if not ratios:
        return dict.fromkeys(at, 1.0)
    seen = sorted(ratios)
    logs = [math.log(ratios[counts]) for counts in seen]
    mean = sum(logs) / len(logs)
    matrix = [[_near(a, b) for b in seen] for a in seen]
    for index in range(len(seen)):
        matrix[index][index] += REPLAY_NOISE**2
    inverse = _inverse(matrix)
    weights = [sum(a * (b - mean) for a, b in zip(row, logs, strict=True)) for row in inverse]
    return {
        counts: math.exp(mean + sum(_near(counts, each) * weight for each, weight in zip(seen, weights, strict=True)))
        for counts in at
    }


def _serves(counts: Counts) -> bool:
    prefill, decode, colocated = counts
    return (prefill > 0 and decode > 0) if prefill or decode else colocated > 0


def _near(a: Counts, b: Counts) -> float:
    distance = math.log(a[0] * b[1] / (a[1] * b[0])) / REPLAY_REACH
    return REPLAY_MISSED**2 * math.exp(-distance * distance / 2)


def _alike(a: Counts, b: Counts) -> float:
    """Covariance of two configurations' errors."""
    split_a, split_b = a[0] > 0, b[0] > 0
    if split_a is not split_b:
        return SHARED**2
    distance = (math.log(sum(a) / sum(b)) / SIZE_REACH) ** 2
    if split_a:
        distance += (math.log(a[0] * b[1] / (a[1] * b[0])) / RATIO_REACH) ** 2
    return SHARED**2 + MODE**2 + RATIO**2 * math.exp(-distance / 2)


def _inverse(matrix: list[list[float]]) -> list[list[float]]:
    """Gauss-Jordan; the matrix is positive definite (its diagonal has the noise)."""
    size = len(matrix)
    rows = [[*row, *(1.0 if i == j else 0.0 for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        lead = rows[column][column]
        rows[column] = [value / lead for value in rows[column]]
        for index in range(size):
            factor = rows[index][column]
            if index != column and factor:
                rows[index] = [a - factor * b for a, b in zip(rows[index], rows[column], strict=True)]
    return [row[size:] for row in rows]
