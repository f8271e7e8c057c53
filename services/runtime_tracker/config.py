"""Settings of the runtime tracker."""

from __future__ import annotations

import msgspec

from messages.decision_engine import WorkloadProfile
from services.jobfile import FUSED_ENGINES, JobFile, rollout_slots
from services.profile import cold_start


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and rates of the fit."""

    workers: frozenset[str] | None = None  # every rollout slot of the job; None: not judged
    train_steps: int = 1 << 31
    max_context_tokens: int = 1 << 31
    max_turns: int = 1 << 31
    cold_start: WorkloadProfile  # until measured, and for what is never measured (bandwidth, KV bytes per token)
    new_share: float = 0.4  # weight of the newest train step in the moving averages: half-life of about 1.4 steps
    least_share: float = (
        0.5  # of a batch's trajectories that must have ended for a step to enter the averages by itself
    )
    sample_ms: int = 1000  # least time between two samples of one worker: makes each cheap, and precise
    skip_samples: int = 1  # after an incarnation's first heartbeat, or a change of serving: warm-up
    warm_up_ms: int = 2000  # after a role was set or device state restored: caches and graphs are cold
    most_workers: int = 5000  # the stated limit of a job (DESIGN 3)
    fused: bool = (
        False  # the engine computes prompts and decodes in one pass, whose fixed part prefill workers pay as well
    )
    most_operations: int = 32  # kinds of operations whose cost is learned

    @staticmethod
    def of(job: JobFile) -> Config:
        """From the job file; reads the profile file it may name. Raises ConfigError."""
        return Config(
            cold_start=cold_start(job),
            workers=frozenset(slot.worker for slot in rollout_slots(job)) or None,
            train_steps=job.pipeline.train_steps,
            max_context_tokens=job.pipeline.max_context_tokens,
            max_turns=job.pipeline.max_turns,
            fused=job.rollout.engine in FUSED_ENGINES,
        )
