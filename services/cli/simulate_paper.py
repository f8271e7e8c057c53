"""`pearl simulate paper`: the paper's figures and tables, simulated, beside the paper's numbers."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from services.cli.outputs import report_folder
from services.simulator.whatif.paper.options import Options

if TYPE_CHECKING:
    from services.simulator.whatif.paper.base import Figure


def run(arguments: argparse.Namespace) -> int:
    """A claim that disagrees is shown, and no failure."""
    from services.simulator.whatif.paper.report import ALL, as_json, chosen, print_figures, write_report
    from services.simulator.whatif.paper.runs import Runner

    folder = report_folder(arguments.report)
    names = chosen(arguments.only)
    options = Options(
        seeds=arguments.seeds,
        batches=max(arguments.seeds, Options().batches),
        hours=arguments.hours,
        fixed_hours=min(arguments.hours, Options().fixed_hours),
    )
    began_s = time.monotonic()

    def progress(done: int, of: int, told: str) -> None:
        print(f"  {done}/{of}  {time.monotonic() - began_s:.0f} s  {told}", file=sys.stderr, flush=True)

    figures: list[Figure] = []
    wall_s = 0.0
    with Runner(arguments.processes, progress) as runner:
        for name in names:
            print(name, file=sys.stderr, flush=True)
            figures.append(ALL[name](runner, options))
            wall_s = time.monotonic() - began_s
            if folder is not None:  # after each: who interrupts it keeps what there is
                write_report(figures, folder, described(options, wall_s), wall_s)
    if arguments.json:
        print(json.dumps(as_json(figures, wall_s) | {"report": None if folder is None else str(folder)}))
        return 0
    print_figures(figures)
    if folder is not None:
        print(f"report: {folder / 'index.html'}")
    return 0


def described(options: Options, wall_s: float) -> str:
    """How much was simulated, in words."""
    return (
        f"swebench-mini on H800, {options.hours:g} h a segment, {options.fixed_hours:g} h a fixed allocation, "
        f"{options.seeds} seed{'s' if options.seeds > 1 else ''} a run, {options.batches} a single batch; {wall_s:.0f} s to simulate."
    )
