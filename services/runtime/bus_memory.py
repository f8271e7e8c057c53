"""The bus in one process: for tests and for simulation. Same contract as `bus_nats`, no server, no threads.

Time comes from the broker's clock: acknowledgement times, duplicate windows and TTLs run by it. With a
`ManualClock`, call `MemoryBroker.wake()` after advancing it, so that waiting fetches look again.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import cast

import msgspec

from services.runtime.bus import (
    Bounds,
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
from services.runtime.clock import Clock, now_ms
from services.runtime.wildcards import matches


class Pending(msgspec.Struct):
    """A delivery that is not acknowledged yet."""

    due_ms: int  # deliver again from then on
    attempts: int


class ConsumerState:
    """Position of one durable consumer; shared by all that attach to it."""

    def __init__(self, stream: Stream, durable: str) -> None:
        self.stream = stream
        self.durable = durable
        self.subjects: tuple[str, ...] = ()
        self.ack_wait_ms = 30_000
        self.max_ack_pending = 1000
        self.max_deliver = -1
        self.next_seq = 1
        self.deliveries = 0
        self.pending: dict[int, Pending] = {}

    def configure(self, subjects: tuple[str, ...], ack_wait_ms: int, max_ack_pending: int, max_deliver: int) -> None:
        """As its readers want it; it keeps its position."""
        self.subjects = subjects
        self.ack_wait_ms = ack_wait_ms
        self.max_ack_pending = max_ack_pending
        self.max_deliver = max_deliver

    def take(self, most: int, now: int) -> list[Delivery]:
        """Up to `most` deliveries that are due: redeliveries first, then new messages in order."""
        found: list[Delivery] = []
        for seq in sorted(seq for seq, pending in self.pending.items() if pending.due_ms <= now):
            if len(found) == most:
                return found
            pending = self.pending[seq]
            stored = self.stream.messages.get(seq)
            if stored is None or pending.attempts == self.max_deliver:
                del self.pending[seq]
                continue
            pending.attempts += 1
            pending.due_ms = now + self.ack_wait_ms
            found.append(self._delivery(stored, pending.attempts))
        while len(found) < most and len(self.pending) < self.max_ack_pending and self.next_seq <= self.stream.last_seq:
            stored = self.stream.messages.get(self.next_seq)
            self.next_seq += 1
            if stored is None or not any(matches(pattern, stored.subject) for pattern in self.subjects):
                continue
            self.pending[stored.seq] = Pending(now + self.ack_wait_ms, 1)
            found.append(self._delivery(stored, 1))
        return found

    def _delivery(self, stored: Delivery, attempt: int) -> Delivery:
        self.deliveries += 1
        return msgspec.structs.replace(
            stored, attempt=attempt, token=f"{self.durable}:{stored.seq}", consumer_seq=self.deliveries
        )

    def next_due_ms(self) -> int | None:
        return min((pending.due_ms for pending in self.pending.values()), default=None)


class Stream:
    """One stream: messages by sequence, oldest first."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.messages: dict[int, Delivery] = {}
        self.last_seq = 0
        self.last_ms = 0
        self.size = 0
        self.seen: dict[str, tuple[int, int]] = {}  # message id -> (sequence, forgotten at ms)
        self.consumers: dict[str, ConsumerState] = {}

    def store(
        self, subject: str, data: bytes, headers: dict[str, str], now: int, msg_id: str, expected: int | None
    ) -> int:
        for known in list(self.seen):
            if self.seen[known][1] > now:
                break
            del self.seen[known]
        if expected is not None:  # before duplicates, as the server does
            newest = self.last(subject)
            found = newest.seq if newest is not None else 0
            if found != expected:
                if newest is not None and newest.headers.get("Nats-Msg-Id") == msg_id:
                    return newest.seq
                raise WrongLastSequence(f"{subject}: last sequence is {found}, the write expected {expected}")
        if msg_id and msg_id in self.seen:
            return self.seen[msg_id][0]
        if self.spec.retention == "workqueue" and self.size + len(data) > self.spec.max_bytes:
            raise BusUnavailable(f"stream {self.spec.name} is full ({self.spec.max_bytes} bytes)")
        self.last_seq += 1
        self.last_ms = now
        self.messages[self.last_seq] = Delivery(subject, data, headers, seq=self.last_seq, at_ms=now)
        self.size += len(data)
        if msg_id:
            self.seen[msg_id] = (self.last_seq, now + int(self.spec.duplicate_window_s * 1000))
        horizon = now - int(self.spec.max_age_s * 1000) if self.spec.max_age_s else 0
        while self.messages:
            oldest = next(iter(self.messages.values()))
            if self.size <= self.spec.max_bytes and oldest.at_ms >= horizon:
                break
            self.drop(oldest.seq)
        return self.last_seq

    def drop(self, seq: int) -> None:
        stored = self.messages.pop(seq, None)
        if stored is not None:
            self.size -= len(stored.data)

    def bounds(self) -> Bounds:
        return Bounds(next(iter(self.messages), self.last_seq + 1) - 1, self.last_seq, self.last_ms)

    def last(self, subject: str) -> Delivery | None:
        return next((stored for stored in reversed(self.messages.values()) if matches(subject, stored.subject)), None)


class Bucket:
    """One bucket: values by key, and when they expire."""

    def __init__(self, spec: BucketSpec) -> None:
        self.spec = spec
        self.entries: dict[str, Entry] = {}
        self.expires_ms: dict[str, int] = {}
        self.revision = 0

    def get(self, key: str, now: int) -> Entry | None:
        if self.expires_ms.get(key, now + 1) <= now:
            del self.entries[key], self.expires_ms[key]
        return self.entries.get(key)


class MemoryBroker:
    """The broker. `connect()` gives a bus; all buses of one broker see each other."""

    def __init__(self, clock: Clock = now_ms) -> None:
        self.clock = clock
        self.streams: dict[str, Stream] = {}
        self.buckets: dict[str, Bucket] = {}
        self.subscriptions: list[MemorySubscription] = []
        self.buses: list[MemoryBus] = []
        self.up = True
        self.waiters: list[asyncio.Event] = []
        self.lagging: dict[tuple[str, str], Entry | None] = {}  # what a replica that lags has of a bucket's key
        self.inboxes = count(1)
        self._turn = 0

    def connect(self, *, deny: Sequence[str] = ()) -> MemoryBus:
        """A connection as a user that may publish anything but the subjects in `deny` (wildcards allowed)."""
        bus = MemoryBus(self, tuple(deny))
        self.buses.append(bus)
        return bus

    def wake(self) -> None:
        """Let waiting fetches look again, after a message or a move of the clock."""
        for event in self.waiters:
            event.set()

    def go_down(self) -> None:
        """The broker is away: publishes fail, core messages are lost, fetches are empty. What it stored stays."""
        self.up = False

    def lag(self, bucket: str, key: str) -> None:
        """From now on the replica that answers reads of this value keeps the present one, while the leader takes writes."""
        self.lagging[bucket, key] = self.bucket(bucket).get(key, self.clock())

    def catch_up(self) -> None:
        """No replica lags any more."""
        self.lagging.clear()

    def snapshot(self) -> object:
        """What is stored now, to be given to `go_back`."""
        return copy.deepcopy((self.streams, self.buckets))

    def go_back(self, snapshot: object) -> None:
        """The store is as it was at `snapshot`, as after a power cut that lost the last moments. Call it while down."""
        assert not self.up, "a store goes back while its broker is down"
        streams, buckets = cast("tuple[dict[str, Stream], dict[str, Bucket]]", copy.deepcopy(snapshot))
        for name, stream in self.streams.items():
            for durable, state in stream.consumers.items():  # who is attached creates its consumer again
                if durable not in streams[name].consumers:
                    fresh = streams[name].consumers[durable] = ConsumerState(streams[name], durable)
                    fresh.configure(state.subjects, state.ack_wait_ms, state.max_ack_pending, state.max_deliver)
        self.streams, self.buckets = streams, buckets

    async def come_up(self) -> None:
        """The broker is back; reconnect callbacks run."""
        self.up = True
        self.wake()
        for bus in list(self.buses):
            await bus.reconnected()

    def route(self, subject: str, data: bytes, reply: str, headers: dict[str, str]) -> int:
        """Hand a core message to its subscribers; each queue group gets it once. Returns how many took it."""
        delivery = Delivery(subject, data, headers, reply=reply, at_ms=self.clock())
        groups: dict[str, list[MemorySubscription]] = {}
        taken = 0
        for subscription in self.subscriptions:
            if matches(subscription.subject, subject):
                if subscription.queue:
                    groups.setdefault(subscription.queue, []).append(subscription)
                else:
                    subscription.take(delivery)
                    taken += 1
        for members in groups.values():
            self._turn += 1
            members[self._turn % len(members)].take(delivery)
            taken += 1
        return taken

    def stream_for(self, subject: str) -> Stream | None:
        return next(
            (s for s in self.streams.values() if any(matches(pattern, subject) for pattern in s.spec.subjects)), None
        )

    def stream(self, name: str) -> Stream:
        if name not in self.streams:
            raise BusError(f"stream {name} does not exist: create it with ensure_stream")
        return self.streams[name]

    def bucket(self, name: str) -> Bucket:
        if name not in self.buckets:
            raise BusError(f"bucket {name} does not exist: create it with ensure_bucket")
        return self.buckets[name]


class Inbox:
    """Deliveries that wait for their reader: the part of a core subscription that every simulated or in-memory bus has."""

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self._limit = limit
        self._buffer: deque[Delivery] = deque()
        self._arrived = asyncio.Event()
        self._stopped = False

    def take(self, delivery: Delivery) -> None:
        """A message arrived; the oldest is dropped if the reader is too slow."""
        if len(self._buffer) >= self._limit:
            self._buffer.popleft()
            self.dropped += 1
        self._buffer.append(delivery)
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self

    async def __anext__(self) -> Delivery:
        while not self._buffer:
            if self._stopped:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._buffer.popleft()

    async def next(self, timeout_s: float) -> Delivery | None:
        """The next delivery, or None after `timeout_s` or once stopped."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self, None)
        except TimeoutError:
            return None

    async def stop(self) -> None:
        """End the iteration; what is buffered is still read."""
        self._stopped = True
        self._arrived.set()


class MemorySubscription(Inbox):
    """A core subscription of the in-memory bus."""

    def __init__(self, broker: MemoryBroker, subject: str, queue: str, limit: int) -> None:
        super().__init__(limit)
        self.subject = subject
        self.queue = queue
        self._broker = broker

    async def stop(self) -> None:
        await super().stop()
        if self in self._broker.subscriptions:
            self._broker.subscriptions.remove(self)


class MemoryConsumer:
    """A handle on a durable consumer of the in-memory bus."""

    def __init__(self, broker: MemoryBroker, stream: str, durable: str) -> None:
        self._broker = broker
        self._stream = stream
        self._durable = durable
        self._arrived = asyncio.Event()
        self._stopped = False
        broker.waiters.append(self._arrived)

    @property
    def _state(self) -> ConsumerState:
        return self._broker.stream(self._stream).consumers[self._durable]

    async def fetch(self, most: int, timeout_s: float) -> Sequence[Delivery]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await asyncio.sleep(0)
        while True:
            if self._stopped:
                return ()
            self._arrived.clear()
            now = self._broker.clock()
            found = self._state.take(most, now) if self._broker.up else []
            left = deadline - loop.time()
            if found or left <= 0:
                return found
            due = self._state.next_due_ms()
            wait = left if due is None or not self._broker.up else min(left, max(0.001, (due - now) / 1000))
            try:
                async with asyncio.timeout(wait):
                    await self._arrived.wait()
            except TimeoutError:
                continue

    async def ack(self, delivery: Delivery) -> None:
        if self._broker.up:
            self._state.pending.pop(delivery.seq, None)
            if self._state.stream.spec.retention == "workqueue":
                self._state.stream.drop(delivery.seq)

    async def nak(self, delivery: Delivery, delay_s: float) -> None:
        pending = self._state.pending.get(delivery.seq)
        if pending is not None and self._broker.up:
            pending.due_ms = self._broker.clock() + int(delay_s * 1000)
            self._broker.wake()

    async def term(self, delivery: Delivery) -> None:
        await self.ack(delivery)

    async def progress(self, delivery: Delivery) -> None:
        pending = self._state.pending.get(delivery.seq)
        if pending is not None and self._broker.up:
            pending.due_ms = self._broker.clock() + self._state.ack_wait_ms

    async def stop(self) -> None:
        self._stopped = True
        self._arrived.set()
        if self._arrived in self._broker.waiters:
            self._broker.waiters.remove(self._arrived)


class MemoryBus:
    """One connection to a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker, deny: tuple[str, ...]) -> None:
        self.broker = broker
        self.denied: dict[str, int] = {}  # refused publishes by subject
        self._deny = deny
        self._callbacks: list[Callable[[], Awaitable[None]]] = []

    def _refused(self, subject: str) -> bool:
        if any(matches(pattern, subject) for pattern in self._deny):
            self.denied[subject] = self.denied.get(subject, 0) + 1
            return True
        return False

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        if not self.broker.up or self._refused(subject):
            return
        stream = self.broker.stream_for(subject)
        if stream is not None:
            stream.store(subject, data, headers or {}, self.broker.clock(), "", None)
        self.broker.route(subject, data, reply, headers or {})
        self.broker.wake()

    async def publish_durable(
        self, subject: str, data: bytes, *, msg_id: str, expected_last_on_subject: int | None = None
    ) -> int:
        if not self.broker.up:
            raise BusUnavailable(f"{subject}: the broker is away")
        if self._refused(subject):
            raise Denied(f"this user may not publish on {subject}")
        stream = self.broker.stream_for(subject)
        if stream is None:
            raise BusUnavailable(f"{subject}: no stream takes this subject")
        headers = {"Nats-Msg-Id": msg_id}
        before = stream.last_seq
        seq = stream.store(subject, data, headers, self.broker.clock(), msg_id, expected_last_on_subject)
        if seq > before:
            self.broker.route(subject, data, "", headers)
            self.broker.wake()
        return seq

    async def request(self, subject: str, data: bytes, timeout_s: float) -> Delivery:
        if self._refused(subject):
            raise Denied(f"this user may not publish on {subject}")
        inbox = f"_INBOX.{next(self.broker.inboxes)}"
        answers = await self.subscribe(inbox)
        try:
            if not self.broker.up or self.broker.route(subject, data, inbox, {}) == 0:
                raise NoReply(f"{subject}: nobody listens")
            answer = await answers.next(timeout_s)
        finally:
            await answers.stop()
        if answer is None:
            raise NoReply(f"{subject}: no reply within {timeout_s} s")
        return answer

    async def subscribe(self, subject: str, *, queue: str = "", limit: int = 65536) -> MemorySubscription:
        subscription = MemorySubscription(self.broker, subject, queue, limit)
        self.broker.subscriptions.append(subscription)
        return subscription

    async def consume(
        self,
        stream: str,
        durable: str,
        subjects: Sequence[str],
        *,
        ack_wait_s: float = 30.0,
        max_ack_pending: int = 1000,
        max_deliver: int = -1,
    ) -> MemoryConsumer:
        kept = self.broker.stream(stream)
        state = kept.consumers.setdefault(durable, ConsumerState(kept, durable))
        state.configure(tuple(subjects), int(ack_wait_s * 1000), max_ack_pending, max_deliver)
        return MemoryConsumer(self.broker, stream, durable)

    async def read(
        self, stream: str, subject: str, *, first_seq: int = 1, last_seq: int | None = None
    ) -> AsyncIterator[Delivery]:
        if not self.broker.up:
            raise BusUnavailable(f"stream {stream}: the broker is away")
        kept = self.broker.stream(stream)
        last = kept.last_seq if last_seq is None else min(last_seq, kept.last_seq)
        for seq in range(max(1, first_seq), last + 1):
            stored = kept.messages.get(seq)
            if stored is not None and matches(subject, stored.subject):
                yield stored

    async def last(self, stream: str, subject: str) -> Delivery | None:
        if not self.broker.up:
            raise BusUnavailable(f"stream {stream}: the broker is away")
        return self.broker.stream(stream).last(subject)

    async def bounds(self, stream: str) -> Bounds:
        if not self.broker.up:
            raise BusUnavailable(f"stream {stream}: the broker is away")
        return self.broker.stream(stream).bounds()

    async def purge(self, stream: str, *, below_seq: int, subject: str = ">") -> None:
        kept = self.broker.stream(stream)
        for seq, stored in list(kept.messages.items()):
            if seq < below_seq and matches(subject, stored.subject):
                kept.drop(seq)

    async def get(self, bucket: str, key: str, *, from_leader: bool = False) -> Entry | None:
        if not self.broker.up:
            raise BusUnavailable(f"bucket {bucket}: the broker is away")
        if not from_leader and (bucket, key) in self.broker.lagging:
            return self.broker.lagging[bucket, key]
        return self.broker.bucket(bucket).get(key, self.broker.clock())

    async def put(
        self, bucket: str, key: str, data: bytes, *, last_revision: int | None, ttl_s: int | None = None
    ) -> int:
        if not self.broker.up:
            raise BusUnavailable(f"bucket {bucket}: the broker is away")
        subject = f"$KV.{bucket}.{key}"
        if self._refused(subject):
            raise Denied(f"this user may not publish on {subject}")
        kept = self.broker.bucket(bucket)
        assert ttl_s is None or kept.spec.ttl_allowed, f"bucket {bucket} does not allow a TTL"
        now = self.broker.clock()
        entry = kept.get(key, now)
        found = entry.revision if entry is not None else 0
        if last_revision is not None and last_revision != found:
            raise WrongLastSequence(f"{bucket}/{key}: revision is {found}, the write expected {last_revision}")
        kept.revision += 1
        kept.entries[key] = Entry(key, data, kept.revision, now)
        kept.expires_ms.pop(key, None)
        if ttl_s is not None:
            kept.expires_ms[key] = now + ttl_s * 1000
        if kept.spec.republish:
            headers = {"Nats-Subject": subject, "Nats-Sequence": str(kept.revision)}
            self.broker.route(f"{kept.spec.republish}.{key}", data, "", headers)
        return kept.revision

    async def ensure_stream(self, spec: StreamSpec) -> None:
        if spec.name in self.broker.streams:
            self.broker.streams[spec.name].spec = spec
        else:
            self.broker.streams[spec.name] = Stream(spec)

    async def ensure_bucket(self, spec: BucketSpec) -> None:
        if spec.name in self.broker.buckets:
            self.broker.buckets[spec.name].spec = spec
        else:
            self.broker.buckets[spec.name] = Bucket(spec)

    def on_reconnect(self, callback: object) -> None:
        self._callbacks.append(cast("Callable[[], Awaitable[None]]", callback))

    async def reconnected(self) -> None:
        """The broker came back: run the callbacks."""
        for callback in self._callbacks:
            await callback()

    async def close(self) -> None:
        if self in self.broker.buses:
            self.broker.buses.remove(self)
