"""`pearl simulate selection`, `gate` and `table2`: how good the decision engine's choices are, in simulation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from services.jobfile import ConfigError
from services.runtime.pool import MOST_PROCESSES, pool_size, worker_pool

MOST_SETTINGS: Final = 10_000

T = TypeVar("T")


def selection(arguments: argparse.Namespace) -> int:
    """Regret of the planner and of baselines over random settings."""
    from services.simulator.whatif import selection as harness

    outcomes = _each(arguments, _outcome, "settings")
    report = harness.report(outcomes)
    if arguments.json:
        print(json.dumps(report))
        return 0
    for name, title in (("all", "all settings"), ("modes_differ_by_5_percent", "modes differ by more than 5 %")):
        _show(report[name], f"regret, {title}")
    return 0


def gate(arguments: argparse.Namespace) -> int:
    """Agreement of the borrow decision with hindsight over random windows."""
    from services.simulator.whatif import gate as harness

    report = harness.report(_each(arguments, _verdict, "windows"))
    if arguments.json:
        print(json.dumps(report))
        return 0
    _show(
        report["gates"], f"{report['windows']} windows, {report['windows_that_differ']} of them differ by more than 2 %"
    )
    return 0


def table2(arguments: argparse.Namespace) -> int:
    """The paper's Table 2 in simulation."""
    import msgspec

    from services.simulator.whatif import table2 as harness

    if arguments.turns < 1:
        raise ConfigError(f"--turns {arguments.turns}: give at least 1")
    points = harness.POINTS if arguments.json else track(harness.POINTS, description="points")
    rows = [harness.row(point, most_turns=arguments.turns, seed=arguments.seed) for point in points]
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(rows)))
        return 0
    shown = {
        f"{row.gpus}{' + 16' if row.overlap else ''} GPUs": {
            "selected": row.selected,
            "best": row.best,
            "regret": f"{row.regret:.2%}",
            "of all": row.selected_of_all,
            "best of all": row.best_of_all,
            "regret of all": f"{row.regret_of_all:.2%}",
            "paper selected": row.paper_selected,
            "paper best": row.paper_best,
        }
        for row in rows
    }
    _show(shown, "Table 2, simulated")
    return 0


def _outcome(seed: int) -> Any:  # Any: the harness is imported where it is needed
    from services.simulator.whatif import selection as harness

    return harness.evaluate(harness.random_setting(seed), seed)


def _verdict(seed: int) -> Any:  # Any: as above
    from services.simulator.whatif import gate as harness

    return harness.judge_window(harness.random_window(seed), seed)


def _each(arguments: argparse.Namespace, one: Callable[[int], T], what: str) -> list[T]:
    if not 1 <= arguments.settings <= MOST_SETTINGS:
        raise ConfigError(f"--settings {arguments.settings}: give a whole number from 1 to {MOST_SETTINGS}")
    if not 1 <= arguments.jobs <= MOST_PROCESSES:
        raise ConfigError(f"--jobs {arguments.jobs}: give a whole number from 1 to {MOST_PROCESSES}")
    if arguments.seed < 0:
        raise ConfigError(f"--seed {arguments.seed}: give a whole number from 0")
    seeds: Sequence[int] = range(arguments.seed, arguments.seed + arguments.settings)
    console = Console(file=sys.stderr)
    if arguments.jobs == 1:
        return [one(seed) for seed in track(seeds, description=what, console=console, disable=arguments.json)]
    with worker_pool(pool_size(arguments.jobs, len(seeds))) as pool:
        found = pool.map(one, seeds, chunksize=1)
        return list(track(found, description=what, total=len(seeds), console=console, disable=arguments.json))


def _show(rows: dict[str, dict[str, Any]], title: str) -> None:  # Any: numbers and names
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in next(iter(rows.values()), dict[str, Any]()):
        table.add_column(column.replace("_", " "), justify="right")
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values.values()))
    Console().print(table)
