"""The live view as a picture (SVG), for documents: what a terminal would show at that moment."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from pathlib import Path

from rich.console import Console

from messages.ids import Activity, Mode, Zone
from services.jobfile import JobFile
from services.monitor.board import Board
from services.monitor.view import render
from services.runtime.clock import now_ms

WIDTH, HEIGHT = 150, 44
"""Characters: every line of the view whole, and none of them empty."""
PERIOD_S = 1.0


def picture(board: Board, job: JobFile, begun_ms: int) -> str:
    """The view of this moment as an SVG document."""
    console = Console(record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True)
    console.print(render(board, job, begun_ms, WIDTH), height=HEIGHT)
    # Without the web font that the library names: a page that shows the picture need fetch nothing for it.
    return re.sub(r"@font-face\s*\{[^}]*\}", "", console.export_svg(title="pearl demo"))


def telling(board: Board, job: JobFile) -> int:
    """How much of what PEARL does a picture of this moment would show: 0 nothing yet, 3 all at once."""
    if len(board.steps) < job.pipeline.train_steps // 3 or board.table is None:
        return 0
    lent = any(row.zone is Zone.OVERLAP and row.activity is Activity.ACTIVE for row in board.table.rows)
    return 1 + lent + (board.fold.served.mode is Mode.DISAGGREGATED)


async def record(board: Board, job: JobFile, stop: asyncio.Event, path: Path) -> None:
    """Until `stop`, keep at `path` the latest of the most telling moments."""
    begun_ms = now_ms()
    best = 0
    while not stop.is_set():
        value = telling(board, job)
        if value and value >= best:
            best = value
            await asyncio.to_thread(path.write_text, picture(board, job, begun_ms), encoding="utf-8")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), PERIOD_S)
