"""What `pearl simulate run` does with its results: several seeds, prices, the sensitivity, the report."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.outputs import report_folder
from services.jobfile import ConfigError
from services.runtime.pool import pool_size, worker_pool

if TYPE_CHECKING:
    from services.simulator.whatif.report.sensitivity import Sensitivity
    from services.simulator.whatif.result import Result

MOST_COMPARED = 3
"""Policies whose order the sensitivity looks at: each costs two runs a constant."""


def check(arguments: argparse.Namespace, names: list[str]) -> Path | None:
    """The folder of the report, before anything long begins. Raises ConfigError."""

    if arguments.reference and arguments.reference not in names:
        raise ConfigError(f"--reference {arguments.reference}: one of --policy ({', '.join(names)}) is expected")
    if arguments.sensitivity and len(names) < 2:
        raise ConfigError("--sensitivity: name at least two policies, between which the decision is")
    if arguments.out is not None:
        try:
            with Path(arguments.out).open("ab"):
                pass
        except (OSError, ValueError) as error:
            raise ConfigError(f"--out {arguments.out}: cannot be written ({error})") from error
    return report_folder(arguments.report)


def over_seeds(arguments: argparse.Namespace, one: Callable[[argparse.Namespace], Result]) -> list[Result]:
    """A result a seed, several at a time; says how far it is. `one` is a module's function: it may run in another process."""
    began_s = time.monotonic()
    each = [
        argparse.Namespace(**{**vars(arguments), "seed": arguments.seed + index}) for index in range(arguments.seeds)
    ]
    processes = pool_size(arguments.processes, len(each))
    if processes == 1:
        return [one(given) for given in each]
    results: list[Result] = []
    with worker_pool(processes) as pool:
        for done, result in enumerate(pool.map(one, each), start=1):
            results.append(result)
            spent_s = time.monotonic() - began_s
            left = f", about {spent_s / done * (len(each) - done):.0f} s left" if done < len(each) else ""
            print(f"{done} of {len(each)} seeds after {spent_s:.0f} s{left}", file=sys.stderr, flush=True)
    return results


def sensitivity_of(arguments: argparse.Namespace, results: list[Result], settings: Any) -> Sensitivity | None:
    """With `--sensitivity`: the best policy against the reference, and the second best beside them. `settings`: the run's."""
    if not arguments.sensitivity:
        return None
    from services.environments import workload
    from services.preemption_feed import traces
    from services.simulator.whatif.report.summary import reference_of, summarise
    from services.simulator.whatif.sensitivity import examine
    from services.timing import hardware

    reference = reference_of(results[0], arguments.reference)
    ranked = sorted(summarise(results, reference), key=lambda each: -each.throughput.mean)
    order = [each.name for each in ranked if each.name != reference]
    began_s = time.monotonic()

    def progress(done: int, of: int, told: str) -> None:
        print(f"  {done}/{of}  {time.monotonic() - began_s:.0f} s  {told}", file=sys.stderr, flush=True)

    print("sensitivity", file=sys.stderr, flush=True)
    return examine(
        traces.load(arguments.trace),
        workload.load(arguments.workload),
        hardware.load(arguments.hardware),
        [*order[: MOST_COMPARED - 1], reference],
        reference=reference,
        hours=arguments.hours,
        seed=arguments.seed,
        settings=settings,
        processes=arguments.processes,
        progress=progress,
    )


def finish(
    arguments: argparse.Namespace, results: list[Result], sensitivity: Sensitivity | None, folder: Path | None
) -> None:
    """Write the report; print the tables, unless the output is JSON."""
    from services.simulator.whatif.report.terminal import print_results
    from services.simulator.whatif.report.write import write_report

    if folder is not None:
        command = shlex.join(["pearl", *sys.argv[1:]])
        write_report(results, folder, reference=arguments.reference, sensitivity=sensitivity, command=command)
    if arguments.json:
        return
    print_results(results, reference=arguments.reference)
    if sensitivity is not None:
        print(sensitivity.verdict())
    if folder is not None:
        print(f"report: {folder / 'index.html'}")
