"""Where messages travel: every subject, stream and bucket of a job, and the route of every kind of message.

All names carry the job's name, so that several jobs share one NATS. A message's subject, its stream (or none)
and its de-duplication id follow from the message alone (`route_of`), so that no two senders can disagree.

    pearl.<job>.ev.<noun_verb>.<key>         durable control events and facts   stream <job>_EV
    pearl.<job>.task.<batch>                 rollout tasks, a work queue         stream <job>_TASKS
    pearl.<job>.journal.<trajectory>         turns and interruptions             stream <job>_JOURNAL
    pearl.<job>.dead.<receiver>              refused messages                    stream <job>_DEAD
    pearl.<job>.cmd.node.<node>              commands to a node agent            core
    pearl.<job>.cmd.worker.<worker>          commands to a rollout worker        core
    pearl.<job>.cmd.trainer                  commands to the trainer             core
    pearl.<job>.gen.<worker>                 generation requests to a worker     core
    pearl.<job>.tok.<edge>                   token chunks to an edge             core
    pearl.<job>.assign                       requests to the routers             core, queue group "router"
    pearl.<job>.tel.<noun_verb>.<key>        telemetry and heartbeats            core
    pearl.<job>.roles.table                  the role table, republished         core (from bucket <job>_roles)
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from messages import (
    agent,
    decision_engine,
    elastic_scheduler,
    executors,
    monitor,
    node_agent,
    orchestrator,
    pipeline_scheduler,
    rollout_worker,
    router,
    runtime_tracker,
    toggle_manager,
    trainer,
)
from messages.envelope import Message, Misplaced, decode, tag_of

JOB_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
"""A job's name: one subject token, and a legal part of stream and bucket names."""
TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A node or worker name: one subject token."""

ROLES_API_PREFIX: Final = "roles.api"
"""JetStream API prefix under which all but the orchestrator read the role bucket (imported from account CTRL)."""
APP_API_PREFIX: Final = "app.api"
"""JetStream API prefix under which account MON asks about APP's streams: under `$JS.API` the server would take it to mean its own."""
TABLE_KEY: Final = "table"
LEASE_KEY: Final = "orchestrator"


class Route(msgspec.Struct, frozen=True):
    """How one kind travels. `key` and `ids` name fields; the key is the subject's last token."""

    family: str  # "ev" | "task" | "journal" | "dead" | "cmd.node" | "cmd.worker" | "cmd.trainer" | "gen" | "tel" | "assign" | "reply"
    key: str | None = None
    ids: tuple[str, ...] | None = None  # fields that make the de-duplication id; None: the sender gives one

    @property
    def durable(self) -> bool:
        return self.family in ("ev", "task", "journal", "dead")


ROUTES: Final[dict[type[Message], Route]] = {
    elastic_scheduler.GpuAvailable: Route("ev", "node"),
    elastic_scheduler.GpuReclaimed: Route("ev", "node"),
    elastic_scheduler.NodeUp: Route("ev", "node", ("node", "agent_incarnation")),
    elastic_scheduler.TrainingBegin: Route("ev", None, ("batch",)),
    elastic_scheduler.TrainingFinished: Route("ev", None, ("batch",)),
    decision_engine.BudgetChanged: Route("ev", None, ("budget_id",)),
    decision_engine.WorkloadProfile: Route("ev", None, ("train_step",)),
    decision_engine.BatchProgress: Route("ev", None, ("batch", "done")),
    orchestrator.TargetConfiguration: Route("ev", None, ("decision_id",)),
    orchestrator.PlanProgress: Route("ev", None, ("plan_id", "part", "report")),
    orchestrator.WorkerReady: Route("ev", "worker", ("worker", "incarnation")),
    orchestrator.WeightsApplied: Route("ev", "worker", ("worker", "incarnation", "version")),
    orchestrator.RoleSet: Route("ev", "worker", ("worker", "incarnation", "role_generation")),
    orchestrator.WorkerDrained: Route("ev", "worker", ("worker", "incarnation", "role_generation")),
    orchestrator.WorkerReleased: Route("ev", "worker", ("worker", "incarnation", "role_generation")),
    orchestrator.WorkerActivated: Route("ev", "worker", ("worker", "incarnation", "role_generation")),
    orchestrator.WorkerGone: Route("ev", "worker", ("worker", "incarnation")),
    orchestrator.GpuFree: Route("ev", "node", ("node", "worker", "incarnation")),
    executors.ReconfigurationPlan: Route("ev", None, ("plan_id", "stage")),
    toggle_manager.TrainerReleased: Route("ev", None, ("epoch",)),
    toggle_manager.TrainerResumed: Route("ev", None, ("epoch", "batch")),
    toggle_manager.TrainerReady: Route("ev", None, ("start_id",)),
    pipeline_scheduler.TrajectoryCompleted: Route("ev", "trajectory", ("trajectory", "retry")),
    pipeline_scheduler.WeightsPublished: Route("ev", None, ("version",)),
    pipeline_scheduler.StepFinished: Route("ev", None, ("batch",)),
    pipeline_scheduler.BatchReady: Route("ev", "batch", ("batch",)),
    pipeline_scheduler.Evaluated: Route("ev", None, ("version",)),
    monitor.DecisionRecord: Route("ev", None, ("decision_id",)),
    monitor.GpusReturned: Route("ev", None, ("batch",)),
    monitor.StoreRewound: Route("ev", None, ("epoch",)),
    monitor.DeadLetter: Route("dead", "receiver"),
    agent.RolloutTask: Route("task", "batch", ("trajectory", "retry")),
    agent.TurnFinished: Route("journal", "trajectory", ("trajectory", "retry", "turn")),
    agent.RequestInterrupted: Route("journal", "trajectory", ("request", "retry", "attempt")),
    node_agent.Launch: Route("cmd.node"),
    node_agent.Kill: Route("cmd.node"),
    rollout_worker.UpdateWeights: Route("cmd.worker", "worker"),
    rollout_worker.SetRole: Route("cmd.worker", "worker"),
    rollout_worker.Drain: Route("cmd.worker", "worker"),
    rollout_worker.Deactivate: Route("cmd.worker", "worker"),
    rollout_worker.Activate: Route("cmd.worker", "worker"),
    rollout_worker.Generate: Route("gen", "worker"),
    rollout_worker.CancelRequest: Route("gen"),
    trainer.TrainerResume: Route("cmd.trainer"),
    trainer.TrainerRelease: Route("cmd.trainer"),
    router.AssignRequest: Route("assign"),
    agent.Assignment: Route("reply"),
    agent.NotNow: Route("reply"),
    agent.TokenChunk: Route("reply"),
    runtime_tracker.RequestFinished: Route("tel", "worker"),
    runtime_tracker.WorkerHeartbeat: Route("tel", "worker"),
    runtime_tracker.NodeHeartbeat: Route("tel", "node"),
    runtime_tracker.OperationTimed: Route("tel"),
    orchestrator.TableAhead: Route("tel"),
}


def worker_of(node: str, slot: int) -> str:
    """The rollout worker slot `slot` of a node. `node_of` is its inverse."""
    return f"{node}-w{slot}"


def node_of(worker: str) -> str:
    """The node a worker slot is on: all before its last dash."""
    return worker.rpartition("-")[0]


def noun_verb(kind: type[Message]) -> str:
    """`gpu.available/1` as one subject token: `gpu_available`."""
    return tag_of(kind).partition("/")[0].replace(".", "_")


def event_subject(job: str, kind: type[Message], key: str = "*") -> str:
    """Subject (or filter, with the default key) of a durable event kind."""
    return f"pearl.{job}.ev.{noun_verb(kind)}.{key}"


def telemetry_subject(job: str, kind: type[Message], key: str = "*") -> str:
    """Subject (or filter) of a telemetry kind."""
    return f"pearl.{job}.tel.{noun_verb(kind)}.{key}"


def subject_of(job: str, message: Message) -> str:
    """The subject a message is published on. Replies have none of their own: they go where the request says."""
    route = ROUTES[type(message)]
    if route.family == "cmd.node":
        assert isinstance(message, (node_agent.Launch, node_agent.Kill))
        return f"pearl.{job}.cmd.node.{node_of(message.worker)}"
    if route.family in ("cmd.trainer", "assign"):
        return f"pearl.{job}.{route.family}"
    assert route.family != "reply", f"{tag_of(type(message))} is a reply: publish it to the request's reply subject"
    key = "-" if route.key is None else str(getattr(message, route.key))
    if route.family in ("ev", "tel"):
        return f"pearl.{job}.{route.family}.{noun_verb(type(message))}.{key}"
    return f"pearl.{job}.{route.family}.{key}"


M = TypeVar("M", bound=Message)


def decode_on(job: str, subject: str, data: bytes, *accepted: type[M]) -> M:
    """Decode what arrived on a subject. Raises what `decode` raises, and `Misplaced`.

    Permissions are given by subject: without this, whoever may say one kind of event could say any other in its place.
    Replies go where the request said, and a cancellation has its worker in the subject only: these are not held against it.
    """
    message = decode(data, *accepted)
    route = ROUTES[type(message)]
    if route.family == "reply" or isinstance(message, rollout_worker.CancelRequest):
        return message
    expected = subject_of(job, message)
    if expected != subject:
        raise Misplaced(f"{tag_of(type(message))} belongs on {expected}, not here")
    return message


def message_id(message: Message) -> str | None:
    """De-duplication id that follows from the message, or None where each publication is a new fact."""
    route = ROUTES[type(message)]
    if route.ids is None:
        return None
    return ":".join([tag_of(type(message)), *(str(getattr(message, field)) for field in route.ids)])


def stream_of(job: str, message_type: type[Message]) -> str | None:
    """The stream a kind is kept in; None for core NATS."""
    route = ROUTES[message_type]
    return stream(job, route.family) if route.durable else None


def stream(job: str, family: str) -> str:
    """Stream name of a durable family."""
    return f"{job}_{ {'ev': 'EV', 'task': 'TASKS', 'journal': 'JOURNAL', 'dead': 'DEAD'}[family] }"


def roles_bucket(job: str) -> str:
    """Bucket of the role table, in account CTRL. Only the orchestrator's table writer may write it."""
    return f"{job}_roles"


def lease_bucket(job: str) -> str:
    """Bucket of the orchestrators' lease, in account CTRL."""
    return f"{job}_lease"


def state_bucket(job: str) -> str:
    """Bucket of every other actor's core state, one key an actor."""
    return f"{job}_state"


def roles_feed(job: str) -> str:
    """Subject on which the role bucket is republished to account APP."""
    return f"pearl.{job}.roles.{TABLE_KEY}"
