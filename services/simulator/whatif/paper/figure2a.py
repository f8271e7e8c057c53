"""Figure 2(a): rollout and training durations as rollout scales out, Qwen3-8B, colocated (paper 3.1)."""

from __future__ import annotations

from typing import Final

from services.simulator.whatif.paper.base import Figure, Sheet, claim
from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.runs import SMALL, Batch, Batched, Runner
from services.simulator.whatif.report import plots
from services.simulator.whatif.report.html import num
from services.simulator.whatif.report.summary import Interval, interval

NAME: Final = "figure2a"
TRAIN_S: Final = 163.8
"""Paper 3.1, on 8 GPUs: taken over, not simulated."""
WORKERS: Final = (8, 12, 16)
BATCH: Final = 64


def figure(run: Runner, options: Options) -> Figure:
    """A batch on 16, 24 and 32 GPUs; and one trajectory a worker, the paper's idealized case."""
    counts = (*WORKERS, BATCH)
    tasks = [Batch(hardware=SMALL, colocated=count, seed=seed) for count in counts for seed in options.batch_seeds]
    done = run.batches(tasks)
    by_count = {
        count: done[index * len(options.batch_seeds) : (index + 1) * len(options.batch_seeds)]
        for index, count in enumerate(counts)
    }

    def times(count: int) -> list[float]:
        return [each.makespan_s for each in by_count[count]]

    def saved(more: int, fewer: int) -> Interval:
        """Per cent of the time on 8 workers, seed by seed."""
        return interval([100 * (a - b) / base for a, b, base in zip(times(more), times(fewer), times(8), strict=True)])

    alone = interval([each.mean_s for each in by_count[BATCH]])
    least, most = (interval([value / TRAIN_S for value in times(count)]) for count in (16, 8))
    idle = interval([100 * max(0.0, 1 - TRAIN_S / each.mean_s) for each in by_count[BATCH]])
    everything = [each for count in WORKERS for each in by_count[count]]
    return Figure(
        name=NAME,
        title="Figure 2(a): rollout and training durations",
        section="3.1",
        setting=f"{BATCH} trajectories, colocated TP2 workers of Qwen3-8B on H800; training takes the paper's {TRAIN_S} s.",
        claims=(
            claim("rollout time saved by 24 GPUs instead of 16", "3.1", -10.3, "%", saved(12, 8), 4.0),
            claim("saved further by 32 GPUs (of the time on 16)", "3.1", -8.9, "%", saved(16, 12), 4.0),
            claim("rollout over training time, 32 GPUs", "3.1", 4.5, "times", least, 0.5),
            claim("rollout over training time, 16 GPUs", "3.1", 5.7, "times", most, 0.6),
            claim("mean trajectory alone on a worker", "3.1", 216.3, "s", alone, 22.0),
            claim("training GPUs idle even then", "3.1", 24.3, "% of time", idle, 5.0),
        ),
        differences=why(everything, alone.mean),
        sheets=(
            Sheet(
                "Rollout time of a batch",
                ("GPUs", "rollout s", "mean trajectory s", "decode's share of engine time"),
                tuple(
                    (
                        num(2.0 * count),
                        num(interval(times(count)).mean, ".1f"),
                        num(interval([each.mean_s for each in by_count[count]]).mean, ".1f"),
                        num(100 * interval([each.decode_share for each in by_count[count]]).mean, ".0f", " %"),
                    )
                    for count in counts
                ),
                (),
            ),
        ),
        drawings=(
            (
                "figure2a",
                plots.grouped(
                    "Rollout and training durations, simulated",
                    [
                        (
                            f"{2 * count} GPUs",
                            [(interval(times(count)).mean, interval(times(count)).half), (TRAIN_S, 0.0)],
                        )
                        for count in WORKERS
                    ],
                    ["rollout (simulated)", "training (paper)"],
                    "seconds",
                ),
                f"Simulated: swebench-mini, Qwen3-8B on H800, seeds {options.told_batch_seeds}.",
            ),
        ),
    )


def why(done: list[Batched], alone_s: float) -> tuple[str, ...]:
    """What the recorded trajectories are, beside what is known of the paper's."""
    count = len(done)
    replies = sum(each.generated for each in done) / (count * BATCH)
    turns = sum(each.turns for each in done) / (count * BATCH)
    env = sum(each.env_mean_s for each in done) / count
    tail = sum(each.makespan_s / each.mean_s for each in done) / count
    return (
        f"The paper's trajectories are not public. The recorded ones have {turns:.0f} turns and {replies:,.0f} generated tokens "
        f"on average and wait {env:.0f} s for their environment; alone on a worker one takes {alone_s:.0f} s, the paper's "
        f"216.3 s. So rollout is a smaller multiple of the training time here, and every gain that comes from rollout being "
        "the bottleneck is smaller.",
        f"The last trajectory of a batch ends at {tail:.1f} times the mean: the makespan hangs on the longest one, which more "
        "workers barely shorten.",
    )
