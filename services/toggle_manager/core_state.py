"""What the toggle manager knows: the table, each process, the trainer, and what lending has cost so far. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from messages.ids import Epoch, Incarnation, Residency, WorkerId
from messages.pipeline_scheduler import WeightsPublished
from pearl_state.model import Pair, RoleTable, Row
from pearl_state.orders import Repeat
from pearl_state.parts import Part, marked
from pearl_state.progress import Mark, Progress
from services.jobfile import Slot


class ToggleCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Learned costs in seconds, exponential moving averages; None: no sample yet."""

    borrow_s: float | None = None  # the first hand-over of a borrow until its group is prepared
    return_s: float | None = None  # the first worker told to leave until all GPUs are free
    toggled_step_s: float | None = None  # from one finished train step to the next, with a borrow between them
    plain_step_s: float | None = None  # the same without one


class ToggleState(msgspec.Struct, frozen=True, kw_only=True):
    """The table as last seen, what is known of each process and of the trainer, and the commands that await an answer."""

    clock_ms: int = 0
    table: RoleTable | None = None
    snapshot: WeightsPublished | None = None  # the newest
    workers: tuple[Progress, ...] = ()
    pending: tuple[Repeat, ...] = ()
    marks: tuple[Mark, ...] = ()  # of the plan in the table
    begun_batch: int = -1  # the newest batch that training asked its GPUs for
    finished_batch: int = -1  # the newest batch trained
    returned_batch: int = -1  # the newest batch whose return was reported
    resume_batch: int = -1  # the batch the trainer was last told to train, and as of which epoch
    resume_epoch: Epoch = Epoch(0)
    resumed: bool = False  # it has its device state back and trains that batch
    trainer_incarnation: Incarnation = Incarnation(1)
    trainer_resident: bool = True  # the trainer's device state may be on its GPUs
    release_epoch: Epoch = Epoch(0)  # names the last release asked for
    release_wanted: bool = False  # that release is under way
    costs: ToggleCosts = ToggleCosts()
    borrow_since_ms: int = 0  # a borrow is under way since; 0: none is
    return_since_ms: int = 0  # likewise a return
    returned_s: float | None = None  # what the last return took, until the trainer's part of it is known too
    spoiled: bool = False  # a process died since the borrow began: what its hand-overs take says nothing of others
    last_step_ms: int = 0
    toggled: bool = False  # GPUs were lent since the last finished step


class View(NamedTuple):
    """The state, indexed, for one convergence."""

    state: ToggleState
    table: RoleTable
    now_ms: int
    rows: dict[WorkerId, Row]
    pairs: dict[WorkerId, Pair]
    known: dict[WorkerId, Progress]
    pending: dict[str, Repeat]  # by key
    slots: Mapping[WorkerId, Slot]


def is_any(table: RoleTable | None, *residencies: Residency) -> bool:
    """Whether some pair of the table is in one of these residencies."""
    return table is not None and any(pair.residency in residencies for pair in table.pairs)


def is_given_up(state: ToggleState, part: Part) -> bool:
    """Whether this part of the plan was reported failed or vetoed."""
    return marked(state.marks, part, "failed") or marked(state.marks, part, "vetoed")
