"""What could be reached: the configuration that simulation itself found best for each number of workers, at no cost.

An oracle is a policy like the others, on the same cores, with three differences: every hand-over, start and switch takes no
time; it always borrows; and on N workers it runs the configuration that was the fastest of all when each was simulated on a
constant N workers. The batch-synchronous and the overlapped (early start) oracle are measured apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from messages.decision_engine import BudgetChanged
from messages.envelope import Message
from messages.ids import DecisionId, Mode
from messages.orchestrator import TargetConfiguration
from services.decision_engine.config import Config as DecisionConfig
from services.environments.workload import Workload
from services.preemption_feed.traces import Step as TraceStep
from services.preemption_feed.traces import Trace
from services.runtime.core import Effects, Input, Send
from services.simulator.whatif.jobs import cold_start
from services.simulator.whatif.policies.base import Policy
from services.simulator.whatif.settings import Settings
from services.simulator.whatif.simulation import Simulation
from services.simulator.whatif.trajectories import Episodes
from services.timing.hardware import Hardware, Value

Configuration = tuple[int, int]
"""Prefill and decode workers; (0, 0) is colocation."""
Table = dict[int, Configuration]
COLOCATED: Final[Configuration] = (0, 0)
MEASURED_STEPS: Final = 8
"""Train steps of a constant configuration: enough that configurations a per cent apart are told apart, mostly."""
FREE: Final = Value(0.0, "the oracle's")


class OraclePolicy(Policy, frozen=True, kw_only=True):
    """Switches for nothing to what was measured to be best."""

    best: Table

    def hardware(self, hardware: Hardware) -> Hardware:
        """Without the costs of any change."""
        return msgspec.structs.replace(
            hardware,
            prepare_s=FREE,
            finalize_s=FREE,
            activate_s=FREE,
            deactivate_s=FREE,
            set_role_s=FREE,
            load_bytes_per_s=Value(1e18, FREE.source),
        )

    def engine(self, config: DecisionConfig) -> TableDecisions:
        return TableDecisions(self.best, lending=self.lending)


class TableState(msgspec.Struct, frozen=True):
    """Of `TableDecisions`."""

    decisions: int = 0
    budget: BudgetChanged | None = None


class TableDecisions:
    """In the decision engine's place: every budget is answered from a table, borrowing whenever training is idle."""

    name = "decision_engine"
    inputs: tuple[type[Message], ...] = (BudgetChanged,)
    state_type = TableState

    def __init__(self, best: Table, *, lending: bool) -> None:
        self._best = best
        self._lending = lending

    def initial(self) -> TableState:
        return TableState()

    def step(self, state: TableState, event: Input) -> tuple[TableState, Effects]:
        budget = event.message
        if not isinstance(budget, BudgetChanged):
            return state, ()
        lent = budget.overlap if self._lending else ()
        usable = (*budget.dedicated, *lent)
        count = len(usable)
        prefill, decode = self._best.get(count, COLOCATED)
        pd = prefill > 0 and prefill + decode == count
        mode = Mode.DISAGGREGATED if pd else Mode.COLOCATED if count else Mode.PAUSED
        state = TableState(state.decisions + 1, budget)
        target = TargetConfiguration(
            decision_id=DecisionId(f"d{state.decisions}"),
            budget_id=budget.budget_id,
            mode=mode,
            prefill=prefill if pd else 0,
            decode=decode if pd else 0,
            colocated=0 if pd else count,
            borrow=bool(lent),
            usable=usable,
            leaving=budget.leaving,
            training_batch=budget.training_batch,
        )
        return state, (Send(target),)


def oracle_policy(best: Table, *, early_start: bool) -> OraclePolicy:
    """The policy of a table."""
    kind = "overlapped" if early_start else "batch-synchronous"
    return OraclePolicy(
        name=f"oracle-{kind}",
        models=f"the reachable, {kind}: the configuration measured best for each number of workers, free switches",
        leaves_out="every cost of a change",
        elastic=True,
        lending=True,
        early_start=early_start,
        best=best,
    )


def worker_counts(trace: Trace, settings: Settings, gpus: int, seconds: float) -> tuple[int, ...]:
    """Rollout workers that a run on this trace can have, without and with those on training GPUs."""
    reserved, training = settings.reserved_gpus // gpus, settings.training_gpus // gpus
    seen = {0, trace.at(0.0), *(step.gpus for step in trace.steps if step.time_s < seconds)}
    dedicated = {reserved + min(settings.most_preemptible_gpus, count) // gpus for count in seen}
    return tuple(sorted(dedicated | {count + training for count in dedicated}))


class Measure:
    """Trajectories a second of constant configurations, simulated once each."""

    def __init__(self, workload: Workload, hardware: Hardware, settings: Settings, seed: int) -> None:
        # Training is instant, so that nothing but rollout is measured; the same trajectories for each configuration.
        self._settings = msgspec.structs.replace(
            settings, train_s=1e-3, most_preemptible_gpus=0, placement="affinity", spans=False, early_start=None
        )
        self._hardware = hardware
        self._seed = seed
        self._episodes = Episodes(workload, settings.max_context_tokens, settings.prefix_reuse)
        self._profile = cold_start(self._settings, self._episodes, hardware)
        self._known: dict[tuple[int, Configuration, bool], float] = {}

    def rate(self, workers: int, configuration: Configuration, *, early_start: bool) -> float:
        """Trajectories a second from the first task to the end of step `MEASURED_STEPS`."""
        key = (workers, configuration, early_start)
        if key not in self._known:
            self._known[key] = self._simulate(workers, configuration, early_start)
        return self._known[key]

    def _simulate(self, workers: int, configuration: Configuration, early_start: bool) -> float:
        settings = msgspec.structs.replace(self._settings, reserved_gpus=workers * self._hardware.gpus)
        policy = oracle_policy({workers: configuration}, early_start=early_start)
        policy = msgspec.structs.replace(policy, elastic=False, lending=False)
        simulation = Simulation(
            Trace("constant", (TraceStep(0.0, 0),)),
            self._episodes,
            self._profile,
            self._hardware,
            policy,
            settings,
            seconds=1e6,
            seed=self._seed,
            train_steps=MEASURED_STEPS,
        )
        steps = simulation.seen.steps
        simulation.finish(lambda: len(steps) >= MEASURED_STEPS)
        return MEASURED_STEPS * settings.batch_trajectories / simulation.now_s if simulation.now_s else 0.0

    def best(self, workers: int, *, early_start: bool) -> Configuration:
        """The fastest configuration: colocation, or the best ratio, found by walking from the last known good share."""
        colocated = self.rate(workers, COLOCATED, early_start=early_start)
        if workers < 2:
            return COLOCATED

        def rate(prefill: int) -> float:
            return self.rate(workers, (prefill, workers - prefill), early_start=early_start)

        at = min(max(1, round(workers * self._share(early_start))), workers - 1)
        improved = True
        while improved:
            improved = False
            for other in (at - 1, at + 1):
                if 1 <= other < workers and rate(other) > rate(at):
                    at, improved = other, True
                    break
        return (at, workers - at) if rate(at) > colocated else COLOCATED

    def _share(self, early_start: bool) -> float:
        """The prefill share of the best ratio so far."""
        found = [
            (rate, configuration[0] / workers)
            for (workers, configuration, early), rate in self._known.items()
            if early is early_start and configuration != COLOCATED
        ]
        return max(found)[1] if found else 0.4


def tables(
    measure: Measure, counts: tuple[int, ...], *, early_start: bool, progress: Callable[[str], None] = lambda _: None
) -> Table:
    """The best configuration for each number of workers."""
    best: Table = {}
    for count in counts:
        best[count] = measure.best(count, early_start=early_start)
        progress(f"oracle: best of {count} workers is {describe(best[count])}")
    return best


def describe(configuration: Configuration) -> str:
    """For people."""
    return "colocated" if configuration == COLOCATED else f"{configuration[0]}P{configuration[1]}D"
