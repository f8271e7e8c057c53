"""Where commands leave files, looked at before anything long begins."""

from __future__ import annotations

import os
from pathlib import Path

from services.jobfile import ConfigError


def report_folder(text: str | None) -> Path | None:
    """The folder of `--report`, to be made or written into; None where none is asked for. Raises ConfigError."""
    if text is None:
        return None
    folder = Path(os.path.realpath(text))
    if not folder.parent.is_dir() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"--report {folder}: give a folder to make, or to write into, in one that exists")
    return folder
