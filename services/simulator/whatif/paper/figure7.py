"""Figure 7: the ablation on fixed allocations: ROLL, + A (best P:D ratio), + B (ungated lending), + C (the gate) (paper 6.3)."""

from __future__ import annotations

from typing import Final

import msgspec

from services.simulator.whatif.paper.base import Claim, Figure, Sheet, claim
from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.runs import LARGE, MODELS, SMALL, Batch, Run, Runner, ratios
from services.simulator.whatif.policies import Policy, find
from services.simulator.whatif.report import plots
from services.simulator.whatif.report.html import Cell, Row
from services.simulator.whatif.report.summary import Interval, interval
from services.simulator.whatif.result import PolicyResult
from services.simulator.whatif.settings import Settings

Done = dict[tuple[str, int, str, int], PolicyResult]
NAME: Final = "figure7"
GPUS: Final = (4, 8, 12, 16)
STAGES: Final = ("+A", "+A+B", "+A+B+C", "pearl")
PAPER_AT_4: Final = {SMALL: (-20.6, 93.6, 92.3), LARGE: (-30.9, 118.3, 129.5)}
PAPER_BEYOND: Final = {
    SMALL: ((12.8, 15.3), (16.2, 26.5), (17.9, 26.5)),
    LARGE: ((7.8, 8.9), (9.4, 26.2), (9.2, 27.5)),
}


def figure(run: Runner, options: Options) -> Figure:
    """A's ratio is the best of all measured on single batches. `pearl` is this product, free to choose, for comparison."""
    best = best_ratios(run, options)
    tasks = {
        (hardware, gpus, stage, seed): Run(
            hardware=hardware,
            policy=_policy(stage, best[hardware, gpus]),
            settings=Settings(reserved_gpus=gpus, most_preemptible_gpus=0),
            hours=options.fixed_hours,
            seed=seed,
        )
        for hardware in MODELS
        for gpus in GPUS
        for stage in ("roll", *STAGES)
        for seed in options.run_seeds
    }
    done = dict(zip(tasks, run.runs(list(tasks.values())), strict=True))

    def gain(hardware: str, gpus: int, stage: str) -> Interval:
        rates = [
            (
                done[hardware, gpus, stage, seed].throughput_tokens_per_s,
                done[hardware, gpus, "roll", seed].throughput_tokens_per_s,
            )
            for seed in options.run_seeds
        ]
        return interval([100 * (mine / max(base, 1e-9) - 1) for mine, base in rates])

    claims: list[Claim] = []
    for hardware, model in MODELS.items():
        for stage, paper in zip(STAGES, PAPER_AT_4[hardware], strict=False):
            claims.append(
                claim(f"{stage} over ROLL, 4 GPUs, {model}", "6.3", paper, "%", gain(hardware, 4, stage), 8.0)
            )
        for stage, paper in zip(STAGES, PAPER_BEYOND[hardware], strict=False):
            found = [gain(hardware, gpus, stage).mean for gpus in GPUS[1:]]
            text = f"{stage} over ROLL, mean of 8 to 16 GPUs, {model}"
            claims.append(claim(text, "6.3", paper, "%", sum(found) / len(found), 4.0))
    return Figure(
        name=NAME,
        title="Figure 7: ablation",
        section="6.3",
        setting=f"16 training GPUs and a fixed pool of rollout GPUs, {options.fixed_hours:g} h a run.",
        claims=tuple(claims),
        differences=(
            "A forces disaggregation at a fixed ratio even where colocation is better, as the paper does at 4 GPUs; with lent "
            "GPUs the ratio is kept in proportion. What prefill costs decoding in these engines is told at Figure 2(c): "
            "disaggregation can gain no more than that.",
            *(_idle(done, hardware) for hardware in MODELS),
        ),
        sheets=tuple(
            Sheet(
                f"{model}: tokens/s (gain over ROLL)",
                ("rollout GPUs", "ROLL", "ratio of A", *STAGES),
                tuple(
                    _row(
                        done,
                        hardware,
                        gpus,
                        best[hardware, gpus],
                        {stage: gain(hardware, gpus, stage) for stage in STAGES},
                    )
                    for gpus in GPUS
                ),
                (),
            )
            for hardware, model in MODELS.items()
        ),
        drawings=tuple(
            (
                f"figure7-{hardware}",
                plots.grouped(
                    f"Ablation, {model}, simulated",
                    [
                        (
                            f"{gpus} GPUs",
                            [(each.mean, each.half) for each in (gain(hardware, gpus, stage) for stage in STAGES)],
                        )
                        for gpus in GPUS
                    ],
                    list(STAGES),
                    "% over ROLL",
                ),
                f"Simulated: swebench-mini, {model} on H800, {options.fixed_hours:g} h, seeds {options.told_run_seeds}.",
            )
            for hardware, model in MODELS.items()
        ),
    )


def _idle(done: Done, hardware: str) -> str:
    """What bounds the gain of lending: how long training GPUs are idle."""
    parts: list[str] = []
    for gpus in GPUS:
        steps = [step for key, each in done.items() if key[:3] == (hardware, gpus, "roll") for step in each.steps]
        whole = sum(step.end_s - step.start_s for step in steps)
        parts.append(
            f"{sum(step.wait_s for step in steps) / whole:.0%} at {gpus} GPUs" if whole else f"- at {gpus} GPUs"
        )
    return f"{MODELS[hardware]}: under ROLL, training waits this share of a step for its batch: {', '.join(parts)}. Lending can use no more."


def best_ratios(run: Runner, options: Options) -> dict[tuple[str, int], tuple[int, int]]:
    """(hardware, GPUs) -> the P:D ratio with the least makespan of a batch, mean of the seeds."""
    tasks = {
        (hardware, gpus, ratio, seed): Batch(hardware=hardware, prefill=ratio[0], decode=ratio[1], seed=seed)
        for hardware in MODELS
        for gpus in GPUS
        for ratio in ratios(gpus // 2)
        for seed in options.batch_seeds
    }
    done = dict(zip(tasks, run.batches(list(tasks.values())), strict=True))
    return {
        (hardware, gpus): min(
            ratios(gpus // 2),
            key=lambda ratio: sum(done[hardware, gpus, ratio, seed].makespan_s for seed in options.batch_seeds),
        )
        for hardware in MODELS
        for gpus in GPUS
    }


def _policy(stage: str, ratio: tuple[int, int]) -> Policy:
    roll = find("roll")
    static = f"static-pd:{ratio[0]}:{ratio[1]}"
    match stage:
        case "roll":
            return roll
        case "+A":
            return msgspec.structs.replace(roll, name=stage, decision=static)
        case "+A+B":
            return msgspec.structs.replace(roll, name=stage, decision=static, lending=True, gated=False)
        case "+A+B+C":
            return msgspec.structs.replace(roll, name=stage, decision=static, lending=True)
        case _:
            return find(stage)


def _row(done: Done, hardware: str, gpus: int, ratio: tuple[int, int], gains: dict[str, Interval]) -> Row:
    rates = {
        stage: interval([done[key].throughput_tokens_per_s for key in done if key[:3] == (hardware, gpus, stage)]).mean
        for stage in ("roll", *STAGES)
    }
    cells = [Cell(f"{rates[stage]:,.0f} ({gains[stage].mean:+.1f} %)", rates[stage]) for stage in STAGES]
    return (Cell(str(gpus), gpus), Cell(f"{rates['roll']:,.0f}", rates["roll"]), f"{ratio[0]}P{ratio[1]}D", *cells)
