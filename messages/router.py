"""Messages to a router: where should this request run?"""

from __future__ import annotations

from messages.envelope import Message
from messages.ids import PolicyVersion, RequestId, TrajectoryId


# agent | gateway -> router (queue group). Core NATS request; answered by Assignment or NotNow.
class AssignRequest(Message, frozen=True, kw_only=True, tag="request.assign/1"):
    """Place one attempt at a request."""

    request: RequestId
    trajectory: TrajectoryId  # the session: placement prefers the worker that holds its prefix
    attempt: int
    min_version: PolicyVersion
    context_tokens: int  # prompt and prefix so far
    last_worker: str = ""  # where the previous attempt or turn ran; prefix affinity survives a router restart by it
    avoid: tuple[str, ...] = ()  # workers that just refused or lost this request
    max_version: int = -1  # only workers whose policy is no newer; -1: any
