"""What a policy is: how a system uses the GPUs there are, as settings of the same production cores. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from services.decision_engine.config import Config as DecisionConfig
from services.decision_engine.core import DecisionEngineCore
from services.preemption_feed.traces import Trace
from services.runtime.core import Core
from services.simulator.whatif.settings import Settings
from services.timing.hardware import Hardware


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A system in the comparison. `models` says what of it is here, `leaves_out` what is not."""

    name: str
    models: str
    leaves_out: str
    elastic: bool = False  # uses the trace's preemptible GPUs
    lending: bool = False  # may use idle training GPUs
    gated: bool = True  # only where eq. 7 says that it pays
    decision: str = "colocated"  # `decision.policy` of the job file
    early_start: bool = False  # groups of the next batch begin as slots of this one free up
    update_pause: str = "in_place"  # "retract": running requests compute their KV cache again at a weight update
    slack: bool = False  # the elastic GPUs are another service's: no cold start, no notice
    large: bool = False  # as many reserved GPUs as the trace has on average

    def reserved_gpus(self, trace: Trace, settings: Settings, hardware: Hardware, seconds: float) -> int:
        """Rollout GPUs that are always there."""
        if not self.large:
            return settings.reserved_gpus
        mean = settings.reserved_gpus + mean_gpus(trace, settings.most_preemptible_gpus, seconds)
        return max(1, -int(-mean // hardware.gpus)) * hardware.gpus

    def hardware(self, hardware: Hardware) -> Hardware:
        """The hardware as this system uses it."""
        if not self.slack:
            return hardware
        return msgspec.structs.replace(hardware, prepare_s=hardware.activate_s)

    def engine(self, config: DecisionConfig) -> Core[Any]:
        """The decision engine, as it is in production but for what the policy says."""
        return DecisionEngineCore(config) if self.gated else UngatedDecisions(config)


class UngatedDecisions(DecisionEngineCore):
    """Borrows whenever training is idle: a hand-over counts as a gain."""

    def _toggle_s(self, profile: object, steps: int) -> tuple[float, float]:
        return -1e9, -1e9


def mean_gpus(trace: Trace, most: int, seconds: float) -> float:
    """The mean of a trace's count, at most `most` of it, over its first `seconds`."""
    total, at_s, gpus = 0.0, 0.0, 0
    for step in trace.steps:
        if step.time_s >= seconds:
            break
        total += gpus * (step.time_s - at_s)
        at_s, gpus = step.time_s, min(step.gpus, most)
    return (total + gpus * (seconds - at_s)) / seconds
