"""From the table's target to the next plan: what to change now, and what has to wait. Pure.

A target is reached by one plan or by several; each is computed anew from the table, so nothing has to be remembered
between them. What makes several:

- mandatory returns, and whatever makes the survivors servable again, are never kept waiting by the preparation of
  joiners: they are a plan of their own, without joiners, that is cut at once;
- a mode switch goes in waves, so that some topology serves at all times (pearl_state.plan.first_wave);
- joiners that are prepared already are not kept waiting by ones that a newer target added.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from messages.ids import Activity, Role, Stage, WorkerId, Zone
from messages.orchestrator import TargetConfiguration
from pearl_state.model import DEDICATED_ZONES, RoleTable, Row, serves
from pearl_state.plan import Counts, MinimalPlan, choose_members, first_wave, fit, minimal_change
from services.orchestrator.core_lending import can_borrow


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """The next plan (maybe empty), and the preparing workers that the target wants no more."""

    plan: MinimalPlan
    cancel: tuple[WorkerId, ...]
    waits_ms: int = 0  # growth is held back until then (Unix ms); 0: it is not
    fallback: str = ""  # why the roles are not the target's, for people


def counts_of(target: TargetConfiguration) -> Counts:
    """The target's role counts."""
    return Counts(target.prefill, target.decode, target.colocated)


def next_draft(table: RoleTable, target: TargetConfiguration, now_ms: int, *, whole_group: bool = False) -> Draft:
    """What to do next towards the target. `whole_group`: do not let prepared joiners go ahead of the others."""
    leaving = frozenset(leave.worker for leave in target.leaving)
    if target.training_batch is not None:
        leaving |= {row.worker for row in table.rows if row.zone is Zone.OVERLAP}
    waiting = frozenset(entry.worker for entry in table.writer.backoffs if entry.until_ms > now_ms)
    usable = frozenset(target.usable) - leaving
    available = [
        row
        for row in table.rows
        if row.worker in usable
        and (row.zone in DEDICATED_ZONES or can_borrow(table, target, row))
        and row.stage is not Stage.DRAINING
        and not (row.activity is Activity.INACTIVE and row.worker in waiting)
    ]
    asked = counts_of(target)
    counts = fit(asked, len(available))
    members = choose_members(table.rows, {row.worker for row in available}, counts)
    plan = minimal_change(table.rows, members, counts)
    inside = frozenset(members)
    cancel = tuple(
        row.worker for row in table.rows if row.stage in (Stage.LAUNCHING, Stage.PREPARED) and row.worker not in inside
    )
    fallback = "" if counts == asked else f"{_text(counts)} instead of {_text(asked)} on {len(available)} usable slots"
    if plan.add:
        urgent = _urgent(table, members, counts, leaving)
        if not urgent.empty:
            return Draft(plan=first_wave(table.rows, urgent, leaving), cancel=cancel, fallback=fallback)
        if now_ms < table.writer.hold_until_ms:
            return Draft(plan=MinimalPlan(), cancel=cancel, waits_ms=table.writer.hold_until_ms)
        if not whole_group:
            plan = _prepared_first(table, members, counts, plan)
    return Draft(plan=first_wave(table.rows, plan, leaving), cancel=cancel, fallback=fallback)


def _urgent(table: RoleTable, members: Sequence[WorkerId], counts: Counts, leaving: frozenset[WorkerId]) -> MinimalPlan:
    """What cannot wait for joiners to be prepared; empty if everything can.

    Mandatory returns; rows that an unfinished plan left draining or switching; and a forced change of the survivors'
    roles where they would not serve as they are.
    """
    stay = frozenset(members)
    survivors = [row for row in table.rows if row.worker in stay and _survives(row)]
    broken = any(row.stage is Stage.SWITCHING for row in survivors)
    # Those that the target drops without need serve on until their cut.
    staying = [row for row in table.rows if row.activity is Activity.ACTIVE and row.worker not in leaving]
    useless = not serves(row.role for row in staying)
    if survivors and (broken or useless):
        rows = [row for row in table.rows if row not in staying or row.worker in stay]
        return minimal_change(rows, [row.worker for row in survivors], fit(counts, len(survivors)))
    remove = [
        row.worker
        for row in table.rows
        if (row.worker in leaving and _survives(row))
        or (
            useless and row in staying and row.worker not in stay and _survives(row)
        )  # it serves nothing, nobody wants it
        or row.stage is Stage.DRAINING
        or (row.stage is Stage.SWITCHING and row.worker not in stay)
    ]
    return MinimalPlan(remove=tuple(remove))


def _survives(row: Row) -> bool:
    return row.role is not Role.TRAINING and (row.activity is Activity.ACTIVE or row.stage is Stage.SWITCHING)


def _prepared_first(table: RoleTable, members: Sequence[WorkerId], counts: Counts, plan: MinimalPlan) -> MinimalPlan:
    """The plan without the joiners that are not prepared, if some are: so newer targets cannot starve admission.

    Only where it costs no further role change and keeps the mode; the others follow in the next plan.
    """
    rows = table.by_worker
    ready = [w for w in members if rows[w].stage is Stage.PREPARED or _survives(rows[w])]
    prepared = [placement for placement in plan.add if rows[placement.worker].stage is Stage.PREPARED]
    if not prepared or len(prepared) == len(plan.add):
        return plan
    fewer = fit(counts, len(ready))
    if (fewer.colocated > 0) is not (counts.colocated > 0):
        return plan
    part = minimal_change(table.rows, ready, fewer)
    return part if part.d_role <= plan.d_role else plan


def _text(counts: Counts) -> str:
    return f"{counts.prefill}P {counts.decode}D {counts.colocated}C"
