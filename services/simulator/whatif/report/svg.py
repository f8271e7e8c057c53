"""A small kit for plots as SVG: scales, axes, legends. Pure.

Drawings are readable on light and dark ground: colours are CSS variables with a value for each. A drawing that stands alone
carries them; those of a page share the page's. Every shape that means something has a `<title>`, shown under the pointer and
read aloud; no meaning is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

import msgspec

SERIES: Final = 9
"""Colours of series, told apart by people who see fewer colours, too (after Okabe and Ito)."""
DASHES: Final = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 4", "1 4", "6 2 1 2", "3 1")
"""Lines differ by these, too."""

_LIGHT: Final = (
    "--ground:#ffffff;--ink:#1f2328;--faint:#6b7280;--grid:#e3e6ea;--frame:#9aa1ab;"
    "--s0:#0072b2;--s1:#d55e00;--s2:#009e73;--s3:#cc79a7;--s4:#8a6d00;--s5:#3aa0d8;--s6:#7a5195;--s7:#555555;--s8:#c0392b;"
    "--prefill:#d55e00;--decode:#0072b2;--colocated:#009e73;--training:#6f6a8f;--preparing:#e0b000;--switching:#c94f9c;"
    "--idle:#d5d9de;--area0:#b9b4d3;--area1:#9fd3c7;--area2:#f2d9a6;--good:#1a7f37;--bad:#b42318;"
)
_DARK: Final = (
    "--ground:#14171c;--ink:#e6e9ee;--faint:#a0a8b3;--grid:#2b3139;--frame:#5d6570;"
    "--s0:#56b4e9;--s1:#ff9a4d;--s2:#2fd0a0;--s3:#f0a3cb;--s4:#e6c34a;--s5:#9bd7ff;--s6:#c39be0;--s7:#b5b5b5;--s8:#ff8a7a;"
    "--prefill:#ff9a4d;--decode:#56b4e9;--colocated:#2fd0a0;--training:#8d87b8;--preparing:#f0cf4a;--switching:#f08bc4;"
    "--idle:#353c45;--area0:#4a4568;--area1:#1f5a4e;--area2:#665326;--good:#5fd07f;--bad:#ff8a7a;"
)
THEME: Final = f":root{{color-scheme:light dark;{_LIGHT}}}@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}@media print{{:root{{{_LIGHT}}}}}"
"""CSS of the colours: light, dark, and light again on paper."""
TEXT: Final = "svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .faint{fill:var(--faint)}svg .title{font-weight:600;font-size:13px}"


def number(value: float) -> str:
    """A coordinate, short."""
    return f"{value:.1f}".removesuffix(".0")


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, at most about `most`."""
    assert high > low and most >= 2
    raw = (high - low) / most
    power = 10 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def amount(value: float) -> str:
    """A number for people: 12.3k, 4.56, 0.012."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.0f}" if size >= 100 else f"{value:.3g}"


class Scale(msgspec.Struct, frozen=True):
    """A straight scale from values to pixels."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """Pixels of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def from_zero(values: Iterable[float], begin: float, end: float) -> Scale:
    """From 0 to a little above the largest value."""
    most = max((value for value in values if math.isfinite(value)), default=0.0)
    return Scale(0.0, most * 1.08 if most > 0 else 1.0, begin, end)


class Drawing:
    """Elements of one SVG document, `width` by `height` pixels. Colours are names of CSS variables."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width = width
        self.height = height
        self.title = title
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, tip: str = "", more: str = "") -> None:
        """A box; nothing where it has no size."""
        if width <= 0 or height <= 0:
            return
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
            f'fill="var(--{fill})"{more}>{inner}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = "frame", more: str = "") -> None:
        """A straight line."""
        self._parts.append(
            f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" stroke="var(--{stroke})"{more}/>'
        )

    def path(self, data: str, *, stroke: str = "", fill: str = "", tip: str = "", more: str = "") -> None:
        """A path: `data` as in SVG."""
        if not data:
            return
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        paint = f'fill="{f"var(--{fill})" if fill else "none"}"' + (f' stroke="var(--{stroke})"' if stroke else "")
        self._parts.append(f'<path d="{data}" {paint}{more}>{inner}</path>')

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "", more: str = "") -> None:
        """A line of text; `y` is its base line."""
        named = f' class="{kind}"' if kind else ""
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{number(x)}" y="{number(y)}"{at}{named}{more}>{escape(text)}</text>')

    def dot(self, x: float, y: float, radius: float, fill: str, tip: str = "") -> None:
        """A disc."""
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill="var(--{fill})" stroke="var(--ground)">{inner}</circle>'
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str, str]], most_x: float) -> float:
        """Entries (text, colour, dash or "box") from left to right, wrapped at `most_x`; returns the y below."""
        at = x
        for text, colour, dash in entries:
            wide = 30 + 6.6 * len(text)
            if at > x and at + wide > most_x:
                at, y = x, y + 18
            if dash == "box":
                self.rect(at, y - 9, 12, 11, colour)
            else:
                style = f' stroke-width="2.5" stroke-dasharray="{dash}"' if dash else ' stroke-width="2.5"'
                self.line(at - 2, y - 4, at + 16, y - 4, colour, style)
            self.text(at + 19, y, text)
            at += wide
        return y + 18

    def x_axis(self, scale: Scale, y: float, top: float, label: str, most: int = 8) -> None:
        """Ticks below `y`, grid lines up to `top`."""
        for value in ticks(scale.low, scale.high, most):
            at = scale(value)
            self.line(at, top, at, y, "grid")
            self.text(at, y + 16, amount(value), "middle", "faint")
        self.line(scale.begin, y, scale.end, y)
        self.text((scale.begin + scale.end) / 2, y + 34, label, "middle")

    def y_axis(self, scale: Scale, x: float, right: float, label: str, most: int = 6, grid: bool = True) -> None:
        """Ticks beside `x`, on its outer side; grid lines towards `right`."""
        outer = -6 if right > x else 6
        anchor = "end" if right > x else "start"
        for value in ticks(scale.low, scale.high, most):
            at = scale(value)
            if grid:
                self.line(x, at, right, at, "grid")
            self.text(x + outer, at + 4, amount(value), anchor, "faint")
        self.line(x, scale.begin, x, scale.end)
        middle = (scale.begin + scale.end) / 2
        at_x = x + (-46 if right > x else 40)
        self.text(at_x, middle, label, "middle", "", f' transform="rotate(-90 {number(at_x)} {number(middle)})"')

    def svg(self, *, alone: bool = True) -> str:
        """The document; `alone`: with the colours, else they are the page's."""
        style = f"<style>{THEME}{TEXT}</style>" if alone else ""
        ground = '<rect width="100%" height="100%" fill="var(--ground)"/>' if alone else ""
        size = f'viewBox="0 0 {self.width} {self.height}"' + (
            f' width="{self.width}" height="{self.height}"' if alone else ""
        )
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.title)}">'
            f"<title>{escape(self.title)}</title>{style}{ground}\n{body}\n</svg>\n"
        )
