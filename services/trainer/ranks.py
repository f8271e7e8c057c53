"""How the ranks work together: rank 0 talks to the bus and tells the others, by broadcast, which method comes next.

With `training.ranks` = 1 the service's own process is the only rank. With more, `launch` keeps one process a rank.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch's stubs are partial)

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from services.jobfile import JobFile
from services.models.files import initial_model
from services.trainer.config import Config
from services.trainer.learner import Learner, leave_ranks


class Group:
    """All ranks as rank 0 sees them: calls run in a thread, one at a time, on every rank."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        self._config = config
        self._model_dir = model_dir
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._learner: Learner | None = None

    @property
    def learner(self) -> Learner:
        """Rank 0's; there after the first call."""
        assert self._learner is not None, "no method was called yet"
        return self._learner

    async def call(self, method: str, *arguments: object) -> Any:
        """Run a method of `Learner` on all ranks; rank 0's result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, method, arguments)

    def _call(self, method: str, arguments: tuple[object, ...]) -> Any:
        if self._learner is None:
            self._learner = Learner(self._config, self._model_dir, resident=False)
        _tell(self._learner, (method, arguments))
        return getattr(self._learner, method)(*arguments)

    async def close(self) -> None:
        """End the other ranks, after the call that runs. They may be gone already."""
        if self._learner is not None:
            with contextlib.suppress(RuntimeError):
                await asyncio.get_running_loop().run_in_executor(self._thread, _dismiss, self._learner)
        self._thread.shutdown(wait=False)


def follow(job: JobFile) -> None:
    """What every rank but 0 does: obey until told to end."""
    learner = Learner(Config.of(job), initial_model(job), resident=False)
    while (order := _hear(learner)) is not None:
        method, arguments = order
        getattr(learner, method)(*arguments)
    leave_ranks()


def _dismiss(learner: Learner) -> None:
    """Tell the other ranks to end, and leave them; a rank alone has nobody to leave."""
    _tell(learner, None)
    if learner.orders is not None:
        leave_ranks()


def _tell(learner: Learner, order: object) -> None:
    if learner.orders is not None:
        dist.broadcast_object_list([order], src=0, group=learner.orders)


def _hear(learner: Learner) -> Any:
    box: list[Any] = [None]
    dist.broadcast_object_list(box, src=0, group=learner.orders)
    return box[0]
