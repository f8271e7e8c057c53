"""Identifiers and enumerations shared by every message.

Wire enums carry an `UNKNOWN` member, so that a reader of an older release meets a new value
as UNKNOWN (and refuses to act on it) rather than as a decoding failure.
"""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

WorkerId = NewType("WorkerId", str)
"""A stable slot in the role table, `<node>-w<slot>` for rollout, `<node>-t<slot>` for training."""
NodeId = NewType("NodeId", str)
Epoch = NewType("Epoch", int)
"""Strictly increasing version of the role table. Orders copies of it, fences nothing else."""
Revision = NewType("Revision", int)
"""JetStream sequence of a bucket value: what compare-and-set is guarded with."""
PolicyVersion = NewType("PolicyVersion", int)
"""Version v is the policy after v training steps; version 0 is the initial model."""
Incarnation = NewType("Incarnation", int)
"""Counts the processes that have lived in one worker slot; 0 means none yet."""
RoleGeneration = NewType("RoleGeneration", int)
"""Counts changes of one row's role or activity; fences requests."""
PlanId = NewType("PlanId", str)
DecisionId = NewType("DecisionId", str)
TrajectoryId = NewType("TrajectoryId", str)
GroupId = NewType("GroupId", str)
RequestId = NewType("RequestId", str)
"""One turn's generation request at one edge: `<trajectory>/<turn>/<holding>`, where the holding names the retry, the edge
and its try at the task, so that an edge that takes a turn over makes a new request. Attempts are numbered from 1."""


class _WireEnum(enum.StrEnum):
    @classmethod
    def _missing_(cls, value: object) -> _WireEnum | None:
        return cls.__members__.get("UNKNOWN")


class Zone(_WireEnum):
    """Where a worker's GPUs come from (paper 4.4)."""

    RESERVED = "reserved"
    PREEMPTIBLE = "preemptible"
    OVERLAP = "overlap"
    TRAINING = "training"
    UNKNOWN = "unknown"


class Role(_WireEnum):
    """R_w of eq. 4."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"
    TRAINING = "training"
    UNKNOWN = "unknown"


class Activity(_WireEnum):
    """a_w of eq. 4: active serves; inactive serves nothing; transitioning joins, leaves or changes role."""

    ACTIVE = "active"
    INACTIVE = "inactive"
    TRANSITIONING = "transitioning"
    UNKNOWN = "unknown"


class Stage(_WireEnum):
    """What a transitioning row is doing. `none` for rows that are not transitioning."""

    NONE = "none"
    LAUNCHING = "launching"  # process starting, or overlap worker being activated
    PREPARED = "prepared"  # initialised, holds weights, not yet admitted
    DRAINING = "draining"  # leaving: no new requests, running ones being interrupted
    SWITCHING = "switching"  # drained or draining, to come back in another role
    UNKNOWN = "unknown"


class Residency(_WireEnum):
    """Whose device state is on the GPUs of an overlap/training pair (DESIGN 3)."""

    TRAINING = "training"
    RELEASING = "releasing"
    FREE = "free"
    ACTIVATING = "activating"
    ROLLOUT = "rollout"
    DRAINING = "draining"
    UNKNOWN = "unknown"


class Mode(_WireEnum):
    """Execution mode of rollout: colocated, or prefill-decode disaggregated; `paused` at a zero budget."""

    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"
    PAUSED = "paused"
    UNKNOWN = "unknown"


class Gpu(msgspec.Struct, frozen=True, order=True):
    """One physical GPU: node name and index on it."""

    node: NodeId
    index: int
