"""Hostile variants of something good, for Hypothesis: of a text, and of nested data."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

NASTY_TEXT = (
    "",
    " ",
    "\x00",
    "nan",
    "-inf",
    "1e999",
    "-1",
    "9" * 5000,
    "é☃",
    "'; --",
    '"',
    "../../etc",
    "a\nb",
    "\ufeff",
)
NASTY: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    -(2**70),
    1e308,
    -0.0,
    math.nan,
    math.inf,
    *NASTY_TEXT,
    [],
    {},
    [[[]]],
    {"a": {"b": []}},
    ["x"] * 3,
)
"""Values that nobody means, of every type that a file can hold."""


@st.composite
def texts(draw: st.DrawFn, good: str) -> str:
    """The text with a few pieces cut out, repeated, moved or replaced."""
    text = good
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(text)))
        end = min(len(text), begin + draw(st.integers(0, 40)))
        piece = draw(st.one_of(st.sampled_from(NASTY_TEXT), st.text(max_size=8), st.just(text[begin:end] * 2)))
        text = text[:begin] + piece + text[end:]
    return text


@st.composite
def data(draw: st.DrawFn, good: Any) -> Any:
    """The data with one to three of its parts replaced, left out, or joined by another."""
    found = _copy(good)
    for _ in range(draw(st.integers(1, 3))):
        found = _mutated(draw, found)
    return found


def _mutated(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value, key=str)))
        match draw(st.integers(0, 9)):
            case 0:
                return {name: each for name, each in value.items() if name != key}
            case 1:
                return {**value, draw(st.sampled_from(("", "x", key + "x"))): draw(st.sampled_from(NASTY))}
            case _:
                return {**value, key: _mutated(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        index = draw(st.integers(0, len(value) - 1))
        match draw(st.integers(0, 9)):
            case 0:
                return [*value[:index], *value[index + 1 :]]
            case 1:
                return [*value, value[index]]
            case _:
                return [*value[:index], _mutated(draw, value[index]), *value[index + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and draw(st.booleans()):
        return draw(st.one_of(st.integers(), st.floats(), st.integers(-3, 3)))
    return draw(st.sampled_from(NASTY))


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(each) for each in value]
    return value
