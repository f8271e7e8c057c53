"""Orchestrator process: the role table's only writer.

Owns: the value of bucket `<job>_roles`, while it holds the lease `<job>_lease`. Never executes a plan, never chooses a
target, never writes a checkpoint of its own: the table is all its state. Driven by targets, by what executors, workers
and node agents report, by missed node heartbeats, and by time.

What holds:

- A batch of inputs is one epoch: one guarded write, then the effects, then the acknowledgements. A crash in between
  repeats inputs, which changes nothing (core.py), and publishes the plan in the table again under the same message id.
- A store that lost its last moments is noticed: by what this process remembers, by holders of replicas (`table.ahead/1`), by
  incarnations that node agents speak of. Then the table is made anew from what workers report (core_rebuild.py), above all
  that was ever given out.
- A second orchestrator stands by on the lease. If both ever believe to be in charge, one write fails: that one is
  deposed, forgets what it held, and stands by.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import msgspec

from messages.elastic_scheduler import NodeUp
from messages.envelope import Message, Misplaced, UndecodableMessage, brief, encode
from messages.ids import Epoch, WorkerId
from messages.monitor import StoreRewound
from messages.orchestrator import TableAhead, TargetConfiguration
from messages.runtime_tracker import NodeHeartbeat, WorkerHeartbeat
from messages.subjects import (
    TABLE_KEY,
    decode_on,
    event_subject,
    message_id,
    node_of,
    roles_bucket,
    stream,
    subject_of,
    telemetry_subject,
)
from pearl_state.invariants import violations
from pearl_state.model import RoleTable
from pearl_state.store import Deposed, Lease, TableStore
from services.connect import connect, connect_tables
from services.jobfile import JobFile
from services.orchestrator import past
from services.orchestrator.config import Config
from services.orchestrator.core import OrchestratorCore
from services.orchestrator.core_plans import plan_message
from services.orchestrator.core_rebuild import Evidence, WorkerReport, adopted, rebuilt, why_rewound
from services.orchestrator.leases import NodeLeases
from services.runtime.bus import Bus, BusUnavailable, Consumer, Delivery, Subscription, WrongLastSequence
from services.runtime.clock import Clock, now_ms
from services.runtime.core import Effect, Input, Note, Refuse, Send, Tick
from services.runtime.dead_letters import dead_letter
from services.runtime.log import get_logger

BATCH: Final = 256  # durable inputs an epoch at most
FETCH_S: Final = 2.0  # how long a pull request stays open without a message
ACK_WAIT_S: Final = 10.0  # redelivery is harmless, so soon; longer than a turn takes
RETRY_FIRST_S: Final = 0.1
RETRY_MOST_S: Final = 2.0
MOST_DEAD_HEARTBEATS: Final = 4  # kept a tick of those that cannot be read; more are dropped
LISTEN_S: Final = 4.0  # several heartbeats, and longer than a replica goes without looking at the bucket
LOOKS: Final = 8  # at what seems to be missing, before it is: a replica of the broker's may lag behind
LOOK_AGAIN_S: Final = 0.25
MOST_UNSEEN: Final = 10_000  # incarnations of a slot that a broker may have lost; more is nonsense
MOST_AHEAD: Final = 10_000_000  # epochs; who speaks of more is not believed, since epochs never fall again

T = TypeVar("T")


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Stand by, be in charge, until `stop` is set. Raises ConfigError, UnreadableTableError, ValueError (changed slots)."""
    core = OrchestratorCore(Config.of(job))
    bus = await connect(job, core.name)
    try:
        tables = await connect_tables(job)
        try:
            await Orchestrator(core, bus, tables).run(stop)
        finally:
            await tables.close()
    finally:
        await bus.close()


class _Stopped(Exception):
    """The stop event came while something was retried."""


class _Rewound(Exception):
    """The store is older than the cluster; says what shows it."""


class Orchestrator:
    """One candidate for being in charge. `bus` is the event user's connection, `tables` the table writer's."""

    def __init__(
        self,
        core: OrchestratorCore,
        bus: Bus,
        tables: Bus,
        *,
        tick_ms: int = 200,
        clock: Clock = now_ms,
        holder: str = "",
        listen_s: float = LISTEN_S,
    ) -> None:
        """`listen_s`: how long workers are listened to before the table is made anew from what they say."""
        self._core = core
        self._job = core.config.job
        self._bus = bus
        self._tables = tables
        self._tick_s = tick_ms / 1000
        self._clock = clock
        self._holder = holder or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._log = get_logger(core.name)
        self._stop = asyncio.Event()
        self._leases = NodeLeases(core.config.lease_ms, clock())
        self._store = TableStore(tables, self._job)
        self._nodes = frozenset(slot.node for slot in core.config.slots)
        self._dead_heartbeats: list[tuple[Delivery, str]] = []
        self._lease: Lease | None = None
        self._taken = 0  # of the lease, when the table was last known to be the one in its bucket
        self._held: dict[int, Delivery] = {}  # fetched and not acknowledged, by sequence
        self._listen_s = listen_s
        self._seen_epoch = 0  # the newest epoch known to have been written, by whoever
        self._newest: dict[WorkerId, int] = {}  # incarnations that node agents have spoken of
        self._verified = True  # False: the connection was away, the store may have gone back
        self.table: RoleTable | None = None
        """The table as last written here; None while standing by."""
        bus.on_reconnect(self._reconnected)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set: stand by on the lease, then be in charge until deposed."""
        self._stop = stop
        with contextlib.suppress(_Stopped):
            while not stop.is_set():
                lease = Lease(self._tables, self._job, self._holder)
                self._log.info("standing by", action="orchestrator.standby")
                if not await self._persist(lambda lease=lease: lease.wait_acquire(stop), "take the lease"):
                    return
                try:
                    await self._in_charge(lease)
                except Deposed as deposed:
                    self._log.warning(str(deposed), action="orchestrator.deposed")
                finally:
                    self.table = None

    async def _in_charge(self, lease: Lease) -> None:
        """Restore the table, then turn after turn. Raises Deposed."""
        self._lease = lease
        self._taken = lease.taken
        done = asyncio.Event()
        subscriptions: list[Subscription] = []
        consumer: Consumer | None = None
        try:
            async with asyncio.TaskGroup() as group:
                keeper = group.create_task(lease.keep(done))
                pumps: list[asyncio.Task[None]] = []
                try:
                    await self._restore()
                    for kind in (NodeHeartbeat, TableAhead):
                        subject = telemetry_subject(self._job, kind)
                        hear = await self._persist(
                            lambda subject=subject: self._bus.subscribe(subject), f"hear {subject}"
                        )
                        subscriptions.append(hear)
                        pumps.append(group.create_task(self._pump_telemetry(hear, kind)))
                    consumer = await self._persist(self._attach, "attach its consumer")
                    batches: asyncio.Queue[Sequence[Delivery]] = asyncio.Queue(1)
                    pumps.append(group.create_task(self._pump_events(consumer, batches)))
                    while not self._stop.is_set():
                        try:
                            await self._turns(consumer, batches)
                        except _Rewound as rewound:
                            # Another orchestrator may have written since, or the store has gone back: the table tells.
                            self._log.warning(f"reading the table again: {rewound}", action="orchestrator.behind")
                            pumps.pop().cancel()  # what it fetched is of a stream that is no more
                            self._held.clear()
                            await consumer.stop()
                            await self._restore()
                            consumer = await self._persist(self._attach, "attach its consumer")
                            batches = asyncio.Queue(1)
                            pumps.append(group.create_task(self._pump_events(consumer, batches)))
                finally:
                    for pump in pumps:
                        pump.cancel()
                    done.set()
                    if self._stop.is_set():
                        await asyncio.wait([keeper], timeout=RETRY_MOST_S)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for subscription in subscriptions:
                await subscription.stop()
            if consumer is not None:
                await self._give_back(consumer)

    async def _give_back(self, consumer: Consumer) -> None:
        """What was fetched and not acknowledged is for whoever is in charge now, at once and not after `ACK_WAIT_S`."""
        with contextlib.suppress(BusUnavailable):
            for delivery in self._held.values():
                await consumer.nak(delivery, 0.0)
        self._held.clear()
        await consumer.stop()

    # -- restore

    async def _restore(self) -> None:
        """The table as it was last written (a first one where there is none), and the plan in it, said again."""
        self._store = TableStore(self._tables, self._job)
        self._verified = True
        reason = ""
        stored: RoleTable | None = None
        for look in range(LOOKS):
            if look:
                await self._pause(LOOK_AGAIN_S)
            stored = await self._persist(self._store.restore, "read the role table")
            reason = "" if stored is None else why_rewound(stored, await self._evidence(stored, looks=1))
            if not reason:
                break
        if stored is not None and reason:
            stored = await self._rebuild_from_reports(stored, reason)
        table = stored if stored is not None else await self._first()
        table = self._core.with_slots(table)
        broken = violations(table)
        assert not broken, f"the stored role table of job {self._job} breaks: {'; '.join(broken)}"
        if table is not stored:
            epoch = Epoch(table.epoch + 1)
            table = msgspec.structs.replace(table, epoch=epoch, written_ms=max(table.written_ms, self._clock()))
            await self._write(table)
        self.table = table
        self._leases = NodeLeases(self._core.config.lease_ms, self._clock())
        self._log.info("in charge", action="orchestrator.in_charge", epoch=table.epoch, cursor=table.writer.cursor)
        if table.plan is not None:
            await self._publish((Send(plan_message(table)),))
        # What a predecessor fetched and did not acknowledge comes again only later: read it now.
        cursor = table.writer.cursor
        await self._turn(
            await self._persist(lambda: past.since(self._bus, self._job, cursor, self._core.inputs), "read its stream"),
            None,
        )

    async def _evidence(
        self, table: RoleTable, reports: Sequence[WorkerReport] = (), *, looks: int = LOOKS
    ) -> Evidence:
        """What is known now apart from the bucket. `looks`: at the stream, before an event counts as gone."""
        last = await self._stream_end(table.writer.cursor, looks)
        newest = tuple(sorted(self._newest.items()))
        return Evidence(seen_epoch=self._seen_epoch, newest=newest, reports=tuple(reports), last_event=last)

    async def _stream_end(self, least: int, looks: int) -> int:
        """Sequence of an event at or after `least`, if there is one; else of the newest there is (0 for `least` 0)."""
        for number in range(looks if least else 0):
            if number:
                await self._pause(LOOK_AGAIN_S)
            found = await self._persist(lambda: past.at_or_after(self._bus, self._job, least), "look at its stream")
            if found:
                return found
        return (
            await self._persist(lambda: past.end(self._bus, self._job), "look for the end of its stream")
            if least
            else 0
        )

    async def _pause(self, seconds: float) -> None:
        """Raises _Stopped."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        if self._stop.is_set():
            raise _Stopped

    async def _rebuild_from_reports(self, stored: RoleTable, reason: str) -> RoleTable:
        """The table as workers report it, written above every epoch that was seen; or as stored, if it was only read too early.

        Nothing is decided meanwhile: routers keep the table they have, and workers serve on.
        """
        self._log.error(f"the store went back: {reason}; listening to the workers", action="orchestrator.rewound")
        reports = await self._listen()
        evidence = await self._evidence(stored, reports)
        target = await self._persist(
            lambda: past.last(self._bus, self._job, TargetConfiguration), "look for the newest target"
        )
        cursor = target[0].seq - 1 if target is not None else 0  # the target is the first input
        table = rebuilt(stored, evidence, cursor, self._clock())
        await self._persist(lambda: self._store.write_rebuilt(table), "write the role table made anew")
        self._seen_epoch = table.epoch
        said = StoreRewound(
            epoch=table.epoch,
            stored_epoch=stored.epoch,
            seen_epoch=Epoch(evidence.seen_epoch),
            reason=reason,
            adopted=adopted(table),
        )
        await self._publish((Send(said),))
        return table

    async def _listen(self) -> tuple[WorkerReport, ...]:
        """What workers say of themselves, and node agents and replicas of what they have seen, for `listen_s`."""
        reports: dict[WorkerId, WorkerReport] = {}
        loop = asyncio.get_running_loop()
        subjects = [telemetry_subject(self._job, kind) for kind in (WorkerHeartbeat, NodeHeartbeat, TableAhead)]
        hearing: list[Subscription] = []

        async def hear(subscription: Subscription) -> None:
            async for delivery in subscription:
                with contextlib.suppress(UndecodableMessage):
                    said = decode_on(
                        self._job, delivery.subject, delivery.data, WorkerHeartbeat, NodeHeartbeat, TableAhead
                    )
                    if isinstance(said, WorkerHeartbeat):
                        reports[said.worker] = _report(said)
                    else:
                        self._take_telemetry(said)

        try:
            for subject in subjects:
                hearing.append(
                    await self._persist(lambda subject=subject: self._bus.subscribe(subject), f"hear {subject}")
                )
            tasks = [loop.create_task(hear(each)) for each in hearing]
            try:
                await self._pause(self._listen_s)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for each in hearing:
                await each.stop()
        return tuple(reports[worker] for worker in sorted(reports))

    async def _verify(self) -> None:
        """Raise _Rewound if the store is older than what this process remembers of it, or than what others speak of."""
        assert self.table is not None
        if not self._verified:
            for look in range(LOOKS + 1):
                if look == LOOKS:
                    raise _Rewound(f"revision {self._store.revision} of the role table is gone from its bucket")
                if look:
                    await self._pause(LOOK_AGAIN_S)
                entry = await self._persist(
                    lambda: self._tables.get(roles_bucket(self._job), TABLE_KEY, from_leader=True),
                    "look at the role table",
                )
                if entry is not None and entry.revision > self._store.revision:
                    raise Deposed(f"the role table of job {self._job} was written by someone else")
                if entry is not None and entry.revision == self._store.revision:
                    break
            evidence = await self._evidence(self.table)
            self._verified = True
        else:
            newest = tuple(sorted(self._newest.items()))
            evidence = Evidence(seen_epoch=self._seen_epoch, newest=newest, last_event=max(1, self.table.writer.cursor))
        if reason := why_rewound(self.table, evidence):
            raise _Rewound(reason)

    async def _first(self) -> RoleTable:
        """A table for a job whose bucket is empty: a new job's, or what its stream tells of it."""
        table, target = await past.continued(self._bus, self._job, self._core.initial())
        if target is not None:
            self._log.warning(
                f"the role table of job {self._job} is gone: made anew from its slots and target {target.decision_id}",
                action="orchestrator.rebuilt",
            )
        return table

    async def _attach(self) -> Consumer:
        subjects = [event_subject(self._job, kind) for kind in self._core.inputs]
        return await self._bus.consume(
            stream(self._job, "ev"), self._core.name, subjects, ack_wait_s=ACK_WAIT_S, max_ack_pending=4 * BATCH
        )

    # -- pumps: bring things to the loop, decide nothing

    async def _pump_events(self, consumer: Consumer, batches: asyncio.Queue[Sequence[Delivery]]) -> None:
        while True:
            batch = await consumer.fetch(BATCH, FETCH_S)
            if batch:
                self._held.update((delivery.seq, delivery) for delivery in batch)
                await batches.put(batch)

    async def _pump_telemetry(self, subscription: Subscription, kind: type[NodeHeartbeat | TableAhead]) -> None:
        async for delivery in subscription:
            try:
                self._take_telemetry(decode_on(self._job, delivery.subject, delivery.data, kind))
            except UndecodableMessage as error:
                if len(self._dead_heartbeats) < MOST_DEAD_HEARTBEATS:
                    self._dead_heartbeats.append((delivery, error.reason))

    def _take_telemetry(self, said: NodeHeartbeat | TableAhead) -> None:
        """Remember what a node agent, or the holder of a replica, has seen. Raises Misplaced."""
        if isinstance(said, TableAhead):
            newest = max(self._seen_epoch, 0 if self.table is None else self.table.epoch)
            if not 0 <= said.epoch <= newest + MOST_AHEAD:
                raise Misplaced(f"epoch {said.epoch} is far beyond {newest}")
            self._seen_epoch = max(self._seen_epoch, said.epoch)
            return
        if said.node not in self._nodes:
            raise Misplaced(f"node {brief(said.node)!r} is not in the job file")
        rows = {} if self.table is None else self.table.by_worker
        for worker, incarnation in (*said.workers, *said.ended):
            known = max(self._newest.get(worker, 0), rows[worker].incarnation if worker in rows else 0)
            if node_of(worker) == said.node and known < incarnation <= known + MOST_UNSEEN:
                self._newest[worker] = incarnation
        self._leases.heard(said, self._clock())

    async def _reconnected(self) -> None:
        self._leases.renew_all(self._clock())
        self._verified = False

    # -- turns

    async def _turns(self, consumer: Consumer, batches: asyncio.Queue[Sequence[Delivery]]) -> None:
        loop = asyncio.get_running_loop()
        next_tick = loop.time() + self._tick_s
        while not self._stop.is_set():
            batch: Sequence[Delivery] = ()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_tick):
                    batch = await batches.get()
            await self._confirm()
            if batch:
                await self._turn(batch, consumer)
            if loop.time() >= next_tick:
                await self._verify()
                next_tick = loop.time() + self._tick_s
                dead, self._dead_heartbeats = self._dead_heartbeats, []
                for delivery, reason in dead:
                    await self._dead_letter(delivery, reason)
                # Deadlines are judged on what has arrived, so not while a backlog is being worked off.
                if batches.empty() and len(batch) < BATCH:
                    await self._step([Input(self._clock(), message) for message in (*await self._lost(), Tick())])

    async def _confirm(self) -> None:
        """Return once this process surely is in charge, at the table that it knows. Raises Deposed, _Rewound.

        Else whoever was cut off, or stood still, for longer than its lease would take events for old news by its old table, and
        acknowledge them: nobody would ever act on them. That it holds the lease again is no proof: another may have had it, have
        written, and be gone.
        """
        assert self._lease is not None
        if not self._lease.held:
            await self._persist(self._lease.renew, "renew the lease")
            self._verified = False
        if self._lease.taken != self._taken:
            self._taken = self._lease.taken
            self._verified = False
        if not self._verified:
            await self._verify()

    async def _lost(self) -> Sequence[Message]:
        """The workers lost, if it is they who are silent and not our own connection that is broken."""
        assert self.table is not None
        if not self._leases.lost(self.table, self._clock()):
            return ()
        try:
            await self._tables.get(roles_bucket(self._job), TABLE_KEY)
            await self._bus.last(stream(self._job, "ev"), event_subject(self._job, NodeUp, "-"))
        except BusUnavailable:
            self._leases.renew_all(self._clock())
            return ()
        return self._leases.lost(self.table, self._clock())

    async def _turn(self, batch: Sequence[Delivery], consumer: Consumer | None) -> None:
        """Decode, step, write, publish, acknowledge."""
        inputs: list[Input] = []
        origins: list[Delivery] = []
        refused: dict[int, str] = {}
        now = self._clock()
        for delivery in batch:
            try:
                message = decode_on(self._job, delivery.subject, delivery.data, *self._core.inputs)
            except UndecodableMessage as error:
                refused[delivery.seq] = error.reason
                continue
            # The time of this turn, not of the event: a deadline counts from when executors can hear of it.
            inputs.append(Input(now, message, delivery.seq, delivery.attempt > 1))
            origins.append(delivery)
        for delivery, effects in zip(origins, await self._step(inputs), strict=True):
            for effect in effects:
                if isinstance(effect, Refuse):
                    refused[delivery.seq] = effect.reason
        if consumer is not None:
            await self._confirm()
        for delivery in batch:
            if delivery.seq in refused:
                await self._dead_letter(delivery, refused[delivery.seq])
            if consumer is not None:
                await (consumer.term(delivery) if delivery.seq in refused else consumer.ack(delivery))
                self._held.pop(delivery.seq, None)

    async def _step(self, inputs: Sequence[Input]) -> tuple[Sequence[Effect], ...]:
        """Step on a batch; write the table if it changed; publish. Returns each input's effects."""
        assert self.table is not None
        table, each, after = self._core.step_all(self.table, inputs)
        if table is not self.table:
            await self._write(table)
            self.table = table
        flat = [effect for effects in each for effect in effects]
        await self._publish((*flat, *after))
        return each

    # -- effects

    async def _write(self, table: RoleTable) -> None:
        await self._persist(lambda: self._store.write(table), "write the role table")
        self._seen_epoch = max(self._seen_epoch, table.epoch)

    async def _publish(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Note):
                epoch = 0 if self.table is None else self.table.epoch
                self._log.log(effect.level, effect.text, action=effect.action, epoch=epoch)
            elif isinstance(effect, Send):
                await self._publish_durable(effect.message, message_id(effect.message) or "")

    async def _dead_letter(self, delivery: Delivery, reason: str) -> None:
        letter = dead_letter(self._core.name, delivery.subject, delivery.data, reason, delivery.seq)
        text = f"dead-lettered a message on {letter.subject}: {letter.reason}"
        self._log.warning(text, action="orchestrator.dead_letter", seq=delivery.seq)
        identity = delivery.seq or secrets.token_hex(8)
        await self._publish_durable(letter, f"dead:{self._core.name}:{identity}")

    async def _publish_durable(self, message: Message, msg_id: str) -> None:
        subject, data = subject_of(self._job, message), encode(message)
        await self._persist(lambda: self._bus.publish_durable(subject, data, msg_id=msg_id), f"publish on {subject}")

    async def _persist(self, action: Callable[[], Awaitable[T]], what: str) -> T:
        """Until it succeeds: the bus may be away for as long as it likes. Raises _Stopped, and what is not the bus's."""
        wait_s = RETRY_FIRST_S
        while True:
            try:
                return await action()
            except (BusUnavailable, WrongLastSequence) as error:
                # A guarded write is refused, and the value read back fits the guard: the leader has changed. The next look tells.
                self._log.warning(f"cannot {what} ({error}); trying again", action="orchestrator.bus_away")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), wait_s)
                if self._stop.is_set():
                    raise _Stopped from None
                wait_s = min(RETRY_MOST_S, 2 * wait_s)


def _report(beat: WorkerHeartbeat) -> WorkerReport:
    return WorkerReport(beat.worker, beat.incarnation, beat.serving, beat.role, beat.role_generation, beat.version)
