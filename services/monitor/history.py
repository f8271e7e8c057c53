"""What applied plans changed: role counts before and after, what was borrowed and returned, and the decision behind it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

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
    untold: bool = (
        False  # its overlap part was not applied; whether its other part was admitted, the events do not tell
    )

    @property
    def forced(self) -> bool:
        """Hysteresis did not apply: the configuration that ran was no longer feasible."""
        return self.record is not None and self.record.forced


class PlanFold:
    """Follows plans one by one; `take` each event in order. `overlap`: the worker slots on training GPUs."""

    def __init__(self, overlap: Iterable[str] = ()) -> None:
        self.served = Counts()  # after the last applied plan
        self.overlap = frozenset(overlap)
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
        borrowed = tuple(each.worker for each in plan.add if each.worker in self.overlap)
        returned = tuple(each.worker for each in plan.remove if each.worker in self.overlap)
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
    """All plans of a stream that were applied in the end."""
    events = tuple(events)
    whole = carried_out(events, fold.overlap)
    found = [fold.take(event) for event in applied_only(events, fold.overlap)]
    return tuple(
        msgspec.structs.replace(change, untold=not whole[change.plan_id]) for change in found if change is not None
    )


def carried_out(events: Iterable[object], overlap: Collection[str]) -> dict[str, bool]:
    """Plans that were applied after their cut epoch: whether all of each was, or only its part outside the overlap zone.

    The admit epoch waits until every executor with a part reports it applied; one that reports a failure, or reports nothing
    until the deadline, has the plan rolled back, of which no event tells. A veto comes too late for a plan that is cut: it goes
    on. Where training asks for its GPUs while a plan applies, the plan goes on without its overlap joiners: then the toggle
    manager may report nothing, as after a roll-back, and of such a plan the rebuilder's part counts, if that was reported.
    """
    plans: dict[str, ReconfigurationPlan] = {}
    reports: set[tuple[str, str, str]] = set()
    for event in events:
        if isinstance(event, ReconfigurationPlan) and event.stage == "applying":
            plans.setdefault(event.plan_id, event)
        elif isinstance(event, PlanProgress):
            reports.add((event.plan_id, event.part, event.report))
    found: dict[str, bool] = {}
    for plan_id, plan in plans.items():
        lent = [each.worker in overlap for each in (*plan.add, *plan.reassign)]
        named = {*lent, *(leave.worker in overlap for leave in plan.remove)}
        parts = [part for part, inside in (("rebuilder", False), ("toggle", True)) if inside in named]
        behind = [part for part in parts if (plan_id, part, "applied") not in reports]
        if any((plan_id, part, "failed") in reports for part in parts):
            continue
        if not behind:
            found[plan_id] = True
        elif behind == ["toggle"] and "rebuilder" in parts and any(lent):
            found[plan_id] = False
    return found


def applied_only(events: Iterable[object], overlap: Collection[str]) -> Iterator[object]:
    """The events without plans that came to nothing; of plans that were applied in part, that part."""
    events = tuple(events)
    whole = carried_out(events, overlap)
    for event in events:
        if not isinstance(event, ReconfigurationPlan) or whole.get(event.plan_id, False):
            yield event
        elif event.plan_id in whole:
            add = tuple(each for each in event.add if each.worker not in overlap)
            reassign = tuple(each for each in event.reassign if each.worker not in overlap)
            yield msgspec.structs.replace(event, add=add, reassign=reassign)


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
