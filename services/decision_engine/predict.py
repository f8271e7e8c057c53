"""The planner's predictor: a queueing network ranks all configurations, a replay of recorded trajectories judges the best few,
what was measured corrects both (docs/decisions.md). Pure.

Without recorded trajectories there is nothing to replay: then the closed forms of the paper (`makespan.py`) answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.monitor import Candidate, Observed
from services.decision_engine.correct import Correction, Counts, correction, smoothed
from services.decision_engine.predict_model import Flowed, Grow, Machine, Pipeline, Turns, merged
from services.decision_engine.predict_queueing import Phase, makespan_s, phases_of
from services.decision_engine.predict_replay import flow, replay

LEAST_SAMPLE: Final = 4
"""Trajectories below which a sample says too little to replay."""
SHORTLIST: Final = 3
"""Ratios that are replayed because they rank first, beside colocation and those that must be judged."""
UNLIKELY: Final = 1.3
"""Times the best one's ranked makespan beyond which a ratio is not replayed."""
CLIMB: Final = 2
"""And so many more, neighbours of the best that was replayed."""
GRID: Final = 24
"""Of more prefill counts than this, so many are ranked first, then the neighbours of the best."""
MOST_MERGED: Final = 4
"""Turns that one replayed turn may stand for."""
MOST_DRAWS: Final = 4
"""Batches that one configuration is replayed with at most."""
FLOW: Final = 2
"""Where each batch begins as slots of the one before free up, so many times those that may be open at once are replayed in one flow."""
MOST_FLOW: Final = 8
"""And never more batches."""
MOST_MERGED_FLOW: Final = 12
LEARNING: Final = 4
"""So much more is replayed to predict a batch that was measured: once a batch, and its luck would be learned."""
LEAST_MISSED: Final = 0.1
"""Computed tokens beyond the expected by less than this share are no rewritten histories."""
LEAST_SCALED: Final = 24
"""Workers of a replay that stands for a larger cluster: enough for any ratio."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's engine is configured to, and how much a decision may replay."""

    chunk_tokens: int = 512
    max_running: int = 64
    replay_turns: int = 6_000
    tokens_per_request: int = 4096  # of the router's placement (its configuration's default)
    fused: int = 1  # 0: the engine computes prompts and decodes in passes of their own
    in_flight_percent: int = 0  # of a batch, where the next one begins as slots free up; 0: one batch after the other
    ahead: int = 2  # batches open at once, as staleness allows
    group: int = 1  # trajectories that start together

    def numbers(self) -> dict[str, float]:
        """As a decision record keeps them."""
        return {name: float(getattr(self, name)) for name in self.__struct_fields__}


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner knows beyond the closed forms' parameters. `sample`: see `workload.profile/1`."""

    sample: tuple[tuple[int, ...], ...] = ()
    observed: tuple[Observed, ...] = ()
    limits: Limits = Limits()
    measured_on: Counts | None = None  # the configuration under which `dL` was measured; None: not known
    quick: bool = False  # rank by the queueing network, replay nothing
    train_s: float = 0.0  # of a train step, where batches overlap; 0: not known

    @property
    def usable(self) -> bool:
        """Whether there is enough to replay."""
        return len(self.sample) >= LEAST_SAMPLE


class _Model(msgspec.Struct, frozen=True):
    """A sample made ready: the batches to replay, the phases, the machine."""

    draws: tuple[tuple[Turns, ...], ...]
    phases: tuple[Phase, ...]
    machine: Machine
    shrink: int  # the replay has so many times fewer workers and trajectories


class _Key(msgspec.Struct, frozen=True):
    """All that a model follows from; hashable."""

    sample: tuple[tuple[int, ...], ...]
    limits: Limits
    batch: int
    fixed_s: float
    sequence_s: float
    prefill_s: float
    transfer_s: float
    capacity: float
    scales: int  # by so much a replay may shrink the cluster: else a model is the same for any number of workers
    computed: float  # prompt tokens a turn
    measured_on: Counts | None
    quick: bool
    train_s: float


def turns_of(trajectory: Sequence[int]) -> Turns:
    """A sample's trajectory, unpacked: (new prompt tokens, reply tokens, environment seconds) for each turn."""
    return tuple(
        (trajectory[at], max(1, trajectory[at + 1]), trajectory[at + 2] / 1000, 1)
        for at in range(0, len(trajectory) - 2, 3)
    )


def decode_context(batch: Sequence[Turns]) -> float:
    """Mean context length while a token is decoded."""
    total, tokens = 0.0, 0.0
    for turns in batch:
        context = 0.0
        for new, reply, _, _ in turns:
            context += new
            total += reply * (context + reply / 2)
            tokens += reply
            context += reply
    return max(1.0, total / tokens) if tokens else 1.0


def _key(profile: WorkloadProfile, evidence: Evidence, workers: int) -> _Key:
    per_token = max(profile.kv_bytes_per_token, 1e-9)
    return _Key(
        sample=evidence.sample,
        limits=evidence.limits,
        batch=profile.B,
        fixed_s=profile.A_s,
        sequence_s=profile.b_s,
        prefill_s=profile.t_prefill_s,
        transfer_s=per_token / profile.bandwidth_bytes_per_s,
        capacity=profile.kv_capacity_bytes_per_worker / per_token,
        scales=max(1, workers // LEAST_SCALED),
        computed=profile.dL,
        measured_on=evidence.measured_on,
        quick=evidence.quick,
        train_s=evidence.train_s if evidence.limits.in_flight_percent else 0.0,
    )


@lru_cache(maxsize=16)
def _model(key: _Key) -> _Model:
    """Batches as large as the job's, made of the sample in order: as many different ones as may be replayed."""
    sample = tuple(turns_of(trajectory) for trajectory in key.sample)
    mean_turns = sum(len(turns) for turns in sample) / len(sample)
    each = key.limits.replay_turns / (SHORTLIST + CLIMB)
    shrink = 1
    if key.batch * mean_turns > each:
        shrink = max(1, min(math.ceil(key.batch * mean_turns / each), key.scales))
    size = max(1, key.batch // shrink)
    flows = _flows(key.limits)
    played, most_merged = (flows * size, MOST_MERGED_FLOW) if flows else (size, MOST_MERGED)
    parts = min(most_merged, round(played * mean_turns / each)) if played * mean_turns > each else 1
    replayed = tuple(merged(turns, parts) for turns in sample)
    # As many different batches as may be replayed; where the sample makes no other, the same one in another order.
    most = flows or max(1, min(MOST_DRAWS, int(each / (size * mean_turns))))
    draws = tuple(_batch(replayed, size, draw) for draw in range(most))
    machine = Machine(
        fixed_s=key.fixed_s,
        kv_s=key.sequence_s / decode_context(sample),
        prefill_s=key.prefill_s,
        transfer_s=key.transfer_s,
        capacity=key.capacity,
        chunk=key.limits.chunk_tokens,
        max_running=key.limits.max_running,
        tokens_per_request=key.limits.tokens_per_request,
        fused=bool(key.limits.fused),
    )
    machine = msgspec.structs.replace(machine, missed=_missed(draws[0], machine, key, shrink))
    return _Model(draws, phases_of(sample, key.batch / len(sample)), machine, shrink)


def _flows(limits: Limits) -> int:
    """Batches replayed in one flow; 0: one batch after the other."""
    return min(MOST_FLOW, FLOW * max(1, limits.ahead)) if limits.in_flight_percent else 0


def _batch(sample: Sequence[Turns], size: int, draw: int) -> tuple[Turns, ...]:
    """The `draw`-th batch of a sample: the next `size` trajectories, every second round in the opposite order."""
    first = draw * size
    batch = tuple(sample[(first + index) % len(sample)] for index in range(size))
    return batch[::-1] if (first // len(sample)) % 2 else batch


def _missed(batch: Sequence[Turns], machine: Machine, key: _Key, shrink: int) -> float:
    """The share of turns whose prefix was not found though it should have been, from the prompt tokens that were computed.

    What a turn computes if every prefix is found that nothing evicted is replayed, on the configuration under which `dL` was
    measured; what was computed beyond that, of all that could have been, is put down to rewritten histories.
    """
    turns = sum(turn[3] for each in batch for turn in each)
    if key.measured_on is None or not turns:
        return 0.0
    new = sum(turn[0] for each in batch for turn in each) / turns
    reply = sum(turn[1] for each in batch for turn in each) / turns
    found = new + (reply if key.measured_on[0] else 0.0)
    if key.computed <= found * (1 + LEAST_MISSED):
        return 0.0
    if not key.quick:
        found = max(found, replay(batch, machine, *_shrunk(*key.measured_on, shrink)).computed / turns)
    whole = 0.0
    for each in batch:
        context = 0.0
        for new, reply, _, parts in each:
            context += new
            whole += context * parts
            context += reply
    whole /= turns
    if key.computed <= found * (1 + LEAST_MISSED) or whole <= found:
        return 0.0
    return min(1.0, (key.computed - found) / (whole - found))


@lru_cache(maxsize=512)
def _replayed_s(key: _Key, prefill: int, decode: int, colocated: int) -> float:
    """Mean makespan over the model's batches; where batches overlap, the time from the end of one to the end of the next."""
    model = _model(key)
    if key.limits.in_flight_percent:
        return _flow(key, prefill, decode, colocated).period_s
    prefill, decode, colocated = _shrunk(prefill, decode, colocated, model.shrink)
    # Ratios share their luck among neighbours (`smoothed`); colocation has none: it is replayed in the other order, too.
    draws = [*model.draws, *(draw[::-1] for draw in model.draws if colocated)]
    return sum(replay(draw, model.machine, prefill, decode, colocated).makespan_s for draw in draws) / len(draws)


@lru_cache(maxsize=512)
def _flow(key: _Key, prefill: int, decode: int, colocated: int) -> Flowed:
    """Batch after batch as the pipeline admits them: a batch's longest trajectories are company for the next one, and hold up the one
    after that."""
    model = _model(key)
    size = len(model.draws[0])
    pipeline = Pipeline(
        size=size,
        group=math.gcd(size, key.limits.group),
        in_flight=max(1, size * key.limits.in_flight_percent // 100),
        ahead=max(1, key.limits.ahead),
        train_s=key.train_s,
    )
    turns = [turns for draw in model.draws for turns in draw]
    return flow(turns, model.machine, *_shrunk(prefill, decode, colocated, model.shrink), pipeline)


def _shrunk(prefill: int, decode: int, colocated: int, shrink: int) -> Counts:
    if shrink == 1:
        return prefill, decode, colocated
    if colocated:
        return 0, 0, max(1, round(colocated / shrink))
    return max(1, round(prefill / shrink)), max(1, round(decode / shrink)), 0


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
    key = _key(profile, evidence, workers)
    model = _model(key)
    learned = _learned(evidence)

    def queueing(counts: Counts) -> float:
        return makespan_s(model.phases, model.machine, *counts)

    alone = (0, 0, workers)
    options: dict[Counts, float] = {alone: queueing(alone)}
    if not impossible:
        for prefill in _ranks(workers):
            options[prefill, workers - prefill, 0] = queueing((prefill, workers - prefill, 0))
        if workers - 1 > GRID:
            best = min((counts for counts in options if counts[0]), key=lambda counts: options[counts])
            step = max(1, (workers - 1) // GRID)
            for prefill in range(max(1, best[0] - step), min(workers - 1, best[0] + step) + 1, max(1, step // 4)):
                options.setdefault((prefill, workers - prefill, 0), queueing((prefill, workers - prefill, 0)))
    for counts in judged:
        if sum(counts) == workers and (counts[2] or not impossible):
            options.setdefault(counts, queueing(counts))
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
    missed = smoothed({c: replayed[c] / options[c] for c in replayed if c[0] and options[c] > 0}, split)
    found = [_candidate(alone, replayed[alone], "replay", learned)]
    for counts in sorted(split):
        method = "replay" if counts in replayed else "queueing"
        found.append(_candidate(counts, options[counts] * missed[counts], method, learned))
    return (*found, *_impossible(workers, impossible))


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
    key = _key(profile, evidence, sum(choices[0]))
    model = _model(key)
    learned = _learned(evidence)
    ranked = {counts: makespan_s(model.phases, model.machine, *counts) * learned.factor(counts) for counts in choices}
    counts = min(choices, key=lambda each: (ranked[each], each))
    if evidence.quick:
        return _candidate(counts, ranked[counts] / learned.factor(counts), "queueing", learned)
    return _candidate(counts, _replayed_s(key, *counts), "replay", learned)


def saved_s(
    profile: WorkloadProfile, alone: Counts, together: Counts, remaining: int, delay_s: float, evidence: Evidence
) -> float:
    """Seconds by which the rest of a batch ends earlier if the workers of `together` beyond `alone` come `delay_s` from now.

    The batch is replayed on `alone` until `remaining` of its trajectories are left, and from there with and without them: the last
    ones are the longest, and gain less from more workers than their share of the batch. Corrected like `alone`'s makespan.
    """
    if evidence.limits.in_flight_percent:
        return _saved_while_idle_s(profile, alone, together, remaining, delay_s, evidence)
    key = _key(profile, evidence, sum(alone))
    model = _model(key)
    more = [max(0, b - a) for a, b in zip(alone, together, strict=True)]
    if alone[2] == 0 and together[2]:
        more = [0, together[2] - alone[0] - alone[1], 0]
    elif alone[2] and not together[2]:
        more = [0, 0, together[0] + together[1] - alone[2]]
    left = max(0, min(profile.B, remaining)) / profile.B
    total = 0.0
    for draw in model.draws:
        grow = Grow(round(left * len(draw)), delay_s, *(-(-each // model.shrink) for each in more))
        counts = _shrunk(*alone, model.shrink)
        total += replay(draw, model.machine, *counts).makespan_s
        total -= replay(draw, model.machine, *counts, grow=grow).makespan_s
    return total / len(model.draws) * _learned(evidence).factor(alone)


def _saved_while_idle_s(
    profile: WorkloadProfile, alone: Counts, together: Counts, left: int, delay_s: float, evidence: Evidence
) -> float:
    """Where batches overlap there is always other work, so that borrowed workers win their share of all the time until they are needed.

    That time is how long `left` trajectories of a batch lasted in the replay. What they win is by how much a trajectory takes less time.
    """
    key = _key(profile, evidence, sum(alone))
    alone_flow = _flow(key, *alone)
    together_s = _flow(_key(profile, evidence, sum(together)), *together).stay_s
    scaled = -(-left * len(_model(key).draws[0]) // profile.B)
    window_s = alone_flow.left_s(scaled) * _learned(evidence).factor(alone)
    return max(0.0, window_s - delay_s) * (1 - together_s / alone_flow.stay_s) if alone_flow.stay_s > 0 else 0.0


def _candidate(counts: Counts, base_s: float, method: str, learned: Correction) -> Candidate:
    return Candidate(
        *counts, base_s * learned.factor(counts), True, "", method=method, base_s=base_s, spread=learned.spread(counts)
    )


def best(options: Sequence[Candidate]) -> Candidate | None:
    """The least corrected prediction among those that were replayed, or among all if none was; None: none is feasible."""
    feasible = [option for option in options if option.feasible]
    judged = [option for option in feasible if option.method == "replay"] or feasible
    return min(judged, key=lambda option: (option.makespan_s or 0.0, option.prefill), default=None)


def predicted_s(profile: WorkloadProfile, counts: Counts, evidence: Evidence) -> float:
    """One configuration's uncorrected prediction, replayed with more care than a choice can afford; a flow averages over batches as it is."""
    if evidence.limits.in_flight_percent:
        return _replayed_s(_key(profile, evidence, sum(counts)), *counts)
    limits = msgspec.structs.replace(evidence.limits, replay_turns=LEARNING * evidence.limits.replay_turns)
    careful = msgspec.structs.replace(evidence, limits=limits)
    return _replayed_s(_key(profile, careful, sum(counts)), *counts)


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
