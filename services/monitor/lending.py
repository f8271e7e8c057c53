"""Lending as the event stream tells it: borrows, refusals, returns that came late, memory that was moved. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Final

import msgspec

from messages.envelope import Message
from messages.executors import ReconfigurationPlan
from messages.monitor import DecisionRecord, GpusReturned
from messages.orchestrator import PlanProgress, WeightsApplied, WorkerReleased
from messages.toggle_manager import TrainerReleased, TrainerResumed
from services.monitor.history import PlanFold, changes_of

KINDS: Final[tuple[type[Message], ...]] = (
    ReconfigurationPlan,
    PlanProgress,
    DecisionRecord,
    GpusReturned,
    TrainerReleased,
    TrainerResumed,
    WorkerReleased,
    WeightsApplied,
)
"""What these counts need of the event stream."""


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one side as the operating system, or the driver, saw it: means over the hand-overs that moved any."""

    releases: int = 0
    freed_bytes: int = 0
    restores: int = 0
    restored_bytes: int = 0


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over a run. `memory` by side: "trainer" (all its ranks together), "workers" (each overlap worker)."""

    count: int  # plans that lent training GPUs: past their cut epoch, and not rolled back
    denied_by_gate: int  # budgets with idle training GPUs that eq. 7 never let rollout have
    returns: int  # times that training asked while GPUs were lent, or about to be
    late_returns: int  # of these, those in which it did not have them by its deadline
    memory: dict[str, Moved]

    @property
    def borrows(self) -> dict[str, int]:
        """As `pearl demo --json` prints them."""
        return {"count": self.count, "denied_by_gate": self.denied_by_gate, "late_returns": self.late_returns}


def lending_of(events: Sequence[Message], overlap: Collection[str]) -> Lending:
    """What the events say about the overlap workers named."""
    asked: dict[int, bool] = {}  # by budget: whether its idle training GPUs were borrowed at some mark
    for event in events:
        if isinstance(event, DecisionRecord) and event.lending and event.overlap_workers > 0:
            asked[event.budget_id] = asked.get(event.budget_id, False) or event.borrow
    returns = {event.batch: event for event in events if isinstance(event, GpusReturned)}
    return Lending(
        count=sum(bool(change.borrowed) for change in changes_of(events, PlanFold(overlap))),
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


def _moved(freed: Sequence[int], restored: Sequence[int]) -> Moved:
    """Those that moved nothing are answers to repeated commands, or processes that held nothing."""
    gone, back = [size for size in freed if size > 0], [size for size in restored if size > 0]
    return Moved(
        releases=len(gone),
        freed_bytes=round(fmean(gone)) if gone else 0,
        restores=len(back),
        restored_bytes=round(fmean(back)) if back else 0,
    )
