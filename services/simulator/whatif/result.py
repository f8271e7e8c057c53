"""What a what-if run found: the JSON of `pearl simulate run`, and all that its reports are drawn from. Pure.

Times are simulated seconds from the trace's beginning; every figure here is simulated.
"""

from __future__ import annotations

import msgspec


class Budget(msgspec.Struct, frozen=True):
    """From `at_s` on: how many GPUs there are. Reserved ones are always there; training's are the job's own."""

    at_s: float
    reserved_gpus: int
    preemptible_gpus: int
    training_gpus: int


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """A decision: what was chosen, what was predicted for it and for what ran before, and what then happened."""

    at_s: float
    cause: str
    mode: str  # "colocated", "disaggregated", "paused"
    prefill: int
    decode: int
    colocated: int
    borrow: bool
    reason: str
    predicted_s: float | None = None  # of a batch's rollout, under what was chosen
    incumbent_s: float | None = None  # the same, under what ran before
    realised_s: float | None = None  # of the first whole batch under it; None: it did not last so long


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A training step: from the end of the one before to its own end."""

    batch: int
    start_s: float
    end_s: float
    rollout_tokens: int  # generated for this batch
    trained_tokens: int  # contexts and replies that the update saw
    train_s: float
    wait_s: float  # training waited so long for its batch
    staleness: int  # the oldest token's, in versions
    toggled: bool  # a borrow began or ended in it
    reward: float  # mean of the recorded trajectories' rewards; the policy does not learn here


class Span(msgspec.Struct, frozen=True):
    """A GPU's use: "prefill", "decode", "colocated", "training", "preparing", "switching", "idle"; between spans it is not there."""

    gpu: str  # "n0/0"
    start_s: float
    end_s: float
    use: str


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one trace. The first fields are those that CLI users rely on."""

    throughput_tokens_per_s: float  # paper 6.1: tokens of rollout and training, over the time of the steps
    train_steps: int
    mean_train_step_s: float
    staleness_max: int
    trajectories_lost: int
    gpu_busy_fraction: float
    decisions: int
    reward_mean: float = 0.0
    generated_tokens: int = 0
    regenerated_tokens: int = 0
    preemptions: int = 0
    borrows: int = 0
    borrows_denied: int = 0
    late_returns: int = 0
    reserved_gpu_hours: float = 0.0
    preemptible_gpu_hours: float = 0.0
    training_gpu_hours: float = 0.0
    cost_per_million_tokens: float | None = None  # in the user's currency; None: no prices were given
    models: str = ""  # which system it stands for
    leaves_out: str = ""  # what of that system it does not model
    steps: tuple[Step, ...] = ()
    decided: tuple[Decided, ...] = ()
    spans: tuple[Span, ...] = ()
    throughput: tuple[tuple[float, float], ...] = ()  # (second, tokens/s) at fixed intervals


class Oracle(msgspec.Struct, frozen=True, kw_only=True):
    """What a clairvoyant choice at no switching cost would reach; `name`: "overlapped" or "batch-synchronous"."""

    throughput_tokens_per_s: float
    name: str = "overlapped"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run of `pearl simulate run`."""

    trace: str
    workload: str
    hardware: str
    hours: float
    seed: int
    settings: dict[
        str, float | int | str
    ] = {}  # batch size, staleness bound, training seconds, ... with units in their names
    budget: tuple[Budget, ...] = ()
    policies: dict[str, PolicyResult] = {}
    oracle: Oracle = Oracle(throughput_tokens_per_s=0.0)
    oracles: tuple[Oracle, ...] = ()
    wall_s: float = 0.0
