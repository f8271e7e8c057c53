"""CSV files that people supply, read forgivingly: what cannot be understood is an error with file, line and reason. Pure but for `read`.

Columns may stand in any order, others are ignored; a byte order mark, CRLF, blank lines and lines that begin with `#` are fine.
Cells are separated by commas, or, where the header has none, by semicolons, tabs or bars; a first line `sep=;` is understood.
Cells may be quoted. Refused, because it would be read wrongly: a row with more cells than the header, a column named twice,
a quote that is not closed, numbers with decimal commas or separators of thousands.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from messages.envelope import brief
from services.jobfile import ConfigError

MOST_ROWS: Final = 1_000_000
MOST_BYTES: Final = 512 << 20
"""Read whole: a file larger than this is surely another one."""
_SEPARATORS: Final = ",;\t|"
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def read(path: Path, built_in: tuple[str, ...], error: type[ConfigError]) -> str:
    """The text of a file, for `records`. Raises `error`, which says what else could have been given."""
    where = brief(str(path), 200)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise error(f"{where}: larger than {MOST_BYTES >> 20} MiB, which no such file is")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{where}: not UTF-8 text at byte {problem.start}: save it as UTF-8") from problem
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{where}: cannot be read ({reason}); give a CSV file or one of {', '.join(built_in)}") from problem


def records(text: str, name: str, error: type[ConfigError], most: int = MOST_ROWS) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and cells of what is neither blank nor a comment, the header first. Raises `error`."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    source = _Lines(lines)
    reader = csv.reader(source, delimiter=_separator(lines, source), strict=True)
    columns: list[str] = []
    while True:
        source.between = True
        try:
            cells = next(reader, None)
        except csv.Error as problem:
            quote = "; is a quote not closed?" if "unexpected end" in str(problem) else ""
            raise error(f"{name}: line {source.begun}: {problem}{quote}") from problem
        if cells is None:
            return
        if source.taken > most:
            raise error(f"{name}: line {source.begun}: more than {most} lines")
        if not any(cell.strip() for cell in cells):
            continue
        if not columns:
            columns = cells
        elif any(cell.strip() for cell in cells[len(columns) :]):
            raise error(
                f"{name}: line {source.begun}: {len(cells)} cells where the header has {len(columns)}; "
                "numbers need a decimal point, and no separators of thousands"
            )
        yield source.begun, cells


def header(cells: list[str], line: int, name: str, error: type[ConfigError]) -> list[str]:
    """The columns' names. One that is there twice stays unnamed where it is not needed: asking for it is `once`."""
    columns = [cell.strip().lower() for cell in cells]
    if all(_NUMBER.fullmatch(column) for column in columns):
        raise error(f"{name}: line {line}: numbers where a header with the columns' names is expected")
    return columns


def once(columns: list[str], needed: tuple[str, ...], line: int, name: str, error: type[ConfigError]) -> None:
    """No column that is needed is there twice. Raises `error`."""
    for each in needed:
        if columns.count(each) > 1:
            raise error(f"{name}: line {line}: column {each!r} is there twice")


class _Lines:
    """Lines for the reader of cells, comments left out; `begun` is the line on which the current record begins."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self.taken = 0
        self.begun = 0
        self.between = (
            True  # no record has begun: a line that begins with # is a comment, and not part of a quoted cell
        )

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            if self.taken == len(self._lines):
                raise StopIteration
            line = self._lines[self.taken]
            self.taken += 1
            if not self.between:
                return line + "\n"
            if line.lstrip().startswith("#"):
                continue
            self.between, self.begun = False, self.taken
            return line + "\n"


def _separator(lines: list[str], source: _Lines) -> str:
    for index, line in enumerate(lines):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        named = re.fullmatch(r"sep=(.)\s*", line)
        if named and index == 0 and named[1] in _SEPARATORS:
            source.taken = 1
            return named[1]
        return next((each for each in _SEPARATORS if each in line), ",")
    return ","


def number(cell: str, column: str, line: int, name: str, error: type[ConfigError]) -> float:
    """A finite number. Raises `error`."""
    if not _NUMBER.fullmatch(cell.strip()):
        finite = cell.strip().lower().lstrip("+-") not in ("nan", "inf", "infinity")
        raise error(f"{name}: line {line}: {column} {cell[:40]!r} is not {'a number' if finite else 'finite'}")
    value = float(cell)
    if not math.isfinite(value):
        raise error(f"{name}: line {line}: {column} {cell[:40]!r} is not finite")
    return value
