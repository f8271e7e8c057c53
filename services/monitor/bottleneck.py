"""Which resource a run was waiting for: how busy each was, as far as it can be told from outside. Pure.

Workers say how long they decoded and prefilled; the trainer how long it trained; trajectories how long they were in their
environments. Those are shares of the time in which the resource could be used, so the largest is what more of would help most.
The host's processors are one more: where they are the busiest, an emulated run measures this machine, not the cluster it emulates.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from messages.pipeline_scheduler import StepFinished, TrajectoryCompleted
from messages.runtime_tracker import WorkerHeartbeat

NAMES = {
    "decode": "rollout decode",
    "prefill": "rollout prefill",
    "training": "training",
    "environment": "environments",
    "host_cpu": "the processors of this machine",
}


class Serving:
    """Sums over workers' heartbeats, of the time between two in which a worker served. A lost one costs a little accuracy."""

    def __init__(self) -> None:
        self.serving_s = 0.0
        self.decode_s = 0.0
        self.prefill_s = 0.0
        self._last: dict[str, tuple[int, WorkerHeartbeat]] = {}

    def take(self, at_ms: int, beat: WorkerHeartbeat) -> None:
        """Fold one in; the worker is known to be one of the job's."""
        last_ms, last = self._last.get(beat.worker, (at_ms, beat))
        self._last[beat.worker] = (at_ms, beat)
        decode_s, prefill_s = beat.decode_s - last.decode_s, beat.prefill_s - last.prefill_s
        if last.incarnation == beat.incarnation and last.serving and at_ms > last_ms and min(decode_s, prefill_s) >= 0:
            self.serving_s += (at_ms - last_ms) / 1000
            self.decode_s += decode_s
            self.prefill_s += prefill_s


class Busy(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of 1. `environment`: of the trajectories' time; `training`: of the run; `host_cpu`: of all processors."""

    decode: float
    prefill: float
    training: float
    environment: float
    host_cpu: float

    @property
    def bottleneck(self) -> str:
        """The busiest resource."""
        return max(NAMES, key=lambda name: getattr(self, name))

    @property
    def text(self) -> str:
        """For people."""
        shares = ", ".join(f"{NAMES[name]} {getattr(self, name):.0%}" for name in NAMES)
        return f"{NAMES[self.bottleneck]} ({shares})"


def busy_of(
    serving: Serving,
    steps: Iterable[StepFinished],
    ends: Iterable[TrajectoryCompleted],
    *,
    wall_s: float,
    cpu_s: float,
    processors: int,
) -> Busy:
    """How busy each was over a run of `wall_s` in which this machine's processes took `cpu_s` of its processors' time."""
    trajectories = [end for end in ends if end.status != "failed"]
    return Busy(
        decode=_share(serving.decode_s, serving.serving_s),
        prefill=_share(serving.prefill_s, serving.serving_s),
        training=_share(sum(step.train_s for step in steps), wall_s),
        environment=_share(sum(end.env_s for end in trajectories), sum(end.wall_s for end in trajectories)),
        host_cpu=_share(cpu_s, wall_s * processors),
    )


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0
