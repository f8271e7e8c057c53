"""Numbers for people out of runs that differ by their seed only: means, confidence intervals, ratios, costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from services.environments import workload
from services.preemption_feed import traces
from services.simulator.whatif.result import Decided, PolicyResult, Result
from services.timing import hardware

BUILT_IN: Final = frozenset((*traces.BUILT_IN, *workload.BUILT_IN, *hardware.BUILT_IN))
"""Names of inputs that are no files."""

_T95: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95 %, two-sided, by degrees of freedom from 1 on."""
USES: Final[tuple[str, ...]] = ("prefill", "decode", "colocated", "training", "preparing", "switching", "idle")
"""Of a GPU, in the order in which they are drawn."""


class Interval(msgspec.Struct, frozen=True):
    """A mean and its 95 % confidence interval over seeds (Student's t); with one seed there is no interval."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def half(self) -> float:
        """Half its width."""
        return (self.high - self.low) / 2


def interval(values: Sequence[float]) -> Interval:
    """Mean and interval of independent values, at least one."""
    assert values
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, mean, mean, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    t = _T95[count - 2] if count - 2 < len(_T95) else 1.96 + 2.4 / (count - 1)
    half = t * deviation / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


class PolicySummary(msgspec.Struct, frozen=True, kw_only=True):
    """One policy over all seeds. `ratio`, `of_oracle`: seed by seed, then the mean."""

    name: str
    throughput: Interval
    ratio: Interval | None  # to the reference policy; None: the reference made nothing
    of_oracle: Interval | None  # share of the first oracle; None: no oracle
    cost: Interval | None  # per million tokens
    step_s: float
    wait_share: float  # of the time of the steps in which training waits for its batch
    staleness_max: int
    lost: int
    late_returns: int
    busy: float
    reward: float
    decisions: float
    preemptions: float
    borrows: float
    denied: float
    uses: tuple[tuple[str, float], ...]  # share of the GPU-hours that were there, by use
    models: str
    leaves_out: str


def priced(result: Result, spot: float | None, reserved: float | None) -> Result:
    """With `cost_per_million_tokens` at these prices for a GPU-hour; unchanged where none is given.

    Tokens are counted as in the throughput (paper 6.1: rollout and training). The whole time is paid for, also that after
    the last whole step: so the tokens are the throughput's over the whole time. A price that is not given counts as 0.
    """
    if spot is None and reserved is None:
        return result
    policies = {
        name: _priced(policy, spot or 0.0, reserved or 0.0, result.hours) for name, policy in result.policies.items()
    }
    return msgspec.structs.replace(result, policies=policies)


def _priced(policy: PolicyResult, spot: float, reserved: float, hours: float) -> PolicyResult:
    paid = (policy.reserved_gpu_hours + policy.training_gpu_hours) * reserved + policy.preemptible_gpu_hours * spot
    tokens = policy.throughput_tokens_per_s * hours * 3600
    return msgspec.structs.replace(policy, cost_per_million_tokens=paid / tokens * 1e6 if tokens > 0 else None)


def summarise(results: Sequence[Result], reference: str) -> list[PolicySummary]:
    """Each policy, in the order of the first run. All runs have the same policies."""
    assert results and all(set(each.policies) == set(results[0].policies) for each in results)
    return [_summary(name, results, reference) for name in results[0].policies]


def intervals(results: Sequence[Result], reference: str = "") -> dict[str, object]:
    """Of each policy, as plain data: throughput, its ratio to the reference, and its share of the oracle, with 95 % intervals."""

    def plain(each: Interval | None) -> dict[str, float] | None:
        return None if each is None else {"mean": each.mean, "low": each.low, "high": each.high}

    chosen = reference_of(results[0], reference)
    policies = {
        each.name: {
            "throughput_tokens_per_s": plain(each.throughput),
            "ratio": plain(each.ratio),
            "of_oracle": plain(each.of_oracle),
            "cost_per_million_tokens": plain(each.cost),
            "staleness_max": each.staleness_max,
            "reward_mean": each.reward,
        }
        for each in summarise(results, chosen)
    }
    return {"reference": chosen, "seeds": [each.seed for each in results], "policies": policies}


def base_name(name: str) -> str:
    """A file's name without its folder: reports are passed on. One that is called as a built-in input is, is told from it."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{base} (a file)" if base != name and base in BUILT_IN else base


def reference_of(result: Result, wanted: str = "") -> str:
    """The policy that others are compared with: `wanted`, else "roll", else the first."""
    for name in (wanted, "roll"):
        if name in result.policies:
            return name
    return next(iter(result.policies))


def _summary(name: str, results: Sequence[Result], reference: str) -> PolicySummary:
    mine = [result.policies[name] for result in results]
    ratios = [
        one.throughput_tokens_per_s / base
        for one, result in zip(mine, results, strict=True)
        if (base := result.policies[reference].throughput_tokens_per_s) > 0
    ]
    shares = [
        one.throughput_tokens_per_s / result.oracle.throughput_tokens_per_s
        for one, result in zip(mine, results, strict=True)
        if result.oracle.throughput_tokens_per_s > 0
    ]
    costs = [one.cost_per_million_tokens for one in mine if one.cost_per_million_tokens is not None]
    waited = sum(step.wait_s for one in mine for step in one.steps)
    stepped = sum(step.end_s - step.start_s for one in mine for step in one.steps)

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    return PolicySummary(
        name=name,
        throughput=interval([one.throughput_tokens_per_s for one in mine]),
        ratio=interval(ratios) if ratios else None,
        of_oracle=interval(shares) if shares else None,
        cost=interval(costs) if len(costs) == len(mine) else None,
        step_s=mean([one.mean_train_step_s for one in mine]),
        wait_share=waited / stepped if stepped else 0.0,
        staleness_max=max(one.staleness_max for one in mine),
        lost=sum(one.trajectories_lost for one in mine),
        late_returns=sum(one.late_returns for one in mine),
        busy=mean([one.gpu_busy_fraction for one in mine]),
        reward=mean([one.reward_mean for one in mine]),
        decisions=mean([one.decisions for one in mine]),
        preemptions=mean([one.preemptions for one in mine]),
        borrows=mean([one.borrows for one in mine]),
        denied=mean([one.borrows_denied for one in mine]),
        uses=use_shares(mine),
        models=mine[0].models,
        leaves_out=mine[0].leaves_out,
    )


def use_shares(policies: Sequence[PolicyResult]) -> tuple[tuple[str, float], ...]:
    """Share of the GPU-hours that were there, by use; empty where no spans were kept."""
    seconds: dict[str, float] = {use: 0.0 for use in USES}
    for policy in policies:
        for span in policy.spans:
            seconds[span.use] = seconds.get(span.use, 0.0) + span.end_s - span.start_s
    whole = math.fsum(seconds.values())
    return tuple((use, value / whole) for use, value in seconds.items()) if whole > 0 else ()


def gains(decided: Sequence[Decided]) -> list[tuple[int, float, float]]:
    """(index, predicted, realised) of each decision that changed what runs: the share of a batch's time that it saves.

    Against the decision before it under which a whole batch ran, too: predicted by the two predictions, realised by the two
    batches. So a gain has all that the change brought: GPUs that came, were lent or went, and another mode or ratio.
    """
    found: list[tuple[int, float, float]] = []
    before: Decided | None = None
    for index, each in enumerate(decided):
        if not each.predicted_s or not each.realised_s:
            continue
        if before is not None and _runs(before) != _runs(each):
            assert before.predicted_s and before.realised_s
            found.append((index, 1 - each.predicted_s / before.predicted_s, 1 - each.realised_s / before.realised_s))
        before = each
    return found


def _runs(decided: Decided) -> tuple[int, int, int, bool]:
    return decided.prefill, decided.decode, decided.colocated, decided.borrow
