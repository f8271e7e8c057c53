"""`pearl simulate matrix`: every policy on every segment with both models, several seeds, kept cell by cell."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from services.jobfile import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """Interrupted, the same command goes on where it was."""
    import msgspec

    from services.simulator.whatif import matrix
    from services.simulator.whatif.policies import find

    policies = tuple(name for name in arguments.policy.split(",") if name) or matrix.every_policy()
    for name in policies:
        if name != matrix.ORACLE:
            find(name)
    folder = Path(arguments.out)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {arguments.out}: is no folder; name a new or an earlier one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {arguments.out}: cannot be written ({error})") from error
    began_s = time.monotonic()

    def progress(done: int, of: int, told: str) -> None:
        print(f"  {done}/{of}  {time.monotonic() - began_s:.0f} s  {told}", file=sys.stderr, flush=True)

    outcomes = matrix.run(
        folder, policies, range(arguments.seed, arguments.seed + arguments.seeds), arguments.hours, progress
    )
    if arguments.json:
        print(json.dumps({"folder": str(folder), "cells": msgspec.to_builtins(outcomes)}))
        return 0
    print(matrix.table(outcomes, policies))
    print(f"kept: {folder}")
    return 0
