"""The end-to-end runs that Figures 5 and 6 and Table 3 share: each system on each segment with each model (paper 6.1)."""

from __future__ import annotations

from typing import Final

from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.runs import MODELS, SEGMENTS, Run, Runner
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


def bounds(done: Runs) -> tuple[str, ...]:
    """What bounds the throughput in these runs: the step's parts, measured."""
    lines: list[str] = []
    for hardware, model in MODELS.items():
        parts: list[str] = []
        for policy in ("roll", "rlboost", "pearl-paper", "pearl"):
            steps = [step for segment in SEGMENTS for each in done[hardware, segment, policy] for step in each.steps]
            if steps:
                whole = sum(step.end_s - step.start_s for step in steps)
                parts.append(f"{policy} {sum(step.train_s for step in steps) / whole:.0%}")
        lines.append(
            f"{model}: training itself takes this share of a train step: {', '.join(parts)}. A train step cannot be shorter than "
            "its training, so what remains is all that a better rollout could still save. The paper's rollout takes 4.5 to 5.7 "
            "times as long as training (3.1); that of the recorded, shorter trajectories does not."
        )
    return tuple(lines)
