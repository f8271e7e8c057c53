"""The end-to-end runs that Figures 5 and 6 and Table 3 share: each system on each segment with each model (paper 6.1)."""

from __future__ import annotations

from typing import Final

from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.runs import MODELS, SEGMENTS, Batch, Run, Runner
from services.simulator.whatif.policies import find
from services.simulator.whatif.result import PolicyResult

POLICIES: Final = ("roll", "roll-large", "rlboost", "pearl-paper", "pearl")
Runs = dict[tuple[str, str, str], list[PolicyResult]]
"""(hardware, segment, policy) -> a result a seed."""


def runs(run: Runner, options: Options) -> Runs:
    """All of them."""
    tasks = {
        (hardware, segment, policy, seed): Run(
            hardware=hardware, policy=find(policy), trace=segment, hours=options.hours, seed=seed
        )
        for hardware in MODELS
        for segment in SEGMENTS
        for policy in POLICIES
        for seed in options.run_seeds
    }
    done = run.runs(list(tasks.values()))
    found: Runs = {}
    for (hardware, segment, policy, _), result in zip(tasks, done, strict=True):
        found.setdefault((hardware, segment, policy), []).append(result)
    return found


def bounds(run: Runner, options: Options, done: Runs) -> tuple[str, ...]:
    """What bounds the throughput in these runs: the longest trajectory of a batch, and training."""
    lines: list[str] = []
    for hardware, model in MODELS.items():
        alone = run.batches([Batch(hardware=hardware, colocated=64, seed=seed) for seed in options.batch_seeds])
        longest_s = sum(each.makespan_s for each in alone) / len(alone)
        shares: list[str] = []
        step_s: dict[str, float] = {}
        for policy in ("roll", "rlboost", "pearl-paper", "pearl"):
            steps = [step for segment in SEGMENTS for each in done[hardware, segment, policy] for step in each.steps]
            if steps:
                whole = sum(step.end_s - step.start_s for step in steps)
                step_s[policy] = whole / len(steps)
                shares.append(
                    f"{policy} {step_s[policy]:.0f} s, {sum(step.train_s for step in steps) / whole:.0%} of it training"
                )
        told = f"{model}: a train step takes on average: {'; '.join(shares)}."
        if "roll" in step_s:
            told += (
                f" Even with a worker for each of its 64 trajectories a batch takes {longest_s:.0f} s, for its longest one: one batch "
                f"after another, no rollout is more than {step_s['roll'] / longest_s:.2f}x as fast as ROLL's here, whatever GPUs "
                "come or are lent. Only an early start of the next batch goes beyond. The paper's trajectories, which are not "
                "public, leave more to gain."
            )
        lines.append(told)
    return tuple(lines)
