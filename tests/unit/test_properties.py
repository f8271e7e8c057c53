"""Property tests: what must hold for every input of a shape, not for chosen ones.

Beside the ones that live with their subject: plans against brute force and waves (`test_plan.py`), choices, gate and records
(`test_decision_engine.py`), batches and staleness for any order of events (`test_pipeline_scheduler.py`), resumed prefixes for
any mishaps (`test_request_state.py`), the orchestrator's invariants (`test_orchestrator_random.py`).
"""

from __future__ import annotations

import enum
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect as mi

import messages
from messages.agent import RolloutTask
from messages.decision_engine import BatchProgress, BudgetChanged, Leave, WorkloadProfile
from messages.envelope import BadBody, Message, NotAMessage, UndecodableMessage, UnknownKind, decode, encode, kind_of
from messages.ids import Activity, Role, RoleGeneration, Stage, Zone
from messages.monitor import DecisionRecord
from messages.pipeline_scheduler import StepFinished, TrajectoryCompleted, WeightsPublished
from messages.subjects import ROUTES, decode_on, message_id, subject_of
from pearl_state.model import (
    RESIDENCY_TRANSITIONS,
    ROLLOUT_ROLES,
    ROW_TRANSITIONS,
    IllegalTransition,
    Move,
    Pair,
    Residency,
    RoleTable,
    Row,
    change,
    toggle,
)
from pearl_state.plan import Counts, choose_members, fit, minimal_change
from services.decision_engine.config import Config as DecisionConfig
from services.decision_engine.core import DecisionEngineCore
from services.decision_engine.makespan import borrowing_pays
from services.jobfile import DecisionSection
from services.pipeline_scheduler.config import Config as PipelineConfig
from services.pipeline_scheduler.core import PipelineSchedulerCore
from services.runtime.core import Input, Send, Tick
from services.simulator.faults.check_decisions import explain
from services.simulator.faults.check_plans import fewest_changes
from services.simulator.faults.history import History
from services.simulator.faults.record import ActorBegan, ActorEnded, FaultBegan, FaultEnded
from tests.unit.fault_story import JOB, row

KINDS = messages.envelope.registry()
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# --- envelope

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
INTEGERS = st.integers(-(2**63), 2**63 - 1)


def values(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Whatever a field of this type may hold."""
    match kind:
        case mi.IntType():
            return INTEGERS
        case mi.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case mi.BoolType():
            return st.booleans()
        case mi.StrType():
            return TEXT
        case mi.NoneType():
            return st.none()
        case mi.EnumType():
            members: list[enum.Enum] = list(kind.cls)
            return st.sampled_from(members)
        case mi.StructType():
            return st.fixed_dictionaries({each.name: values(each.type) for each in kind.fields}).map(
                lambda fields: kind.cls(**fields)
            )
        case mi.VarTupleType():
            return st.lists(values(kind.item_type), max_size=3).map(tuple)
        case mi.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case mi.ListType():
            return st.lists(values(kind.item_type), max_size=3)
        case mi.DictType():
            return st.dictionaries(TEXT, values(kind.value_type), max_size=3)
        case mi.UnionType():
            return st.one_of(*map(values, kind.types))
        case _:
            raise AssertionError(f"no values for {kind}")


def any_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    fields = {field.name: values(mi.type_info(field.type)) for field in msgspec.structs.fields(kind)}
    return st.fixed_dictionaries(fields).map(lambda chosen: kind(**chosen))


ANY = st.sampled_from(sorted(KINDS)).flatmap(lambda tag: any_of(KINDS[tag]))


@SETTINGS
@given(ANY)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    data = encode(message)
    assert kind_of(data) == type(message).__struct_config__.tag
    assert decode(data, *KINDS.values()) == message
    assert (data[:1] == b"{") is not message.bulk, "the first byte tells the two encodings apart"


NO_NUMBERS = st.sampled_from((math.nan, math.inf, -math.inf))


def poisoned(kind: mi.Type) -> st.SearchStrategy[Any] | None:
    """Values of this type in which some float is no number; None for a type without floats."""
    match kind:
        case mi.FloatType():
            return NO_NUMBERS
        case mi.StructType():
            bad = {each.name: found for each in kind.fields if (found := poisoned(each.type)) is not None}
            good = {each.name: values(each.type) for each in kind.fields}
            cases = [st.fixed_dictionaries({**good, name: each}) for name, each in bad.items()]
            return st.one_of(cases).map(lambda fields: kind.cls(**fields)) if cases else None
        case mi.VarTupleType() | mi.ListType():
            item = poisoned(kind.item_type)
            if item is None:
                return None
            few = st.lists(values(kind.item_type), max_size=3)
            made = st.tuples(few, item, few).map(lambda parts: [*parts[0], parts[1], *parts[2]])
            return made.map(tuple) if isinstance(kind, mi.VarTupleType) else made
        case mi.DictType():
            item = poisoned(kind.value_type)
            return None if item is None else st.dictionaries(TEXT, item, min_size=1, max_size=3)
        case mi.UnionType():
            cases = [found for each in kind.types if (found := poisoned(each)) is not None]
            return st.one_of(cases) if cases else None
        case _:
            return None


FLOATS = [
    (kind, field.name, bad)
    for kind in KINDS.values()
    for field in msgspec.structs.fields(kind)
    if (bad := poisoned(mi.type_info(field.type))) is not None
]


@pytest.mark.parametrize(
    ("kind", "field", "bad"),
    FLOATS,
    ids=lambda each: getattr(each, "__name__", str(each) if isinstance(each, str) else ""),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_float_that_is_no_number_is_refused(
    kind: type[Message], field: str, bad: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    """In MessagePack, which can say it, and in what lax JSON writers make of it."""
    message = msgspec.structs.replace(data.draw(any_of(kind)), **{field: data.draw(bad)})
    packed = msgspec.msgpack.encode(message)
    text = json.dumps(msgspec.to_builtins(message))  # NaN, Infinity
    for each in (packed, text.encode(), text.replace("Infinity", "1e999").encode()):
        with pytest.raises(UndecodableMessage):
            decode(each, kind)
        with pytest.raises(UndecodableMessage):
            decode(each, *KINDS.values())


def test_the_floats_of_messages_are_found() -> None:
    found = {(kind.__name__, field) for kind, field, _ in FLOATS}
    assert {("TurnFinished", "env_s"), ("TokenChunk", "logprobs"), ("WorkloadProfile", "costs")} <= found
    assert {("DecisionRecord", "candidates"), ("DecisionRecord", "incumbent")} <= found  # inside other types


@SETTINGS
@given(ANY, TEXT, st.one_of(INTEGERS, TEXT, st.none()))
def test_a_field_that_a_newer_sender_adds_is_ignored(message: Message, name: str, value: object) -> None:
    codec = msgspec.msgpack if message.bulk else msgspec.json
    fields = codec.decode(codec.encode(message))
    if name in fields:
        return
    fields[name] = value
    assert decode(codec.encode(fields), type(message)) == message


@SETTINGS
@given(ANY, st.data())
def test_a_receiver_takes_its_own_kinds_whole_and_no_others(message: Message, data: st.DataObject) -> None:
    encoded = encode(message)
    others = [kind for kind in KINDS.values() if kind is not type(message)]
    with pytest.raises(UnknownKind):
        decode(encoded, *others)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises((NotAMessage, BadBody)):
        decode(encoded[:cut], type(message))


@SETTINGS
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_the_documented_error(data: bytes) -> None:
    try:
        decode(data, *KINDS.values())
    except UndecodableMessage as error:
        assert error.reason


@SETTINGS
@given(ANY)
def test_a_message_has_one_subject_and_its_id_tells_it_from_others(message: Message) -> None:
    route = ROUTES.get(type(message))
    if route is None or route.family == "reply":
        return
    identity = message_id(message)
    assert (identity is None) is (route.ids is None)
    if route.family not in ("gen",):
        subject = subject_of("job", message)
        assert decode_on("job", subject, encode(message), type(message)) == message


# --- the role model

MOVES = st.lists(
    st.tuples(
        st.sampled_from(Move),
        st.one_of(st.none(), st.sampled_from(ROLLOUT_ROLES)),
        st.one_of(st.none(), st.integers(0, 30)),
        st.booleans(),
    ),
    max_size=40,
)


@SETTINGS
@given(st.sampled_from((Zone.RESERVED, Zone.OVERLAP, Zone.TRAINING)), MOVES)
def test_a_row_moves_as_the_table_says_and_its_fences_never_fall(zone: Zone, moves: list[Any]) -> None:
    held = row("t0-t0" if zone is Zone.TRAINING else "r0-w0", zone)
    for move, role, generation, same_process in moves:
        before = held
        try:
            fence = None if generation is None else RoleGeneration(generation)
            held = change(held, move, role=role, generation=fence, same_process=same_process)
        except IllegalTransition:
            assert held is before, "an illegal move changes nothing"
            continue
        assert ROW_TRANSITIONS[move, (before.activity, before.stage)] == (held.activity, held.stage)
        assert held.incarnation >= before.incarnation
        assert held.role_generation >= before.role_generation
        assert (held.gpus, held.zone, held.worker) == (before.gpus, before.zone, before.worker)
        assert (held.role is Role.TRAINING) is (zone is Zone.TRAINING)
        if held.activity is Activity.ACTIVE and zone is not Zone.TRAINING:
            assert before.stage in (Stage.PREPARED, Stage.SWITCHING), "nobody serves without having been prepared"


@SETTINGS
@given(st.lists(st.sampled_from([each for each in Residency if each is not Residency.UNKNOWN]), max_size=40))
def test_every_way_between_training_and_rollout_leads_through_free(steps: list[Residency]) -> None:
    pair = Pair(overlap="t0-w0", training="t0-t0")  # type: ignore[arg-type]
    since_free = [pair.residency]
    for step in steps:
        try:
            moved = toggle(pair, step)
        except IllegalTransition:
            assert (pair.residency, step) not in RESIDENCY_TRANSITIONS
            continue
        pair = moved
        since_free = [step] if step is Residency.FREE else [*since_free, step]
        training = {Residency.TRAINING, Residency.RELEASING} & set(since_free)
        rollout = {Residency.ACTIVATING, Residency.ROLLOUT, Residency.DRAINING} & set(since_free)
        assert not (training and rollout), since_free


# --- plans, by the checker's own brute force


@SETTINGS
@given(
    st.lists(
        st.tuples(st.sampled_from(("active", "inactive", "switching")), st.sampled_from(ROLLOUT_ROLES)),
        min_size=1,
        max_size=5,
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
)
def test_a_plan_is_as_small_as_any_placement(workers: list[tuple[str, Role]], wanted: tuple[int, int, int]) -> None:
    rows: list[Row] = []
    for number, (condition, role) in enumerate(workers):
        held = row(f"r0-w{number}", Zone.RESERVED, incarnation=1)
        activity, stage = {
            "active": (Activity.ACTIVE, Stage.NONE),
            "inactive": (Activity.INACTIVE, Stage.NONE),
            "switching": (Activity.TRANSITIONING, Stage.SWITCHING),
        }[condition]
        rows.append(msgspec.structs.replace(held, role=role, activity=activity, stage=stage))
    counts = fit(Counts(*wanted), len(rows))
    members = choose_members(rows, {each.worker for each in rows}, counts)
    plan = minimal_change(rows, members, counts)
    kinds = tuple(
        (None, False) if condition == "inactive" else (role, condition == "switching") for condition, role in workers
    )
    assert plan.d_worker + plan.d_role == fewest_changes(kinds, (counts.prefill, counts.decode, counts.colocated))


# --- the gate and the decision record, by the checker's own formulas

POSITIVE = st.floats(0.01, 1e4)


@SETTINGS
@given(st.integers(0, 100), st.integers(1, 100), POSITIVE, POSITIVE, st.floats(0, 1e4), st.floats(0, 1e4))
def test_the_gate_opens_for_more_work_and_closes_for_more_cost(
    remaining: int, batch: int, dedicated_s: float, full_s: float, toggle_s: float, more: float
) -> None:
    opens = borrowing_pays(remaining, batch, dedicated_s, full_s, toggle_s)
    if full_s >= dedicated_s or remaining == 0:
        assert not opens, "nothing to win"
    if opens:
        assert borrowing_pays(remaining + 1, batch, dedicated_s, full_s, toggle_s)
        assert borrowing_pays(remaining, batch, dedicated_s + more, full_s, toggle_s)
    else:
        assert not borrowing_pays(remaining, batch, dedicated_s, full_s, toggle_s + more)


PROFILES = st.builds(
    WorkloadProfile,
    train_step=st.integers(1, 9),
    B=st.integers(1, 256),
    S=st.floats(1, 60),
    r=st.floats(1, 2_000),
    dL=st.floats(0, 4_000),
    theta=st.floats(0, 4),
    A_s=st.floats(0, 0.1),
    b_s=st.floats(0, 0.01),
    t_prefill_s=st.floats(0, 1e-3),
    T_over_s=st.floats(0, 5),
    T_env_s=st.floats(0, 600),
    kv_bytes_per_token=st.floats(0, 1e6),
    bandwidth_bytes_per_s=st.floats(1e6, 1e12),
    kv_bytes_per_trajectory=st.floats(0, 1e10),
    kv_capacity_bytes_per_worker=st.floats(1e8, 1e12),
    costs=st.dictionaries(st.sampled_from(("activate", "deactivate")), st.floats(0, 50), max_size=2),
)
BUDGETS = st.builds(lambda dedicated, overlap, training: (dedicated, overlap, training),
                    st.integers(0, 6), st.integers(0, 3), st.booleans())  # fmt: skip


@SETTINGS
@given(
    st.lists(st.one_of(PROFILES, BUDGETS, st.integers(0, 64)), min_size=1, max_size=12),
    st.floats(0, 0.3),
    st.floats(0, 0.3),
    st.floats(0, 0.5),
    st.booleans(),
)
def test_every_decision_follows_from_its_record_by_formulas_written_anew(
    events: list[Any], ratio: float, mode: float, growth: float, lending: bool
) -> None:
    section = DecisionSection(
        ratio_threshold=ratio,
        mode_threshold=mode,
        growth_threshold=growth,
        lending=lending,
        disaggregation=True,
        toggle_guess_s=1.0,
    )
    core = DecisionEngineCore(DecisionConfig.of(msgspec.structs.replace(JOB, decision=section)))
    state, budgets = core.initial(), 0
    for number, event in enumerate(events):
        message: Message
        match event:
            case (dedicated, overlap, training):
                budgets += 1
                message = BudgetChanged(
                    budget_id=budgets,
                    dedicated=tuple(f"r0-w{index}" for index in range(dedicated)),  # type: ignore[arg-type]
                    overlap=() if training else tuple(f"t0-w{index}" for index in range(overlap)),  # type: ignore[arg-type]
                    leaving=(Leave("t0-w0", 5),) if training and overlap else (),  # type: ignore[arg-type]
                    training_batch=0 if training else None,
                    cause="",
                )
            case int(remaining):
                message = BatchProgress(batch=0, size=64, done=64 - remaining, remaining=remaining)
            case profile:
                message = profile
        state, effects = core.step(state, Input(number, message, number + 1))
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, DecisionRecord):
                assert list(explain(effect.message)) == []


# --- staleness


@SETTINGS
@given(st.integers(0, 3), st.booleans(), st.lists(st.integers(0, 60), max_size=60), st.data())
def test_no_task_asks_for_less_than_the_bound_and_none_comes_too_early(
    staleness: int, early_start: bool, order: list[int], data: st.DataObject
) -> None:
    """Trajectories end in any order, versions come when they come, and the scheduler may be restarted in between."""
    pipeline = msgspec.structs.replace(
        JOB.pipeline, staleness=staleness, early_start=early_start, train_steps=6, batch_trajectories=4, group_size=2
    )
    core = PipelineSchedulerCore(PipelineConfig.of(msgspec.structs.replace(JOB, pipeline=pipeline)))
    state, open_tasks, published, seq = core.initial(), list[RolloutTask](), -1, 0

    def step(message: object) -> None:
        nonlocal state, seq
        seq += 1
        state, effects = core.step(state, Input(seq * 10, message, seq))
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=core.state_type)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, RolloutTask):
                task = effect.message
                assert task.min_version == max(0, task.batch - staleness)
                assert published >= task.batch - staleness, "its version exists"
                open_tasks.append(task)

    def serve(version: int) -> None:
        nonlocal published
        published = version
        step(WeightsPublished(version=version, uri="", manifest_sha256="", bytes=1))  # type: ignore[arg-type]
        active = row("r0-w0", Zone.RESERVED, activity=Activity.ACTIVE, incarnation=1, version=version)
        step(RoleTable(job="story", epoch=seq, rows=(active,), policy_version=version))  # type: ignore[arg-type]

    serve(0)
    for choice in order:
        if state.begun is not None and data.draw(st.booleans()):
            batch = state.begun
            step(
                StepFinished(
                    batch=batch,
                    version=batch + 1,  # type: ignore[arg-type]
                    train_s=1.0,
                    trained_tokens=1,
                    reward_mean=0.0,
                    reward_std=0.0,
                    loss=0.0,
                    grad_norm=0.0,
                    zero_variance_groups=0,
                )
            )
            serve(batch + 1)
        elif open_tasks:
            task = open_tasks.pop(choice % len(open_tasks))
            version = max(int(task.min_version), min(published, task.batch))
            step(
                TrajectoryCompleted(
                    trajectory=task.trajectory,
                    group=task.group,
                    batch=task.batch,
                    retry=task.retry,
                    status="completed" if choice % 7 else "failed",
                    reward=0.0,
                    turns=0,
                    generated_tokens=0,
                    min_version=version,  # type: ignore[arg-type]
                    max_version=version,  # type: ignore[arg-type]
                    journal=(),
                    env_s=0.0,
                    wall_s=0.0,
                )
            )
        else:
            step(Tick())


# --- what excuses a late return

SPANS = st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 3_000), st.sampled_from("ab")), max_size=6)


@SETTINGS
@given(SPANS, st.integers(0, 8_000), st.integers(0, 4_000))
def test_time_excused_is_within_the_span_and_counts_overlaps_once(
    outages: list[tuple[int, int, str]], begin_ms: int, length_ms: int
) -> None:
    history = History(JOB)
    events: list[tuple[int, Any]] = []
    for number, (start, length, actor) in enumerate(outages):
        events.append((start, FaultBegan(start, number, "freeze", actor, "")))
        events.append((start + length, FaultEnded(start + length, number)))
    for _, seen in sorted(events, key=lambda entry: entry[0]):
        history.see(seen)
    one = history.excused_ms(("a",), begin_ms, begin_ms + length_ms)
    both = history.excused_ms(("a", "b"), begin_ms, begin_ms + length_ms)
    assert 0 <= one <= both <= length_ms
    assert history.excused_ms(("c",), begin_ms, begin_ms + length_ms) == 0


def test_a_restart_ends_an_outage() -> None:
    history = History(JOB)
    for seen in (ActorBegan(0, "x", 1), ActorEnded(100, "x"), ActorBegan(200, "x", 2), ActorEnded(9_000, "x")):
        history.see(seen)
    assert history.excused_ms(("x",), 0, 5_000) == 1_600, "the outage, and the time to settle after it"
