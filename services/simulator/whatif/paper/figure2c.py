"""Figure 2(c): throughput of colocation and of each P:D ratio over batch sizes, Qwen3-30B-A3B on 16 GPUs (paper 3.3)."""

from __future__ import annotations

from typing import Final

from services.simulator.whatif.paper.base import Figure, Sheet, claim
from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.runs import LARGE, Batch, Runner, ratios
from services.simulator.whatif.report import plots
from services.simulator.whatif.report.html import Cell, num
from services.simulator.whatif.report.summary import Interval, interval
from services.simulator.whatif.settings import Settings

NAME: Final = "figure2c"
WORKERS: Final = 8
BATCHES: Final = (32, 48, 64, 80, 96)
PAPER_GAINS: Final = {32: 9.7, 80: 1.4, 96: -6.1}
PAPER_BEST: Final = {48: (4, 4), 64: (5, 3)}


def figure(run: Runner, options: Options) -> Figure:
    """Every configuration on the same batches; the best ratio is chosen over the mean of the seeds."""
    every = [(0, 0), *ratios(WORKERS)]
    tasks = {
        (batch, ratio, seed): _task(batch, ratio, seed)
        for batch in BATCHES
        for ratio in every
        for seed in options.batch_seeds
    }
    done = dict(zip(tasks, run.batches(list(tasks.values())), strict=True))

    def rate(batch: int, ratio: tuple[int, int], seed: int) -> float:
        found = done[batch, ratio, seed]
        return found.generated / found.makespan_s

    def mean(batch: int, ratio: tuple[int, int]) -> float:
        return interval([rate(batch, ratio, seed) for seed in options.batch_seeds]).mean

    best = {batch: max(ratios(WORKERS), key=lambda ratio: mean(batch, ratio)) for batch in BATCHES}

    def gain(batch: int, ratio: tuple[int, int]) -> Interval:
        """Over colocation, seed by seed, per cent."""
        return interval(
            [100 * (rate(batch, ratio, seed) / rate(batch, (0, 0), seed) - 1) for seed in options.batch_seeds]
        )

    gains = [
        claim(f"best ratio over colocation, batch {batch}", "3.3", paper, "%", gain(batch, best[batch]), 4.0)
        for batch, paper in PAPER_GAINS.items()
    ]
    shortfalls = [
        claim(
            f"the paper's best ratio {prefill}P{decode}D at batch {batch}, behind the best simulated ({_name(best[batch])})",
            "3.3",
            0.0,
            "% slower",
            100 * (1 - mean(batch, (prefill, decode)) / mean(batch, best[batch])),
            1.0,
            "agrees if at most 1 % slower than the best",
        )
        for batch, (prefill, decode) in PAPER_BEST.items()
    ]
    colocated = [done[batch, (0, 0), seed] for batch in BATCHES for seed in options.batch_seeds]
    prefill_share = 1 - sum(each.decode_share for each in colocated) / len(colocated)
    names = [_name(ratio) for ratio in every]
    return Figure(
        name=NAME,
        title="Figure 2(c): execution modes and ratios over batch sizes",
        section="3.3",
        setting=f"{WORKERS} TP2 workers of Qwen3-30B-A3B on 16 H800, one batch of recorded trajectories at a time.",
        claims=(*gains, *shortfalls),
        differences=(
            f"Prefill takes {prefill_share:.1%} of the engines' busy time here (3.2 of the paper: 26.5 % of the time of the interval "
            f"that it shows), with {Settings().prefix_reuse:.0%} of the turns reusing their prefix, and the measured kernel times of an "
            "H800, which are nearly the least it can take. Separating prefill can gain no more than it takes, and the workers that "
            "disaggregation takes from decoding are missed.",
            "The paper's batches are of its own trajectories, which are not public; and a batch's makespan hangs on its longest one, "
            f"so that single batches scatter: seeds {options.told_batch_seeds} here.",
        ),
        sheets=(
            Sheet(
                "Generated tokens/s of a batch",
                ("batch", *names, "best ratio"),
                tuple(
                    (
                        Cell(str(batch), batch),
                        *(num(mean(batch, ratio)) for ratio in every),
                        _name(best[batch]),
                    )
                    for batch in BATCHES
                ),
                (),
            ),
        ),
        drawings=(
            (
                "figure2c",
                plots.grouped(
                    "Gain of each ratio over colocation, simulated",
                    [
                        (
                            f"batch {batch}",
                            [(each.mean, each.half) for each in (gain(batch, ratio) for ratio in every[1:])],
                        )
                        for batch in BATCHES
                    ],
                    names[1:],
                    "% over colocation",
                ),
                f"Simulated: swebench-mini, Qwen3-30B-A3B on H800, 8 workers, seeds {options.told_batch_seeds}.",
            ),
        ),
    )


def _task(batch: int, ratio: tuple[int, int], seed: int) -> Batch:
    prefill, decode = ratio
    colocated = 0 if prefill else WORKERS
    return Batch(hardware=LARGE, prefill=prefill, decode=decode, colocated=colocated, trajectories=batch, seed=seed)


def _name(ratio: tuple[int, int]) -> str:
    return f"{ratio[0]}P{ratio[1]}D" if ratio[0] else f"{WORKERS}C"
