"""A bus and a clock without any: one seeded, deterministic order of everything that happens.

`World` keeps what the broker would keep (the event stream with its de-duplication, the role table, checkpoints) and a heap of
what happens next. An actor that is killed loses its memory and whatever was on its way to it over core NATS; restarted,
it goes on from its checkpoint and the stream. The same seed gives the same run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import msgspec

from messages.envelope import Message
from messages.node_agent import Kill, Launch
from messages.subjects import ROUTES, message_id, node_of
from pearl_state.model import RoleTable
from services.runtime.core import Input, Note, Refuse, Reply, Send, Tick

START_MS = 1_000_000
LATENCY_MS = (1, 15)
"""Shortest and longest way of a message, drawn for each."""


class Event(msgspec.Struct, frozen=True):
    """An entry of the event stream. Sequences count from 1."""

    seq: int
    at_ms: int
    message: Message


class Command(msgspec.Struct, frozen=True):
    """A core message that was sent, whether or not it arrived."""

    at_ms: int
    sender: str
    message: Message


class World:
    """See the module. `loss` is the share of core messages that are lost."""

    def __init__(self, seed: int = 0, *, loss: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.now_ms = START_MS
        self.events: list[Event] = []
        self.tables: list[RoleTable] = []  # every epoch that was written
        self.commands: list[Command] = []
        self.notes: list[tuple[int, str, Note]] = []
        self.refusals: list[tuple[str, str]] = []
        self.actors: dict[str, Actor] = {}
        self.receivers: dict[str, Callable[[Message], None]] = {}  # core subjects: "node/n0", "worker/n0-w0", "trainer"
        self.after_each: list[Callable[[], None]] = []  # checks, called after everything that happens
        self._ids: set[str] = set()
        self._heap: list[tuple[int, float, int, Callable[[], None]]] = []
        self._numbers = 0

    # -- time

    def later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """`action` happens then; what happens at the same moment happens in a random order."""
        self._numbers += 1
        heapq.heappush(self._heap, (self.now_ms + delay_ms, self.random.random(), self._numbers, action))

    def soon(self, action: Callable[[], None]) -> None:
        """After a message's way."""
        self.later(self.random.randint(*LATENCY_MS), action)

    def run(self, ms: int) -> None:
        """Let so much time pass."""
        end = self.now_ms + ms
        while self._heap and self._heap[0][0] <= end:
            self._next()
        self.now_ms = end

    def run_until(self, reached: Callable[[], bool], within_ms: int, what: str = "") -> None:
        """Until it holds, to the very event after which it does. Fails if that takes longer."""
        end = self.now_ms + within_ms
        while not reached():
            assert self._heap and self._heap[0][0] <= end, f"not within {within_ms} ms: {what}"
            self._next()

    def _next(self) -> None:
        at_ms, _, _, action = heapq.heappop(self._heap)
        self.now_ms = at_ms
        action()
        for check in self.after_each:
            check()

    # -- what the broker does

    @property
    def table(self) -> RoleTable:
        """The newest epoch."""
        return self.tables[-1]

    def publish(self, sender: str, message: Message, msg_id: str | None = None) -> None:
        """Store an event, unless it was stored before, or send a command."""
        route = ROUTES[type(message)]
        if route.family == "tel":
            return
        if route.family == "ev":
            identity = msg_id or message_id(message)
            if identity is not None and identity in self._ids:
                return
            if identity is not None:
                self._ids.add(identity)
            self.events.append(Event(len(self.events) + 1, self.now_ms, message))
            for actor in self.actors.values():
                if actor.alive and isinstance(message, actor.inputs):
                    actor.wake()
            return
        self.commands.append(Command(self.now_ms, sender, message))
        if self.loss and self.random.random() < self.loss:
            return
        if isinstance(message, (Launch, Kill)):
            subject = f"node/{node_of(message.worker)}"
        elif route.family == "cmd.worker":
            subject = f"worker/{message.worker}"  # type: ignore[attr-defined]
        else:
            subject = "trainer"

        def arrive() -> None:
            receiver = self.receivers.get(subject)
            if receiver is not None:
                receiver(message)

        self.soon(arrive)

    def write_table(self, table: RoleTable) -> None:
        """The orchestrator's write. Watchers see this epoch, or a newer one, in their own time."""
        self.tables.append(table)
        for actor in self.actors.values():
            if actor.alive and actor.watches:
                actor.table_soon()

    def of(self, kind: type[Any]) -> list[Any]:
        """All events of a kind, in order."""
        return [event.message for event in self.events if isinstance(event.message, kind)]


class Actor:
    """A process with a name, a place in the event stream, and a life that can end. Subclasses say what it does."""

    watches = False  # the role table
    inputs: tuple[type[Message], ...] = ()

    def __init__(self, world: World, name: str, tick_ms: int = 200) -> None:
        self.world = world
        self.name = name
        self.alive = False
        self.cursor = 0
        self._life = 0
        self._tick_ms = tick_ms
        self._woken = False
        world.actors[name] = self

    # -- life

    def start(self) -> None:
        """Begin, or begin again, from what is durable."""
        assert not self.alive
        self.alive = True
        self._life += 1
        self._woken = False
        self.restore()
        self.wake()
        if self.watches and self.world.tables:
            self.table_soon()
        self._tick_later(self.world.random.randint(0, self._tick_ms))

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = False
        self._life += 1

    def restart(self, after_ms: int = 300) -> None:
        """Die now, live again after a while."""
        if self.alive:
            self.kill()
        life = self._life
        self.world.later(after_ms, lambda: self.start() if self._life == life else None)

    def alive_only(self, action: Callable[[], None]) -> Callable[[], None]:
        """The action, if this life has not ended by then."""
        life = self._life
        return lambda: action() if self._life == life else None

    # -- input

    def wake(self) -> None:
        """New events are there."""
        if not self._woken:
            self._woken = True
            self.world.soon(self.alive_only(self._pull))

    def _pull(self) -> None:
        self._woken = False
        while self.alive and self.cursor < len(self.world.events):
            event = self.world.events[self.cursor]
            self.cursor += 1
            if isinstance(event.message, self.inputs):
                self.take(Input(event.at_ms, event.message, event.seq))

    def table_soon(self) -> None:
        self.world.soon(self.alive_only(lambda: self.take(Input(self.world.now_ms, self.world.table))))

    def _tick_later(self, delay_ms: int) -> None:
        def tick() -> None:
            self.take(Input(self.world.now_ms, Tick()))
            if self.alive:
                self._tick_later(self._tick_ms)

        self.world.later(delay_ms, self.alive_only(tick))

    # -- what subclasses do

    def restore(self) -> None:
        """Forget all but what is durable."""

    def take(self, event: Input) -> None:
        """One input."""

    def perform(self, effects: tuple[Any, ...]) -> None:
        """Effects of a core, the shell's way."""
        for effect in effects:
            match effect:
                case Send(message, msg_id):
                    self.world.publish(self.name, message, msg_id)
                case Note():
                    self.world.notes.append((self.world.now_ms, self.name, effect))
                case Refuse(reason):
                    self.world.refusals.append((self.name, reason))
                case Reply():
                    raise AssertionError("no actor here answers requests")
                case other:
                    raise AssertionError(f"unknown effect {other}")


class CoreActor(Actor):
    """A control service: a core under a host that writes a checkpoint before its effects."""

    def __init__(self, world: World, core: Any, *, watches: bool) -> None:
        super().__init__(world, core.name)
        self.core = core
        self.inputs = tuple(core.inputs)
        self.watches = watches
        self.state = core.initial()
        self._saved: tuple[bytes, int] | None = None

    def restore(self) -> None:
        self.state, self.cursor = self.core.initial(), 0
        if self._saved is not None:
            self.state = msgspec.msgpack.decode(self._saved[0], type=self.core.state_type)
            self.cursor = self._saved[1]

    def take(self, event: Input) -> None:
        before = self.state
        self.state, effects = self.core.step(before, event)
        says = any(isinstance(effect, Send) and ROUTES[type(effect.message)].durable for effect in effects)
        if (event.seq or says) and self.state is not before:
            self._saved = msgspec.msgpack.encode(self.state), self.cursor
        self.perform(effects)
