"""The independent checkers of a simulated run: one for each promise of DESIGN 11, fed with all that is seen.

They are written from DESIGN 3, 4, 7, 11 and docs/protocol.md, and import nothing of what they check: no planner, no
invariants, no core; only messages and the plain records of the role table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.jobfile import JobFile
from services.simulator.faults.check_decisions import Explained
from services.simulator.faults.check_plans import FailedExpansion, MinimalPlan, Untouched
from services.simulator.faults.check_requests import Fenced, JournalFirst, NoTokenTwice, Routed
from services.simulator.faults.check_returns import Liveness, Returns
from services.simulator.faults.check_table import HalfReady, NoStepBack, OnePhase, Servable, SingleWriter
from services.simulator.faults.check_work import NoTrajectoryLost, Staleness
from services.simulator.faults.history import History, Promise
from services.simulator.faults.record import Seen, Violation

PROMISES: Final[tuple[type[Promise], ...]] = (
    SingleWriter,
    NoStepBack,
    OnePhase,
    HalfReady,
    Servable,
    Routed,
    Fenced,
    NoTrajectoryLost,
    NoTokenTwice,
    JournalFirst,
    Staleness,
    MinimalPlan,
    Untouched,
    Returns,
    FailedExpansion,
    Explained,
    Liveness,
)
"""In the order of DESIGN 11."""


class Checkers:
    """All of them, over one run. `see` everything in order, then `finish`; each says what was broken just then."""

    def __init__(self, job: JobFile, promises: Iterable[type[Promise]] = PROMISES) -> None:
        self._history = History(job)
        self._promises = tuple(promise(self._history) for promise in promises)
        self._by_kind: dict[type[Seen], tuple[Promise, ...]] = {}

    def see(self, seen: Seen) -> list[Violation]:
        """What this shows to be broken."""
        self._history.see(seen)
        kind = type(seen)
        interested = self._by_kind.get(kind)
        if interested is None:
            interested = self._by_kind[kind] = tuple(each for each in self._promises if kind in each.kinds)
        return [Violation(promise.name, seen.at_ms, detail) for promise in interested for detail in promise.see(seen)]

    def finish(self) -> list[Violation]:
        """What the end of the record shows to be broken. Call it once."""
        at_ms = self._history.now_ms
        return [Violation(promise.name, at_ms, detail) for promise in self._promises for detail in promise.finish()]

    def counts(self) -> dict[str, int]:
        """What was counted on the way, for the report. Complete after `finish`."""
        counted: dict[str, int] = {}
        for promise in self._promises:
            match promise:
                case NoTokenTwice():
                    counted["lost_with_edge"] = promise.lost_with_edge
                case Returns():
                    counted["returns"] = promise.counted
                    counted["latest_return_ms"] = promise.latest_ms
                case Staleness():
                    counted["staleness_most"] = promise.most
                case Explained():
                    counted["decisions"] = promise.counted
                case _:
                    pass
        return counted
