"""The emulated trainer: the same checks, checkpoints, snapshots and news as the real one, in the same order; nothing is computed.

A train step takes what the hardware description says, on the job's scaled clock. A version is its number, and a snapshot a file
that names it. Without torch.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Final

import msgspec

from messages.agent import TurnFinished
from messages.ids import PolicyVersion, Zone
from messages.pipeline_scheduler import BatchReady, StepFinished
from services.jobfile import JobFile
from services.snapshot import Snapshot, find_snapshot, write_folder
from services.timing import hardware
from services.trainer import checkpoints
from services.trainer.checkpoints import CheckpointMeta
from services.trainer.config import Config
from services.trainer.turns import checked

STATE_BYTES_PER_WEIGHT_BYTE: Final = 8
"""Of a training GPU: parameters and gradients in bfloat16, and the optimiser's three float32 copies, are 16 bytes a parameter."""
FLAT: Final = 1e-6
"""A group whose rewards spread less says nothing, as in `grpo`."""


class Batch(msgspec.Struct, frozen=True):
    """What an emulated train step needs of a batch."""

    rewards: tuple[float, ...]
    groups: tuple[str, ...]
    reply_tokens: int
    oldest_version: int


def build(ready: BatchReady, records: Mapping[int, TurnFinished]) -> Batch:
    """Check and count. Raises UnusableBatchError."""
    turns = [turn for own in checked(ready, records) for turn in own]
    return Batch(
        rewards=tuple(item.reward for item in ready.items),
        groups=tuple(str(item.group) for item in ready.items),
        reply_tokens=sum(len(turn.reply) for turn in turns),
        oldest_version=min(int(span.version) for turn in turns for span in turn.spans if span.end > span.start),
    )


class EmulatedLearner:
    """The surface of `learner.Learner` that the service uses. `resident`: whether device memory is held."""

    def __init__(self, job: JobFile) -> None:
        self.config = Config.of(job)
        self.version = 0
        self.finished: StepFinished | None = None
        self.resident = False
        described = hardware.load(job.emulation.hardware)
        gpus = sum(node.gpus for node in job.nodes if node.zone is Zone.TRAINING)
        train_s = job.emulation.train_s or described.train_step_s(job.pipeline.batch_trajectories, max(1, gpus))
        self.train_s = train_s / job.emulation.time_scale
        self._bytes = round(described.weights_bytes * STATE_BYTES_PER_WEIGHT_BYTE)

    def restore(self) -> bool:
        """Go on from the newest checkpoint; False if there is none."""
        found = checkpoints.newest(self.config.checkpoints)
        if found is None:
            return False
        _, meta = found
        self.version, self.finished = meta.version, meta.finished
        return True

    def acquire(self) -> int:
        """Take device memory: the bytes that training would take. Its time is in the paper's deactivation, which the worker waits."""
        taken = 0 if self.resident else self._bytes
        self.resident = True
        return taken

    def release(self) -> int:
        """Give device memory back. Its time is in the paper's activation."""
        freed = self._bytes if self.resident else 0
        self.resident = False
        return freed

    def train(self, number: int, batch: Batch) -> StepFinished:
        """Version `number` becomes `number` + 1, in memory only; the time has been waited."""
        assert number == self.version, f"batch {number} trains version {number}, this is version {self.version}"
        assert self.resident, "the device memory was released: acquire first"
        self.version = number + 1
        members: dict[str, list[float]] = {}
        for reward, group in zip(batch.rewards, batch.groups, strict=True):
            members.setdefault(group, []).append(reward)
        self.finished = StepFinished(
            batch=number,
            version=PolicyVersion(self.version),
            train_s=self.train_s,
            trained_tokens=batch.reply_tokens,
            reward_mean=fmean(batch.rewards),
            reward_std=pstdev(batch.rewards),
            loss=0.0,
            grad_norm=0.0,
            zero_variance_groups=sum(pstdev(rewards) < FLAT for rewards in members.values()),
            metrics={
                "staleness": float(number - batch.oldest_version),
                "trajectories": float(len(batch.rewards)),
            },
        )
        return self.finished

    def checkpoint(self) -> None:
        """Make this version last."""
        assert self.finished is not None, "only a trained version is worth a checkpoint"
        target = checkpoints.folder_of(self.config.checkpoints, self.version)
        draft = target.with_suffix(".part")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        checkpoints.commit(draft, target, CheckpointMeta(self.version, self.finished))

    def snapshot(self) -> Snapshot:
        """Write what workers fetch: a file that names the version. Takes memory, unless it was written before."""
        if not self.resident:
            found = find_snapshot(self.config.snapshots, self.version)
            if found is not None:
                return found
            self.acquire()

        def fill(draft: Path) -> None:
            (draft / "config.json").write_text('{"architectures": ["Emulated"]}\n', encoding="utf-8")
            (draft / "weights.txt").write_text(f"emulated weights of version {self.version}\n", encoding="utf-8")

        return write_folder(fill, self.config.snapshots, self.version, keep=self.config.keep_snapshots)


class EmulatedGroup:
    """The surface of `ranks.Group`: one rank, whatever `training.ranks` says."""

    def __init__(self, job: JobFile) -> None:
        self.learner = EmulatedLearner(job)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Wait as the method would take, then run it."""
        if method == "train":
            await asyncio.sleep(self.learner.train_s)
        return await asyncio.to_thread(getattr(self.learner, method), *arguments)

    async def close(self) -> None:
        """Nothing to give back."""
