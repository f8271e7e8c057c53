"""Runs one functional core over a bus: the shell that every control service shares.

Owns the core's state, its checkpoint in the state bucket and its position in the event stream. Never decides anything.

A *turn* takes what is there (the replica's newest value, core messages, a batch of durable messages, a tick), steps the
core on each in that order, and then, in this order and only as far as needed: writes ONE checkpoint by compare-and-set,
publishes the effects, acknowledges.

What holds:

- An input is accounted for exactly once in the state that survives: the checkpoint carries the position with the state.
- What the core decided to say durably is said, whatever dies when: the checkpoint carries the outbox, a restart
  publishes it again under the same message ids.
- Inputs reach the core in stream order and without holes. The consumer's delivery counter shows a hole (a delivery that
  went to a dead connection, or to a predecessor); then the stream itself is read from the cursor on. So a redelivery at
  or below the cursor is known to be a repetition and is skipped.
- Two instances cannot both go on: the second one's checkpoint wins, the first one's next write fails, and it ends.
- A store that lost its last moments is noticed after each reconnection and at each start: the checkpoint's revision and the message
  at the cursor must still be there. Who remembers more ends and begins anew from the store, so that all agree; a cursor beyond
  what the stream has kept moves back to where the stream and its lost continuation part.
- State changed by ticks or telemetry alone, without a durable message to send, lives in memory only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from messages.envelope import Message, UndecodableMessage, encode, kind_of, registry, tag_of
from messages.subjects import ROUTES, decode_on, event_subject, message_id, state_bucket, stream, subject_of
from services.runtime.bus import Bus, BusUnavailable, Consumer, Delivery, Subscription, WrongLastSequence
from services.runtime.clock import Clock, now_ms
from services.runtime.core import Core, Effects, Input, Note, Refuse, Reply, Send, Tick
from services.runtime.dead_letters import dead_letter
from services.runtime.log import get_logger

BATCH: Final = 256  # durable inputs a turn: one checkpoint write for all of them
CORE_INPUTS_A_TURN: Final = 1024  # so that a flood of telemetry cannot keep durable inputs waiting
CORE_INPUTS_WAITING: Final = 65536  # beyond it the oldest telemetry is dropped and counted
FETCH_S: Final = 2.0  # how long a pull request stays open without a message
ACK_WAIT_S: Final = 10.0  # redelivery is harmless, so soon; longer than a turn takes
RETRY_FIRST_S: Final = 0.1
RETRY_MOST_S: Final = 2.0
PARALLEL_PUBLISHES: Final = 64  # of one kind; different kinds are published strictly one after the other
CORE_DEAD_LETTERS_A_TICK: Final = 4  # unreadable telemetry beyond that is counted, not kept
LOOKS: Final = 8  # at what seems to be missing, before it is: one of several replicas may lag behind
LOOK_AGAIN_S: Final = 0.25

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


class Outgoing(msgspec.Struct, frozen=True):
    """A message on its way out. Durable ones have a message id; the others may be lost."""

    subject: str
    data: bytes
    msg_id: str = ""
    kind: str = ""


class Checkpoint(msgspec.Struct, frozen=True):
    """What survives: the core's state, what it had to say when that was written, and the inputs it accounts for."""

    state: msgspec.Raw
    outbox: tuple[Outgoing, ...] = ()
    cursor: int = 0
    cursor_at_ms: int = 0  # when the stream took the message at the cursor: by this it is known again


class TakenOver(Exception):
    """Another instance of this actor wrote its checkpoint: this one must end."""


class StoreWentBack(Exception):
    """The broker came back with an older store than this process remembers: it must end, and begin anew from the store."""


class CheckpointError(Exception):
    """The checkpoint in the bucket cannot be read by this release."""


class ReplicaLike(Protocol):
    """A read-only copy of the role table, kept current by someone else (pearl_state.watch.Replica)."""

    @property
    def table(self) -> Any: ...  # Any: the runtime knows no domain types; it looks for another object

    def on_change(self, callback: Callable[..., None], /) -> Any: ...


class _Stopped(Exception):
    """The stop event came while something was retried."""


class _Turn:
    """What one turn has collected."""

    def __init__(self) -> None:
        self.out: list[Outgoing] = []
        self.acks: list[Delivery] = []
        self.terms: list[Delivery] = []
        self.cursor = 0  # > 0: durable inputs up to it are in the state now
        self.cursor_at_ms = 0


class CoreHost(Generic[S]):
    """Runs `core` until told to stop. One host, one asyncio task, one bus connection."""

    def __init__(
        self,
        core: Core[S],
        bus: Bus,
        *,
        job_name: str,
        replica: ReplicaLike | None = None,
        telemetry: Sequence[str] = (),
        request_subject: str = "",
        request_queue: str = "",
        tick_ms: int = 200,
        clock: Clock = now_ms,
    ) -> None:
        """`telemetry` are core subjects fed as inputs; requests on `request_subject` are shared by queue group.

        `request_queue` defaults to the core's name. `tick_ms` is the time between two Ticks.
        """
        assert tick_ms > 0, "tick_ms must be positive"
        for kind in core.inputs:
            assert ROUTES[kind].family == "ev", f"{core.name}: {tag_of(kind)} is no event; a core consumes events only"
        self.name = core.name
        self.dropped = 0  # core inputs lost because the core was slow
        self._core = core
        self._bus = bus
        self._job = job_name
        self._replica = replica
        self._telemetry = tuple(telemetry)
        self._request_subject = request_subject
        self._request_queue = request_queue or core.name
        self._tick_ms = tick_ms
        self._clock = clock
        self._log = get_logger(core.name)
        self._nonce = secrets.token_hex(4)  # makes ids of messages that have none of their own
        self._numbered = 0
        self._state: S = core.initial()
        self._cursor = 0
        self._cursor_at_ms = 0
        self._revision = 0
        self._verified = True  # False: the store may have gone back
        self._consumer: Consumer | None = None
        self._consumer_seq: int | None = None
        self._missed = True  # the stream must be read from the cursor on
        self._batches: deque[Sequence[Delivery]] = deque()
        self._batch_taken = asyncio.Event()
        self._inbox: deque[tuple[Delivery | None, object]] = deque()
        self._wake = asyncio.Event()
        self._table: Any = None
        self._dead_this_tick = 0
        self._kinds = registry()
        self._wanted = {event_subject(job_name, kind).rpartition(".")[0] for kind in core.inputs}
        self._stop = asyncio.Event()

    @property
    def state(self) -> S:
        """The core's state now; for tests and for shells that show it."""
        return self._state

    @property
    def cursor(self) -> int:
        """Sequence in the event stream up to which inputs are accounted for."""
        return self._cursor

    def feed(self, message: object) -> None:
        """Give the core an input that does not come from the bus (something the shell noticed)."""
        self._inbox.append((None, message))
        self._wake.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Restore, then turn after turn until `stop`.

        Raises TakenOver, StoreWentBack, CheckpointError, and what the core asserts.
        """
        self._stop = stop
        subscriptions: list[Subscription] = []
        try:
            await self._restore()
            async with asyncio.TaskGroup() as group:
                pumps = [group.create_task(self._pump_stop())]
                try:
                    for subject in self._telemetry:
                        subscriptions.append(await self._bus.subscribe(subject))
                    if self._request_subject:
                        requests = await self._bus.subscribe(self._request_subject, queue=self._request_queue)
                        subscriptions.append(requests)
                    pumps.extend(group.create_task(self._pump_core(each)) for each in subscriptions)
                    if self._core.inputs:
                        self._consumer = await self._persist(self._attach, "attach its consumer")
                        pumps.append(group.create_task(self._pump_durable(self._consumer)))
                    self._bus.on_reconnect(self._reconnected)
                    if self._replica is not None:
                        self._replica.on_change(self._replica_changed)
                    self._log.info("running", action="host.run", cursor=self._cursor)
                    await self._turns()
                finally:
                    for pump in pumps:
                        pump.cancel()
        except BaseExceptionGroup as group_error:
            first = group_error.exceptions[0]
            if not isinstance(first, _Stopped):
                raise first from None
        except _Stopped:
            pass
        finally:
            for subscription in subscriptions:
                await subscription.stop()
            if self._consumer is not None:
                await self._give_back(self._consumer)
        self._log.info("stopped", action="host.stop", cursor=self._cursor)

    async def _give_back(self, consumer: Consumer) -> None:
        """What was fetched and not stepped on is for the next instance, at once."""
        for delivery in (each for batch in self._batches for each in batch):
            if delivery.seq <= self._cursor:
                await consumer.ack(delivery)
            else:
                await consumer.nak(delivery, 0.0)
        await consumer.stop()

    # -- restore ------------------------------------------------------------------------------------------------------

    async def _restore(self) -> None:
        entry = await self._persist(lambda: self._bus.get(state_bucket(self._job), self.name), "read its checkpoint")
        if entry is None:
            return
        try:
            saved = msgspec.msgpack.decode(entry.data, type=Checkpoint)
            self._state = msgspec.msgpack.decode(saved.state, type=self._core.state_type)
        except msgspec.MsgspecError as error:
            raise CheckpointError(
                f"{self.name}: key {self.name!r} of bucket {state_bucket(self._job)} does not hold a state of this release "
                f"({error}); run the release that wrote it, or delete the key to begin anew"
            ) from error
        self._cursor = saved.cursor
        self._cursor_at_ms = saved.cursor_at_ms
        self._revision = entry.revision
        if not await self._cursor_stands():
            await self._move_cursor_back()
        if saved.outbox:
            self._log.info(f"publishing {len(saved.outbox)} messages again", action="host.outbox", cursor=self._cursor)
            await self._publish(saved.outbox)

    # -- a store that went back

    async def _verify(self) -> None:
        """Raise StoreWentBack if the store is older than what this process remembers of it."""
        bucket = state_bucket(self._job)
        for look in range(LOOKS):
            if look and await self._stopped_within(LOOK_AGAIN_S):
                return
            entry = await self._persist(lambda: self._bus.get(bucket, self.name), "read its checkpoint")
            if (0 if entry is None else entry.revision) >= self._revision:
                break
        else:
            raise self._went_back(f"its checkpoint of revision {self._revision} is gone from bucket {bucket}")
        if not await self._cursor_stands():
            raise self._went_back(f"event {self._cursor}, which it has accounted for, is gone from the stream")
        self._verified = True

    def _went_back(self, what: str) -> StoreWentBack:
        text = f"{self.name}: the broker's store is older than before: {what}; beginning anew from the store"
        self._log.error(text, action="host.store_went_back", cursor=self._cursor)
        return StoreWentBack(text)

    async def _cursor_stands(self) -> bool:
        """Whether the message at the cursor is still the one that was accounted for (or was deleted as one of the oldest)."""
        if not self._core.inputs or self._cursor == 0:
            return True

        async def look() -> bool:
            async for delivery in self._bus.read(
                stream(self._job, "ev"), f"pearl.{self._job}.ev.>", first_seq=self._cursor
            ):
                same = delivery.seq != self._cursor or self._cursor_at_ms in (0, delivery.at_ms)
                return same
            return False

        for _ in range(LOOKS):
            if await self._persist(look, "look at its position in the stream"):
                return True
            if await self._stopped_within(LOOK_AGAIN_S):
                raise _Stopped
        return False

    async def _move_cursor_back(self) -> None:
        """To the last message that the stream took no later than the one at the cursor: what follows is new."""

        async def find() -> int:
            last = 0
            async for delivery in self._bus.read(
                stream(self._job, "ev"), f"pearl.{self._job}.ev.>", last_seq=self._cursor
            ):
                if self._cursor_at_ms and delivery.at_ms > self._cursor_at_ms:
                    break
                last = delivery.seq
            return last

        before, self._cursor = self._cursor, await self._persist(find, "look for its position in the stream")
        text = f"the stream lost what followed event {self._cursor}; this actor had accounted for events up to {before}"
        self._log.warning(text, action="host.cursor_moved_back", cursor=self._cursor)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True

    async def _attach(self) -> Consumer:
        return await self._bus.consume(
            stream(self._job, "ev"),
            self.name,
            [event_subject(self._job, kind) for kind in self._core.inputs],
            ack_wait_s=ACK_WAIT_S,
            max_ack_pending=4 * BATCH,
        )

    # -- pumps: bring things to the loop, decide nothing --------------------------------------------------------------

    async def _pump_stop(self) -> None:
        await self._stop.wait()
        self._wake.set()

    async def _pump_core(self, subscription: Subscription) -> None:
        async for delivery in subscription:
            if len(self._inbox) >= CORE_INPUTS_WAITING:
                self._inbox.popleft()
                self.dropped += 1
            self._inbox.append((delivery, None))
            self._wake.set()

    async def _pump_durable(self, consumer: Consumer) -> None:
        """Fetch the next batch while the loop works on the last one; never more than one ahead."""
        while True:
            batch = await consumer.fetch(BATCH, FETCH_S)
            if not batch:
                continue
            self._batches.append(batch)
            self._wake.set()
            self._batch_taken.clear()
            await self._batch_taken.wait()

    async def _reconnected(self) -> None:
        self._missed = True  # a delivery may have gone to the connection that died
        self._verified = False
        self._wake.set()

    def _replica_changed(self, *_: object) -> None:
        self._wake.set()

    # -- turns --------------------------------------------------------------------------------------------------------

    async def _turns(self) -> None:
        loop = asyncio.get_running_loop()
        next_tick = loop.time()
        while not self._stop.is_set():
            self._wake.clear()
            if not self._inbox and not self._batches and not self._replica_is_new() and not self._must_look():
                try:
                    async with asyncio.timeout_at(next_tick):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            if self._stop.is_set():
                return
            if not self._verified:
                await self._verify()
            turn = _Turn()
            self._take_replica(turn)
            if self._must_read():
                self._missed = False
                await self._commit(turn)
                await self._read_missed(None)
                turn = _Turn()
            self._take_core(turn)
            if self._batches:
                batch = self._batches.popleft()
                self._batch_taken.set()
                await self._take_batch(turn, batch)
            if loop.time() >= next_tick:
                next_tick += self._tick_ms / 1000
                if next_tick < loop.time():
                    next_tick = loop.time() + self._tick_ms / 1000
                if self._dead_this_tick > CORE_DEAD_LETTERS_A_TICK:
                    text = f"{self._dead_this_tick - CORE_DEAD_LETTERS_A_TICK} more messages refused, not kept"
                    self._log.warning(text, action="host.dead_letters_dropped")
                self._dead_this_tick = 0
                self._step(turn, Input(self._clock(), Tick()), None)
            await self._commit(turn)

    def _must_look(self) -> bool:
        return self._must_read() or not self._verified

    def _must_read(self) -> bool:
        return self._missed and bool(self._core.inputs)

    def _replica_is_new(self) -> bool:
        table = self._replica.table if self._replica is not None else None
        return table is not None and table is not self._table

    def _take_replica(self, turn: _Turn) -> None:
        if self._replica is not None and self._replica_is_new():
            self._table = self._replica.table
            self._step(turn, Input(self._clock(), self._table), None)

    def _take_core(self, turn: _Turn) -> None:
        for _ in range(min(CORE_INPUTS_A_TURN, len(self._inbox))):
            delivery, message = self._inbox.popleft()
            if delivery is not None:
                try:
                    message = decode_on(self._job, delivery.subject, delivery.data, *self._accepted(delivery))
                except UndecodableMessage as error:
                    self._dead_letter(turn, delivery, error.reason)
                    continue
            now = self._clock() if delivery is None else delivery.at_ms
            self._step(turn, Input(now, message), delivery)

    def _accepted(self, delivery: Delivery) -> tuple[type[Message], ...]:
        kind = kind_of(delivery.data)
        return (self._kinds[kind],) if kind in self._kinds else ()

    async def _take_batch(self, turn: _Turn, batch: Sequence[Delivery]) -> None:
        for delivery in batch:
            contiguous = self._consumer_seq is not None and delivery.consumer_seq == self._consumer_seq + 1
            self._consumer_seq = delivery.consumer_seq
            if delivery.seq <= max(self._cursor, turn.cursor):
                turn.acks.append(delivery)
                continue
            if not contiguous and delivery.consumer_seq:
                await self._commit(turn)
                turn.out, turn.acks, turn.terms, turn.cursor, turn.cursor_at_ms = [], [], [], 0, 0
                await self._read_missed(delivery.seq - 1)
            self._take_durable(turn, delivery)

    async def _read_missed(self, last_seq: int | None) -> None:
        """Step on everything in the stream between the cursor and `last_seq` (None: the end)."""
        turn = _Turn()
        taken = 0
        everything = f"pearl.{self._job}.ev.>"
        first = self._cursor + 1

        async def page() -> list[Delivery]:
            found: list[Delivery] = []
            async for delivery in self._bus.read(
                stream(self._job, "ev"), everything, first_seq=first, last_seq=last_seq
            ):
                found.append(delivery)
                if len(found) == BATCH:
                    break
            return found

        at_ms = 0
        looks = 0
        while last_seq is None or first <= last_seq:
            found = await self._persist(page, "read its stream")
            for delivery in found:
                first, at_ms = delivery.seq + 1, delivery.at_ms
                if delivery.subject.rpartition(".")[0] in self._wanted:
                    self._take_durable(turn, delivery)
                    taken += 1
            if turn.cursor:
                await self._commit(turn)
                turn = _Turn()
            if len(found) < BATCH:
                # A replica that lags behind the one that delivered `last_seq + 1` must not make a hole here.
                looks += 1
                if last_seq is None or first > last_seq or looks > LOOKS or await self._stopped_within(LOOK_AGAIN_S):
                    break
        self._advance(first - 1, at_ms)
        if taken:
            self._log.info(f"read {taken} inputs from the stream", action="host.read_missed", cursor=self._cursor)

    def _take_durable(self, turn: _Turn, delivery: Delivery) -> None:
        turn.cursor, turn.cursor_at_ms = delivery.seq, delivery.at_ms
        try:
            message = decode_on(self._job, delivery.subject, delivery.data, *self._core.inputs)
        except UndecodableMessage as error:
            self._dead_letter(turn, delivery, error.reason)
            return
        event = Input(delivery.at_ms, message, delivery.seq, delivery.attempt > 1)
        if self._step(turn, event, delivery) and delivery.token:
            turn.acks.append(delivery)

    def _step(self, turn: _Turn, event: Input, origin: Delivery | None) -> bool:
        """One step of the core. False if it refused the input: then its state is as before."""
        before = self._state
        after, effects = self._core.step(before, event)
        refused = self._collect(turn, effects, origin, event)
        self._state = before if refused else after
        return not refused

    def _collect(self, turn: _Turn, effects: Effects, origin: Delivery | None, event: Input) -> bool:
        refused = False
        for effect in effects:
            match effect:
                case Send(message, msg_id):
                    turn.out.append(self._outgoing(message, msg_id))
                case Reply(message):
                    if origin is not None and origin.reply:
                        turn.out.append(Outgoing(origin.reply, encode(message)))
                case Note(action, text, level):
                    self._log.log(level, text, action=action, seq=event.seq)
                case Refuse(reason):
                    refused = True
                    if origin is None:
                        self._log.error(f"refused {type(event.message).__name__}: {reason}", action="host.refused")
                    else:
                        self._dead_letter(turn, origin, reason)
        return refused

    def _outgoing(self, message: Message, msg_id: str | None) -> Outgoing:
        route = ROUTES[type(message)]
        kind = tag_of(type(message))
        identity = ""
        if route.durable:
            identity = msg_id or message_id(message) or self._next_id()
        return Outgoing(subject_of(self._job, message), encode(message), identity, kind)

    def _next_id(self) -> str:
        self._numbered += 1
        return f"{self.name}:{self._nonce}:{self._numbered}"

    def _dead_letter(self, turn: _Turn, delivery: Delivery, reason: str) -> None:
        if delivery.seq == 0:
            self._dead_this_tick += 1
            if self._dead_this_tick > CORE_DEAD_LETTERS_A_TICK:
                return
        letter = dead_letter(self.name, delivery.subject, delivery.data, reason, delivery.seq)
        self._log.warning(
            f"dead-lettered a message on {letter.subject}: {letter.reason}",
            action="host.dead_letter",
            seq=delivery.seq,
        )
        turn.out.append(self._outgoing(letter, f"dead:{self.name}:{delivery.seq}" if delivery.seq else None))
        if delivery.token:
            turn.terms.append(delivery)

    # -- effects: guarded write, publish, acknowledge last ------------------------------------------------------------

    async def _commit(self, turn: _Turn) -> None:
        outbox = tuple(each for each in turn.out if each.msg_id)
        if turn.cursor or outbox:
            self._advance(turn.cursor, turn.cursor_at_ms)
            await self._write(outbox)
        if turn.out:
            await self._publish(turn.out)
        if self._consumer is not None:
            for delivery in turn.acks:
                await self._consumer.ack(delivery)
            for delivery in turn.terms:
                await self._consumer.term(delivery)

    def _advance(self, seq: int, at_ms: int) -> None:
        if seq > self._cursor:
            self._cursor, self._cursor_at_ms = seq, at_ms

    async def _write(self, outbox: tuple[Outgoing, ...]) -> None:
        bucket = state_bucket(self._job)
        state = msgspec.Raw(msgspec.msgpack.encode(self._state))
        data = msgspec.msgpack.encode(Checkpoint(state, outbox, self._cursor, self._cursor_at_ms))

        async def put() -> int:
            try:
                return await self._bus.put(bucket, self.name, data, last_revision=self._revision)
            except WrongLastSequence:
                for _ in range(LOOKS):
                    entry = await self._bus.get(bucket, self.name)
                    if entry is not None and entry.data == data:
                        return entry.revision  # our own write, whose answer was lost
                    if entry is not None and entry.revision > self._revision:
                        raise
                    if await self._stopped_within(LOOK_AGAIN_S):
                        raise _Stopped from None
                raise self._went_back(f"its checkpoint of revision {self._revision} is gone from {bucket}") from None

        try:
            self._revision = await self._persist(put, "write its checkpoint")
        except WrongLastSequence as error:
            self._log.error(
                "another instance wrote this actor's checkpoint: ending", action="host.taken_over", cursor=self._cursor
            )
            raise TakenOver(f"{self.name}: another instance has taken over (bucket {bucket}): {error}") from error

    async def _publish(self, out: Sequence[Outgoing]) -> None:
        """In order. Neighbours of one kind go together: their order matters to nobody, and there may be hundreds."""
        index = 0
        while index < len(out):
            first = out[index]
            if not first.msg_id:
                await self._publish_core(first)
                index += 1
                continue
            end = index + 1
            while (
                end < len(out) and end - index < PARALLEL_PUBLISHES and out[end].msg_id and out[end].kind == first.kind
            ):
                end += 1
            if end == index + 1:
                await self._publish_durable(first)
            else:
                results = await asyncio.gather(*map(self._publish_durable, out[index:end]), return_exceptions=True)
                for result in results:
                    if isinstance(result, BaseException):
                        raise result
            index = end

    async def _publish_core(self, each: Outgoing) -> None:
        try:
            await self._bus.publish(each.subject, each.data)
        except BusUnavailable as error:
            self._log.debug(f"lost a core message: {error}", action="host.core_lost")

    async def _publish_durable(self, each: Outgoing) -> None:
        await self._persist(
            lambda: self._bus.publish_durable(each.subject, each.data, msg_id=each.msg_id), f"publish on {each.subject}"
        )

    async def _persist(self, action: Callable[[], Awaitable[T]], what: str) -> T:
        """Do it again until it is done or the host is told to stop (_Stopped). Only an absent broker is waited for."""
        pause = RETRY_FIRST_S
        while True:
            try:
                return await action()
            except BusUnavailable as error:
                self._log.warning(f"cannot {what} now: {error}", action="host.unavailable")
            try:
                async with asyncio.timeout(pause):
                    await self._stop.wait()
                raise _Stopped
            except TimeoutError:
                pause = min(RETRY_MOST_S, 2 * pause)
