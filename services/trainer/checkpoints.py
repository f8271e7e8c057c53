"""Which checkpoints there are, and making one last: complete or not at all. Knows nothing of what is in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from messages.pipeline_scheduler import StepFinished

META: Final = "pearl.json"
"""Written last into a checkpoint; names what it is."""
KEEP_CHECKPOINTS: Final = 2
"""The newest, from which a restart goes on, and the one before it, for people."""


class CheckpointMeta(msgspec.Struct, frozen=True):
    """Beside the tensors: which version they are, and what to say of the step that made it."""

    version: int
    finished: StepFinished


def folder_of(root: Path, version: int) -> Path:
    """Where the checkpoint of a version goes."""
    return root / f"v{version:08d}"


def commit(draft: Path, target: Path, meta: CheckpointMeta) -> None:
    """Make a folder with everything in it the checkpoint `target`, beside it; prune old ones."""
    with (draft / META).open("wb") as file:
        file.write(msgspec.json.encode(meta))
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    _sync_folder(target.parent)
    for old in complete_checkpoints(target.parent)[:-KEEP_CHECKPOINTS]:
        shutil.rmtree(old, ignore_errors=True)


def newest(root: Path) -> tuple[Path, CheckpointMeta] | None:
    """The newest complete checkpoint; None if there is none."""
    found = complete_checkpoints(root)
    if not found:
        return None
    return found[-1], msgspec.json.decode((found[-1] / META).read_bytes(), type=CheckpointMeta)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were finished, oldest first."""
    return sorted(path.parent for path in folder.glob(f"v[0-9]*/{META}") if path.parent.suffix == "")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
