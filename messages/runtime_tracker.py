"""Messages to the runtime tracker: what things cost. Core NATS: losing one costs accuracy, nothing else."""

from __future__ import annotations

from messages.envelope import Message
from messages.ids import Incarnation, RequestId, Role, RoleGeneration, WorkerId


# agent | gateway -> runtime_tracker. Core NATS.
class RequestFinished(Message, frozen=True, kw_only=True, tag="request.finished/1"):
    """One turn as its edge saw it."""

    request: RequestId
    worker: WorkerId
    turn: int
    new_prompt_tokens: int
    generated_tokens: int
    retained_tokens: int
    cached_tokens: int
    attempts: int
    queue_s: float  # asking for an assignment until the first token
    decode_s: float  # first token until the last
    env_s: float  # in neither queue: the environment, and what its edge did besides


# rollout_worker -> runtime_tracker, router, monitor. Core NATS, every heartbeat.
class WorkerHeartbeat(Message, frozen=True, kw_only=True, tag="worker.heartbeat/1"):
    """The worker is alive; its load, and the sums since its start from which rates are fitted."""

    worker: WorkerId
    incarnation: Incarnation
    running: int
    queued: int
    version: int
    serving: bool
    decode_iterations: int  # cumulative, as all below
    decode_tokens: int
    decode_s: float
    decode_batch_sum: int  # sum over iterations of the batch size
    prefill_tokens: int
    prefill_s: float
    refused: int
    rss_bytes: int
    # What an orchestrator whose store went back rebuilds the role table from.
    role: Role = Role.UNKNOWN
    role_generation: RoleGeneration = RoleGeneration(0)


# node_agent -> orchestrator, monitor. Core NATS, every heartbeat.
class NodeHeartbeat(Message, frozen=True, kw_only=True, tag="node.heartbeat/1"):
    """The node agent is alive and supervises these workers (id, incarnation)."""

    node: str
    workers: tuple[tuple[WorkerId, int], ...]
    ended: tuple[tuple[WorkerId, int], ...] = ()  # the newest incarnation of each slot that has ended, if none runs


# executors -> runtime_tracker, monitor. Core NATS.
class OperationTimed(Message, frozen=True, kw_only=True, tag="operation.timed/1"):
    """An operation of an executor took this long (paper Table 3)."""

    # "prepare" | "finalize" | "drain" | "set_role" | "update_weights"; "activate", "deactivate": a whole borrow, a whole
    # return; "plain_step", "toggled_step": from one train step's end to the next, without and with a borrow between them
    operation: str
    worker: str
    took_s: float
