"""Messages to a node agent: launch and kill processes on its node. Also `gpu.reclaimed/1` for its node."""

from __future__ import annotations

from messages.envelope import Message
from messages.ids import Incarnation, WorkerId


# cluster_rebuilder | toggle_manager -> node_agent. Core NATS, repeated until WorkerReady. Key: (worker, incarnation).
class Launch(Message, frozen=True, kw_only=True, tag="worker.launch/1"):
    """Start the worker's process on its GPUs, unless this incarnation (or a newer one) was started before."""

    worker: WorkerId
    incarnation: Incarnation
    gpus: tuple[int, ...]
    service: str  # "rollout_worker" | "trainer"


# executors -> node_agent. Core NATS, repeated until WorkerGone. Key: (worker, incarnation).
class Kill(Message, frozen=True, kw_only=True, tag="worker.kill/1"):
    """End the worker's process: SIGTERM, and SIGKILL after `grace_ms`. Answered by WorkerGone, also if it was gone."""

    worker: WorkerId
    incarnation: Incarnation
    grace_ms: int
    reason: str
