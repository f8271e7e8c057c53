"""Where a command that runs a job keeps its log lines, and what a person is told of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

from services.jobfile import ConfigError, JobFile
from services.runtime.log import told

LOG_FILE: Final = "pearl.log"
"""Below `<run>/logs`, beside the files of the services: one JSON object a line, appended to."""


@contextlib.contextmanager
def run_log(job: JobFile, tell: Callable[[str], None]) -> Generator[Path]:
    """Within it, this process's log lines go to the run's folder; `tell` hears warnings and errors in words. Raises ConfigError."""
    path = job.run_dir / "logs" / LOG_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another job.data_dir") from error
    with file, told(tell, file):
        yield path
