"""The bus contract. Two implementations: `bus_nats.py` (production) and `bus_memory.py` (tests, simulation).

One suite (`tests/contract`) holds both to it. All payloads are bytes; the runtime knows no message types here.

Guarantees: core publishes may be lost; durable publishes return once stored and are stored at most once per
`msg_id` within the stream's duplicate window; deliveries of one consumer arrive in stream order except for
redeliveries; everything is bounded (subscription buffers drop oldest-first and count what they dropped).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec


class Delivery(msgspec.Struct, frozen=True):
    """One message that arrived."""

    subject: str
    data: bytes
    headers: dict[str, str] = {}
    reply: str = ""
    seq: int = 0  # stream sequence; 0 for core messages
    at_ms: int = 0  # when the stream took it (Unix ms); for core messages, when it arrived
    attempt: int = 1  # 1 for the first delivery
    token: str = ""  # what ack/nak/term need; opaque
    consumer_seq: int = (
        0  # nth delivery of its consumer, redeliveries counted; a hole means one did not reach this reader
    )


class Bounds(msgspec.Struct, frozen=True):
    """What a stream has had and what is left of it: one that was emptied differs from one that was never used."""

    gone: int  # messages before the oldest that is left: all there ever were if none is left
    last_seq: int  # of the newest message there ever was; 0: there was none
    last_ms: int  # Unix ms at which that one was stored; 0: there was none


class Entry(msgspec.Struct, frozen=True):
    """One value of a bucket."""

    key: str
    data: bytes
    revision: int
    at_ms: int = 0


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as it must be. `retention`: "limits" or "workqueue"."""

    name: str
    subjects: tuple[str, ...]
    retention: str = "limits"
    max_bytes: int = 1 << 30
    max_age_s: float = 0.0  # 0: no limit
    duplicate_window_s: float = 120.0
    replicas: int = 1
    allow_direct: bool = True


class BucketSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A key-value bucket as it must be. `republish` copies each write to `<republish>.<key>` on core NATS."""

    name: str
    max_bytes: int = 64 << 20
    history: int = 1
    ttl_allowed: bool = False
    republish: str = ""
    replicas: int = 1


class BusError(Exception):
    """Base of what a bus raises."""


class BusUnavailable(BusError):
    """The broker did not answer within the bounded retries; the caller may try again later."""


class NoReply(BusError):
    """A request was not answered in time, or nobody listens."""


class WrongLastSequence(BusError):
    """A guarded write lost: someone else wrote first."""


class Denied(BusError):
    """The broker refused: this user has no permission for the subject."""


class Subscription(Protocol):
    """A core subscription: iterate it for deliveries."""

    dropped: int  # messages lost because the reader was slow

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    async def next(self, timeout_s: float) -> Delivery | None:
        """The next delivery, or None after `timeout_s`."""
        ...

    async def stop(self) -> None: ...


class Consumer(Protocol):
    """A durable pull consumer."""

    async def fetch(self, most: int, timeout_s: float) -> Sequence[Delivery]:
        """Up to `most` deliveries; empty after `timeout_s` without any, or while the broker is away."""
        ...

    async def ack(self, delivery: Delivery) -> None:
        """Done; never deliver again."""
        ...

    async def nak(self, delivery: Delivery, delay_s: float) -> None:
        """Not done; deliver again after `delay_s`."""
        ...

    async def term(self, delivery: Delivery) -> None:
        """Never deliver again, although it was not done."""
        ...

    async def progress(self, delivery: Delivery) -> None:
        """Still at work; extend the acknowledgement time."""
        ...

    async def stop(self) -> None: ...


class Bus(Protocol):
    """A connection to the broker as one user."""

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Core publish: at most once, no acknowledgement. Raises BusUnavailable when the outbound buffer is full."""
        ...

    async def publish_durable(
        self, subject: str, data: bytes, *, msg_id: str, expected_last_on_subject: int | None = None
    ) -> int:
        """Store in the stream that takes `subject`; returns its sequence (that of the original for a duplicate).

        Retries within a bound. Raises WrongLastSequence (guarded), Denied, BusUnavailable.
        """
        ...

    async def request(self, subject: str, data: bytes, timeout_s: float) -> Delivery:
        """Core request-reply. Raises NoReply."""
        ...

    async def subscribe(self, subject: str, *, queue: str = "", limit: int = 65536) -> Subscription: ...

    async def consume(
        self,
        stream: str,
        durable: str,
        subjects: Sequence[str],
        *,
        ack_wait_s: float = 30.0,
        max_ack_pending: int = 1000,
        max_deliver: int = -1,
    ) -> Consumer:
        """Attach to (creating it if need be) the durable consumer `durable` over the whole stream."""
        ...

    def read(
        self, stream: str, subject: str, *, first_seq: int = 1, last_seq: int | None = None
    ) -> AsyncIterator[Delivery]:
        """All messages of a filter from `first_seq` to what was last at the call (or `last_seq`), in order."""
        ...

    async def last(self, stream: str, subject: str) -> Delivery | None:
        """The newest message on an exact subject."""
        ...

    async def bounds(self, stream: str) -> Bounds:
        """How far the stream has come, and how much of its beginning is gone."""
        ...

    async def purge(self, stream: str, *, below_seq: int, subject: str = ">") -> None:
        """Delete messages with sequence < `below_seq`."""
        ...

    async def get(self, bucket: str, key: str, *, from_leader: bool = False) -> Entry | None:
        """A bucket's value; any replica answers, and one that lags may give an older one, or none.

        `from_leader`: the replica that takes the writes answers, so all that was acknowledged before is seen. For users that may
        ask for it (the table's writer). Raises BusUnavailable, Denied.
        """
        ...

    async def put(
        self, bucket: str, key: str, data: bytes, *, last_revision: int | None, ttl_s: int | None = None
    ) -> int:
        """Write a value. `last_revision`: 0 create only, n compare-and-set, None unguarded. Raises WrongLastSequence."""
        ...

    async def ensure_stream(self, spec: StreamSpec) -> None: ...

    async def ensure_bucket(self, spec: BucketSpec) -> None: ...

    def on_reconnect(self, callback: object) -> None:
        """Call `callback()` (async, no arguments) after every reconnection."""
        ...

    async def close(self) -> None: ...
