"""What a regenerated figure consists of: claims (the paper's number, ours, whether they agree), drawings, tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from services.simulator.whatif.report.html import Row
from services.simulator.whatif.report.summary import Interval
from services.simulator.whatif.report.svg import Drawing

AGREES: Final = "agrees"
SAME_SIDE: Final = "same direction"
DISAGREES: Final = "disagrees"
NOT_SIMULATED: Final = "not simulated"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A number of the paper and the simulation's. `unit`: "%" is a gain (neutral 0), "x" a ratio (neutral 1), else a value.

    A range is given by `paper_low` < `paper_high`. `within` is by how much, in the unit, ours may lie outside and still agree.
    """

    text: str
    section: str
    paper_low: float
    paper_high: float
    within: float
    unit: str
    simulated: Interval | None
    note: str = ""

    @property
    def paper(self) -> str:
        """The paper's number as it is told."""
        if self.paper_low == self.paper_high:
            return shown(self.paper_low, self.unit)
        return f"{shown(self.paper_low, '')} to {shown(self.paper_high, self.unit)}"

    @property
    def ours(self) -> str:
        """The simulation's, with its 95 % interval if there are several seeds."""
        if self.simulated is None:
            return "-"
        spread = f" ± {abs(self.simulated.half):.2g}" if self.simulated.count > 1 else ""
        return shown(self.simulated.mean, self.unit) + spread

    @property
    def verdict(self) -> str:
        """Agreement by the rule above; "same direction": the gain's or ratio's side of its neutral value is right, its size is not."""
        if self.simulated is None:
            return NOT_SIMULATED
        value = self.simulated.mean
        if self.paper_low - self.within <= value <= self.paper_high + self.within:
            return AGREES
        neutral = {"%": 0.0, "x": 1.0}.get(self.unit)
        if neutral is None:
            return DISAGREES
        sides = {each > neutral for each in (self.paper_low, self.paper_high)}
        return SAME_SIDE if sides == {value > neutral} else DISAGREES


def claim(
    text: str,
    section: str,
    paper: float | tuple[float, float],
    unit: str,
    simulated: Interval | float | None,
    within: float,
    note: str = "",
) -> Claim:
    """A claim in short."""
    low, high = paper if isinstance(paper, tuple) else (paper, paper)
    ours = Interval(simulated, simulated, simulated, 1) if isinstance(simulated, int | float) else simulated
    return Claim(
        text=text,
        section=section,
        paper_low=low,
        paper_high=high,
        within=within,
        unit=unit,
        simulated=ours,
        note=note,
    )


def shown(value: float, unit: str) -> str:
    """A number with its unit: +12.3 %, 2.17x, 163.8 s."""
    if unit == "%":
        return f"{value:+.1f} %"
    if unit == "x":
        return f"{value:.2f}x"
    return f"{value:.4g}{' ' + unit if unit else ''}"


class Sheet(msgspec.Struct, frozen=True):
    """A table: `texts` are the columns that hold text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    texts: tuple[int, ...] = (0,)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure or table of the paper, regenerated. `differences`: why ours is not the paper's, measured where it can be."""

    name: str  # "figure2a"
    title: str
    section: str
    setting: str  # what was simulated
    claims: tuple[Claim, ...] = ()
    differences: tuple[str, ...] = ()
    sheets: tuple[Sheet, ...] = ()
    drawings: tuple[tuple[str, Drawing, str], ...] = ()  # (name, drawing, caption)

    def as_json(self) -> dict[str, object]:
        """Plain data, without the drawings."""
        return {
            "title": self.title,
            "section": self.section,
            "setting": self.setting,
            "claims": [
                {
                    "text": each.text,
                    "section": each.section,
                    "paper": [each.paper_low, each.paper_high],
                    "simulated": None if each.simulated is None else each.simulated.mean,
                    "interval": None
                    if each.simulated is None or each.simulated.count < 2
                    else [each.simulated.low, each.simulated.high],
                    "unit": each.unit,
                    "within": each.within,
                    "verdict": each.verdict,
                    "note": each.note,
                }
                for each in self.claims
            ],
            "differences": list(self.differences),
            "tables": [
                {
                    "title": sheet.title,
                    "columns": list(sheet.columns),
                    "rows": [[each if isinstance(each, str) else each.text for each in row] for row in sheet.rows],
                }
                for sheet in self.sheets
            ],
        }


def tally(figures: Sequence[Figure]) -> Mapping[str, int]:
    """How many claims have which verdict."""
    found = dict.fromkeys([AGREES, SAME_SIDE, DISAGREES, NOT_SIMULATED], 0)
    for figure in figures:
        for each in figure.claims:
            found[each.verdict] += 1
    return found
