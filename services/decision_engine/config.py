"""Settings of the decision engine."""

from __future__ import annotations

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.ids import WorkerId
from services.decision_engine.choose import Policy
from services.jobfile import JobFile, rollout_slots
from services.profile import cold_start

TOGGLE_GUESS_S = 10.0
"""T_toggle of eq. 7 until one was measured: the paper's activation plus deactivation (Table 3), rounded up."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """`cold_start` is used until the runtime tracker's first profile."""

    policy: Policy
    cold_start: WorkloadProfile
    workers: frozenset[WorkerId] | None = None  # every rollout slot of the job; None: not judged
    train_steps: int = 1 << 31
    lending: bool = False
    toggle_guess_s: float = TOGGLE_GUESS_S

    @staticmethod
    def of(job: JobFile) -> Config:
        """From the job file; reads the profile file it may name. Raises ConfigError."""
        section = job.decision
        return Config(
            policy=Policy(
                ratio_threshold=section.ratio_threshold,
                mode_threshold=section.mode_threshold,
                growth_threshold=section.growth_threshold,
                rho_max=section.rho_max,
                impossible="" if section.disaggregation else f"engine {job.rollout.engine} does not disaggregate yet",
            ),
            cold_start=cold_start(job),
            workers=frozenset(slot.worker for slot in rollout_slots(job)),
            train_steps=job.pipeline.train_steps,
            lending=section.lending,
        )
