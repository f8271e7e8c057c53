"""`pearl bench`: benchmarks of the running system on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services import jobfile
from services.cli.demo import new_run
from services.jobfile import ConfigError, parse_policy

CONFIGURATIONS = ((0, 0, 2), (0, 0, 3), (0, 0, 4), (0, 0, 5), (1, 1, 0), (2, 1, 0), (3, 1, 0), (2, 2, 0), (4, 1, 0))
"""(prefill, decode, colocated) workers that `pace` measures: what the demo's budgets allow."""
PROMPT = 8
"""Tokens of a prompt there: about what a turn of the demo computes."""
PACE_TURNS = 6


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 if a run broke an invariant."""
    return {"policies": _policies, "pace": _pace}[arguments.name](arguments)


def _policies(arguments: argparse.Namespace) -> int:
    from services.bench.policies import DEFAULT, compare, summary

    policies = tuple(arguments.policies.split(",")) if arguments.policies else DEFAULT
    for policy in policies:
        try:
            parse_policy(policy)
        except ValueError as error:
            raise ConfigError(f"--policies: {error}") from error
    if len(set(policies)) != len(policies):
        raise ConfigError("--policies names one twice")

    def make_job(policy: str) -> Path:
        # Far more train steps than fit: the time is what ends a run.
        changes = {"policy": f'"{policy}"', "train_steps": "100000"}
        return new_run(Path(arguments.data_dir), seed=arguments.seed, changes=changes)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = summary(asyncio.run(compare(make_job, policies, arguments.minutes, say)))
    if arguments.json:
        print(json.dumps(result))
    else:
        _print_policies(result)
    return 1 if any(each["violations"] for each in result["policies"].values()) else 0


def _print_policies(result: dict[str, Any]) -> None:
    table = Table(title=f"rollout on the demo's trace, {result['seconds_each']:.0f} s each", title_justify="left")
    table.add_column("policy")
    for column in ("tokens/s", f"{result['reference']} is", "train steps", "mode switches", "ratio changes", "borrows"):
        table.add_column(column, justify="right")
    for name, each in result["policies"].items():
        ratio = result["ratio"].get(name)
        table.add_row(
            name,
            f"{each['rollout_tokens_per_s']:.1f}",
            "" if ratio is None else f"{ratio:.2f} x",
            str(each["train_steps"]),
            str(each["plans"]["mode_switch"]),
            str(each["plans"]["ratio_change"]),
            str(each["borrows"]["count"]),
        )
    Console().print(table)


def _pace(arguments: argparse.Namespace) -> int:
    from services.bench.pace import measure

    job = jobfile.load(new_run(Path(arguments.data_dir), seed=arguments.seed, changes={}))
    found: list[dict[str, Any]] = []
    for prefill, decode, colocated in CONFIGURATIONS:
        done = measure(job, prefill=prefill, decode=decode, colocated=colocated, prompt=PROMPT, turns=PACE_TURNS)
        found.append(asyncio.run(done))
    if arguments.json:
        print(json.dumps({"pace": found}))
        return 0
    table = Table(title="paced workers beside eq. 1-3", title_justify="left")
    for column in ("workers", "seconds a turn", "predicted", "ratio", "tokens/s"):
        table.add_column(column, justify="right")
    for each in found:
        name = f"{each['colocated']}C" if each["colocated"] else f"{each['prefill']}P{each['decode']}D"
        table.add_row(
            name,
            f"{each['turn_s']:.3f}",
            f"{each['predicted_s']:.3f}",
            f"{each['ratio']:.3f}",
            f"{each['tokens_per_s']:.0f}",
        )
    Console().print(table)
    return 0
