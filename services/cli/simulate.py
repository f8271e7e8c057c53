"""`pearl simulate`: its sub-commands, each a module function of `services.simulator`."""

from __future__ import annotations

import argparse

from services.cli import simulate_faults, simulate_paper, simulate_record, simulate_report, simulate_run

RUNNERS = {
    "faults": simulate_faults.run,
    "run": simulate_run.run,
    "record": simulate_record.run,
    "report": simulate_report.run,
    "paper": simulate_paper.run,
}
"""Sub-command -> what runs it. `parser.py` has their options."""


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 done, 1 a promise was broken, 2 the input is wrong."""
    return RUNNERS[arguments.simulation](arguments)
