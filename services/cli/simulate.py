"""`pearl simulate`: hands over to the sub-command's module. `parser.py` has their options."""

from __future__ import annotations

import argparse
import importlib


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 done, 1 something was found, 2 the input is wrong. Sub-command `x` is `services.cli.simulate_x`."""
    return importlib.import_module(f"services.cli.simulate_{arguments.simulation}").run(arguments)
