"""A connection to NATS: login, staying connected, requests and their answers. The only file that uses nats-py, a client.

What it adds to the client, and why:

- one reply inbox for all requests and durable publishes, so that thousands may be outstanding, each fails at once
  when the connection drops (and is retried after it is back), and a refused publish fails with `Denied` instead of a
  time-out;
- subscriptions without a task each: messages go from the parser straight into a bounded buffer; and a quicker parser.

What is said over it is in `bus_nats.py`, which continues the class. Every retry is bounded by `patience_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, Final, cast

import nats.errors
from nats.aio.client import Client
from nats.nuid import NUID

from services.runtime.bus import BusError, BusUnavailable, Denied
from services.runtime.bus_nats_parser import QuickParser
from services.runtime.bus_nats_readers import NatsConsumer, NatsSubscription, status_of
from services.runtime.log import Logger, get_logger

OUTBOUND_BUFFER_BYTES: Final = 16 << 20  # kept for the broker while it is away; two of the largest messages
RECONNECT_WAIT_S: Final = 0.25  # between attempts at one server: soon, but not a busy loop
CONNECT_TIMEOUT_S: Final = 3
PING_INTERVAL_S: Final = 2  # two unanswered pings: the connection is dead (its server stopped, or its host cut off)
PATIENCE_S: Final = 30.0  # three nodes need up to 9 s to elect a leader; a restart a few seconds
ATTEMPT_S: Final = 5.0  # an unanswered request is sent again
DENIED_SUBJECTS_KEPT: Final = 256
_PERMISSION: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')
RETRY_FIRST_S: Final = 0.05
RETRY_MOST_S: Final = 1.0


class Lost(Exception):
    """No answer: timed out, disconnected, or nobody there. Worth a retry."""


class _Sink:
    """Takes messages from the parser. It looks like the future that `Client.subscribe(future=...)` wants, but takes many."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.set_result = take

    def cancelled(self) -> bool:
        return False


class NatsConnection:
    """One connection as one user. It never gives up reconnecting."""

    def __init__(self, name: str, inbox_prefix: str, patience_s: float) -> None:
        self.denied: dict[str, int] = {}  # refused publishes and subscriptions by subject (in lower case)
        self.dropped = 0  # core messages lost because a reader was slow
        self._nc: Any = Client()  # Any: nats-py's own types are incomplete
        self._nc._ps = QuickParser(self._nc, self._nc._ps, _Sink)
        self._name = name
        self._inbox_prefix = inbox_prefix
        self._patience_s = patience_s
        self._log: Logger = get_logger(f"bus:{name}")
        self._loop = asyncio.get_running_loop()
        self._connected = asyncio.Event()
        self._closed_because = ""
        self._closing = False
        self._refused_login: asyncio.Future[str] = self._loop.create_future()
        self._inbox = self._new_inbox()
        self._tokens = count(1)
        self._waiting: dict[str, tuple[str, asyncio.Future[Any], list[Any] | None]] = {}
        self._subscriptions: set[NatsSubscription] = set()
        self._consumers: set[NatsConsumer] = set()
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._last_error = ""

    async def open(self, url: str, seed_file: str | Path | None, tls: ssl.SSLContext | None) -> None:
        """First connection. Raises BusUnavailable after the patience, Denied if the login is refused."""
        options: dict[str, Any] = {} if tls is None else {"tls": tls}
        attempt = self._loop.create_task(
            self._nc.connect(
                servers=[part.strip() for part in url.split(",")],
                name=self._name,
                inbox_prefix=self._inbox_prefix,
                nkeys_seed=None if seed_file is None else str(seed_file),
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,
                connect_timeout=CONNECT_TIMEOUT_S,
                ping_interval=PING_INTERVAL_S,
                pending_size=OUTBOUND_BUFFER_BYTES,
                **options,
            )
        )
        try:
            await asyncio.wait(
                {attempt, self._refused_login}, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self._refused_login.done():
                raise Denied(
                    f"{url} refused the login of {self._name}: {self._refused_login.result()}; check the nkey file"
                )
            if not attempt.done():
                raise BusUnavailable(f"no NATS server at {url} within {self._patience_s} s: {self._last_error}")
            await attempt
        except (OSError, nats.errors.Error) as error:
            raise BusUnavailable(f"cannot connect to {url}: {error}") from error
        finally:
            if not attempt.done():
                self._closing = True
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)
        self._connected.set()
        await self._nc.subscribe(self._inbox + "*", future=_Sink(self._on_answer))

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return bool(self._nc.is_connected)

    @property
    def closed(self) -> bool:
        """Whether there never will be one again."""
        return bool(self._nc.is_closed)

    async def until_connected(self, timeout_s: float) -> None:
        """Wait for the connection, at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        except TimeoutError:
            return

    def on_reconnect(self, callback: object) -> None:
        self._callbacks.append(cast("Callable[[], Awaitable[None]]", callback))

    async def close(self) -> None:
        """Send what is buffered, then disconnect. Readers end."""
        if self._closing:
            return
        self._closing = True
        for subscription in list(self._subscriptions):
            await subscription.stop()
        for consumer in list(self._consumers):
            await consumer.stop()
        if self._nc.is_connected:
            with contextlib.suppress(nats.errors.Error):
                await self._nc.flush(2)
        # The client writes to a transport that a dead server has closed; uvloop raises RuntimeError for that.
        with contextlib.suppress(RuntimeError, OSError, nats.errors.Error):
            await self._nc.close()
        for task in list(self._background):
            task.cancel()

    # -- callbacks of the client ------------------------------------------------------------------------------------

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        refused = _PERMISSION.search(text.lower())
        if refused is not None:
            self._on_denied(refused[1], refused[2])
            return
        if "authorization" in text.lower() and not self._connected.is_set() and not self._refused_login.done():
            self._refused_login.set_result(text)
        if text != self._last_error:
            self._last_error = text
            self._log.warning(f"NATS: {text}", action="bus.error")

    def _on_denied(self, operation: str, subject: str) -> None:
        if subject not in self.denied:
            if len(self.denied) >= DENIED_SUBJECTS_KEPT:
                self.denied.pop(next(iter(self.denied)))
            self._log.error(
                f"NATS refused {operation} on {subject}: this user has no permission; see the server's configuration",
                action="bus.denied",
                subject=subject,
            )
        self.denied[subject] = self.denied.get(subject, 0) + 1
        problem = Denied(f"this user has no permission for {operation} on {subject}")
        for consumer in self._consumers:
            consumer.look()
        if operation == "publish":
            for wanted, future, _ in self._waiting.values():
                if wanted.lower() == subject and not future.done():
                    future.set_exception(problem)
        else:
            for subscription in self._subscriptions:
                if subscription.subject.lower() == subject:
                    subscription.fail(problem)

    async def _on_disconnected(self) -> None:
        self._connected.clear()
        for _, future, _ in list(self._waiting.values()):
            if not future.done():
                future.set_exception(Lost("the connection was lost"))
        if not self._closing:
            self._log.warning("lost the connection to NATS; reconnecting", action="bus.disconnected")

    async def _on_reconnected(self) -> None:
        self._connected.set()
        self._last_error = ""
        self._log.info("connected to NATS again", action="bus.reconnected")
        for consumer in self._consumers:
            consumer.lost_pull()
        task = self._loop.create_task(self._run_callbacks())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _run_callbacks(self) -> None:
        for callback in self._callbacks:
            try:
                await callback()
            except Exception as error:  # a callback's failure must not end the connection
                self._log.error(f"a reconnect callback failed: {error!r}", action="bus.callback_failed")

    async def _on_closed(self) -> None:
        if not self._closing:
            self._closed_because = self._last_error or "the server closed it"
            self._log.error(f"the connection to NATS is closed for good: {self._closed_because}", action="bus.closed")
        self._connected.set()  # let waiters look: they find it closed
        for consumer in self._consumers:
            consumer.lost_pull()

    # -- sending ----------------------------------------------------------------------------------------------------

    async def _send(self, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        try:
            await self._nc.publish(subject, data, reply, headers)
        except nats.errors.OutboundBufferLimitError as error:
            raise BusUnavailable(f"{subject}: the broker is away and the outbound buffer is full") from error
        except nats.errors.MaxPayloadError as error:
            raise BusError(f"{subject}: {len(data)} bytes are more than the server's max_payload") from error
        except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
            raise BusUnavailable(f"{subject}: the connection is closed ({self._closed_because or 'by us'})") from error
        except nats.errors.Error as error:
            raise BusError(f"{subject}: {error}") from error

    async def send_quietly(self, subject: str, data: bytes, reply: str = "") -> bool:
        """Publish what may be lost; False if it was lost here."""
        try:
            await self._send(subject, data, reply)
        except BusUnavailable:
            return False
        return True

    async def _call(
        self,
        subject: str,
        data: bytes,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        page: list[Any] | None = None,
    ) -> Any:
        """One request, one answer (or a page of them, ended by a status). Raises Lost, Denied, BusError."""
        token = format(next(self._tokens), "x")
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[token] = (subject, future, page)
        timer = self._loop.call_later(timeout_s, _expire, future)
        try:
            await self._send(subject, data, self._inbox + token, headers)
            return await future
        finally:
            timer.cancel()
            del self._waiting[token]

    def _on_answer(self, msg: Any) -> None:
        """A message for the reply inbox: an answer, or one of the pages of a direct read."""
        token = msg.subject[len(self._inbox) :]
        waiting = self._waiting.get(token)
        if waiting is None:
            return
        _, future, page = waiting
        if page is not None:
            page.append(msg)
            if not (msg.headers and "Status" in msg.headers):
                return
        if not future.done():
            future.set_result(msg)

    async def _ask(
        self, subject: str, data: bytes, headers: dict[str, str] | None = None, page: list[Any] | None = None
    ) -> Any:
        """`_call` again and again until the broker answers, within the patience. Raises BusUnavailable, Denied, BusError."""
        deadline = self._loop.time() + self._patience_s
        pause = RETRY_FIRST_S
        while True:
            try:
                await self._until_connected(deadline)
                answer = await self._call(
                    subject, data, max(0.001, min(ATTEMPT_S, deadline - self._loop.time())), headers, page
                )
                if status_of(answer) != "503":
                    return answer
                reason = "nobody answers there: no such stream, or JetStream is not ready"
            except Lost as lost:
                reason = str(lost)
            if page is not None:
                page.clear()
            if self._loop.time() + pause >= deadline:
                raise BusUnavailable(f"{subject}: {reason}, for {self._patience_s} s")
            await asyncio.sleep(pause)
            pause = min(RETRY_MOST_S, pause * 2)

    async def _until_connected(self, deadline: float) -> None:
        if not self._connected.is_set():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._connected.wait()
            except TimeoutError as error:
                raise Lost("not connected") from error
        if self._nc.is_closed:
            raise BusUnavailable(f"the connection is closed ({self._closed_because or 'by us'})")

    # -- receiving --------------------------------------------------------------------------------------------------

    async def _subscribe(self, subject: str, take: Callable[[Any], None], queue: str = "") -> Any:
        try:
            return await self._nc.subscribe(subject, queue=queue, future=_Sink(take))
        except nats.errors.Error as error:
            raise BusUnavailable(f"{subject}: cannot subscribe: {error!r}") from error

    async def unsubscribe(self, inner: Any) -> None:
        """End a subscription of the client; harmless when the connection is gone."""
        try:
            await inner.unsubscribe()
        except nats.errors.Error:
            return

    def forget(self, reader: NatsSubscription | NatsConsumer) -> None:
        """A reader stopped."""
        if isinstance(reader, NatsSubscription):
            self._subscriptions.discard(reader)
        else:
            self._consumers.discard(reader)

    def _new_inbox(self) -> str:
        """Prefix of reply subjects that nobody else has."""
        return f"{self._inbox_prefix}.{new_id()}."


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(Lost("no answer in time"))


def new_id() -> str:
    """An id that nobody else has."""
    return NUID().next().decode()
