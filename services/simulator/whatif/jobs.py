"""The job file, and the engine's cold start, of a simulated run. Pure."""

from __future__ import annotations

from statistics import fmean

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.ids import Zone
from services.decision_engine.config import Config as DecisionConfig
from services.jobfile import (
    DecisionSection,
    FeedSection,
    JobFile,
    JobSection,
    NodeSection,
    PipelineSection,
    RolloutSection,
    TimeoutSection,
)
from services.preemption_feed.traces import Trace
from services.profile import built_in
from services.runtime_tracker.config import Config as TrackerConfig
from services.simulator.whatif.policies import Policy
from services.simulator.whatif.settings import Settings
from services.simulator.whatif.trajectories import Episodes
from services.timing.hardware import Hardware

TIMEOUTS = TimeoutSection(
    coalesce_ms=1_000,
    command_retry_ms=500,
    prepare_ms=240_000,
    apply_ms=90_000,
    drain_ms=20_000,
    return_ms=20_000,
    kill_grace_ms=1_000,
    admission_pause_ms=60_000,
)
"""Beyond the paper's Table 3 by enough that nothing that it measured is late."""
NODE_GPUS = 8


def job_of(
    policy: Policy,
    settings: Settings,
    trace: Trace,
    hardware: Hardware,
    *,
    seconds: float,
    seed: int,
    train_steps: int,
) -> JobFile:
    """A job of this policy's GPUs."""
    nodes = [NodeSection(name="r0", zone=Zone.RESERVED, gpus=policy.reserved_gpus(trace, settings, hardware, seconds))]
    spot = settings.most_preemptible_gpus if policy.elastic else 0
    spot = min(spot, max(trace.most, 0)) // hardware.gpus * hardware.gpus
    index = 0
    while spot > 0:
        nodes.append(NodeSection(name=f"s{index}", zone=Zone.PREEMPTIBLE, gpus=min(NODE_GPUS, spot)))
        spot, index = spot - NODE_GPUS, index + 1
    training = settings.training_gpus // hardware.gpus * hardware.gpus
    if training:
        nodes.append(NodeSection(name="t0", zone=Zone.TRAINING, gpus=training))
    early = policy.early_start if settings.early_start is None else settings.early_start
    return JobFile(
        job=JobSection(name="whatif", seed=seed),
        nodes=tuple(nodes),
        rollout=RolloutSection(
            engine="emulated",
            gpus_per_worker=hardware.gpus,
            max_running=settings.max_running,
            kv_cache_tokens=hardware.kv_capacity_tokens,
            prefill_chunk_tokens=settings.chunk_tokens,
            update_pause=policy.update_pause,
        ),
        pipeline=PipelineSection(
            batch_trajectories=settings.batch_trajectories,
            group_size=settings.group_size,
            staleness=settings.staleness,
            train_steps=train_steps,
            early_start=early,
            in_flight=settings.in_flight,
            max_turns=100_000,
            max_new_tokens=settings.max_context_tokens,
            max_context_tokens=settings.max_context_tokens,
        ),
        feed=FeedSection(
            notice_ms=0 if policy.slack else round(settings.notice_s * 1000),
            no_notice_fraction=1.0 if policy.slack else settings.no_notice_share,
        ),
        decision=DecisionSection(policy=policy.decision, disaggregation=True, lending=policy.lending),
        timeouts=TIMEOUTS,
    )


def cold_start(settings: Settings, episodes: Episodes, hardware: Hardware) -> WorkloadProfile:
    """What is known before a run: the recorded workload's means, and the hardware description's times."""
    plans = episodes.plans
    turns = [turn for plan in plans for turn in plan.turns]
    longest = sorted(len(plan.turns) for plan in plans)
    # The slowest of a batch of B: the mean of the largest of B is about this quantile.
    share = settings.batch_trajectories / (settings.batch_trajectories + 1)
    slowest = float(longest[min(len(longest) - 1, int(share * len(longest)))])
    reply, new = fmean(turn.reply for turn in turns), fmean(turn.new for turn in turns)
    env_s = fmean(turn.env_s for turn in turns)
    context = fmean(turn.context for turn in turns)
    decode_s = reply * hardware.decode_s(8, round(8 * context))
    return msgspec.structs.replace(
        built_in(JobFile()),
        B=settings.batch_trajectories,
        S=slowest,
        r=reply,
        dL=new,
        theta=env_s / decode_s,
        A_s=hardware.fixed_decode_s(),
        b_s=hardware.decode_s_per_sequence(context),
        t_prefill_s=hardware.prefill_s_per_token(max(1, round(new)), round(context)),
        T_over_s=0.0,
        T_env_s=slowest * env_s,
        kv_bytes_per_token=hardware.kv_bytes_per_token,
        bandwidth_bytes_per_s=hardware.transfer_bytes_per_s.value,
        kv_bytes_per_trajectory=fmean(plan.tokens for plan in plans) * hardware.kv_bytes_per_token,
        kv_capacity_bytes_per_worker=hardware.kv_capacity_tokens * hardware.kv_bytes_per_token,
        retained=reply,
    )


def decision_config(job: JobFile, profile: WorkloadProfile) -> DecisionConfig:
    """As in production."""
    return msgspec.structs.replace(DecisionConfig.of(job), cold_start=profile)


def tracker_config(job: JobFile, profile: WorkloadProfile) -> TrackerConfig:
    """As in production."""
    return msgspec.structs.replace(TrackerConfig.of(job), cold_start=profile)
