"""Which commands a worker process obeys and what it answers."""

from __future__ import annotations

import msgspec

from messages.envelope import Message
from messages.ids import Incarnation, PolicyVersion, RequestId, Role, RoleGeneration, TrajectoryId, WorkerId
from messages.orchestrator import RoleSet, WeightsApplied, WorkerActivated, WorkerDrained, WorkerReleased
from messages.rollout_worker import Activate, Deactivate, Drain, Generate, SetRole, UpdateWeights
from services.rollout_worker.core import (
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
from services.runtime.core import Input, Note, Send

WORKER, INCARNATION = WorkerId("n1-w0"), Incarnation(3)


def fence(generation: int) -> dict[str, object]:
    return {"worker": WORKER, "incarnation": INCARNATION, "role_generation": RoleGeneration(generation)}


def update(version: int, incarnation: int = 3) -> UpdateWeights:
    return UpdateWeights(
        worker=WORKER,
        incarnation=Incarnation(incarnation),
        version=PolicyVersion(version),
        uri="u",
        manifest_sha256="s",
    )


def set_role(generation: int) -> SetRole:
    return SetRole(**fence(generation), role=Role.COLOCATED)


def generate(generation: int, min_version: int = 0) -> Generate:
    return Generate(
        request=RequestId("t/0"),
        trajectory=TrajectoryId("t"),
        attempt=1,
        **fence(generation),
        min_version=PolicyVersion(min_version),
        prompt=[1],
        prefix=[],
        max_new_tokens=1,
        temperature=1.0,
        seed=0,
        stop_ids=[],
        reply="pearl.j.tok.e",
    )


class Process:
    """A core whose engine does what it is told when the test says so."""

    def __init__(self) -> None:
        self.core = RolloutWorkerCore(WORKER, INCARNATION)
        self.state = self.core.initial()

    def __call__(self, event: object) -> list[object]:
        """Facts bare, engine effects as they are, notes left out."""
        before = self.state
        self.state, effects = self.core.step(self.state, Input(0, event))
        assert self.core.step(before, Input(0, event)) == (self.state, effects)
        self.ids = [effect.msg_id for effect in effects if isinstance(effect, Send)]
        return [
            effect.message if isinstance(effect, Send) else effect for effect in effects if not isinstance(effect, Note)
        ]

    def serve(self, version: int = 0, generation: int = 1) -> Process:
        self(update(version))
        self(Loaded(PolicyVersion(version), 5))
        self(set_role(generation))
        self(RoleTaken(Role.COLOCATED, RoleGeneration(generation)))
        assert self.state.serving
        return self


def same(fact: object, kind: type[Message], **fields: object) -> bool:
    return isinstance(fact, kind) and all(getattr(fact, name) == value for name, value in fields.items())


def test_weights_then_role_then_requests():
    process = Process()
    assert process.core.refusal(process.state, generate(0)) == "not serving"
    (load,) = process(update(4))
    assert isinstance(load, Load)
    assert process(update(4)) == []  # loading already
    (applied,) = process(Loaded(PolicyVersion(4), 17))
    assert same(applied, WeightsApplied, version=4, took_ms=17)
    assert process(set_role(2)) == [TakeRole(Role.COLOCATED, RoleGeneration(2))]
    (role,) = process(RoleTaken(Role.COLOCATED, RoleGeneration(2)))
    assert same(role, RoleSet, role_generation=2)
    assert process(set_role(2)) == [role]
    assert process.core.refusal(process.state, generate(2, 4)) == ""
    assert "role generation is 2, not 1" in process.core.refusal(process.state, generate(1))
    assert "version 4 is below 5" in process.core.refusal(process.state, generate(2, 5))
    with_room = msgspec.structs.replace(generate(2, 4), bootstrap_room=7)
    assert "with a room, for role colocated" in process.core.refusal(process.state, with_room)
    for role in (Role.PREFILL, Role.DECODE):
        state = msgspec.structs.replace(process.state, role=role)
        assert process.core.refusal(state, with_room) == ""
        assert f"without a room, for role {role.value}" in process.core.refusal(state, generate(2, 4))


def test_versions_only_rise_and_the_newest_wins():
    process = Process().serve(4)
    for old in (3, 4):
        (applied,) = process(update(old))
        assert same(applied, WeightsApplied, version=4)
    assert len(process(update(5))) == 1
    assert process(update(7)) == process(update(6)) == []
    applied, load = process(Loaded(PolicyVersion(5), 1))
    assert same(applied, WeightsApplied, version=5)
    assert isinstance(load, Load) and load.command.version == 7
    assert same(process(Loaded(PolicyVersion(7), 1))[0], WeightsApplied, version=7)


def test_a_failed_load_is_tried_at_the_next_repetition():
    process = Process()
    process(update(1))
    assert process(Failed("load", "torn")) == []
    assert [type(effect) for effect in process(update(1))] == [Load]


def test_other_incarnations_and_overtaken_generations_are_ignored():
    process = Process().serve(0, generation=5)
    assert process(update(9, incarnation=2)) == process(update(9, incarnation=4)) == []
    assert process(Drain(**fence(4))) == process(Deactivate(**fence(4))) == process(set_role(4)) == []
    assert process.state.serving


def test_a_drain_refuses_at_once_and_is_answered_when_done():
    process = Process().serve()
    assert process(Drain(**fence(2))) == [InterruptAll()]
    assert process.core.refusal(process.state, generate(2)) == "not serving"
    assert process(Drain(**fence(2))) == []
    (drained,) = process(Interrupted(3))
    assert same(drained, WorkerDrained, role_generation=2, interrupted=3)
    assert process(Drain(**fence(2))) == [drained]
    assert process(set_role(3)) == [TakeRole(Role.COLOCATED, RoleGeneration(3))]


def test_a_role_is_not_changed_under_running_requests():
    process = Process().serve(generation=1)
    assert process(set_role(2)) == []
    assert process.state.role_generation == 1


def test_toggling_out_and_in_again_is_answered_anew():
    process = Process().serve(4)
    first = process(update(4))
    ids = process.ids
    process(Drain(**fence(2)))
    process(Interrupted(0))
    assert process(Deactivate(**fence(2))) == [ReleaseMemory(RoleGeneration(2))]
    (released,) = process(MemoryReleased(RoleGeneration(2), 100, 7))
    assert same(released, WorkerReleased, freed_bytes=100, role_generation=2)
    assert process(Deactivate(**fence(2))) == [released]
    assert process(Activate(**fence(2))) == [], "one of the borrow that is over: the GPUs may be training's by now"
    assert process(update(4)) == []  # no memory to put them in
    assert process(Activate(**fence(3))) == [RestoreMemory(RoleGeneration(3))]
    assert process(Activate(**fence(3))) == []
    (activated,) = process(MemoryRestored(RoleGeneration(3), 9))
    assert same(activated, WorkerActivated, role_generation=3, took_ms=9)
    assert [type(effect) for effect in process(update(4))] == [Load]
    assert process(Loaded(PolicyVersion(4), 0)) == first
    assert process.ids != ids  # else the broker would take it for the repetition of the first


def test_a_worker_that_still_serves_is_drained_by_deactivation():
    process = Process().serve()
    assert process(Deactivate(**fence(2))) == [ReleaseMemory(RoleGeneration(2))]
    assert process.core.refusal(process.state, generate(2)) == "not serving"


def test_a_borrow_half_done_is_undone():
    process = Process()
    assert same(process(Activate(**fence(2)))[0], WorkerActivated, role_generation=2)
    process(update(1))
    assert process(Deactivate(**fence(2))) == []  # the memory is being written; the command comes again
    process(Loaded(PolicyVersion(1), 1))
    assert process(Deactivate(**fence(2))) == [ReleaseMemory(RoleGeneration(2))]


def test_state_is_plain_data():
    process = Process().serve()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(process.state), type=type(process.state)) == process.state


def test_an_overlap_worker_begins_without_device_memory() -> None:
    core = RolloutWorkerCore(WORKER, INCARNATION, released=True)
    state = core.initial()
    state, effects = core.step(state, Input(0, update(0)))
    assert not any(isinstance(effect, Load) for effect in effects), "weights come after the activation"
    state, effects = core.step(state, Input(0, Deactivate(**fence(1))))
    (answer,) = effects
    assert isinstance(answer, Send) and isinstance(answer.message, WorkerReleased), "it has nothing to give back"
    assert (answer.message.freed_bytes, answer.message.role_generation) == (0, 1)
    state, effects = core.step(state, Input(0, Activate(**fence(2))))
    assert effects == (RestoreMemory(RoleGeneration(2)),)
    state, effects = core.step(state, Input(0, MemoryRestored(RoleGeneration(2), took_ms=1)))
    (answer,) = effects
    assert isinstance(answer, Send) and isinstance(answer.message, WorkerActivated)
    state, effects = core.step(state, Input(0, update(0)))
    assert effects == (Load(update(0)),)
    _, effects = core.step(state, Input(0, Loaded(PolicyVersion(0), took_ms=1, restored_bytes=7)))
    (applied,) = effects
    assert isinstance(applied, Send) and isinstance(applied.message, WeightsApplied)
    assert applied.message.restored_bytes == 7


def test_what_still_holds_is_said_again_under_the_ids_it_had() -> None:
    """The broker may have lost it; where it has not, it takes it for the repetition that it is."""
    core = RolloutWorkerCore(WORKER, INCARNATION)
    state = core.initial()
    assert core.known_facts(state) == ()
    said: list[Send] = []
    for event in (update(5), Loaded(PolicyVersion(5), 10), set_role(2), RoleTaken(Role.COLOCATED, RoleGeneration(2))):
        state, effects = core.step(state, Input(0, event))
        said += [effect for effect in effects if isinstance(effect, Send)]
    again = core.known_facts(state)
    assert [send.msg_id for send in again] == [send.msg_id for send in said]
    assert [type(send.message) for send in again] == [WeightsApplied, RoleSet]
    state, _ = core.step(state, Input(0, Drain(**fence(3))))
    assert [type(send.message) for send in core.known_facts(state)] == [WeightsApplied], "it serves no more"
