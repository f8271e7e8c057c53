"""The life of one rollout worker process: which commands it obeys, what it answers, which requests it lets in. Pure.

Commands are repeated until answered, so each is obeyed once and answered as often as it comes. Lifecycle operations
run one at a time; a command that finds another one running is left for its next repetition. Loading weights goes on
beside them, except while the device memory moves.
"""

from __future__ import annotations

from typing import assert_never, cast

import msgspec

from messages.envelope import Message
from messages.ids import Incarnation, PolicyVersion, Role, RoleGeneration, WorkerId
from messages.orchestrator import RoleSet, WeightsApplied, WorkerActivated, WorkerDrained, WorkerReleased
from messages.rollout_worker import Activate, Deactivate, Drain, Generate, SetRole, UpdateWeights
from messages.subjects import message_id
from services.runtime.core import Input, Note, Refuse, Send

NO_WEIGHTS = PolicyVersion(-1)

Command = UpdateWeights | SetRole | Drain | Deactivate | Activate
COMMANDS: tuple[type[Command], ...] = (UpdateWeights, SetRole, Drain, Deactivate, Activate)


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """Lives as long as the process."""

    role: Role = Role.COLOCATED
    role_generation: RoleGeneration = RoleGeneration(0)
    serving: bool = False
    resident: bool = True  # device memory is held
    version: PolicyVersion = NO_WEIGHTS
    cycle: int = 0  # times the device memory was given back; makes the ids of repeated facts new
    busy: str = ""  # "" | "drain" | "role" | "release" | "restore"
    loading: UpdateWeights | None = None
    wanted: UpdateWeights | None = None  # a newer version that came while one was loading
    interrupted: int = 0  # by the last drain
    released: WorkerReleased | None = None  # the last one, for its repetition


# What the engine is to do; each is answered by the event named.
class Load(msgspec.Struct, frozen=True):
    """Fetch, verify and swap in a snapshot -> Loaded | Failed."""

    command: UpdateWeights


class InterruptAll(msgspec.Struct, frozen=True):
    """End every running request as interrupted -> Interrupted."""


class TakeRole(msgspec.Struct, frozen=True):
    """-> RoleTaken | Failed."""

    role: Role
    role_generation: RoleGeneration


class ReleaseMemory(msgspec.Struct, frozen=True):
    """Interrupt what runs, then give the device memory back -> MemoryReleased | Failed."""

    role_generation: RoleGeneration


class RestoreMemory(msgspec.Struct, frozen=True):
    """-> MemoryRestored | Failed."""

    role_generation: RoleGeneration


# What the engine did.
class Loaded(msgspec.Struct, frozen=True):
    """A snapshot is swapped in. `restored_bytes`: memory taken since the device memory was restored, at the first load."""

    version: PolicyVersion
    took_ms: int
    restored_bytes: int = 0


class Interrupted(msgspec.Struct, frozen=True):
    """Nothing runs; `count` requests were ended."""

    count: int


class RoleTaken(msgspec.Struct, frozen=True):
    """The engine is in this role."""

    role: Role
    role_generation: RoleGeneration


class MemoryReleased(msgspec.Struct, frozen=True):
    """The device memory is given back."""

    role_generation: RoleGeneration
    freed_bytes: int
    took_ms: int


class MemoryRestored(msgspec.Struct, frozen=True):
    """The device memory is held again; there are no weights in it."""

    role_generation: RoleGeneration
    took_ms: int


class Failed(msgspec.Struct, frozen=True):
    """An operation could not be done; everything is as before, and the command comes again."""

    operation: str  # "load" | "role" | "release" | "restore"
    reason: str


Engine = Load | InterruptAll | TakeRole | ReleaseMemory | RestoreMemory
Event = Command | Loaded | Interrupted | RoleTaken | MemoryReleased | MemoryRestored | Failed
Doable = Send | Note | Engine
WorkerEffect = Doable | Refuse
WorkerEffects = tuple[WorkerEffect, ...]
Result = tuple[WorkerState, WorkerEffects]


class RolloutWorkerCore:
    """One process: `worker` in its `incarnation`."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation, *, released: bool = False) -> None:
        """`released`: it begins without device memory, as an overlap worker does, whose GPUs are training's (paper 4.6)."""
        self.worker = worker
        self.incarnation = incarnation
        self.released = released

    def initial(self) -> WorkerState:
        if not self.released:
            return WorkerState()
        nothing = WorkerReleased(
            worker=self.worker,
            incarnation=self.incarnation,
            role_generation=RoleGeneration(0),
            freed_bytes=0,
            took_ms=0,
        )
        return WorkerState(resident=False, released=nothing)

    def step(self, state: WorkerState, event: Input) -> Result:
        message = cast(Event, event.message)
        if isinstance(message, Command):
            if message.worker != self.worker or message.incarnation != self.incarnation:
                return state, ()  # meant for a process before or after this one
            if not isinstance(message, UpdateWeights) and message.role_generation < state.role_generation:
                return state, ()  # overtaken
            problem = _senseless(message)
            if problem:
                return state, (Refuse(problem),)
        match message:
            case UpdateWeights():
                return self.on_update_weights(state, message)
            case SetRole():
                return self.on_set_role(state, message)
            case Drain():
                return self.on_drain(state, message)
            case Deactivate():
                return self.on_deactivate(state, message)
            case Activate():
                return self.on_activate(state, message)
            case Loaded():
                return self.on_loaded(state, message)
            case Interrupted():
                return self.on_interrupted(state, message)
            case RoleTaken():
                return self.on_role_taken(state, message)
            case MemoryReleased():
                return self.on_memory_released(state, message)
            case MemoryRestored():
                return self.on_memory_restored(state, message)
            case Failed():
                return self.on_failed(state, message)
            case _:
                assert_never(message)

    def known_facts(self, state: WorkerState) -> tuple[Send, ...]:
        """What is true of the process and was said before, under the ids it had: the broker may have lost it."""
        facts: list[Send] = []
        if state.resident and state.version >= 0:
            facts.append(self._applied(state, 0))
        if state.serving and not state.busy:
            facts.append(self._role_set(state))
        return tuple(facts)

    def refusal(self, state: WorkerState, request: Generate) -> str:
        """Why a request of this incarnation is not let in, "" if it is (paper 4.5; DESIGN 7)."""
        if not state.serving:
            return "not serving"
        if request.role_generation != state.role_generation:
            return f"role generation is {state.role_generation}, not {request.role_generation}"
        if state.version < request.min_version:
            return f"version {state.version} is below {request.min_version}"
        if (state.role is Role.COLOCATED) == (request.bootstrap_room >= 0):
            return (
                f"a request {'with' if request.bootstrap_room >= 0 else 'without'} a room, for role {state.role.value}"
            )
        return ""

    # Commands

    def on_update_weights(self, state: WorkerState, command: UpdateWeights) -> Result:
        if command.version <= state.version:
            return state, (self._applied(state, 0),)
        if not state.resident or state.busy in ("release", "restore"):
            return state, (Note("weights.early", f"version {command.version}: the device memory is not held"),)
        if state.loading is None:
            return msgspec.structs.replace(state, loading=command), (Load(command),)
        newest = max(state.loading.version, -1 if state.wanted is None else state.wanted.version)
        return (msgspec.structs.replace(state, wanted=command) if command.version > newest else state), ()

    def on_set_role(self, state: WorkerState, command: SetRole) -> Result:
        same = state.role_generation == command.role_generation and state.role is command.role
        if state.serving and same:
            return state, (self._role_set(state),)
        if state.serving:
            return state, (Note("role.undrained", f"role {command.role.value} came before a drain", "warning"),)
        if state.busy or not state.resident:
            return state, ()
        return msgspec.structs.replace(state, busy="role"), (TakeRole(command.role, command.role_generation),)

    def on_drain(self, state: WorkerState, command: Drain) -> Result:
        if state.busy:
            return state, ()
        if not state.serving and command.role_generation == state.role_generation:
            return state, (self._drained(state),)
        drained = msgspec.structs.replace(
            state, serving=False, role_generation=command.role_generation, busy="drain", interrupted=0
        )
        return drained, (InterruptAll(),)

    def on_deactivate(self, state: WorkerState, command: Deactivate) -> Result:
        if state.busy or state.loading is not None:
            return state, ()
        if not state.resident:
            assert state.released is not None
            answer = msgspec.structs.replace(state.released, role_generation=command.role_generation)
            changed = msgspec.structs.replace(state, released=answer, role_generation=command.role_generation)
            return changed, (self._send(state, answer),)
        # A worker that still serves is drained by the way: the sender has the table's word that it must not.
        changed = msgspec.structs.replace(state, serving=False, role_generation=command.role_generation, busy="release")
        return changed, (ReleaseMemory(command.role_generation),)

    def on_activate(self, state: WorkerState, command: Activate) -> Result:
        if state.busy:
            return state, ()
        if state.resident:  # a fresh process, or a repetition
            if not state.serving:
                state = msgspec.structs.replace(state, role_generation=command.role_generation)
            return state, (self._activated(state, command.role_generation, 0),)
        if state.released is not None and command.role_generation <= state.released.role_generation:
            # Of the borrow that this release ended, late: the GPUs may be training's by now.
            return state, ()
        changed = msgspec.structs.replace(state, role_generation=command.role_generation, busy="restore")
        return changed, (RestoreMemory(command.role_generation),)

    # What the engine did

    def on_loaded(self, state: WorkerState, event: Loaded) -> Result:
        assert state.loading is not None and event.version == state.loading.version, "loaded what was not asked for"
        wanted = state.wanted
        state = msgspec.structs.replace(state, version=event.version, loading=wanted, wanted=None)
        next_load: WorkerEffects = () if wanted is None else (Load(wanted),)
        return state, (self._applied(state, event.took_ms, event.restored_bytes), *next_load)

    def on_interrupted(self, state: WorkerState, event: Interrupted) -> Result:
        assert state.busy == "drain"
        state = msgspec.structs.replace(state, busy="", interrupted=event.count)
        return state, (self._drained(state),)

    def on_role_taken(self, state: WorkerState, event: RoleTaken) -> Result:
        assert state.busy == "role"
        state = msgspec.structs.replace(
            state, busy="", serving=True, role=event.role, role_generation=event.role_generation
        )
        return state, (self._role_set(state),)

    def on_memory_released(self, state: WorkerState, event: MemoryReleased) -> Result:
        assert state.busy == "release"
        fact = WorkerReleased(
            worker=self.worker,
            incarnation=self.incarnation,
            role_generation=event.role_generation,
            freed_bytes=event.freed_bytes,
            took_ms=event.took_ms,
        )
        state = msgspec.structs.replace(
            state, busy="", resident=False, version=NO_WEIGHTS, cycle=state.cycle + 1, released=fact
        )
        return state, (self._send(state, fact),)

    def on_memory_restored(self, state: WorkerState, event: MemoryRestored) -> Result:
        assert state.busy == "restore"
        state = msgspec.structs.replace(state, busy="", resident=True)
        return state, (self._activated(state, event.role_generation, event.took_ms),)

    def on_failed(self, state: WorkerState, event: Failed) -> Result:
        if event.operation == "load":
            state = msgspec.structs.replace(state, loading=None, wanted=None)
        else:
            assert state.busy == event.operation
            state = msgspec.structs.replace(state, busy="")
        return state, (Note(f"{event.operation}.failed", event.reason, "warning"),)

    # Facts

    def _send(self, state: WorkerState, fact: Message) -> Send:
        """The id that follows from the fact, made new for each life of the device memory: else the broker would take
        what happens again after a toggle for a repetition."""
        return Send(fact, msg_id=f"{message_id(fact)}:{state.cycle}")

    def _applied(self, state: WorkerState, took_ms: int, restored_bytes: int = 0) -> Send:
        fact = WeightsApplied(
            worker=self.worker,
            incarnation=self.incarnation,
            version=state.version,
            took_ms=took_ms,
            restored_bytes=restored_bytes,
        )
        return self._send(state, fact)

    def _role_set(self, state: WorkerState) -> Send:
        fact = RoleSet(
            worker=self.worker, incarnation=self.incarnation, role=state.role, role_generation=state.role_generation
        )
        return self._send(state, fact)

    def _drained(self, state: WorkerState) -> Send:
        fact = WorkerDrained(
            worker=self.worker,
            incarnation=self.incarnation,
            role_generation=state.role_generation,
            interrupted=state.interrupted,
        )
        return self._send(state, fact)

    def _activated(self, state: WorkerState, role_generation: RoleGeneration, took_ms: int) -> Send:
        fact = WorkerActivated(
            worker=self.worker, incarnation=self.incarnation, role_generation=role_generation, took_ms=took_ms
        )
        return self._send(state, fact)


def _senseless(command: Command) -> str:
    """What nobody can mean by a command to this process, or ""."""
    if isinstance(command, UpdateWeights) and command.version < 0:
        return f"version {command.version} is negative"
    if isinstance(command, SetRole) and command.role in (Role.UNKNOWN, Role.TRAINING):
        return f"a rollout worker has no role {command.role.value!r}"
    return ""
