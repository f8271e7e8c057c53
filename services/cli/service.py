"""`pearl service NAME`: one service in this process."""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import inspect
import os
import re
from pathlib import Path

from services import jobfile
from services.jobfile import ConfigError
from services.runtime.lifecycle import run_service


def names() -> list[str]:
    """Services that can be run: folders of services/ with a service.py that serves."""
    root = Path(__file__).parents[1]
    serves = re.compile(r"^async def serve\(", re.MULTILINE)
    return sorted(
        path.parent.name for path in root.glob("*/service.py") if serves.search(path.read_text(encoding="utf-8"))
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    if arguments.name not in names():
        raise ConfigError(f"no service {arguments.name!r}; there are {', '.join(names())}")
    job_path = Path(os.path.realpath(arguments.config))
    job = jobfile.load(job_path)
    serve = importlib.import_module(f"services.{arguments.name}.service").serve
    given = {
        "node": arguments.node,
        "worker": arguments.worker,
        "incarnation": arguments.incarnation,
        "index": arguments.index,
        "job_path": job_path,
    }
    wanted = inspect.signature(serve).parameters
    options = {name: value for name, value in given.items() if name in wanted}
    missing = sorted(
        name for name, value in options.items() if value is None and wanted[name].default is inspect.Parameter.empty
    )
    if missing:
        raise ConfigError(
            f"service {arguments.name} needs " + ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        )
    options = {name: value for name, value in options.items() if value is not None}

    refused: list[ConfigError] = []

    async def serve_job(stop: asyncio.Event) -> None:
        try:
            await functools.partial(serve, job, stop, **options)()
        except ConfigError as error:
            refused.append(error)

    status = run_service(serve_job, name=arguments.name)
    if refused:
        raise refused[0]
    return status
