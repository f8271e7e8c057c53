"""How the ranks work together: rank 0 talks to the bus and tells the others, by broadcast, which method comes next.

With `training.ranks` = 1 the service's own process is the only rank. With more, the service starts torchrun, whose agent
restarts the whole group when one rank dies; the group then goes on from its checkpoint.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from services.jobfile import JobFile
from services.models.files import initial_model
from services.trainer.config import Config
from services.trainer.learner import Learner

MAX_RESTARTS = 100
"""Of a group by torchrun, before the service itself fails and its node agent takes over."""


class Group:
    """All ranks as rank 0 sees them: calls run in a thread, one at a time, on every rank."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        self._config = config
        self._model_dir = model_dir
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self.learner: Any = None

    async def call(self, method: str, *arguments: object) -> Any:
        """Run a method of `Learner` on all ranks; rank 0's result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, method, arguments)

    def _call(self, method: str, arguments: tuple[object, ...]) -> Any:
        if self.learner is None:
            self.learner = Learner(self._config, self._model_dir)
        _tell(self._config, (method, arguments))
        return getattr(self.learner, method)(*arguments)

    async def close(self) -> None:
        """End the other ranks."""
        if self.learner is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, _tell, self._config, None)
        self._thread.shutdown(wait=False)


def follow(job: JobFile) -> None:
    """What every rank but 0 does: obey until told to end."""
    config = Config.of(job)
    learner = Learner(config, initial_model(job))
    while (order := _hear()) is not None:
        method, arguments = order
        getattr(learner, method)(*arguments)


def _tell(config: Config, order: object) -> None:
    if config.ranks > 1:
        dist.broadcast_object_list([order], src=0)


def _hear() -> Any:
    box: list[Any] = [None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


async def run_torchrun(job_path: Path, ranks: int, stop: asyncio.Event) -> int:
    """Start the ranks under torchrun; SIGTERM them at `stop`; returns its exit status."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={MAX_RESTARTS}",
        "-m",
        "services.trainer.rank_main",
        str(job_path),
    )
    ended = asyncio.create_task(child.wait())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not ended.done():
        child.terminate()
    return await ended
