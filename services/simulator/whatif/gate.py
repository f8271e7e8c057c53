"""How good the decision to borrow is, over windows of random length (issue 6, paper 4.6). Pure but for the built-in files.

A window: a batch runs on dedicated workers until so many of its trajectories are left; then training's workers could be borrowed,
which serve after their activation and cost their return at the end. Hindsight runs both ways, over the same batches. The
planner's gate and eq. 7 decide from what they know then: trajectories of earlier batches, constants that are each wrong by 10 %,
learned costs that are wrong by as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import msgspec

from messages.monitor import Observed
from services.decision_engine import makespan, predict
from services.decision_engine.predict_evidence import Evidence, Limits
from services.decision_engine.stakes import BORROW_MARGIN
from services.simulator.whatif import selection
from services.simulator.whatif.judge import Change, Judge, Measured, Workers
from services.simulator.whatif.selection import Setting, counts_of

DIFFER: Final = 0.02
"""Of the batch's time: a window whose options differ by less is a tie."""
DRAWS: Final = 8
"""Batches over which hindsight runs both ways: over three, which of two options that differ by little is better is luck."""
OBSERVED: Final = 2
COST_ERROR: Final = 0.10


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What might be borrowed when."""

    setting: Setting
    dedicated: Workers
    borrowed: Workers
    remaining: int
    activate_s: float
    return_s: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the batch without and with borrowing (its return included), and who would have borrowed."""

    alone_s: float
    borrowed_s: float
    borrows: dict[str, bool]

    @property
    def best_borrows(self) -> bool:
        return self.borrowed_s < self.alone_s

    @property
    def differ(self) -> float:
        """Share of the batch's time."""
        return abs(self.borrowed_s - self.alone_s) / self.alone_s

    def loss(self, name: str) -> float:
        """Against not borrowing, as a share; 0 where it gained."""
        return max(0.0, self.borrowed_s / self.alone_s - 1) if self.borrows[name] else 0.0


def random_window(seed: int) -> Window:
    """The same seed gives the same one."""
    random = Random(f"window/{seed}")
    dedicated = random.randint(2, 6)
    setting = selection.random_setting(seed, dedicated, dedicated)
    batch = max(setting.batch, min(64, dedicated * random.randint(4, 16)))
    setting = msgspec.structs.replace(setting, batch=batch)
    more = random.randint(2, 10)
    if dedicated >= 3 and random.random() < 0.4:
        prefill = max(1, round(dedicated * random.uniform(0.2, 0.5)))
        extra = min(more, round(more * prefill / dedicated))
        alone, borrowed = Workers(prefill, dedicated - prefill, 0), Workers(extra, more - extra, 0)
    else:
        alone, borrowed = Workers(0, 0, dedicated), Workers(0, 0, more)
    return Window(
        setting=setting,
        dedicated=alone,
        borrowed=borrowed,
        remaining=random.randint(1, setting.batch),
        activate_s=random.uniform(0.5, 10),
        return_s=random.uniform(0.3, 5),
    )


def _measured(window: Window, seed: int, borrow: bool) -> Measured:
    setting = window.setting
    judge = Judge(setting.site, window.dedicated, noise=setting.noise, seed=seed, most_in_flight=setting.batch)
    change = Change(window.remaining, window.activate_s, window.borrowed) if borrow else None
    return judge.measure(selection.draw(setting, seed), change)


def judge_window(window: Window, seed: int) -> Verdict:
    """Both ways in hindsight, and what each gate decides beforehand."""
    random = Random(f"gate/{seed}")
    setting = window.setting
    errors = [math.exp(random.gauss(0, selection.CONSTANT_ERROR)) for _ in range(4)]
    activate_s, return_s = (
        cost_s * math.exp(random.gauss(0, COST_ERROR)) for cost_s in (window.activate_s, window.return_s)
    )
    limits = Limits(chunk_tokens=setting.site.chunk_tokens, max_running=setting.site.max_running).shared(lending=True)
    alone = counts_of(window.dedicated)
    batches: list[tuple[selection.Trajectory, ...]] = []
    observed: list[Observed] = []
    last = Measured(0.0, ())
    for step in range(OBSERVED):
        number = 1000 * seed + step
        last = _measured(window, number, False)
        batches.append(selection.draw(setting, number))
        profile = _profile(window, batches, last, errors)
        own = Evidence(
            sample=selection.sample_of(batches[-1:], setting.batch, 1 << 30), limits=limits, measured_on=alone
        )
        observed.append(Observed(*alone, predict.predicted_s(profile, alone, own), last.makespan_s, step))
    profile = _profile(window, batches, last, errors)
    evidence = Evidence(sample=profile.sample, observed=tuple(observed), limits=limits, measured_on=alone)
    extra = counts_of(window.borrowed)
    together = (alone[0] + extra[0], alone[1] + extra[1], alone[2] + extra[2])
    saved_s = predict.saved_s(profile, alone, together, window.remaining, activate_s, evidence)
    chance_s = BORROW_MARGIN * predict.predicted_s(profile, alone, evidence)
    alone_s, together_s = (
        makespan.colocated_makespan_s(profile, counts[2])
        if counts[2]
        else makespan.disaggregated_makespan_s(profile, counts[0], counts[1])
        for counts in (alone, together)
    )
    by_eq7 = makespan.borrowing_pays(window.remaining, setting.batch, alone_s, together_s, activate_s + return_s)
    without_s, with_s = 0.0, 0.0
    for index in range(DRAWS):
        without_s += _measured(window, 1000 * seed + 500 + index, False).makespan_s / DRAWS
        with_s += (_measured(window, 1000 * seed + 500 + index, True).makespan_s + window.return_s) / DRAWS
    return Verdict(
        alone_s=without_s,
        borrowed_s=with_s,
        borrows={"planner": saved_s > return_s + chance_s, "eq. 7": by_eq7, "always": True, "never": False},
    )


def _profile(
    window: Window, batches: Sequence[tuple[selection.Trajectory, ...]], last: Measured, errors: Sequence[float]
) -> selection.WorkloadProfile:
    colocated = last if window.dedicated.colocated else None
    return selection.profile_of(window.setting, batches, (window.dedicated, last), errors, colocated)


def report(verdicts: Sequence[Verdict]) -> dict[str, Any]:  # Any: a JSON object
    """By gate: agreement with hindsight where the options differ, and losses against not borrowing."""
    apart = [verdict for verdict in verdicts if verdict.differ > DIFFER]
    gates: dict[str, dict[str, float]] = {}
    for name in verdicts[0].borrows if verdicts else ():
        losses = sorted(verdict.loss(name) * 100 for verdict in verdicts)
        agree = [verdict.borrows[name] is verdict.best_borrows for verdict in apart]
        times = [verdict.borrowed_s if verdict.borrows[name] else verdict.alone_s for verdict in verdicts]
        best = [min(verdict.borrowed_s, verdict.alone_s) for verdict in verdicts]
        gates[name] = {
            "agree": sum(agree) / max(1, len(agree)),
            "loss_p99_percent": losses[min(len(losses) - 1, int(0.99 * len(losses)))],
            "loss_max_percent": losses[-1],
            "regret_mean_percent": 100 * sum(t / b - 1 for t, b in zip(times, best, strict=True)) / len(best),
        }
    return {
        "windows": len(verdicts),
        "windows_that_differ": len(apart),
        "best_borrows": sum(verdict.best_borrows for verdict in verdicts) / max(1, len(verdicts)),
        "gates": gates,
    }


def run(seeds: Sequence[int], progress: Callable[[Verdict], None] | None = None) -> list[Verdict]:
    """One window a seed."""
    verdicts: list[Verdict] = []
    for seed in seeds:
        verdicts.append(judge_window(random_window(seed), seed))
        if progress is not None:
            progress(verdicts[-1])
    return verdicts
