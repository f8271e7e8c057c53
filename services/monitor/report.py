"""The report at the end of a demo: what happened, counted from the streams and judged by the checker."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import Message, UndecodableMessage
from messages.executors import ReconfigurationPlan
from messages.ids import Zone
from messages.monitor import DecisionRecord
from messages.orchestrator import PlanProgress
from messages.pipeline_scheduler import Evaluated, StepFinished, TrajectoryCompleted
from messages.subjects import decode_on, stream
from services.checker.collect import check, refused_events
from services.checker.core_report import Report
from services.environments.loading import load_class
from services.jobfile import JobFile, rollout_slots
from services.monitor import lending
from services.monitor.bottleneck import Busy, Serving, busy_of
from services.monitor.history import Change, PlanFold, change_text, changes_of
from services.monitor.view import spark
from services.runtime.bus import Bus

EDGE_STEPS = 5
"""Rewards are compared between the means of the first and the last so many train steps."""
MOST_CHANGES = 12
"""Mode switches and ratio changes that the printed report lists."""
KINDS: tuple[type[Message], ...] = (
    GpuAvailable,
    GpuReclaimed,
    ReconfigurationPlan,
    DecisionRecord,
    PlanProgress,
    StepFinished,
    TrajectoryCompleted,
    Evaluated,
    *lending.KINDS,
)


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counted from the streams, not from what services say of themselves."""

    rewards: tuple[float, ...]  # mean reward of each train step
    reward_blind: float | None
    checked: Report
    plans: dict[str, int]
    plans_by_kinds: dict[str, int]
    preemptions: int
    preemptions_without_notice: int
    arrivals: int
    changes: tuple[Change, ...]
    throughput: float  # rollout tokens a second
    lending: lending.Lending
    decisions: int
    evaluations: tuple[tuple[int, float], ...]
    train_s: float
    processes: dict[str, int]
    cpu_s: dict[str, float]  # processor seconds by process name
    busy: Busy
    wall_s: float
    time_scale: float = 1.0  # seconds that engines, trainer, environments and trace saw, in one of `wall_s`

    @property
    def emulated_s(self) -> float:
        """How long the run took by the clock of its engines, start and check included."""
        return self.wall_s * self.time_scale

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
        """The object that `pearl demo --json` prints."""
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
            "plans_by_kinds": self.plans_by_kinds,
            "preemptions": self.preemptions,
            "preemptions_without_notice": self.preemptions_without_notice,
            "arrivals": self.arrivals,
            "borrows": self.lending.borrows,
            "memory": msgspec.to_builtins(self.lending.memory),
            "changes": [_change_json(change) for change in self.changes if change_text(change)],
            "rollout_tokens_per_s": round(self.throughput, 1),
            "decisions": self.decisions,
            "processes": [{"name": name, "pid": pid} for name, pid in sorted(self.processes.items())],
            "bottleneck": self.busy.bottleneck,
            "busy": {name: round(share, 4) for name, share in msgspec.structs.asdict(self.busy).items()},
            "cpu_s": {name: round(seconds, 2) for name, seconds in sorted(self.cpu_s.items())},
            "wall_s": round(self.wall_s, 1),
            "emulated_s": round(self.emulated_s, 1),
        }
        return json.dumps(body)


def _change_json(change: Change) -> dict[str, Any]:
    """A mode switch, ratio change, borrow or return, with what was predicted of it."""
    record = change.record
    incumbent = None if record is None or record.incumbent is None else record.incumbent.makespan_s
    return {
        "plan": change.plan_id,
        "decision": change.decision_id,
        "kinds": list(change.kinds),
        "before": str(change.before),
        "after": str(change.after),
        "forced": change.forced,
        "predicted_s": None if record is None else record.chosen.makespan_s,
        "incumbent_s": incumbent,
        "reason": "" if record is None else record.reason,
        "borrow_reason": "" if record is None else record.borrow_reason,
    }


async def read_events(bus: Bus, job_name: str) -> list[tuple[int, Message]]:
    """The event stream as (Unix ms, message), as far as a report needs it."""
    events: list[tuple[int, Message]] = []
    refused = await refused_events(bus, job_name)
    async for delivery in bus.read(stream(job_name, "ev"), f"pearl.{job_name}.ev.>"):
        try:
            event = decode_on(job_name, delivery.subject, delivery.data, *KINDS)
        except UndecodableMessage:
            continue
        if delivery.seq not in refused:
            events.append((delivery.at_ms, event))
    return events


async def make_report(
    bus: Bus, job: JobFile, *, processes: dict[str, int], cpu_s: dict[str, float], serving: Serving, wall_s: float
) -> DemoReport:
    """Read the whole event stream and let the checker read journals and attempt logs."""
    timed = await read_events(bus, job.job.name)
    events = [event for _, event in timed]
    steps = {event.batch: event for event in events if isinstance(event, StepFinished)}
    reclaims = [event for event in events if isinstance(event, GpuReclaimed)]
    changes = changes_of(events, PlanFold.of(job))
    return DemoReport(
        rewards=tuple(steps[batch].reward_mean for batch in sorted(steps)),
        reward_blind=blind_reward(job),
        checked=await check(bus, job),
        plans=count_plans(events, changes),
        plans_by_kinds=plans_by_kinds(changes),
        preemptions=len(reclaims),
        preemptions_without_notice=sum(event.notice_ms == 0 for event in reclaims),
        arrivals=sum(isinstance(event, GpuAvailable) for event in events),
        changes=changes,
        throughput=rollout_throughput(timed),
        lending=lending.lending_of(events, {slot.worker for slot in rollout_slots(job) if slot.zone is Zone.OVERLAP}),
        decisions=sum(isinstance(event, DecisionRecord) for event in events),
        evaluations=tuple((event.version, event.reward_mean) for event in events if isinstance(event, Evaluated)),
        train_s=sum(event.train_s for event in steps.values()),
        processes=processes,
        cpu_s=cpu_s,
        busy=busy_of(
            serving,
            steps.values(),
            [event for event in events if isinstance(event, TrajectoryCompleted)],
            wall_s=wall_s,
            cpu_s=sum(cpu_s.values()),
            processors=len(os.sched_getaffinity(0)),
        ),
        wall_s=wall_s,
        time_scale=job.emulation.time_scale if job.rollout.engine == "emulated" else 1.0,
    )


def rollout_throughput(timed: Sequence[tuple[int, Message]], *, skip_s: float = 0.0) -> float:
    """Generated tokens a second, from the first end of a trajectory (or `skip_s` after the first event) to the last.

    Tokens of trajectories that ended in that time; of failed ones too, since they were generated.
    """
    begin_ms = timed[0][0] + 1000 * skip_s if timed else 0.0
    ends = [(at, event) for at, event in timed if isinstance(event, TrajectoryCompleted) and at >= begin_ms]
    if len(ends) < 2:
        return 0.0
    since_ms = begin_ms if skip_s else ends[0][0]
    seconds = (ends[-1][0] - since_ms) / 1000
    return sum(event.generated_tokens for _, event in ends) / seconds if seconds > 0 else 0.0


def blind_reward(job: JobFile) -> float | None:
    """What the best policy that ignores observations earns, where the environment knows it."""
    environment = load_class(job.environment.entry, "environment.entry")
    blind = getattr(sys.modules[environment.__module__], "blind_reward", None)
    return None if blind is None else float(blind(job.environment.options))


def count_plans(events: Sequence[Message], changes: Sequence[Change]) -> dict[str, int]:
    """Plans by what they changed. `total = applied + cancelled`; an applied plan counts under each of its kinds, under `other`
    if it has none (`plans_by_kinds` counts each once). `cancelled` are those that came to nothing: superseded or vetoed before
    their cut epoch, failed, rolled back, or not yet applied when the events end. Of `untold` among the applied, only the part
    outside the overlap zone counts, and whether that was admitted or rolled back, the events do not tell.

    Mode switches are those of role counts before and after applied plans; a ratio change is one in which a worker that
    stays takes another role within the mode. `forced` are the ones among them to which hysteresis did not apply.
    """
    total = {event.plan_id for event in events if isinstance(event, ReconfigurationPlan)}
    counts = {
        kind: sum(kind in change.kinds for change in changes)
        for kind in ("grow", "shrink", "borrow", "return", "mode_switch", "ratio_change")
    }
    reshaped = [change for change in changes if {"mode_switch", "ratio_change"} & set(change.kinds)]
    return {
        "total": len(total),
        "applied": len(total & {change.plan_id for change in changes}),
        **counts,
        "other": sum(not change.kinds for change in changes),
        "forced": sum(change.forced for change in reshaped),
        "untold": sum(change.untold for change in changes),
        "cancelled": len(total - {change.plan_id for change in changes}),
    }


def plans_by_kinds(changes: Sequence[Change]) -> dict[str, int]:
    """Applied plans by all that each changed, as in "grow+mode_switch", the most frequent first: each plan once."""
    found = Counter("+".join(change.kinds) or "other" for change in changes)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def plan_lines(plans: Mapping[str, int], by_kinds: Mapping[str, int]) -> list[tuple[str, str]]:
    """For people: what each number counts, and how they add up."""
    applied = [f"{count} {kinds.replace('+', ' and ').replace('_', ' ')}" for kinds, count in by_kinds.items()]
    lines = [
        (
            "plans",
            f"{plans['total']} made = {plans['applied']} applied + {plans['cancelled']} cancelled (superseded, vetoed, failed, "
            "rolled back, or not yet applied at the end)",
        )
    ]
    if applied:
        lines.append(("", f"{plans['applied']} applied = {' + '.join(applied)}"))
    if plans["untold"]:
        lines.append(
            (
                "",
                f"{plans['untold']} of the applied lent nothing in the end, and may have been rolled back: the events do not tell",
            )
        )
    if plans["forced"]:
        lines.append(
            ("", f"{plans['forced']} of the mode switches and ratio changes were forced: hysteresis did not apply")
        )
    return lines


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


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
    for row in (*plan_lines(report.plans, report.plans_by_kinds), *report.lending.lines()):
        table.add_row(*row)
    table.add_row("rollout", f"{report.throughput:.0f} tokens/s")
    trainer, workers = report.lending.memory["trainer"], report.lending.memory["workers"]
    table.add_row(
        "memory",
        f"a borrow frees {_mb(trainer.freed_bytes)} of the trainer's and takes {_mb(workers.restored_bytes)} a worker; "
        f"a return frees {_mb(workers.freed_bytes)} a worker and takes {_mb(trainer.restored_bytes)} back",
    )
    if report.time_scale != 1.0:
        table.add_row(
            "emulated time",
            f"{report.emulated_s / 60:.0f} min of engines, trainer, environments and trace, {report.time_scale:g} times as fast",
        )
    table.add_row("bottleneck", report.busy.text)
    table.add_row("decisions", f"{report.decisions}, each with its record in {job.run_dir / 'decisions.jsonl'}")
    table.add_row("processes", f"{len(report.processes)} started")
    table.add_row("files", f"{job.run_dir}")
    console.print(table)
    reshaped = [change for change in report.changes if {"mode_switch", "ratio_change"} & set(change.kinds)]
    for change in reshaped[:MOST_CHANGES]:
        console.print(f"  {change.plan_id} ({change.decision_id}) {change_text(change)}", highlight=False)
    if len(reshaped) > MOST_CHANGES:
        console.print(f"  and {len(reshaped) - MOST_CHANGES} more")
    for each in checked.trimmed:
        console.print(f"not all seen: {each}", highlight=False)
    if checked.violations:
        console.print(f"[bold red]{len(checked.violations)} violations[/]")
        for violation in checked.violations[:20]:
            console.print(f"  {violation}")
    else:
        console.print(
            "[green]Checked from the journals: nothing lost, nothing duplicated, no delivered token regenerated.[/]"
        )
