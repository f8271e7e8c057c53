"""Which commands the trainer and the overlap workers are to have now, by the table and what is known of each process. Pure.

Nothing is remembered here: the same view wants the same orders, and the core repeats them until they are answered.
"""

from __future__ import annotations

from messages.executors import Assign
from messages.ids import Activity, Residency, Stage
from messages.rollout_worker import Activate, Deactivate
from messages.trainer import TrainerRelease, TrainerResume
from pearl_state.model import RoleTable, Row
from pearl_state.orders import (
    Order,
    drain_order,
    given_up,
    join_order,
    kill_key,
    kill_order,
    launch_order,
    role_order,
)
from pearl_state.parts import Part
from pearl_state.progress import Progress, is_drained
from services.toggle_manager.config import Config
from services.toggle_manager.core_state import ToggleState, View, is_any, is_given_up

RELAUNCH_MS = 2000
"""Least time between two launches in one slot: a worker that dies at its start does not keep its node busy."""
FOLLOW_MS = 400
"""From a process's SIGKILL until the table can say that its GPUs are training's: two ticks, and a few messages' way."""
LENT = (Residency.FREE, Residency.ACTIVATING, Residency.ROLLOUT, Residency.DRAINING)
"""Residencies in which nothing of the trainer's may be on the GPUs."""


def may_train(config: Config, state: ToggleState, table: RoleTable) -> bool:
    """Training owns its GPUs for a batch not trained yet, and nothing of rollout's is left on them (DESIGN 11.2)."""
    if config.trainer is None or table.training_batch is None or table.training_batch <= state.finished_batch:
        return False
    return all(pair.residency is Residency.TRAINING for pair in table.pairs)


def releases(config: Config, state: ToggleState, table: RoleTable) -> bool:
    """The trainer is to let go of its GPUs, or, restarted while they are lent, to keep off them."""
    if config.trainer is None or table.training_batch is not None or not state.trainer_resident:
        return False
    return is_any(table, Residency.RELEASING, *LENT)


def orders(config: Config, view: View, part: Part | None) -> list[Order]:
    """The trainer's order, if there is one, and one at most of each overlap slot."""
    wanted: list[Order | None] = []
    if may_train(config, view.state, view.table):
        wanted.append(_resume(config, view))
    elif releases(config, view.state, view.table):
        wanted.append(_release(config, view))
    wanted.extend(_of_worker(config, view, row, part) for row in view.rows.values())
    return [order for order in wanted if order is not None]


def _resume(config: Config, view: View) -> Order:
    """Train; a trainer that does not take its GPUs in time is killed, and restarts from its checkpoint."""
    state = view.state
    order = Order(
        f"resume/{state.resume_batch}/{state.resume_epoch}",
        TrainerResume(epoch=state.resume_epoch, batch=state.resume_batch),
    )
    if state.resumed:
        return order
    return _or_kill_trainer(config, view, order, config.resume_ms, "not resumed in time")


def _release(config: Config, view: View) -> Order:
    """Ask for the trainer's memory; a trainer that does not give it back is killed, and restarts without it."""
    epoch = view.state.release_epoch
    order = Order(f"release/{epoch}", TrainerRelease(epoch=epoch))
    deadlines = [pair.deadline_ms for pair in view.table.pairs if pair.deadline_ms]
    return _or_kill_trainer(config, view, order, config.release_ms, "not released in time", min(deadlines, default=0))


def _or_kill_trainer(
    config: Config, view: View, order: Order, patience_ms: int, reason: str, deadline_ms: int = 0
) -> Order:
    """`order`, or what ends the trainer's process once that has been unanswered for too long."""
    state, trainer = view.state, config.trainer
    assert trainer is not None
    killed_by = kill_key(trainer, state.trainer_incarnation)
    if given_up(view.pending, order.key, killed_by, view.now_ms, patience_ms, deadline_ms, _reserve_ms(config)):
        return kill_order(trainer, state.trainer_incarnation, _grace_ms(config, view, deadline_ms), reason)
    return order


def _of_worker(config: Config, view: View, row: Row, part: Part | None) -> Order | None:
    """What the process of one slot is to do now."""
    if row.incarnation == 0:
        return None  # lending is off: the slot has never had a process
    known, pair = view.known.get(row.worker), view.pairs.get(row.worker)
    if known is not None and (known.incarnation > row.incarnation or _is_gone(row, known)):
        return None  # the table will follow
    if pair is not None and pair.residency is Residency.DRAINING:
        return _give_back(config, view, row, known, pair.deadline_ms)
    if known is None or known.incarnation < row.incarnation or not known.ready:
        return _launch(config, view, row, known)
    for assign in () if part is None else (*part.add, *part.reassign):
        if assign.worker == row.worker and assign.incarnation == row.incarnation:
            assert part is not None
            if assign in part.add:
                lent = pair is not None and pair.residency is Residency.ACTIVATING
                failed = not part.applying and is_given_up(view.state, part)
                return _join(config, view, assign, known, part.applying) if lent and not failed else None
            return _switch(config, view, row, assign, known) if part.applying else None
    if row.activity is Activity.ACTIVE and known.role_set < row.role_generation:
        # A plan rolled back after the cut epoch: the worker was drained for a change that did not come.
        return role_order(Assign(row.worker, row.role, row.incarnation, row.role_generation))
    return None


def _launch(config: Config, view: View, row: Row, known: Progress | None) -> Order | None:
    """A process for the slot, early: it serves, and holds device memory, only when a borrow wants it."""
    before = known.launched_ms if known is not None and known.incarnation < row.incarnation else 0
    if before and view.now_ms - before < RELAUNCH_MS:
        return None
    assign = Assign(row.worker, row.role, row.incarnation, row.role_generation)
    return launch_order(assign, view.slots[row.worker].gpus)


def _join(config: Config, view: View, assign: Assign, known: Progress, applying: bool) -> Order | None:
    """Device state, newest weights, then (once the cut epoch is written) the role."""
    if view.state.trainer_resident:
        return None
    if known.activated < assign.role_generation:
        message = Activate(worker=assign.worker, incarnation=assign.incarnation, role_generation=assign.role_generation)
        return Order(f"activate/{assign.worker}/{assign.incarnation}/{assign.role_generation}", message)
    return join_order(known, view.state.snapshot, assign, applying=applying)


def _switch(config: Config, view: View, row: Row, assign: Assign, known: Progress) -> Order | None:
    if row.stage is not Stage.SWITCHING:
        return None
    if not is_drained(row, known):
        return _bounded(config, view, row, drain_order(row), 0, "not drained in time")
    return role_order(assign) if known.role_set < assign.role_generation else None


def _give_back(config: Config, view: View, row: Row, known: Progress | None, deadline_ms: int) -> Order | None:
    """Drain what still serves, then give the device memory back; in time for the deadline, or the process ends."""
    if row.stage is Stage.DRAINING and not is_drained(row, known):
        return _bounded(config, view, row, drain_order(row), deadline_ms, "not drained in time")
    generation = row.role_generation
    if row.stage is not Stage.DRAINING and known is not None and known.incarnation == row.incarnation:
        generation = max(generation, known.activated)
    if known is not None and known.incarnation == row.incarnation and known.released >= generation:
        return None
    message = Deactivate(worker=row.worker, incarnation=row.incarnation, role_generation=generation)
    order = Order(f"deactivate/{row.worker}/{row.incarnation}/{generation}", message)
    return _bounded(config, view, row, order, deadline_ms, "not released in time")


def _bounded(config: Config, view: View, row: Row, order: Order, deadline_ms: int, reason: str) -> Order:
    """`order`, or the kill that replaces it when it stays unanswered too long or a return deadline is near."""
    killed_by, drain_ms = kill_key(row.worker, row.incarnation), config.drain_ms
    if given_up(view.pending, order.key, killed_by, view.now_ms, drain_ms, deadline_ms, _reserve_ms(config)):
        return kill_order(row.worker, row.incarnation, _grace_ms(config, view, deadline_ms), reason)
    return order


def _reserve_ms(config: Config) -> int:
    """What a kill needs before a deadline: SIGTERM's grace, one repetition of the command, and the table's following."""
    return config.kill_grace_ms + config.command_retry_ms + FOLLOW_MS


def _grace_ms(config: Config, view: View, deadline_ms: int) -> int:
    """Time between SIGTERM and SIGKILL that a return deadline (0: none) leaves."""
    left = deadline_ms - FOLLOW_MS - view.now_ms if deadline_ms > 0 else config.kill_grace_ms
    return max(0, min(config.kill_grace_ms, left))


def _is_gone(row: Row, known: Progress) -> bool:
    return known.incarnation == row.incarnation and known.gone
