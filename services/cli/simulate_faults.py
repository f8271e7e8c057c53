"""`pearl simulate faults`: many seeded runs of everything with everything that can go wrong, watched by checkers."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

import msgspec

from services.jobfile import ConfigError
from services.simulator.faults.plan import Plan, draw, load, told
from services.simulator.faults.run import Outcome, Run, many, shrunk
from services.simulator.faults.transcript import transcript

SEEDS = 200
SHRINK_FIRST = 1
"""So many failing seeds are shrunk and told in full; of the others a line each."""
LAST_LINES = 120
"""Lines of a failing run's transcript that are printed; `--transcript` prints all."""


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 nothing was broken, 1 something was, 2 the input is wrong."""
    single = _single(arguments)
    if single is not None:
        return _one(single, arguments)
    seeds = range(arguments.start, arguments.start + (arguments.seeds or SEEDS))
    begun = time.monotonic()
    events, violations, told_of = 0, list[dict[str, object]](), 0
    longest: dict[str, int] = {}
    with contextlib.closing(many(seeds, jobs=arguments.jobs)) as outcomes:
        for count, outcome in enumerate(outcomes, 1):
            events += outcome.events
            for name, value in outcome.counts.items():
                longest[name] = (
                    max(longest.get(name, value), value)
                    if "most" in name or "latest" in name
                    else longest.get(name, 0) + value
                )
            violations += [
                {"seed": outcome.plan.seed, "invariant": each.invariant, "detail": each.detail}
                for each in outcome.violations
            ]
            if outcome.violations:
                told_of += 1
                _say(f"seed {outcome.plan.seed}: {outcome.violations[0].invariant}: {outcome.violations[0].detail}")
                if told_of <= SHRINK_FIRST:
                    _tell(outcome)
            elif sys.stderr.isatty() and count % 10 == 0:
                print(f"\r{count} of {len(seeds)} seeds, {events} events", end="", file=sys.stderr)
    wall_s = time.monotonic() - begun
    if sys.stderr.isatty():
        print(file=sys.stderr)
    broken = len({each["seed"] for each in violations})
    _say(
        f"{len(seeds)} seeds, {events} events in {wall_s:.1f} s: "
        + (f"{broken} seeds broke a promise" if broken else "nothing broken")
    )
    _say(", ".join(f"{name} {value}" for name, value in sorted(longest.items())))
    if arguments.json:
        report = {"seeds": len(seeds), "start": arguments.start, "events": events, "violations": violations, "counts": longest,
                  "wall_s": round(wall_s, 2)}  # fmt: skip
        print(msgspec.json.encode(report).decode())
    return 1 if violations else 0


def _single(arguments: argparse.Namespace) -> Plan | None:
    """The one plan that is asked for, if it is one."""
    if arguments.plan is not None:
        return load(arguments.plan)
    if arguments.until is None and not arguments.transcript and not arguments.print_plan:
        return None
    if arguments.seeds is not None:
        raise ConfigError(
            "--transcript, --until and --print-plan look at one run: give --start SEED and no --seeds, or --plan FILE"
        )
    return draw(arguments.start)


def _one(plan: Plan, arguments: argparse.Namespace) -> int:
    """One run, to be looked at."""
    if arguments.print_plan:
        print(msgspec.json.format(msgspec.json.encode(plan), indent=1).decode())
        return 0
    begun = time.monotonic()
    run = Run(plan)
    try:
        if arguments.until is not None:
            run.to_event(arguments.until)
            outcome = None
        else:
            outcome = run.to_end()
        if arguments.transcript or arguments.until is not None:
            for line in transcript(run.cluster.record, run.cluster.lines, run.violations, tokens=arguments.tokens):
                print(line)
        if outcome is None:
            for row in run.cluster.table.rows if run.cluster.table_now is not None else ():
                print(
                    f"{row.worker}: {row.activity}/{row.stage} {row.role} #{row.incarnation} g{row.role_generation} v{row.version}"
                )
        found = run.violations
        _say(
            f"{run.cluster.count} events, {len(plan.faults)} faults: "
            + ("; ".join(f"{each.invariant}: {each.detail}" for each in found) or "nothing broken")
        )
        if arguments.json:
            violations = [{"seed": plan.seed, "invariant": each.invariant, "detail": each.detail} for each in found]
            report = {"seeds": 1, "start": plan.seed, "events": run.cluster.count, "violations": violations,
                      "counts": {} if outcome is None else outcome.counts, "wall_s": round(time.monotonic() - begun, 2)}  # fmt: skip
            print(msgspec.json.encode(report).decode())
        return 1 if found else 0
    finally:
        run.close()


def _tell(outcome: Outcome) -> None:
    """A failing run: the smallest plan that still fails, and how it went."""
    smallest = shrunk(outcome)
    plan = smallest.plan
    _say(f"\nshrunk from {len(outcome.plan.faults)} faults to {len(plan.faults)}; as a file for --plan:")
    _say(msgspec.json.encode(plan).decode())
    for fault in plan.faults:
        _say(f"{fault.at_ms:>7} {told(fault)}")
    run = Run(plan)
    try:
        run.to_end()
        lines = list(transcript(run.cluster.record, run.cluster.lines, run.violations))
    finally:
        run.close()
    first = next((index for index, line in enumerate(lines) if line[8:10] == "!!"), len(lines) - 1)
    _say(f"\nthe {LAST_LINES} lines before (pearl simulate faults --plan FILE --transcript prints all):")
    for line in lines[max(0, first - LAST_LINES) : first + 1]:
        _say(line)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
