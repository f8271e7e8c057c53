"""`pearl simulate run`: policies side by side on a trace, a workload and a hardware description."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from services.jobfile import ConfigError
from services.simulator.whatif.result import Result

DEFAULT_POLICIES = "roll,roll-large,rlboost,pearl-paper,pearl"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command takes; `--json` is the caller's."""
    parser.add_argument("--trace", default="bamboo-segment2", help="a built-in name, bamboo-segment1..3, or a CSV file")
    parser.add_argument("--workload", default="swebench-mini", help="a built-in name or a CSV file")
    parser.add_argument("--hardware", default="h800-qwen3-8b", help="a built-in name or a JSON file")
    parser.add_argument(
        "--policy", default=DEFAULT_POLICIES, metavar="A,B,..", help=f"or 'all' (default: {DEFAULT_POLICIES})"
    )
    parser.add_argument("--hours", type=float, default=2.0, help="of the trace, from its beginning (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of tasks, trajectories and the trace's victims")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of docs/what-if.md; may be repeated"
    )
    parser.add_argument("--oracle", action="store_true", help="also what could be reached (takes minutes)")
    parser.add_argument("--out", metavar="FILE.json", default=None, help="keep the whole result there")


def run(arguments: argparse.Namespace) -> int:
    """Exit 0; 2 where an input is wrong."""
    result = simulate(arguments)
    if arguments.out is not None:
        try:
            Path(arguments.out).write_bytes(msgspec.json.encode(result))
        except OSError as error:
            raise ConfigError(f"--out {arguments.out}: cannot be written ({error})") from error
    if arguments.json:
        print(json.dumps(brief(result)))
    else:
        show(result)
    return 0


def simulate(arguments: argparse.Namespace) -> Result:
    """The whole result. Raises ConfigError."""
    from services.environments import workload
    from services.preemption_feed import traces
    from services.simulator.whatif.policies import ALL, find
    from services.simulator.whatif.run import compare
    from services.timing import hardware

    names = list(ALL) if arguments.policy == "all" else [name.strip() for name in arguments.policy.split(",")]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise ConfigError(f"--policy: {doubled!r} is named twice")
    return compare(
        traces.load(arguments.trace),
        workload.load(arguments.workload),
        hardware.load(arguments.hardware),
        [find(name) for name in names],
        hours=arguments.hours,
        seed=arguments.seed,
        settings=settings_of(arguments.set),
        oracle=arguments.oracle,
        progress=lambda text: print(f"{text} ...", file=sys.stderr, flush=True),
    )


def settings_of(pairs: list[str]) -> Any:  # Any: the class is imported late
    """The settings with `KEY=VALUE` changes. Raises ConfigError naming the key."""
    from services.simulator.whatif.settings import Settings

    changes: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if key not in Settings.__struct_fields__ or not equals:
            known = ", ".join(Settings.__struct_fields__)
            raise ConfigError(f"--set {pair!r}: give KEY=VALUE with a key of {known}")
        try:
            changes[key] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            changes[key] = text
    try:
        return msgspec.convert(changes, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set: {error}") from error


def brief(result: Result) -> dict[str, Any]:
    """The result as JSON without what only reports draw."""
    found: dict[str, Any] = msgspec.to_builtins(result)
    for policy in found["policies"].values():
        for key in ("steps", "decided", "spans", "throughput"):
            del policy[key]
    return found


def show(result: Result) -> None:
    """A table."""
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{result.trace}, {result.workload}, {result.hardware}, {result.hours:g} h, seed {result.seed}; all simulated"
    )
    table = Table(title=title, title_justify="left")
    for column in ("policy", "tokens/s", "of first", "steps", "s a step", "staleness", "reward", "busy", "borrows"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    first = next(iter(result.policies.values())).throughput_tokens_per_s
    for name, policy in result.policies.items():
        table.add_row(
            name,
            f"{policy.throughput_tokens_per_s:.0f}",
            f"{policy.throughput_tokens_per_s / first:.2f}" if first else "-",
            str(policy.train_steps),
            f"{policy.mean_train_step_s:.1f}",
            str(policy.staleness_max),
            f"{policy.reward_mean:.2f}",
            f"{policy.gpu_busy_fraction:.0%}",
            str(policy.borrows),
        )
    for oracle in result.oracles:
        ratio = f"{oracle.throughput_tokens_per_s / first:.2f}" if first else "-"
        table.add_row(f"oracle, {oracle.name}", f"{oracle.throughput_tokens_per_s:.0f}", ratio, style="dim")
    Console().print(table)
