"""A hand-made record of a sound run, in which everything that the checkers judge happens once: growth, a borrow and its
return, a train step, an interrupted request, an expansion that fails, a reclaim. Tests break one thing in it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from messages.agent import RequestInterrupted, RolloutTask, TurnFinished, VersionSpan
from messages.decision_engine import BudgetChanged, Leave
from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, TrainingBegin
from messages.envelope import Message
from messages.executors import Assign
from messages.ids import (
    Activity,
    DecisionId,
    Gpu,
    GroupId,
    Incarnation,
    PlanId,
    PolicyVersion,
    RequestId,
    Residency,
    Role,
    RoleGeneration,
    Stage,
    TrajectoryId,
    WorkerId,
    Zone,
)
from messages.node_agent import Kill, Launch
from messages.orchestrator import (
    PlanProgress,
    RoleSet,
    TargetConfiguration,
    WeightsApplied,
    WorkerActivated,
    WorkerDrained,
    WorkerGone,
    WorkerReady,
    WorkerReleased,
)
from messages.pipeline_scheduler import BatchItem, BatchReady, StepFinished, TrajectoryCompleted, WeightsPublished
from messages.rollout_worker import Activate, Deactivate, Drain, Generate, SetRole
from messages.trainer import TrainerResume
from pearl_state.model import Pair, PlanRecord, RoleTable, Row
from services.decision_engine.config import Config as DecisionConfig
from services.decision_engine.core import DecisionEngineCore
from services.jobfile import DecisionSection, JobFile, JobSection, NodeSection, PipelineSection, TimeoutSection
from services.runtime.core import Input, Send
from services.simulator.faults.record import (
    ActorBegan,
    Assigned,
    AttemptBegan,
    FaultsStopped,
    Generated,
    MemoryHeld,
    ProcessBegan,
    ProcessEnded,
    Received,
    RunEnded,
    Seen,
    Sent,
    Stored,
    TableSeen,
    TableWritten,
)

JOB = JobFile(
    job=JobSection(name="story"),
    nodes=(
        NodeSection(name="r0", zone=Zone.RESERVED, gpus=2),
        NodeSection(name="s0", zone=Zone.PREEMPTIBLE, gpus=1),
        NodeSection(name="t0", zone=Zone.TRAINING, gpus=1),
    ),
    pipeline=PipelineSection(batch_trajectories=2, group_size=2, staleness=1, train_steps=1),
    timeouts=TimeoutSection(prepare_ms=3_000, apply_ms=4_000, drain_ms=1_500, return_ms=3_000, lease_ms=1_500),
    decision=DecisionSection(lending=True, toggle_guess_s=0.0, policy="paper"),
)
ACTORS = (
    "orchestrator",
    "toggle_manager",
    "cluster_rebuilder",
    "elastic_scheduler",
    "decision_engine",
    "router-0",
    "agent-0",
    "node_agent-r0",
    "node_agent-s0",
    "node_agent-t0",
)
ONE = Incarnation(1)


def row(worker: str, zone: Zone, **fields: Any) -> Row:
    """A slot of one GPU, its number the last character of the worker's name."""
    node, _, slot = worker.partition("-")
    role = Role.TRAINING if zone is Zone.TRAINING else Role.COLOCATED
    return Row(worker=WorkerId(worker), gpus=(Gpu(node, int(slot[-1])),), zone=zone, role=role, **fields)  # type: ignore[arg-type]


class Story:
    """Builds the record, one thing after another, 10 ms apart."""

    def __init__(self) -> None:
        self.record: list[Seen] = []
        self.now_ms = 1_000_000
        self._journal = self._events = 0
        self._engine = DecisionEngineCore(DecisionConfig.of(JOB))
        self._decided = self._engine.initial()
        rows = (
            row("r0-w0", Zone.RESERVED),
            row("r0-w1", Zone.RESERVED),
            row("s0-w0", Zone.PREEMPTIBLE),
            row("t0-t0", Zone.TRAINING, incarnation=ONE),
            row("t0-w0", Zone.OVERLAP, incarnation=ONE),
        )
        pairs = (Pair(overlap=WorkerId("t0-w0"), training=WorkerId("t0-t0")),)
        self.table = RoleTable(job="story", epoch=0, rows=rows, pairs=pairs)  # type: ignore[arg-type]

    def see(self, kind: type[Any], **fields: Any) -> None:
        self.now_ms += 10
        self.record.append(kind(at_ms=self.now_ms, **fields))

    def store(self, message: Message, sender: str = "") -> int:
        """Returns the sequence in its stream."""
        if isinstance(message, (TurnFinished, RequestInterrupted)):
            self._journal += 1
            seq = self._journal
        else:
            self._events += 1
            seq = self._events
        self.see(Stored, sender=sender, seq=seq, message=message)
        return seq

    def send(self, message: Message, sender: str = "cluster_rebuilder") -> None:
        self.see(Sent, sender=sender, message=message)

    def write(self, changes: dict[str, dict[str, Any]] | None = None, **fields: Any) -> None:
        """The next epoch: these fields of rows by worker (dashes as underscores) and of the table."""
        rows = tuple(msgspec.structs.replace(r, **(changes or {}).get(r.worker, {})) for r in self.table.rows)
        self.table = msgspec.structs.replace(self.table, epoch=self.table.epoch + 1, rows=rows, **fields)
        self.see(TableWritten, writer="orchestrator", table=self.table)
        self.see(TableSeen, actor="router-0", life=1, epoch=self.table.epoch)

    def writer(self, **fields: Any) -> Any:
        """The table's `writer` with these fields."""
        return msgspec.structs.replace(self.table.writer, **fields)

    def residency(self, residency: Residency, deadline_ms: int = 0) -> tuple[Pair, ...]:
        (pair,) = self.table.pairs
        return (msgspec.structs.replace(pair, residency=residency, deadline_ms=deadline_ms),)

    # --- what happens

    def decide(self, dedicated: tuple[str, ...], leaving: tuple[Leave, ...] = (), batch: int | None = None) -> None:
        """A budget; the real decision engine's answer to it; and the target in the table of the next write."""
        number = self._decided.decisions + 1
        budget = BudgetChanged(
            budget_id=number,
            dedicated=tuple(map(WorkerId, dedicated)),
            overlap=() if batch is not None else (WorkerId("t0-w0"),),
            leaving=leaving,
            training_batch=batch,
            cause="story",
        )
        self.store(budget)
        self._decided, effects = self._engine.step(self._decided, Input(self.now_ms, budget, number))
        for effect in effects:
            if isinstance(effect, Send):
                self.store(effect.message)
                if isinstance(effect.message, TargetConfiguration):
                    writer = self.writer(target=effect.message)
                    self.table = msgspec.structs.replace(self.table, writer=writer)

    def plan(self, number: int, stage: str = "preparing", **fields: Any) -> PlanRecord:
        assert self.table.writer.target is not None
        record = PlanRecord(
            plan_id=PlanId(f"p{number}"),
            decision_id=DecisionId(self.table.writer.target.decision_id),
            stage=stage,
            add=(),
            remove=(),
            reassign=(),
            started_ms=self.now_ms,
            deadline_ms=self.now_ms + 10_000,
        )
        return msgspec.structs.replace(record, **fields)

    def begin(self, worker: str, service: str = "rollout_worker", held: bool | None = None) -> None:
        """A process starts on its node."""
        node, gpus = worker.partition("-")[0], (int(worker[-1]),)
        self.see(ProcessBegan, node=node, worker=worker, incarnation=1, service=service, gpus=gpus)
        if held is not None:
            self.hold(worker, held)

    def hold(self, worker: str, held: bool) -> None:
        node, gpus = worker.partition("-")[0], (int(worker[-1]),)
        self.see(MemoryHeld, node=node, worker=worker, incarnation=1, gpus=gpus, held=held)

    def serve(self, worker: str, version: int = 0) -> None:
        """It is up, has weights; its role follows by `role`."""
        self.store(WorkerReady(worker=WorkerId(worker), incarnation=ONE, endpoint="", pid=1, init_ms=1))
        self.weights(worker, version)

    def weights(self, worker: str, version: int) -> None:
        self.store(WeightsApplied(worker=WorkerId(worker), incarnation=ONE, version=PolicyVersion(version)))

    def role(self, worker: str, generation: int) -> None:
        """The role is commanded and taken."""
        fields: dict[str, Any] = {"worker": worker, "incarnation": 1, "role": Role.COLOCATED}
        self.send(SetRole(**fields, role_generation=RoleGeneration(generation)))
        self.store(RoleSet(**fields, role_generation=RoleGeneration(generation)))

    def attempt(self, request: str, number: int, worker: str, start: int, *counts: int, version: int = 0) -> None:
        """Placed, asked for, taken in, generated; all of it reaches the client."""
        key: dict[str, Any] = {"request": request, "attempt": number}
        fence: dict[str, Any] = {"worker": worker, "incarnation": 1, "role_generation": 1}
        self.see(
            Assigned, router="router-0", **key, **fence, prefill="", min_version=0, epoch=self.table.epoch
        )  # fmt: skip
        self.send(
            Generate(
                **key,
                **fence,
                trajectory=TrajectoryId(request.split("/")[0]),
                min_version=PolicyVersion(0),
                prompt=[1],
                prefix=list(range(start)),
                max_new_tokens=8,
                temperature=1.0,
                seed=1,
                stop_ids=[],
                reply="",
            ),
            "agent-0",
        )
        self.see(AttemptBegan, **key, **fence, role=Role.COLOCATED, start=start, version=version, min_version=0)
        for count in counts:
            tokens: dict[str, Any] = {**key, "start": start, "count": count, "version": version}
            self.see(Generated, worker=worker, incarnation=1, **tokens)
            self.see(Received, agent="agent-0", life=1, **tokens)
            start += count

    def turn(self, trajectory: str, number: int, request: str, tokens: int, attempts: int = 1) -> int:
        return self.store(
            TurnFinished(
                trajectory=TrajectoryId(trajectory),
                group=GroupId("b0-g0"),
                batch=0,
                retry=0,
                turn=number,
                request=RequestId(request),
                attempts=attempts,
                prompt_new=[1],
                reply=[0] * tokens,
                logprobs=[0.0] * tokens,
                spans=(VersionSpan(PolicyVersion(0), 0, tokens),),
                finish="stop",
                action="",
                env_s=0.0,
                wall_s=0.0,
                worker=WorkerId("r0-w0"),
            ),
            "agent-0",
        )

    def end(self, trajectory: str, journal: tuple[int, ...], tokens: int) -> BatchItem:
        item = BatchItem(TrajectoryId(trajectory), GroupId("b0-g0"), 1.0, "completed", journal)
        self.store(
            TrajectoryCompleted(
                trajectory=item.trajectory,
                group=item.group,
                batch=0,
                retry=0,
                status=item.status,
                reward=item.reward,
                turns=len(journal),
                generated_tokens=tokens,
                min_version=PolicyVersion(0),
                max_version=PolicyVersion(0),
                journal=journal,
                env_s=0.0,
                wall_s=0.0,
            )
        )
        return item


def assign(worker: str, generation: int) -> Assign:
    return Assign(WorkerId(worker), Role.COLOCATED, ONE, RoleGeneration(generation))


LAUNCHING = {"activity": Activity.TRANSITIONING, "stage": Stage.LAUNCHING, "incarnation": 1}
PREPARED = {"stage": Stage.PREPARED, "version": 0}
ACTIVE = {"activity": Activity.ACTIVE, "stage": Stage.NONE}
INACTIVE = {"activity": Activity.INACTIVE, "stage": Stage.NONE}


def sound_run() -> list[Seen]:
    """The record."""
    story = Story()
    for actor in ACTORS:
        story.see(ActorBegan, actor=actor, life=1)
    story.begin("t0-t0", "trainer", held=True)
    story.begin("t0-w0", held=False)
    story.store(WorkerReady(worker=WorkerId("t0-w0"), incarnation=ONE, endpoint="", pid=1, init_ms=1))
    story.store(WeightsPublished(version=PolicyVersion(0), uri="", manifest_sha256="", bytes=1))
    story.write()
    _growth(story)
    _borrow(story)
    items = _episodes(story)
    _train(story, items)
    _failed_expansion(story)
    _reclaim(story)
    story.see(FaultsStopped)
    story.see(RunEnded, finished=True)
    return story.record


def _growth(story: Story) -> None:
    """Two reserved workers; the overlap worker is asked for too, but its turn comes later."""
    story.decide(("r0-w0", "r0-w1"))
    add = (assign("r0-w0", 1), assign("r0-w1", 1))
    story.write({"r0-w0": LAUNCHING, "r0-w1": LAUNCHING}, plan=story.plan(1, add=add))
    for worker, gpu in (("r0-w0", 0), ("r0-w1", 1)):
        story.send(Launch(worker=WorkerId(worker), incarnation=ONE, gpus=(gpu,), service="rollout_worker"))
        story.begin(worker, held=True)
        story.serve(worker)
    story.write({"r0-w0": PREPARED, "r0-w1": PREPARED})
    story.write(plan=story.plan(1, "applying", add=add), admission_paused=PlanId("p1"))
    story.role("r0-w0", 1)
    story.role("r0-w1", 1)
    active = {**ACTIVE, "role_generation": 1}
    story.write({"r0-w0": active, "r0-w1": active}, plan=None, admission_paused=None)


def _borrow(story: Story) -> None:
    add = (assign("t0-w0", 1),)
    story.write({"t0-w0": LAUNCHING}, plan=story.plan(2, add=add), pairs=story.residency(Residency.RELEASING))
    story.hold("t0-t0", False)
    story.write(pairs=story.residency(Residency.FREE))
    story.write(pairs=story.residency(Residency.ACTIVATING))
    fields: dict[str, Any] = {"worker": "t0-w0", "incarnation": 1, "role_generation": 1}
    story.send(Activate(**fields), "toggle_manager")
    story.hold("t0-w0", True)
    story.store(WorkerActivated(**fields, took_ms=1))
    story.weights("t0-w0", 0)
    story.write({"t0-w0": PREPARED})
    story.write(plan=story.plan(2, "applying", add=add), admission_paused=PlanId("p2"))
    story.role("t0-w0", 1)
    active = {**ACTIVE, "role_generation": 1}
    story.write({"t0-w0": active}, plan=None, admission_paused=None, pairs=story.residency(Residency.ROLLOUT))


def _episodes(story: Story) -> tuple[BatchItem, ...]:
    """Two trajectories of a group; the first one's first turn is interrupted once, and it has a second turn."""
    for member in (0, 1):
        story.store(
            RolloutTask(
                trajectory=TrajectoryId(f"b0-g0-m{member}"),
                group=GroupId("b0-g0"),
                batch=0,
                retry=0,
                task_seed=1,
                sample_seed=member,
                min_version=PolicyVersion(0),
                temperature=1.0,
            )
        )
    first, second, other = "b0-g0-m0/0/h", "b0-g0-m0/1/h", "b0-g0-m1/0/h"
    story.attempt(first, 1, "r0-w0", 0, 3, 1)
    story.store(
        RequestInterrupted(
            trajectory=TrajectoryId("b0-g0-m0"),
            request=RequestId(first),
            attempt=1,
            retry=0,
            worker=WorkerId("r0-w0"),
            prefix_len=0,
            received=4,
            cause="interrupted",
        )
    )
    story.attempt(first, 2, "r0-w1", 4, 2)
    journal = [story.turn("b0-g0-m0", 0, first, 6, attempts=2)]
    story.attempt(second, 1, "t0-w0", 0, 2)
    journal.append(story.turn("b0-g0-m0", 1, second, 2))
    story.attempt(other, 1, "r0-w0", 0, 5)
    alone = story.turn("b0-g0-m1", 0, other, 5)
    return story.end("b0-g0-m0", tuple(journal), 8), story.end("b0-g0-m1", (alone,), 5)


def _train(story: Story, items: tuple[BatchItem, ...]) -> None:
    story.store(BatchReady(batch=0, items=items))
    story.store(TrainingBegin(batch=0))
    leave = Leave(WorkerId("t0-w0"), story.now_ms + 3_000)
    story.decide(("r0-w0", "r0-w1"), (leave,), batch=0)
    cut = {"activity": Activity.TRANSITIONING, "stage": Stage.DRAINING, "role_generation": 2}
    story.write(
        {"t0-w0": cut},
        plan=story.plan(3, "applying", remove=(leave,)),
        pairs=story.residency(Residency.DRAINING, leave.deadline_ms),
    )
    fields: dict[str, Any] = {"worker": "t0-w0", "incarnation": 1, "role_generation": 2}
    story.send(Drain(**fields), "toggle_manager")
    story.store(WorkerDrained(**fields, interrupted=0))
    story.send(Deactivate(**fields), "toggle_manager")
    story.hold("t0-w0", False)
    story.store(WorkerReleased(**fields, freed_bytes=1, took_ms=1))
    story.write({"t0-w0": INACTIVE}, plan=None, pairs=story.residency(Residency.FREE, leave.deadline_ms))
    training = {**ACTIVE, "role_generation": 1}
    story.write({"t0-t0": training}, pairs=story.residency(Residency.TRAINING), training_batch=0)
    story.send(TrainerResume(epoch=story.table.epoch, batch=0), "toggle_manager")
    story.hold("t0-t0", True)
    story.store(WeightsPublished(version=PolicyVersion(1), uri="", manifest_sha256="", bytes=1))
    story.store(
        StepFinished(
            batch=0,
            version=PolicyVersion(1),
            train_s=1.0,
            trained_tokens=13,
            reward_mean=1.0,
            reward_std=0.0,
            loss=0.0,
            grad_norm=0.0,
            zero_variance_groups=1,
        )
    )
    story.weights("r0-w0", 1)
    story.weights("r0-w1", 1)
    at_one = {"version": 1}
    story.write({"r0-w0": at_one, "r0-w1": at_one}, policy_version=1)


def _failed_expansion(story: Story) -> None:
    """A preemptible GPU arrives; its worker dies while it starts."""
    story.store(GpuAvailable(node="s0", gpus=(0,)))  # type: ignore[arg-type]
    story.decide(("r0-w0", "r0-w1", "s0-w0"), batch=0)
    plan = story.plan(4, add=(assign("s0-w0", 1),))
    story.write({"s0-w0": LAUNCHING}, plan=plan)
    story.send(Launch(worker=WorkerId("s0-w0"), incarnation=ONE, gpus=(0,), service="rollout_worker"))
    story.begin("s0-w0", held=True)
    story.store(PlanProgress(plan_id=plan.plan_id, part="rebuilder", report="failed"))
    story.write({"s0-w0": INACTIVE}, plan=None, writer=story.writer(failed_plans=1))
    story.send(Kill(worker=WorkerId("s0-w0"), incarnation=ONE, grace_ms=100, reason="it failed"))


def _reclaim(story: Story) -> None:
    story.store(GpuReclaimed(node="s0", gpus=(0,), notice_ms=500))  # type: ignore[arg-type]
    story.see(ProcessEnded, node="s0", worker="s0-w0", incarnation=1)
    story.store(WorkerGone(worker=WorkerId("s0-w0"), incarnation=ONE, reason="killed:reclaimed"))
    story.decide(("r0-w0", "r0-w1"), (Leave(WorkerId("s0-w0"), story.now_ms + 500),), batch=0)
    story.write()
