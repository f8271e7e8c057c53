"""Figure 6: throughput of each train step over the segments (paper 6.2)."""

from __future__ import annotations

from typing import Final

from services.preemption_feed.traces import load as load_trace
from services.simulator.whatif.paper import segments
from services.simulator.whatif.paper.base import Claim, Figure, claim
from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.runs import MODELS, SEGMENTS, WORKLOAD, Runner
from services.simulator.whatif.report import plots
from services.simulator.whatif.report.summary import interval
from services.simulator.whatif.result import PolicyResult, Result
from services.simulator.whatif.run import budget_of
from services.simulator.whatif.settings import Settings

NAME: Final = "figure6"
DIP: Final = "bamboo-segment2"
SEGMENT_S: Final = 7200.0
SETTLE_S: Final = 600.0
"""A step that began in the dip ends within this."""


def figure(run: Runner, options: Options) -> Figure:
    """The first seed's curves; of the dip in segment 2, the fall of each system against its own mean before."""
    done = segments.runs(run, options)
    begin_s, end_s = dip()
    simulated = options.hours * 3600 >= end_s + SETTLE_S
    claims: list[Claim] = []
    for hardware, model in MODELS.items():
        falls = {
            policy: interval([fall(each, begin_s, end_s) for each in done[hardware, DIP, policy]])
            for policy in ("rlboost", "pearl-paper", "pearl")
        }
        for policy in ("pearl-paper", "pearl"):
            claims.append(
                claim(
                    f"{policy} falls less than RLBoost+ in segment 2's reduction, {model}",
                    "6.2",
                    (1.0, 100.0),
                    "points",
                    falls["rlboost"].mean - falls[policy].mean if simulated else None,
                    0.0,
                    f"RLBoost+ falls by {falls['rlboost'].mean:.0f} %, {policy} by {falls[policy].mean:.0f} %; the paper says that "
                    "RLBoost+ drops more sharply, and gives no number: at least one point is asked for here"
                    if simulated
                    else "the simulated hours end before it",
                )
            )
    drawings = tuple(
        (
            f"figure6-{hardware}-{segment.removeprefix('bamboo-')}",
            plots.throughput(_result(done, hardware, segment, options)),
            f"Simulated: {segment}, swebench-mini, {model} on H800, {options.hours:g} h, seed 0.",
        )
        for hardware, model in MODELS.items()
        for segment in SEGMENTS
    )
    return Figure(
        name=NAME,
        title="Figure 6: throughput over time",
        section="6.2",
        setting=f"As Figure 5. The reduction of segment 2: minutes {begin_s / 60:.0f} to {end_s / 60:.0f}, where the fewest GPUs are there.",
        claims=tuple(claims),
        differences=segments.bounds(run, options, done),
        drawings=drawings,
    )


def dip() -> tuple[float, float]:
    """The longest time of segment 2 with its fewest GPUs."""
    steps = load_trace(DIP).steps
    least = min(step.gpus for step in steps)
    ends = [*(step.time_s for step in steps[1:]), SEGMENT_S]
    spans = [(step.time_s, end) for step, end in zip(steps, ends, strict=True) if step.gpus == least]
    return max(spans, key=lambda span: span[1] - span[0])


def fall(result: PolicyResult, begin_s: float, end_s: float) -> float:
    """By how many per cent the steps that end in the dip are below those before it."""

    def rate(since_s: float, until_s: float) -> float:
        steps = [step for step in result.steps if since_s < step.end_s <= until_s]
        time_s = sum(step.end_s - step.start_s for step in steps)
        return sum(step.rollout_tokens + step.trained_tokens for step in steps) / time_s if time_s else 0.0

    before, within = rate(0.0, begin_s), rate(begin_s, end_s + SETTLE_S)
    return 100 * (1 - within / before) if before else 0.0


def _result(done: segments.Runs, hardware: str, segment: str, options: Options) -> Result:
    policies = {policy: done[hardware, segment, policy][0] for policy in segments.POLICIES}
    return Result(
        trace=segment,
        workload=WORKLOAD,
        hardware=hardware,
        hours=options.hours,
        seed=0,
        budget=budget_of(load_trace(segment), Settings(), options.hours * 3600),
        policies=policies,
    )
