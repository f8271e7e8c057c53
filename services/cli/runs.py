"""Finding the run a command means, and talking to it."""

from __future__ import annotations

import argparse
from pathlib import Path

from services import jobfile
from services.jobfile import ConfigError, JobFile

RUN_FILE = "job.toml"


def job_of(arguments: argparse.Namespace) -> JobFile:
    """The job file given with -c, or that of the newest run below .pearl. Raises ConfigError."""
    return jobfile.load(job_path_of(arguments))


def job_path_of(arguments: argparse.Namespace) -> Path:
    """Path of the job file meant."""
    if arguments.config is not None:
        return Path(arguments.config).resolve()
    runs = sorted(Path(".pearl").glob(f"*/{RUN_FILE}"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ConfigError(f"no run found below {Path('.pearl').resolve()}; give its job file with -c FILE")
    return runs[-1].resolve()
