"""`pearl bench policies`: the demo's rollout throughput with the planner and with fixed policies, one after the other.

Each runs for the same time on the same trace with the same seed: same GPUs at the same moments, same gate for lending,
same router. Only `decision.policy` differs. Tokens are counted from the event stream, in the same span of the trace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from messages.ids import Zone
from messages.pipeline_scheduler import StepFinished
from services import jobfile
from services.checker.collect import check
from services.connect import connect
from services.jobfile import JobFile, rollout_slots
from services.monitor.history import PlanFold, changes_of
from services.monitor.lending import lending_of
from services.monitor.report import count_plans, read_events, rollout_throughput
from services.supervisor.service import Supervisor

DEFAULT = ("planner", "colocated", "static-pd:1:1", "static-pd:3:1")
"""What is compared where nothing else is asked for: the planner, one mode, and the other at an even and a skewed ratio."""
SKIP_S = 20.0
"""Left out at the beginning of each run: processes start, and the first trajectories are on their way."""
LEAST_S = SKIP_S + 10.0
"""A shorter run would measure almost nothing."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's run."""

    policy: str
    tokens_per_s: float
    train_steps: int
    seconds: float
    violations: int
    plans: dict[str, int]
    borrows: dict[str, int]


async def run_policy(job_path: Path, seconds: float) -> Outcome:
    """Run a job for so long and count. The job file says which policy. Raises ConfigError."""
    job: JobFile = jobfile.load(job_path)
    supervisor = Supervisor(job, job_path)
    begun = time.monotonic()
    try:
        await supervisor.start()
        await asyncio.sleep(max(0.0, seconds - (time.monotonic() - begun)))
        bus = await connect(job, "monitor")
        try:
            timed = await read_events(bus, job.job.name)
            report = await check(bus, job)
        finally:
            await bus.close()
    finally:
        await supervisor.stop()
    events = [event for _, event in timed]
    changes = changes_of(events, PlanFold.of(job))
    overlap = {slot.worker for slot in rollout_slots(job) if slot.zone is Zone.OVERLAP}
    return Outcome(
        policy=job.decision.policy,
        tokens_per_s=rollout_throughput(timed, skip_s=SKIP_S),
        train_steps=len({event.batch for event in events if isinstance(event, StepFinished)}),
        seconds=seconds,
        violations=len(report.violations),
        plans=count_plans(events, changes),
        borrows=lending_of(events, overlap).borrows,
    )


async def compare(
    make_job: Callable[[str], Path], policies: Sequence[str], minutes: float, say: Callable[[str], None]
) -> tuple[Outcome, ...]:
    """Every policy in turn, all together within about `minutes`. `make_job` writes a fresh run's job file for a policy."""
    seconds = max(LEAST_S, minutes * 60 / len(policies))
    outcomes: list[Outcome] = []
    for policy in policies:
        say(f"{policy}: {seconds:.0f} s ...")
        outcomes.append(await run_policy(make_job(policy), seconds))
        say(f"{policy}: {outcomes[-1].tokens_per_s:.1f} tokens/s, {outcomes[-1].train_steps} train steps")
    return tuple(outcomes)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:  # Any: a JSON object
    """`policies{NAME: ...}`, and `ratio`: the first policy's throughput over each other one's."""
    first = outcomes[0]
    return {
        "policies": {
            each.policy: {
                "rollout_tokens_per_s": round(each.tokens_per_s, 2),
                "train_steps": each.train_steps,
                "violations": each.violations,
                "plans": each.plans,
                "borrows": each.borrows,
            }
            for each in outcomes
        },
        "ratio": {
            each.policy: round(first.tokens_per_s / each.tokens_per_s, 4) if each.tokens_per_s else None
            for each in outcomes[1:]
        },
        "reference": first.policy,
        "seconds_each": first.seconds,
    }
