"""Messages to the decision engine: the budget, the workload profile, the batch's progress."""

from __future__ import annotations

import msgspec

from messages.envelope import Message
from messages.ids import WorkerId


class Leave(msgspec.Struct, frozen=True):
    """A worker slot whose GPUs rollout loses. `deadline_ms` is Unix time; 0: gone already."""

    worker: WorkerId
    deadline_ms: int


# elastic_scheduler -> decision_engine. Durable (EV). Key: budget_id. A newer budget replaces an older one whole.
class BudgetChanged(Message, frozen=True, kw_only=True, tag="budget.changed/1"):
    """Which worker slots rollout may use now (paper 4.1.2, stage 1)."""

    budget_id: int  # strictly increasing
    dedicated: tuple[WorkerId, ...]  # reserved and available preemptible slots
    overlap: tuple[WorkerId, ...]  # slots on training GPUs; usable only while `training_batch` is None
    leaving: tuple[Leave, ...]  # slots lost, each with its deadline
    training_batch: int | None  # the batch that training works on or waits for, None while it is idle
    cause: str  # for people and the decision record: "gpu.reclaimed n2[0,1]"


# runtime_tracker -> decision_engine, monitor. Durable (EV). Key: train_step.
class WorkloadProfile(Message, frozen=True, kw_only=True, tag="workload.profile/1"):
    """The makespan models' parameters (paper Table of 4.3 and 4.3.2), refitted after each training step.

    SI units. Names as in the paper, and in the file of `pearl decide --profile`.
    """

    train_step: int
    B: int  # trajectories a batch
    S: float  # turns of the slowest trajectory
    r: float  # generated tokens a turn
    dL: float  # new prompt tokens a turn
    theta: float  # bubble ratio (1-f)/f
    A_s: float  # fixed seconds a decode iteration
    b_s: float  # added seconds a decode iteration per concurrent sequence
    t_prefill_s: float  # seconds per prefilled token
    T_over_s: float  # seconds of overhead a turn under colocation
    T_env_s: float  # environment seconds of the slowest trajectory
    kv_bytes_per_token: float
    bandwidth_bytes_per_s: float
    kv_bytes_per_trajectory: float
    kv_capacity_bytes_per_worker: float
    retained: float = 0.0  # response tokens a turn kept in the next context (paper 5)
    samples: int = 0  # turns this profile was fitted on; 0 means the cold-start description
    # The most recent trajectories, for replay; each is (new prompt tokens, reply tokens, environment ms) turn by turn.
    sample: tuple[tuple[int, ...], ...] = ()
    costs: dict[str, float] = {}  # learned mean seconds of executor operations, by `operation.timed/1` name (paper 5)


# pipeline_scheduler -> decision_engine, monitor. Durable (EV), at coarse marks. Key: (batch, done).
class BatchProgress(Message, frozen=True, kw_only=True, tag="batch.progress/1"):
    """How far the batch is that training waits for. `remaining` is the R of eq. 7 (DESIGN 5)."""

    batch: int
    size: int
    done: int
    remaining: int
