"""What the orchestrator needs of the job file."""

from __future__ import annotations

import msgspec

from messages.ids import Gpu, NodeId, WorkerId, Zone
from services.jobfile import JobFile, Slot, rollout_slots

TRAINING_SLOT = "t0"
"""A training node's one training row is `<node>-t0`; it holds all the node's GPUs."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The slots that the table is to have, and times in milliseconds."""

    job: str
    slots: tuple[Slot, ...]  # rollout and training slots, sorted by worker
    prepare_ms: int
    apply_ms: int
    lease_ms: int
    train_steps: int
    return_ms: int = 5000  # lent training GPUs are back so long after training asks, where the target names no time
    lending: bool = False  # overlap slots have a process from the start
    hold_ms: int = 500  # between a failed plan and the next growth: what is left of its group is killed meanwhile
    backoff_first_ms: int = 2000  # a slot that failed waits so long, then twice as long, ...
    backoff_most_ms: int = 60_000  # ... up to this: a node that comes back is tried within a minute

    @classmethod
    def of(cls, job: JobFile) -> Config:
        """The orchestrator's part of a job file."""
        training = tuple(
            Slot(
                WorkerId(f"{node.name}-{TRAINING_SLOT}"),
                NodeId(node.name),
                tuple(Gpu(NodeId(node.name), index) for index in range(node.gpus)),
                Zone.TRAINING,
            )
            for node in job.nodes
            if node.zone is Zone.TRAINING
        )
        return cls(
            job=job.job.name,
            slots=tuple(sorted((*rollout_slots(job), *training), key=lambda slot: slot.worker)),
            prepare_ms=job.timeouts.prepare_ms,
            apply_ms=job.timeouts.apply_ms,
            lease_ms=job.timeouts.lease_ms,
            train_steps=job.pipeline.train_steps,
            return_ms=job.timeouts.return_ms,
            lending=job.decision.lending,
        )

    @property
    def preparing_ms(self) -> int:
        """A plan's preparing stage: a joiner may take `prepare_ms` to be ready and as long again to hold weights.

        The rebuilder judges each joiner by these limits and names the one that is late; this is the net below it.
        """
        return 2 * self.prepare_ms + self.apply_ms
