"""The bus over NATS: one thin adapter around nats-py. The only file of the runtime that knows it.

What it adds to the client, and why:

- one reply inbox for all requests and durable publishes, so that thousands may be outstanding, each fails at once
  when the connection drops (and is retried after it is back), and a refused publish fails with `Denied` instead of a
  time-out;
- subscriptions without a task each: messages go from the parser straight into a bounded buffer; and a quicker parser;
- raw headers for guarded writes, message ids and TTLs;
- pull consumers of its own: one outstanding pull request a reader, asked again after reconnection, never a busy loop.

Every retry is bounded by `patience_s`. A write that raised `BusUnavailable` may still have been stored: repeat it
with the same message id.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.nuid import NUID

from services.runtime.bus import (
    BucketSpec,
    BusError,
    BusUnavailable,
    Delivery,
    Denied,
    Entry,
    NoReply,
    StreamSpec,
    WrongLastSequence,
)
from services.runtime.bus_nats_parser import QuickParser
from services.runtime.bus_nats_readers import (
    SECOND_NS,
    NatsConsumer,
    NatsSubscription,
    core_delivery,
    status_of,
    stored_delivery,
)
from services.runtime.log import Logger, get_logger

OUTBOUND_BUFFER_BYTES: Final = 16 << 20  # kept for the broker while it is away; two of the largest messages
RECONNECT_WAIT_S: Final = 0.25  # between attempts at one server: soon, but not a busy loop
CONNECT_TIMEOUT_S: Final = 3
PING_INTERVAL_S: Final = 2  # two unanswered pings: the connection is dead (its server stopped, or its host cut off)
PATIENCE_S: Final = 30.0  # three nodes need up to 9 s to elect a leader; a restart a few seconds
ATTEMPT_S: Final = 5.0  # an unanswered request is sent again
RETRY_FIRST_S: Final = 0.05
RETRY_MOST_S: Final = 1.0
MAX_DURABLE_IN_FLIGHT: Final = 1024  # the server refuses publishes beyond 10,000 waiting in one stream
PAGE_MESSAGES: Final = 256  # of one direct read
PAGE_BYTES: Final = 4 << 20
DENIED_SUBJECTS_KEPT: Final = 256
FAMILIES_KEPT: Final = 1024

WRONG_LAST: Final = (10071, 10164)
AWAY: Final = (429, 503)  # too much at once; no leader just now
NAME_IN_USE: Final = 10058
STREAM_NOT_FOUND: Final = 10059
BEING_STORED: Final = 10158  # the first copy of this message has no majority yet: the retry came too soon
_PERMISSION: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')


class _Lost(Exception):
    """No answer: timed out, disconnected, or nobody there. Worth a retry."""


class _ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct, frozen=True):
    """What all JetStream answers have in common; the rest is ignored."""

    error: _ApiError | None = None
    seq: int = 0
    stream: str = ""


_answers = msgspec.json.Decoder(_Answer)


class _Sink:
    """Takes messages from the parser. It looks like the future that `Client.subscribe(future=...)` wants, but takes many."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.set_result = take

    def cancelled(self) -> bool:
        return False


async def connect(
    url: str,
    *,
    name: str,
    inbox_prefix: str,
    seed_file: str | Path | None = None,
    roles_api_prefix: str = "",
    prefixed_bucket_suffix: str = "_roles",
    tls: ssl.SSLContext | None = None,
    patience_s: float = PATIENCE_S,
) -> NatsBus:
    """Connect as the user of the nkey in `seed_file` and stay connected: reconnection never gives up.

    Buckets whose name ends in `prefixed_bucket_suffix` are read through `roles_api_prefix` (an import from another
    account) where one is given. `patience_s` bounds this call and every retry. Raises BusUnavailable, Denied.
    """
    bus = NatsBus(name, inbox_prefix, roles_api_prefix, prefixed_bucket_suffix, patience_s)
    await bus.open(url, seed_file, tls)
    return bus


class NatsBus:
    """One connection as one user. Make it with `connect`."""

    def __init__(
        self, name: str, inbox_prefix: str, roles_api_prefix: str, prefixed_bucket_suffix: str, patience_s: float
    ) -> None:
        self.denied: dict[str, int] = {}  # refused publishes and subscriptions by subject (in lower case)
        self.dropped = 0  # core messages lost because a reader was slow
        self._nc: Any = Client()  # Any: nats-py's own types are incomplete
        self._nc._ps = QuickParser(self._nc, self._nc._ps, _Sink)
        self._name = name
        self._inbox_prefix = inbox_prefix
        self._roles_api_prefix = roles_api_prefix
        self._prefixed_bucket_suffix = prefixed_bucket_suffix
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
        self._durable_slots = asyncio.Semaphore(MAX_DURABLE_IN_FLIGHT)
        self._subscriptions: set[NatsSubscription] = set()
        self._consumers: set[NatsConsumer] = set()
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._last_error = ""
        self._id_key = b""  # from the user's seed
        self._streams: dict[str, str] = {}  # subject without its last token -> stream, as acknowledgements said

    async def open(self, url: str, seed_file: str | Path | None, tls: ssl.SSLContext | None) -> None:
        """First connection. Raises BusUnavailable after the patience, Denied if the login is refused."""
        options: dict[str, Any] = {} if tls is None else {"tls": tls}
        if seed_file is not None:
            self._id_key = _id_key(seed_file)
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
                future.set_exception(_Lost("the connection was lost"))
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

    async def _call(
        self,
        subject: str,
        data: bytes,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        page: list[Any] | None = None,
    ) -> Any:
        """One request, one answer (or a page of them, ended by a status). Raises _Lost, Denied, BusError."""
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
            except _Lost as lost:
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
                raise _Lost("not connected") from error
        if self._nc.is_closed:
            raise BusUnavailable(f"the connection is closed ({self._closed_because or 'by us'})")

    async def _store(self, subject: str, data: bytes, headers: dict[str, str], stream: str = "") -> int:
        """Publish into the stream that takes the subject, until it says so."""
        deadline = self._loop.time() + self._patience_s
        async with self._durable_slots:
            while True:
                answer = _decode(await self._ask(subject, data, headers), subject)
                if answer.error is None:
                    self._learn(subject, answer.stream)
                    return answer.seq
                if answer.error.err_code in WRONG_LAST:
                    stored = await self._stored_before(stream or self._stream_of(subject), subject, headers)
                    if stored is not None:
                        return stored
                    raise WrongLastSequence(f"{subject}: {answer.error.description}")
                away = answer.error.code in AWAY or answer.error.err_code == BEING_STORED
                if not away or self._loop.time() > deadline:
                    kind = BusUnavailable if away else BusError
                    raise kind(f"{subject}: not stored: {answer.error.description}")
                await asyncio.sleep(RETRY_MOST_S)

    async def _stored_before(self, stream: str, subject: str, headers: dict[str, str]) -> int | None:
        """Sequence of this very message, if it is the newest on its subject: then only its acknowledgement was lost.

        The server compares the expected sequence before it looks for duplicates, so the retry of a guarded write that
        was stored is refused.
        """
        newest = await self._direct(f"{stream}.{subject}", None) if stream else None
        if newest is None or newest.headers.get("Nats-Msg-Id") != headers["Nats-Msg-Id"]:
            return None
        return newest.seq

    def _learn(self, subject: str, stream: str) -> None:
        """Remember which stream takes a family of subjects (all tokens but the last)."""
        family = subject.rpartition(".")[0]
        if family not in self._streams and len(self._streams) < FAMILIES_KEPT:
            self._streams[family] = stream

    def _stream_of(self, subject: str) -> str:
        return self._streams.get(subject.rpartition(".")[0], "")

    async def _api(self, subject: str, request: dict[str, Any]) -> _Answer:
        subject = f"$JS.API.{subject}"
        return _decode(await self._ask(subject, msgspec.json.encode(request)), subject)

    # -- core ---------------------------------------------------------------------------------------------------------

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """See Bus.publish. While the broker is away, up to OUTBOUND_BUFFER_BYTES wait for it."""
        await self._send(subject, data, reply, headers)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> Delivery:
        try:
            answer = await self._call(subject, data, timeout_s)
        except (_Lost, BusUnavailable) as lost:
            raise NoReply(f"{subject}: {lost}") from lost
        if status_of(answer) == "503":
            raise NoReply(f"{subject}: nobody listens")
        return core_delivery(answer)

    async def subscribe(self, subject: str, *, queue: str = "", limit: int = 65536) -> NatsSubscription:
        subscription = NatsSubscription(self, subject, limit)
        self._subscriptions.add(subscription)
        subscription.inner = await self._subscribe(subject, subscription.take, queue)
        return subscription

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

    # -- streams ------------------------------------------------------------------------------------------------------

    async def publish_durable(
        self, subject: str, data: bytes, *, msg_id: str, expected_last_on_subject: int | None = None
    ) -> int:
        headers = {"Nats-Msg-Id": self._sealed(msg_id)}
        if expected_last_on_subject is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expected_last_on_subject)
        return await self._store(subject, data, headers)

    def _sealed(self, msg_id: str) -> str:
        """The id with a seal that only this user's key makes.

        A stream knows a message by its id alone, whoever sent it on whatever subject: with ids that can be guessed, anyone
        who may store anything there could have another user's next message taken for a repetition, and dropped.
        """
        if not self._id_key:
            return msg_id
        return f"{msg_id}:{hmac.new(self._id_key, msg_id.encode(), hashlib.sha256).hexdigest()[:16]}"

    async def consume(
        self,
        stream: str,
        durable: str,
        subjects: Sequence[str],
        *,
        ack_wait_s: float = 30.0,
        max_ack_pending: int = 1000,
        max_deliver: int = -1,
    ) -> NatsConsumer:
        """See Bus.consume. A consumer that exists is brought to this configuration and keeps its position."""
        config: dict[str, Any] = {
            "durable_name": durable,
            "name": durable,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "replay_policy": "instant",
            "ack_wait": int(ack_wait_s * SECOND_NS),
            "max_ack_pending": max_ack_pending,
            "max_deliver": max_deliver,
        }
        if len(subjects) == 1:
            config["filter_subject"] = subjects[0]
        else:
            config["filter_subjects"] = list(subjects)
        consumer = NatsConsumer(self, self._new_inbox(), stream, durable, config)
        await consumer.create()
        consumer.inner = await self._subscribe(consumer.inbox + "*", consumer.take)
        self._consumers.add(consumer)
        return consumer

    async def create_consumer(self, stream: str, durable: str, config: dict[str, Any]) -> None:
        """Create or update. Waits for a stream that is not there yet, or has no leader, within the patience."""
        deadline = self._loop.time() + self._patience_s
        while True:
            answer = await self._api(f"CONSUMER.CREATE.{stream}.{durable}", {"stream_name": stream, "config": config})
            if answer.error is None:
                return
            away = answer.error.code in AWAY
            if not (away or answer.error.err_code == STREAM_NOT_FOUND) or self._loop.time() + RETRY_MOST_S > deadline:
                kind = BusUnavailable if away else BusError
                raise kind(f"consumer {durable} of stream {stream}: {answer.error.description}")
            await asyncio.sleep(RETRY_MOST_S)

    async def read(
        self, stream: str, subject: str, *, first_seq: int = 1, last_seq: int | None = None
    ) -> AsyncIterator[Delivery]:
        """See Bus.read. Direct reads in pages, no consumer; with replicas one of them may lag behind the leader."""
        if last_seq is None:
            newest = await self._direct(f"{stream}", {"last_by_subj": subject})
            if newest is None:
                return
            last_seq = newest.seq
        else:
            newest = None
        seq = max(1, first_seq)
        deadline = self._loop.time() + self._patience_s
        while seq <= last_seq:
            page: list[Any] = []
            request = {"seq": seq, "next_by_subj": subject, "batch": PAGE_MESSAGES, "max_bytes": PAGE_BYTES}
            await self._ask(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(request), None, page)
            end = page.pop()
            for msg in page:
                delivery = stored_delivery(msg)
                if delivery.seq > last_seq:
                    return
                yield delivery
                seq = delivery.seq + 1
            if not page or status_of(end) != "204" or end.headers.get("Nats-Num-Pending", "0") == "0":
                # One replica told of `newest`, another that lags behind it gave this page.
                if newest is None or seq > newest.seq or self._loop.time() > deadline:
                    return
                await asyncio.sleep(RETRY_FIRST_S)

    async def last(self, stream: str, subject: str) -> Delivery | None:
        return await self._direct(f"{stream}.{subject}", None)

    async def _direct(self, tail: str, request: dict[str, Any] | None, prefix: str = "$JS.API") -> Delivery | None:
        subject = f"{prefix}.DIRECT.GET.{tail}"
        answer = await self._ask(subject, b"" if request is None else msgspec.json.encode(request))
        status = status_of(answer)
        if status == "404":
            return None
        if status:
            raise BusError(f"{subject}: status {status} {answer.headers.get('Description', '')}")
        return stored_delivery(answer)

    async def purge(self, stream: str, *, below_seq: int, subject: str = ">") -> None:
        request: dict[str, Any] = {"seq": below_seq}
        if subject != ">":
            request["filter"] = subject
        if below_seq > 1:
            _raise(await self._api(f"STREAM.PURGE.{stream}", request), f"purge of {stream}")

    async def ensure_stream(self, spec: StreamSpec) -> None:
        await self._ensure(
            {
                "name": spec.name,
                "subjects": list(spec.subjects),
                "retention": spec.retention,
                "discard": "new" if spec.retention == "workqueue" else "old",
                "max_bytes": spec.max_bytes,
                "max_age": int(spec.max_age_s * SECOND_NS),
                "duplicate_window": int(spec.duplicate_window_s * SECOND_NS),
                "num_replicas": spec.replicas,
                "allow_direct": spec.allow_direct,
                "storage": "file",
            }
        )

    async def ensure_bucket(self, spec: BucketSpec) -> None:
        config: dict[str, Any] = {
            "name": f"KV_{spec.name}",
            "subjects": [f"$KV.{spec.name}.>"],
            "max_msgs_per_subject": spec.history,
            "max_bytes": spec.max_bytes,
            "discard": "new",
            # Else a header of one writer's, under its own key, could wipe the whole bucket.
            "allow_rollup_hdrs": False,
            "deny_delete": True,
            "allow_direct": True,
            "allow_msg_ttl": spec.ttl_allowed,
            "duplicate_window": 120 * SECOND_NS,
            "num_replicas": spec.replicas,
            "storage": "file",
        }
        if spec.republish:
            config["republish"] = {"src": f"$KV.{spec.name}.>", "dest": f"{spec.republish}.>"}
        await self._ensure(config)

    async def _ensure(self, config: dict[str, Any]) -> None:
        # Creating one that is there already is checked against free storage as if it were another one: look first.
        name = config["name"]
        known = await self._api(f"STREAM.INFO.{name}", {})
        answer = await self._api(f"STREAM.{'CREATE' if known.error is not None else 'UPDATE'}.{name}", config)
        if answer.error is not None and answer.error.err_code == NAME_IN_USE:  # someone else was faster
            answer = await self._api(f"STREAM.UPDATE.{name}", config)
        _raise(answer, f"stream {name}")

    # -- buckets ------------------------------------------------------------------------------------------------------

    async def get(self, bucket: str, key: str) -> Entry | None:
        foreign = self._roles_api_prefix and bucket.endswith(self._prefixed_bucket_suffix)
        prefix = self._roles_api_prefix if foreign else "$JS.API"
        found = await self._direct(f"KV_{bucket}.$KV.{bucket}.{key}", None, prefix)
        if found is None or "KV-Operation" in found.headers or "Nats-Marker-Reason" in found.headers:
            return None
        return Entry(key, found.data, found.seq, found.at_ms)

    async def put(
        self, bucket: str, key: str, data: bytes, *, last_revision: int | None, ttl_s: int | None = None
    ) -> int:
        """See Bus.put. The message id makes a retry of a write whose answer was lost harmless."""
        headers = {"Nats-Msg-Id": NUID().next().decode()}
        if last_revision is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(last_revision)
        if ttl_s is not None:
            assert ttl_s >= 1, f"a TTL is whole seconds, at least 1, not {ttl_s}"
            headers["Nats-TTL"] = f"{ttl_s}s"
        return await self._store(f"$KV.{bucket}.{key}", data, headers, f"KV_{bucket}")

    # -- connection ---------------------------------------------------------------------------------------------------

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

    def _new_inbox(self) -> str:
        """Prefix of reply subjects that nobody else has."""
        return f"{self._inbox_prefix}.{NUID().next().decode()}."

    async def send_quietly(self, subject: str, data: bytes, reply: str = "") -> bool:
        """Publish what may be lost; False if it was lost here."""
        try:
            await self._send(subject, data, reply)
        except BusUnavailable:
            return False
        return True

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


def _id_key(seed_file: str | Path) -> bytes:
    """What a user's message ids are sealed with."""
    return hashlib.sha256(b"message ids " + Path(seed_file).read_bytes().strip()).digest()


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(_Lost("no answer in time"))


def _decode(msg: Any, subject: str) -> _Answer:
    try:
        return _answers.decode(msg.data)
    except msgspec.MsgspecError as error:
        raise BusError(f"{subject}: the server's answer is not readable: {error}") from error


def _raise(answer: _Answer, what: str) -> None:
    if answer.error is not None:
        kind = BusUnavailable if answer.error.code in AWAY else BusError
        raise kind(f"{what}: {answer.error.description} (code {answer.error.err_code})")
