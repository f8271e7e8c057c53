"""Node agent process: one per node, the only one that touches processes there.

Owns the node's worker and trainer processes, their pid files and logs. Never decides what should run, except that
the first training node's trainer always does. Driven by commands (`worker.launch`, `worker.kill`), by capacity events of
its node, by its processes' ends, and by time.

Its state is no checkpoint: the processes are found again by their pid files, what has ended by the newest `worker.gone` of
each worker, GPUs under notice by the node's capacity events. An end is forgotten here only when it is stored there.
Killed, it leaves its processes running for the next one to adopt; told to stop, it ends them and reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, NodeUp
from messages.envelope import Message, UndecodableMessage, encode
from messages.ids import Incarnation, WorkerId
from messages.node_agent import Kill, Launch
from messages.orchestrator import GpuFree, WorkerGone, WorkerReady
from messages.runtime_tracker import NodeHeartbeat
from messages.subjects import decode_on, event_subject, message_id, stream, subject_of
from services.jobfile import JobFile
from services.node_agent.config import Config, command_line, environment
from services.node_agent.core import (
    Adopted,
    Ended,
    Exited,
    NodeAgentCore,
    NodeEffect,
    NodeState,
    Restored,
    Signal,
    Spawn,
    Started,
    StartFailed,
    Stop,
)
from services.node_agent.processes import Pids, Process
from services.runtime.bus import Bus, BusError, Consumer, Delivery, Subscription
from services.runtime.clock import Clock, now_ms
from services.runtime.core import Input, Note, Refuse, Send, Tick
from services.runtime.dead_letters import dead_letter
from services.runtime.log import get_logger

FETCH_S = 2.0
FETCH_MOST = 64
IDLE_S = 1.0
"""Longest time between two Ticks."""
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 5.0
LAST_REPORTS_S = 3.0
"""How long a stopping agent waits for its last reports to be stored."""
MOST_REPORTS_WAITING = 1024  # beyond it dead letters are only logged

M = TypeVar("M", bound=Message)
Command = Callable[[Config, str, str, Incarnation], tuple[str, ...]]
"""(config, service, worker, incarnation) -> argv."""


async def serve(
    job: JobFile,
    stop: asyncio.Event,
    node: str,
    job_path: str | Path,
    bus: Bus | None = None,
    command: Command = command_line,
) -> None:
    """Run until `stop` is set and all processes have ended. `bus` and `command` are for tests."""
    config = Config.of(job, node, job_path)
    if bus is not None:
        await NodeAgent(config, bus, job.job.name, command).run(stop)
        return
    from services.connect import connect

    bus = await connect(job, "node_agent")
    try:
        await NodeAgent(config, bus, job.job.name, command).run(stop)
    finally:
        await bus.close()


class NodeAgent:
    """Shell of `NodeAgentCore`."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        job_name: str,
        command: Command = command_line,
        clock: Clock = now_ms,
        pids: Pids | None = None,
        host: str = "",
    ) -> None:
        """`pids`: what starts its processes, if not the ordinary one. `host`: its name, the machine's unless given."""
        self._config = config
        self._bus = bus
        self._job = job_name
        self._command = command
        self._clock = clock
        self._core = NodeAgentCore(config)
        self._state: NodeState = self._core.initial()
        self._host = host or socket.gethostname()
        self._pids = pids or Pids(config.run_dir)
        self._running: dict[WorkerId, Process] = {}
        self._inbox: deque[Input] = deque()
        self._wake = asyncio.Event()
        self._reports: deque[tuple[Message, str]] = deque()
        self._reports_wake = asyncio.Event()
        self._letters = 0
        self._watches: set[asyncio.Task[None]] = set()
        self._log = get_logger(self._core.name)

    # Restore

    async def run(self, stop: asyncio.Event) -> None:
        """Restore, announce the node, then serve."""
        events = stream(self._job, "ev")
        commands: Subscription | None = None
        capacity: Consumer | None = None
        tasks: list[asyncio.Task[None]] = []
        try:
            incarnation = await self._restore(events)
            # Commands given from now on are buffered until the loop below takes them.
            commands = await self._bus.subscribe(f"pearl.{self._job}.cmd.node.{self._config.node}")
            subjects = [event_subject(self._job, kind, self._config.node) for kind in (GpuReclaimed, GpuAvailable)]
            capacity = await self._bus.consume(events, self._core.name, subjects)
            for subject in subjects:
                async for delivery in self._bus.read(events, subject):
                    self._take_capacity(delivery)
            self._feed(Restored())
            self._report_later(
                NodeUp(
                    node=self._config.node,
                    gpus=tuple(range(self._config.gpus)),
                    agent_incarnation=incarnation,
                    host=self._host,
                )
            )
            async with asyncio.TaskGroup() as group:
                pumps = (
                    self._pump_commands(commands),
                    self._pump_capacity(capacity),
                    self._pump_stop(stop),
                    self._heartbeats(),
                    self._publish_reports(),
                )
                tasks.extend(group.create_task(pump) for pump in pumps)
                self._log.info(f"node {self._config.node} is up", action="node_up", agent_incarnation=incarnation)
                await self._loop()
                await self._last_reports()
                for task in tasks:
                    task.cancel()
        finally:
            for task in self._watches:
                task.cancel()
            if commands is not None:
                await commands.stop()
            if capacity is not None:
                await capacity.stop()

    async def _restore(self, events: str) -> int:
        """Take up what an earlier agent left. Returns this agent's incarnation, above all before."""
        last_up = await self._newest(events, event_subject(self._job, NodeUp, self._config.node), NodeUp)
        before = 0 if last_up is None else last_up.agent_incarnation
        ended: dict[WorkerId, Incarnation] = {}
        for worker in self._config.workers:
            gone = await self._newest(events, event_subject(self._job, WorkerGone, worker), WorkerGone)
            if gone is not None:
                ended[worker] = gone.incarnation
                self._feed(Ended(gone.worker, gone.incarnation, gone.reason))
        for worker in self._config.workers:
            if not await self._adopt(worker, foreign=last_up is None):
                await self._report_lost(events, worker, ended.get(worker, Incarnation(0)))
        return max(self._clock(), before + 1)

    async def _newest(self, events: str, subject: str, kind: type[M]) -> M | None:
        """The newest event on a subject; one that cannot be read does not hide those before it."""
        newest: M | None = None
        async for delivery in self._bus.read(events, subject):
            with contextlib.suppress(UndecodableMessage):
                newest = decode_on(self._job, subject, delivery.data, kind)
        return newest

    async def _report_lost(self, events: str, worker: WorkerId, ended: Incarnation) -> None:
        """A process that once said it was ready, whose end nobody reported and of which there is no pid file: the machine is
        another one, or lost its disk. Unsaid, it would be counted on until a lease or a plan's deadline has passed."""
        ready = await self._newest(events, event_subject(self._job, WorkerReady, worker), WorkerReady)
        if ready is None or ready.incarnation <= ended:
            return
        self._log.warning(f"{worker} incarnation {ready.incarnation} left no trace here", action="process_lost")
        self._feed(Adopted(worker, ready.incarnation, self._config.gpus_of[worker], "rollout_worker", 0))
        self._feed(Exited(worker, ready.incarnation, "exit:unknown"))

    async def _adopt(self, worker: WorkerId, foreign: bool) -> bool:
        """Adopt a process, or report that it ended meanwhile. `foreign`: the stream never heard of this node, so
        the process belongs to a job of the same name whose NATS data is gone; its incarnations mean nothing here.
        False if there is no pid file."""
        record = self._pids.read(worker, lambda text: self._log.warning(text, action="pid_file"))
        if record is None:
            return False
        supervised = self._pids.adopt(record)
        if foreign:
            if self._pids.lives(record):
                self._log.warning(f"ending {worker}, left by an earlier job of this name", action="process_foreign")
                supervised.signal(hard=True)
                await supervised.ended()
            self._pids.forget(worker, record.incarnation)
            return True
        started_ms = int(record.start_time * 1000)
        self._running[worker] = supervised
        self._feed(Adopted(worker, record.incarnation, record.gpus, record.service, started_ms))
        self._watch(supervised)
        return True

    # The loop

    async def _loop(self) -> None:
        """One input at a time; a Tick when something is due. Ends when stopping and nothing runs any more."""
        while not (self._state.stopping and not self._state.processes):
            if not self._inbox:
                self._wake.clear()
                due_ms = self._core.next_due_ms(self._state)
                wait_s = IDLE_S if due_ms is None else min(IDLE_S, max(0.0, (due_ms - self._clock()) / 1000))
                try:
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
                except TimeoutError:
                    self._feed(Tick())
            while self._inbox:
                self._apply(self._inbox.popleft())

    def _feed(self, message: object, at_ms: int | None = None, seq: int = 0) -> None:
        self._inbox.append(Input(self._clock() if at_ms is None else at_ms, message, seq))
        self._wake.set()

    def _apply(self, event: Input) -> None:
        self._state, effects = self._core.step(self._state, event)
        for effect in effects:
            self._perform(effect, event)

    def _perform(self, effect: NodeEffect, event: Input) -> None:
        match effect:
            case Spawn():
                self._spawn(effect)
            case Signal():
                supervised = self._running.get(effect.worker)
                if supervised is not None and supervised.record.incarnation == effect.incarnation:
                    supervised.signal(effect.hard)
            case Send():
                self._report_later(effect.message, effect.msg_id)
            case Note():
                self._log.log(effect.level, effect.text, action=effect.action)
            case Refuse():
                assert isinstance(event.message, Message), "only messages are refused"
                self._dead_letter(subject_of(self._job, event.message), encode(event.message), effect.reason)

    def _spawn(self, spawn: Spawn) -> None:
        command = self._command(self._config, spawn.service, spawn.worker, spawn.incarnation)
        surroundings = environment(self._config, spawn.service, spawn.gpus)
        try:
            supervised = self._pids.start(
                spawn.worker, spawn.incarnation, spawn.gpus, spawn.service, command, surroundings
            )
        except OSError as error:
            self._feed(StartFailed(spawn.worker, spawn.incarnation, f"{command[0]}: {error}"))
            return
        self._running[spawn.worker] = supervised
        self._feed(Started(spawn.worker, spawn.incarnation))
        self._watch(supervised)

    def _watch(self, supervised: Process) -> None:
        async def watch() -> None:
            how = await supervised.ended()
            record = supervised.record
            if self._running.get(record.worker) is supervised:
                del self._running[record.worker]
            self._feed(Exited(record.worker, record.incarnation, how))

        task = asyncio.create_task(watch(), name=f"watch {supervised.record.worker}")
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    # Pumps: bring things to the loop

    async def _pump_stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._feed(Stop())

    async def _pump_commands(self, commands: Subscription) -> None:
        async for delivery in commands:
            try:
                self._feed(decode_on(self._job, delivery.subject, delivery.data, Launch, Kill))
            except UndecodableMessage as error:
                self._dead_letter(delivery.subject, delivery.data, error.reason)

    async def _pump_capacity(self, consumer: Consumer) -> None:
        while True:
            for delivery in await consumer.fetch(FETCH_MOST, FETCH_S):
                if self._take_capacity(delivery):
                    await consumer.ack(delivery)
                else:
                    await consumer.term(delivery)

    def _take_capacity(self, delivery: Delivery) -> bool:
        """A capacity event; the core takes one it knows already for what it is, by its sequence."""
        try:
            message = decode_on(self._job, delivery.subject, delivery.data, GpuReclaimed, GpuAvailable)
        except UndecodableMessage:
            return False  # the elastic scheduler, whose input it is first, writes the dead letter
        self._feed(message, delivery.at_ms, delivery.seq)
        return True

    async def _heartbeats(self) -> None:
        while True:
            beat = NodeHeartbeat(node=self._config.node, workers=self._state.workers)
            try:
                await self._bus.publish(subject_of(self._job, beat), encode(beat))
            except BusError as error:
                self._log.debug(f"lost a heartbeat: {error}", action="heartbeat_lost")
            await asyncio.sleep(self._config.heartbeat_ms / 1000)

    # Reports: in order, each until it is stored

    def _report_later(self, message: Message, msg_id: str | None = None) -> None:
        known_id = msg_id or message_id(message)
        assert known_id is not None, f"{type(message).__name__} needs a message id"
        self._reports.append((message, known_id))
        self._reports_wake.set()

    def _dead_letter(self, subject: str, data: bytes, reason: str) -> None:
        self._letters += 1
        letter = dead_letter(self._core.name, subject, data, reason)
        self._log.warning(f"dead-lettered a message on {letter.subject}: {letter.reason}", action="dead_letter")
        if len(self._reports) >= MOST_REPORTS_WAITING:
            return  # a flood of nonsense must not grow without bound while the broker is away
        self._report_later(letter, f"dead:{self._core.name}:{self._clock()}:{self._letters}")

    async def _publish_reports(self) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            while not self._reports:
                self._reports_wake.clear()
                await self._reports_wake.wait()
            message, msg_id = self._reports[0]
            try:
                await self._bus.publish_durable(subject_of(self._job, message), encode(message), msg_id=msg_id)
            except BusError as error:
                self._log.warning(f"cannot report {msg_id} yet: {error}", action="report_retry")
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_MOST_S, 2 * pause_s)
                continue
            pause_s = RETRY_FIRST_S
            if isinstance(message, GpuFree):  # the last word about a process: now its end survives this agent
                self._pids.forget(message.worker, message.incarnation)
            self._reports.popleft()
            self._reports_wake.set()

    async def _last_reports(self) -> None:
        try:
            async with asyncio.timeout(LAST_REPORTS_S):
                while self._reports:
                    self._reports_wake.clear()
                    await self._reports_wake.wait()
        except TimeoutError:
            text = f"{len(self._reports)} reports not stored; the next agent reports the ends from the pid files"
            self._log.warning(text, action="reports_left")
