"""The report at the end of a demo: what happened, counted from the streams and judged by the checker."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import Message, UndecodableMessage
from messages.executors import ReconfigurationPlan
from messages.ids import Mode
from messages.monitor import DecisionRecord
from messages.orchestrator import PlanProgress, TargetConfiguration
from messages.pipeline_scheduler import Evaluated, StepFinished
from messages.subjects import decode_on, stream
from services.checker.collect import check, refused_events
from services.checker.core import Report
from services.environments.loading import load_class
from services.jobfile import JobFile
from services.monitor.view import spark
from services.runtime.bus import Bus

EDGE_STEPS = 5
"""Rewards are compared between the means of the first and the last so many train steps."""
KINDS: tuple[type[Message], ...] = (
    GpuAvailable,
    GpuReclaimed,
    ReconfigurationPlan,
    TargetConfiguration,
    DecisionRecord,
    PlanProgress,
    StepFinished,
    Evaluated,
)


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counted from the streams, not from what services say of themselves."""

    rewards: tuple[float, ...]  # mean reward of each train step
    reward_blind: float | None
    checked: Report
    plans: dict[str, int]
    preemptions: int
    preemptions_without_notice: int
    arrivals: int
    decisions: int
    evaluations: tuple[tuple[int, float], ...]
    train_s: float
    processes: dict[str, int]
    wall_s: float

    @property
    def reward_first(self) -> float:
        """Mean over the first steps."""
        return fmean(self.rewards[:EDGE_STEPS]) if self.rewards else 0.0

    @property
    def reward_last(self) -> float:
        """Mean over the last steps."""
        return fmean(self.rewards[-EDGE_STEPS:]) if self.rewards else 0.0

    def clean(self, job: JobFile) -> bool:
        """Whether all train steps were done and the checker found nothing."""
        return len(self.rewards) >= job.pipeline.train_steps and not self.checked.violations

    def to_json(self) -> str:
        """The object that CLI.md describes."""
        checked = self.checked
        body: dict[str, Any] = {
            "train_steps": len(self.rewards),
            "reward_first": round(self.reward_first, 4),
            "reward_last": round(self.reward_last, 4),
            "reward_blind": self.reward_blind,
            "rewards": [round(reward, 4) for reward in self.rewards],
            "trajectories": {
                "completed": checked.completed,
                "lost": checked.lost,
                "duplicated": checked.duplicated,
            },
            "tokens": {
                "delivered": checked.delivered,
                "regenerated": checked.regenerated,
                "lost_with_edge": checked.lost_with_edge,
            },
            "staleness_max": checked.staleness_max,
            "strays": checked.strays,
            "violations": [str(violation) for violation in checked.violations],
            "plans": self.plans,
            "preemptions": self.preemptions,
            "preemptions_without_notice": self.preemptions_without_notice,
            "arrivals": self.arrivals,
            "borrows": {"count": 0, "denied_by_gate": 0, "late_returns": 0},
            "decisions": self.decisions,
            "processes": [{"name": name, "pid": pid} for name, pid in sorted(self.processes.items())],
            "wall_s": round(self.wall_s, 1),
        }
        return json.dumps(body)


async def make_report(bus: Bus, job: JobFile, *, processes: dict[str, int], wall_s: float) -> DemoReport:
    """Read the whole event stream and let the checker read journals and attempt logs."""
    events: list[Message] = []
    refused = await refused_events(bus, job.job.name)
    async for delivery in bus.read(stream(job.job.name, "ev"), f"pearl.{job.job.name}.ev.>"):
        try:
            event = decode_on(job.job.name, delivery.subject, delivery.data, *KINDS)
        except UndecodableMessage:
            continue
        if delivery.seq not in refused:
            events.append(event)
    steps = {event.batch: event for event in events if isinstance(event, StepFinished)}
    reclaims = [event for event in events if isinstance(event, GpuReclaimed)]
    return DemoReport(
        rewards=tuple(steps[batch].reward_mean for batch in sorted(steps)),
        reward_blind=blind_reward(job),
        checked=await check(bus, job),
        plans=count_plans(events),
        preemptions=len(reclaims),
        preemptions_without_notice=sum(event.notice_ms == 0 for event in reclaims),
        arrivals=sum(isinstance(event, GpuAvailable) for event in events),
        decisions=sum(isinstance(event, DecisionRecord) for event in events),
        evaluations=tuple((event.version, event.reward_mean) for event in events if isinstance(event, Evaluated)),
        train_s=sum(event.train_s for event in steps.values()),
        processes=processes,
        wall_s=wall_s,
    )


def blind_reward(job: JobFile) -> float | None:
    """What the best policy that ignores observations earns, where the environment knows it."""
    environment = load_class(job.environment.entry, "environment.entry")
    blind = getattr(sys.modules[environment.__module__], "blind_reward", None)
    return None if blind is None else float(blind(job.environment.options))


def count_plans(events: list[Message]) -> dict[str, int]:
    """Plans by what they changed; a plan may count under several heads, `total` counts it once."""
    plans = {event.plan_id: event for event in events if isinstance(event, ReconfigurationPlan)}
    applied = {
        event.plan_id for event in events if isinstance(event, ReconfigurationPlan) and event.stage == "applying"
    }
    modes = [event.mode for event in events if isinstance(event, TargetConfiguration) and event.mode is not Mode.PAUSED]
    return {
        "total": len(plans),
        "grow": sum(bool(plan.add) for name, plan in plans.items() if name in applied),
        "shrink": sum(bool(plan.remove) for name, plan in plans.items() if name in applied),
        "mode_switch": sum(before is not after for before, after in pairwise(modes)),
        "ratio_change": sum(
            bool(plan.reassign) and not plan.add and not plan.remove for name, plan in plans.items() if name in applied
        ),
        "cancelled": len(set(plans) - applied),
    }


def print_report(report: DemoReport, job: JobFile) -> None:
    """For people."""
    console = Console()
    checked = report.checked
    table = Table(title="PEARL demo", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    blind = "" if report.reward_blind is None else f"   (best blind policy {report.reward_blind:.3f})"
    table.add_row("train steps", f"{len(report.rewards)} of {job.pipeline.train_steps} in {report.wall_s:.0f} s")
    table.add_row("reward", f"{report.reward_first:.3f} -> {report.reward_last:.3f}{blind}")
    table.add_row("", spark(report.rewards, 60, 0.0, 1.0))
    table.add_row(
        "trajectories", f"{checked.completed} completed, {checked.lost} lost, {checked.duplicated} duplicated"
    )
    table.add_row(
        "tokens",
        f"{checked.delivered} delivered, {checked.regenerated} regenerated, {checked.lost_with_edge} lost with a killed edge",
    )
    table.add_row("staleness", f"at most {checked.staleness_max} (bound {job.pipeline.staleness})")
    table.add_row(
        "spot GPUs",
        f"{report.arrivals} arrivals, {report.preemptions} preemptions "
        f"({report.preemptions_without_notice} without notice)",
    )
    table.add_row("plans", ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in report.plans.items()))
    table.add_row("decisions", f"{report.decisions}, each with its record in {job.run_dir / 'decisions.jsonl'}")
    table.add_row("processes", f"{len(report.processes)} started")
    table.add_row("files", f"{job.run_dir}")
    console.print(table)
    if checked.violations:
        console.print(f"[bold red]{len(checked.violations)} violations[/]")
        for violation in checked.violations[:20]:
            console.print(f"  {violation}")
    else:
        console.print(
            "[green]Checked from the journals: nothing lost, nothing duplicated, no delivered token regenerated.[/]"
        )
