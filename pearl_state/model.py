"""The GPU-worker-role table (paper 4.4.1, eq. 4): `M = { w -> (G_w, R_w, a_w) }`, and its legal transitions.

Pure. The orchestrator is the only writer; every other actor holds a read-only replica. The table is one
bucket value with a strictly increasing epoch, so a group of changes becomes visible at once or not at all.
"""

from __future__ import annotations

import msgspec

from messages.executors import Assign
from messages.decision_engine import Leave
from messages.ids import (
    Activity,
    DecisionId,
    Epoch,
    Gpu,
    Incarnation,
    PlanId,
    PolicyVersion,
    Residency,
    Role,
    RoleGeneration,
    Stage,
    WorkerId,
    Zone,
)
from messages.orchestrator import TargetConfiguration

NO_VERSION = PolicyVersion(-1)
"""Policy version of a worker that holds no weights yet."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One worker slot. `gpus` and `zone` never change while the row exists."""

    worker: WorkerId
    gpus: tuple[Gpu, ...]
    zone: Zone
    role: Role
    activity: Activity = Activity.INACTIVE
    stage: Stage = Stage.NONE
    incarnation: Incarnation = Incarnation(0)
    role_generation: RoleGeneration = RoleGeneration(0)
    endpoint: str = ""
    version: PolicyVersion = NO_VERSION


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """An overlap row and the training row(s') GPUs it shares, with whose device state is resident."""

    overlap: WorkerId
    training: WorkerId
    residency: Residency = Residency.TRAINING


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The plan in progress. `stage`: "preparing" (may be superseded) or "applying" (between cut and admit epoch)."""

    plan_id: PlanId
    decision_id: DecisionId
    stage: str
    add: tuple[Assign, ...]
    remove: tuple[Leave, ...]
    reassign: tuple[Assign, ...]
    started_ms: int
    deadline_ms: int
    rebuilder: str = "pending"  # "pending" | "prepared" | "applied" | "none" (has no part)
    toggle: str = "none"


class WriterState(msgspec.Struct, frozen=True, kw_only=True):
    """What the orchestrator itself needs after a restart; no one else reads it."""

    cursor: int = 0  # last sequence of the event stream that this table accounts for
    plans: int = 0  # plans made so far; numbers the next plan id
    target: TargetConfiguration | None = None  # the newest target, reached or not
    failed_plans: int = 0


class RoleTable(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="role.table/1"):
    """The one bucket value. Rows are sorted by worker id."""

    job: str
    epoch: Epoch
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...] = ()
    plan: PlanRecord | None = None
    admission_paused: PlanId | None = None
    policy_version: PolicyVersion = PolicyVersion(0)  # newest published version
    training_batch: int | None = None  # the batch training owns its GPUs for
    writer: WriterState = WriterState()
    written_ms: int = 0

    def row(self, worker: str) -> Row | None:
        """The row of a worker, or None."""
        return next((row for row in self.rows if row.worker == worker), None)
