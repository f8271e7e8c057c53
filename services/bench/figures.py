"""What a benchmark says: figures beside their references, as JSON and as a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import msgspec

_ROW: Final = 22
_LEFT: Final = 330
_WIDTH: Final = 320
_DECADES: Final = 4


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value and its reference, measured in the same run, in the same unit."""

    benchmark: str
    case: str
    value: float
    unit: str
    reference: float | None = None
    reference_is: str = ""
    target: str = ""
    met: bool | None = None  # None: no target, or the reference could not be measured

    @property
    def ratio(self) -> float | None:
        """Value over reference."""
        return self.value / self.reference if self.reference else None


def figure(
    benchmark: str,
    case: str,
    value: float,
    unit: str,
    reference: float | None = None,
    reference_is: str = "",
    *,
    below: float | None = None,
    ratio_from: float | None = None,
    ratio_to: float | None = None,
) -> Figure:
    """A figure with at most one target: the value stays below `below`, the ratio reaches `ratio_from`, or is at most `ratio_to`."""
    target, met = "", None
    if below is not None:
        target, met = f"< {below:g} {unit}", value < below
    elif ratio_from is not None:
        target = f">= {ratio_from:g} x"
        met = value >= ratio_from * reference if reference else None
    elif ratio_to is not None:
        target = f"<= {ratio_to:g} x"
        met = value <= ratio_to * reference if reference else None
    return Figure(
        benchmark=benchmark,
        case=case,
        value=value,
        unit=unit,
        reference=reference,
        reference_is=reference_is,
        target=target,
        met=met,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile, `share` from 0 to 1."""
    assert values and 0 <= share <= 1
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def as_json(figures: Sequence[Figure]) -> dict[str, Any]:  # Any: a JSON object
    """Plain data; `ratio` is value over reference, None where there is no reference."""
    return {
        "figures": [
            {**msgspec.structs.asdict(each), "ratio": None if each.ratio is None else round(each.ratio, 4)}
            for each in figures
        ]
    }


def as_svg(figures: Sequence[Figure]) -> str:
    """A bar a figure that has a reference: value over reference on a logarithmic axis, 1 in the middle."""
    shown = [(each, each.ratio) for each in figures if each.ratio is not None and each.ratio > 0]
    height = _ROW * len(shown) + 50
    middle = _LEFT + _WIDTH // 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 90}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{middle}" y="16" text-anchor="middle">value / reference, logarithmic</text>',
        f'<line x1="{middle}" y1="24" x2="{middle}" y2="{height - 20}" stroke="black"/>',
        f'<text x="{middle}" y="{height - 6}" text-anchor="middle">1</text>',
    ]
    for index, (each, ratio) in enumerate(shown):
        length = max(-1.0, min(1.0, math.log10(ratio) / (_DECADES / 2))) * _WIDTH / 2
        left, top = middle + min(0.0, length), 28 + index * _ROW
        color = {True: "#2a7f3f", False: "#b3362b", None: "#4a6fa5"}[each.met]
        lines += [
            f'<text x="{_LEFT - 6}" y="{top + 12}" text-anchor="end">{escape(f"{each.benchmark}: {each.case}")}</text>',
            f'<rect x="{left:.1f}" y="{top}" width="{max(abs(length), 1):.1f}" height="{_ROW - 8}" fill="{color}"/>',
            f'<text x="{_LEFT + _WIDTH + 6}" y="{top + 12}">{ratio:.3g} x</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def lines_svg(title: str, at: Sequence[float], lines: Mapping[str, Sequence[float]]) -> str:
    """Values over time, a line each, named at its end; the vertical axis is logarithmic, since they differ by far."""
    width, height, left, right, top = 640, 400, 60, 170, 30
    shown = {name: values for name, values in lines.items() if len(values) == len(at) and min(values, default=0.0) > 0}
    most = max((max(values) for values in shown.values()), default=1.0)
    least = min((min(values) for values in shown.values()), default=1.0)
    low, high = math.log10(least) - 0.05, math.log10(most) + 0.05
    span = max(at, default=1.0) or 1.0

    def y_of(value: float) -> float:
        return top + (high - math.log10(value)) / (high - low) * height

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + right}" height="{top + height + 40}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="18">{escape(title)}</text>',
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
        f'<text x="{left}" y="{top + height + 18}">0 s</text>',
        f'<text x="{left + width}" y="{top + height + 18}" text-anchor="end">{span:.0f} s</text>',
        f'<text x="{left - 6}" y="{y_of(most) + 4:.1f}" text-anchor="end">{most:,.0f}</text>',
        f'<text x="{left - 6}" y="{y_of(least) + 4:.1f}" text-anchor="end">{least:,.0f}</text>',
    ]
    free = top - 12.0
    for index, (name, values) in enumerate(sorted(shown.items(), key=lambda each: -each[1][-1])):
        color = f"hsl({index * 360 // len(shown)} 60% 40%)"
        points = " ".join(
            f"{left + time / span * width:.1f},{y_of(value):.1f}" for time, value in zip(at, values, strict=True)
        )
        free = max(free + 13, y_of(values[-1]) + 4)  # names never overlap
        out += [
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>',
            f'<text x="{left + width + 6}" y="{free:.1f}" fill="{color}">{escape(name)} {values[-1]:,.0f}</text>',
        ]
    return "\n".join([*out, "</svg>"]) + "\n"


def write_report(figures: Sequence[Figure], directory: Path) -> None:
    """`bench.json` and `bench.svg` in `directory`, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "bench.json").write_text(json.dumps(as_json(figures), indent=1) + "\n", encoding="utf-8")
    (directory / "bench.svg").write_text(as_svg(figures), encoding="utf-8")
