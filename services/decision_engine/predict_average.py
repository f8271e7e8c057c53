"""What the samples of several profiles say together about how ratios compare with colocation. Pure.

A sample of 64 trajectories is often little more than one batch, and its few longest trajectories move two modes' predictions by
5 to 10 % against each other. So what earlier samples predicted is averaged in: not seconds, which follow the workload, but each ratio's
over colocation's. Costs no replay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from messages.monitor import Averaged, Candidate

KEEP: Final = 0.8
"""Weight of what was known, for each newer profile: workloads drift."""
MOST_KEPT: Final = 4
"""Numbers of workers of which averages are kept, the newest."""


def averaged(earlier: Sequence[Averaged], workers: int, train_step: int, logs: Mapping[int, float]) -> Averaged:
    """Averages for `workers` workers after the sample of `train_step`, which predicts `logs`: by number of prefill workers, the logarithm
    of the makespan over colocation's.

    A number of workers that was never asked about has no average of its own; this sample's luck, where another number's average
    tells it, is much the same there.
    """
    own = next((each for each in earlier if each.workers == workers), None)
    if own is None:
        other = next((each for each in reversed(earlier) if each.train_step == train_step), None)
        own = Averaged(workers, train_step, 1.0, 0.0, ())
        if other is not None:
            own = msgspec.structs.replace(own, weight=other.weight, shift=other.shift)
    elif own.train_step != train_step:
        weight = own.weight * KEEP ** max(1, train_step - own.train_step) + 1
        known = [(log, logs[prefill]) for prefill, log in own.logs if prefill in logs]
        shift = sum(log - newest for log, newest in known) / len(known) * (weight - 1) / weight if known else 0.0
        own = Averaged(workers, train_step, weight, shift, (), own.logs)
    before = dict(own.before)  # now this sample is the newest in it, were it asked about before or not

    def both(prefill: int, log: float) -> float:
        if prefill not in before:
            return log + own.shift
        return ((own.weight - 1) * before[prefill] + log) / own.weight

    found = {prefill: both(prefill, log) for prefill, log in logs.items()}
    return msgspec.structs.replace(own, logs=tuple(sorted({**dict(own.logs), **found}.items())))


def kept(earlier: Sequence[Averaged], options: Sequence[Candidate], train_step: int) -> tuple[Averaged, ...]:
    """What to remember after a decision among these options: all of equally many workers."""
    alone = next((each for each in options if each.colocated and each.method == "replay" and each.base_s), None)
    if alone is None:
        return tuple(earlier)
    logs = logs_of(alone.base_s or 0.0, {each.prefill: each.base_s or 0.0 for each in options if each.prefill})
    newest = averaged(earlier, alone.colocated, train_step, logs)
    return (*(each for each in earlier if each.workers != newest.workers), newest)[-MOST_KEPT:]


def logs_of(alone_s: float, split_s: Mapping[int, float]) -> dict[int, float]:
    """By number of prefill workers: the logarithm of the makespan over colocation's. None of what takes no time."""
    return {prefill: math.log(took_s / alone_s) for prefill, took_s in split_s.items() if took_s > 0 and alone_s > 0}
