"""What reads from a NATS connection: core subscriptions, durable pull consumers, and the messages' conversion.

Messages are handed over by the client's parser (`take`), one at a time and synchronously; nothing here has a task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec

from services.runtime.bus import BusError, BusUnavailable, Delivery, Denied
from services.runtime.clock import now_ms

PULL_GRACE_S: Final = 1.0  # a pull request unanswered so long after its expiry was lost
LOOK_AGAIN_S: Final = 0.05  # while the broker is away or the consumer is not there
RECOVER_S: Final = 0.2  # before a refused pull request is looked into
RECONNECT_LOOK_S: Final = 1.0
SECOND_NS: Final = 1_000_000_000


class Connection(Protocol):
    """What readers need of the connection they belong to."""

    denied: dict[str, int]
    dropped: int

    @property
    def connected(self) -> bool: ...

    @property
    def closed(self) -> bool: ...

    async def until_connected(self, timeout_s: float) -> None: ...

    async def send_quietly(self, subject: str, data: bytes, reply: str = "") -> bool: ...

    async def unsubscribe(self, inner: Any) -> None: ...

    def forget(self, reader: Any) -> None: ...

    async def create_consumer(self, stream: str, durable: str, config: dict[str, Any]) -> None: ...


class NatsSubscription:
    """A core subscription: a bounded buffer that drops the oldest."""

    def __init__(self, bus: Connection, subject: str, limit: int) -> None:
        self.subject = subject
        self.dropped = 0
        self.inner: Any = None
        self._bus = bus
        self._buffer: deque[Any] = deque()
        self._limit = limit
        self._arrived = asyncio.Event()
        self._stopped = False
        self._problem: BusError | None = None

    def take(self, msg: Any) -> None:
        """A message arrived (called by the parser)."""
        if len(self._buffer) >= self._limit:
            self._buffer.popleft()
            self.dropped += 1
            self._bus.dropped += 1
        self._buffer.append((now_ms(), msg))
        self._arrived.set()

    def fail(self, problem: BusError) -> None:
        """The broker refused the subscription: the reader gets the problem."""
        self._problem = problem
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self

    async def __anext__(self) -> Delivery:
        while not self._buffer:
            if self._problem is not None:
                raise self._problem
            if self._stopped:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        at_ms, msg = self._buffer.popleft()
        return core_delivery(msg, at_ms)

    async def next(self, timeout_s: float) -> Delivery | None:
        """The next delivery; None after `timeout_s`, or once stopped."""
        if self._buffer:
            return await anext(self)
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self, None)
        except TimeoutError:
            return None

    async def stop(self) -> None:
        """End the iteration; what is buffered is still read."""
        self._stopped = True
        self._arrived.set()
        self._bus.forget(self)
        await self._bus.unsubscribe(self.inner)


class NatsConsumer:
    """A durable pull consumer with at most one outstanding pull request.

    A pull request of n brings up to n messages until it expires; `fetch` returns the first that came, and the rest of
    the request stays open for the next `fetch`. So a reader never has more in its hands than it last asked for.
    """

    def __init__(self, bus: Connection, inbox: str, stream: str, durable: str, config: dict[str, Any]) -> None:
        self.inbox = inbox
        self.inner: Any = None
        self._bus = bus
        self._stream = stream
        self._durable = durable
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._open = 0  # messages the outstanding pull request may still bring
        self._open_until = 0.0
        self._pulls = 0
        self._trouble = ""  # why the last pull request ended early
        self._pull_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._stopped = False

    async def create(self) -> None:
        """Create or update the consumer on the server."""
        await self._bus.create_consumer(self._stream, self._durable, self._config)

    def take(self, msg: Any) -> None:
        """A message or the end of a pull request (called by the parser)."""
        status = status_of(msg)
        if not status:
            self._open = max(0, self._open - 1)
            self._buffer.append(msg)
        elif status == "100" or msg.subject != f"{self.inbox}{self._pulls:x}":
            return
        else:
            self._open = 0
            if status not in ("404", "408"):
                self._trouble = f"{status} {msg.headers.get('Description', '')}".strip()
        self._arrived.set()

    def look(self) -> None:
        """Something happened that a waiting fetch should notice."""
        self._arrived.set()

    def lost_pull(self) -> None:
        """The connection was replaced: the pull request is gone."""
        self._open = 0
        self._arrived.set()

    async def fetch(self, most: int, timeout_s: float) -> Sequence[Delivery]:
        deadline = self._loop.time() + timeout_s
        while not self._buffer:
            now = self._loop.time()
            if now >= deadline:
                return ()
            if self._stopped:  # nothing will come; who asks again and again must not spin
                await asyncio.sleep(min(LOOK_AGAIN_S, deadline - now))
                return ()
            if self._bus.closed:
                raise BusUnavailable(f"consumer {self._durable}: the connection is closed for good")
            if not self._bus.connected:
                await self._bus.until_connected(min(RECONNECT_LOOK_S, deadline - now))
                if not self._bus.connected:
                    await asyncio.sleep(LOOK_AGAIN_S)
                continue
            if self._pull_subject.lower() in self._bus.denied:
                raise Denied(f"this user may not fetch from consumer {self._durable} of stream {self._stream}")
            if self._trouble:
                await self._recover(deadline)
                continue
            if self._open == 0 or now > self._open_until + PULL_GRACE_S:
                await self._pull(most, deadline - now)
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(min(deadline, self._open_until + PULL_GRACE_S)):
                    await self._arrived.wait()
            except TimeoutError:
                continue
        count_now = min(most, len(self._buffer))
        return [stream_delivery(self._buffer.popleft()) for _ in range(count_now)]

    async def _pull(self, most: int, expires_s: float) -> None:
        self._pulls += 1
        expires_s = max(0.01, expires_s)
        self._open = most
        self._open_until = self._loop.time() + expires_s
        request = msgspec.json.encode({"batch": most, "expires": int(expires_s * SECOND_NS)})
        if not await self._bus.send_quietly(self._pull_subject, request, f"{self.inbox}{self._pulls:x}"):
            self._open = 0
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _recover(self, deadline: float) -> None:
        """A pull request was refused: JetStream is not ready, or the consumer is gone. Look after it, then try again."""
        self._trouble = ""
        await asyncio.sleep(max(0.0, min(RECOVER_S, deadline - self._loop.time())))
        try:
            async with asyncio.timeout_at(deadline):
                await self.create()
        except (TimeoutError, BusError):
            return

    async def _say(self, delivery: Delivery, word: bytes) -> None:
        assert delivery.token, "only deliveries of a consumer are acknowledged"
        await self._bus.send_quietly(delivery.token, word)

    async def ack(self, delivery: Delivery) -> None:
        await self._say(delivery, b"+ACK")

    async def nak(self, delivery: Delivery, delay_s: float) -> None:
        await self._say(delivery, b'-NAK {"delay": %d}' % int(delay_s * SECOND_NS))

    async def term(self, delivery: Delivery) -> None:
        await self._say(delivery, b"+TERM")

    async def progress(self, delivery: Delivery) -> None:
        await self._say(delivery, b"+WPI")

    async def stop(self) -> None:
        """Stop pulling; what came and was not fetched goes back at once."""
        if self._stopped:
            return
        self._stopped = True
        self._arrived.set()
        self._bus.forget(self)
        await self._bus.unsubscribe(self.inner)
        while self._buffer:
            await self._bus.send_quietly(self._buffer.popleft().reply, b"-NAK")


def status_of(msg: Any) -> str:
    """Status of a message that the server itself sent ("404", "503"), "" for all others."""
    return msg.headers.get("Status", "") if msg.headers else ""


def core_delivery(msg: Any, at_ms: int = 0) -> Delivery:
    """A core message; `at_ms` is when it arrived (0: now)."""
    return Delivery(msg.subject, msg.data, msg.headers or {}, msg.reply, 0, at_ms or now_ms())


def stored_delivery(msg: Any) -> Delivery:
    """A message of a direct read: its place is in its headers."""
    headers: dict[str, str] = msg.headers
    at = datetime.fromisoformat(headers["Nats-Time-Stamp"])
    return Delivery(
        headers["Nats-Subject"], msg.data, headers, seq=int(headers["Nats-Sequence"]), at_ms=int(at.timestamp() * 1000)
    )


def stream_delivery(msg: Any) -> Delivery:
    """A message of a consumer: its place is in its reply subject.

    $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time ns>.<pending>, or with domain and account
    before the stream (and a random token at the end).
    """
    fields = msg.reply.split(".")
    base = 2 if len(fields) < 11 else 4
    return Delivery(
        msg.subject,
        msg.data,
        msg.headers or {},
        seq=int(fields[base + 3]),
        at_ms=int(fields[base + 5]) // 1_000_000,
        attempt=int(fields[base + 2]),
        token=msg.reply,
        consumer_seq=int(fields[base + 4]),
    )
