"""What the planner's predictor knows, and made ready to be replayed: batches of recorded trajectories and a worker's needs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.monitor import Averaged, Observed
from services.decision_engine.correct import Counts
from services.decision_engine.predict_model import Machine, Turns, merged
from services.decision_engine.predict_queueing import Phase, phases_of
from services.decision_engine.predict_replay import replay

LEAST_SAMPLE: Final = 4
"""Trajectories below which a sample says too little to replay."""
SHORTLIST: Final = 3
"""Ratios that are replayed because they rank first, beside colocation and those that must be judged."""
CLIMB: Final = 2
"""And so many more, neighbours of the best that was replayed."""
MOST_DRAWS: Final = 4
"""Batches that one configuration is replayed with at most."""
FLOW: Final = 2
"""Where each batch begins as slots of the one before free up, so many times those that may be open at once are replayed in one flow."""
MOST_FLOW: Final = 8
"""And never more batches."""
LEAST_MISSED: Final = 0.1
"""Computed tokens beyond the expected by less than this share are no rewritten histories."""
LENDING: Final = 0.5
"""Of what a choice may replay, where a decision may be two: without the training GPUs, and with them. Always, not only where it is two:
so that what was replayed is known already when GPUs are lent or wanted back."""
MODELS: Final = 16
"""So many are kept, each with a sample, which may be a third of a megabyte: of a profile there are up to four, or eight on very many workers."""
LEAST_SCALED: Final = 24
"""Workers of a replay that stands for a larger cluster: enough for any ratio."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's engine is configured to, and how much a decision may replay."""

    chunk_tokens: int = 512
    max_running: int = 64
    replay_turns: int = 4_000
    tokens_per_request: int = 4096  # of the router's placement (its configuration's default)
    fused: int = 1  # 0: the engine computes prompts and decodes in passes of their own
    in_flight_percent: int = 0  # of a batch, where the next one begins as slots free up; 0: one batch after the other
    ahead: int = 2  # batches open at once, as staleness allows
    group: int = 1  # trajectories that start together

    def shared(self, lending: bool) -> Limits:
        """What is left for one choice where GPUs may be lent."""
        if not lending:
            return self
        return msgspec.structs.replace(self, replay_turns=max(1, round(LENDING * self.replay_turns)))

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
    averages: tuple[Averaged, ...] = ()  # what earlier samples predicted (`predict_average.py`)
    care: float = 1.0  # so many times as many turns are replayed as the limits say

    @property
    def usable(self) -> bool:
        """Whether there is enough to replay."""
        return len(self.sample) >= LEAST_SAMPLE

    def replaying(self, times: float) -> Evidence:
        """The same, with so many times as many turns to replay."""
        return msgspec.structs.replace(self, care=times)


class Model(msgspec.Struct, frozen=True):
    """A sample made ready: the batches to replay, the phases, the machine."""

    draws: tuple[tuple[Turns, ...], ...]
    phases: tuple[Phase, ...]
    machine: Machine
    shrink: int  # the replay has so many times fewer workers and trajectories


class Key(msgspec.Struct, frozen=True, cache_hash=True):
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
    care: float


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


def key_of(profile: WorkloadProfile, evidence: Evidence, workers: int) -> Key:
    """What the model for so many workers follows from."""
    per_token = max(profile.kv_bytes_per_token, 1e-9)
    return Key(
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
        care=evidence.care,
    )


@lru_cache(maxsize=MODELS)
def _unpacked(sample: tuple[tuple[int, ...], ...], batch: int) -> tuple[tuple[Turns, ...], tuple[Phase, ...]]:
    """A sample's trajectories, and the phases of a batch of so many: the same however much of it is replayed."""
    trajectories = tuple(turns_of(trajectory) for trajectory in sample)
    return trajectories, phases_of(trajectories, batch / len(trajectories))


@lru_cache(maxsize=MODELS)
def model_of(key: Key) -> Model:
    """Batches as large as the job's, made of the sample in order: as many different ones as may be replayed."""
    sample, phases = _unpacked(key.sample, key.batch)
    mean_turns = sum(len(turns) for turns in sample) / len(sample)
    each = key.care * key.limits.replay_turns / (SHORTLIST + CLIMB)
    shrink = 1
    if key.batch * mean_turns > each:
        shrink = max(1, min(math.ceil(key.batch * mean_turns / each), key.scales))
    size = max(1, key.batch // shrink)
    flows = batches_in_flow(key.limits)
    together = max(1.0, (flows or 1) * size * mean_turns / each)
    replayed = tuple(merged(turns, together) for turns in sample)
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
    if key.care == 1.0:
        missed = _missed(draws[0], machine, key, shrink)
    else:  # A replay more, which says much the same.
        missed = model_of(msgspec.structs.replace(key, care=1.0)).machine.missed
    return Model(draws, phases, msgspec.structs.replace(machine, missed=missed), shrink)


def batches_in_flow(limits: Limits) -> int:
    """Batches replayed in one flow; 0: one batch after the other."""
    return min(MOST_FLOW, FLOW * max(1, limits.ahead)) if limits.in_flight_percent else 0


def _batch(sample: Sequence[Turns], size: int, draw: int) -> tuple[Turns, ...]:
    """The `draw`-th batch of a sample: the next `size` trajectories, every second round in the opposite order."""
    first = draw * size
    batch = tuple(sample[(first + index) % len(sample)] for index in range(size))
    return batch[::-1] if (first // len(sample)) % 2 else batch


def _missed(batch: Sequence[Turns], machine: Machine, key: Key, shrink: int) -> float:
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
        found = max(found, replay(batch, machine, *shrunk(*key.measured_on, shrink)).computed / turns)
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


def shrunk(prefill: int, decode: int, colocated: int, shrink: int) -> Counts:
    """The counts of a replay that has so many times fewer workers."""
    if shrink == 1:
        return prefill, decode, colocated
    if colocated:
        return 0, 0, max(1, round(colocated / shrink))
    return max(1, round(prefill / shrink)), max(1, round(decode / shrink)), 0
