"""The planner's predictor: a queueing network ranks all configurations, a replay of recorded trajectories judges the best few,
what was measured corrects both (docs/decisions.md). Pure.

Without recorded trajectories there is nothing to replay: then the closed forms of the paper (`makespan.py`) answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeVar

from messages.decision_engine import WorkloadProfile
from messages.monitor import Candidate, Observed
from services.decision_engine.correct import Correction, Counts, correction, smoothed
from services.decision_engine.predict_average import averaged, logs_of
from services.decision_engine.predict_evidence import CLIMB, MODELS, SHORTLIST, Evidence, Key, key_of, model_of, shrunk
from services.decision_engine.predict_model import Flowed, Grow, Pipeline
from services.decision_engine.predict_queueing import makespan_s
from services.decision_engine.predict_replay import flow, replay

UNLIKELY: Final = 1.3
"""Times the best one's ranked makespan beyond which a ratio is not replayed."""
GRID: Final = 24
"""Of more prefill counts than this, so many are ranked first, then the neighbours of the best."""
ODD: Final = 0.1
"""Logarithm beyond which a ratio's replayed over ranked makespan has nothing to do with the best one's."""
LUCKIEST: Final = 0.005
"""Of several ratios the one predicted best is predicted too well, for it was picked by its luck, too; colocation is only one. A share of a makespan."""
GATE: Final = 4
"""So many times as much is replayed to say what a borrow saves: two replays a decision, on whose difference it stands alone."""
LEARNING: Final = 4
"""So much more is replayed to predict a batch that was measured: once a batch, and its luck would be learned."""

T = TypeVar("T")


def _remembered(compute: Callable[[Key, int, int, int], T]) -> Callable[[Key, int, int, int], T]:
    """Remembers what was computed for the newest models, and forgets it with them: a key holds a whole sample."""

    @lru_cache(maxsize=MODELS)
    def known(_: Key) -> dict[Counts, T]:
        return {}

    def found(key: Key, prefill: int, decode: int, colocated: int) -> T:
        answers = known(key)
        counts = (prefill, decode, colocated)
        if counts not in answers:
            answers[counts] = compute(key, *counts)
        return answers[counts]

    return found


@_remembered
def _ranked_s(key: Key, prefill: int, decode: int, colocated: int) -> float:
    """Makespan by the queueing network."""
    model = model_of(key)
    return makespan_s(model.phases, model.machine, prefill, decode, colocated)


@_remembered
def _replayed_s(key: Key, prefill: int, decode: int, colocated: int) -> float:
    """Mean makespan over the model's batches; where batches overlap, the time from the end of one to the end of the next."""
    model = model_of(key)
    if key.limits.in_flight_percent:
        return _flow(key, prefill, decode, colocated).period_s
    took_s = _batches_s(key, prefill, decode, colocated)
    if colocated:  # Ratios share their luck among neighbours (`smoothed`); colocation has none: it is replayed in the other order, too.
        counts = shrunk(prefill, decode, colocated, model.shrink)
        took_s += tuple(replay(draw[::-1], model.machine, *counts).makespan_s for draw in model.draws)
    return sum(took_s) / len(took_s)


@_remembered
def _batches_s(key: Key, prefill: int, decode: int, colocated: int) -> tuple[float, ...]:
    """Makespans of the model's batches, each as it is."""
    model = model_of(key)
    counts = shrunk(prefill, decode, colocated, model.shrink)
    return tuple(replay(draw, model.machine, *counts).makespan_s for draw in model.draws)


@_remembered
def _flow(key: Key, prefill: int, decode: int, colocated: int) -> Flowed:
    """Batch after batch as the pipeline admits them: a batch's longest trajectories are company for the next one, and hold up the one
    after that."""
    model = model_of(key)
    size = len(model.draws[0])
    pipeline = Pipeline(
        size=size,
        group=math.gcd(size, key.limits.group),
        in_flight=max(1, size * key.limits.in_flight_percent // 100),
        ahead=max(1, key.limits.ahead),
        train_s=key.train_s,
    )
    turns = [turns for draw in model.draws for turns in draw]
    return flow(turns, model.machine, *shrunk(prefill, decode, colocated, model.shrink), pipeline)


def _ranks(workers: int) -> list[int]:
    """Prefill counts to rank: all, or a grid."""
    if workers - 1 <= GRID:
        return list(range(1, workers))
    return sorted({max(1, round((workers - 1) * index / GRID)) for index in range(1, GRID + 1)})


def _learned(evidence: Evidence) -> Correction:
    return correction(evidence.observed, overlap=bool(evidence.limits.in_flight_percent))


def candidates(
    profile: WorkloadProfile,
    workers: int,
    evidence: Evidence,
    *,
    impossible: str = "",
    judged: Sequence[Counts] = (),
) -> tuple[Candidate, ...]:
    """Every configuration of `workers` workers with its corrected prediction; `judged` ones are replayed in any case.

    `method` says how a candidate's came about: "replay", or "queueing" for those that it left behind. With more than `GRID` ratios
    only those near the best are listed. No workers: no candidates. `impossible`: why none can disaggregate.
    """
    if workers < 1:
        return ()
    key = key_of(profile, evidence, workers)
    learned = _learned(evidence)
    alone = (0, 0, workers)
    options: dict[Counts, float] = {alone: _ranked_s(key, *alone)}
    if not impossible:
        for prefill in _ranks(workers):
            options[prefill, workers - prefill, 0] = _ranked_s(key, prefill, workers - prefill, 0)
        if workers - 1 > GRID:
            best = min((counts for counts in options if counts[0]), key=lambda counts: options[counts])
            step = max(1, (workers - 1) // GRID)
            for prefill in range(max(1, best[0] - step), min(workers - 1, best[0] + step) + 1, max(1, step // 4)):
                options.setdefault((prefill, workers - prefill, 0), _ranked_s(key, prefill, workers - prefill, 0))
    for counts in judged:
        if sum(counts) == workers and (counts[2] or not impossible):
            options.setdefault(counts, _ranked_s(key, *counts))
    split = [counts for counts in options if counts[0]]
    ranked = sorted(split, key=lambda counts: options[counts] * learned.factor(counts))
    if evidence.quick:
        return (
            *(_candidate(counts, options[counts], "queueing", learned) for counts in (alone, *sorted(split))),
            *_impossible(workers, impossible),
        )
    likely = [counts for counts in ranked[:SHORTLIST] if options[counts] <= UNLIKELY * options[ranked[0]]]
    shortlist = {alone, *likely, *(counts for counts in judged if counts in options)}
    replayed = {counts: _replayed_s(key, *counts) for counts in sorted(shortlist)}
    for _ in range(CLIMB):
        counts = _neighbour(replayed, sorted(split))
        if counts is not None:
            replayed[counts] = _replayed_s(key, *counts)
    # What the queueing network misses is much the same for neighbouring ratios: it is learned from those that were replayed.
    ratios = {counts: replayed[counts] / options[counts] for counts in replayed if counts[0] and options[counts] > 0}
    missed = _missed(ratios, replayed, split)
    bases_s = {counts: options[counts] * missed[counts] for counts in sorted(split)}
    moved = _moved(profile, evidence, replayed[alone], bases_s)
    found = [_candidate(alone, replayed[alone], "replay", learned)]
    for counts, base_s in bases_s.items():
        method = "replay" if counts in replayed else "queueing"
        found.append(_candidate(counts, base_s, method, learned, moved.get(counts, 1.0)))
    return (*found, *_impossible(workers, impossible))


def _moved(
    profile: WorkloadProfile, evidence: Evidence, alone_s: float, split_s: Mapping[Counts, float]
) -> dict[Counts, float]:
    """What ratios' predictions are multiplied by: earlier samples are averaged in, the luck of the best one is taken off. `alone_s`:
    colocation's, of as many workers. A ratio that takes no time is left out."""
    workers = sum(next(iter(split_s), (0, 0, 0)))
    logs = logs_of(alone_s, {counts[0]: took_s for counts, took_s in split_s.items()})
    average = dict(averaged(evidence.averages, workers, profile.train_step, logs).logs)
    return {
        counts: math.exp(LUCKIEST + average[counts[0]] - logs[counts[0]]) for counts in split_s if counts[0] in logs
    }


def _missed(
    ratios: Mapping[Counts, float], replayed: Mapping[Counts, float], split: Sequence[Counts]
) -> dict[Counts, float]:
    """Replayed over ranked makespans of all ratios, the replays' luck taken out (`correct.smoothed`).

    Where prefill workers are overloaded the network is wrong by half, which says nothing of ratios where they are not: what differs that
    much from the best replayed one is taken as it is.
    """
    if not ratios:
        return smoothed({}, split)
    best = ratios[min(ratios, key=lambda counts: (replayed[counts], counts))]
    odd = {counts: ratio for counts, ratio in ratios.items() if abs(math.log(ratio / best)) > ODD}
    return {**smoothed({counts: ratio for counts, ratio in ratios.items() if counts not in odd}, split), **odd}


def _neighbour(replayed: Mapping[Counts, float], split: Sequence[Counts]) -> Counts | None:
    """The ratio next to the best replayed one that was not: on the side that looks better. None: both were."""
    tried = [counts for counts in split if counts in replayed]
    if not tried:
        return None
    at = split.index(min(tried, key=lambda counts: replayed[counts]))
    sides = [side for side in (at - 1, at + 1) if 0 <= side < len(split) and split[side] not in replayed]
    if not sides:
        return None

    def beyond(side: int) -> float:
        other = 2 * at - side  # the best's neighbour on the other side: the worse it is, the better this one may be
        return -replayed.get(split[other], 0.0) if 0 <= other < len(split) else 0.0

    return split[min(sides, key=lambda side: (beyond(side), side))]


def _impossible(workers: int, why: str) -> tuple[Candidate, ...]:
    return tuple(Candidate(p, workers - p, 0, None, False, why) for p in range(1, workers)) if why else ()


def least(profile: WorkloadProfile, choices: Sequence[Counts], evidence: Evidence) -> Candidate | None:
    """The best of these configurations of equally many workers by the queueing network, replayed. None: there is none."""
    if not choices:
        return None
    key = key_of(profile, evidence, sum(choices[0]))
    learned = _learned(evidence)
    ranked = {counts: _ranked_s(key, *counts) * learned.factor(counts) for counts in choices}
    counts = min(choices, key=lambda each: (ranked[each], each))
    if evidence.quick:
        return _candidate(counts, ranked[counts] / learned.factor(counts), "queueing", learned)
    base_s = _replayed_s(key, *counts)
    if counts[2]:
        return _candidate(counts, base_s, "replay", learned)
    moved = _moved(profile, evidence, _replayed_s(key, 0, 0, sum(counts)), {counts: base_s})
    return _candidate(counts, base_s, "replay", learned, moved.get(counts, 1.0))


def saved_s(
    profile: WorkloadProfile, alone: Counts, together: Counts, remaining: int, delay_s: float, evidence: Evidence
) -> float:
    """Seconds by which the rest of a batch ends earlier if the workers of `together` beyond `alone` come `delay_s` from now.

    The batch is replayed on `alone` until `remaining` of its trajectories are left, and from there with and without them: the last
    ones are the longest, and gain less from more workers than their share of the batch. Corrected like `alone`'s makespan.
    """
    if evidence.limits.in_flight_percent:
        return _saved_while_idle_s(profile, alone, together, remaining, delay_s, evidence)
    key = key_of(profile, evidence.replaying(GATE), sum(alone))
    model = model_of(key)
    more = [max(0, b - a) for a, b in zip(alone, together, strict=True)]
    if alone[2] == 0 and together[2]:
        more = [0, together[2] - alone[0] - alone[1], 0]
    elif alone[2] and not together[2]:
        more = [0, 0, together[0] + together[1] - alone[2]]
    left = max(0, min(profile.B, remaining)) / profile.B
    total, counts = 0.0, shrunk(*alone, model.shrink)
    for draw, alone_s in zip(model.draws, _batches_s(key, *alone), strict=True):
        grow = Grow(round(left * len(draw)), delay_s, *(-(-each // model.shrink) for each in more))
        total += alone_s - replay(draw, model.machine, *counts, grow=grow).makespan_s
    return total / len(model.draws) * _learned(evidence).factor(alone)


def _saved_while_idle_s(
    profile: WorkloadProfile, alone: Counts, together: Counts, left: int, delay_s: float, evidence: Evidence
) -> float:
    """Where batches overlap there is always other work, so that borrowed workers win their share of all the time until they are needed.

    That time is how long `left` trajectories of a batch lasted in the replay. What they win is by how much a trajectory takes less time.
    """
    key = key_of(profile, evidence, sum(alone))
    alone_flow = _flow(key, *alone)
    together_s = _flow(key_of(profile, evidence, sum(together)), *together).stay_s
    scaled = -(-left * len(model_of(key).draws[0]) // profile.B)
    window_s = alone_flow.left_s(scaled) * _learned(evidence).factor(alone)
    return max(0.0, window_s - delay_s) * (1 - together_s / alone_flow.stay_s) if alone_flow.stay_s > 0 else 0.0


def _candidate(counts: Counts, base_s: float, method: str, learned: Correction, moved: float = 1.0) -> Candidate:
    """`moved`: what else than measurements the prediction is multiplied by."""
    makespan_s = base_s * moved * learned.factor(counts)
    return Candidate(*counts, makespan_s, True, "", method=method, base_s=base_s, spread=learned.spread(counts))


def best(options: Sequence[Candidate]) -> Candidate | None:
    """The least corrected prediction among those that were replayed, or among all if none was; None: none is feasible."""
    feasible = [option for option in options if option.feasible]
    judged = [option for option in feasible if option.method == "replay"] or feasible
    return min(judged, key=lambda option: (option.makespan_s or 0.0, option.prefill), default=None)


def predicted_s(profile: WorkloadProfile, counts: Counts, evidence: Evidence) -> float:
    """One configuration's uncorrected prediction, replayed with more care than a choice can afford; a flow averages over batches as it is."""
    if evidence.limits.in_flight_percent:
        return _replayed_s(key_of(profile, evidence, sum(counts)), *counts)
    return _replayed_s(key_of(profile, evidence.replaying(LEARNING), sum(counts)), *counts)


def probe(options: Sequence[Candidate], observed: Sequence[Observed], most_cost: float) -> Candidate | None:
    """The best of the mode that no batch has measured, if running it once is predicted to cost no more than this share."""
    chosen = best(options)
    if chosen is None or not observed:
        return None
    tried = {each.prefill > 0 for each in observed} | {chosen.prefill > 0}
    other = best([option for option in options if (option.prefill > 0) not in tried])
    if other is None or not other.makespan_s or not chosen.makespan_s:
        return None
    return other if other.makespan_s <= chosen.makespan_s * (1 + most_cost) else None
