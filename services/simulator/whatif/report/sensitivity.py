"""Does the conclusion hold if a constant is wrong? One at a time, each a step lower and a step higher. Pure: the runner is passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from services.simulator.whatif.report import html, plots
from services.simulator.whatif.report.svg import Drawing

STEP: Final = 0.2
"""By how much each constant is changed, as a share of it."""

Change = tuple[str, float]
"""A constant and the factor by which it is multiplied; ("", 1) is the run as it is."""
Judge = Callable[[Sequence[Change]], Sequence[tuple[float, str]]]
"""Of each change: the ratio of the policy to the reference, and the name of the best policy."""


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """A constant, and what becomes of the conclusion with it lower and higher."""

    constant: str
    source: str
    low: float  # the ratio, with the constant times 1 - STEP
    high: float
    best_low: str
    best_high: str


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """All constants of a run. `base`: the ratio of `policy` to `reference` as simulated."""

    policy: str
    reference: str
    base: float
    best: str
    rows: tuple[Changed, ...]
    step: float = STEP

    @property
    def overturned(self) -> tuple[str, ...]:
        """Constants with which another policy is best, or the policy falls behind the reference."""
        return tuple(
            row.constant
            for row in self.rows
            if {row.best_low, row.best_high} != {self.best} or (min(row.low, row.high) < 1) != (self.base < 1)
        )

    def verdict(self) -> str:
        """In words."""
        base = f"{self.policy} makes {self.base:.2f}x {self.reference}"
        if not self.rows:
            return f"{base}; no constant was changed."
        low = min(min(row.low, row.high) for row in self.rows)
        high = max(max(row.low, row.high) for row in self.rows)
        told = f"{base}; with each of {len(self.rows)} constants {self.step:.0%} lower or higher, {low:.2f}x to {high:.2f}x."
        if self.overturned:
            return f"{told} The conclusion changes with: {', '.join(self.overturned)}. Measure these before deciding."
        return f"{told} The conclusion does not change with any of them."

    def drawing(self) -> Drawing:
        """The tornado."""
        rows = [(row.constant, row.low, row.high) for row in self.rows]
        return plots.sensitivity(rows, self.base, f"{self.policy} / {self.reference}")

    def caption(self) -> str:
        """Of the tornado."""
        return f"Simulated. Each constant alone {self.step:.0%} lower (above) and higher (below); the line is the run as it is."

    def table(self) -> str:
        """As HTML."""
        rows: list[html.Row] = [
            (
                row.constant,
                html.num(row.low, ".3f"),
                html.num(row.high, ".3f"),
                html.Cell(row.best_low, kind="" if row.best_low == self.best else "bad"),
                html.Cell(row.best_high, kind="" if row.best_high == self.best else "bad"),
                row.source,
            )
            for row in self.rows
        ]
        ratio = f"{self.policy}/{self.reference}"
        columns = [
            "constant",
            f"{ratio}, lower",
            f"{ratio}, higher",
            "best, lower",
            "best, higher",
            "source of the constant",
        ]
        return html.table(columns, rows, texts=(0, 3, 4, 5))


def run(
    judge: Judge, constants: Sequence[tuple[str, str]], policy: str, reference: str, step: float = STEP
) -> Sensitivity:
    """Judge the run as it is, and each (constant, source) alone lower and higher."""
    changes: list[Change] = [("", 1.0)]
    for constant, _ in constants:
        changes += [(constant, 1 - step), (constant, 1 + step)]
    found = judge(changes)
    assert len(found) == len(changes)
    rows = tuple(
        Changed(constant=constant, source=source, low=low, high=high, best_low=best_low, best_high=best_high)
        for (constant, source), (low, best_low), (high, best_high) in zip(
            constants, found[1::2], found[2::2], strict=True
        )
    )
    base, best = found[0]
    return Sensitivity(policy=policy, reference=reference, base=base, best=best, rows=rows, step=step)
