"""Figure 5: average throughput of each system, model and segment (paper 6.2)."""

from __future__ import annotations

from typing import Final

from services.simulator.whatif.paper import segments
from services.simulator.whatif.paper.base import Claim, Figure, Sheet, claim
from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.runs import LARGE, MODELS, SEGMENTS, SMALL, Runner
from services.simulator.whatif.report import plots
from services.simulator.whatif.report.html import Cell, num
from services.simulator.whatif.report.summary import Interval, interval

NAME: Final = "figure5"
OVER_RLBOOST: Final = {SMALL: (5.9, 26.9, 10.6), LARGE: (7.4, 36.3, 19.0)}
OVER_ROLL: Final = {SMALL: (2.17, 2.37), LARGE: (2.43, 2.79)}


def figure(run: Runner, options: Options) -> Figure:
    """Ratios are taken seed by seed. The paper's PEARL is `pearl-paper`; this product's, `pearl`, stands beside it."""
    done = segments.runs(run, options)

    def ratio(hardware: str, segment: str, policy: str, other: str) -> Interval:
        pairs = zip(done[hardware, segment, policy], done[hardware, segment, other], strict=True)
        return interval(
            [mine.throughput_tokens_per_s / max(base.throughput_tokens_per_s, 1e-9) for mine, base in pairs]
        )

    claims: list[Claim] = []
    for hardware, model in MODELS.items():
        for segment, paper in zip(SEGMENTS, OVER_RLBOOST[hardware], strict=True):
            for policy in ("pearl-paper", "pearl"):
                found = ratio(hardware, segment, policy, "rlboost")
                gain = Interval(100 * (found.mean - 1), 100 * (found.low - 1), 100 * (found.high - 1), found.count)
                text = f"{policy} over RLBoost+, {model}, {_short(segment)}"
                claims.append(claim(text, "6.2", paper, "%", gain, 5.0))
        for policy in ("pearl-paper", "pearl"):
            means = [sum(ratio(hardware, segment, policy, "roll").mean for segment in SEGMENTS) / len(SEGMENTS)]
            claims.append(
                claim(f"{policy} over ROLL, {model}, mean of segments", "6.2", OVER_ROLL[hardware], "x", means[0], 0.2)
            )
            ahead = sum(ratio(hardware, segment, policy, "roll-large").mean > 1 for segment in SEGMENTS)
            claims.append(
                claim(f"segments on which {policy} is ahead of ROLL-Large, {model}", "6.2", 3.0, "of 3", ahead, 0.0)
            )
    return Figure(
        name=NAME,
        title="Figure 5: average system throughput",
        section="6.2",
        setting=f"The three segments, {options.hours:g} h each; 16 training GPUs, 4 reserved and up to 12 preemptible rollout GPUs.",
        claims=tuple(claims),
        differences=segments.bounds(run, options, done),
        sheets=tuple(
            Sheet(
                f"{model}: tokens/s (times ROLL); staleness and reward",
                ("segment", *segments.POLICIES, "staleness at most", "reward"),
                tuple(
                    (
                        _short(segment),
                        *(
                            _cell(done, hardware, segment, policy, ratio(hardware, segment, policy, "roll"))
                            for policy in segments.POLICIES
                        ),
                        _most_stale(done, hardware, segment),
                        _rewards(done, hardware, segment),
                    )
                    for segment in SEGMENTS
                ),
            )
            for hardware, model in MODELS.items()
        ),
        drawings=tuple(
            (
                f"figure5-{hardware}",
                plots.grouped(
                    f"Throughput over ROLL's, {model}, simulated",
                    [
                        (
                            _short(segment),
                            [
                                (found.mean, found.half)
                                for policy in segments.POLICIES
                                for found in [ratio(hardware, segment, policy, "roll")]
                            ],
                        )
                        for segment in SEGMENTS
                    ],
                    list(segments.POLICIES),
                    "x ROLL",
                ),
                f"Simulated: swebench-mini, {model} on H800, {options.hours:g} h, seeds {options.told_run_seeds}.",
            )
            for hardware, model in MODELS.items()
        ),
    )


def _short(segment: str) -> str:
    return segment.removeprefix("bamboo-").replace("segment", "segment ")


def _cell(done: segments.Runs, hardware: str, segment: str, policy: str, ratio: Interval) -> Cell:
    rate = interval([each.throughput_tokens_per_s for each in done[hardware, segment, policy]]).mean
    return Cell(f"{rate:,.0f} ({ratio.mean:.2f}x)", rate)


def _most_stale(done: segments.Runs, hardware: str, segment: str) -> Cell:
    return num(max(each.staleness_max for policy in segments.POLICIES for each in done[hardware, segment, policy]))


def _rewards(done: segments.Runs, hardware: str, segment: str) -> Cell:
    means = [
        interval([each.reward_mean for each in done[hardware, segment, policy]]).mean for policy in segments.POLICIES
    ]
    return Cell(f"{min(means):.3f} to {max(means):.3f}", max(means))
