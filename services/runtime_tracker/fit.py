"""Arithmetic of the runtime tracker: decayed least squares and moving averages. Pure."""

from __future__ import annotations

import msgspec

LEAST_SPREAD = 0.25
"""Variance of the decode batch size below which its slope cannot be told from noise."""


class Line(msgspec.Struct, frozen=True):
    """Weighted sums for fitting `y = a + b x`: sufficient, so that any number of samples costs five numbers."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, weight: float) -> Line:
        """With one more sample of that weight."""
        return Line(
            self.weight + weight,
            self.x + weight * x,
            self.y + weight * y,
            self.xx + weight * x * x,
            self.xy + weight * x * y,
        )

    def decayed(self, share: float) -> Line:
        """With all samples so far counting `share` of what they did."""
        return Line(self.weight * share, self.x * share, self.y * share, self.xx * share, self.xy * share)

    def fit(self, a: float, b: float) -> tuple[float, float]:
        """Least squares (a, b), both at least 0. Where the samples cannot tell the slope, `b` as given; without any, both."""
        if self.weight <= 0:
            return a, b
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x * mean_x
        if spread >= LEAST_SPREAD:
            b = (self.xy / self.weight - mean_x * mean_y) / spread
        b = min(max(b, 0.0), mean_y / mean_x) if mean_x > 0 else 0.0
        return max(mean_y - b * mean_x, 0.0), b


def average(old: float | None, new: float, new_share: float) -> float:
    """Exponential moving average; the first value is taken as it is."""
    return new if old is None else old + new_share * (new - old)
