"""The GPU-worker-role table (paper 4.4.1, eq. 4): `M = { w -> (G_w, R_w, a_w) }`, and its legal transitions.

Pure. All changes of a row go through `change`, all changes of a pair through `toggle`: what is legal is in two data
tables, `ROW_TRANSITIONS` and `RESIDENCY_TRANSITIONS`; anything else raises `IllegalTransition` and changes nothing. The orchestrator is the only writer; every other actor holds a read-only replica. The table is one
bucket value with a strictly increasing epoch, so a group of changes becomes visible at once or not at all.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from messages.decision_engine import Leave
from messages.executors import Assign
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
    ready: bool = False  # overlap rows: the process of this incarnation is up, whether or not it holds device memory


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """An overlap row and the training row(s') GPUs it shares, with whose device state is resident."""

    overlap: WorkerId
    training: WorkerId
    residency: Residency = Residency.TRAINING
    deadline_ms: int = 0  # training asked for the GPUs back by then (Unix ms), of the last borrow; 0: it did not
    unsure: bool = False  # the store went back: whether the trainer holds device memory is not known


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


class Backoff(msgspec.Struct, frozen=True):
    """A slot whose worker failed to join: it is not planned with until `until_ms` (Unix ms; 0: may be tried again)."""

    worker: WorkerId
    until_ms: int
    failures: int  # in a row; the wait doubles with each


class WriterState(msgspec.Struct, frozen=True, kw_only=True):
    """What the orchestrator itself needs after a restart; no one else reads it."""

    cursor: int = 0  # last sequence of the event stream that this table accounts for
    plans: int = 0  # plans made so far; numbers the next plan id
    target: TargetConfiguration | None = None  # the newest target, reached or not
    failed_plans: int = 0
    target_seq: int = 0  # event sequence of `target`; an older target that is delivered again is stale
    role_set: tuple[WorkerId, ...] = ()  # workers that serve the role that the plan in progress gave them
    backoffs: tuple[Backoff, ...] = ()  # sorted by worker
    hold_until_ms: int = 0  # after a failed plan: no growth before (Unix ms; 0: none)
    last_failure: str = ""  # why the last failed plan was rolled back
    release_epoch: Epoch = Epoch(0)  # the epoch that last asked the trainer for its device memory


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
    training_since_ms: int = 0  # when it got them (Unix ms)
    writer: WriterState = WriterState()
    written_ms: int = 0

    def row(self, worker: str) -> Row | None:
        """The row of a worker, or None."""
        return next((row for row in self.rows if row.worker == worker), None)

    @property
    def by_worker(self) -> dict[str, Row]:
        """All rows by worker id."""
        return {row.worker: row for row in self.rows}


class IllegalTransition(Exception):
    """A change that the role model forbids; nothing was changed."""


ROLLOUT_ROLES: Final = (Role.PREFILL, Role.DECODE, Role.COLOCATED)
DEDICATED_ZONES: Final = (Zone.RESERVED, Zone.PREEMPTIBLE)


class Move(enum.StrEnum):
    """What may happen to a row."""

    LAUNCH = "launch"  # a process is started in the slot (overlap: its device state is to be restored)
    PREPARE = "prepare"  # it is initialised and holds weights
    CANCEL = "cancel"  # it is not wanted any more, or its group's expansion failed
    DRAIN = "drain"  # the cut epoch of a leaver
    SWITCH = "switch"  # the cut epoch of a role-changer
    RECUT = "recut"  # a role-changer of a plan that failed waits for the next plan's role
    ADMIT = "admit"  # the admit epoch: it serves from now on
    RETIRE = "retire"  # a leaver has left, or a role-changer is given up
    LOSE = "lose"  # its process is gone
    OCCUPY = "occupy"  # training: the GPUs are its own, it is to train
    VACATE = "vacate"  # training: it is idle
    RESPAWN = "respawn"  # training, overlap: its process is gone and is to be started again; it keeps what it owns


_Condition = tuple[Activity, Stage]
_INACTIVE: Final[_Condition] = (Activity.INACTIVE, Stage.NONE)
_ACTIVE: Final[_Condition] = (Activity.ACTIVE, Stage.NONE)
_LAUNCHING: Final[_Condition] = (Activity.TRANSITIONING, Stage.LAUNCHING)
_PREPARED: Final[_Condition] = (Activity.TRANSITIONING, Stage.PREPARED)
_DRAINING: Final[_Condition] = (Activity.TRANSITIONING, Stage.DRAINING)
_SWITCHING: Final[_Condition] = (Activity.TRANSITIONING, Stage.SWITCHING)
LEGAL_CONDITIONS: Final = (_INACTIVE, _ACTIVE, _LAUNCHING, _PREPARED, _DRAINING, _SWITCHING)
"""Every (activity, stage) a row can be in."""

ROW_TRANSITIONS: Final[Mapping[tuple[Move, _Condition], _Condition]] = {
    (Move.LAUNCH, _INACTIVE): _LAUNCHING,
    (Move.PREPARE, _LAUNCHING): _PREPARED,
    (Move.CANCEL, _LAUNCHING): _INACTIVE,
    (Move.CANCEL, _PREPARED): _INACTIVE,
    (Move.DRAIN, _ACTIVE): _DRAINING,
    (Move.DRAIN, _SWITCHING): _DRAINING,
    (Move.SWITCH, _ACTIVE): _SWITCHING,
    (Move.SWITCH, _SWITCHING): _SWITCHING,
    (Move.RECUT, _SWITCHING): _SWITCHING,
    (Move.ADMIT, _PREPARED): _ACTIVE,
    (Move.ADMIT, _SWITCHING): _ACTIVE,
    (Move.RETIRE, _DRAINING): _INACTIVE,
    (Move.RETIRE, _SWITCHING): _INACTIVE,
    (Move.LOSE, _ACTIVE): _INACTIVE,
    (Move.LOSE, _LAUNCHING): _INACTIVE,
    (Move.LOSE, _PREPARED): _INACTIVE,
    (Move.LOSE, _DRAINING): _INACTIVE,
    (Move.LOSE, _SWITCHING): _INACTIVE,
    (Move.OCCUPY, _INACTIVE): _ACTIVE,
    (Move.VACATE, _ACTIVE): _INACTIVE,
    (Move.RESPAWN, _INACTIVE): _INACTIVE,
    (Move.RESPAWN, _ACTIVE): _ACTIVE,
}
"""Where a move leads from where. A pair that is not listed is illegal."""

TRAINING_MOVES: Final = frozenset({Move.OCCUPY, Move.VACATE, Move.RESPAWN})
"""Moves of rows of zone `training`, which make no others; rollout rows make all but these, and overlap rows, whose processes
live on while they serve nothing, RESPAWN."""
_NEW_PROCESS: Final = frozenset({Move.LAUNCH, Move.RESPAWN})
_NEXT_GENERATION: Final = frozenset({Move.DRAIN, Move.SWITCH, Move.OCCUPY, Move.VACATE})


def change(
    row: Row,
    move: Move,
    *,
    role: Role | None = None,
    generation: RoleGeneration | None = None,
    same_process: bool = False,
) -> Row:
    """The row after a move. `role` and `generation` are set where given; a generation may not fall.

    LAUNCH and RESPAWN count the incarnation up and forget endpoint and version (LAUNCH with `same_process`, of an
    overlap worker whose process lives on, forgets the version only: its device state is to be restored). DRAIN, SWITCH, OCCUPY and VACATE count the generation up by one
    unless one is given. Raises IllegalTransition.
    """
    trains = row.zone is Zone.TRAINING
    after = ROW_TRANSITIONS.get((move, (row.activity, row.stage)))
    respawns = move is Move.RESPAWN and row.zone is Zone.OVERLAP and row.activity is Activity.INACTIVE
    if after is None or (trains is not (move in TRAINING_MOVES) and not respawns):
        raise IllegalTransition(f"{row.worker} ({row.zone}) is {row.activity}/{row.stage}: it cannot {move}")
    if role is not None and (trains or role not in ROLLOUT_ROLES):
        raise IllegalTransition(f"{row.worker} ({row.zone}) cannot have role {role}")
    if same_process and (move is not Move.LAUNCH or row.zone is not Zone.OVERLAP or row.incarnation == 0):
        raise IllegalTransition(f"{row.worker} ({row.zone}) cannot {move} in the process it had")
    if generation is None:
        generation = RoleGeneration(row.role_generation + (1 if move in _NEXT_GENERATION else 0))
    if generation < row.role_generation:
        raise IllegalTransition(f"{row.worker}: role generation {row.role_generation} cannot fall to {generation}")
    fresh = move in _NEW_PROCESS and not same_process
    return msgspec.structs.replace(
        row,
        activity=after[0],
        stage=after[1],
        role=row.role if role is None else role,
        role_generation=generation,
        incarnation=Incarnation(row.incarnation + 1) if fresh else row.incarnation,
        endpoint="" if fresh else row.endpoint,
        version=NO_VERSION if move in _NEW_PROCESS else row.version,
        ready=row.ready and not fresh,
    )


RESIDENCY_TRANSITIONS: Final[frozenset[tuple[Residency, Residency]]] = frozenset(
    {
        (Residency.TRAINING, Residency.RELEASING),  # a borrow begins: the trainer is asked for its memory
        (Residency.RELEASING, Residency.FREE),  # measured free
        (Residency.FREE, Residency.ACTIVATING),  # the overlap worker restores its device state
        (Residency.ACTIVATING, Residency.ROLLOUT),
        (Residency.ACTIVATING, Residency.DRAINING),  # a borrow half done is undone
        (Residency.ROLLOUT, Residency.DRAINING),  # the return begins
        (Residency.DRAINING, Residency.FREE),  # released
        (Residency.ACTIVATING, Residency.FREE),  # the overlap worker is gone
        (Residency.ROLLOUT, Residency.FREE),  # likewise
        (Residency.FREE, Residency.TRAINING),  # training owns the GPUs again
    }
)
"""Every legal step of a pair. All paths between `training` and `rollout` lead through `free`."""

OVERLAP_RESIDENCIES: Final[Mapping[_Condition, tuple[Residency, ...]]] = {
    _INACTIVE: (Residency.TRAINING, Residency.RELEASING, Residency.FREE, Residency.DRAINING),
    _LAUNCHING: (Residency.RELEASING, Residency.FREE, Residency.ACTIVATING),
    _PREPARED: (Residency.ACTIVATING, Residency.ROLLOUT),
    _ACTIVE: (Residency.ROLLOUT,),
    _SWITCHING: (Residency.ROLLOUT,),
    _DRAINING: (Residency.ROLLOUT, Residency.DRAINING),
}
"""Whose device state may be on a pair's GPUs while its overlap row is in a condition."""


def toggle(pair: Pair, residency: Residency) -> Pair:
    """The pair with its residency moved on. Raises IllegalTransition."""
    if (pair.residency, residency) not in RESIDENCY_TRANSITIONS:
        raise IllegalTransition(
            f"GPUs of {pair.training} and {pair.overlap} are in residency {pair.residency}: {residency} cannot follow"
        )
    return msgspec.structs.replace(pair, residency=residency)


def with_rows(table: RoleTable, changed: Iterable[Row]) -> RoleTable:
    """The table with these rows in place of those of the same worker. Raises IllegalTransition for an unknown slot."""
    new = {row.worker: row for row in changed}
    if not new:
        return table
    unknown = new.keys() - {row.worker for row in table.rows}
    if unknown:
        raise IllegalTransition(f"no slot {min(unknown)} in the table: slots are stable")
    for row in table.rows:
        other = new.get(row.worker)
        if other is not None and (other.gpus, other.zone) != (row.gpus, row.zone):
            raise IllegalTransition(f"{row.worker}: a slot's GPUs and zone never change")
    return msgspec.structs.replace(table, rows=tuple(new.get(row.worker, row) for row in table.rows))


def serves(roles: Iterable[Role]) -> bool:
    """Whether workers of these roles can serve a request: some colocated one, or a prefill and a decode one."""
    held = set(roles)
    return Role.COLOCATED in held or {Role.PREFILL, Role.DECODE} <= held


def active_roles(table: RoleTable) -> dict[WorkerId, Role]:
    """The active set W of the paper with each worker's role; training rows are not in it."""
    return {
        row.worker: row.role for row in table.rows if row.activity is Activity.ACTIVE and row.zone is not Zone.TRAINING
    }


def servable(table: RoleTable) -> bool:
    """Whether the table's active workers can serve a request."""
    return serves(active_roles(table).values())
