"""An orchestrator core with executors that answer its plans at once: no bus, no clock, no processes.

`FakeCluster` plays every other actor as well as docs/protocol.md lets it: `prepare` and `apply` are the rebuilder,
the node agents and the workers of one stage of the plan in the table. Each epoch is kept in `history`; the core
itself checks the invariants of each.
"""

from __future__ import annotations

from collections import Counter

from messages.decision_engine import Leave
from messages.envelope import Message
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import DecisionId, Incarnation, Mode, PolicyVersion, Role, Stage, WorkerId, Zone
from messages.orchestrator import (
    PlanProgress,
    RoleSet,
    TargetConfiguration,
    WeightsApplied,
    WorkerDrained,
    WorkerGone,
    WorkerReady,
)
from messages.pipeline_scheduler import WeightsPublished
from pearl_state.model import RoleTable, Row, active_roles
from services.jobfile import JobFile, JobSection, NodeSection, TimeoutSection
from services.orchestrator.config import Config
from services.orchestrator.core import OrchestratorCore
from services.runtime.core import Effect, Input, Note, Refuse, Send, Tick


def job_of(reserved: int = 2, preemptible: int = 4, training: int = 2, per_node: int = 2) -> JobFile:
    """A job with that many GPUs a zone, `per_node` a node: r0, r1 .., s0 .. (spot), t0 .. (training)."""
    nodes = [
        NodeSection(name=f"{letter}{number}", zone=zone, gpus=min(per_node, gpus - number * per_node))
        for letter, zone, gpus in (
            ("r", Zone.RESERVED, reserved),
            ("s", Zone.PREEMPTIBLE, preemptible),
            ("t", Zone.TRAINING, training),
        )
        for number in range(-(-gpus // per_node))
    ]
    timeouts = TimeoutSection(prepare_ms=10_000, apply_ms=6_000, drain_ms=1_000)
    return JobFile(job=JobSection(name="test"), nodes=tuple(nodes), timeouts=timeouts)


class FakeCluster:
    """See the module. `now_ms` and `seq` advance by themselves; `table` is the newest epoch."""

    def __init__(self, job: JobFile | None = None) -> None:
        self.config = Config.of(job or job_of())
        self.core = OrchestratorCore(self.config)
        self.table: RoleTable = self.core.initial()
        self.now_ms = 1_000_000
        self.seq = 0
        self.decisions = 0
        self.effects: list[Effect] = []
        self.history: list[RoleTable] = [self.table]
        self.feed(WeightsPublished(version=PolicyVersion(0), uri="mem:0", manifest_sha256="", bytes=1))

    # -- inputs

    def feed(self, *messages: object) -> tuple[Effect, ...]:
        """One batch of inputs: one epoch at most."""
        inputs: list[Input] = []
        for message in messages:
            self.seq += isinstance(message, Message)
            inputs.append(Input(self.now_ms, message, self.seq if isinstance(message, Message) else 0))
        return self.step(inputs)

    def step(self, inputs: list[Input]) -> tuple[Effect, ...]:
        before = self.table
        self.table, each, after = self.core.step_all(before, inputs)
        if self.table is not before:
            assert self.table.epoch == before.epoch + 1
            self.history.append(self.table)
        effects = (*(effect for effects in each for effect in effects), *after)
        self.effects.extend(effects)
        return effects

    def pass_time(self, ms: int) -> tuple[Effect, ...]:
        """Time passes, and a tick tells the core."""
        self.now_ms += ms
        return self.feed(Tick())

    def restart(self) -> None:
        """Another process takes over with nothing but the table."""
        self.core = OrchestratorCore(self.config)

    def target(
        self,
        *,
        usable: list[str],
        prefill: int = 0,
        decode: int = 0,
        colocated: int = 0,
        leaving: tuple[tuple[str, int], ...] = (),
        training_batch: int | None = None,
    ) -> tuple[Effect, ...]:
        """A new target configuration; see `make_target`."""
        return self.feed(
            self.make_target(
                usable=usable,
                prefill=prefill,
                decode=decode,
                colocated=colocated,
                leaving=leaving,
                training_batch=training_batch,
            )
        )

    def make_target(
        self,
        *,
        usable: list[str],
        prefill: int = 0,
        decode: int = 0,
        colocated: int = 0,
        leaving: tuple[tuple[str, int], ...] = (),
        training_batch: int | None = None,
    ) -> TargetConfiguration:
        self.decisions += 1
        total = prefill + decode + colocated
        mode = Mode.DISAGGREGATED if prefill else Mode.COLOCATED if total else Mode.PAUSED
        return TargetConfiguration(
            decision_id=DecisionId(f"d{self.decisions}"),
            budget_id=self.decisions,
            mode=mode,
            prefill=prefill,
            decode=decode,
            colocated=colocated,
            borrow=False,
            usable=tuple(WorkerId(worker) for worker in usable),
            leaving=tuple(Leave(WorkerId(worker), deadline) for worker, deadline in leaving),
            training_batch=training_batch,
        )

    # -- what others do

    def facts_of(self, worker: str) -> list[Message]:
        """A launched worker's process comes up and loads the newest version."""
        row = self.row(worker)
        return [
            WorkerReady(worker=row.worker, incarnation=row.incarnation, endpoint=f"tcp:{worker}", pid=1, init_ms=5),
            WeightsApplied(worker=row.worker, incarnation=row.incarnation, version=self.table.policy_version),
        ]

    def report(self, report: str, *failed: str, plan_id: str = "", reason: str = "") -> PlanProgress:
        """A rebuilder's report about the plan in the table."""
        if not plan_id:
            assert self.table.plan is not None
            plan_id = self.table.plan.plan_id
        return PlanProgress(
            plan_id=plan_id,  # type: ignore[arg-type]
            part="rebuilder",
            report=report,
            failed_workers=tuple(WorkerId(worker) for worker in failed),
            reason=reason,
        )

    def prepare(self) -> None:
        """All joiners of the preparing plan are launched and hold weights; the cut epoch follows."""
        plan = self.table.plan
        assert plan is not None and plan.stage == "preparing"
        for assign in plan.add:
            if self.row(assign.worker).stage is Stage.LAUNCHING:
                self.feed(*self.facts_of(assign.worker))
        self.feed(self.report("prepared"))

    def apply(self) -> None:
        """Leavers drain and end, joiners and role-changers have their roles; the admit epoch follows."""
        plan = self.table.plan
        assert plan is not None and plan.stage == "applying"
        for leave in plan.remove:
            row = self.row(leave.worker)
            if row.stage is Stage.DRAINING:
                self.feed(self.drained(row), self.gone(leave.worker, "killed:plan"))
        for assign in (*plan.add, *plan.reassign):
            self.feed(self.role_set(assign))
        for assign in plan.add:
            if self.row(assign.worker).version < self.table.policy_version:
                self.feed(self.facts_of(assign.worker)[1])
        self.feed(self.report("applied", plan_id=plan.plan_id))

    def settle(self) -> None:
        """Let executors finish plan after plan until there is none."""
        for _ in range(20):
            if self.table.plan is None:
                return
            if self.table.plan.stage == "preparing":
                self.prepare()
            else:
                self.apply()
        raise AssertionError(f"plans without end: {self.table.plan}")

    def role_set(self, assign: Assign) -> RoleSet:
        return RoleSet(
            worker=assign.worker,
            incarnation=assign.incarnation,
            role=assign.role,
            role_generation=assign.role_generation,
        )

    def drained(self, row: Row) -> WorkerDrained:
        return WorkerDrained(
            worker=row.worker, incarnation=row.incarnation, role_generation=row.role_generation, interrupted=0
        )

    def gone(self, worker: str, reason: str = "signal:9", incarnation: int | None = None) -> WorkerGone:
        row = self.row(worker)
        number = row.incarnation if incarnation is None else Incarnation(incarnation)
        return WorkerGone(worker=row.worker, incarnation=number, reason=reason)

    # -- what one sees

    def row(self, worker: str) -> Row:
        row = self.table.row(worker)
        assert row is not None
        return row

    @property
    def roles(self) -> dict[str, str]:
        """Active workers and their roles."""
        return {worker: role.value for worker, role in active_roles(self.table).items()}

    @property
    def counts(self) -> tuple[int, int, int]:
        """Active (prefill, decode, colocated)."""
        found = Counter(active_roles(self.table).values())
        return found[Role.PREFILL], found[Role.DECODE], found[Role.COLOCATED]

    @property
    def plans(self) -> list[ReconfigurationPlan]:
        """Every plan message sent, in order."""
        return [e.message for e in self.effects if isinstance(e, Send) and isinstance(e.message, ReconfigurationPlan)]

    def notes(self, action: str) -> list[str]:
        return [effect.text for effect in self.effects if isinstance(effect, Note) and effect.action == action]

    @property
    def refusals(self) -> list[str]:
        return [effect.reason for effect in self.effects if isinstance(effect, Refuse)]

    def grown(self, *workers: str, prefill: int = 0, decode: int = 0) -> FakeCluster:
        """This cluster with these workers serving (colocated unless counts say otherwise), for the start of a test."""
        colocated = 0 if prefill else len(workers)
        self.target(usable=list(workers), prefill=prefill, decode=decode, colocated=colocated)
        self.settle()
        assert len(self.roles) == len(workers)
        self.effects.clear()
        self.history = [self.table]
        return self
