"""Modelled processes: rollout workers with the production worker core and an engine that only takes time, and the trainer.

Node agents are not here as processes: what they do (launch, kill, report an end) takes the time that the hardware description
says. Everything a command does to a worker is decided by `services.rollout_worker.core`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from messages.envelope import Message
from messages.ids import Incarnation, PolicyVersion, Role, WorkerId
from messages.orchestrator import WorkerGone, WorkerReady
from messages.pipeline_scheduler import StepFinished, WeightsPublished
from messages.toggle_manager import TrainerReady, TrainerReleased, TrainerResumed
from messages.trainer import TrainerRelease, TrainerResume
from services.rollout_worker.core import (
    Command,
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
from services.runtime.core import Input, Send
from services.simulator.whatif.engine import Costs, FastEngine
from services.timing.hardware import Hardware

END_S = 0.1
"""From a process's end until its node agent has said so."""


class Shell(Protocol):
    """What the simulation offers a process."""

    now_s: float

    def at(self, at_s: float, action: Callable[[], None]) -> None: ...

    def now_ms(self) -> int: ...

    def publish(self, message: Message, msg_id: str | None = None) -> None: ...

    def break_off(self, worker: Worker) -> int:
        """End all that runs on it; how many."""
        ...

    def new_version(self, worker: Worker) -> None:
        """End what cannot go on under another version."""
        ...

    def due(self, worker: Worker) -> None: ...


class Worker:
    """One incarnation of a rollout worker."""

    def __init__(
        self,
        shell: Shell,
        name: WorkerId,
        incarnation: Incarnation,
        hardware: Hardware,
        costs: Costs,
        max_running: int,
        chunk_tokens: int,
        update_pause: str,
        *,
        released: bool,
    ) -> None:
        self.shell = shell
        self.name = name
        self.incarnation = incarnation
        self.hardware = hardware
        self.update_pause = update_pause
        self.core = RolloutWorkerCore(name, incarnation, released=released)
        self.state = self.core.initial()
        self.engine = FastEngine(
            costs, max_running=max_running, chunk_tokens=chunk_tokens, kv_tokens=hardware.kv_capacity_tokens
        )
        self.alive = True
        self.up = False
        self.stamp = 0  # of its one entry in the simulation's heap that counts
        self.queued_s = math.inf  # that entry's time, no later than `due_s`
        self.due_s = math.inf  # its engine is to be looked at then, in the order of `number`
        self.number = 0
        self.link_free_s = 0.0
        self.beat_s = -1.0
        self.told: tuple[int, int] = (-1, -1)  # sums that the tracker was told of last
        self._join_s = hardware.join_s
        self._pauses = 0
        self._after(hardware.prepare_s.value, self._ready)

    @property
    def version(self) -> int:
        return self.state.version

    def admits(self, generation: int) -> bool:
        """Whether a request under this fence is let in."""
        return self.alive and self.state.serving and self.state.role_generation == generation

    def busy_s(self) -> float:
        """Seconds in which it computed."""
        return self.engine.sums.decode_s + self.engine.sums.prefill_s

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self.shell.at(self.shell.now_s + max(0.0, seconds), lambda: action() if self.alive else None)

    def _ready(self) -> None:
        self.up = True
        took_ms = round(self.hardware.prepare_s.value * 1000)
        self.shell.publish(
            WorkerReady(worker=self.name, incarnation=self.incarnation, endpoint="sim", pid=1, init_ms=took_ms)
        )

    def die(self, reason: str) -> None:
        """It ends; what ran on it asks again elsewhere."""
        if not self.alive:
            return
        self.engine.advance(self.shell.now_s)
        self.shell.break_off(self)
        self.alive = False
        gone = WorkerGone(worker=self.name, incarnation=self.incarnation, reason=reason)
        self.shell.at(self.shell.now_s + END_S, lambda: self.shell.publish(gone))

    def receive(self, command: Command) -> None:
        if self.alive and self.up:
            self._step(command)

    def _step(self, event: object) -> None:
        self.state, effects = self.core.step(self.state, Input(self.shell.now_ms(), event))
        for effect in effects:
            match effect:
                case Send(message, msg_id):
                    self.shell.publish(message, msg_id)
                case Load(command):
                    self._pause()
                    self._after(self.hardware.load_s, lambda version=command.version: self._loaded(version))
                case InterruptAll():
                    self.engine.advance(self.shell.now_s)
                    self._step(Interrupted(self.shell.break_off(self)))
                case TakeRole():
                    self._after(self._role_s(effect.role), lambda effect=effect: self._role_taken(effect))
                case ReleaseMemory(generation):
                    self.engine.advance(self.shell.now_s)
                    self.shell.break_off(self)
                    self.engine.clear()
                    seconds = self.hardware.deactivate_s.value
                    released = MemoryReleased(generation, 1, round(seconds * 1000))
                    self._after(seconds, lambda released=released: self._step(released))
                case RestoreMemory(generation):
                    seconds = self.hardware.activate_s.value - self.hardware.load_s  # the weights follow
                    self._join_s = 0.0
                    restored = MemoryRestored(generation, round(seconds * 1000))
                    self._after(seconds, lambda restored=restored: self._step(restored))
                case _:
                    pass

    def _pause(self) -> None:
        self._pauses += 1
        self.engine.advance(self.shell.now_s)
        self.engine.pause()
        self.shell.due(self)

    def _loaded(self, version: PolicyVersion) -> None:
        self._pauses -= 1
        self.engine.advance(self.shell.now_s)
        self.shell.new_version(self)
        if self.update_pause == "retract":
            self.engine.retract()
        self.engine.new_weights()
        self._step(Loaded(version, round(self.hardware.load_s * 1000)))
        if not self._pauses:
            self.engine.resume()
        self.engine.advance(self.shell.now_s)
        self.shell.due(self)

    def _role_s(self, role: Role) -> float:
        if self._join_s >= 0:
            seconds, self._join_s = self._join_s, -1.0
            return seconds
        return self.hardware.set_role_s.value if role is not self.state.role else 0.0

    def _role_taken(self, effect: TakeRole) -> None:
        self.engine.prefill_only = effect.role is Role.PREFILL
        self._step(RoleTaken(effect.role, effect.role_generation))


class Trainer:
    """Trains batch k into version k + 1 in `train_s` seconds; lends its GPUs when told to."""

    def __init__(self, shell: Shell, train_s: float) -> None:
        self.shell = shell
        self.train_s = train_s
        self.version = 0
        self.busy = False
        self.spans: list[tuple[float, float]] = []
        self.rewards: dict[int, float] = {}
        self.tokens: dict[int, int] = {}
        self._finished: StepFinished | None = None

    def start(self) -> None:
        self._announce("")
        self.shell.publish(TrainerReady(start_id="trainer#1", version=0, ranks=1))

    def _announce(self, fresh: str) -> None:
        version = PolicyVersion(self.version)
        published = WeightsPublished(version=version, uri=f"sim:{version}", manifest_sha256="", bytes=1)
        self.shell.publish(published, f"weights:{version}:{fresh}")
        if self._finished is not None:
            self.shell.publish(self._finished, f"step:{self._finished.batch}:{fresh}")

    def receive(self, command: TrainerRelease | TrainerResume) -> None:
        if self.busy:
            return
        now_ms = self.shell.now_ms()
        if isinstance(command, TrainerRelease):
            self.shell.publish(
                TrainerReleased(epoch=command.epoch, freed_bytes=1, took_ms=0), f"released:{command.epoch}:{now_ms}"
            )
        elif command.batch < self.version:
            self._announce(str(now_ms))
        else:
            assert command.batch == self.version, f"told to train {command.batch} at version {self.version}"
            self.busy = True
            resumed = TrainerResumed(epoch=command.epoch, batch=command.batch, restored_bytes=1, took_ms=0)
            self.shell.publish(resumed, f"resumed:{command.epoch}")
            self.spans.append((self.shell.now_s, self.shell.now_s + self.train_s))
            self.shell.at(self.shell.now_s + self.train_s, lambda: self._trained(command.batch))

    def _trained(self, batch: int) -> None:
        self.busy = False
        self.version = batch + 1
        self._finished = StepFinished(
            batch=batch,
            version=PolicyVersion(batch + 1),
            train_s=self.train_s,
            trained_tokens=self.tokens.get(batch, 0),
            reward_mean=self.rewards.get(batch, 0.0),
            reward_std=0.0,
            loss=0.0,
            grad_norm=0.0,
            zero_variance_groups=0,
        )
        self._announce("")
