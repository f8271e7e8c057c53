"""The broker and the network around it: the bus of every simulated process, with everything that may go wrong on the way.

A bus call takes its way to the broker, is applied there at one moment, and its answer takes the way back: between any two of
these its caller may die, be cut off or be frozen. What is stored is `bus_memory`'s; here is how it travels:

- core messages of one connection to one subscriber arrive in order, unless `reorder` says otherwise; they are lost and
  duplicated by `loss` and `duplicate`, and lost where either end is cut off;
- acknowledgements are lost by `ack_loss`, and what was not acknowledged is delivered again;
- a process that is cut off (or everyone, while the broker is down) waits, and is told that the bus is away; once it is back, core
  messages that it wanted to send meanwhile are sent, late, and its reconnect callbacks run;
- a deaf process hears nothing of the role table's feed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, cast

from messages.agent import Assignment
from messages.envelope import Message, decode, kind_of, registry
from messages.rollout_worker import Generate
from messages.router import AssignRequest
from messages.subjects import lease_bucket, roles_bucket, roles_feed
from pearl_state.codec import decode_table
from services.durable import durable_state
from services.runtime.bus import (
    Bounds,
    BucketSpec,
    BusUnavailable,
    Delivery,
    Entry,
    NoReply,
    StreamSpec,
    WrongLastSequence,
)
from services.runtime.bus_memory import Bucket, ConsumerState, Inbox, Pending, Stream
from services.runtime.wildcards import matches
from services.simulator.faults.loop import Process, VirtualLoop
from services.simulator.faults.record import Arrived, Assigned, Seen, Sent, Stored, TableWritten

WAY_MS: Final = (1.0, 6.0)
"""Shortest and longest way between a process and the broker."""
AWAY_S: Final = 0.6
"""How long a call waits before its caller is told that the bus is away."""
COPY_S: Final = 2.0
"""A copy of a message comes at most so long after it; mostly soon."""
PATIENCE: Final = 6
"""How often within that time it looks whether the bus is back."""
OUTBOUND: Final = 200
"""Core messages that wait in a connection for a broker that is away."""
READ_PAGE: Final = 64
"""Messages of a stream that come together."""

Watcher = Callable[[Seen], None]


class Network:
    """See the module. `seen` is told what happens; all rates are shares of 1."""

    def __init__(self, loop: VirtualLoop, job: str, rng: random.Random, seen: Watcher) -> None:
        self.loop = loop
        self.job = job
        self.rng = rng
        self.seen = seen
        self.loss = self.duplicate = self.reorder = self.ack_loss = 0.0
        self.slow_ms = 0.0
        self.down = False
        self.cut: dict[str, int] = {}  # processes by name, with how often
        self.deaf: dict[str, int] = {}
        self.generates: dict[tuple[str, str, int], Generate] = {}  # by worker, request, attempt: the last that arrived
        self.epochs: dict[str, int] = {}  # of the replica of each router, kept by the cluster
        self.on_doom: Callable[[Process], None] = lambda process: None
        self.lives: Callable[[Process], int] = lambda process: 1
        self._leaseholder: Process | None = None
        self._tenures: dict[Process, int] = {}  # how often each took the lease from another
        self._streams: dict[str, Stream] = {}
        self._stream_of: dict[str, Stream] = {}  # by family
        self._buckets: dict[str, Bucket] = {}
        self._waiting: dict[str, list[NetConsumer]] = {}
        self._subscriptions: list[NetSubscription] = []
        self._routes: dict[str, tuple[NetSubscription, ...]] = {}
        self._inboxes: dict[str, tuple[asyncio.Future[Delivery], Process, AssignRequest | None]] = {}
        self._inbox_count = 0
        self._buses: list[NetBus] = []
        self._kinds = registry()
        for entry in durable_state(job):
            if isinstance(entry.spec, StreamSpec):
                kept = self._streams[entry.spec.name] = Stream(entry.spec)
                self._stream_of[entry.spec.subjects[0].split(".")[2]] = kept
            else:
                self._buckets[entry.spec.name] = Bucket(entry.spec)

    # -- time

    def clock(self) -> int:
        """Unix milliseconds."""
        return int(self.loop.now_s * 1000 + 0.5)

    def way_s(self) -> float:
        """How long the next message takes."""
        return (WAY_MS[0] + self.rng.random() * (WAY_MS[1] - WAY_MS[0] + self.slow_ms)) / 1000

    # -- who is connected

    def connect(self, process: Process) -> NetBus:
        """A connection of the process's own."""
        bus = NetBus(self, process)
        self._buses.append(bus)
        return bus

    def away(self, process: Process) -> bool:
        """Whether the process cannot reach the broker."""
        return self.down or process.name in self.cut

    def drop(self, process: Process) -> None:
        """It is dead: the broker forgets its connections."""
        self._buses = [bus for bus in self._buses if bus.process is not process]
        self._subscriptions = [each for each in self._subscriptions if each.process is not process]
        self._routes.clear()
        for waiting in self._waiting.values():
            waiting[:] = [each for each in waiting if each.process is not process]
        self._inboxes = {inbox: held for inbox, held in self._inboxes.items() if held[1] is not process}

    def mended(self, names: Sequence[str] | None = None) -> None:
        """These processes (None: all) can reach the broker again: their reconnect callbacks run."""
        for bus in list(self._buses):
            if not self.away(bus.process):
                bus.flush()
            if (names is None or bus.process.name in names) and not self.away(bus.process) and bus.callbacks:
                self.loop.start(bus.process, bus.reconnected)
        for waiting in self._waiting.values():
            for each in waiting:
                each.arrived.set()

    # -- streams

    def stream(self, name: str) -> Stream:
        return self._streams[name]

    def store(self, sender: str, subject: str, data: bytes, msg_id: str, expected: int | None) -> int:
        """Take a durable message in."""
        kept = self._stream_of[subject.split(".", 3)[2]]
        before = kept.last_seq
        seq = kept.store(subject, data, {"Nats-Msg-Id": msg_id}, self.clock(), msg_id, expected)
        if seq > before:
            self.seen(Stored(self.clock(), sender, seq, self.decoded(data)))
            for consumer in self._waiting.get(kept.spec.name, ()):
                if consumer.wants(subject):
                    consumer.arrived.set()
        return seq

    def decoded(self, data: bytes) -> Message:
        return decode(data, self._kinds[kind_of(data)])

    def events(self, kind: type[Message] | tuple[type[Message], ...]) -> list[Message]:
        """Stored events of a kind, in order."""
        found = [self.decoded(each.data) for each in self._stream_of["ev"].messages.values()]
        return [message for message in found if isinstance(message, kind)]

    def redeliver(self, durable: str, count: int) -> None:
        """The broker has forgotten that these were acknowledged: the last `count` that the consumer took come again."""
        for kept in self._streams.values():
            state = kept.consumers.get(durable)
            if state is None:
                continue
            taken = [
                seq
                for seq, stored in kept.messages.items()
                if seq < state.next_seq and any(matches(pattern, stored.subject) for pattern in state.subjects)
            ]
            for seq in taken[-count:]:
                state.pending.setdefault(seq, Pending(self.clock(), 1))
            for each in self.waiting(kept.spec.name):
                each.arrived.set()

    def waiting(self, stream: str) -> list[NetConsumer]:
        return self._waiting.setdefault(stream, [])

    # -- buckets

    def bucket(self, name: str) -> Bucket:
        return self._buckets[name]

    def put(
        self, sender: Process, bucket: str, key: str, data: bytes, last_revision: int | None, ttl_s: int | None
    ) -> int:
        """A guarded write of a bucket's value."""
        kept, now = self._buckets[bucket], self.clock()
        entry = kept.get(key, now)
        found = entry.revision if entry is not None else 0
        if last_revision is not None and last_revision != found:
            raise WrongLastSequence(f"{bucket}/{key}: revision is {found}, the write expected {last_revision}")
        kept.revision += 1
        kept.entries[key] = Entry(key, data, kept.revision, now)
        kept.expires_ms.pop(key, None)
        if ttl_s is not None:
            kept.expires_ms[key] = now + ttl_s * 1000
        if bucket == lease_bucket(self.job) and sender is not self._leaseholder:
            self._leaseholder = sender
            self._tenures[sender] = self._tenures.get(sender, 0) + 1
        if bucket == roles_bucket(self.job):
            writer = f"{sender.name}/{self.lives(sender)}.{self._tenures.get(sender, 0)}"
            self.seen(TableWritten(now, writer, decode_table(data, self.job)))
            headers = {"Nats-Subject": f"$KV.{bucket}.{key}", "Nats-Sequence": str(kept.revision)}
            self.route(None, roles_feed(self.job), data, "", headers)
        return kept.revision

    # -- core messages

    def subscribed(self, subscription: NetSubscription) -> None:
        self._subscriptions.append(subscription)
        self._routes.clear()

    def unsubscribed(self, subscription: NetSubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._routes.clear()

    def route(self, sender: Process | None, subject: str, data: bytes, reply: str, headers: dict[str, str]) -> int:
        """Send a core message on its way; returns how many subscribers there are. Each queue group gets it once."""
        found = self._routes.get(subject)
        if found is None:
            found = tuple(each for each in self._subscriptions if matches(each.subject, subject))
            self._routes[subject] = found
        if sender is not None:
            self._say_sent(sender, subject, data)
        groups: dict[str, list[NetSubscription]] = {}
        delivery = Delivery(subject, data, headers, reply=reply)
        for subscription in found:
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
            else:
                self._carry(sender, subscription, delivery)
        for members in groups.values():
            self._carry(sender, members[self.rng.randrange(len(members))], delivery)
        return len(found)

    def _carry(self, sender: Process | None, subscription: NetSubscription, delivery: Delivery) -> None:
        """To one subscriber: lost, once or twice."""
        if (sender is not None and self.away(sender)) or self.down:
            return
        if self.loss and sender is not None and self.rng.random() < self.loss:
            return
        name = "" if sender is None else sender.name
        at_s = self.loop.now_s + self.way_s() + self.way_s()
        if not (self.reorder and self.rng.random() < self.reorder):
            at_s = max(at_s, subscription.newest_s.get(name, 0.0))
            subscription.newest_s[name] = at_s
        self.loop.at(at_s, lambda: self._arrive(subscription, delivery))
        if self.duplicate and self.rng.random() < self.duplicate:
            late_s = at_s + COPY_S * self.rng.random() ** 3
            self.loop.at(late_s, lambda: self._arrive(subscription, delivery))

    def _arrive(self, subscription: NetSubscription, delivery: Delivery) -> None:
        process = subscription.process
        if process.mute or self.away(process):
            return
        if process.name in self.deaf and delivery.subject == roles_feed(self.job):
            return
        family = delivery.subject.split(".", 3)[2]
        if family in ("cmd", "gen"):
            message = self.decoded(delivery.data)
            if isinstance(message, Generate):
                self.generates[message.worker, message.request, message.attempt] = message
            self.seen(Arrived(self.clock(), subscription.receiver, message))
        arrived = Delivery(delivery.subject, delivery.data, delivery.headers, reply=delivery.reply, at_ms=self.clock())
        subscription.take(arrived)

    def _say_sent(self, sender: Process, subject: str, data: bytes) -> None:
        """Commands and generation requests are of interest; telemetry, tokens and questions are many."""
        if subject.split(".", 3)[2] in ("cmd", "gen"):
            self.seen(Sent(self.clock(), sender.name, self.decoded(data)))

    # -- questions

    def ask(self, process: Process, subject: str, data: bytes) -> tuple[str, asyncio.Future[Delivery]]:
        """Send a question; its answer comes to the future, if it comes. Raises NoReply where nobody listens."""
        self._inbox_count += 1
        inbox = f"_INBOX.{self._inbox_count}"
        future: asyncio.Future[Delivery] = self.loop.create_future()
        question = self.decoded(data)
        self._inboxes[inbox] = (future, process, question if isinstance(question, AssignRequest) else None)
        if self.route(process, subject, data, inbox, {}) == 0:
            del self._inboxes[inbox]
            raise NoReply(f"{subject}: nobody listens")
        return inbox, future

    def unask(self, inbox: str) -> None:
        self._inboxes.pop(inbox, None)

    def answer(self, sender: Process, inbox: str, data: bytes) -> None:
        """An answer on its way to who asked."""
        held = self._inboxes.get(inbox)
        if held is None:
            return
        future, asker, question = held
        message = self.decoded(data)
        if question is not None and isinstance(message, Assignment):
            self.seen(
                Assigned(
                    at_ms=self.clock(),
                    router=sender.name,
                    request=message.request,
                    attempt=message.attempt,
                    worker=message.worker,
                    incarnation=message.incarnation,
                    role_generation=message.role_generation,
                    prefill=message.prefill_worker,
                    min_version=question.min_version,
                    epoch=self.epochs.get(sender.name, -1),
                )
            )
        if self.away(sender) or (self.loss and self.rng.random() < self.loss):
            return
        delivery = Delivery(inbox, data)

        def arrive() -> None:
            if not future.done() and not asker.mute and not self.away(asker):
                future.set_result(delivery)

        self.loop.at(self.loop.now_s + self.way_s() + self.way_s(), arrive)


class NetSubscription(Inbox):
    """A core subscription of one process."""

    def __init__(self, network: Network, process: Process, subject: str, queue: str, limit: int) -> None:
        super().__init__(limit)
        self.subject = subject
        self.queue = queue
        self.process = process
        self.newest_s: dict[str, float] = {}  # arrival of the newest message of each sender
        self.receiver = _receiver(subject)
        self._network = network

    async def stop(self) -> None:
        await super().stop()
        self._network.unsubscribed(self)


class NetConsumer:
    """A handle on a durable consumer."""

    def __init__(self, bus: NetBus, state: ConsumerState) -> None:
        self.process = bus.process
        self.arrived = asyncio.Event()
        self._bus = bus
        self._network = bus.network
        self._state = state
        self._stopped = False
        self._wants: dict[str, bool] = {}
        self._network.waiting(state.stream.spec.name).append(self)

    def wants(self, subject: str) -> bool:
        """Whether the consumer takes what is stored on this subject."""
        found = self._wants.get(subject)
        if found is None:
            found = self._wants[subject] = any(matches(pattern, subject) for pattern in self._state.subjects)
        return found

    async def fetch(self, most: int, timeout_s: float) -> Sequence[Delivery]:
        network, state = self._network, self._state
        self._bus.called()
        deadline = network.loop.now_s + timeout_s
        await asyncio.sleep(network.way_s())
        while not self._stopped:
            self.arrived.clear()
            now = network.clock()
            away = network.away(self.process)
            found = [] if away else state.take(most, now)
            if found:
                await asyncio.sleep(network.way_s())
                self._bus.called()
                # What is on its way to a connection that broke is lost, and comes again.
                return () if network.away(self.process) else found
            left = deadline - network.loop.now_s
            if left <= 0:
                break
            due = None if away else state.next_due_ms()
            try:
                async with asyncio.timeout(left if due is None else min(left, max(0.001, (due - now) / 1000))):
                    await self.arrived.wait()
            except TimeoutError:
                continue
        return ()

    async def ack(self, delivery: Delivery) -> None:
        self._say(lambda: self._acked(delivery))

    def _acked(self, delivery: Delivery) -> None:
        self._state.pending.pop(delivery.seq, None)
        if self._state.stream.spec.retention == "workqueue":
            self._state.stream.drop(delivery.seq)

    async def nak(self, delivery: Delivery, delay_s: float) -> None:
        def later() -> None:
            pending = self._state.pending.get(delivery.seq)
            if pending is not None:
                pending.due_ms = self._network.clock() + int(delay_s * 1000)
                for each in self._network.waiting(self._state.stream.spec.name):
                    each.arrived.set()

        self._say(later)

    async def term(self, delivery: Delivery) -> None:
        await self.ack(delivery)

    async def progress(self, delivery: Delivery) -> None:
        def extend() -> None:
            pending = self._state.pending.get(delivery.seq)
            if pending is not None:
                pending.due_ms = self._network.clock() + self._state.ack_wait_ms

        self._say(extend)

    def _say(self, action: Callable[[], None]) -> None:
        """Tell the broker; nobody hears whether that arrived."""
        self._bus.called()
        network = self._network
        if network.away(self.process) or (network.ack_loss and network.rng.random() < network.ack_loss):
            return
        network.loop.at(network.loop.now_s + network.way_s(), action)

    async def stop(self) -> None:
        self._stopped = True
        self.arrived.set()
        waiting = self._network.waiting(self._state.stream.spec.name)
        if self in waiting:
            waiting.remove(self)


class NetBus:
    """One process's connection: `services.runtime.bus.Bus`."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.callbacks: list[Callable[[], Awaitable[None]]] = []
        self.outbound: list[tuple[str, bytes, str, dict[str, str]]] = []

    def flush(self) -> None:
        """What waited for the broker."""
        waiting, self.outbound = self.outbound, []
        for subject, data, reply, headers in waiting:
            if subject.startswith("_INBOX."):
                self.network.answer(self.process, subject, data)
            else:
                self.network.route(self.process, subject, data, reply, headers)

    def called(self) -> None:
        """Before anything leaves the process, and when an answer is back: the moments between which it may die."""
        process = self.process
        if process.mute:
            raise asyncio.CancelledError
        process.calls += 1
        if process.doom and process.calls >= process.doom:
            process.doom = 0
            process.mute = True
            self.network.on_doom(process)
            raise asyncio.CancelledError

    async def _reach(self, what: str) -> None:
        self.called()
        if not self.network.away(self.process):
            await asyncio.sleep(self.network.way_s())
        if self.network.away(self.process):
            await self._wait_for_it(what)
        if self.process.mute:
            raise asyncio.CancelledError

    async def _wait_for_it(self, what: str) -> None:
        """For a broker that is away, within the bus's patience."""
        for _ in range(PATIENCE):
            await asyncio.sleep(AWAY_S / PATIENCE)
            if not self.network.away(self.process):
                return
        raise BusUnavailable(f"{what}: the broker is away")

    async def _back(self, what: str) -> None:
        await asyncio.sleep(self.network.way_s())
        self.called()
        if self.network.away(self.process):
            await asyncio.sleep(AWAY_S)
            raise BusUnavailable(f"{what}: the broker went away; whether it was done is unknown")

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """While the broker is away, messages wait for it, and then come late; a few are more than the buffer holds."""
        self.called()
        if self.network.away(self.process):
            if len(self.outbound) >= OUTBOUND:
                raise BusUnavailable(f"{subject}: the broker is away and the outbound buffer is full")
            self.outbound.append((subject, data, reply, headers or {}))
        elif subject.startswith("_INBOX."):
            self.network.answer(self.process, subject, data)
        else:
            self.network.route(self.process, subject, data, reply, headers or {})

    async def publish_durable(
        self, subject: str, data: bytes, *, msg_id: str, expected_last_on_subject: int | None = None
    ) -> int:
        await self._reach(subject)
        seq = self.network.store(self.process.name, subject, data, msg_id, expected_last_on_subject)
        await self._back(subject)
        return seq

    async def request(self, subject: str, data: bytes, timeout_s: float) -> Delivery:
        self.called()
        if self.network.away(self.process):
            await asyncio.sleep(timeout_s)
            raise NoReply(f"{subject}: the broker is away")
        inbox, future = self.network.ask(self.process, subject, data)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            raise NoReply(f"{subject}: no reply within {timeout_s} s") from None
        finally:
            self.network.unask(inbox)
        self.called()
        return answer

    async def subscribe(self, subject: str, *, queue: str = "", limit: int = 65536) -> NetSubscription:
        await self._reach(subject)
        subscription = NetSubscription(self.network, self.process, subject, queue, limit)
        self.network.subscribed(subscription)
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
    ) -> NetConsumer:
        await self._reach(stream)
        kept = self.network.stream(stream)
        state = kept.consumers.setdefault(durable, ConsumerState(kept, durable))
        state.subjects = tuple(subjects)
        state.ack_wait_ms = int(ack_wait_s * 1000)
        state.max_ack_pending = max_ack_pending
        state.max_deliver = max_deliver
        return NetConsumer(self, state)

    async def read(
        self, stream: str, subject: str, *, first_seq: int = 1, last_seq: int | None = None
    ) -> AsyncIterator[Delivery]:
        await self._reach(stream)
        kept = self.network.stream(stream)
        last = kept.last_seq if last_seq is None else min(last_seq, kept.last_seq)
        found = [
            stored
            for seq, stored in kept.messages.items()
            if first_seq <= seq <= last and matches(subject, stored.subject)
        ]
        for begin in range(0, len(found), READ_PAGE):
            await self._back(stream)
            for stored in found[begin : begin + READ_PAGE]:
                yield stored

    async def last(self, stream: str, subject: str) -> Delivery | None:
        await self._reach(stream)
        found = self.network.stream(stream).last(subject)
        await self._back(stream)
        return found

    async def bounds(self, stream: str) -> Bounds:
        await self._reach(stream)
        found = self.network.stream(stream).bounds()
        await self._back(stream)
        return found

    async def purge(self, stream: str, *, below_seq: int, subject: str = ">") -> None:
        await self._reach(stream)
        kept = self.network.stream(stream)
        for seq, stored in list(kept.messages.items()):
            if seq < below_seq and matches(subject, stored.subject):
                kept.drop(seq)

    async def get(self, bucket: str, key: str, *, from_leader: bool = False) -> Entry | None:
        """One replica, which is the leader."""
        await self._reach(bucket)
        found = self.network.bucket(bucket).get(key, self.network.clock())
        await self._back(bucket)
        return found

    async def put(
        self, bucket: str, key: str, data: bytes, *, last_revision: int | None, ttl_s: int | None = None
    ) -> int:
        await self._reach(bucket)
        revision = self.network.put(self.process, bucket, key, data, last_revision, ttl_s)
        await self._back(bucket)
        return revision

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Streams are there from the start."""

    async def ensure_bucket(self, spec: BucketSpec) -> None:
        """Buckets too."""

    def on_reconnect(self, callback: object) -> None:
        self.callbacks.append(cast("Callable[[], Awaitable[None]]", callback))

    async def reconnected(self) -> None:
        """The broker is there again."""
        for callback in self.callbacks:
            await callback()

    async def close(self) -> None:
        """The connection ends with its process."""


def _receiver(subject: str) -> str:
    """`pearl.<job>.cmd.node.n0` is read by "node/n0", `cmd.worker.w` and `gen.w` by "worker/w", `cmd.trainer` by "trainer"."""
    tokens = subject.split(".")
    if tokens[2] == "gen":
        return f"worker/{tokens[-1]}"
    return "trainer" if tokens[-1] == "trainer" else f"{tokens[-2]}/{tokens[-1]}"
