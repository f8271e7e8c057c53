"""What the toggle manager needs of the job file."""

from __future__ import annotations

import msgspec

from messages.ids import WorkerId, Zone
from services.jobfile import JobFile, Slot, rollout_slots


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of the overlap zone, the trainer's worker id, and times in ms."""

    slots: tuple[Slot, ...]
    nodes: tuple[str, ...]  # every node of the job
    trainer: WorkerId | None  # None: no training node
    command_retry_ms: int
    prepare_ms: int
    release_ms: int  # a trainer that has not released by then is killed
    resume_ms: int  # a trainer that has not taken its GPUs by then is killed
    drain_ms: int
    kill_grace_ms: int
    train_steps: int

    @classmethod
    def of(cls, job: JobFile) -> Config:
        first = next((node.name for node in job.nodes if node.zone is Zone.TRAINING), None)
        return cls(
            slots=tuple(slot for slot in rollout_slots(job) if slot.zone is Zone.OVERLAP),
            nodes=tuple(node.name for node in job.nodes),
            trainer=None if first is None else WorkerId(f"{first}-t0"),
            command_retry_ms=job.timeouts.command_retry_ms,
            prepare_ms=job.timeouts.prepare_ms,
            # Moving the optimiser's state off the GPUs takes as long as a plan's apply section may.
            release_ms=job.timeouts.apply_ms,
            # It may be starting, and reads its checkpoint first.
            resume_ms=job.timeouts.prepare_ms,
            drain_ms=job.timeouts.drain_ms,
            kill_grace_ms=job.timeouts.kill_grace_ms,
            train_steps=job.pipeline.train_steps,
        )
