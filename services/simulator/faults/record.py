"""What an onlooker who sees everything writes down during a simulated run: all that checkers and transcripts know.

The simulation writes, checkers read; neither sees the other's code. Times are milliseconds of the simulated clock. Everything is in the
order in which it happened.
"""

from __future__ import annotations

import msgspec

from messages.envelope import Message
from messages.ids import Role, WorkerId
from pearl_state.model import RoleTable


class TableWritten(msgspec.Struct, frozen=True, tag=True):
    """The role table's bucket took a write. `writer`: which orchestrator (there may be two), its life and its tenure of the lease:
    "orchestrator-a/2.1"; one that lost the lease and took it again has another name."""

    at_ms: int
    writer: str
    table: RoleTable


class TableSeen(msgspec.Struct, frozen=True, tag=True):
    """A watcher's replica of the role table changed: `actor`, in this `life`, goes by this epoch from now on."""

    at_ms: int
    actor: str
    life: int
    epoch: int


class Stored(msgspec.Struct, frozen=True, tag=True):
    """A stream stored a message (duplicates that the broker drops are not stored)."""

    at_ms: int
    sender: str
    seq: int
    message: Message


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A core message (a command, an assignment, telemetry) was sent; it may never arrive."""

    at_ms: int
    sender: str
    message: Message


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """A core message reached its receiver ("node/n0", "worker/n0-w0", "trainer")."""

    at_ms: int
    receiver: str
    message: Message


class Assigned(msgspec.Struct, frozen=True, tag=True):
    """A router placed an attempt, by the epoch of the table that it held. `prefill` is empty where colocated."""

    at_ms: int
    router: str
    request: str
    attempt: int
    worker: WorkerId
    incarnation: int
    role_generation: int
    prefill: str
    min_version: int
    epoch: int


class AttemptBegan(msgspec.Struct, frozen=True, tag=True):
    """A worker took an attempt in: it goes on after `start` tokens of the reply, with weights of `version`."""

    at_ms: int
    worker: WorkerId
    incarnation: int
    role: Role
    role_generation: int
    request: str
    attempt: int
    start: int
    version: int
    min_version: int


class Generated(msgspec.Struct, frozen=True, tag=True):
    """A worker generated tokens `start .. start + count` of the reply."""

    at_ms: int
    worker: WorkerId
    incarnation: int
    request: str
    attempt: int
    start: int
    count: int
    version: int


class Received(msgspec.Struct, frozen=True, tag=True):
    """A living agent took tokens `start .. start + count` of the reply in. `agent` and its `life` (counted from 1)."""

    at_ms: int
    agent: str
    life: int
    request: str
    attempt: int
    start: int
    count: int
    version: int


class ProcessBegan(msgspec.Struct, frozen=True, tag=True):
    """A node agent started a process on these GPUs of its node."""

    at_ms: int
    node: str
    worker: WorkerId
    incarnation: int
    service: str  # "rollout_worker" or "trainer"
    gpus: tuple[int, ...]


class ProcessEnded(msgspec.Struct, frozen=True, tag=True):
    """It is gone, and so is what it held."""

    at_ms: int
    node: str
    worker: WorkerId
    incarnation: int


class MemoryHeld(msgspec.Struct, frozen=True, tag=True):
    """Whether a process may hold device memory from now on.

    Before it says anything a process is taken to hold memory, except on training nodes, where GPUs are lent: there it holds
    none before it says so.
    """

    at_ms: int
    node: str
    worker: WorkerId
    incarnation: int
    gpus: tuple[int, ...]
    held: bool


class ActorBegan(msgspec.Struct, frozen=True, tag=True):
    """A service started (again); `life` counts from 1."""

    at_ms: int
    actor: str
    life: int


class ActorEnded(msgspec.Struct, frozen=True, tag=True):
    """A service was killed."""

    at_ms: int
    actor: str


class FaultBegan(msgspec.Struct, frozen=True, tag=True):
    """Something was broken. `target`: an actor, a node, a worker, or empty for the network."""

    at_ms: int
    number: int
    kind: str
    target: str
    detail: str


class FaultEnded(msgspec.Struct, frozen=True, tag=True):
    """And mended, where it does not mend itself."""

    at_ms: int
    number: int


class FaultsStopped(msgspec.Struct, frozen=True, tag=True):
    """Nothing is broken from now on: liveness counts from here."""

    at_ms: int


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """The simulation stopped; `finished`: because all work was done, not because time ran out."""

    at_ms: int
    finished: bool


Seen = (
    TableWritten
    | TableSeen
    | Stored
    | Sent
    | Arrived
    | Assigned
    | AttemptBegan
    | Generated
    | Received
    | ProcessBegan
    | ProcessEnded
    | MemoryHeld
    | ActorBegan
    | ActorEnded
    | FaultBegan
    | FaultEnded
    | FaultsStopped
    | RunEnded
)


class Violation(msgspec.Struct, frozen=True):
    """A promise that was broken. `invariant`: a checker's name, with its number in DESIGN 11 where it has one."""

    invariant: str
    at_ms: int
    detail: str
