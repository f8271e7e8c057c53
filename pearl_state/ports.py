"""What the store and the replicas need of a message bus, and no more. `services.runtime.bus.Bus` fits.

`pearl_state` imports no service, hence no bus: it is handed one that has this shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Protocol, TypeVar

import msgspec

T = TypeVar("T")


class Failed(msgspec.Struct, frozen=True):
    """What a call ended with instead of a result."""

    error: Exception


async def attempt(call: Awaitable[T]) -> T | Failed:
    """The call's result, or its error as a value: which errors a bus raises is not known here, only that it failed.

    A broken invariant (AssertionError) and cancellation are no failures of the bus and are raised.
    """
    (result,) = await asyncio.gather(call, return_exceptions=True)
    if isinstance(result, Exception) and not isinstance(result, AssertionError):
        return Failed(result)
    if isinstance(result, BaseException):
        raise result
    return result


class StoredValue(Protocol):
    """One value of a bucket."""

    @property
    def data(self) -> bytes: ...

    @property
    def revision(self) -> int: ...


class FeedMessage(Protocol):
    """One message of the republished feed."""

    @property
    def subject(self) -> str: ...

    @property
    def data(self) -> bytes: ...

    @property
    def headers(self) -> Mapping[str, str]: ...


class Feed(Protocol):
    """A core subscription."""

    def __aiter__(self) -> AsyncIterator[FeedMessage]: ...

    async def stop(self) -> None: ...


class TableReader(Protocol):
    """What a replica needs."""

    async def get(self, bucket: str, key: str) -> StoredValue | None: ...

    async def subscribe(self, subject: str, *, queue: str = "", limit: int = 65536) -> Feed: ...

    def on_reconnect(self, callback: object) -> None: ...


class TableWriter(Protocol):
    """What the table's writer needs. `put` raises when the guard does not hold, and when the bus is away.

    With `from_leader` whoever takes the writes is asked, not a replica that may lag behind.
    """

    async def get(self, bucket: str, key: str, *, from_leader: bool = False) -> StoredValue | None: ...

    async def put(
        self, bucket: str, key: str, data: bytes, *, last_revision: int | None, ttl_s: int | None = None
    ) -> int: ...
