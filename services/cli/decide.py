"""`pearl decide`: what the decision engine would choose for a profile and a number of workers."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from services.cli.progress import progress
from services.decision_engine.command import decide
from services.jobfile import ConfigError


def read_mapping(path_text: str) -> dict[str, Any]:
    """A JSON or TOML file that holds one object. Raises ConfigError naming the file."""
    path = Path(path_text)
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:  # TOML, JSON, or an integer of thousands of digits
        raise ConfigError(f"{path}: not {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected an object with named fields, found {type(data).__name__}")
    return data  # pyright: ignore[reportUnknownVariableType]


def run(arguments: argparse.Namespace) -> int:
    """Prints the choice and every candidate."""
    with progress("predicting every candidate"):
        result = decide(read_mapping(arguments.profile), arguments.workers)
    if arguments.json:
        print(json.dumps(result))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{arguments.workers} workers", title_justify="left")
    for column in ("prefill", "decode", "colocated", "makespan s", "", "reason"):
        table.add_column(column, justify="left" if column in ("", "reason") else "right")
    chosen = result["chosen"]
    for each in result["candidates"]:
        same = all(each[role] == chosen[role] for role in ("prefill", "decode", "colocated"))
        makespan = "-" if each["makespan_s"] is None else f"{each['makespan_s']:.2f}"
        counts = (str(each[role]) for role in ("prefill", "decode", "colocated"))
        table.add_row(*counts, makespan, "chosen" if same else "", each["reason"], style="bold" if same else None)
    Console().print(table)
    return 0
