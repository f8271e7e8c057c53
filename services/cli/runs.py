"""Finding the run a command means, and talking to it."""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from services import jobfile
from services.connect import connect
from services.jobfile import ConfigError, JobFile
from services.nats_server.process import EmbeddedServer
from services.runtime.bus import Bus

RUN_FILE = "job.toml"
REACH_S: Final = 3.0
"""A NATS server of one's own that does not take a connection within this is not there."""


def job_of(arguments: argparse.Namespace) -> JobFile:
    """The job file given with -c, or that of the newest run below .pearl. Raises ConfigError."""
    return jobfile.load(job_path_of(arguments))


async def connect_running(job: JobFile, user: str) -> Bus:
    """Connect to the bus of a job that runs. Raises ConfigError at once where it does not; BusError."""
    if job.nats.local and EmbeddedServer(job).pid is None:
        raise ConfigError(
            f"job {job.job.name} in {job.run_dir.absolute()} is not running: it has no NATS server; start it with `pearl up`, or name "
            "another job file with -c"
        )
    if not job.nats.local:
        check_reachable(job)
    return await connect(job, user)


def check_reachable(job: JobFile) -> None:
    """Something listens where `nats.url` or `nats.cluster` says. Raises ConfigError."""
    problems: list[str] = []
    for url in (part.strip() for part in job.nats.address.split(",")):
        try:
            parts = urlsplit(url if "://" in url else f"nats://{url}")
            with socket.create_connection((parts.hostname or "", parts.port or 4222), timeout=REACH_S):
                return
        except (OSError, ValueError) as error:
            problems.append(f"{url}: {error}")
    where = f"nats.cluster = {list(job.nats.cluster)}" if job.nats.cluster else f"nats.url = {job.nats.url!r}"
    raise ConfigError(f"{where}: no NATS server there ({'; '.join(problems)}); start it, or correct the address")


def job_path_of(arguments: argparse.Namespace) -> Path:
    """Path of the job file meant."""
    if arguments.config is not None:
        return Path(os.path.realpath(arguments.config))
    runs = sorted(Path(".pearl").glob(f"*/{RUN_FILE}"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ConfigError(
            f"no run found below {Path('.pearl').resolve()}: start one, or name its job file with -c FILE"
        )
    return runs[-1].resolve()
