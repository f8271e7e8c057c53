"""Deliberate breaks of rules that matter, to see that the fault simulation finds each. See `test_mutations.py`.

    python -m tests.sim.mutations NAME [FIRST STEP MOST]     # the first seed that finds it, and what was violated

A mutation rewrites the source of one function and puts the new code in its place, wherever the function is known by name.
Where the text it rewrites is gone, it fails: then the rule has moved, and so must the mutation.
"""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import messages
from pearl_state import plan, progress, store, watch
from services.agent.episode import Episode
from services.agent.service import Agent
from services.cluster_rebuilder.core import ClusterRebuilderCore
from services.decision_engine import choose, makespan
from services.edge.request_state import RequestState
from services.orchestrator import core_facts, core_lending, core_plans
from services.pipeline_scheduler.core import PipelineSchedulerCore
from services.rollout_worker.core import RolloutWorkerCore
from services.router.core import RouterCore
from services.runtime.host import CoreHost
from services.simulator.faults.plan import FAULTS_MS, Plan, draw
from services.simulator.faults.record import Violation
from services.simulator.faults.run import Run
from services.toggle_manager import core_orders as toggle_orders
from services.toggle_manager.core import ToggleManagerCore

assert messages


@functools.cache
def _source(function: Any) -> str:
    """As it is in its file, whatever another mutation made of it."""
    return textwrap.dedent(inspect.getsource(function))


def rewrite(function: Any, *changes: tuple[str, str]) -> Callable[[], None]:
    """A mutation: the function's source with each old text, which must be in it once, replaced."""

    def apply() -> None:
        source = _source(function)
        for old, new in changes:
            assert source.count(old) == 1, f"{function.__qualname__} has {source.count(old)} times {old!r}"
            source = source.replace(old, new)
        made: dict[str, Any] = {}
        exec(compile(f"from __future__ import annotations\n{source}", function.__code__.co_filename, "exec"),
             function.__globals__, made)  # fmt: skip
        function.__code__ = made[function.__name__].__code__

    return apply


def both(*mutations: Callable[[], None]) -> Callable[[], None]:
    """A rule that is guarded twice is broken twice."""

    def apply() -> None:
        for mutation in mutations:
            mutation()

    return apply


MUTATIONS: dict[str, Callable[[], None]] = {
    # 11.1
    "epoch check off": rewrite(watch.Replica.hear, ("table.epoch > self.table.epoch", "True")),
    "table written without a guard": rewrite(
        store._guarded_put, ("last_revision=last_revision", "last_revision=None")
    ),
    "acknowledge before write": rewrite(  # what was acknowledged is not in the state that a restart finds
        CoreHost._restore,
        ("self._state = msgspec.msgpack.decode(saved.state, type=self._core.state_type)", "saved.state"),
    ),
    # 11.2
    "training told before its GPUs are free": rewrite(
        core_lending._settled,
        ("pair = toggle(pair, Residency.DRAINING)", "pair = toggle(pair, Residency.FREE)"),
    ),
    "worker activated before the trainer let go": both(
        rewrite(core_lending._settled,
                ("pair = msgspec.structs.replace(toggle(pair, Residency.RELEASING), deadline_ms=0)",
                 "pair = toggle(toggle(pair, Residency.RELEASING), Residency.FREE)")),
        rewrite(toggle_orders._join, ("if view.state.trainer_resident:", "if False:")),
        rewrite(ToggleManagerCore._is_prepared, ("not view.state.trainer_resident", "True")),
    ),
    # 11.3
    "admit before weights": both(
        rewrite(core_plans.may_admit, ("rows[assign.worker].version >= table.policy_version", "True")),
        rewrite(ClusterRebuilderCore._is_done, ("known.version < snapshot.version", "known.version < 0")),
        rewrite(ToggleManagerCore._is_prepared, ("and known.version >= snapshot.version", "")),
    ),
    "admit before the executors are done": rewrite(
        core_plans.may_admit, ('plan.rebuilder in ("applied", "none")', "True")
    ),
    "drained worker takes requests": rewrite(
        RolloutWorkerCore.refusal, ("not state.serving", "False"),
        ("request.role_generation != state.role_generation", "request.role_generation > state.role_generation")
    ),
    "router ignores the pause": rewrite(RouterCore.assign, ("if self._paused_by and", "if False and")),
    "mode switch in one wave": rewrite(plan.first_wave, ("for anchor in _anchors(", "for anchor in () and _anchors(")),
    "incarnation check off": rewrite(
        core_facts.current, ("if row.incarnation != fact.incarnation:", "if False:")
    ),
    # 11.4
    "prefix dropped": rewrite(RequestState._on_assignment, ("prefix=self.tokens.copy()", "prefix=[]")),
    "journal after reply": rewrite(
        Episode._turn,
        ("self._totals.add(record, await self._write(record), result.reward)",
         "later = asyncio.create_task(self._write(record)); self._later = later\n"
         "    self._totals.add(record, self._journal_seq + 1, result.reward)"),
    ),
    "task acknowledged before its end": rewrite(
        Agent._run, ("        await episode.run()", "        await consumer.ack(held.delivery); await episode.run()")
    ),
    # 11.5
    "staleness off by one": rewrite(
        PipelineSchedulerCore._admissible,
        ("state.serving < batch.batch - self.config.staleness", "state.serving < batch.batch - self.config.staleness - 1"),
    ),
    "least version off by one": rewrite(
        PipelineSchedulerCore.min_version, ("batch - self.config.staleness", "batch - self.config.staleness - 1")
    ),
    # 11.6
    "minimality off by one": rewrite(
        plan.minimal_change, ("keep = min(len(holders), deficits[role])", "keep = max(0, min(len(holders), deficits[role]) - 1)")
    ),
    "too many leave": rewrite(
        plan.choose_members, ("    members = [row.worker for row in serving]", "    members = [row.worker for row in serving[1:]]")
    ),
    "drop drain": rewrite(
        progress.is_drained, ("return known is not None", "return True or known is not None")
    ),
    # 11.7
    "a return is not carried out": rewrite(
        toggle_orders._give_back, ("generation = row.role_generation", "return None")
    ),
    # 11.8
    "a group is admitted one by one": rewrite(
        core_plans.admit, ("for assign in plan.add]\n    changed +=", "for assign in plan.add[:1]]\n    changed +=")
    ),
    # 11.9
    "gate sign": rewrite(makespan.borrowing_pays, ("> toggle_s", "< toggle_s")),
    "hysteresis off": rewrite(choose._wins, ("> threshold", "> 0")),
}  # fmt: skip
"""By name; in the order of DESIGN 11."""


def faults(*kinds: str, on: str = "") -> Callable[[Plan], float]:
    """How many faults of these kinds a plan has, on targets whose name begins so."""
    return lambda plan: sum(fault.kind in kinds and fault.target.startswith(on) for fault in plan.faults)


LIKELY: dict[str, Callable[[Plan], float]] = {
    "acknowledge before write": faults("crash", "crash_at_call"),
    "admit before weights": faults("slow", "slow_network", "cut", "freeze"),
    "drained worker takes requests": faults("deafen", "cut", on="router"),
    "incarnation check off": faults("stale", "redeliver"),
    "task acknowledged before its end": faults("crash", "crash_at_call", "freeze", on="agent"),
    "hysteresis off": lambda plan: plan.shape.steps + faults("reclaim", "available")(plan) / 8,
    "drop drain": faults("reclaim", "stuck", "slow"),
}
"""Which of the 200 plans are likely to meet a rule that matters seldom: they are tried first, to save time."""
STEP_EVENTS = 100
"""A run is looked at each time so many things were seen: a broken rule is often broken without end."""


def found_by(seed: int) -> list[Violation]:
    """What the seed's run breaks; it is not run further than that."""
    run = Run(draw(seed))
    try:
        over_ms = run.cluster.now_ms + 2 * FAULTS_MS
        while not run.violations and run.cluster.now_ms < over_ms:
            run.to_event(run.cluster.count + STEP_EVENTS)
        return run.violations or list(run.to_end().violations)
    finally:
        run.close()


def main(name: str, first: int = 0, step: int = 1, most: int = 200) -> int:
    """Print the first of the seeds first, first + step .. below `most` that finds the mutation; the exit status is 1 if none.

    They are tried in the order of `LIKELY`.
    """
    MUTATIONS[name]()
    likely = LIKELY.get(name, lambda plan: 0)
    for seed in sorted(range(first, most, step), key=lambda seed: (-likely(draw(seed)), seed)):
        violations = found_by(seed)
        if violations:
            print(f"{seed} {violations[0].invariant}: {violations[0].detail}"[:300])
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
