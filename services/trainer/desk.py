"""Where the protocol's thread and the caller's meet: what `ranks.Group` is for PEARL's own trainer.

The protocol (`service.Trainer`) calls methods by name; each waits here until the caller's thread comes by (`until_batch`,
`publish`) and runs it. The order to train is answered when the caller publishes. Invariants: what the caller gave is called in
its own thread only; whoever waits gets an answer, an exception where the caller has left or its function failed.
"""

from __future__ import annotations

import asyncio
import queue
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from messages.pipeline_scheduler import StepFinished
from services.snapshot import COPIED, Snapshot, find_snapshot, write_folder
from services.trainer import checkpoints
from services.trainer.checkpoints import CheckpointMeta
from services.trainer.config import Config
from services.trainer.tokens import Batch, step_of

Save = Callable[[Path], object]
"""Writes a model or a checkpoint into an empty folder."""
MoveDevice = Callable[[], int | None]
"""Gives device memory up, or takes it again; returns bytes, or None where that is not known."""


class BridgeClosedError(Exception):
    """The bridge has ended; the message says why. Start again from the newest checkpoint."""


class _Order(msgspec.Struct, frozen=True):
    """What the protocol wants of the caller, and where the answer goes."""

    method: str
    arguments: tuple[Any, ...]
    answer: Future[Any]


class Desk:
    """Where the protocol's thread and the caller meet: what `ranks.Group` is for PEARL's own trainer."""

    def __init__(
        self,
        config: Config,
        model: Path,
        save: Save,
        keep: Save | None,
        offload: MoveDevice | None,
        reload: MoveDevice | None,
    ) -> None:
        self.model = model
        self.version = 0
        self.finished: StepFinished | None = None
        self.training: Batch | None = None
        self.left = False
        self._config = config
        self._save, self._keep, self._offload, self._reload = save, keep, offload, reload
        self._resident = False
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._trained: Future[Any] | None = None
        self._began_s = 0.0
        self._ended = ""
        self._stopping = False
        self.restore()

    # ---- for the protocol, in its thread

    @property
    def learner(self) -> Desk:
        """What the protocol reads version and last step of."""
        return self

    async def call(self, method: str, *arguments: Any) -> Any:
        """Have the caller's thread run it. Raises BridgeClosedError where the caller has left."""
        if self.left:
            raise BridgeClosedError("the trainer's loop has ended")
        order = _Order(method, arguments, Future())
        self._orders.put(order)
        if self.left:  # meanwhile
            self.leave()
        return await asyncio.wrap_future(order.answer)

    async def close(self) -> None:
        """Nothing to give back."""

    # ---- for the caller, in the caller's thread

    def until_batch(self) -> Batch | None:
        """Do what is asked until it is training."""
        while True:
            order = None if self._stopping else self._orders.get()
            if order is None:
                self._stopping = True
                if self._ended:
                    raise BridgeClosedError(self._ended)
                return None
            if order.method == "train":
                number, batch = order.arguments
                assert number == self.version == batch.number
                self.training, self._trained, self._began_s = batch, order.answer, time.monotonic()
                return batch
            self._do(order)

    def publish(self, loss: float, grad_norm: float, metrics: dict[str, float]) -> int:
        """Answer the order to train, and do what follows up to the snapshot."""
        batch, trained = self.training, self._trained
        assert batch is not None and trained is not None, "there is no batch that could have been trained"
        self.version = batch.number + 1
        self.finished = step_of(batch, time.monotonic() - self._began_s, loss, grad_norm, metrics)
        self.training = self._trained = None
        trained.set_result(self.finished)
        while True:
            order = self._orders.get()
            if order is None:
                self._stopping = True  # but this version is worth finishing
                if self._ended:
                    raise BridgeClosedError(self._ended)
                continue
            self._do(order)
            if order.method == "snapshot":
                return self.version

    def stop(self) -> None:
        """Let the caller's loop end. Safe in a signal handler."""
        self._orders.put(None)

    def end(self, reason: str) -> None:
        """The protocol's thread has ended."""
        self._ended = f"the bridge to the job has ended: {reason}"
        self._orders.put(None)

    def leave(self) -> None:
        """The caller does nothing more: whatever is or will be asked for fails."""
        self.left = True
        error = BridgeClosedError("the trainer's loop has ended")
        if self._trained is not None and not self._trained.done():
            self._trained.set_exception(error)
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            if order is not None:
                order.answer.set_exception(error)

    def _do(self, order: _Order) -> None:
        work: dict[str, Callable[[], Any]] = {
            "restore": self.restore,
            "acquire": self.acquire,
            "release": self.release,
            "checkpoint": self.checkpoint,
            "snapshot": self.snapshot,
        }
        done = False
        try:
            result = work[order.method]()
            done = True
        finally:
            if not done:  # the caller gets its own exception; the protocol must not wait for ever
                order.answer.set_exception(BridgeClosedError(f"{order.method} failed in the trainer"))
        order.answer.set_result(result)

    def restore(self) -> bool:
        """Version and last step of the newest checkpoint; False if there is none. What is in it is the caller's to load."""
        found = checkpoints.newest(self._config.checkpoints)
        if found is None:
            return False
        self.version, self.finished = found[1].version, found[1].finished
        return True

    def acquire(self) -> int:
        """Take the device memory."""
        if self._resident:
            return 0
        self._resident = True
        return (self._reload() or 0) if self._reload is not None else 0

    def release(self) -> int:
        """Give it up."""
        if not self._resident:
            return 0
        freed = (self._offload() or 0) if self._offload is not None else 0
        self._resident = False
        return freed

    def checkpoint(self) -> None:
        """Make this version last."""
        assert self.finished is not None, "only a trained version is worth a checkpoint"
        target = checkpoints.folder_of(self._config.checkpoints, self.version)
        draft = target.with_suffix(".part")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        if self._keep is not None:
            self._keep(draft)
        checkpoints.commit(draft, target, CheckpointMeta(self.version, self.finished))

    def snapshot(self) -> Snapshot:
        """Write what workers fetch, unless it was written before."""
        found = find_snapshot(self._config.snapshots, self.version)
        if found is not None:
            return found
        if self.version > 0:
            self.acquire()

        def fill(draft: Path) -> None:
            if self.version > 0:
                self._save(draft)
                wanted = COPIED
            else:
                wanted = tuple(sorted(file.name for file in self.model.iterdir() if file.is_file()))
            for name in wanted:
                if not (draft / name).exists() and (self.model / name).is_file():
                    shutil.copyfile(self.model / name, draft / name)

        return write_folder(fill, self._config.snapshots, self.version, keep=self._config.keep_snapshots)
