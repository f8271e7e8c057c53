"""Lending in the table: whose device state is on the training GPUs, and how they are given back (paper 4.6). Pure.

A pair's residency follows from its overlap row and from facts: the trainer released, the worker released, the process is
gone. All paths between training and rollout lead through `free`, so training is never told that its GPUs are its own
while anything of rollout's may be on them, and the other way round. A return is bounded by the pair's deadline and waits
for no plan: the toggle manager drains whatever residency `draining` names.
"""

from __future__ import annotations

import msgspec

from messages.ids import Activity, Epoch, Residency, RoleGeneration, Stage, Zone
from messages.orchestrator import TargetConfiguration, WorkerReleased
from messages.toggle_manager import TrainerReleased
from pearl_state.model import Move, Pair, RoleTable, Row, change, toggle, with_rows
from services.orchestrator.config import Config

HELD = (Residency.RELEASING, Residency.ACTIVATING, Residency.ROLLOUT, Residency.DRAINING)
"""Residencies in which training cannot have its GPUs yet."""


def pair_of(table: RoleTable, overlap: str) -> Pair | None:
    """The pair of an overlap worker."""
    return next((pair for pair in table.pairs if pair.overlap == overlap), None)


def can_borrow(table: RoleTable, target: TargetConfiguration, row: Row) -> bool:
    """Whether a plan may place a role on this overlap row: its process is up, and training has no use for its GPUs.

    One whose device state is still being given up is planned with when that is done.
    """
    if target.training_batch is not None or table.training_batch is not None:
        return False
    if row.activity is not Activity.INACTIVE:
        return True
    pair = pair_of(table, row.worker)
    free = pair is not None and pair.residency in (Residency.TRAINING, Residency.RELEASING, Residency.FREE)
    return row.ready and free


def settle(table: RoleTable, config: Config, now_ms: int) -> RoleTable:
    """The residencies that the rows ask for, and the deadlines that training sets."""
    rows, target = table.by_worker, table.writer.target
    borrows = any(
        rows[pair.overlap].stage is Stage.LAUNCHING and pair.residency is Residency.TRAINING for pair in table.pairs
    )
    pairs = tuple(_settled(pair, rows[pair.overlap], borrows) for pair in table.pairs)
    if target is not None and target.training_batch is not None:
        asked = {leave.worker: leave.deadline_ms for leave in target.leaving}
        pairs = tuple(
            _bounded(pair, asked.get(pair.overlap), now_ms + config.return_ms) if pair.residency in HELD else pair
            for pair in pairs
        )
    if pairs == table.pairs:
        return table
    table = msgspec.structs.replace(table, pairs=pairs)
    if borrows:
        # The trainer's processes hold all training GPUs: they let go of all of them, lent or not.
        writer = msgspec.structs.replace(table.writer, release_epoch=Epoch(table.epoch + 1))
        table = msgspec.structs.replace(table, writer=writer)
    return table


def _settled(pair: Pair, row: Row, borrows: bool) -> Pair:
    """The pair moved on by one borrow's or return's step, where its row asks for it."""
    if pair.residency is Residency.TRAINING and borrows:
        pair = msgspec.structs.replace(toggle(pair, Residency.RELEASING), deadline_ms=0)
    if pair.residency is Residency.FREE and pair.unsure:
        # Rollout's memory is given back for sure, the trainer's is not: it is asked for it before the next borrow.
        pair = msgspec.structs.replace(toggle(pair, Residency.TRAINING), unsure=False)
    if pair.residency is Residency.FREE and row.stage is Stage.LAUNCHING and row.ready:
        pair = msgspec.structs.replace(toggle(pair, Residency.ACTIVATING), deadline_ms=0)
    if pair.residency is Residency.ACTIVATING and row.activity is Activity.ACTIVE:
        pair = toggle(pair, Residency.ROLLOUT)
    over = row.activity is Activity.INACTIVE or row.stage is Stage.DRAINING
    if pair.residency in (Residency.ACTIVATING, Residency.ROLLOUT) and over:
        pair = toggle(pair, Residency.DRAINING)
    return pair


def _bounded(pair: Pair, asked_ms: int | None, otherwise_ms: int) -> Pair:
    """The pair with the deadline of its return; one that is set may only come forward."""
    if asked_ms is not None and asked_ms > 0 and (pair.deadline_ms == 0 or asked_ms < pair.deadline_ms):
        return msgspec.structs.replace(pair, deadline_ms=asked_ms)
    return pair if pair.deadline_ms else msgspec.structs.replace(pair, deadline_ms=otherwise_ms)


def trainer_released(table: RoleTable, fact: TrainerReleased) -> RoleTable:
    """The trainer's device memory is free. An answer to an earlier release says nothing about now."""
    return table if fact.epoch < table.writer.release_epoch else trainer_gone(table)


def trainer_gone(table: RoleTable) -> RoleTable:
    """Nothing of the trainer's is on its GPUs: a process that is gone holds nothing, and the next one waits for its orders."""
    pairs = tuple(
        toggle(pair, Residency.FREE) if pair.residency is Residency.RELEASING else pair for pair in table.pairs
    )
    return table if pairs == table.pairs else msgspec.structs.replace(table, pairs=pairs)


def worker_released(table: RoleTable, row: Row, fact: WorkerReleased) -> RoleTable:
    """An overlap worker gave its device memory back: its GPUs are free, and it serves no more, whatever the plan."""
    pair = pair_of(table, row.worker)
    if pair is None or pair.residency is not Residency.DRAINING or fact.role_generation < row.role_generation:
        return table
    if row.activity is not Activity.INACTIVE:
        table = with_rows(table, (change(row, Move.RETIRE),))
    return freed(table, row)


def freed(table: RoleTable, row: Row) -> RoleTable:
    """Nothing of this overlap worker's is on its GPUs any more."""
    pairs = tuple(
        toggle(pair, Residency.FREE)
        if pair.overlap == row.worker
        and pair.residency in (Residency.ACTIVATING, Residency.ROLLOUT, Residency.DRAINING)
        else pair
        for pair in table.pairs
    )
    return msgspec.structs.replace(table, pairs=pairs)


def may_train(table: RoleTable) -> bool:
    """Whether nothing of rollout's is, or is about to be, on training's GPUs, and the trainer is not just letting go."""
    rows = table.by_worker
    return all(
        pair.residency in (Residency.TRAINING, Residency.FREE) and rows[pair.overlap].activity is Activity.INACTIVE
        for pair in table.pairs
    )


def occupied(table: RoleTable) -> tuple[Pair, ...]:
    """The pairs once training owns its GPUs."""
    assert may_train(table), "training waits until its GPUs are free"
    return tuple(
        msgspec.structs.replace(toggle(pair, Residency.TRAINING), unsure=False)
        if pair.residency is Residency.FREE
        else pair
        for pair in table.pairs
    )


def vacated(table: RoleTable) -> tuple[Pair, ...]:
    """The pairs once training is idle: their last return is history."""
    return tuple(msgspec.structs.replace(pair, deadline_ms=0) for pair in table.pairs)


def cut_returns(table: RoleTable, target: TargetConfiguration) -> RoleTable:
    """Training asks for its GPUs while a plan is applying: overlap workers leave now, whatever the plan still waits for.

    Joiners that were about to be admitted are undone, role-changers leave instead, and the plan goes on without them; one
    of which nothing is left is over. (A plan that is still preparing is superseded, as by any newer target.)
    """
    plan, rows = table.plan, table.by_worker
    if target.training_batch is None or plan is None or plan.stage != "applying":
        return table
    out = {assign.worker for assign in (*plan.add, *plan.reassign) if rows[assign.worker].zone is Zone.OVERLAP}
    changed = [
        change(row, Move.DRAIN)
        for row in table.rows
        if row.zone is Zone.OVERLAP and row.activity is Activity.ACTIVE and row.worker not in out
    ]
    if not out and not changed:
        return table
    for assign in plan.add:
        if assign.worker in out and rows[assign.worker].activity is Activity.TRANSITIONING:
            changed.append(change(rows[assign.worker], Move.CANCEL, generation=assign.role_generation))
    for assign in plan.reassign:
        if assign.worker in out and rows[assign.worker].stage is Stage.SWITCHING:
            # Above what was announced: the worker may serve under that already.
            following = RoleGeneration(assign.role_generation + 1)
            changed.append(change(rows[assign.worker], Move.DRAIN, generation=following))
    table = with_rows(table, changed)
    if not out:
        return table
    add = tuple(assign for assign in plan.add if assign.worker not in out)
    reassign = tuple(assign for assign in plan.reassign if assign.worker not in out)
    role_set = tuple(worker for worker in table.writer.role_set if worker not in out)
    if not (add or plan.remove or reassign):
        writer = msgspec.structs.replace(table.writer, role_set=())
        return msgspec.structs.replace(table, plan=None, admission_paused=None, writer=writer)
    leaves = any(rows[leave.worker].zone is Zone.OVERLAP for leave in plan.remove)
    plan = msgspec.structs.replace(plan, add=add, reassign=reassign, toggle=plan.toggle if leaves else "none")
    paused = table.admission_paused if add else None
    writer = msgspec.structs.replace(table.writer, role_set=role_set)
    return msgspec.structs.replace(table, plan=plan, admission_paused=paused, writer=writer)
