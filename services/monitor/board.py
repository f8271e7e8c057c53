"""What a person wants to see of a job, folded from its messages. Pure.

`Board` is a mutable fold, kept by one reader (a view or a status call); it decides nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from messages.decision_engine import BatchProgress, BudgetChanged, WorkloadProfile
from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, TrainingBegin, TrainingFinished
from messages.envelope import Message
from messages.executors import ReconfigurationPlan
from messages.monitor import DecisionRecord
from messages.orchestrator import WorkerGone
from messages.pipeline_scheduler import Evaluated, StepFinished, TrajectoryCompleted
from messages.runtime_tracker import WorkerHeartbeat
from pearl_state.model import RoleTable
from services.jobfile import JobFile
from services.monitor.bottleneck import Serving
from services.monitor.history import Change, PlanFold, change_text

KINDS: Final[tuple[type[Message], ...]] = (
    BatchProgress,
    BudgetChanged,
    WorkloadProfile,
    GpuAvailable,
    GpuReclaimed,
    TrainingBegin,
    TrainingFinished,
    ReconfigurationPlan,
    DecisionRecord,
    WorkerGone,
    Evaluated,
    StepFinished,
    TrajectoryCompleted,
    WorkerHeartbeat,
)
"""What a board takes in (besides role tables)."""

RATE_WINDOW_MS = 3000
"""Token rates are averaged over so long: a few heartbeats, and still current."""


class Board:
    """Everything the view shows."""

    def __init__(self, job: JobFile | None = None) -> None:
        """With the job file, plans that move overlap workers are told as borrows and returns."""
        self.fold = PlanFold() if job is None else PlanFold.of(job)
        self.table: RoleTable | None = None
        self.heartbeats: dict[str, tuple[int, WorkerHeartbeat]] = {}
        self.rates: dict[str, float] = {}
        self.budget: list[tuple[int, int, int]] = []  # (at_ms, slots rollout may use, slots active)
        self.rewards: list[tuple[int, float]] = []  # (batch, mean reward)
        self.evaluations: list[tuple[int, float]] = []
        self.steps: list[StepFinished] = []
        self.decisions: deque[tuple[int, DecisionRecord]] = deque(maxlen=6)
        self.happenings: deque[tuple[int, str]] = deque(maxlen=10)
        self.changes: list[tuple[int, Change]] = []  # mode switches, ratio changes, borrows and returns
        self.plans: dict[str, ReconfigurationPlan] = {}
        self.profile: WorkloadProfile | None = None
        self.progress: BatchProgress | None = None
        self.latest_budget: BudgetChanged | None = None
        self.trajectories = 0
        self.failed = 0
        self.preemptions = 0
        self.arrivals = 0
        self.training = False
        self.serving = Serving()
        self._windows: dict[str, deque[tuple[int, int]]] = {}

    def take(self, at_ms: int, message: object) -> None:
        """Fold one message (or a new role table) in."""
        match message:
            case RoleTable():
                self.table = message
                self._sample_budget(at_ms)
            case WorkerHeartbeat():
                self._on_heartbeat(at_ms, message)
            case BudgetChanged():
                self.latest_budget = message
                self._sample_budget(at_ms)
            case GpuAvailable():
                self.arrivals += 1
                self.say(at_ms, f"{message.node}: {len(message.gpus)} GPUs available")
            case GpuReclaimed():
                self.preemptions += 1
                notice = f"in {message.notice_ms / 1000:.1f} s" if message.notice_ms else "without notice"
                self.say(at_ms, f"{message.node}: {len(message.gpus)} GPUs reclaimed {notice}")
            case TrainingBegin():
                self.training = True
            case TrainingFinished():
                self.training = False
            case ReconfigurationPlan():
                self._on_plan(at_ms, message)
            case DecisionRecord():
                self.fold.take(message)
                if not self.decisions or self.decisions[-1][1].decision_id != message.decision_id:
                    self.decisions.append((at_ms, message))
            case WorkerGone():
                self.fold.take(message)
                self.say(at_ms, f"{message.worker} gone: {message.reason}")
            case StepFinished():
                if not self.steps or message.batch > self.steps[-1].batch:
                    self.steps.append(message)
                    self.rewards.append((message.batch, message.reward_mean))
            case Evaluated():
                self.evaluations.append((message.version, message.reward_mean))
            case TrajectoryCompleted():
                self.trajectories += message.status != "failed"
                self.failed += message.status == "failed"
            case BatchProgress():
                self.progress = message
            case WorkloadProfile():
                self.profile = message
            case _:
                pass

    def say(self, at_ms: int, text: str) -> None:
        """Add a line to what happened lately."""
        self.happenings.append((at_ms, text))

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second over all workers, lately."""
        return sum(self.rates.values())

    def _on_heartbeat(self, at_ms: int, message: WorkerHeartbeat) -> None:
        if self.table is not None and self.table.row(message.worker) is None:
            return
        self.serving.take(at_ms, message)
        window = self._windows.setdefault(f"{message.worker}.{message.incarnation}", deque())
        window.append((at_ms, message.decode_tokens))
        while window and at_ms - window[0][0] > RATE_WINDOW_MS:
            window.popleft()
        seconds = (window[-1][0] - window[0][0]) / 1000
        self.rates[message.worker] = (window[-1][1] - window[0][1]) / seconds if seconds > 0 else 0.0
        self.heartbeats[message.worker] = (at_ms, message)

    def _sample_budget(self, at_ms: int) -> None:
        budget = self.latest_budget
        usable = len(budget.dedicated) + len(budget.overlap) if budget else 0
        active = (
            sum(row.activity == "active" and row.role != "training" for row in self.table.rows) if self.table else 0
        )
        if not self.budget or self.budget[-1][1:] != (usable, active):
            self.budget.append((at_ms, usable, active))

    def _on_plan(self, at_ms: int, message: ReconfigurationPlan) -> None:
        if message.plan_id in self.plans and message.stage == "preparing":
            return
        self.plans[message.plan_id] = message
        parts = (("+", [each.worker for each in message.add]), ("-", [each.worker for each in message.remove]))
        changes = [f"{sign}{','.join(workers)}" for sign, workers in parts if workers]
        changes += [f"{each.worker}->{each.role}" for each in message.reassign]
        change = self.fold.take(message)
        text = "" if change is None else change_text(change)
        if change is not None and text:
            self.changes.append((at_ms, change))
        self.say(at_ms, f"{message.plan_id} {text or message.stage + ': ' + ' '.join(changes)}")
