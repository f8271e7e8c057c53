"""`pearl service NAME`: one service in this process."""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from messages.ids import Zone
from services import jobfile
from services.emulated_fleet.config import fleets
from services.jobfile import ConfigError, JobFile, rollout_slots
from services.runtime.lifecycle import run_service

OPTIONS: Final = ("node", "worker", "incarnation", "index")
"""What a service may be told beside its job file; each takes those that its `serve` has."""
LAUNCHED: Final = ("worker", "incarnation")
MOST_INCARNATION: Final = 2**63 - 1
MOST_NAMED: Final = 20
"""Names that a message lists: a job may have thousands of workers."""


def names() -> list[str]:
    """Services that can be run: folders of services/ with a service.py that serves."""
    root = Path(__file__).parents[1]
    serves = re.compile(r"^async def serve\(", re.MULTILINE)
    return sorted(
        path.parent.name for path in root.glob("*/service.py") if serves.search(path.read_text(encoding="utf-8"))
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    name: str = arguments.name
    if name not in names():
        raise ConfigError(f"no service {name!r}; there are {', '.join(names())}")
    job_path = Path(os.path.realpath(arguments.config))
    job = jobfile.load(job_path)
    serve = importlib.import_module(f"services.{name}.service").serve
    wanted = inspect.signature(serve).parameters
    options: dict[str, object] = {key: value for key in OPTIONS if (value := getattr(arguments, key)) is not None}
    _refuse_wrong(name, job, options, takes=[key for key in OPTIONS if key in wanted])
    missing = [
        key
        for key in OPTIONS
        if key in wanted and key not in options and wanted[key].default is inspect.Parameter.empty
    ]
    if missing:
        raise ConfigError(f"service {name} needs " + ", ".join(f"--{key}" for key in missing))
    if "index" in wanted:
        options.setdefault("index", 0)
        _check_index(name, job, 0)
    options = {key: value for key, value in {**options, "job_path": job_path}.items() if key in wanted}

    refused: list[ConfigError] = []

    async def serve_job(stop: asyncio.Event) -> None:
        try:
            await functools.partial(serve, job, stop, **options)()
        except ConfigError as error:
            refused.append(error)

    status = run_service(serve_job, name=name)
    if refused:
        raise refused[0]
    return status


def _refuse_wrong(name: str, job: JobFile, given: Mapping[str, object], *, takes: Sequence[str]) -> None:
    """Before anything is connected: each option must be the service's, with a value that the job file knows. Raises ConfigError."""
    if name == "trainer":
        takes = (*takes, *LAUNCHED)  # node agents launch it as they launch workers
    for key in given:
        if key not in takes:
            its = ", ".join(f"--{each}" for each in takes) or "no option but -c"
            raise ConfigError(f"service {name} takes no --{key} (it takes {its})")
    for key, value in given.items():
        if key == "node":
            _among("node", str(value), [node.name for node in job.nodes], "nodes of the job file")
        elif key == "worker":
            _among("worker", str(value), _slots(name, job), f"slots of service {name} in this job file")
        elif key == "incarnation" and not (isinstance(value, int) and 1 <= value <= MOST_INCARNATION):
            raise ConfigError(
                f"--incarnation {value}: the first process of a slot is 1, and at most {MOST_INCARNATION}"
            )
        elif key == "index":
            assert isinstance(value, int)
            _check_index(name, job, value)


def _slots(name: str, job: JobFile) -> list[str]:
    """The worker slots that a service may be told to be."""
    if name != "trainer":
        return [slot.worker for slot in rollout_slots(job)]
    return [f"{node.name}-t0" for node in job.nodes if node.zone is Zone.TRAINING][:1]


def _among(option: str, value: str, known: Sequence[str], what: str) -> None:
    if value not in known:
        shown = ", ".join(known[:MOST_NAMED]) or "none"
        more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
        raise ConfigError(f"--{option} {value}: not one of the {what} ({shown}{more})")


def _check_index(name: str, job: JobFile, index: int) -> None:
    count, key = _instances(name, job)
    if count == 0:
        raise ConfigError(f"--index {index}: {key} makes no {name} in this job")
    if index < 0 or (count is not None and index >= count):
        allowed = "0 or more" if count is None else "0" if count == 1 else f"from 0 to {count - 1}"
        raise ConfigError(f"--index {index}: {key} allows {allowed}" if key else f"--index {index}: use {allowed}")


def _instances(name: str, job: JobFile) -> tuple[int | None, str]:
    """How many of a service may run, each with its index (None: as many as you like), and the key that says so."""
    match name:
        case "agent":
            return job.agent.processes, f"agent.processes = {job.agent.processes}"
        case "harness" if job.harness.processes:
            return job.harness.processes, f"harness.processes = {job.harness.processes}"
        case "router" if job.gateway.bind:
            return job.gateway.instances, f"gateway.instances = {job.gateway.instances}"
        case "emulated_fleet":
            return len(fleets(job)), f"rollout.workers_per_process = {job.rollout.workers_per_process}"
        case "nats_server" if job.nats.cluster:
            return len(job.nats.cluster), f"nats.cluster, of {len(job.nats.cluster)} servers,"
        case "nats_server":
            return 1, "a job without nats.cluster"
        case _:
            return None, ""
