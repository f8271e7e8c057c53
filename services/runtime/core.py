"""What a functional core is: `step(state, input) -> (state, effects)`, synchronous and pure.

Time arrives with every input, randomness is derived from it or passed in, effects are data. The same cores
run under `host.py` over NATS, in seeded fault simulation, and in the what-if simulator.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from messages.envelope import Message


class Tick(msgspec.Struct, frozen=True):
    """Time passed; nothing else happened."""


class Input(msgspec.Struct, frozen=True):
    """One thing that happened, and when (Unix milliseconds; for a durable message, when the stream took it).

    `message` is a decoded message, a `Tick`, or a replica's new value (for example the role table).
    """

    now_ms: int
    message: object
    seq: int = 0  # stream sequence of a durable message, else 0
    redelivered: bool = False


class Send(msgspec.Struct, frozen=True):
    """Publish a message; subject, stream and id follow from it. `msg_id` only where the message has no id of its own."""

    message: Message
    msg_id: str | None = None


class Reply(msgspec.Struct, frozen=True):
    """Answer the request that this input is."""

    message: Message


class Refuse(msgspec.Struct, frozen=True):
    """Dead-letter this input: it was readable but makes no sense (names an unknown node, say). State is unchanged."""

    reason: str


class Note(msgspec.Struct, frozen=True):
    """A log line. `action` is machine-readable, `text` is for people."""

    action: str
    text: str
    level: str = "info"


Effect = Send | Reply | Refuse | Note
Effects = tuple[Effect, ...]

S = TypeVar("S", bound=msgspec.Struct)


class Core(Protocol[S]):
    """A decision maker. `name` is the actor's key in the state bucket; `inputs` are the kinds it consumes durably."""

    name: str
    inputs: tuple[type[Message], ...]
    state_type: type[S]

    def initial(self) -> S:
        """State of an actor that has never run."""
        ...

    def step(self, state: S, event: Input) -> tuple[S, Effects]:
        """Pure. A broken invariant asserts; a peer's nonsense is refused; repeating an input is harmless."""
        ...
