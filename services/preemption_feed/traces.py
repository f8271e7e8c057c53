"""Availability traces: how many GPUs there were, when. Reads both CSV formats; pure but for `load`.

- counts: columns `time_s, available_gpus`, a step function: a value holds until the next row;
- events: columns `time_s, event, instance_id, gpus` with event `add` or `remove`; an instance comes and goes as a whole.

Forgiven is what `services.csvtable` forgives. Times count from the trace's own beginning and may have fractions. Rows may be
out of order; of rows of one time the order in the file counts, or its reverse where the whole file runs backwards. An empty
count is a gap: the value before it holds. A fraction of a GPU is rounded down. What was read over is told by `warnings`; what
cannot be understood is a `TraceError` naming file, line and reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from services import csvtable
from services.jobfile import ConfigError

BUILT_IN: Final = ("bamboo-segment1", "bamboo-segment2", "bamboo-segment3")
"""Two-hour segments of real spot availability; source and licence in `traces/LICENSE.md`."""
COUNTS: Final = ("time_s", "available_gpus")
EVENTS: Final = ("time_s", "event", "instance_id", "gpus")
MOST_GPUS: Final = 10_000_000
MOST_SECONDS: Final = 1e9


class TraceError(ConfigError):
    """The trace cannot be used: the message names the file, the line and the reason."""


class Step(msgspec.Struct, frozen=True):
    """From `time_s` on, `gpus` GPUs are available."""

    time_s: float
    gpus: int


class Trace(msgspec.Struct, frozen=True):
    """A step function: steps in strictly increasing time, consecutive counts differ. Before the first, no GPU."""

    name: str
    steps: tuple[Step, ...]
    warnings: tuple[str, ...] = ()  # oddities that were read over

    def at(self, time_s: float) -> int:
        """GPUs available at a time."""
        held = 0
        for step in self.steps:
            if step.time_s > time_s:
                break
            held = step.gpus
        return held

    @property
    def most(self) -> int:
        """The largest count."""
        return max(step.gpus for step in self.steps)


class _Row(msgspec.Struct, frozen=True):
    line: int
    time_s: float
    cells: dict[str, str]


def load(name: str) -> Trace:
    """A built-in trace by its name, or a CSV file by its path. Raises TraceError."""
    path = Path(__file__).parent / "traces" / f"{name}.csv" if name in BUILT_IN else Path(name)
    return parse(csvtable.read(path, BUILT_IN, TraceError), name)


def parse(text: str, name: str = "trace") -> Trace:
    """Either format, told by its columns. Raises TraceError."""
    rows = csvtable.records(text, name, TraceError)
    first = next(rows, None)
    if first is None:
        raise TraceError(
            f"{name}: line 1: empty; expected a header, time_s,available_gpus or time_s,event,instance_id,gpus"
        )
    line, cells = first
    columns = csvtable.header(cells, line, name, TraceError)
    if set(COUNTS) <= set(columns):
        csvtable.once(columns, COUNTS, line, name, TraceError)
        return _from_counts(_timed(rows, columns, line, name), name)
    if set(EVENTS) <= set(columns):
        csvtable.once(columns, EVENTS, line, name, TraceError)
        return _from_events(_timed(rows, columns, line, name), name)
    raise TraceError(
        f"{name}: line {line}: columns {', '.join(columns)[:120]!r} are neither {','.join(COUNTS)} "
        f"nor {','.join(EVENTS)}"
    )


def _timed(rows: Iterator[tuple[int, list[str]]], columns: list[str], header_line: int, name: str) -> list[_Row]:
    """Rows by time; those of one time as in the file."""
    found: list[_Row] = []
    for line, cells in rows:
        named = {column: cell.strip() for column, cell in zip(columns, cells, strict=False)}
        time_s = _number(named.get("time_s", ""), "time_s", line, name)
        if not 0 <= time_s <= MOST_SECONDS:
            raise TraceError(
                f"{name}: line {line}: time_s {time_s:g} is not between 0 and {MOST_SECONDS:g} seconds: "
                "count from the trace's beginning"
            )
        found.append(_Row(line, time_s, named))
    if not found:
        raise TraceError(f"{name}: line {header_line + 1}: no data below the header")
    if found[0].time_s > found[-1].time_s and all(later.time_s <= row.time_s for row, later in pairwise(found)):
        found.reverse()  # the newest first
    return sorted(found, key=_time_of)


def _from_counts(rows: list[_Row], name: str) -> Trace:
    counts: list[Step] = []
    warnings: list[str] = []
    for row in rows:
        cell = row.cells.get("available_gpus", "")
        if not cell:
            _warn(warnings, f"line {row.line}: a gap, the value before it holds")
            continue
        gpus = _gpus(cell, "available_gpus", row.line, name, warnings)
        if counts and counts[-1].time_s == row.time_s and counts[-1].gpus != gpus:
            _warn(warnings, f"line {row.line}: time_s {row.time_s:g} is there twice, this row counts")
        counts.append(Step(row.time_s, gpus))
    if not counts:
        raise TraceError(f"{name}: line {rows[0].line}: every available_gpus is empty")
    return Trace(name, _steps(counts, warnings), tuple(warnings))


def _from_events(rows: list[_Row], name: str) -> Trace:
    present: dict[str, int] = {}
    added_at: dict[str, int] = {}
    total = 0
    counts: list[Step] = []
    warnings: list[str] = []
    for row in rows:
        event, instance = row.cells.get("event", "").lower(), row.cells.get("instance_id", "")
        if not instance:
            raise TraceError(f"{name}: line {row.line}: no instance_id")
        if event == "add":
            gpus = _gpus(row.cells.get("gpus", ""), "gpus", row.line, name, warnings)
            if present.setdefault(instance, gpus) != gpus:
                raise TraceError(
                    f"{name}: line {row.line}: adds {gpus} GPUs of {instance[:40]!r}, which is there with "
                    f"{present[instance]}: each instance_id comes and goes as a whole"
                )
            if instance in added_at:
                _warn(warnings, f"line {row.line}: {instance[:40]} is added twice, the second time ignored")
            else:
                added_at[instance] = row.line
                total += gpus
        elif event == "remove":
            gone = present.pop(instance, None)
            added_at.pop(instance, None)
            if gone is None:
                _warn(warnings, f"line {row.line}: {instance[:40]} is removed but was not there, ignored")
            elif row.cells.get("gpus"):
                gpus = _gpus(row.cells["gpus"], "gpus", row.line, name, warnings)
                if gpus not in (0, gone):
                    raise TraceError(
                        f"{name}: line {row.line}: removes {gpus} GPUs of {instance[:40]!r}, which has {gone}: "
                        "each instance_id comes and goes as a whole"
                    )
            total -= gone or 0
        else:
            raise TraceError(f"{name}: line {row.line}: event {event[:40]!r} is neither add nor remove")
        counts.append(Step(row.time_s, total))
    if total > MOST_GPUS:
        raise TraceError(f"{name}: line {rows[-1].line}: {total} GPUs together are more than {MOST_GPUS}")
    return Trace(name, _steps(counts, warnings), tuple(warnings))


def _steps(counts: list[Step], warnings: list[str]) -> tuple[Step, ...]:
    """The last count of each time, without those that change nothing."""
    if counts[0].time_s > 0:
        _warn(warnings, f"begins at {counts[0].time_s:g} s: until then no GPU is there")
    last_at = {step.time_s: step.gpus for step in counts}
    steps: list[Step] = []
    for time_s, gpus in last_at.items():
        if not steps or steps[-1].gpus != gpus:
            steps.append(Step(time_s, gpus))
    return tuple(steps)


def _number(cell: str, column: str, line: int, name: str) -> float:
    return csvtable.number(cell, column, line, name, TraceError)


def _gpus(cell: str, column: str, line: int, name: str, warnings: list[str]) -> int:
    value = _number(cell, column, line, name)
    if not 0 <= value <= MOST_GPUS:
        raise TraceError(f"{name}: line {line}: {column} {value:g} is not between 0 and {MOST_GPUS}")
    if value != math.floor(value):
        _warn(warnings, f"line {line}: {column} {value:g} is rounded down")
    return math.floor(value)


def _warn(warnings: list[str], text: str) -> None:
    """Bounded: a trace of nothing but oddities is told by the first ones."""
    if len(warnings) < 20:
        warnings.append(text)


def _time_of(row: _Row) -> float:
    return row.time_s
