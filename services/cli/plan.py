"""`pearl plan`: the minimal-change plan from a role table to a target."""

from __future__ import annotations

import argparse
import json

from pearl_state.plan_files import plan_from_files
from services.cli.decide import read_mapping
from services.cli.progress import progress
from services.jobfile import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """Prints (W_add, W_remove, rho) with its change counts (eq. 5-6)."""
    try:
        with progress("planning"):
            result = plan_from_files(read_mapping(arguments.table), read_mapping(arguments.target))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if arguments.json:
        print(json.dumps(result))
        return 0
    for each in result["add"]:
        print(f"add       {each['worker']} as {each['role']}")
    for worker in result["remove"]:
        print(f"remove    {worker}")
    for worker, role in sorted(result["reassign"].items()):
        print(f"reassign  {worker} to {role}")
    print(f"{result['d_worker']} membership and {result['d_role']} role changes: the least possible")
    return 0
