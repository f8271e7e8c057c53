"""The decision engine's core: what it answers, what it holds back, what it refuses."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages.decision_engine import BatchProgress, BudgetChanged, Leave, WorkloadProfile
from messages.envelope import decode, encode
from messages.ids import Activity, Epoch, Gpu, Mode, NodeId, Role, Stage, WorkerId, Zone
from messages.monitor import DecisionRecord
from messages.orchestrator import TargetConfiguration
from pearl_state.model import RoleTable, Row
from services.decision_engine.choose import Policy, Running, choose
from services.decision_engine.command import decide
from services.decision_engine.config import Config
from services.decision_engine.core import DecisionEngineCore, State
from services.decision_engine.decide import answer, question_of
from services.jobfile import ConfigError, DecisionSection, JobFile, load
from services.profile import KEYS, ProfileError, cold_start, parse_profile, read_profile
from services.runtime.core import Effects, Input, Refuse, Send, Tick

PROFILE = WorkloadProfile(
    train_step=0,
    B=64,
    S=108.0,
    r=212.0,
    dL=9500.0,
    theta=2.45,
    A_s=8.4e-3,
    b_s=0.51e-3,
    t_prefill_s=30e-6,
    T_over_s=3.75,
    T_env_s=26.0,
    kv_bytes_per_token=147456.0,
    bandwidth_bytes_per_s=81e9,
    kv_bytes_per_trajectory=3.67e9,
    kv_capacity_bytes_per_worker=90e9,
)
GOOD = {key: getattr(PROFILE, key) for key in KEYS}


def core(**policy: object) -> DecisionEngineCore:
    lending = bool(policy.pop("lending", False))
    return DecisionEngineCore(
        Config(policy=msgspec.structs.replace(Policy(), **policy), cold_start=PROFILE, lending=lending)
    )


def budget(number: int, workers: int, overlap: int = 0, training: int | None = None) -> BudgetChanged:
    return BudgetChanged(
        budget_id=number,
        dedicated=tuple(WorkerId(f"n-w{index}") for index in range(workers)),
        overlap=tuple(WorkerId(f"t-w{index}") for index in range(overlap)),
        leaving=(),
        training_batch=training,
        cause="test",
    )


def sent(effects: Effects, kind: type) -> list:
    return [each.message for each in effects if isinstance(each, Send) and isinstance(each.message, kind)]


def test_every_budget_is_answered_with_a_target_and_a_record() -> None:
    engine = core(impossible="decision.disaggregation is off")
    state, effects = engine.step(engine.initial(), Input(0, budget(1, 4)))
    (target,), (record,) = sent(effects, TargetConfiguration), sent(effects, DecisionRecord)
    assert (target.mode, target.colocated, target.usable) == (Mode.COLOCATED, 4, budget(1, 4).dedicated)
    assert record.decision_id == target.decision_id and len(record.candidates) == 4
    assert all("disaggregation is off" in each.reason for each in record.candidates[1:])
    assert (record.borrow, record.borrow_reason) == (False, "lending is not enabled")
    state, effects = engine.step(state, Input(1, msgspec.structs.replace(budget(2, 4), training_batch=3)))
    (again,) = sent(effects, TargetConfiguration)
    assert again.decision_id != target.decision_id and again.training_batch == 3
    assert not sent(effects, DecisionRecord)[0].changed
    assert decode(encode(record), DecisionRecord) == record


def test_a_repeated_or_older_budget_changes_nothing() -> None:
    engine = core()
    state, _ = engine.step(engine.initial(), Input(0, budget(2, 4)))
    for number in (2, 1):
        again, effects = engine.step(state, Input(1, budget(number, 1)))
        assert again == state and not sent(effects, TargetConfiguration)


def test_no_worker_pauses_rollout_and_the_next_one_resumes_it() -> None:
    engine = core()
    leaving = (Leave(WorkerId("n-w0"), 0),)
    state, effects = engine.step(engine.initial(), Input(0, msgspec.structs.replace(budget(1, 0), leaving=leaving)))
    (target,) = sent(effects, TargetConfiguration)
    assert (target.mode, target.usable, target.leaving) == (Mode.PAUSED, (), leaving)
    _, effects = engine.step(state, Input(1, budget(2, 2)))
    assert sent(effects, TargetConfiguration)[0].colocated == 2


def test_a_profile_is_answered_only_if_the_choice_changes() -> None:
    engine = core()
    state, effects = engine.step(engine.initial(), Input(0, budget(1, 8)))
    assert (sent(effects, TargetConfiguration)[0].prefill, sent(effects, TargetConfiguration)[0].decode) == (3, 5)
    state, effects = engine.step(state, Input(1, msgspec.structs.replace(PROFILE, train_step=1)))
    assert not effects and state.profile is not None
    slow_prefill = msgspec.structs.replace(PROFILE, train_step=2, t_prefill_s=90e-6)
    state, effects = engine.step(state, Input(2, slow_prefill))
    (target,) = sent(effects, TargetConfiguration)
    assert target.prefill > 3 and target.budget_id == 1


def test_a_profile_before_any_budget_is_kept() -> None:
    engine = core()
    state, effects = engine.step(engine.initial(), Input(0, msgspec.structs.replace(PROFILE, train_step=5)))
    assert not effects and state.profile is not None and state.profile.train_step == 5
    older, _ = engine.step(state, Input(0, PROFILE))
    assert older == state


@pytest.mark.parametrize(
    "message",
    [
        msgspec.structs.replace(PROFILE, train_step=1, A_s=-1.0),
        msgspec.structs.replace(PROFILE, train_step=1, S=float("nan")),
        msgspec.structs.replace(PROFILE, train_step=1, B=0),
        msgspec.structs.replace(PROFILE, train_step=1, sample=((5, 5, 5), ())),
        msgspec.structs.replace(PROFILE, train_step=1, sample=((5, 5, 5, 5),)),
        msgspec.structs.replace(PROFILE, train_step=1, sample=((5, 5, -5),)),
        msgspec.structs.replace(PROFILE, train_step=1, sample=((2**70, 5, 5),)),
        msgspec.structs.replace(budget(1, 2), overlap=(WorkerId("n-w0"),)),
        BatchProgress(batch=0, size=0, done=0, remaining=0),
        BatchProgress(batch=0, size=4, done=-1, remaining=0),
        "nonsense",
    ],
)
def test_nonsense_is_refused_and_changes_nothing(message: object) -> None:
    engine = core()
    state, effects = engine.step(engine.initial(), Input(0, message))
    assert state == engine.initial() and [type(each) for each in effects] == [Refuse]


def test_growth_that_wins_too_little_is_held_back() -> None:
    policy = Policy(growth_threshold=0.05, impossible="colocated only")
    running = Running(mode=Mode.COLOCATED, prefill=0, decode=0, colocated=15)
    held = choose(PROFILE, 16, running, policy)
    assert held.chosen.colocated == 15 and "not worth" in held.reason
    small = Running(mode=Mode.COLOCATED, prefill=0, decode=0, colocated=2)
    assert choose(PROFILE, 4, small, policy).chosen.colocated == 4


def test_a_shrink_keeps_the_roles_that_the_table_shows() -> None:
    engine = core(ratio_threshold=1.0, mode_threshold=1.0)
    state, _ = engine.step(engine.initial(), Input(0, budget(1, 8)))
    roles = [Role.PREFILL] * 3 + [Role.DECODE] * 5
    rows = tuple(
        Row(
            worker=WorkerId(f"n-w{index}"),
            gpus=(Gpu(NodeId("n"), index),),
            zone=Zone.RESERVED,
            role=role,
            activity=Activity.ACTIVE,
            stage=Stage.NONE,
        )
        for index, role in enumerate(roles)
    )
    state, effects = engine.step(state, Input(1, RoleTable(job="j", epoch=Epoch(3), rows=rows)))
    assert not effects
    _, effects = engine.step(state, Input(2, budget(2, 7)))  # n-w7, a decode worker, left
    (target,) = sent(effects, TargetConfiguration)
    assert (target.prefill, target.decode) == (3, 4)


def test_lending_borrows_only_while_training_is_idle_and_it_pays() -> None:
    engine = core(lending=True)
    state, effects = engine.step(engine.initial(), Input(0, budget(1, 2, overlap=8)))
    (target,) = sent(effects, TargetConfiguration)
    assert target.borrow and len(target.usable) == 10
    state, effects = engine.step(state, Input(1, BatchProgress(batch=0, size=64, done=64, remaining=0)))
    assert not sent(effects, TargetConfiguration)[0].borrow
    _, effects = engine.step(state, Input(2, budget(2, 2, overlap=0, training=0)))
    assert not sent(effects, TargetConfiguration)[0].borrow


def test_a_cost_that_shut_the_gate_is_tested_again_after_a_while() -> None:
    engine = core(lending=True)
    slow = {"activate": 1000.0, "deactivate": 500.0}  # one hand-over of a busy machine; lending would win some 600 s
    state, _ = engine.step(engine.initial(), Input(0, budget(1, 2, overlap=8)))
    borrowed: list[int] = []
    costs: list[float] = []
    for step in range(1, 40):
        profile = msgspec.structs.replace(PROFILE, train_step=step, costs=slow)
        state, effects = engine.step(state, Input(step, profile))
        records = sent(effects, DecisionRecord)
        state, effects = engine.step(state, Input(step, budget(2 * step, 2, overlap=0, training=step)))
        state, effects = engine.step(state, Input(step, budget(2 * step + 1, 2, overlap=8)))
        records += sent(effects, DecisionRecord)
        if any(record.borrow for record in records):
            borrowed.append(step)
        costs += [record.toggle_s for record in records]
        for record in records:
            check_explained(record)
    assert costs[0] == 1500.0 and min(costs) >= 0.25 * 1500.0
    assert borrowed and borrowed[0] > 3, "the cost is believed at first, and tested later"
    assert all(later - earlier > 3 for earlier, later in pairwise(borrowed)), "and not all the time"


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(0, 24),
    prefill=st.integers(0, 12),
    decode=st.integers(0, 12),
    colocated=st.integers(0, 12),
    survivors=st.none() | st.tuples(st.integers(0, 12), st.integers(0, 12)),
    thresholds=st.tuples(*[st.floats(0, 1)] * 3),
    scale=st.floats(0.01, 100),
)
def test_a_choice_is_total_and_never_exceeds_the_budget(
    workers: int, prefill: int, decode: int, colocated: int, survivors: object, thresholds: tuple, scale: float
) -> None:
    mode = Mode.COLOCATED if colocated else Mode.DISAGGREGATED if prefill + decode else Mode.PAUSED
    counts = (0, 0, colocated) if colocated else (prefill, decode, 0)
    running = Running(mode=mode, prefill=counts[0], decode=counts[1], colocated=counts[2], survivors=survivors)
    policy = Policy(ratio_threshold=thresholds[0], mode_threshold=thresholds[1], growth_threshold=thresholds[2])
    profile = msgspec.structs.replace(PROFILE, t_prefill_s=PROFILE.t_prefill_s * scale)
    choice = choose(profile, workers, running, policy)
    total = choice.chosen.prefill + choice.chosen.decode + choice.chosen.colocated
    assert total <= workers and (total > 0) == (workers > 0)
    assert choice.chosen.feasible == (workers > 0)
    if choice.mode is Mode.DISAGGREGATED:
        assert choice.chosen.prefill >= 1 and choice.chosen.decode >= 1


def test_the_same_inputs_give_the_same_target_after_a_restart() -> None:
    engine = core()
    state, _ = engine.step(engine.initial(), Input(0, budget(1, 8)))
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State)
    assert engine.step(restored, Input(1, budget(2, 5))) == engine.step(state, Input(1, budget(2, 5)))
    assert engine.step(state, Input(5, Tick())) == (state, ())


def test_decide_as_the_command_prints_it() -> None:
    result = decide(GOOD, 8)
    assert result["chosen"]["mode"] == "disaggregated"
    assert (result["chosen"]["prefill"], result["chosen"]["decode"], result["chosen"]["colocated"]) == (3, 5, 0)
    assert len(result["candidates"]) == 8
    assert set(result["candidates"][0]) == {"prefill", "decode", "colocated", "makespan_s", "feasible", "reason"}
    assert decide(GOOD, 8, disaggregation=False)["chosen"]["mode"] == "colocated"
    assert decide(GOOD, 0) == {
        "chosen": {"mode": "paused", "prefill": 0, "decode": 0, "colocated": 0, "makespan_s": None},
        "candidates": [],
    }
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"thetta": 1.0}, "'thetta' is unknown"),
        ({"theta": None}, "'theta'"),
        ({"theta": True}, "'theta'"),
        ({"theta": "2"}, "'theta'"),
        ({"theta": float("nan")}, "'theta'"),
        ({"theta": 10**400}, "'theta'"),
        ({"theta": -0.1}, "theta = -0.1 is negative"),
        ({"B": 0}, "B must be above 0"),
        ({"B": 1.5}, "'B'"),
        ({"bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s must be above 0"),
    ],
)
def test_decide_names_the_key_that_is_wrong(change: dict, names: str) -> None:
    with pytest.raises(ProfileError, match=names):
        decide({**GOOD, **change}, 4)


def test_decide_names_a_missing_key_and_bad_workers() -> None:
    with pytest.raises(ProfileError, match="'T_env_s' is missing"):
        decide({key: value for key, value in GOOD.items() if key != "T_env_s"}, 4)
    for workers in (-1, 5001, True):
        with pytest.raises(ProfileError, match="workers"):
            decide(GOOD, workers)


def test_all_zero_times_still_decide() -> None:
    zeros = {key: 0 for key in KEYS} | {"B": 1, "bandwidth_bytes_per_s": 1, "kv_capacity_bytes_per_worker": 1}
    assert decide(zeros, 3)["chosen"]["mode"] == "colocated"


def test_cold_start_from_a_file_and_built_in(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert read_profile(path) == parse_profile(GOOD)
    toml = tmp_path / "profile.toml"
    toml.write_text("\n".join(f"{key} = {value}" for key, value in GOOD.items()))
    assert read_profile(toml) == parse_profile(GOOD)
    job = JobFile(decision=DecisionSection(profile=str(path)))
    assert job.pipeline.batch_trajectories == cold_start(job).B and cold_start(job).S == 108.0
    config = Config.of(JobFile())
    assert config.policy.impossible == "decision.disaggregation is off" and not config.lending
    path.write_text("[1]")
    with pytest.raises(ProfileError, match="list"):
        read_profile(path)
    with pytest.raises(ProfileError, match="cannot be read"):
        Config.of(JobFile(decision=DecisionSection(profile=str(tmp_path / "none.json"))))


def record_of(effects: Effects) -> DecisionRecord:
    (record,) = sent(effects, DecisionRecord)
    return decode(encode(record), DecisionRecord)


def check_explained(record: DecisionRecord) -> None:
    """The record alone says what was chosen and why."""
    again = answer(question_of(record))
    assert again.chosen == record.chosen and again.choice.mode is record.mode
    assert again.choice.candidates == record.candidates and again.choice.incumbent == record.incumbent
    assert (again.borrow, again.borrow_reason) == (record.borrow, record.borrow_reason)
    assert again.choice.forced == record.forced and record.reason.endswith(again.choice.reason)
    assert (again.dedicated, again.full) == (record.dedicated, record.full)


SAMPLE = tuple(
    tuple(value for turn in range(turns) for value in (1500 if turn == 0 else 300, 100 + 10 * turn, 400))
    for turns in (3, 5, 8, 4, 6)
)

EVENTS = st.one_of(
    st.tuples(st.just("budget"), st.integers(0, 12), st.integers(0, 6), st.booleans()),
    st.tuples(st.just("profile"), st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.01, 60)),
    st.tuples(st.just("progress"), st.integers(0, 64)),
    st.tuples(st.just("table"), st.lists(st.sampled_from(["prefill", "decode", "colocated"]), max_size=12)),
)


@settings(max_examples=80, deadline=None)
@given(
    events=st.lists(EVENTS, min_size=1, max_size=12),
    policy=st.sampled_from(["planner", "paper", "colocated", "static-pd:1:2", "static-pd:3:1"]),
    rho_max=st.sampled_from([0.95, 1.0]),
)
def test_every_choice_can_be_made_again_from_its_record(events: list, policy: str, rho_max: float) -> None:
    config = Config.of(
        JobFile(decision=DecisionSection(policy=policy, lending=True, disaggregation=True, rho_max=rho_max))
    )
    engine = DecisionEngineCore(msgspec.structs.replace(config, cold_start=PROFILE))
    state = engine.initial()
    for number, event in enumerate(events):
        message: object
        if event[0] == "budget":
            message = budget(number + 1, event[1], event[2], 0 if event[3] else None)
        elif event[0] == "profile":
            costs = {"activate": event[3], "deactivate": event[3] / 2}
            message = msgspec.structs.replace(
                PROFILE,
                train_step=number,
                t_prefill_s=PROFILE.t_prefill_s * event[1],
                b_s=PROFILE.b_s * event[2],
                costs=costs,
                sample=SAMPLE,
            )
        elif event[0] == "progress":
            message = BatchProgress(batch=number, size=64, done=64 - event[1], remaining=event[1])
        else:
            rows = tuple(
                Row(
                    worker=WorkerId(f"n-w{index}"),
                    gpus=(Gpu(NodeId("n"), index),),
                    zone=Zone.RESERVED,
                    role=Role(role),
                    activity=Activity.ACTIVE,
                    stage=Stage.NONE,
                )
                for index, role in enumerate(event[1])
            )
            message = RoleTable(job="j", epoch=Epoch(number), rows=rows)
        state, effects = engine.step(state, Input(60_000 * (number + 1), message))
        for record in sent(effects, DecisionRecord):
            check_explained(decode(encode(record), DecisionRecord))


def test_a_borrow_is_given_back_when_little_is_left_and_does_not_flap() -> None:
    """Deciding again at every mark: what is borrowed stays while it wins more than its return costs (eq. 7, twice)."""
    engine = core(lending=True)
    costs = {"activate": 600.0, "deactivate": 300.0}
    state, _ = engine.step(engine.initial(), Input(0, msgspec.structs.replace(PROFILE, train_step=0, costs=costs)))
    state, effects = engine.step(state, Input(0, budget(1, 2, overlap=8)))
    record = record_of(effects)
    assert record.borrow and record.dedicated is not None and record.full is not None
    assert record.dedicated.makespan_s is not None and record.full.makespan_s is not None
    gain_s = record.dedicated.makespan_s - record.full.makespan_s
    borrowed: list[bool] = []
    for done in range(1, 65):
        state, _ = engine.step(state, Input(done, BatchProgress(batch=0, size=64, done=done, remaining=64 - done)))
        assert state.target is not None
        borrowed.append(state.target.borrow)
    kept = sum(borrowed)
    assert borrowed == [True] * kept + [False] * (64 - kept)  # one return, no borrow after it
    assert (64 - kept) / 64 * gain_s > 300 >= (64 - kept - 1) / 64 * gain_s


def test_fixed_policies_take_what_they_are_told_at_any_number_of_workers() -> None:
    for policy, expected in (
        ("colocated", [(0, 0, 1), (0, 0, 2), (0, 0, 5), (0, 0, 8)]),
        ("static-pd:1:1", [(0, 0, 1), (1, 1, 0), (3, 2, 0), (4, 4, 0)]),
        ("static-pd:1:3", [(0, 0, 1), (1, 1, 0), (1, 4, 0), (2, 6, 0)]),
    ):
        config = Config.of(JobFile(decision=DecisionSection(policy=policy, disaggregation=True)))
        engine = DecisionEngineCore(config)
        state, found = engine.initial(), []
        for number, workers in enumerate((1, 2, 5, 8)):
            state, effects = engine.step(state, Input(number, budget(number + 1, workers)))
            record = record_of(effects)
            found.append((record.chosen.prefill, record.chosen.decode, record.chosen.colocated))
            assert record.policy == policy and record.forced == (workers == 1 and policy != "colocated")
        assert found == expected


@pytest.mark.parametrize("policy", ["static-pd", "static-pd:0:1", "static-pd:1:-1", "best", "static-pd:1:1:1", ""])
def test_a_policy_that_is_none_is_named(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'[decision]\npolicy = "{policy}"\n')
    with pytest.raises(ConfigError, match=r"decision.policy"):
        load(path)


def test_a_fixed_ratio_needs_an_engine_that_disaggregates() -> None:
    with pytest.raises(ConfigError, match="disaggregation"):
        Config.of(JobFile(decision=DecisionSection(policy="static-pd:1:1")))
