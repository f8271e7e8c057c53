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
from messages.orchestrator import WorkerGone, WorkerReady
from messages.runtime_tracker import NodeHeartbeat
from messages.subjects import decode_on, event_subject, stream, subject_of
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
    StreamWentBack,
)
from services.node_agent.processes import Pids, Process
from services.node_agent.reports import Reports
from services.runtime.bus import Bus, BusError, Consumer, Delivery, Subscription
from services.runtime.clock import Clock, now_ms
from services.runtime.core import Input, Note, Refuse, Send, Tick
from services.runtime.log import get_logger

FETCH_S = 2.0
FETCH_MOST = 64
IDLE_S = 1.0
"""Longest time between two Ticks."""
LOOKS = 8  # at an event that seems to be missing: one of several replicas may lag behind
LOOK_AGAIN_S = 0.25

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
        self._reports = Reports(bus, job_name, self._core.name, clock, self._pids)
        self._up: NodeUp | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._log = get_logger(self._core.name)

    # Restore

    async def run(self, stop: asyncio.Event) -> None:
        """Restore, announce the node, then serve."""
        events = stream(self._job, "ev")
        commands: Subscription | None = None
        capacity: Consumer | None = None
        self._bus.on_reconnect(self._look_back)
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
            self._up = NodeUp(
                node=self._config.node,
                gpus=tuple(range(self._config.gpus)),
                agent_incarnation=incarnation,
                host=self._host,
            )
            self._reports.add(self._up)
            async with asyncio.TaskGroup() as group:
                pumps = (
                    self._pump_commands(commands),
                    self._pump_capacity(capacity),
                    self._pump_stop(stop),
                    self._heartbeats(),
                    self._reports.publish(),
                )
                tasks.extend(group.create_task(pump) for pump in pumps)
                self._log.info(f"node {self._config.node} is up", action="node_up", agent_incarnation=incarnation)
                await self._loop()
                await self._reports.last()
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
                self._reports.add(effect.message, effect.msg_id)
            case Note():
                self._log.log(effect.level, effect.text, action=effect.action)
            case Refuse():
                assert isinstance(event.message, Message), "only messages are refused"
                self._reports.dead_letter(subject_of(self._job, event.message), encode(event.message), effect.reason)

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
                self._reports.dead_letter(delivery.subject, delivery.data, error.reason)

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

    async def _look_back(self) -> None:
        """After a reconnection: are the newest capacity event and this agent's own arrival still in the stream?"""
        events = stream(self._job, "ev")
        newest = max((claim.seq for claim in self._state.claims), default=0)
        if newest:
            for _ in range(LOOKS):
                kept = [
                    each.seq
                    async for each in self._bus.read(
                        events, f"pearl.{self._job}.ev.>", first_seq=newest, last_seq=newest
                    )
                ]
                if kept:
                    break
                await asyncio.sleep(LOOK_AGAIN_S)
            else:
                self._log.warning(f"capacity event {newest} is gone from the stream", action="stream_went_back")
                self._feed(StreamWentBack())
        if self._up is None:
            return
        subject = event_subject(self._job, NodeUp, self._config.node)
        last = await self._newest(events, subject, NodeUp)
        if last is None or last.agent_incarnation < self._up.agent_incarnation:
            self._reports.add(self._up)

    async def _heartbeats(self) -> None:
        while True:
            beat = NodeHeartbeat(node=self._config.node, workers=self._state.workers, ended=self._state.ended)
            try:
                await self._bus.publish(subject_of(self._job, beat), encode(beat))
            except BusError as error:
                self._log.debug(f"lost a heartbeat: {error}", action="heartbeat_lost")
            await asyncio.sleep(self._config.heartbeat_ms / 1000)
