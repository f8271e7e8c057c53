"""What applied plans changed: role counts before and after, what was borrowed and returned, and the decision behind it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from messages.executors import ReconfigurationPlan
from messages.ids import Mode, Role, Zone
from messages.monitor import DecisionRecord
from messages.orchestrator import PlanProgress, WorkerGone
from services.jobfile import JobFile, rollout_slots

MOST_RECORDS = 256
"""Decisions kept to explain plans with: plans follow their decision within a few."""


class Counts(msgspec.Struct, frozen=True):
    """Workers by role."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    @property
    def mode(self) -> Mode:
        """Colocated wherever some worker is; a decode worker that waits for its prefill worker is disaggregated."""
        if self.colocated:
            return Mode.COLOCATED
        return Mode.DISAGGREGATED if self.prefill or self.decode else Mode.PAUSED

    def __str__(self) -> str:
        match self.mode:
            case Mode.COLOCATED:
                return f"{self.colocated}C"
            case Mode.DISAGGREGATED:
                return f"{self.prefill}P{self.decode}D"
            case _:
                return "none"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One applied plan. `kinds`: of grow, shrink, borrow, return, mode_switch, ratio_change; possibly none."""

    plan_id: str
    decision_id: str
    before: Counts
    after: Counts
    kinds: tuple[str, ...]
    borrowed: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    record: DecisionRecord | None = None

    @property
    def forced(self) -> bool:
        """Hysteresis did not apply: the configuration that ran was no longer feasible."""
        return self.record is not None and self.record.forced


class PlanFold:
    """Follows plans one by one; `take` each event in order. `overlap`: the worker slots on training GPUs."""

    def __init__(self, overlap: Iterable[str] = ()) -> None:
        self.served = Counts()  # after the last applied plan
        self._overlap = frozenset(overlap)
        self._roles: dict[str, Role] = {}
        self._records: dict[str, DecisionRecord] = {}
        self._applied: set[str] = set()

    @staticmethod
    def of(job: JobFile) -> PlanFold:
        """For a job's slots."""
        return PlanFold(slot.worker for slot in rollout_slots(job) if slot.zone is Zone.OVERLAP)

    def take(self, message: object) -> Change | None:
        """What this event changed: a plan that reached its cut epoch, once."""
        match message:
            case DecisionRecord():
                self._records[message.decision_id] = message
                if len(self._records) > MOST_RECORDS:
                    del self._records[next(iter(self._records))]
            case WorkerGone():
                self._roles.pop(message.worker, None)
            case ReconfigurationPlan() if message.stage == "applying" and message.plan_id not in self._applied:
                self._applied.add(message.plan_id)
                return self._apply(message)
            case _:
                pass
        return None

    def _apply(self, plan: ReconfigurationPlan) -> Change:
        for leave in plan.remove:
            self._roles.pop(leave.worker, None)
        for each in (*plan.add, *plan.reassign):
            self._roles[each.worker] = each.role
        roles = list(self._roles.values())
        after = Counts(roles.count(Role.PREFILL), roles.count(Role.DECODE), roles.count(Role.COLOCATED))
        before, self.served = self.served, after
        borrowed = tuple(each.worker for each in plan.add if each.worker in self._overlap)
        returned = tuple(each.worker for each in plan.remove if each.worker in self._overlap)
        happened = {
            "grow": len(plan.add) > len(borrowed),
            "shrink": len(plan.remove) > len(returned),
            "borrow": bool(borrowed),
            "return": bool(returned),
            "mode_switch": before.mode is not after.mode and Mode.PAUSED not in (before.mode, after.mode),
            # A worker that changed its role, not one that only joined or left.
            "ratio_change": before.mode is after.mode is Mode.DISAGGREGATED
            and bool(plan.reassign)
            and before.prefill * after.decode != after.prefill * before.decode,
        }
        return Change(
            plan_id=plan.plan_id,
            decision_id=plan.decision_id,
            before=before,
            after=after,
            kinds=tuple(kind for kind, did in happened.items() if did),
            borrowed=borrowed,
            returned=returned,
            record=self._records.get(plan.decision_id),
        )


def changes_of(events: Iterable[object], fold: PlanFold) -> tuple[Change, ...]:
    """All applied plans of a stream, without those that failed or were vetoed afterwards."""
    found: list[Change] = []
    undone: set[str] = set()
    for event in events:
        if plan_id := undone_by(event):
            undone.add(plan_id)
        change = fold.take(event)
        if change is not None:
            found.append(change)
    return tuple(change for change in found if change.plan_id not in undone)


def undone_by(event: object) -> str:
    """The plan that this event says came to nothing, or ""."""
    return event.plan_id if isinstance(event, PlanProgress) and event.report in ("failed", "vetoed") else ""


def change_text(change: Change) -> str:
    """A change that is worth a line: "mode switch 4C -> 3P1D: predicted 4.4 s, 4C 5.6 s; mode switch wins 21 %"."""
    names = [kind.replace("_", " ") for kind in change.kinds if kind not in ("grow", "shrink")]
    if not names:
        return ""
    forced = " (forced)" if change.forced else ""
    text = f"{' and '.join(names)}{forced} {change.before} -> {change.after}"
    record = change.record
    if record is None:
        return text
    makespan = record.chosen.makespan_s
    predicted = "" if makespan is None else f": predicted {makespan:.1f} s{alternative_text(record)}"
    why = record.borrow_reason if change.borrowed else record.reason
    return f"{text}{predicted}; {why}"


def alternative_text(record: DecisionRecord) -> str:
    """The best configuration of the mode that was not chosen, and its prediction."""
    other = [
        (each.makespan_s, Counts(each.prefill, each.decode, each.colocated))
        for each in record.candidates
        if each.makespan_s is not None and bool(each.colocated) != bool(record.chosen.colocated)
    ]
    if not other:
        return ""
    makespan, counts = min(other, key=_first)
    return f", {counts} {makespan:.1f} s"


def _first(item: tuple[float, Counts]) -> float:
    return item[0]
