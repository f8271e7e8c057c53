"""Modelled processes: rollout workers whose engine only takes time, a trainer that only counts, and their node agents.

Workers run the real worker core, node agents the real node agent core. A process can be told to hang in an operation
(`stuck`), to ignore SIGTERM (`stubborn`), and can be killed.
"""

from __future__ import annotations

from collections.abc import Callable

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, NodeUp
from messages.envelope import Message
from messages.ids import Epoch, PolicyVersion, WorkerId
from messages.node_agent import Kill, Launch
from messages.orchestrator import GpuFree, WorkerGone, WorkerReady
from messages.pipeline_scheduler import StepFinished, WeightsPublished
from messages.toggle_manager import TrainerReady, TrainerReleased, TrainerResumed
from messages.trainer import TrainerRelease, TrainerResume
from services.node_agent.config import Config as NodeConfig
from services.node_agent.core import (
    Adopted,
    Ended,
    Exited,
    NodeAgentCore,
    NodeState,
    Restored,
    Signal,
    Spawn,
    Started,
)
from services.rollout_worker.core import (
    COMMANDS,
    Engine,
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
from services.runtime.core import Input, Note, Refuse, Send
from tests.sim.world import Actor, World

TOOK_MS = {
    "start": (200, 500),
    "load": (40, 120),
    "drain": (5, 40),
    "role": (1, 5),
    "release": (20, 60),
    "restore": (20, 60),
}
TRAINER_MS = {"start": (200, 500), "release": (20, 60), "resume": (30, 80), "train": (200, 400)}


class Process:
    """What a node agent started."""

    def __init__(self, world: World, spawn: Spawn, on_end: NodeAgent) -> None:
        self.world = world
        self.worker, self.incarnation, self.gpus = spawn.worker, spawn.incarnation, spawn.gpus
        self.service = spawn.service
        self.started_ms = world.now_ms
        self.alive = True
        self.how = ""
        self.stuck: set[str] = set()  # operations that never end
        self.stubborn = False  # ignores SIGTERM
        self._agent = on_end

    def signal(self, hard: bool) -> None:
        if hard:
            self.world.soon(lambda: self.die("signal:9"))
        elif not self.stubborn:
            self.world.later(self.world.random.randint(10, 80), lambda: self.die("exit:0"))

    def die(self, how: str = "signal:9") -> None:
        """It ends; its node agent sees it."""
        if self.alive:
            self.alive = False
            self.how = how
            self.ended()
            self._agent.saw_end(self)

    def ended(self) -> None:
        """For subclasses."""

    @property
    def resident(self) -> bool:
        """Whether its device memory is, or may be, held."""
        return self.alive

    def after(self, operation: str, spans: dict[str, tuple[int, int]], action: Callable[[], None]) -> None:
        """`action` once the operation has taken its time; never if it hangs, or the process has ended by then."""
        if operation in self.stuck:
            return
        self.world.later(
            self.world.random.randint(*spans[operation]),
            lambda: action() if self.alive and operation not in self.stuck else None,
        )


class Worker(Process):
    """A rollout worker: the real core, an engine that only takes time."""

    def __init__(self, world: World, spawn: Spawn, agent: NodeAgent, *, released: bool) -> None:
        super().__init__(world, spawn, agent)
        self.core = RolloutWorkerCore(spawn.worker, spawn.incarnation, released=released)
        self.state = self.core.initial()
        self.up = False
        self.after("start", TOOK_MS, self._ready)

    @property
    def resident(self) -> bool:
        return self.alive and (self.state.resident or self.state.busy in ("release", "restore"))

    def _ready(self) -> None:
        self.up = True
        self.world.receivers[f"worker/{self.worker}"] = self.receive
        fact = WorkerReady(worker=self.worker, incarnation=self.incarnation, endpoint="", pid=1, init_ms=1)
        self.world.publish(self.worker, fact)

    def ended(self) -> None:
        if self.world.receivers.get(f"worker/{self.worker}") == self.receive:
            del self.world.receivers[f"worker/{self.worker}"]

    def receive(self, message: Message) -> None:
        if self.alive and isinstance(message, COMMANDS) and "all" not in self.stuck:
            self._step(message)

    def _step(self, event: object) -> None:
        self.state, effects = self.core.step(self.state, Input(self.world.now_ms, event))
        for effect in effects:
            match effect:
                case Send(message, msg_id):
                    self.world.publish(self.worker, message, msg_id)
                case Note():
                    pass
                case Refuse(reason):
                    self.world.refusals.append((self.worker, reason))
                case Load() | InterruptAll() | TakeRole() | ReleaseMemory() | RestoreMemory():
                    operation, outcome = _outcome(effect)
                    if "all" not in self.stuck:
                        self.after(operation, TOOK_MS, lambda outcome=outcome: self._step(outcome))


def _outcome(effect: Engine) -> tuple[str, object]:
    match effect:
        case Load(command):
            return "load", Loaded(command.version, 1)
        case InterruptAll():
            return "drain", Interrupted(0)
        case TakeRole(role, generation):
            return "role", RoleTaken(role, generation)
        case ReleaseMemory(generation):
            return "release", MemoryReleased(generation, 1, 1)
        case RestoreMemory(generation):
            return "restore", MemoryRestored(generation, 1)


class TrainerDisk:
    """What outlives a trainer's process: its checkpoint."""

    def __init__(self) -> None:
        self.version = 0
        self.finished: StepFinished | None = None


class Trainer(Process):
    """Trains batch k into version k + 1. The first process of a job holds its memory, later ones wait for their orders."""

    def __init__(self, world: World, spawn: Spawn, agent: NodeAgent, disk: TrainerDisk) -> None:
        super().__init__(world, spawn, agent)
        self.disk = disk
        self.busy = False
        self._holds = spawn.incarnation == 1
        self.after("start", TRAINER_MS, self._ready)

    @property
    def resident(self) -> bool:
        return self.alive and self._holds

    def _ready(self) -> None:
        self.world.receivers["trainer"] = self.receive
        self._announce()
        start_id = f"{self.worker}#{self.incarnation}"
        self.world.publish("trainer", TrainerReady(start_id=start_id, version=self.disk.version, ranks=1))

    def ended(self) -> None:
        if self.world.receivers.get("trainer") == self.receive:
            del self.world.receivers["trainer"]

    def _announce(self, fresh: str = "") -> None:
        version = PolicyVersion(self.disk.version)
        published = WeightsPublished(version=version, uri=f"mem:{version}", manifest_sha256="", bytes=1)
        self.world.publish("trainer", published, f"weights:{version}:{fresh}")
        if self.disk.finished is not None:
            self.world.publish("trainer", self.disk.finished, f"step:{self.disk.finished.batch}:{fresh}")

    def receive(self, message: Message) -> None:
        if not self.alive or self.busy or "all" in self.stuck:
            return
        match message:
            case TrainerRelease(epoch=epoch):
                self.busy = True
                self.after("release", TRAINER_MS, lambda: self._released(epoch))
            case TrainerResume(batch=batch) if batch < self.disk.version:
                self._announce(str(self.world.now_ms))
            case TrainerResume(batch=batch) if batch == self.disk.version:
                self.busy = True
                self._holds = True
                self.after("resume", TRAINER_MS, lambda: self._resumed(message))
            case _:
                raise AssertionError(f"the trainer at version {self.disk.version} cannot obey {message}")

    def _released(self, epoch: Epoch) -> None:
        self._holds = self.busy = False
        fact = TrainerReleased(epoch=epoch, freed_bytes=1, took_ms=1)
        self.world.publish("trainer", fact, f"released:{epoch}:{self.incarnation}:{self.world.now_ms}")

    def _resumed(self, command: TrainerResume) -> None:
        fact = TrainerResumed(epoch=command.epoch, batch=command.batch, restored_bytes=1, took_ms=1)
        self.world.publish("trainer", fact, f"resumed:{command.epoch}:{self.incarnation}")
        self.after("train", TRAINER_MS, lambda: self._trained(command.batch))

    def _trained(self, batch: int) -> None:
        self.busy = False
        self.disk.version = batch + 1
        self.disk.finished = StepFinished(
            batch=batch,
            version=PolicyVersion(batch + 1),
            train_s=0.3,
            trained_tokens=1,
            reward_mean=0.0,
            reward_std=0.0,
            loss=0.0,
            grad_norm=0.0,
            zero_variance_groups=0,
        )
        self._announce()


class NodeAgent(Actor):
    """The real node agent core; its processes outlive it. What has not been reported is in its pid files."""

    inputs = (GpuReclaimed, GpuAvailable)

    def __init__(self, world: World, config: NodeConfig, overlap: frozenset[WorkerId], disk: TrainerDisk) -> None:
        super().__init__(world, f"node_agent-{config.node}", tick_ms=100)
        self.core = NodeAgentCore(config)
        self.state: NodeState = self.core.initial()
        self.pids: dict[WorkerId, Process] = {}
        self._node = config.node
        self._config = config
        self._overlap = overlap
        self._disk = disk
        self._starts = 0

    def restore(self) -> None:
        self._starts += 1
        self.state, self.cursor = self.core.initial(), 0
        newest = {gone.worker: gone for gone in self.world.of(WorkerGone) if gone.worker in self._config.workers}
        for gone in newest.values():
            self.take(Input(self.world.now_ms, Ended(gone.worker, gone.incarnation, gone.reason)))
        for process in list(self.pids.values()):
            adopted = Adopted(process.worker, process.incarnation, process.gpus, process.service, process.started_ms)
            self.take(Input(self.world.now_ms, adopted))
            if not process.alive:
                self.take(Input(self.world.now_ms, Exited(process.worker, process.incarnation, "exit:unknown")))
        for event in self.world.events:
            if isinstance(event.message, (GpuReclaimed, GpuAvailable)) and event.message.node == self._node:
                self.take(Input(event.at_ms, event.message, event.seq))
        self.cursor = len(self.world.events)
        self.world.receivers[f"node/{self._node}"] = self.receive
        self.take(Input(self.world.now_ms, Restored()))
        gpus = tuple(range(self._config.gpus))
        self.world.publish(self.name, NodeUp(node=self._node, gpus=gpus, agent_incarnation=self._starts, host="sim"))

    def kill(self) -> None:
        super().kill()
        self.world.receivers.pop(f"node/{self._node}", None)

    def receive(self, message: Message) -> None:
        if isinstance(message, (Launch, Kill)):
            self.take(Input(self.world.now_ms, message))

    def take(self, event: Input) -> None:
        if isinstance(event.message, (GpuReclaimed, GpuAvailable)) and event.message.node != self._node:
            return
        self.state, effects = self.core.step(self.state, event)
        for effect in effects:
            if isinstance(effect, Spawn):
                self._spawn(effect)
            elif isinstance(effect, Signal):
                process = self.pids.get(effect.worker)
                if process is not None and process.incarnation == effect.incarnation:
                    process.signal(effect.hard)
            else:
                self.perform((effect,))
                if isinstance(effect, Send) and isinstance(effect.message, GpuFree):
                    process = self.pids.get(effect.message.worker)
                    if process is not None and process.incarnation == effect.message.incarnation:
                        del self.pids[effect.message.worker]

    def _spawn(self, spawn: Spawn) -> None:
        if spawn.service == "trainer":
            process: Process = Trainer(self.world, spawn, self, self._disk)
        else:
            process = Worker(self.world, spawn, self, released=spawn.worker in self._overlap)
        self.pids[spawn.worker] = process
        self.take(Input(self.world.now_ms, Started(spawn.worker, spawn.incarnation)))

    def saw_end(self, process: Process) -> None:
        """If it lives to see it; the next agent finds out otherwise."""
        exited = Exited(process.worker, process.incarnation, process.how)
        self.world.soon(self.alive_only(lambda: self.take(Input(self.world.now_ms, exited))))
