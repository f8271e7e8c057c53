"""Messages to the pipeline scheduler: finished trajectories, new versions, finished steps."""

from __future__ import annotations

import msgspec

from messages.envelope import Message
from messages.ids import GroupId, PolicyVersion, TrajectoryId


# agent | gateway -> pipeline_scheduler, runtime_tracker, monitor. Durable (EV). Key: trajectory (and its retry number).
class TrajectoryCompleted(Message, frozen=True, kw_only=True, tag="trajectory.completed/1"):
    """A trajectory ended. Its tokens are in the journal, at `journal` (stream sequences, one a turn, in order)."""

    trajectory: TrajectoryId
    group: GroupId
    batch: int
    retry: int  # 0 for the first try at this slot
    status: str  # "completed" | "truncated" | "failed"
    reward: float
    turns: int
    generated_tokens: int
    min_version: PolicyVersion  # oldest and newest version among its tokens
    max_version: PolicyVersion
    journal: tuple[int, ...]
    env_s: float
    wall_s: float
    reason: str = ""


# trainer -> pipeline_scheduler, elastic_scheduler, cluster_rebuilder, toggle_manager, orchestrator, monitor. Durable (EV). Key: version.
class WeightsPublished(Message, frozen=True, kw_only=True, tag="weights.published/1"):
    """The complete snapshot of `version` can be fetched. Published after the optimiser checkpoint (DESIGN 8)."""

    version: PolicyVersion
    uri: str
    manifest_sha256: str
    bytes: int


# trainer -> pipeline_scheduler, runtime_tracker, toggle_manager, monitor. Durable (EV). Key: batch.
class StepFinished(Message, frozen=True, kw_only=True, tag="train_step.finished/1"):
    """Batch `batch` is trained: version `batch` became `version` = batch + 1, checkpointed."""

    batch: int
    version: PolicyVersion
    train_s: float
    trained_tokens: int
    reward_mean: float
    reward_std: float
    loss: float
    grad_norm: float
    zero_variance_groups: int
    metrics: dict[str, float] = {}


class BatchItem(msgspec.Struct, frozen=True):
    """One trajectory of a batch, by reference."""

    trajectory: TrajectoryId
    group: GroupId
    reward: float
    status: str
    journal: tuple[int, ...]


# pipeline_scheduler -> trainer, monitor. Durable (EV), subject keyed by batch. Key: batch.
class BatchReady(Message, frozen=True, kw_only=True, tag="batch.ready/1"):
    """What batch `batch` consists of: exactly its groups, each exactly its size."""

    batch: int
    items: tuple[BatchItem, ...]


# trainer -> monitor. Durable (EV). Key: version.
class Evaluated(Message, frozen=True, kw_only=True, tag="policy.evaluated/1"):
    """Held-out evaluation of a version."""

    version: PolicyVersion
    reward_mean: float
    episodes: int
