"""Messages to the orchestrator: targets, what executors did, what workers and node agents report."""

from __future__ import annotations

from messages.decision_engine import Leave
from messages.envelope import Message
from messages.ids import (
    DecisionId,
    Epoch,
    Incarnation,
    Mode,
    NodeId,
    PlanId,
    PolicyVersion,
    Role,
    RoleGeneration,
    WorkerId,
)


# decision_engine -> orchestrator. Durable (EV). Key: decision_id. A newer target replaces an older one whole.
class TargetConfiguration(Message, frozen=True, kw_only=True, tag="target.configuration/1"):
    """The configuration to reach: role counts over `usable`, and what must be given back (paper 4.1.2, stage 2)."""

    decision_id: DecisionId
    budget_id: int
    mode: Mode
    prefill: int
    decode: int
    colocated: int
    borrow: bool
    usable: tuple[WorkerId, ...]  # slots the counts may be placed on; prefill+decode+colocated <= len(usable)
    leaving: tuple[Leave, ...]  # mandatory returns, first in any plan
    training_batch: int | None  # the batch training is to run once its GPUs are its own
    forced: bool = False  # hysteresis did not apply
    reason: str = ""


# cluster_rebuilder | toggle_manager -> orchestrator. Durable (EV). Key: (plan_id, part, report).
class PlanProgress(Message, frozen=True, kw_only=True, tag="plan.progress/1"):
    """An executor's part of a plan has come this far."""

    plan_id: PlanId
    part: str  # "rebuilder" | "toggle"
    report: str  # "prepared": joiners hold weights | "applied": drained and re-roled | "failed" | "vetoed"
    failed_workers: tuple[WorkerId, ...] = ()
    reason: str = ""


# rollout_worker -> orchestrator, cluster_rebuilder, toggle_manager. Durable (EV). Key: (worker, incarnation).
class WorkerReady(Message, frozen=True, kw_only=True, tag="worker.ready/1"):
    """The worker's process is up, its engine is initialised and answers commands. It does not serve yet."""

    worker: WorkerId
    incarnation: Incarnation
    endpoint: str  # where peers reach the engine's own transport (KV hand-over), "" if it has none
    pid: int
    init_ms: int  # how long initialisation took


# rollout_worker -> orchestrator, cluster_rebuilder, pipeline_scheduler. Durable (EV). Key: (worker, incarnation, version).
class WeightsApplied(Message, frozen=True, kw_only=True, tag="weights.applied/1"):
    """The worker generates with `version` from now on."""

    worker: WorkerId
    incarnation: Incarnation
    version: PolicyVersion
    took_ms: int = 0
    restored_bytes: int = 0  # overlap workers, at the first load after an activation: memory taken since, as measured


# rollout_worker -> orchestrator, cluster_rebuilder, toggle_manager. Durable (EV). Key: (worker, incarnation, generation).
class RoleSet(Message, frozen=True, kw_only=True, tag="role.set/1"):
    """The worker serves `role` and accepts requests fenced with `role_generation`."""

    worker: WorkerId
    incarnation: Incarnation
    role: Role
    role_generation: RoleGeneration


# rollout_worker -> executors. Durable (EV). Key: (worker, incarnation, generation).
class WorkerDrained(Message, frozen=True, kw_only=True, tag="worker.drained/1"):
    """No request runs on the worker; each one it had ended with `interrupted` and its partial tokens."""

    worker: WorkerId
    incarnation: Incarnation
    role_generation: RoleGeneration
    interrupted: int


# rollout_worker -> toggle_manager. Durable (EV). Key: (worker, incarnation, toggle).
class WorkerReleased(Message, frozen=True, kw_only=True, tag="worker.released/1"):
    """The worker's device memory is given back (`freed_bytes` as the operating system or driver sees it)."""

    worker: WorkerId
    incarnation: Incarnation
    role_generation: RoleGeneration
    freed_bytes: int
    took_ms: int


# rollout_worker -> toggle_manager. Durable (EV). Key: (worker, incarnation, role_generation).
class WorkerActivated(Message, frozen=True, kw_only=True, tag="worker.activated/1"):
    """The worker's device state is restored (weights, KV buffers, graphs, KV communication metadata)."""

    worker: WorkerId
    incarnation: Incarnation
    role_generation: RoleGeneration
    took_ms: int


# node_agent -> orchestrator, executors, elastic_scheduler. Durable (EV). Key: (worker, incarnation).
class WorkerGone(Message, frozen=True, kw_only=True, tag="worker.gone/1"):
    """The worker's process has ended (verified by its node agent) and its GPUs are free."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str  # "exit:1", "signal:9", "killed:reclaimed", "killed:plan", "launch_failed: ..."


# node_agent -> orchestrator, toggle_manager, monitor. Durable (EV). Key: (node, gpus, worker, incarnation).
class GpuFree(Message, frozen=True, kw_only=True, tag="gpu.free/1"):
    """These GPUs hold no process of PEARL's."""

    node: NodeId
    gpus: tuple[int, ...]
    worker: WorkerId
    incarnation: Incarnation


# agent | router | pipeline_scheduler | decision_engine | cluster_rebuilder | toggle_manager -> orchestrator. Core NATS, repeated
# while it is so: from whoever holds a replica and may publish.
class TableAhead(Message, frozen=True, kw_only=True, tag="table.ahead/1"):
    """The sender has seen the role table at `epoch`, which is beyond what the bucket has now: the store went back."""

    epoch: Epoch


# orchestrator's own shell, from heartbeats missed (never on the wire between services); kept here because it is an input.
class WorkerLost(Message, frozen=True, kw_only=True, tag="worker.lost/1"):
    """No heartbeat of the worker's node agent within the lease: its workers must be assumed unreachable."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str
