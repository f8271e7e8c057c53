"""Settings of the decision engine."""

from __future__ import annotations

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.ids import WorkerId, Zone
from services.decision_engine.choose import Policy
from services.decision_engine.predict_evidence import Limits
from services.jobfile import FUSED_ENGINES, ConfigError, JobFile, parse_policy, rollout_slots
from services.profile import cold_start

TOGGLE_GUESS_S = 10.0
"""T_toggle of eq. 7 until one was measured: the paper's activation plus deactivation (Table 3), rounded up."""
RETURN_SHARE = 1 / 3
"""The return's part of that guess (Table 3: 3.2 of 9.4 s, 4.4 of 10.5 s)."""


SWITCH_GUESS_S = 10.0
"""A worker's change of role until one was measured: paper 4.3.2, "tens of seconds" at most."""


class Planner(msgspec.Struct, frozen=True, kw_only=True):
    """Of the policy "planner"."""

    limits: Limits = Limits()
    probe_share: float = 0.05


def _in_flight_percent(job: JobFile) -> int:
    """Of a batch; 0 where batches do not overlap."""
    if not job.pipeline.early_start or job.pipeline.staleness < 1:
        return 0
    return round(100 * job.pipeline.in_flight)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """`cold_start` is used until the runtime tracker's first profile."""

    policy: Policy
    cold_start: WorkloadProfile
    workers: frozenset[WorkerId] | None = None  # every rollout slot of the job; None: not judged
    train_steps: int = 1 << 31
    lending: bool = False
    toggle_guess_s: float = TOGGLE_GUESS_S
    policy_name: str = "paper"
    planner: Planner | None = None  # None: the closed forms decide
    preemptible: frozenset[str] = frozenset()  # slots that may be taken away
    switch_guess_s: float = SWITCH_GUESS_S

    @staticmethod
    def of(job: JobFile) -> Config:
        """From the job file; reads the profile file it may name. Raises ConfigError."""
        section = job.decision
        fixed = parse_policy(section.policy)
        if fixed not in (None, (0, 0)) and not section.disaggregation:
            raise ConfigError(f"decision.policy = {section.policy!r} needs decision.disaggregation = true")
        return Config(
            policy=Policy(
                ratio_threshold=section.ratio_threshold,
                mode_threshold=section.mode_threshold,
                growth_threshold=section.growth_threshold,
                rho_max=section.rho_max,
                fixed=fixed,
                impossible="" if section.disaggregation else "decision.disaggregation is off",
            ),
            cold_start=cold_start(job),
            workers=frozenset(slot.worker for slot in rollout_slots(job)) or None,
            train_steps=job.pipeline.train_steps,
            lending=section.lending,
            toggle_guess_s=section.toggle_guess_s,
            policy_name=section.policy,
            planner=Planner(
                limits=Limits(
                    chunk_tokens=job.rollout.prefill_chunk_tokens,
                    max_running=job.rollout.max_running,
                    replay_turns=section.replay_turns,
                    fused=int(job.rollout.engine in FUSED_ENGINES),
                    in_flight_percent=_in_flight_percent(job),
                    ahead=job.pipeline.staleness + 1,
                    group=job.pipeline.group_size,
                ).shared(section.lending),
                probe_share=section.probe_share,
            )
            if section.policy == "planner"
            else None,
            preemptible=frozenset(slot.worker for slot in rollout_slots(job) if slot.zone is Zone.PREEMPTIBLE),
            switch_guess_s=section.switch_guess_s,
        )
