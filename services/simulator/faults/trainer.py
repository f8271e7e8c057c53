"""What trains in the simulation: it counts versions and takes time; the trainer's service around it is the real one.

`Disk` is what outlives its process: the checkpoint and the snapshots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from messages.agent import TurnFinished
from messages.ids import PolicyVersion
from messages.pipeline_scheduler import BatchReady, StepFinished
from services.simulator.faults.engine import STUCK_S, checksum_of
from services.snapshot import Snapshot
from services.trainer.turns import checked

TOOK_S: Final = {
    "restore": (0.1, 0.3),
    "acquire": (0.03, 0.08),
    "release": (0.02, 0.06),
    "train": (0.2, 0.4),
    "checkpoint": (0.01, 0.05),
    "snapshot": (0.01, 0.05),
}
STATE_BYTES: Final = 8_000_000


class Disk:
    """Checkpoints and snapshots: they are there whole, or not."""

    def __init__(self) -> None:
        self.version = 0
        self.finished: StepFinished | None = None
        self.snapshots: set[int] = set()


class Learner:
    """The surface of `learner.Learner` that the service uses."""

    def __init__(self) -> None:
        self.version = 0
        self.finished: StepFinished | None = None
        self.resident = False


class Batch(msgspec.Struct, frozen=True):
    """What a train step needs of a batch."""

    rewards: tuple[float, ...]
    tokens: int


def build(ready: BatchReady, records: Mapping[int, TurnFinished]) -> Batch:
    """Check and count. Raises UnusableBatchError."""
    turns = [turn for own in checked(ready, records) for turn in own]
    return Batch(tuple(item.reward for item in ready.items), sum(len(turn.reply) for turn in turns))


class Group:
    """The surface of `ranks.Group`. `stuck`: operations that do not end while they are in it; `slow`: how many times longer they take."""

    def __init__(self, disk: Disk, took_s: Callable[[float, float], float], memory: Callable[[bool], None]) -> None:
        self.learner = Learner()
        self.stuck: set[str] = set()
        self.slow = 1.0
        self._disk = disk
        self._took_s = took_s
        self._memory = memory

    async def call(self, method: str, *arguments: Any) -> Any:
        """Take the method's time, then its effect, at one moment."""
        if method == "acquire" and not self.learner.resident:
            self._hold(True)
        await asyncio.sleep(self._took_s(*TOOK_S[method]) * self.slow)
        while method in self.stuck:  # noqa: ASYNC110 - a fault sets and clears it, without a word
            await asyncio.sleep(STUCK_S)
        return getattr(self, f"_{method}")(*arguments)

    async def close(self) -> None:
        """Nothing to give back."""

    def _hold(self, held: bool) -> None:
        self.learner.resident = held
        self._memory(held)

    def _restore(self) -> bool:
        self.learner.version, self.learner.finished = self._disk.version, self._disk.finished
        return self._disk.finished is not None

    def _acquire(self) -> int:
        return STATE_BYTES

    def _release(self) -> int:
        self._hold(False)
        return STATE_BYTES

    def _train(self, number: int, batch: Batch) -> StepFinished:
        assert number == self.learner.version, f"batch {number} trains version {number}, not {self.learner.version}"
        assert self.learner.resident, "the device memory was released: acquire it first"
        self.learner.version = number + 1
        self.learner.finished = StepFinished(
            batch=number,
            version=PolicyVersion(number + 1),
            train_s=0.3,
            trained_tokens=batch.tokens,
            reward_mean=sum(batch.rewards) / len(batch.rewards),
            reward_std=0.0,
            loss=0.0,
            grad_norm=0.0,
            zero_variance_groups=0,
        )
        return self.learner.finished

    def _checkpoint(self) -> None:
        self._disk.version, self._disk.finished = self.learner.version, self.learner.finished

    def _snapshot(self) -> Snapshot:
        """Written from device memory, unless it was written before."""
        version = self.learner.version
        if version not in self._disk.snapshots and not self.learner.resident:
            self._hold(True)
        self._disk.snapshots.add(version)
        uri = f"sim:snapshots/v{version}"
        return Snapshot(version=PolicyVersion(version), uri=uri, manifest_sha256=checksum_of(uri), bytes=1)


class NoMetrics:
    """Train steps are in the record already."""

    def write(self, step: StepFinished) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
