"""Train metrics where people look: JSON lines, and TensorBoard if it is installed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Final

import msgspec

from messages.pipeline_scheduler import StepFinished

BOARD: Final = ("reward_mean", "reward_std", "loss", "grad_norm", "train_s", "zero_variance_groups")
"""Fields of a train step on the board, beside its `metrics`."""


class Metrics:
    """`train.jsonl` and the TensorBoard folder `tb`, one line and one point a train step, each step once."""

    def __init__(self, folder: Path, *, board: bool = True) -> None:
        """`board` False: JSON lines only, and nothing of torch is imported."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "train.jsonl"
        self._newest = _newest_batch(path)
        self._file = path.open("a", encoding="utf-8")
        self._folder = folder
        self._wanted = board
        self._board: Any = None  # a SummaryWriter, made late since importing it takes a second

    def write(self, step: StepFinished) -> None:
        """Append a train step, unless it is there already (it may be, after a restart). Blocks."""
        if step.batch <= self._newest:
            return
        self._newest = step.batch
        values: dict[str, Any] = msgspec.to_builtins(step)
        values |= values.pop("metrics")
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._board is None and self._wanted:
            with contextlib.suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self._folder / "tb"))
        if self._board is not None:
            for name in (*BOARD, *step.metrics):
                self._board.add_scalar(f"train/{name}", values[name], step.batch)
            self._board.flush()

    def close(self) -> None:
        """Flush what is open."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _newest_batch(path: Path) -> int:
    """The last batch in a metrics file, -1 if none. A torn last line is completed with a line end and counts as none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return -1
    if text and not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["batch"])
    return -1
