"""`pearl simulate report`: the report of a what-if run from its JSON; no simulation is run again."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from services.cli.outputs import report_folder
from services.jobfile import ConfigError
from services.simulator.whatif.result import Result


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; writes the folder if one is named."""
    from services.simulator.whatif.report.summary import priced
    from services.simulator.whatif.report.terminal import print_results
    from services.simulator.whatif.report.write import write_report

    folder = report_folder(arguments.report)
    results = [priced(each, arguments.spot_price, arguments.reserved_price) for each in read_results(arguments.result)]
    if arguments.reference and arguments.reference not in results[0].policies:
        raise ConfigError(f"--reference {arguments.reference}: one of {', '.join(results[0].policies)} is expected")
    if folder is not None:
        write_report(results, folder, reference=arguments.reference)
    if arguments.json:
        print(msgspec.json.encode({"results": results, "report": None if folder is None else str(folder)}).decode())
        return 0
    print_results(results, reference=arguments.reference)
    if folder is not None:
        print(f"report: {folder / 'index.html'}")
    return 0


def read_results(path_text: str) -> list[Result]:
    """One result, or those of several seeds: the last line that is JSON counts, or the whole file. Raises ConfigError."""
    path = Path(path_text)
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path_text}: cannot be read ({error})") from error
    problem = "empty"
    for text in (data, data.strip().rpartition(b"\n")[2]):
        try:
            found = msgspec.json.decode(text, type=list[Result] | Result)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            problem = str(error)
            continue
        results = found if isinstance(found, list) else [found]
        return _comparable(results, path_text)
    raise ConfigError(f"{path_text}: not the JSON of `pearl simulate run` ({problem})")


def _comparable(results: list[Result], name: str) -> list[Result]:
    if not results or not results[0].policies:
        raise ConfigError(f"{name}: no policy in it")
    first = results[0]
    for each in results:
        if (each.trace, each.workload, each.hardware, each.hours) != (
            first.trace,
            first.workload,
            first.hardware,
            first.hours,
        ) or set(each.policies) != set(first.policies):
            raise ConfigError(f"{name}: its runs differ by more than their seed: report each input by itself")
    return results
