"""Messages to an agent (or any other edge): tasks, assignments, token streams; and its journal."""

from __future__ import annotations

from typing import Final

import msgspec

from messages.envelope import Bulk, Finite, Message
from messages.ids import GroupId, Incarnation, PolicyVersion, RequestId, RoleGeneration, TrajectoryId, WorkerId

PLAIN: Final = "http-"
"""Requests of the gateway outside of any session, and the trajectory that they are journalled under, begin with it. That journal is
purged with everybody's: nothing holds it."""


# pipeline_scheduler -> agent. Durable work queue (TASKS), acknowledged when the trajectory's end is in the stream.
class RolloutTask(Message, frozen=True, kw_only=True, tag="rollout.task/1"):
    """Run one episode. Members of a group share `task_seed`, hence the same task; `sample_seed` differs."""

    trajectory: TrajectoryId
    group: GroupId
    batch: int
    retry: int
    task_seed: int
    sample_seed: int
    min_version: PolicyVersion
    temperature: float
    evaluation: bool = False  # held-out episode: its end goes to the monitor, never into a batch


# router -> agent. Core NATS reply to AssignRequest.
class Assignment(Message, frozen=True, kw_only=True, tag="request.assigned/1"):
    """Run the attempt on this worker, under this fence. Disaggregated: decode worker here, prefill beside it."""

    request: RequestId
    attempt: int
    worker: WorkerId
    incarnation: Incarnation
    role_generation: RoleGeneration
    prefill_worker: str = ""
    prefill_incarnation: Incarnation = Incarnation(0)
    prefill_role_generation: RoleGeneration = RoleGeneration(0)
    prefill_endpoint: str = ""
    room: int = -1


# router -> agent. Core NATS reply to AssignRequest.
class NotNow(Message, frozen=True, kw_only=True, tag="request.not_now/1"):
    """No worker can take it now: ask again after `retry_after_ms`."""

    request: RequestId
    attempt: int
    retry_after_ms: int
    reason: str  # "admission paused", "no worker at version 7", "all workers full", "no worker"


# rollout_worker -> edge (the Generate's reply subject). Core NATS; a gap in offsets is an interruption, and so is a chunk
# of the attempt that cannot be read.
class TokenChunk(Bulk, frozen=True, kw_only=True, tag="token.chunk/1", gc=False):
    """Tokens [offset, offset+len) of the reply, counted from the end of the prompt.

    `finish`: "" (more follow), "stop", "length", "interrupted" (ask again with what you have), or "refused"
    (nothing ran here; `reason` says why).
    """

    request: RequestId
    attempt: int
    worker: WorkerId
    incarnation: Incarnation
    offset: int
    tokens: list[int]
    logprobs: list[Finite]
    version: PolicyVersion
    finish: str = ""
    reason: str = ""
    cached_tokens: int = 0  # prompt tokens found in the prefix cache, on the first chunk


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a reply were generated with `version`."""

    version: PolicyVersion
    start: int
    end: int


# agent | gateway -> journal (stream JOURNAL). Durable. Key: (trajectory, retry, turn). Guarded: one writer a trajectory.
class TurnFinished(Bulk, frozen=True, kw_only=True, tag="turn.finished/1", gc=False):
    """One turn: what was sent, what came back, what the environment answered.

    The next turn's prompt is this one's `prompt_new` appended to all before, then `reply`, then `observation`
    (which is the next turn's `prompt_new`).
    """

    trajectory: TrajectoryId
    group: GroupId
    batch: int
    retry: int
    turn: int
    request: RequestId
    attempts: int
    prompt_new: list[int]  # prompt tokens this turn added to the context
    reply: list[int]
    logprobs: list[Finite]
    spans: tuple[VersionSpan, ...]
    finish: str
    action: str  # what the environment was given
    env_s: Finite
    wall_s: Finite
    worker: WorkerId
    cached_tokens: int = 0


# agent | gateway -> journal. Durable. Key: (request, attempt).
class RequestInterrupted(Bulk, frozen=True, kw_only=True, tag="request.interrupted/1", gc=False):
    """Attempt `attempt` ended early: it began at `prefix_len` and `received` tokens of it reached this client."""

    trajectory: TrajectoryId
    request: RequestId
    attempt: int
    retry: int
    worker: WorkerId
    prefix_len: int
    received: int
    # "interrupted" | "silence" | "gap" | "worker_gone" | "stale" (tokens below min_version, none kept) | "stop_string" (the
    # client found one: its reply ends here)
    cause: str


# rollout_worker -> its attempt log (a file beside the worker, MessagePack frames): what the checker holds journals against.
class AttemptLogged(Bulk, frozen=True, kw_only=True, tag="attempt.logged/1", gc=False):
    """The worker began (generated = 0) or ended an attempt that continues a reply at `start_offset`."""

    worker: WorkerId
    incarnation: Incarnation
    request: RequestId
    attempt: int
    start_offset: int
    generated: int
    version: PolicyVersion
    finish: str  # "" at the beginning
    at_ms: int
