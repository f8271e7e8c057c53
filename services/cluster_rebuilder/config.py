"""What the cluster rebuilder needs of the job file."""

from __future__ import annotations

import msgspec

from messages.ids import Zone
from services.jobfile import JobFile, Slot, rollout_slots


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of the dedicated zone, and times in ms."""

    slots: tuple[Slot, ...]
    nodes: tuple[str, ...]  # every node of the job, those of other zones too
    command_retry_ms: int
    prepare_ms: int
    drain_ms: int
    kill_grace_ms: int
    train_steps: int

    @classmethod
    def of(cls, job: JobFile) -> Config:
        return cls(
            slots=tuple(slot for slot in rollout_slots(job) if slot.zone in (Zone.RESERVED, Zone.PREEMPTIBLE)),
            nodes=tuple(node.name for node in job.nodes),
            command_retry_ms=job.timeouts.command_retry_ms,
            prepare_ms=job.timeouts.prepare_ms,
            drain_ms=job.timeouts.drain_ms,
            kill_grace_ms=job.timeouts.kill_grace_ms,
            train_steps=job.pipeline.train_steps,
        )
