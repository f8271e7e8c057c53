"""Messages to a rollout worker: lifecycle commands from executors, generation requests from edges.

Commands go over core NATS to one incarnation's subject and are repeated until the fact that answers them
is seen; each is idempotent. A command with an older `role_generation` than the worker has is ignored.
"""

from __future__ import annotations

from messages.envelope import Bulk, Finite, Message
from messages.ids import Incarnation, PolicyVersion, RequestId, Role, RoleGeneration, TrajectoryId, WorkerId


# executor | pipeline_scheduler -> rollout_worker. Answered by WeightsApplied (at this version or a newer one).
class UpdateWeights(Message, frozen=True, kw_only=True, tag="weights.update/1"):
    """Load the snapshot of `version`. Running requests pause, and continue on the new weights."""

    worker: WorkerId
    incarnation: Incarnation
    version: PolicyVersion
    uri: str  # directory of the snapshot: a path, http(s)://, or any fsspec URI
    manifest_sha256: str


# executor -> rollout_worker. Answered by RoleSet.
class SetRole(Message, frozen=True, kw_only=True, tag="role.assign/1"):
    """Serve `role` to requests fenced with `role_generation`. Only sent to a drained or fresh worker."""

    worker: WorkerId
    incarnation: Incarnation
    role: Role
    role_generation: RoleGeneration


# executor -> rollout_worker. Answered by WorkerDrained.
class Drain(Message, frozen=True, kw_only=True, tag="worker.drain/1"):
    """Refuse new requests; end each running one as `interrupted` with the tokens it has."""

    worker: WorkerId
    incarnation: Incarnation
    role_generation: RoleGeneration  # the generation of the cut epoch


# toggle_manager -> rollout_worker (overlap). Answered by WorkerReleased. Only after WorkerDrained.
class Deactivate(Message, frozen=True, kw_only=True, tag="worker.deactivate/1"):
    """Give the device memory back; the process lives on (paper 4.6)."""

    worker: WorkerId
    incarnation: Incarnation
    role_generation: RoleGeneration


# toggle_manager -> rollout_worker (overlap). Answered by WorkerActivated.
class Activate(Message, frozen=True, kw_only=True, tag="worker.activate/1"):
    """Restore the device state; weights follow by UpdateWeights."""

    worker: WorkerId
    incarnation: Incarnation
    role_generation: RoleGeneration


# agent | gateway -> rollout_worker. Core NATS. Key: (request, attempt).
class Generate(Bulk, frozen=True, kw_only=True, tag="request.generate/1", gc=False):
    """Continue `prompt + prefix` under the fence (worker, incarnation, role_generation, attempt).

    Tokens stream to `reply` as TokenChunk, the first at offset len(prefix). `max_new_tokens` counts from the
    end of the prompt, so the prefix is within it.
    """

    request: RequestId
    trajectory: TrajectoryId
    attempt: int
    worker: WorkerId
    incarnation: Incarnation
    role_generation: RoleGeneration
    min_version: PolicyVersion
    prompt: list[int]
    prefix: list[int]
    max_new_tokens: int
    temperature: Finite
    seed: int
    stop_ids: list[int]
    reply: str
    # Disaggregated execution: the bootstrap triple of the prefill side, as in SGLang.
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    bootstrap_room: int = -1
    hold_ms: int = 0  # a token may wait so long for others, so that chunks are fewer: nobody reads along


# agent | gateway -> rollout_worker. Core NATS, best effort.
class CancelRequest(Message, frozen=True, kw_only=True, tag="request.cancel/1"):
    """The client no longer wants this attempt; free it on every side."""

    request: RequestId
    attempt: int
