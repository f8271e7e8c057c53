"""`pearl bench`: benchmarks of the running system on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from services import jobfile
from services.bench.figures import Figure
from services.cli.demo import new_run
from services.cli.outputs import report_folder
from services.cli.parser import FIGURES
from services.cli.progress import progress
from services.jobfile import ConfigError, parse_policy

CONFIGURATIONS = ((0, 0, 2), (0, 0, 3), (0, 0, 4), (0, 0, 5), (1, 1, 0), (2, 1, 0), (3, 1, 0), (2, 2, 0), (4, 1, 0))
"""(prefill, decode, colocated) workers that `pace` measures: what the demo's budgets allow."""
PROMPT = 8
"""Tokens of a prompt there: about what a turn of the demo computes."""
PACE_TURNS = 6
SCALE_MINUTES = 10.0
POLICY_MINUTES = 12.0
VALIDATED = ((0, 0, 2), (0, 0, 4), (2, 1, 0), (3, 1, 0))
"""(prefill, decode, colocated) workers that `calibrate --validate` runs and simulates: both modes, small and large."""
VALIDATED_TURNS = 8


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 if a run broke an invariant. A target that a figure misses is shown, and no failure."""
    named = {"policies": _policies, "pace": _pace, "scale": _scale, "calibrate": _calibrate}
    return named.get(arguments.name, _figures)(arguments)


def _figures(arguments: argparse.Namespace) -> int:
    from services.bench.figures import as_json, write_report

    report = _report_folder(arguments)
    names = FIGURES if arguments.name == "all" else (arguments.name,)
    figures = uvloop.run(_measure(names, Path(arguments.data_dir), arguments.seed))
    if report is not None:
        write_report(figures, report)
    if arguments.json:
        print(json.dumps(as_json(figures)))
    else:
        _print_figures(figures)
    return 0


def _report_folder(arguments: argparse.Namespace) -> Path | None:
    report = report_folder(arguments.report)
    if report is not None:
        try:
            report.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--report {report}: cannot be written ({error})") from error
    return report


def _scale(arguments: argparse.Namespace) -> int:
    """Exit 1 if the workers never all served."""
    from services.bench import scale, scale_figures
    from services.bench.figures import as_json, lines_svg, write_report

    report = _report_folder(arguments)
    minutes = SCALE_MINUTES if arguments.minutes is None else arguments.minutes
    with tempfile.TemporaryDirectory(prefix="pearl-scale-") as folder:
        measuring = scale.measure(Path(folder), workers=arguments.workers, seconds=60 * minutes, say=_say)
        try:
            run = uvloop.run(measuring)
        except scale.ScaleError as error:
            _say(f"pearl bench: {error}")
            return 1
    figures = scale_figures.figures(run)
    if report is not None:
        write_report(figures, report)
        (report / "scale.json").write_text(json.dumps(scale_figures.as_json(run)) + "\n", encoding="utf-8")
        memory = {name: [each / scale_figures.MIB for each in samples] for name, samples in run.memory.items()}
        title = f"memory of each service, MiB, with {run.workers} workers"
        (report / "scale.svg").write_text(lines_svg(title, run.at_s, memory), encoding="utf-8")
    if arguments.json:
        print(json.dumps({**as_json(figures), "scale": scale_figures.as_json(run)}))
    else:
        _print_figures(figures)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def _measure(names: Sequence[str], data_dir: Path, seed: int) -> list[Figure]:
    """One after the other: two at once would measure each other."""
    from services.bench import gateway, plan, processes, router, snapshot, stream, table

    figures: list[Figure] = []
    usage: processes.Usage | None = None
    for name in names:
        _say(f"{name} ...")
        with progress(name), tempfile.TemporaryDirectory(prefix="pearl-bench-") as temporary:
            folder = Path(temporary)
            match name:
                case "table":
                    figures += await table.measure(folder)
                case "plan":
                    figures += await asyncio.to_thread(plan.measure, folder)
                case "router":
                    figures += await router.measure(folder)
                case "stream":
                    figures += await stream.measure(folder)
                case "gateway":
                    figures += await gateway.measure(folder)
                case "engine":
                    from services.bench import engine  # torch, and transformers: heavy

                    figures += await engine.measure(folder)
                case "snapshot":
                    figures += await asyncio.to_thread(snapshot.measure, folder)
                case _:
                    if usage is None:  # one run of a job is enough for both
                        usage = await processes.observe(new_run(data_dir, seed=seed, changes={}, engine="emulated"))
                    figures += (
                        await processes.turn_figures(usage, folder)
                        if name == "turn"
                        else processes.memory_figures(usage)
                    )
    return figures


def _print_figures(figures: Sequence[Figure]) -> None:
    table = Table(title="figures beside their references, measured in this run", title_justify="left")
    for column in ("", "case", "value", "reference", "ratio", "reference is", "target", ""):
        table.add_column(column, justify="right" if column in ("value", "reference", "ratio") else "left")
    before = ""
    for each in figures:
        table.add_row(
            "" if each.benchmark == before else each.benchmark,
            each.case,
            f"{each.value:,.3g} {each.unit}" if abs(each.value) < 1000 else f"{each.value:,.0f} {each.unit}",
            ""
            if each.reference is None
            else f"{each.reference:,.3g}"
            if each.reference < 1000
            else f"{each.reference:,.0f}",
            "" if each.ratio is None else f"{each.ratio:.2f} x",
            each.reference_is,
            each.target,
            {True: "met", False: "missed", None: ""}[each.met],
            style="bold" if each.met is False else None,
        )
        before = each.benchmark
    Console(width=max(Console().width, 120)).print(table)


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

    minutes = POLICY_MINUTES if arguments.minutes is None else arguments.minutes
    with progress("measuring"):
        result = summary(asyncio.run(compare(make_job, policies, minutes, _say)))
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


def _calibrate(arguments: argparse.Namespace) -> int:
    import msgspec

    from services.bench.calibrate import calibrate, validate

    out = Path(arguments.out)
    if not Path(os.path.realpath(out)).parent.is_dir() or out.is_dir():
        raise ConfigError(f"--out {out}: give a file in a folder that exists")
    path = arguments.config or new_run(Path(arguments.data_dir), seed=arguments.seed, changes={})
    job = jobfile.load(path)
    if job.rollout.engine not in ("torch", "emulated"):
        raise ConfigError(
            f"rollout.engine = {job.rollout.engine!r}: calibrate measures engines that this process can start"
        )

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    hardware = asyncio.run(calibrate(job, say=say))
    out.write_bytes(msgspec.json.format(msgspec.json.encode(hardware), indent=1) + b"\n")
    checked = (
        asyncio.run(validate(job, hardware, VALIDATED, prompt=PROMPT, turns=VALIDATED_TURNS))
        if arguments.validate
        else []
    )
    if arguments.json:
        print(json.dumps({"out": str(out), "hardware": hardware.name, "validation": checked}))
        return 0
    print(f"{out}: {hardware.text}")
    if checked:
        table = Table(title="seconds a turn, run and simulated", title_justify="left")
        for column in ("workers", "run", "simulated", "error"):
            table.add_column(column, justify="right")
        for each in checked:
            name = f"{each['colocated']}C" if each["colocated"] else f"{each['prefill']}P{each['decode']}D"
            numbers = (f"{each['turn_s']:.3f}", f"{each['simulated_s']:.3f}", f"{each['error']:+.1%}")
            table.add_row(name, *numbers)
        Console().print(table)
    return 0


def _pace(arguments: argparse.Namespace) -> int:
    from services.bench.pace import Play, measure

    job = jobfile.load(new_run(Path(arguments.data_dir), seed=arguments.seed, changes={}))
    found: list[dict[str, Any]] = []
    for prefill, decode, colocated in CONFIGURATIONS:
        play = Play(prefill=prefill, decode=decode, colocated=colocated, prompt=PROMPT, turns=PACE_TURNS)
        with progress(f"{prefill}P{decode}D" if prefill else f"{colocated}C"):
            found.append(asyncio.run(measure(job, play)))
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
