"""What the tests of both executors share: a job, a role table in few words, and a core with a clock that is driven."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from messages.decision_engine import Leave
from messages.envelope import Message
from messages.executors import Assign
from messages.ids import (
    Activity,
    DecisionId,
    Epoch,
    Gpu,
    Incarnation,
    NodeId,
    PlanId,
    PolicyVersion,
    Residency,
    Role,
    RoleGeneration,
    Stage,
    WorkerId,
    Zone,
)
from messages.orchestrator import (
    PlanProgress,
    RoleSet,
    WeightsApplied,
    WorkerActivated,
    WorkerDrained,
    WorkerGone,
    WorkerReady,
    WorkerReleased,
)
from messages.pipeline_scheduler import WeightsPublished
from pearl_state.model import Pair, PlanRecord, RoleTable, Row
from services.jobfile import JobFile, NodeSection
from services.runtime.core import Input, Note, Refuse, Send, Tick

JOB = JobFile(
    nodes=(
        NodeSection(name="r0", zone=Zone.RESERVED, gpus=2),
        NodeSection(name="p0", zone=Zone.PREEMPTIBLE, gpus=2),
        NodeSection(name="t0", zone=Zone.TRAINING, gpus=2),
    )
)
TIMES = JOB.timeouts
START_MS = 1_000_000
M = TypeVar("M", bound=Message)


def zone_of(worker: str) -> Zone:
    return {"r": Zone.RESERVED, "p": Zone.PREEMPTIBLE, "t": Zone.OVERLAP}[worker[0]]


def row(
    worker: str,
    activity: Activity = Activity.ACTIVE,
    stage: Stage = Stage.NONE,
    *,
    role: Role = Role.COLOCATED,
    incarnation: int = 1,
    generation: int = 1,
) -> Row:
    return Row(
        worker=WorkerId(worker),
        gpus=(Gpu(NodeId(worker[:2]), int(worker[-1])),),
        zone=zone_of(worker),
        role=role,
        activity=activity,
        stage=stage,
        incarnation=Incarnation(incarnation),
        role_generation=RoleGeneration(generation),
    )


def launching(worker: str, incarnation: int = 1, generation: int = 0) -> Row:
    return row(worker, Activity.TRANSITIONING, Stage.LAUNCHING, incarnation=incarnation, generation=generation)


def draining(worker: str, generation: int = 2) -> Row:
    return row(worker, Activity.TRANSITIONING, Stage.DRAINING, generation=generation)


def switching(worker: str, generation: int = 2) -> Row:
    return row(worker, Activity.TRANSITIONING, Stage.SWITCHING, generation=generation)


def inactive(worker: str, incarnation: int = 1, generation: int = 1) -> Row:
    return row(worker, Activity.INACTIVE, incarnation=incarnation, generation=generation)


def assign(worker: str, role: Role = Role.COLOCATED, incarnation: int = 1, generation: int = 1) -> Assign:
    return Assign(WorkerId(worker), role, Incarnation(incarnation), RoleGeneration(generation))


def leave(worker: str, deadline_ms: int = START_MS + 60_000) -> Leave:
    return Leave(WorkerId(worker), deadline_ms)


def plan(
    name: str = "p1",
    stage: str = "preparing",
    add: tuple[Assign, ...] = (),
    remove: tuple[Leave, ...] = (),
    reassign: tuple[Assign, ...] = (),
) -> PlanRecord:
    return PlanRecord(
        plan_id=PlanId(name),
        decision_id=DecisionId("d1"),
        stage=stage,
        add=add,
        remove=remove,
        reassign=reassign,
        started_ms=START_MS,
        deadline_ms=START_MS + 600_000,
    )


def ready(worker: str, incarnation: int = 1) -> WorkerReady:
    return WorkerReady(worker=WorkerId(worker), incarnation=Incarnation(incarnation), endpoint="", pid=1, init_ms=1)


def applied(worker: str, version: int, incarnation: int = 1) -> WeightsApplied:
    return WeightsApplied(worker=WorkerId(worker), incarnation=Incarnation(incarnation), version=PolicyVersion(version))


def role_set(worker: str, generation: int, role: Role = Role.COLOCATED, incarnation: int = 1) -> RoleSet:
    return RoleSet(
        worker=WorkerId(worker),
        incarnation=Incarnation(incarnation),
        role=role,
        role_generation=RoleGeneration(generation),
    )


def drained(worker: str, generation: int = 2) -> WorkerDrained:
    return WorkerDrained(
        worker=WorkerId(worker),
        incarnation=Incarnation(1),
        role_generation=RoleGeneration(generation),
        interrupted=3,
    )


def released(worker: str, generation: int) -> WorkerReleased:
    return WorkerReleased(
        worker=WorkerId(worker),
        incarnation=Incarnation(1),
        role_generation=RoleGeneration(generation),
        freed_bytes=1,
        took_ms=1,
    )


def activated(worker: str, generation: int) -> WorkerActivated:
    return WorkerActivated(
        worker=WorkerId(worker), incarnation=Incarnation(1), role_generation=RoleGeneration(generation), took_ms=1
    )


def gone(worker: str, incarnation: int = 1, reason: str = "exit:1") -> WorkerGone:
    return WorkerGone(worker=WorkerId(worker), incarnation=Incarnation(incarnation), reason=reason)


def published(version: int) -> WeightsPublished:
    return WeightsPublished(version=PolicyVersion(version), uri=f"/s/{version}", manifest_sha256="x", bytes=1)


USUAL = {
    (Activity.INACTIVE, Stage.NONE): Residency.TRAINING,
    (Activity.TRANSITIONING, Stage.LAUNCHING): Residency.ACTIVATING,
    (Activity.TRANSITIONING, Stage.PREPARED): Residency.ACTIVATING,
    (Activity.ACTIVE, Stage.NONE): Residency.ROLLOUT,
    (Activity.TRANSITIONING, Stage.SWITCHING): Residency.ROLLOUT,
    (Activity.TRANSITIONING, Stage.DRAINING): Residency.DRAINING,
}
"""Whose device state is on the GPUs of an overlap row in a condition, in the ordinary course."""


class Driver:
    """A core, its state, and a clock. `say` returns what the core sent because of it."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.state = core.initial()
        self.now_ms = START_MS
        self.epoch = 0
        self.refusals: list[str] = []
        self.notes: list[str] = []

    def say(self, *messages: object) -> list[Message]:
        found: list[Message] = []
        for message in messages:
            self.state, effects = self.core.step(self.state, Input(self.now_ms, message))
            found += [effect.message for effect in effects if isinstance(effect, Send)]
            self.refusals += [effect.reason for effect in effects if isinstance(effect, Refuse)]
            self.notes += [effect.action for effect in effects if isinstance(effect, Note)]
        return found

    def table(
        self,
        *rows: Row,
        plan: PlanRecord | None = None,
        residency: Residency | None = None,
        deadline_ms: int = 0,
        **fields: Any,
    ) -> list[Message]:
        """The next epoch of the role table. Pairs are in `residency`, or in the one that goes with their row."""
        self.epoch += 1
        pairs = tuple(
            Pair(
                overlap=each.worker,
                training=WorkerId("t0-t0"),
                residency=residency or USUAL[each.activity, each.stage],
                deadline_ms=deadline_ms,
            )
            for each in rows
            if each.zone is Zone.OVERLAP
        )
        fields = {"pairs": pairs, **fields}
        table = RoleTable(
            job="demo",
            epoch=Epoch(self.epoch),
            rows=tuple(sorted(rows, key=lambda each: each.worker)),
            plan=plan,
            **fields,
        )
        return self.say(table)

    def wait(self, ms: int) -> list[Message]:
        """Let time pass, then tick."""
        self.now_ms += ms
        return self.say(Tick())

    def restart(self) -> None:
        """Only what is in the checkpoint survives."""
        saved = msgspec.msgpack.encode(self.state)
        self.state = msgspec.msgpack.decode(saved, type=self.core.state_type)


def of(kind: type[M], messages: list[Message]) -> list[M]:
    return [message for message in messages if isinstance(message, kind)]


def named(messages: list[Message], *kinds: type[Message]) -> list[tuple[str, str]]:
    """(kind, worker) of the commands among `messages`."""
    return [
        (type(message).__name__, str(getattr(message, "worker", "")))
        for message in messages
        if not kinds or isinstance(message, kinds)
    ]


def reports(messages: list[Message]) -> list[tuple[str, str]]:
    return [(report.plan_id, report.report) for report in of(PlanProgress, messages)]
