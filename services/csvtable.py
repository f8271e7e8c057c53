"""CSV files that people supply, read forgivingly: what cannot be understood is an error with file, line and reason. Pure.

Columns may stand in any order, others are ignored; a byte order mark, CRLF, blank lines and lines that begin with `#` are fine.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from typing import Final

from services.jobfile import ConfigError

MOST_ROWS: Final = 1_000_000


def records(text: str, name: str, error: type[ConfigError], most: int = MOST_ROWS) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and cells of what is neither blank nor a comment. Raises `error`."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    reader = csv.reader(io.StringIO(lines))
    try:
        for cells in reader:
            if reader.line_num > most:
                raise error(f"{name}: line {reader.line_num}: more than {most} lines")
            if any(cell.strip() for cell in cells) and not cells[0].lstrip().startswith("#"):
                yield reader.line_num, cells
    except csv.Error as problem:
        raise error(f"{name}: line {reader.line_num}: {problem}") from problem


def number(cell: str, column: str, line: int, name: str, error: type[ConfigError]) -> float:
    """A finite number. Raises `error`."""
    try:
        value = float(cell)
    except ValueError:
        raise error(f"{name}: line {line}: {column} {cell[:40]!r} is not a number") from None
    if not math.isfinite(value):
        raise error(f"{name}: line {line}: {column} {cell[:40]!r} is not finite")
    return value
