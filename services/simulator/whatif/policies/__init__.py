"""The systems that are compared (paper Table 1 and 6.1), each as settings of the same production cores.

All of them have the same GPUs to choose from, the same staleness bound, the same router, the same engine and the same costs.
`NAME+early` is NAME with early start of the next batch.
"""

from __future__ import annotations

import msgspec

from services.jobfile import ConfigError
from services.simulator.whatif.policies import elastic, fixed, pearl
from services.simulator.whatif.policies.base import Policy

ALL: dict[str, Policy] = {policy.name: policy for policy in (*fixed.POLICIES, *elastic.POLICIES, *pearl.POLICIES)}
"""In the order of the report."""
EARLY = "+early"


def find(name: str) -> Policy:
    """A policy by its name. Raises ConfigError."""
    base, early, rest = name.partition(EARLY)
    if base in ALL and not rest:
        policy = ALL[base]
        return msgspec.structs.replace(policy, name=name, early_start=True) if early else policy
    raise ConfigError(f"policy {name!r} is unknown: use {', '.join(ALL)}, or one of these with {EARLY!r} behind it")


__all__ = ["ALL", "EARLY", "Policy", "find"]
