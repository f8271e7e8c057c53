"""`pearl simulate run`: policies side by side on a trace, a workload and a hardware description."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from services.cli import simulate_output
from services.jobfile import ConfigError
from services.simulator.whatif.result import Result


def run(arguments: argparse.Namespace) -> int:
    """Exit 0; 2 where an input is wrong."""
    from services.simulator.whatif.report.summary import intervals, priced

    names = names_of(arguments.policy)
    folder = simulate_output.check(arguments, names)
    settings = settings_of(arguments.set)
    warn(arguments, settings)
    found = simulate_output.over_seeds(arguments, simulate)
    results = [priced(each, arguments.spot_price, arguments.reserved_price) for each in found]
    if arguments.out is not None:
        try:
            Path(arguments.out).write_bytes(msgspec.json.encode(results[0] if len(results) == 1 else results))
        except OSError as error:
            raise ConfigError(f"--out {arguments.out}: cannot be written ({error})") from error
    sensitivity = simulate_output.sensitivity_of(arguments, results, settings)
    simulate_output.finish(arguments, results, sensitivity, folder)
    if arguments.json:
        told = brief(results[0]) | {"summary": intervals(results, arguments.reference)}
        if len(results) > 1:
            told["seeds"] = [brief(each) for each in results]
        if sensitivity is not None:
            told["sensitivity"] = msgspec.to_builtins(sensitivity) | {"verdict": sensitivity.verdict()}
        print(json.dumps(told))
    return 0


def names_of(text: str) -> list[str]:
    """The policies of `--policy`. Raises ConfigError."""
    from services.simulator.whatif.policies import ALL, find

    names = list(ALL) if text == "all" else [name.strip() for name in text.split(",")]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise ConfigError(f"--policy: {doubled!r} is named twice")
    return [find(name).name for name in names]


def warn(arguments: argparse.Namespace, settings: Any) -> None:
    """Say what of the trace was read over, and what of it is not used."""
    from services.preemption_feed import traces

    trace = traces.load(arguments.trace)
    for line in trace.warnings:
        print(f"{trace.name}: {line}", file=sys.stderr)
    used = settings.most_preemptible_gpus
    if trace.most > used:
        print(
            f"{trace.name} has up to {trace.most} GPUs, of which at most {used} are used: "
            f"--set most_preemptible_gpus={trace.most} uses all",
            file=sys.stderr,
        )
    if trace.steps[0].time_s >= arguments.hours * 3600:
        raise ConfigError(
            f"{trace.name}: begins at {trace.steps[0].time_s:g} s, after the {arguments.hours:g} h that are simulated: "
            "let time_s count from the trace's beginning, or give more --hours"
        )


def simulate(arguments: argparse.Namespace) -> Result:
    """The whole result of one seed. Raises ConfigError."""
    from services.environments import workload
    from services.preemption_feed import traces
    from services.simulator.whatif.policies import find
    from services.simulator.whatif.run import compare
    from services.timing import hardware

    told = f"seed {arguments.seed}, " if arguments.seeds > 1 else ""
    return compare(
        traces.load(arguments.trace),
        workload.load(arguments.workload),
        hardware.load(arguments.hardware),
        [find(name) for name in names_of(arguments.policy)],
        hours=arguments.hours,
        seed=arguments.seed,
        settings=settings_of(arguments.set),
        oracle=arguments.oracle,
        progress=lambda text: print(f"{told}{text} ...", file=sys.stderr, flush=True),
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
