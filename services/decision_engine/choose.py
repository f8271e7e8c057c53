"""Which configuration to run on N workers, given what runs now: hysteresis, growth and forced switches (paper 4.3.2). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.ids import Mode
from messages.monitor import Candidate
from services.decision_engine import makespan, predict
from services.decision_engine.correct import Counts
from services.decision_engine.predict_evidence import Evidence
from services.decision_engine.stakes import Stakes

NO_WORKER = Candidate(0, 0, 0, None, False, "no worker may be used")


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds are shares of the predicted makespan; see `decision` in the job file for their meaning."""

    ratio_threshold: float = 0.03
    mode_threshold: float = 0.08
    growth_threshold: float = 0.0
    rho_max: float = 0.95
    impossible: str = ""  # why no disaggregated configuration can run; "": they can
    fixed: tuple[int, int] | None = None  # choose nothing: this ratio P:D, or colocation for (0, 0)

    def thresholds(self) -> dict[str, float]:
        """As a decision record keeps them."""
        return {
            "ratio": self.ratio_threshold,
            "mode": self.mode_threshold,
            "growth": self.growth_threshold,
            "rho_max": self.rho_max,
        }


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """What runs now: the last decision's mode and counts, and, where the role table is known, who of it survives.

    `survivors` counts (prefill, decode) workers that stay usable with the role they have; None: not known, then any
    of the last decision's workers may be the ones that left.
    """

    mode: Mode
    prefill: int
    decode: int
    colocated: int
    survivors: tuple[int, int] | None = None

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.colocated


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What to run and why: everything a decision record needs."""

    mode: Mode
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    incumbent: Candidate | None
    forced: bool
    reason: str


def mode_of(candidate: Candidate) -> Mode:
    """The execution mode of a configuration."""
    if candidate.prefill + candidate.decode + candidate.colocated == 0:
        return Mode.PAUSED
    return Mode.COLOCATED if candidate.colocated else Mode.DISAGGREGATED


class Forecast(Protocol):
    """What a choice is made by: predictions of configurations."""

    stakes: Stakes | None  # None: shares of the makespan decide (`Policy`)
    alike: bool  # what runs is taken for what it is predicted to be among the options, not by its own replay

    def options(self, workers: int, judged: Sequence[Counts]) -> tuple[Candidate, ...]:
        """Every configuration; `judged` ones as exactly as can be."""
        ...

    def least(self, choices: Sequence[Counts]) -> Candidate | None:
        """The best feasible one of these; None: there is none."""
        ...

    def best(self, options: Sequence[Candidate]) -> Candidate | None:
        """The best of all options; None: none is feasible."""
        ...


class ClosedForms:
    """The paper's: equations 1 to 3, and shares of the makespan as thresholds."""

    def __init__(self, profile: WorkloadProfile, policy: Policy) -> None:
        self.profile = profile
        self.policy = policy
        self.stakes: Stakes | None = None
        self.alike = False

    def options(self, workers: int, judged: Sequence[Counts]) -> tuple[Candidate, ...]:
        return makespan.candidates(self.profile, workers, self.policy.rho_max, self.policy.impossible)

    def least(self, choices: Sequence[Counts]) -> Candidate | None:
        return makespan.best(tuple(self._candidate(counts) for counts in choices))

    def best(self, options: Sequence[Candidate]) -> Candidate | None:
        return makespan.best(tuple(options))

    def _candidate(self, counts: Counts) -> Candidate:
        prefill, decode, colocated = counts
        if colocated:
            return makespan.colocated_candidate(self.profile, colocated)
        return makespan.disaggregated_candidate(
            self.profile, prefill, decode, self.policy.rho_max, self.policy.impossible
        )


class Replays:
    """The planner's: a queueing network, replays and what was measured (`predict.py`); what a change costs decides (`stakes.py`)."""

    def __init__(self, profile: WorkloadProfile, policy: Policy, evidence: Evidence, stakes: Stakes) -> None:
        self.profile = profile
        self.policy = policy
        self.evidence = evidence
        self.stakes: Stakes | None = stakes
        # One replay of a batch is worth more than its neighbours' curve; of flows, luck is much of what differs.
        self.alike = evidence.limits.in_flight_percent > 0

    def options(self, workers: int, judged: Sequence[Counts]) -> tuple[Candidate, ...]:
        return predict.candidates(
            self.profile, workers, self.evidence, impossible=self.policy.impossible, judged=judged
        )

    def least(self, choices: Sequence[Counts]) -> Candidate | None:
        possible = [counts for counts in choices if counts[2] or not self.policy.impossible]
        return predict.least(self.profile, possible, self.evidence)

    def best(self, options: Sequence[Candidate]) -> Candidate | None:
        return predict.best(options)


def choose(
    profile: WorkloadProfile, workers: int, running: Running | None, policy: Policy, forecast: Forecast | None = None
) -> Choice:
    """The configuration for `workers` usable workers (paper 4.3.2, DESIGN 5); `forecast`: by default the closed forms.

    By the closed forms, a ratio change must beat the incumbent by `ratio_threshold`, a mode switch the best of the current mode by
    `mode_threshold`, and growth that wins less than `growth_threshold` leaves the new workers unused. By the planner's forecast, what a
    change wins until the budget is likely to change must exceed what it costs. Where the current mode or the incumbent
    is infeasible the change is forced and none of this applies. Total: never raises for workers >= 0.
    """
    assert workers >= 0
    by = ClosedForms(profile, policy) if forecast is None else forecast
    unchanged = () if running is None or running.workers == 0 or workers == 0 else _unchanged(workers, running)
    incumbent = None if policy.fixed is not None else by.least(unchanged)
    options = by.options(workers, [counts_of(incumbent)] if incumbent is not None else [])
    if incumbent is not None and by.alike:  # among the others it was predicted as they were
        incumbent = next((each for each in options if counts_of(each) == counts_of(incumbent)), incumbent)
    if policy.fixed is not None and workers > 0:
        return _fixed(profile, workers, options, policy.fixed)
    optimum = by.best(options)
    if optimum is None:
        return Choice(
            mode=Mode.PAUSED,
            chosen=NO_WORKER,
            candidates=options,
            incumbent=None,
            forced=False,
            reason="no worker: paused",
        )
    if running is None or running.workers == 0:
        return Choice(
            mode=mode_of(optimum),
            chosen=optimum,
            candidates=options,
            incumbent=None,
            forced=False,
            reason="nothing runs yet: least predicted makespan",
        )
    if by.stakes is None:
        settled = _settle(options, optimum, incumbent, running, policy)
    else:
        settled = _weigh(options, optimum, incumbent, by.stakes)
    return _hold_growth(by, settled, workers, running, policy)


def scaled(ratio: tuple[int, int], workers: int) -> tuple[int, int]:
    """A ratio P:D on at least two workers: rounded, with one of each at least."""
    prefill = (2 * workers * ratio[0] + sum(ratio)) // (2 * sum(ratio))
    prefill = min(max(prefill, 1), workers - 1)
    return prefill, workers - prefill


def _fixed(profile: WorkloadProfile, workers: int, options: tuple[Candidate, ...], ratio: tuple[int, int]) -> Choice:
    """What a fixed policy runs, whatever is predicted. One worker cannot be two."""
    chosen, forced = makespan.colocated_candidate(profile, workers), False
    if ratio == (0, 0):
        reason = "fixed: colocated"
    elif workers == 1:
        reason, forced = f"fixed {ratio[0]}:{ratio[1]}, forced: one worker cannot disaggregate", True
    else:
        prefill, decode = scaled(ratio, workers)
        chosen = Candidate(prefill, decode, 0, makespan.disaggregated_makespan_s(profile, prefill, decode), True)
        reason = f"fixed: {ratio[0]}:{ratio[1]}"
    return Choice(mode=mode_of(chosen), chosen=chosen, candidates=options, incumbent=None, forced=forced, reason=reason)


def _settle(
    options: tuple[Candidate, ...], optimum: Candidate, incumbent: Candidate | None, running: Running, policy: Policy
) -> Choice:
    """Hysteresis at a fixed number of workers."""
    same_mode = makespan.best(tuple(option for option in options if mode_of(option) is running.mode))

    def choice(chosen: Candidate, forced: bool, reason: str) -> Choice:
        return Choice(
            mode=mode_of(chosen), chosen=chosen, candidates=options, incumbent=incumbent, forced=forced, reason=reason
        )

    if same_mode is None:
        return choice(optimum, True, f"forced: {running.mode} is infeasible now")
    if mode_of(optimum) is not running.mode and _wins(optimum, same_mode, policy.mode_threshold):
        return choice(optimum, False, f"mode switch wins {_gain(optimum, same_mode):.1%} over the best {running.mode}")
    if incumbent is None:
        return choice(same_mode, True, "forced: the roles that stay make no feasible configuration")
    if counts_of(same_mode) != counts_of(incumbent) and _wins(same_mode, incumbent, policy.ratio_threshold):
        return choice(same_mode, False, f"ratio change wins {_gain(same_mode, incumbent):.1%}")
    if counts_of(optimum) == counts_of(incumbent):
        return choice(incumbent, False, "the incumbent is predicted best")
    return choice(
        incumbent, False, f"held back: the best alternative wins {_gain(optimum, incumbent):.1%}, within the thresholds"
    )


def _weigh(options: tuple[Candidate, ...], optimum: Candidate, incumbent: Candidate | None, stakes: Stakes) -> Choice:
    """Of all options the one that wins most until the budget is likely to change, what changing costs taken off."""

    def choice(chosen: Candidate, forced: bool, reason: str) -> Choice:
        return Choice(
            mode=mode_of(chosen), chosen=chosen, candidates=options, incumbent=incumbent, forced=forced, reason=reason
        )

    if incumbent is None:
        return choice(optimum, True, "forced: the roles that stay make no feasible configuration")
    if counts_of(optimum) == counts_of(incumbent):
        return choice(incumbent, False, "the incumbent is predicted best")

    def net_s(option: Candidate) -> float:
        moved, workers = _moved(option, incumbent), sum(counts_of(option))
        share = _gain(option, incumbent)
        return share * stakes.horizon_s - stakes.switch_s(moved, workers) if share > stakes.margin else 0.0

    judged = [option for option in options if option.feasible and option.method == optimum.method]
    best = max(judged, key=lambda option: (net_s(option), -option.prefill))
    moved, workers = _moved(best, incumbent), sum(counts_of(best))
    if stakes.worth(_gain(best, incumbent), moved, workers):
        what = "mode switch" if mode_of(best) is not mode_of(incumbent) else "ratio change"
        return choice(
            best,
            False,
            f"{what} wins {_gain(best, incumbent):.1%} for about {stakes.horizon_s:.0f} s and costs {stakes.switch_s(moved, workers):.1f} s",
        )
    moved = _moved(optimum, incumbent)
    cost_s = stakes.switch_s(moved, workers)
    return choice(
        incumbent,
        False,
        f"held back: the best alternative wins {_gain(optimum, incumbent):.1%} for about {stakes.horizon_s:.0f} s, and costs {cost_s:.1f} s",
    )


def _moved(option: Candidate, incumbent: Candidate) -> int:
    """Workers whose role changes between two configurations of equally many."""
    pairs = zip(counts_of(option), counts_of(incumbent), strict=True)
    return sum(max(0, there - here) for here, there in pairs)


def _hold_growth(by: Forecast, settled: Choice, workers: int, running: Running, policy: Policy) -> Choice:
    """Keep the old size where preparing more workers would not win enough."""
    joiners = workers - running.workers
    if settled.forced or joiners <= 0 or (by.stakes is None and policy.growth_threshold <= 0):
        return settled
    small = by.least(_unchanged(running.workers, running))
    if small is None:
        return settled
    gain = _gain(settled.chosen, small)
    reason = ""
    if gain < policy.growth_threshold:
        reason = f"wins only {gain:.1%}"
    elif by.stakes is not None and by.stakes.growth_s(gain, joiners) <= 0:
        reason = f"wins {gain:.1%} for as long as they are likely to stay, less than the pause when they join costs"
    if not reason:
        return settled
    return msgspec.structs.replace(
        settled,
        mode=mode_of(small),
        chosen=small,
        incumbent=small,
        reason=f"growth to {workers} workers {reason}: not worth preparing them",
    )


def _unchanged(workers: int, running: Running) -> tuple[Counts, ...]:
    """Configurations of `workers` workers in the running mode in which no worker that stays changes its role."""
    if running.mode is Mode.COLOCATED:
        return ((0, 0, workers),)
    if running.mode is not Mode.DISAGGREGATED:
        return ()
    if running.survivors is not None and sum(running.survivors) <= workers:
        least_prefill, least_decode = running.survivors
        prefills = range(least_prefill, workers - least_decode + 1)
    elif workers >= running.workers:
        prefills = range(running.prefill, workers - running.decode + 1)
    else:
        prefills = range(max(0, workers - running.decode), min(running.prefill, workers) + 1)
    return tuple((prefill, workers - prefill, 0) for prefill in prefills if 1 <= prefill < workers)


def counts_of(option: Candidate) -> Counts:
    """(prefill, decode, colocated)."""
    return (option.prefill, option.decode, option.colocated)


def _gain(option: Candidate, over: Candidate) -> float:
    """The share of `over`'s makespan that `option` saves; negative where it is slower."""
    assert option.makespan_s is not None and over.makespan_s is not None
    return 1 - option.makespan_s / over.makespan_s if over.makespan_s > 0 else 0.0


def _wins(option: Candidate, over: Candidate, threshold: float) -> bool:
    return _gain(option, over) > threshold
