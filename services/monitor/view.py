"""The live terminal view of a job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from rich.console import Console, Group
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from messages.ids import Activity, Role, Zone
from messages.monitor import Candidate, DecisionRecord
from pearl_state.model import Row
from services.connect import connect
from services.jobfile import JobFile
from services.monitor.board import Board
from services.monitor.collector import Collector
from services.monitor.history import alternative_text
from services.runtime.clock import now_ms

BARS = " ▁▂▃▄▅▆▇█"
STYLE = {Activity.ACTIVE: "green", Activity.TRANSITIONING: "yellow", Activity.INACTIVE: "bright_black"}
STALE_MS = 2000
"""A worker that sent no heartbeat for so long shows no load."""


def spark(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """The last `width` values as a line of bars."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    least = min(shown) if low is None else low
    span = max((max(shown) if high is None else high) - least, 1e-9)
    return "".join(BARS[min(8, max(0, round((value - least) / span * 8)))] for value in shown)


def timeline(
    points: Sequence[tuple[int, int, int]], begun_ms: int, until_ms: int, width: int
) -> tuple[list[float], list[float]]:
    """A step function of (at, usable, active) as `width` samples of each."""
    usable: list[float] = []
    active: list[float] = []
    for column in range(width):
        at = begun_ms + (until_ms - begun_ms) * (column + 1) / width
        current = next((point for point in reversed(points) if point[0] <= at), (0, 0, 0))
        usable.append(current[1])
        active.append(current[2])
    return usable, active


def candidate_text(candidate: Candidate) -> str:
    """`3P5D`, or `4C`."""
    if candidate.colocated or not (candidate.prefill or candidate.decode):
        return f"{candidate.colocated}C"
    return f"{candidate.prefill}P{candidate.decode}D"


def decision_text(record: DecisionRecord) -> str:
    """A decision in one line: what, predicted how against the other mode's best, why, and what the gate said."""
    makespan = "" if record.chosen.makespan_s is None else f" {record.chosen.makespan_s:.1f} s"
    forced = " (forced)" if record.forced else ""
    gate = ""
    if record.lending and record.overlap_workers:
        gate = f"; {'borrow' if record.borrow else 'no borrow'}: {record.borrow_reason}"
    return f"{candidate_text(record.chosen)}{makespan}{alternative_text(record)}{forced}: {record.reason}{gate}"


def workers_table(board: Board, at_ms: int) -> Table:
    """One line a worker."""
    table = Table(expand=True, box=None, pad_edge=False)
    for column, justify in (
        ("worker", "left"),
        ("zone", "left"),
        ("role", "left"),
        ("activity", "left"),
        ("v", "right"),
        ("inc", "right"),
        ("running", "right"),
        ("tok/s", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
    rows: Sequence[Row] = board.table.rows if board.table else ()
    for row in rows:
        if row.zone is Zone.OVERLAP and not row.incarnation:
            continue  # never launched
        seen = board.heartbeats.get(row.worker)
        fresh = seen is not None and at_ms - seen[0] < STALE_MS
        activity = str(row.activity) if row.stage == "none" else f"{row.stage}"
        if row.role is Role.TRAINING:
            activity = "training" if board.training else "idle"
        table.add_row(
            row.worker,
            str(row.zone),
            str(row.role),
            activity,
            str(row.version) if row.version >= 0 else "-",
            str(row.incarnation) if row.incarnation else "-",
            str(seen[1].running + seen[1].queued) if fresh and seen else "",
            f"{board.rates.get(row.worker, 0.0):.0f}" if fresh else "",
            style="cyan" if row.role is Role.TRAINING and board.training else STYLE.get(row.activity, ""),
        )
    return table


def render(board: Board, job: JobFile, begun_ms: int, width: int = 110) -> Layout:
    """The whole screen."""
    at_ms = now_ms()
    done = len(board.steps)
    version = board.table.policy_version if board.table else 0
    rewards = [reward for _, reward in board.rewards]
    usable, active = timeline(board.budget, begun_ms, at_ms, 40)
    most = max([1.0, *usable, *active])
    head = Text.assemble(
        ("PEARL ", "bold magenta"),
        f"{job.job.name}   train step ",
        (f"{done}/{job.pipeline.train_steps}", "bold"),
        f"   policy v{version}   {board.trajectories} trajectories",
        f"   {board.preemptions} preemptions   {board.arrivals} arrivals   {(at_ms - begun_ms) / 1000:.0f} s",
    )
    curves = Table.grid(padding=(0, 1))
    reward = f"{rewards[-1]:.2f}" if rewards else "-"
    curves.add_row("reward", Text(spark(rewards, 40, 0.0, 1.0), style="green"), reward)
    curves.add_row("budget", Text(spark(usable, 40, 0.0, most), style="blue"), f"{usable[-1]:.0f} slots")
    curves.add_row("active", Text(spark(active, 40, 0.0, most), style="green"), f"{active[-1]:.0f} workers")
    curves.add_row("tokens/s", "", f"{board.tokens_per_s:.0f}")
    kinds = [kind for _, change in board.changes for kind in change.kinds]
    told = ", ".join(
        f"{kinds.count(kind)} {text}"
        for kind, text in (("mode_switch", "mode switches"), ("ratio_change", "ratio changes"), ("borrow", "borrows"))
    )
    curves.add_row("runs", Text(told), str(board.fold.served))
    if board.progress is not None:
        filled = round(40 * board.progress.done / max(board.progress.size, 1))
        curves.add_row(
            f"batch {board.progress.batch}",
            "█" * filled + "░" * (40 - filled),
            f"{board.progress.done}/{board.progress.size}",
        )
    decisions = Group(
        *(
            Text(f"{(at - begun_ms) / 1000:6.1f}s  {decision_text(record)}", overflow="ellipsis", no_wrap=True)
            for at, record in board.decisions
        )
    )
    happenings = Group(
        *(
            Text(f"{(at - begun_ms) / 1000:6.1f}s  {text}", overflow="ellipsis", no_wrap=True)
            for at, text in board.happenings
        )
    )
    layout = Layout()
    rows = len(board.table.rows) if board.table else 4
    layout.split_column(
        Layout(head, size=1),
        Layout(name="middle", size=max(10, min(18, rows + 3))),
        Layout(Panel(decisions, title="decisions, predicted makespans and why", title_align="left"), size=8),
        Layout(Panel(happenings, title="what happened", title_align="left"), size=12),
    )
    layout["middle"].split_row(
        Layout(Panel(workers_table(board, at_ms), title="workers", title_align="left"), ratio=3),
        Layout(Panel(curves, title="progress", title_align="left"), ratio=3),
    )
    return layout


async def watch(job: JobFile, stop: asyncio.Event, *, collector: Collector | None = None) -> None:
    """Show the view until `stop`."""
    own = collector is None
    bus = await connect(job, "monitor") if own else None
    if collector is None:
        assert bus is not None
        collector = Collector(bus, job)
        await collector.start()
    begun_ms = now_ms()
    console = Console()
    following = asyncio.create_task(collector.follow(stop)) if own else None
    try:
        with Live(console=console, screen=False, auto_refresh=False, transient=True) as live:
            while not stop.is_set():
                live.update(render(collector.board, job, begun_ms, console.width), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 0.5)
    finally:
        if following is not None:
            await following
        if bus is not None:
            await bus.close()
