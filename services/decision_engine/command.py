"""`pearl decide`: what the models predict for a profile and a number of workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from messages.monitor import Candidate
from services.decision_engine.choose import Policy, choose, mode_of
from services.profile import ProfileError, parse_profile

SHOWN = ("prefill", "decode", "colocated", "makespan_s", "feasible", "reason")
MOST_WORKERS = 5000
"""The stated limit of workers in a job (DESIGN 3)."""


def decide(
    profile: Mapping[str, Any],  # Any: whatever the profile file holds; it is checked here
    workers: int,
    *,
    disaggregation: bool = True,
    rho_max: float = 0.95,
) -> dict[str, Any]:  # Any: a JSON object
    """The configuration that the decision engine would choose where nothing runs yet, and every candidate.

    Returns `{"chosen": {mode, prefill, decode, colocated, makespan_s}, "candidates": [{prefill, decode, colocated,
    makespan_s, feasible, reason}, ..]}`; `makespan_s` is None where infeasible. `disaggregation=False` decides as a
    job with `decision.disaggregation` off. Raises ProfileError (a ConfigError): exit status 2.
    """
    if isinstance(workers, bool) or not isinstance(workers, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProfileError(f"workers is {workers!r}: give a whole number")
    if not 0 <= workers <= MOST_WORKERS:
        raise ProfileError(f"workers = {workers}: give a whole number from 0 to {MOST_WORKERS}")
    impossible = "" if disaggregation else "decision.disaggregation is off"
    choice = choose(parse_profile(profile), workers, None, Policy(rho_max=rho_max, impossible=impossible))
    return {
        "chosen": {
            "mode": mode_of(choice.chosen).value,
            "prefill": choice.chosen.prefill,
            "decode": choice.chosen.decode,
            "colocated": choice.chosen.colocated,
            "makespan_s": choice.chosen.makespan_s,
        },
        "candidates": [_candidate(candidate) for candidate in choice.candidates],
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:  # Any: a JSON object
    return {field: getattr(candidate, field) for field in SHOWN}
