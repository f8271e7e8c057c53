"""Options of `pearl simulate`'s longer sub-commands. Apart from what runs them, which needs much: every `pearl` builds the parser."""

from __future__ import annotations

import argparse

DEFAULT_POLICIES = "roll,roll-large,rlboost,pearl-paper,pearl"


def add_run(parser: argparse.ArgumentParser) -> None:
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


def add_output(parser: argparse.ArgumentParser) -> None:
    """Of the output; prices are the parser's own."""
    parser.add_argument(
        "--seeds", type=_count, default=1, metavar="N", help="so many seeds, from --seed on (default: 1)"
    )
    parser.add_argument(
        "--report", metavar="DIR", default=None, help="leave plots, JSON and one page (index.html) there"
    )
    parser.add_argument(
        "--reference", metavar="POLICY", default="", help="what the others are compared with (default: roll)"
    )
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="the best policies again with each constant 20 %% lower and higher: does the conclusion hold? (takes long)",
    )
    parser.add_argument("--processes", type=_count, default=None, help="at a time (default: one a core)")


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to 1000")
    return value


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Options of `pearl simulate selection` and `gate`."""
    parser.add_argument("--settings", type=int, default=300, metavar="N", help="random settings (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_table2(parser: argparse.ArgumentParser) -> None:
    """Options of `pearl simulate table2`."""
    parser.add_argument("--seed", type=int, default=0, help="of the batches (default: 0)")
    parser.add_argument(
        "--turns", type=int, default=200, metavar="N", help="cut trajectories there: faster (default: 200)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
