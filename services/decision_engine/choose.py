"""Which configuration to run on N workers, given what runs now: hysteresis, growth and forced switches (paper 4.3.2). Pure."""

from __future__ import annotations

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.ids import Mode
from messages.monitor import Candidate
from services.decision_engine import makespan

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


def choose(profile: WorkloadProfile, workers: int, running: Running | None, policy: Policy) -> Choice:
    """The configuration for `workers` usable workers (paper 4.3.2, DESIGN 5).

    A ratio change must beat the incumbent by `ratio_threshold`, a mode switch the best of the current mode by
    `mode_threshold`; where the current mode or the incumbent is infeasible the change is forced and neither applies.
    Growth that wins less than `growth_threshold` leaves the new workers unused. Total: never raises for workers >= 0.
    """
    assert workers >= 0
    options = makespan.candidates(profile, workers, policy.rho_max, policy.impossible)
    if policy.fixed is not None and workers > 0:
        return _fixed(profile, workers, options, policy.fixed)
    optimum = makespan.best(options)
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
    incumbent = makespan.best(_unchanged(profile, workers, running, policy))
    settled = _settle(options, optimum, incumbent, running, policy)
    return _hold_growth(profile, settled, workers, running, policy)


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
    if _counts(same_mode) != _counts(incumbent) and _wins(same_mode, incumbent, policy.ratio_threshold):
        return choice(same_mode, False, f"ratio change wins {_gain(same_mode, incumbent):.1%}")
    if _counts(optimum) == _counts(incumbent):
        return choice(incumbent, False, "the incumbent is predicted best")
    return choice(
        incumbent, False, f"held back: the best alternative wins {_gain(optimum, incumbent):.1%}, within the thresholds"
    )


def _hold_growth(profile: WorkloadProfile, settled: Choice, workers: int, running: Running, policy: Policy) -> Choice:
    """Keep the old size where preparing more workers would not win enough."""
    if settled.forced or workers <= running.workers or policy.growth_threshold <= 0:
        return settled
    small = makespan.best(_unchanged(profile, running.workers, running, policy))
    if small is None or _gain(settled.chosen, small) >= policy.growth_threshold:
        return settled
    return msgspec.structs.replace(
        settled,
        mode=mode_of(small),
        chosen=small,
        incumbent=small,
        reason=f"growth to {workers} workers wins only {_gain(settled.chosen, small):.1%}: not worth preparing them",
    )


def _unchanged(profile: WorkloadProfile, workers: int, running: Running, policy: Policy) -> tuple[Candidate, ...]:
    """Configurations of `workers` workers in the running mode in which no worker that stays changes its role."""
    if running.mode is Mode.COLOCATED:
        return (makespan.colocated_candidate(profile, workers),)
    if running.mode is not Mode.DISAGGREGATED:
        return ()
    if running.survivors is not None and sum(running.survivors) <= workers:
        least_prefill, least_decode = running.survivors
        prefills = range(least_prefill, workers - least_decode + 1)
    elif workers >= running.workers:
        prefills = range(running.prefill, workers - running.decode + 1)
    else:
        prefills = range(max(0, workers - running.decode), min(running.prefill, workers) + 1)
    return tuple(
        makespan.disaggregated_candidate(profile, prefill, workers - prefill, policy.rho_max, policy.impossible)
        for prefill in prefills
        if 1 <= prefill < workers
    )


def _counts(option: Candidate) -> tuple[int, int, int]:
    return (option.prefill, option.decode, option.colocated)


def _gain(option: Candidate, over: Candidate) -> float:
    """The share of `over`'s makespan that `option` saves; negative where it is slower."""
    assert option.makespan_s is not None and over.makespan_s is not None
    return 1 - option.makespan_s / over.makespan_s if over.makespan_s > 0 else 0.0


def _wins(option: Candidate, over: Candidate, threshold: float) -> bool:
    return _gain(option, over) > threshold
