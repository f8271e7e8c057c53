"""Promises about decisions (DESIGN 5, 11.9): each follows from its record alone, and is what was asked of the orchestrator.

Where the closed forms decided, they are written anew here from the paper's section 4.2 and 4.3 and eq. 7, in the names of
`workload.profile/1`, and everything must come out again. Where the planner predicted from a sample of trajectories (docs/decisions.md), its
figures must fit together; that they come out again from the record, `run` tests with the engine's own code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from messages.ids import Mode
from messages.monitor import Candidate, DecisionRecord, Incumbent
from messages.orchestrator import TargetConfiguration
from services.simulator.faults.history import History, Promise
from services.simulator.faults.record import Seen, Stored

CLOSE = 1e-9
"""Relative difference that the order of additions may make."""


class Explained(Promise):
    """The record of a decision holds all that it followed from: every prediction, the gate and the choice come out again."""

    name = "11.9 decisions follow from their records"
    kinds = (Stored,)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._records: set[str] = set()
        self.counted = 0

    def see(self, seen: Seen) -> Iterator[str]:
        match seen:
            case Stored(message=TargetConfiguration() as target):
                yield from self._within_budget(target)
            case Stored(message=DecisionRecord() as record):
                if record.decision_id in self._records:
                    return
                self._records.add(record.decision_id)
                self.counted += 1
                for wrong in (*explain(record), *self._asked(record)):
                    yield f"decision {record.decision_id}: {wrong}"
            case _:
                pass

    def finish(self) -> Iterator[str]:
        for decision in sorted(self.history.targets.keys() - self._records):
            yield f"decision {decision}: it has no record"

    def _asked(self, record: DecisionRecord) -> Iterator[str]:
        target = self.history.targets.get(record.decision_id)
        if target is None:
            return
        asked = (target.prefill, target.decode, target.colocated, target.borrow, target.mode)
        if asked != (*counts(record.chosen), record.borrow, record.mode):
            yield f"{asked} was asked of the orchestrator, the record chose {counts(record.chosen)}"
        if record.workers != len(target.usable):
            yield f"made for {record.workers} workers, {len(target.usable)} are usable"

    def _within_budget(self, target: TargetConfiguration) -> Iterator[str]:
        budget = self.history.budgets.get(target.budget_id)
        where = f"decision {target.decision_id}"
        if budget is None:
            yield f"{where}: for budget {target.budget_id}, which was never given"
            return
        allowed = {*budget.dedicated, *(budget.overlap if target.borrow else ())}
        if set(target.usable) != allowed:
            yield f"{where}: uses {sorted(target.usable)}, the budget allows {sorted(allowed)}"
        if (target.leaving, target.training_batch) != (budget.leaving, budget.training_batch):
            yield f"{where}: what must be returned is not what the budget says"
        if target.borrow and budget.training_batch is not None:
            yield f"{where}: borrows while training wants its GPUs"


def explain(record: DecisionRecord) -> Iterator[str]:
    """Everything in a record that does not follow from the rest of it."""
    if record.policy == "planner" and record.limits:
        yield from _fits_together(record)
        return
    yield from _predictions(record)
    yield from _gate(record)
    if record.policy in ("paper", "planner"):
        yield from _choice(record)


def counts(option: Candidate) -> tuple[int, int, int]:
    """(prefill, decode, colocated)."""
    return option.prefill, option.decode, option.colocated


def predicted_s(p: Mapping[str, float], option: Candidate) -> float:
    """Makespan of a configuration by eq. 1, or by eq. 2 and 3."""
    if option.colocated:
        n = option.colocated
        turn = p["B"] * p["dL"] * p["t_prefill_s"] / n + p["r"] * (p["A_s"] + p["b_s"] * p["B"] / n) + p["T_over_s"]
        return p["S"] * turn + p["T_env_s"]
    thinking = 1 + p["theta"]
    decode = p["S"] * p["r"] * thinking * (p["A_s"] + p["b_s"] * p["B"] / (option.decode * thinking))
    prefill = p["S"] * p["B"] * p["dL"] * p["t_prefill_s"] / option.prefill
    transfer = p["S"] * p["B"] * p["dL"] * p["kv_bytes_per_token"] / p["bandwidth_bytes_per_s"]
    return max(decode, prefill + transfer) + p["T_env_s"]


def fits(record: DecisionRecord, option: Candidate) -> bool:
    """Whether a configuration is feasible: KV cache of the batch, and prefill that keeps up (paper 4.2)."""
    if option.colocated:
        return True
    p = record.profile
    if record.impossible or p["B"] * p["kv_bytes_per_trajectory"] > option.decode * p["kv_capacity_bytes_per_worker"]:
        return False
    makespan = predicted_s(p, option)
    work = p["B"] * p["S"] * p["dL"] * p["t_prefill_s"]
    return makespan <= 0 or work / (option.prefill * makespan) <= record.thresholds["rho_max"]


def _fits_together(record: DecisionRecord) -> Iterator[str]:
    """What holds of a planner's record whatever it predicts with."""
    n = record.workers
    options = {counts(option): option for option in record.candidates}
    if options.keys() != splits(n):
        yield f"the candidates are not colocation and every split of {n} workers"
    for option in record.candidates:
        if option.feasible and not (option.makespan_s is not None and 0 < option.makespan_s < math.inf):
            yield f"{counts(option)} is called feasible and predicted {option.makespan_s} s"
        if not option.feasible and not option.reason:
            yield f"{counts(option)} is not feasible, and no reason is given"
    if record.impossible and any(option.feasible for option in record.candidates if not option.colocated):
        yield "disaggregates although that is impossible"
    chosen = record.chosen
    if sum(counts(chosen)) == n and n and (counts(chosen) not in options or not options[counts(chosen)].feasible):
        yield f"{counts(chosen)} is chosen and no feasible candidate"
    if sum(counts(chosen)) > n or (n == 0) is not (record.mode is Mode.PAUSED):
        yield f"{counts(chosen)} in mode {record.mode} is chosen for {n} workers"
    if record.probe and not (record.may_probe or record.holding is not None):
        yield "a trial although none may begin and none runs"
    workers = record.dedicated_workers + (record.overlap_workers if record.borrow else 0)
    if record.workers != workers:
        yield f"made for {record.workers} workers, there are {workers}"
    if record.borrow and not (record.lending and record.overlap_workers):
        yield "borrows where nothing can be lent"
    dedicated, full = record.dedicated, record.full
    if record.borrow and dedicated is not None and full is not None:
        without, with_all = dedicated.makespan_s, full.makespan_s
        if without is not None and with_all is not None and with_all > without:
            yield f"borrows although it is predicted {with_all} s with what is lent and {without} s without"


def splits(n: int) -> set[tuple[int, int, int]]:
    """Colocation and every ratio of n workers."""
    return {(0, 0, n), *((prefill, n - prefill, 0) for prefill in range(1, n))} if n else set()


def _predictions(record: DecisionRecord) -> Iterator[str]:
    n = record.workers
    if {counts(option) for option in record.candidates} != splits(n):
        yield f"the candidates are not colocation and every split of {n} workers"
    for option in record.candidates:
        if option.feasible is not fits(record, option):
            yield f"{counts(option)} is {'' if option.feasible else 'not '}called feasible"
    named = (*record.candidates, record.chosen, record.incumbent, record.dedicated, record.full)
    for option in named:
        if option is None or option.makespan_s is None or sum(counts(option)) == 0:
            continue
        again = predicted_s(record.profile, option)
        if not math.isclose(again, option.makespan_s, rel_tol=CLOSE, abs_tol=1e-12):
            yield f"{counts(option)} is predicted {option.makespan_s} s, its profile gives {again} s"


def _gate(record: DecisionRecord) -> Iterator[str]:
    """Eq. 7; and the number of workers that follows from it."""
    workers = record.dedicated_workers + (record.overlap_workers if record.borrow else 0)
    if record.workers != workers:
        yield f"made for {record.workers} workers, there are {workers}"
    if not record.lending or record.overlap_workers == 0:
        if record.borrow:
            yield "borrows where nothing can be lent"
        return
    dedicated, full = record.dedicated, record.full
    if dedicated is None or dedicated.makespan_s is None:
        if not record.borrow:
            yield "does not borrow although no dedicated worker is left"
        return
    if full is None or full.makespan_s is None:
        yield "says nothing of the full budget"
        return
    share = min(float(record.remaining), record.profile["B"]) / record.profile["B"]
    saved_s = share * (dedicated.makespan_s - full.makespan_s)
    held = record.running is not None and record.running.borrow
    cost_s = record.return_s if held else record.toggle_s
    if record.borrow is not (saved_s > cost_s) and not math.isclose(saved_s, cost_s, rel_tol=CLOSE):
        yield f"{'borrows' if record.borrow else 'does not borrow'}: it saves {saved_s} s and costs {cost_s} s"


def _choice(record: DecisionRecord) -> Iterator[str]:
    """Hysteresis: who may replace whom by how much, and when neither threshold applies."""
    feasible = [option for option in record.candidates if fits(record, option)]
    chosen, running = record.chosen, record.running
    if not feasible:
        if sum(counts(chosen)):
            yield f"{counts(chosen)} is chosen of no candidate"
        return
    best = min(feasible, key=lambda option: predicted_s(record.profile, option))
    if running is None or running.prefill + running.decode + running.colocated == 0:
        if _gain(record, best, chosen) > CLOSE:
            yield f"{counts(chosen)} is chosen although {counts(best)} is faster and nothing runs"
        return
    total, held = sum(counts(chosen)), running.prefill + running.decode + running.colocated
    if total < record.workers:
        small = [option for option in feasible if _mode(option) is running.mode]
        small = [option for option in small if _keeps_roles(option, running, record)]
        won = max((_gain(record, option, chosen) for option in small), default=0.0)
        threshold = record.thresholds["growth"]
        if total != held or threshold <= 0 or won >= threshold + CLOSE:
            yield f"{counts(chosen)} leaves {record.workers - total} workers without need"
        return
    yield from _hysteresis(record, running, feasible, best)


def _hysteresis(
    record: DecisionRecord, running: Incumbent, feasible: list[Candidate], best: Candidate
) -> Iterator[str]:
    chosen, mode = record.chosen, running.mode
    same_mode = [option for option in feasible if _mode(option) is mode]
    kept = [option for option in same_mode if _keeps_roles(option, running, record)]

    def fastest(options: list[Candidate]) -> Candidate:
        return min(options, key=lambda option: predicted_s(record.profile, option))

    if not same_mode:
        if not record.forced or _gain(record, best, chosen) > CLOSE:
            yield f"{mode} is infeasible: {counts(best)} is forced, {counts(chosen)} is chosen"
        return
    champion = fastest(same_mode)
    switch = _gain(record, best, champion)
    if _mode(chosen) is not mode:
        if switch <= record.thresholds["mode"]:
            yield f"switches to {_mode(chosen)} for a gain of {switch:.4f} over the best {mode}"
        return
    if _mode(best) is not mode and switch > record.thresholds["mode"] + CLOSE:
        yield f"stays {mode} although {counts(best)} gains {switch:.4f}"
    if not kept:
        if not record.forced or _gain(record, champion, chosen) > CLOSE:
            yield f"no placement keeps the roles: {counts(champion)} is forced, {counts(chosen)} is chosen"
        return
    if record.forced:
        yield "is called forced although the roles that run make a feasible configuration"
    incumbent = fastest(kept)
    gain = _gain(record, champion, incumbent)
    changes = not any(counts(option) == counts(chosen) for option in kept)
    if changes and gain <= record.thresholds["ratio"]:
        yield f"changes roles to {counts(chosen)} for a gain of {gain:.4f}"
    if not changes and gain > record.thresholds["ratio"] + CLOSE and _gain(record, champion, chosen) > CLOSE:
        yield f"keeps {counts(chosen)} although {counts(champion)} gains {gain:.4f}"
    if _gain(record, incumbent, chosen) > CLOSE:
        yield f"{counts(chosen)} is slower than {counts(incumbent)}, which changes no role"


def _keeps_roles(option: Candidate, running: Incumbent, record: DecisionRecord) -> bool:
    """Whether a configuration of the running mode leaves every worker that stays in its role."""
    if running.mode is Mode.COLOCATED:
        return True
    survivors = running.survivors_full if record.borrow else running.survivors
    prefill, decode = running.prefill, running.decode
    if survivors is not None and sum(survivors) <= record.workers:
        return option.prefill >= survivors[0] and option.decode >= survivors[1]
    if record.workers >= prefill + decode:
        return option.prefill >= prefill and option.decode >= decode
    return option.prefill <= prefill and option.decode <= decode


def _gain(record: DecisionRecord, option: Candidate, over: Candidate) -> float:
    """The share of `over`'s makespan that `option` saves."""
    slow = predicted_s(record.profile, over)
    return 1 - predicted_s(record.profile, option) / slow if slow > 0 else 0.0


def _mode(option: Candidate) -> Mode:
    return Mode.COLOCATED if option.colocated else Mode.DISAGGREGATED
