"""Settings of the elastic scheduler."""

from __future__ import annotations

import msgspec

from messages.ids import NodeId, Zone
from services.jobfile import JobFile, Slot, rollout_slots

KEEP_LEAVING_MS = 60_000
"""A lost slot stays in `leaving` for so long past its deadline, so that a late reader still learns of it."""


class NodeInfo(msgspec.Struct, frozen=True):
    """A node as configured. `zone` is the node's own: reserved, preemptible or training."""

    zone: Zone
    gpus: int


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """`slots` are all rollout slots of the job, in order."""

    nodes: dict[NodeId, NodeInfo]
    slots: tuple[Slot, ...]
    coalesce_ms: int
    train_steps: int
    return_ms: int  # lent training GPUs are back so long after training asks for them
    keep_leaving_ms: int = KEEP_LEAVING_MS

    @staticmethod
    def of(job: JobFile) -> Config:
        return Config(
            nodes={NodeId(node.name): NodeInfo(node.zone, node.gpus) for node in job.nodes},
            slots=rollout_slots(job),
            coalesce_ms=job.timeouts.coalesce_ms,
            train_steps=job.pipeline.train_steps,
            return_ms=job.timeouts.return_ms,
        )
