"""Messages to the elastic scheduler: capacity events and training notifications.

`gpu.available/1` and `gpu.reclaimed/1` are the public entrance for preemption feeds: cloud notices,
cluster schedulers, trace replay, or `pearl events` by hand.
"""

from __future__ import annotations

from messages.envelope import Message
from messages.ids import NodeId, PolicyVersion


# preemption_feed | anyone -> elastic_scheduler. Durable (EV). Idempotent by state: GPUs already available stay so.
class GpuAvailable(Message, frozen=True, kw_only=True, tag="gpu.available/1"):
    """GPUs of a node may be used by rollout from now on."""

    node: NodeId
    gpus: tuple[int, ...]
    source: str = ""  # who says so, for people: "trace:bamboo-segment2", "cli", "aws"


# preemption_feed | anyone -> elastic_scheduler, node_agent. Durable (EV). Idempotent by state.
class GpuReclaimed(Message, frozen=True, kw_only=True, tag="gpu.reclaimed/1"):
    """GPUs of a node are taken away `notice_ms` after this message entered the stream; 0: they are gone already."""

    node: NodeId
    gpus: tuple[int, ...]
    notice_ms: int = 0
    source: str = ""


# node_agent -> elastic_scheduler, cluster_rebuilder. Durable (EV). Latest per node counts.
class NodeUp(Message, frozen=True, kw_only=True, tag="node.up/1"):
    """A node agent started (or restarted) and supervises these GPUs."""

    node: NodeId
    gpus: tuple[int, ...]
    agent_incarnation: int
    host: str


# pipeline_scheduler -> elastic_scheduler (never straight to the trainer). Durable (EV). Key: batch.
class TrainingBegin(Message, frozen=True, kw_only=True, tag="training.begin/1"):
    """Batch `batch` is complete (its `batch.ready/1` is in the stream); training wants its GPUs back."""

    batch: int


# pipeline_scheduler -> elastic_scheduler. Durable (EV). Key: batch.
class TrainingFinished(Message, frozen=True, kw_only=True, tag="training.finished/1"):
    """Batch `batch` is trained and rollout serves the resulting `version`; training GPUs are idle."""

    batch: int
    version: PolicyVersion
