"""The bus over NATS: core subjects, streams and buckets on one connection (`bus_nats_connection.py`).

It speaks JetStream's protocol itself: raw headers for guarded writes, message ids and TTLs; pull consumers of its own, one
outstanding pull request a reader, asked again after reconnection, never a busy loop.

Every retry is bounded by `patience_s`. A write that raised `BusUnavailable` may still have been stored: repeat it
with the same message id.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from services.runtime.bus import (
    Bounds,
    BucketSpec,
    BusError,
    BusUnavailable,
    Delivery,
    Entry,
    NoReply,
    StreamSpec,
    WrongLastSequence,
)
from services.runtime.bus_nats_connection import PATIENCE_S, RETRY_FIRST_S, RETRY_MOST_S, Lost, NatsConnection, new_id
from services.runtime.bus_nats_readers import (
    SECOND_NS,
    NatsConsumer,
    NatsSubscription,
    core_delivery,
    status_of,
    stored_delivery,
)

MAX_DURABLE_IN_FLIGHT: Final = 1024  # the server refuses publishes beyond 10,000 waiting in one stream
PAGE_MESSAGES: Final = 256  # of one direct read
PAGE_BYTES: Final = 4 << 20
FAMILIES_KEPT: Final = 1024

WRONG_LAST: Final = (10071, 10164)
AWAY: Final = (429, 503)  # too much at once; no leader just now
NAME_IN_USE: Final = 10058
STREAM_NOT_FOUND: Final = 10059
NO_MESSAGE: Final = 10037
BEING_STORED: Final = 10158  # the first copy of this message has no majority yet: the retry came too soon


class _ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct, frozen=True):
    """What all JetStream answers have in common; the rest is ignored."""

    error: _ApiError | None = None
    seq: int = 0
    stream: str = ""


class _StoredMessage(msgspec.Struct, frozen=True):
    seq: int
    time: str
    data: bytes = b""
    hdrs: bytes = b""


class _MessageAnswer(msgspec.Struct, frozen=True):
    """What the leader of a stream answers to a read of one message."""

    error: _ApiError | None = None
    message: _StoredMessage | None = None


class _State(msgspec.Struct, frozen=True):
    """Of a stream, in the answer to STREAM.INFO."""

    first_seq: int = 0  # of one with nothing left: the next to be given out
    last_seq: int = 0
    last_ts: str = ""


class _Info(_Answer, frozen=True):
    state: _State = _State()


A = TypeVar("A", _Answer, _MessageAnswer, _Info)

_answers = msgspec.json.Decoder(_Answer)
_message_answers = msgspec.json.Decoder(_MessageAnswer)
_infos = msgspec.json.Decoder(_Info)


async def connect(
    url: str,
    *,
    name: str,
    inbox_prefix: str,
    seed_file: str | Path | None = None,
    roles_api_prefix: str = "",
    info_api_prefix: str = "$JS.API",
    prefixed_bucket_suffix: str = "_roles",
    tls: ssl.SSLContext | None = None,
    patience_s: float = PATIENCE_S,
) -> NatsBus:
    """Connect as the user of the nkey in `seed_file` and stay connected: reconnection never gives up.

    Buckets whose name ends in `prefixed_bucket_suffix` are read through `roles_api_prefix` (an import from another
    account) where one is given, and streams are asked about through `info_api_prefix`. `patience_s` bounds this call and every retry. Raises BusUnavailable, Denied.
    """
    bus = NatsBus(name, inbox_prefix, roles_api_prefix, info_api_prefix, prefixed_bucket_suffix, patience_s)
    await bus.open(url, seed_file, tls)
    return bus


class NatsBus(NatsConnection):
    """The bus over one connection as one user. Make it with `connect`."""

    def __init__(
        self,
        name: str,
        inbox_prefix: str,
        roles_api_prefix: str,
        info_api_prefix: str,
        prefixed_bucket_suffix: str,
        patience_s: float,
    ) -> None:
        super().__init__(name, inbox_prefix, patience_s)
        self._roles_api_prefix = roles_api_prefix
        self._info_api_prefix = info_api_prefix
        self._prefixed_bucket_suffix = prefixed_bucket_suffix
        self._durable_slots = asyncio.Semaphore(MAX_DURABLE_IN_FLIGHT)
        self._id_key = b""  # from the user's seed
        self._streams: dict[str, str] = {}  # subject without its last token -> stream, as acknowledgements said

    async def open(self, url: str, seed_file: str | Path | None, tls: ssl.SSLContext | None) -> None:
        if seed_file is not None:
            self._id_key = _id_key(seed_file)
        await super().open(url, seed_file, tls)

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
                    self._learn(subject, answer.stream)
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
        except (Lost, BusUnavailable) as lost:
            raise NoReply(f"{subject}: {lost}") from lost
        if status_of(answer) == "503":
            raise NoReply(f"{subject}: nobody listens")
        return core_delivery(answer)

    async def subscribe(self, subject: str, *, queue: str = "", limit: int = 65536) -> NatsSubscription:
        subscription = NatsSubscription(self, subject, limit)
        self._subscriptions.add(subscription)
        subscription.inner = await self._subscribe(subject, subscription.take, queue)
        return subscription

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

    async def bounds(self, stream: str) -> Bounds:
        """See Bus.bounds. The user must be allowed STREAM.INFO of the stream."""
        subject = f"{self._info_api_prefix}.STREAM.INFO.{stream}"
        info = _decode(await self._ask(subject, b""), subject, _infos)
        _raise(info, f"stream {stream}")
        state = info.state
        last_ms = int(datetime.fromisoformat(state.last_ts).timestamp() * 1000) if state.last_seq else 0
        return Bounds(max(0, state.first_seq - 1), state.last_seq, last_ms)

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

    async def get(self, bucket: str, key: str, *, from_leader: bool = False) -> Entry | None:
        foreign = self._roles_api_prefix and bucket.endswith(self._prefixed_bucket_suffix)
        if from_leader:
            assert not foreign, f"the leader of bucket {bucket} is asked only by users of the bucket's own account"
            return await self._get_from_leader(bucket, key)
        prefix = self._roles_api_prefix if foreign else "$JS.API"
        found = await self._direct(f"KV_{bucket}.$KV.{bucket}.{key}", None, prefix)
        if found is None or "KV-Operation" in found.headers or "Nats-Marker-Reason" in found.headers:
            return None
        return Entry(key, found.data, found.seq, found.at_ms)

    async def _get_from_leader(self, bucket: str, key: str) -> Entry | None:
        """By the stream's own API and not by a direct read: only its leader answers there, in JSON."""
        subject = f"$JS.API.STREAM.MSG.GET.KV_{bucket}"
        request = msgspec.json.encode({"last_by_subj": f"$KV.{bucket}.{key}"})
        answer = _decode(await self._ask(subject, request), subject, _message_answers)
        if answer.error is not None and answer.error.err_code == NO_MESSAGE:
            return None
        _raise(answer, subject)
        found = answer.message
        if found is None:
            raise BusError(f"{subject}: the server's answer holds neither a message nor an error")
        if b"KV-Operation:" in found.hdrs or b"Nats-Marker-Reason:" in found.hdrs:
            return None
        return Entry(key, found.data, found.seq, int(datetime.fromisoformat(found.time).timestamp() * 1000))

    async def put(
        self, bucket: str, key: str, data: bytes, *, last_revision: int | None, ttl_s: int | None = None
    ) -> int:
        """See Bus.put. The message id makes a retry of a write whose answer was lost harmless."""
        headers = {"Nats-Msg-Id": new_id()}
        if last_revision is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(last_revision)
        if ttl_s is not None:
            assert ttl_s >= 1, f"a TTL is whole seconds, at least 1, not {ttl_s}"
            headers["Nats-TTL"] = f"{ttl_s}s"
        return await self._store(f"$KV.{bucket}.{key}", data, headers, f"KV_{bucket}")


def _id_key(seed_file: str | Path) -> bytes:
    """What a user's message ids are sealed with."""
    return hashlib.sha256(b"message ids " + Path(seed_file).read_bytes().strip()).digest()


def _decode(msg: Any, subject: str, answers: msgspec.json.Decoder[A] = _answers) -> A:
    try:
        return answers.decode(msg.data)
    except msgspec.MsgspecError as error:
        raise BusError(f"{subject}: the server's answer is not readable: {error}") from error


def _raise(answer: _Answer | _MessageAnswer, what: str) -> None:
    if answer.error is not None:
        kind = BusUnavailable if answer.error.code in AWAY else BusError
        raise kind(f"{what}: {answer.error.description} (code {answer.error.err_code})")
