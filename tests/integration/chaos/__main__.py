"""`python -m tests.integration.chaos --minutes 10 --seed N --report FILE`: the long run of `make soak`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.integration.chaos.report import to_json, to_text
from tests.integration.chaos.run import chaos


def main() -> int:
    """Exit 0 if everything held, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m tests.integration.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults (10)")
    parser.add_argument("--seed", type=int, default=0, help="which faults (0)")
    parser.add_argument("--faults", type=int, default=0, help="how many (10.5 a minute)")
    parser.add_argument("--time-scale", type=float, default=4.0, help="emulated seconds a second (4)")
    parser.add_argument("--report", type=Path, help="JSON file to write; a .txt goes beside it")
    parser.add_argument("--keep", type=Path, help="folder for logs, streams and journals; it is kept")
    arguments = parser.parse_args()
    count = arguments.faults or round(10.5 * arguments.minutes)

    def say(text: str) -> None:
        print(text, flush=True)

    with tempfile.TemporaryDirectory(prefix="pearl-chaos-") as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(
            chaos(
                folder.resolve(),
                seed=arguments.seed,
                minutes=arguments.minutes,
                count=count,
                time_scale=arguments.time_scale,
                say=say,
            )
        )
    if arguments.report:
        arguments.report.write_bytes(to_json(report))
        arguments.report.with_suffix(".txt").write_text(to_text(report) + "\n")
    print(to_text(report))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
