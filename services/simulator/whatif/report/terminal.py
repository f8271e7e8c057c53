"""The result of a what-if run for a terminal: tables by rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.simulator.whatif.report.summary import reference_of, summarise
from services.simulator.whatif.report.write import inputs_line, verdict
from services.simulator.whatif.result import Result


def print_results(results: Sequence[Result], *, reference: str = "", console: Console | None = None) -> None:
    """The policies side by side, then the conclusion in words."""
    out = console or Console(width=max(Console().width, 118))
    chosen = reference_of(results[0], reference)
    summaries = summarise(results, chosen)
    table = Table(title=Text(inputs_line(results)), title_justify="left", title_style="bold")
    table.add_column("policy", no_wrap=True)
    priced = any(each.cost is not None for each in summaries)
    columns = [
        "tokens/s",
        f"x {chosen}",
        "of oracle",
        "step s",
        "waits",
        "busy",
        "staleness",
        "reward",
        "lost",
        "borrows",
    ]
    for column in [*columns, *(["cost/M"] if priced else [])]:
        table.add_column(column, justify="right")
    best = max(each.throughput.mean for each in summaries)
    for each in summaries:
        spread = f" ±{each.throughput.half:,.0f}" if each.throughput.count > 1 else ""
        cells = [
            f"{each.throughput.mean:,.0f}{spread}",
            "-" if each.ratio is None else f"{each.ratio.mean:.2f}",
            "-" if each.of_oracle is None else f"{each.of_oracle.mean:.0%}",
            f"{each.step_s:,.0f}",
            f"{each.wait_share:.0%}",
            f"{each.busy:.0%}",
            str(each.staleness_max),
            f"{each.reward:.3f}",
            str(each.lost),
            f"{each.borrows:.0f}",
            *([("-" if each.cost is None else f"{each.cost.mean:.3g}")] if priced else []),
        ]
        table.add_row(Text(each.name), *cells, style="bold" if each.throughput.mean == best else None)
    out.print(table)
    for line in verdict(summaries, chosen):
        out.print(Text(line))
