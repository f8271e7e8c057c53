"""Figure 8: PEARL's advantage over RLBoost+ by batch size and by the trajectories' maximum length (paper 6.4)."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from services.simulator.whatif.paper.base import Claim, Figure, Sheet, claim
from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.runs import SMALL, Run, Runner
from services.simulator.whatif.policies import find
from services.simulator.whatif.report import plots
from services.simulator.whatif.report.html import Cell
from services.simulator.whatif.report.summary import Interval, interval
from services.simulator.whatif.result import PolicyResult
from services.simulator.whatif.settings import Settings

NAME: Final = "figure8"
GPUS: Final = 8
BATCHES: Final = (32, 64, 96, 128)
LENGTHS: Final = (8192, 16384, 24576, 32768)
POLICIES: Final = ("rlboost", "pearl-paper", "pearl")
TRAIN_BATCH: Final = 64
"""The paper's batch where the length varies."""
Point = tuple[int, int]
"""(batch, maximum length)"""


def figure(run: Runner, options: Options) -> Figure:
    """One parameter at a time, 16 training and 8 rollout GPUs, no preemptible ones."""
    points: list[Point] = [(batch, LENGTHS[-1]) for batch in BATCHES] + [
        (TRAIN_BATCH, length) for length in LENGTHS[:-1]
    ]
    tasks = {
        (point, policy, seed): Run(
            hardware=SMALL,
            policy=find(policy),
            settings=Settings(
                reserved_gpus=GPUS,
                most_preemptible_gpus=0,
                batch_trajectories=point[0],
                max_context_tokens=point[1],
            ),
            hours=options.fixed_hours,
            seed=seed,
        )
        for point in points
        for policy in POLICIES
        for seed in options.run_seeds
    }
    done = dict(zip(tasks, run.runs(list(tasks.values())), strict=True))

    def rate(point: Point, policy: str) -> Interval:
        return interval([done[point, policy, seed].throughput_tokens_per_s for seed in options.run_seeds])

    def gains(among: list[Point], policy: str) -> list[float]:
        return [100 * (rate(point, policy).mean / max(rate(point, "rlboost").mean, 1e-9) - 1) for point in among]

    by_batch = [(batch, LENGTHS[-1]) for batch in BATCHES]
    by_length = [(TRAIN_BATCH, length) for length in LENGTHS]
    claims: list[Claim] = []
    for policy, peak in (("rlboost", 64), ("pearl-paper", 96), ("pearl", 96)):
        best = max(by_batch, key=lambda point: rate(point, policy).mean)[0]
        claims.append(claim(f"batch size at which {policy} peaks", "6.4", peak, "trajectories", best, 0.0))
    for policy in ("pearl-paper", "pearl"):
        for text, among, paper in (("batch sizes", by_batch, (5.3, 63.7)), ("lengths", by_length, (9.8, 26.5))):
            found = gains(among, policy)
            for which, value, number in (("least", min(found), paper[0]), ("largest", max(found), paper[1])):
                claims.append(claim(f"{which} gain of {policy} over {text}", "6.4", number, "%", value, 5.0))
        falling = sum(rate(a, policy).mean >= rate(b, policy).mean for a, b in pairwise(by_length))
        claims.append(
            claim(f"steps to a longer limit at which {policy}'s throughput falls", "6.4", 3.0, "of 3", falling, 0.0)
        )
    return Figure(
        name=NAME,
        title="Figure 8: workload sensitivity",
        section="6.4",
        setting=f"Qwen3-8B, 16 training and {GPUS} rollout GPUs, {options.fixed_hours:g} h a run; training takes as much longer as the batch is larger.",
        claims=tuple(claims),
        differences=(
            _growth(done, (TRAIN_BATCH, LENGTHS[0]), (TRAIN_BATCH, LENGTHS[-1]), "maximum length", options),
            _growth(done, (BATCHES[0], LENGTHS[-1]), (BATCHES[-1], LENGTHS[-1]), "batch", options),
            "The paper does not say how training time changes with the batch; here it is in proportion. Its trajectories are not "
            "public: how many of them a limit cuts is not known.",
        ),
        sheets=(
            Sheet(
                "tokens/s",
                ("batch", "maximum length", *POLICIES),
                tuple(
                    (
                        Cell(str(point[0]), point[0]),
                        Cell(f"{point[1] // 1024}K", point[1]),
                        *(_cell(rate(point, policy)) for policy in POLICIES),
                    )
                    for point in (*by_batch, *by_length[:-1])
                ),
                (),
            ),
        ),
        drawings=tuple(
            (
                f"figure8{letter}",
                plots.lines(
                    f"Throughput by {text}, Qwen3-8B, simulated",
                    [
                        (policy, [(float(point[axis]), rate(point, policy).mean) for point in among])
                        for policy in POLICIES
                    ],
                    text,
                    "tokens/s",
                ),
                f"Simulated: swebench-mini, Qwen3-8B on H800, {options.fixed_hours:g} h, seeds {options.told_run_seeds}.",
            )
            for letter, text, among, axis in (
                ("a", "rollout batch size", by_batch, 0),
                ("b", "maximum trajectory length, tokens", by_length, 1),
            )
        ),
    )


def _growth(
    done: dict[tuple[Point, str, int], PolicyResult], least: Point, most: Point, what: str, options: Options
) -> str:
    """What a train step of the paper's PEARL consists of at both ends of a range."""

    def of(point: Point) -> tuple[float, float]:
        steps = [step for seed in options.run_seeds for step in done[point, "pearl-paper", seed].steps]
        count = max(1, len(steps))
        tokens = sum(step.rollout_tokens + step.trained_tokens for step in steps) / count
        return tokens, sum(step.end_s - step.start_s for step in steps) / count

    (few, short_s), (many, long_s) = of(least), of(most)
    return (
        f"From the least to the largest {what}, a train step of pearl-paper grows from {few:,.0f} to {many:,.0f} tokens and from "
        f"{short_s:.0f} to {long_s:.0f} s: throughput is the one over the other, and trained tokens count the whole context."
    )


def _cell(rate: Interval) -> Cell:
    return Cell(f"{rate.mean:,.0f}" + (f" ± {rate.half:,.0f}" if rate.count > 1 else ""), rate.mean)
