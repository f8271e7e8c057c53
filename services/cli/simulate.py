"""`pearl simulate`: hands over to the sub-command's module. `parser.py` has their options."""

from __future__ import annotations

import argparse
import importlib

RUNNERS = {
    "faults": "simulate_faults:run",
    "run": "simulate_run:run",
    "record": "simulate_record:run",
    "report": "simulate_report:run",
    "paper": "simulate_paper:run",
    "matrix": "simulate_matrix:run",
    "selection": "simulate_selection:selection",
    "gate": "simulate_selection:gate",
    "table2": "simulate_selection:table2",
}
"""Sub-command -> module and function; loaded when asked for, since some need much."""


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 done, 1 something was found, 2 the input is wrong."""
    module, _, function = RUNNERS[arguments.simulation].partition(":")
    return getattr(importlib.import_module(f"services.cli.{module}"), function)(arguments)
