"""Lending as the event stream tells it: borrows, refusals, returns that came late, memory that was moved. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Final

import msgspec

from messages.envelope import Message
from messages.executors import ReconfigurationPlan
from messages.ids import RoleGeneration, WorkerId
from messages.monitor import DecisionRecord, GpusReturned
from messages.orchestrator import PlanProgress, WeightsApplied, WorkerGone, WorkerReleased
from messages.toggle_manager import TrainerReleased, TrainerResumed
from services.monitor.history import Change, PlanFold, applied_only

KINDS: Final[tuple[type[Message], ...]] = (
    ReconfigurationPlan,
    PlanProgress,
    DecisionRecord,
    GpusReturned,
    TrainerReleased,
    TrainerResumed,
    WorkerReleased,
    WeightsApplied,
    WorkerGone,
)
"""What these counts need of the event stream."""


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one side as the operating system, or the driver, saw it: means over the hand-overs that moved any."""

    releases: int = 0
    freed_bytes: int = 0
    restores: int = 0
    restored_bytes: int = 0


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over a run. `memory` by side: "trainer" (all its ranks together), "workers" (each overlap worker).

    Plans and workers are counted apart, since one return brings back what several borrows lent: always
    `workers_lent = workers_returned + workers_lost + workers_held`.
    """

    count: int  # plans that lent training GPUs: applied, and not rolled back
    workers_lent: int  # overlap workers that joined rollout by them, each time it did
    return_plans: int  # plans by which some of them left rollout again
    workers_returned: (
        int  # of them `without_plan`: training took them back while another plan was applying, or after a roll-back
    )
    without_plan: int
    workers_lost: int  # died while lent
    workers_held: int  # still lent at the end
    denied_by_gate: int  # budgets with idle training GPUs that eq. 7 never let rollout have
    returns: int  # times that training asked while GPUs were lent, or about to be
    late_returns: int  # of these, those in which it did not have them by its deadline
    memory: dict[str, Moved]

    @property
    def borrows(self) -> dict[str, int]:
        """As `pearl demo --json` prints them."""
        return {
            "count": self.count,
            "denied_by_gate": self.denied_by_gate,
            "late_returns": self.late_returns,
            "returns": self.returns,
            "return_plans": self.return_plans,
            "workers_lent": self.workers_lent,
            "workers_returned": self.workers_returned,
            "workers_lost": self.workers_lost,
            "workers_held": self.workers_held,
            "without_plan": self.without_plan,
        }

    def lines(self) -> list[tuple[str, str]]:
        """For people: what each number counts, and how they add up."""
        planned = self.workers_returned - self.without_plan
        how = f"by {_many(self.return_plans, 'plan')}"
        if self.without_plan:
            how = f"{planned} {how}, {self.without_plan} without a plan"
        back = [f"{self.workers_returned} returned ({how})"]
        back += [f"{self.workers_lost} lost"] if self.workers_lost else []
        back += [f"{self.workers_held} still lent"] if self.workers_held else []
        return [
            (
                "borrows",
                f"{_many(self.count, 'plan')} lent GPUs of training; the gate denied {_many(self.denied_by_gate, 'other')}",
            ),
            ("", f"{_many(self.workers_lent, 'worker')} lent = {' + '.join(back)}"),
            (
                "returns",
                f"{_many(self.returns, 'time')} training asked for its GPUs: for all that were lent then, or about to be; "
                f"{self.late_returns} late",
            ),
        ]


def lending_of(events: Sequence[Message], overlap: Collection[str]) -> Lending:
    """What the events say about the overlap workers named."""
    asked: dict[int, bool] = {}  # by budget: whether its idle training GPUs were borrowed at some mark
    for event in events:
        if isinstance(event, DecisionRecord) and event.lending and event.overlap_workers > 0:
            asked[event.budget_id] = asked.get(event.budget_id, False) or event.borrow
    returns = {event.batch: event for event in events if isinstance(event, GpusReturned)}
    workers = _Workers(events, overlap)
    return Lending(
        count=workers.borrows,
        workers_lent=workers.lent,
        return_plans=workers.return_plans,
        workers_returned=workers.returned,
        without_plan=workers.without_plan,
        workers_lost=workers.lost,
        workers_held=len(workers.held),
        denied_by_gate=sum(not borrowed for borrowed in asked.values()),
        returns=len(returns),
        late_returns=sum(event.at_ms > event.deadline_ms for event in returns.values()),
        memory={
            "trainer": _moved(
                [event.freed_bytes for event in events if isinstance(event, TrainerReleased)],
                [event.restored_bytes for event in events if isinstance(event, TrainerResumed)],
            ),
            "workers": _moved(
                [event.freed_bytes for event in events if isinstance(event, WorkerReleased)],
                [event.restored_bytes for event in events if isinstance(event, WeightsApplied)],
            ),
        },
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


class _Workers:
    """Follows the overlap workers in and out of rollout."""

    def __init__(self, events: Sequence[Message], overlap: Collection[str]) -> None:
        self.borrows = self.lent = self.return_plans = self.returned = self.without_plan = self.lost = 0
        self.held: dict[str, RoleGeneration] = {}  # and the generation that each was lent with
        fold = PlanFold(overlap)
        for event in applied_only(events, fold.overlap):
            change = fold.take(event)
            if change is not None and isinstance(event, ReconfigurationPlan):
                self._take(change, {each.worker: each.role_generation for each in event.add})
            elif isinstance(event, WorkerGone) and event.worker in self.held:
                del self.held[event.worker]
                self.lost += 1
            elif isinstance(event, WorkerReleased) and self._answers(event):
                del self.held[event.worker]
                self.returned += 1
                self.without_plan += 1

    def _answers(self, event: WorkerReleased) -> bool:
        """Whether this worker is lent, and gave these GPUs back: the answer to an earlier return is of a lower generation."""
        lent_with = self.held.get(event.worker)
        return lent_with is not None and event.role_generation >= lent_with

    def _take(self, change: Change, generations: Mapping[WorkerId, RoleGeneration]) -> None:
        new, back = set(change.borrowed) - self.held.keys(), set(change.returned) & self.held.keys()
        self.held |= {worker: generations[WorkerId(worker)] for worker in new}
        for worker in back:
            del self.held[worker]
        self.borrows += bool(change.borrowed)
        self.lent += len(new)
        self.return_plans += bool(back)
        self.returned += len(back)


def _moved(freed: Sequence[int], restored: Sequence[int]) -> Moved:
    """Those that moved nothing are answers to repeated commands, or processes that held nothing."""
    gone, back = [size for size in freed if size > 0], [size for size in restored if size > 0]
    return Moved(
        releases=len(gone),
        freed_bytes=round(fmean(gone)) if gone else 0,
        restores=len(back),
        restored_bytes=round(fmean(back)) if back else 0,
    )
