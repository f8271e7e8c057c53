"""One rollout worker process: one engine, and its life on the bus.

Owns the engine, the requests that run on it and their attempt log. Never decides what it serves: executors do, by
commands, and `core.py` says which are obeyed. Driven by commands, requests, and the engine.

In the role `prefill` an attempt has no tokens and no entry in the log: its edge hears of it only if it was refused or
interrupted, everything else from the decode worker, to which the engine hands it over.

Invariants: tokens of an attempt are published in order, and its last chunk before any fact that says it ended; facts are
published in order, each until the broker has it; while the broker is away the worker keeps its role and goes on; a
process that hears nothing from it for `orphan_ms`, though it asks, ends itself, because nobody can tell it to.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import psutil

from messages.agent import AttemptLogged, TokenChunk
from messages.envelope import Message, UndecodableMessage, brief, encode
from messages.ids import Incarnation, Role, WorkerId
from messages.orchestrator import WorkerReady
from messages.rollout_worker import CancelRequest, Generate, UpdateWeights
from messages.runtime_tracker import WorkerHeartbeat
from messages.subjects import TOKEN, decode_on, message_id, node_of, subject_of
from services.connect import connect
from services.jobfile import JobFile, parse_policy
from services.rollout_worker.attempt_log import AttemptLog
from services.rollout_worker.config import LIVENESS_MS, Config
from services.rollout_worker.core import (
    COMMANDS,
    Doable,
    Failed,
    InterruptAll,
    Interrupted,
    Load,
    Loaded,
    MemoryReleased,
    MemoryRestored,
    ReleaseMemory,
    RestoreMemory,
    RoleTaken,
    RolloutWorkerCore,
    TakeRole,
)
from services.rollout_worker.engines import make_engine
from services.rollout_worker.engines.base import Engine, EngineError, GenerateSpec, Tokens
from services.rollout_worker.held import Held
from services.runtime.bus import Bus, BusError, BusUnavailable, Delivery, Subscription
from services.runtime.clock import now_ms
from services.runtime.core import Input, Note, Refuse, Send
from services.runtime.dead_letters import dead_letter
from services.runtime.log import get_logger
from services.snapshot import SnapshotError, fetch

FACT_RETRY_S: Final = 0.5
MOST_FACTS_WAITING: Final = 1024
"""Beyond it dead letters are only logged."""
LONGEST_ID: Final = 512
"""Characters of a request's id; it holds a trajectory's, an edge's and some numbers."""
MOST_ENDED: Final = 4096
"""Attempts that are remembered after their end; copies of a message come within seconds of each other."""
INTERRUPT_ROUND_S: Final = 0.05
"""A request that was let in as the drain began reaches the engine after the abort; so the abort is repeated."""

log = get_logger("rollout_worker")


class OrphanedError(Exception):
    """The bus has been silent for too long."""


class EngineFailedError(Exception):
    """The engine ended by itself; its traceback was logged."""


class Attempts(Protocol):
    """Where a worker says which attempts it ran (`AttemptLog`)."""

    def write(self, entry: AttemptLogged) -> None: ...

    def close(self) -> None: ...


Fetch = Callable[[str, str, str], Path]
"""(uri, cache directory, checksum of the manifest) -> local folder. Raises SnapshotError. May block."""


class _Attempt:
    """A request that runs here."""

    def __init__(self, request: Generate, role: Role) -> None:
        self.request = request
        self.silent = role is Role.PREFILL
        self.offset = len(request.prefix)  # of the next token
        self.held = Held(request.hold_ms)
        self.heard_of = _now_s()  # when its edge last got a chunk
        self.task: asyncio.Task[None] | None = None


class RolloutWorker:
    """One incarnation. `run` until told to stop. Raises OrphanedError, EngineFailedError."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        engine: Engine,
        worker: WorkerId,
        incarnation: Incarnation,
        *,
        began: float,
        attempts: Attempts | None = None,
        fetch: Fetch = fetch,
        pid: int | None = None,
    ) -> None:
        """`began`: the event loop's time at which initialisation began. `attempts`: where attempts are logged, a file of its
        own unless given; `fetch`: what brings a snapshot here; `pid`: under which it is known, its own unless given."""
        self.core = RolloutWorkerCore(worker, incarnation, released=worker in config.lent)
        self.state = self.core.initial()
        self.refused = 0
        self.lost_chunks = 0
        self._config = config
        self._bus = bus
        self._engine = engine
        self._worker = worker
        self._incarnation = incarnation
        self._began = began
        self._attempts: dict[tuple[str, int], _Attempt] = {}
        self._ended: dict[tuple[str, int, int], None] = {}  # the last ones, oldest first
        self._log: Attempts = attempts or AttemptLog(config.attempts_dir, worker, incarnation)
        self._fetch = fetch
        self._pid = os.getpid() if pid is None else pid
        self._facts: asyncio.Queue[tuple[Message, str]] = asyncio.Queue()
        self._heard = _now_s()
        self._ready: WorkerReady | None = None
        self._probe: asyncio.Task[None] | None = None
        self._process = psutil.Process()
        self._bare_bytes: int | None = None  # memory in use before it was restored, until the first load after
        self._tasks: asyncio.TaskGroup | None = None
        self._operations: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Start the engine, say so, obey until `stop`; then interrupt what runs."""
        prefix = f"pearl.{self._config.job}"
        commands = await self._bus.subscribe(f"{prefix}.cmd.worker.{self._worker}")
        requests = await self._bus.subscribe(f"{prefix}.gen.{self._worker}")
        self._bus.on_reconnect(self._reconnected)
        await self._engine.start()
        if not self.state.resident:
            await self._engine.release()
        self._heard = _now_s()  # a server may take minutes to start: the bus had no reason to speak
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks = group
                self._say_ready()
                loops = [
                    group.create_task(self._read_commands(commands)),
                    group.create_task(self._read_requests(requests)),
                    group.create_task(self._publish_facts()),
                    group.create_task(self._beat()),
                    group.create_task(self._keep_alive()),
                    group.create_task(self._watch_engine()),
                ]
                await stop.wait()
                self.state = msgspec.structs.replace(self.state, serving=False)
                await self._interrupt_all()
                for task in (*loops, *self._operations):
                    task.cancel()
                if self._probe is not None:
                    self._probe.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await commands.stop()
            await requests.stop()
            await self._engine.stop()
            self._log.close()

    # ---- loops ----

    async def _read_commands(self, subscription: Subscription) -> None:
        async for delivery in subscription:
            self._heard = _now_s()
            try:
                command = decode_on(self._config.job, delivery.subject, delivery.data, *COMMANDS)
            except UndecodableMessage as error:
                self._dead_letter(delivery, error.reason)
                continue
            self._step(command, delivery)

    async def _read_requests(self, subscription: Subscription) -> None:
        async for delivery in subscription:
            self._heard = _now_s()
            await self._take(delivery)
            del delivery  # a loop that waits keeps its variables: here a whole context

    async def _take(self, delivery: Delivery) -> None:
        try:
            request: Generate | CancelRequest = decode_on(
                self._config.job, delivery.subject, delivery.data, Generate, CancelRequest
            )
        except UndecodableMessage as error:
            self._dead_letter(delivery, error.reason)
            return
        if isinstance(request, CancelRequest):
            attempt = self._attempts.get((request.request, request.attempt))
            if attempt is not None and attempt.task is not None:
                attempt.task.cancel()
        elif problem := problem_of(request, self._config.job):
            self._dead_letter(delivery, problem)
        else:
            await self._let_in(request)

    async def _publish_facts(self) -> None:
        while True:
            fact, msg_id = await self._facts.get()
            subject, data = subject_of(self._config.job, fact), encode(fact)
            while True:
                try:
                    await self._bus.publish_durable(subject, data, msg_id=msg_id)
                    self._heard = _now_s()
                    break
                except BusUnavailable as error:
                    log.warning(f"{msg_id} waits: {error}", action="fact.waits")
                    await asyncio.sleep(FACT_RETRY_S)

    async def _beat(self) -> None:
        """Heartbeats; and asking the bus for a sign of life when it has been silent for half of `orphan_ms`."""
        while True:
            load = self._engine.load()
            beat = WorkerHeartbeat(
                worker=self._worker,
                incarnation=self._incarnation,
                running=load.running,
                queued=load.queued,
                version=self.state.version,
                serving=self.state.serving,
                decode_iterations=load.decode_iterations,
                decode_tokens=load.decode_tokens,
                decode_s=load.decode_s,
                decode_batch_sum=load.decode_batch_sum,
                prefill_tokens=load.prefill_tokens,
                prefill_s=load.prefill_s,
                refused=self.refused,
                rss_bytes=self._process.memory_info().rss,
                role=self.state.role,
                role_generation=self.state.role_generation,
            )
            await self._publish(subject_of(self._config.job, beat), beat)
            silent_ms = (_now_s() - self._heard) * 1000
            if silent_ms > self._config.orphan_ms:
                raise OrphanedError(f"no sign of the bus for {silent_ms:.0f} ms (timeouts.orphan_ms)")
            if silent_ms > self._config.orphan_ms / 2 and (self._probe is None or self._probe.done()):
                assert self._tasks is not None
                self._probe = self._tasks.create_task(self._ask_for_life())
            await asyncio.sleep(self._config.heartbeat_ms / 1000)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(LIVENESS_MS / 1000)
            await self._tell_who_waits()

    async def _tell_who_waits(self) -> None:
        """Attempts that wait say that they do."""
        now = _now_s()
        for attempt in tuple(self._attempts.values()):
            if not attempt.silent and now - attempt.heard_of >= LIVENESS_MS / 1000:
                await self._send(attempt, attempt.held.rest() or self._nothing(attempt))

    async def _watch_engine(self) -> None:
        raise EngineFailedError(await self._engine.failed())

    # ---- the core's effects ----

    def _step(self, event: object, origin: Delivery | None = None) -> None:
        self.state, effects = self.core.step(self.state, Input(now_ms(), event))
        for effect in effects:
            if isinstance(effect, Refuse):
                assert origin is not None, "only commands are refused"
                self._dead_letter(origin, effect.reason)
            else:
                self._execute(effect)

    def _execute(self, effect: Doable) -> None:
        match effect:
            case Send(message, msg_id):
                assert msg_id is not None
                self._facts.put_nowait((message, msg_id))
            case Note(action, text, level):
                log.log(level, text, action=action, worker=self._worker)
            case Load(command):
                self._operate("load", self._load(command))
            case InterruptAll():
                self._operate("drain", self._interrupt())
            case TakeRole(role, generation):
                self._operate("role", self._take_role(RoleTaken(role, generation)))
            case ReleaseMemory(generation):
                self._operate("release", self._release(generation))
            case RestoreMemory(generation):
                self._operate("restore", self._restore(generation))

    def _operate(self, name: str, work: Awaitable[object]) -> None:
        """Run an operation beside the loops; its outcome is the core's next event."""

        async def run() -> None:
            try:
                outcome = await work
            except (EngineError, SnapshotError) as error:
                outcome = Failed(name, str(error))
            self._step(outcome)

        assert self._tasks is not None
        task = self._tasks.create_task(run(), name=name)
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)

    async def _load(self, command: UpdateWeights) -> Loaded:
        began = _now_s()
        directory = await asyncio.to_thread(self._fetch, command.uri, self._config.cache_dir, command.manifest_sha256)
        await self._engine.pause(self._config.update_pause)
        try:
            await self._engine.load_snapshot(str(directory), command.version)
        finally:
            await self._engine.resume()
        before, self._bare_bytes = self._bare_bytes, None
        restored = 0 if before is None else max(0, self._engine.occupied() - before)
        return Loaded(command.version, _ms_since(began), restored)

    async def _interrupt(self) -> Interrupted:
        return Interrupted(await self._interrupt_all())

    async def _take_role(self, taken: RoleTaken) -> RoleTaken:
        await self._engine.set_role(taken.role)
        return taken

    async def _release(self, generation: Any) -> MemoryReleased:
        began = _now_s()
        await self._interrupt_all()
        freed = await self._engine.release()
        return MemoryReleased(generation, freed, _ms_since(began))

    async def _restore(self, generation: Any) -> MemoryRestored:
        began = _now_s()
        self._bare_bytes = self._engine.occupied()
        await self._engine.restore()
        return MemoryRestored(generation, _ms_since(began))

    async def _interrupt_all(self) -> int:
        """End every attempt, its last chunk published; returns how many the engine ended."""
        count = 0
        while self._attempts:
            count += await self._engine.abort()
            tasks = [attempt.task for attempt in self._attempts.values() if attempt.task is not None]
            if tasks:
                await asyncio.wait(tasks, timeout=INTERRUPT_ROUND_S)
        return count

    # ---- attempts ----

    async def _let_in(self, request: Generate) -> None:
        if request.worker != self._worker or request.incarnation != self._incarnation:
            return  # its edge has seen, or will see, that that process is gone
        key = (request.request, request.attempt)
        if key in self._attempts or (*key, request.role_generation) in self._ended:
            return  # the network brought it twice: what it made, or why not, is with its edge
        attempt = _Attempt(request, self.state.role)
        refusal = self.core.refusal(self.state, request)
        if refusal:
            self.refused += 1
            self._remember(request)
            await self._send(attempt, self._nothing(attempt, "refused", refusal))
            return
        assert self._tasks is not None
        self._attempts[key] = attempt
        attempt.task = self._tasks.create_task(self._run_attempt(attempt), name=f"attempt-{request.request}")
        # Not in the task itself: one that is cancelled before it begins never runs.
        attempt.task.add_done_callback(lambda _: self._attempts.pop(key))

    def _remember(self, request: Generate) -> None:
        """An attempt has ended, or was refused; a copy of its request that is still on its way must not run."""
        self._ended[request.request, request.attempt, request.role_generation] = None
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    async def _run_attempt(self, attempt: _Attempt) -> None:
        request = attempt.request
        spec = GenerateSpec(
            request=request.request,
            attempt=request.attempt,
            prompt=request.prompt,
            prefix=request.prefix,
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_ids=request.stop_ids,
            bootstrap_host=request.bootstrap_host,
            bootstrap_port=request.bootstrap_port,
            bootstrap_room=request.bootstrap_room,
        )
        start, finish = attempt.offset, "cancelled"
        begun = False
        stream = self._engine.generate(spec)
        try:
            async for chunk in stream:
                if chunk.finish == "refused":
                    self.refused += 1
                elif attempt.silent:
                    if chunk.finish != "interrupted":
                        continue
                elif not begun:
                    begun = True
                    self._log_attempt(attempt, start, "")
                assert chunk.offset == attempt.offset, "the engine left out tokens"
                attempt.offset += len(chunk.tokens)
                if chunk.finish:
                    finish = chunk.finish
                for ready in attempt.held.add(chunk, _now_s()):
                    await self._send(attempt, ready)
        finally:
            await _close(stream)
            self._remember(request)
            if begun:
                self._log_attempt(attempt, start, finish)

    def _nothing(self, attempt: _Attempt, finish: str = "", reason: str = "") -> Tokens:
        """A chunk that says something else than tokens."""
        return Tokens(
            offset=attempt.offset, tokens=[], logprobs=[], version=self.state.version, finish=finish, reason=reason
        )

    async def _send(self, attempt: _Attempt, tokens: Tokens) -> None:
        chunk = TokenChunk(
            request=attempt.request.request,
            attempt=attempt.request.attempt,
            worker=self._worker,
            incarnation=self._incarnation,
            offset=tokens.offset,
            tokens=tokens.tokens,
            logprobs=tokens.logprobs,
            version=tokens.version,
            finish=tokens.finish,
            reason=tokens.reason,
            cached_tokens=tokens.cached_tokens,
        )
        attempt.heard_of = _now_s()
        if not await self._publish(attempt.request.reply, chunk):
            self.lost_chunks += 1  # its edge sees the gap

    def _log_attempt(self, attempt: _Attempt, start: int, finish: str) -> None:
        entry = AttemptLogged(
            worker=self._worker,
            incarnation=self._incarnation,
            request=attempt.request.request,
            attempt=attempt.request.attempt,
            start_offset=start,
            generated=attempt.offset - start,
            version=self.state.version,
            finish=finish,
            at_ms=now_ms(),
        )
        self._log.write(entry)

    # ---- the bus ----

    async def _publish(self, subject: str, message: Message) -> bool:
        try:
            await self._bus.publish(subject, encode(message))
        except BusError:
            return False
        return True

    def _say_ready(self) -> None:
        self._ready = WorkerReady(
            worker=self._worker,
            incarnation=self._incarnation,
            endpoint=self._engine.endpoint,
            pid=self._pid,
            init_ms=_ms_since(self._began),
        )
        self._facts.put_nowait((self._ready, str(message_id(self._ready))))

    async def _ask_for_life(self) -> None:
        """Say once more that the worker is ready: harmless, and the broker answers."""
        assert self._ready is not None
        try:
            await self._bus.publish_durable(
                subject_of(self._config.job, self._ready), encode(self._ready), msg_id=str(message_id(self._ready))
            )
            self._heard = _now_s()
        except BusError as error:
            log.warning(f"no sign of the bus: {error}", action="bus.silent")

    async def _reconnected(self) -> None:
        """The broker is back, perhaps without its last moments: say what still holds."""
        self._heard = _now_s()
        if self._ready is None or self._facts.qsize() >= MOST_FACTS_WAITING:
            return
        self._facts.put_nowait((self._ready, str(message_id(self._ready))))
        for fact in self.core.known_facts(self.state):
            assert fact.msg_id is not None
            self._facts.put_nowait((fact.message, fact.msg_id))

    def _dead_letter(self, delivery: Delivery, reason: str) -> None:
        letter = dead_letter("rollout_worker", delivery.subject, delivery.data, reason)
        log.warning(f"dead-lettered a message on {letter.subject}: {letter.reason}", action="dead_letter")
        if self._facts.qsize() >= MOST_FACTS_WAITING:
            return  # a flood of nonsense must not grow without bound while the broker is away
        # Through the queue of facts: reading must not wait for the broker.
        self._facts.put_nowait((letter, f"{self._worker}:{self._incarnation}:{time.time_ns()}"))


def problem_of(request: Generate, job: str) -> str:
    """What makes a readable request senseless on any worker, or "". Whether this one can serve it is for the engine."""
    edge = request.reply.removeprefix(f"pearl.{job}.tok.")
    if edge == request.reply or not TOKEN.fullmatch(edge):
        return f"reply subject {brief(request.reply, 80)!r} is not an edge's"
    if not request.request or len(request.request) > LONGEST_ID or request.attempt < 1:
        return f"request {brief(request.request, 80)!r} attempt {request.attempt}: no id, or attempts count from 1"
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        return f"temperature {request.temperature} is not a finite number from 0"
    if not 0 <= request.hold_ms <= LIVENESS_MS:
        return f"hold_ms = {request.hold_ms} is not from 0 to {LIVENESS_MS}"
    if request.max_new_tokens < 1:
        return f"max_new_tokens = {request.max_new_tokens}: nothing to generate"
    return ""


async def _close(stream: Any) -> None:
    """Engines' streams are asynchronous generators: closing one cancels its request."""
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _ms_since(began: float) -> int:
    return round((_now_s() - began) * 1000)


def _model_folder(job: JobFile) -> str:
    from services.models import initial_model  # torch: heavy

    return str(initial_model(job))


def first_role(job: JobFile) -> Role:
    """What an engine is started as, where a change to or from colocation would be a relaunch: whatever the job certainly needs."""
    return Role.PREFILL if parse_policy(job.decision.policy) not in (None, (0, 0)) else Role.COLOCATED


async def run_worker(
    job: JobFile, bus: Bus, worker: str, incarnation: int, stop: asyncio.Event, *, age_s: float = 0.0
) -> None:
    """Be `incarnation` of `worker` on this bus until `stop`. Raises ConfigError, OrphanedError, EngineFailedError.

    `age_s`: how long its process has been starting.
    """
    began = _now_s()
    config = Config.of(job, node_of(worker))
    model = await asyncio.to_thread(_model_folder, job) if config.rollout.engine == "sglang" else ""
    engine = make_engine(
        config.rollout,
        config.device,
        config.address,
        emulation=config.emulation,
        age_s=age_s,
        model=model,
        log_file=job.run_dir / "logs" / f"{worker}.sglang.log",
        worker=worker,
        first_role=first_role(job),
    )
    await RolloutWorker(config, bus, engine, WorkerId(worker), Incarnation(incarnation), began=began).run(stop)


async def serve(job: JobFile, stop: asyncio.Event, worker: str, incarnation: int) -> None:
    """Be `incarnation` of `worker` until `stop`. Raises ConfigError, BusUnavailable, OrphanedError, EngineFailedError."""
    Config.of(job, node_of(worker))  # a wrong job file is said before anything is connected
    bus = await connect(job, "rollout_worker")
    try:
        age_s = max(0.0, time.time() - psutil.Process().create_time())
        await run_worker(job, bus, worker, incarnation, stop, age_s=age_s)
    finally:
        await bus.close()
