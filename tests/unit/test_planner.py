"""The planner: replays, the queueing network, what is learned, what a change costs, the one trial (docs/decisions.md)."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages.decision_engine import BudgetChanged, WorkloadProfile
from messages.ids import Activity, DecisionId, Epoch, Gpu, Mode, NodeId, Role, Stage, WorkerId, Zone
from messages.monitor import DecisionRecord, Observed
from messages.orchestrator import TargetConfiguration
from pearl_state.model import RoleTable, Row
from services.decision_engine import predict
from services.decision_engine.choose import Choice, Policy, Replays, Running, choose
from services.decision_engine.config import Config, Planner
from services.decision_engine.core import DecisionEngineCore, State
from services.decision_engine.correct import correction, smoothed
from services.decision_engine.decide import answer, question_of
from services.decision_engine.learn import Learned
from services.decision_engine.predict_average import averaged, kept
from services.decision_engine.predict_evidence import MODELS, Evidence, Limits, key_of, model_of
from services.decision_engine.predict_model import Flowed, Grow, Machine, Pipeline, merged
from services.decision_engine.predict_queueing import makespan_s, phases_of
from services.decision_engine.predict_replay import flow, replay
from services.decision_engine.stakes import Life, Stakes
from services.runtime.core import Effects, Input, Send, Tick

MACHINE = Machine(fixed_s=0.01, kv_s=0.0, prefill_s=1e-4, transfer_s=0.0, capacity=1e9, chunk=512, max_running=64)
ONE = ((100, 11, 2.0, 1), (50, 21, 3.0, 1))
"""One trajectory: prompts of 100 and 50 tokens, replies of 11 and 21, environment for 2 and 3 s."""
SAMPLE = tuple(
    tuple(value for turn in range(6 + index % 5) for value in (1200 if turn == 0 else 250, 60 + 30 * (index % 4), 300))
    for index in range(16)
)
PROFILE = WorkloadProfile(
    train_step=0,
    B=32,
    S=10.0,
    r=100.0,
    dL=340.0,
    theta=0.5,
    A_s=8e-3,
    b_s=4e-4,
    t_prefill_s=4e-5,
    T_over_s=0.0,
    T_env_s=3.0,
    kv_bytes_per_token=1e5,
    bandwidth_bytes_per_s=5e10,
    kv_bytes_per_trajectory=3e8,
    kv_capacity_bytes_per_worker=5e10,
    sample=SAMPLE,
)
EVIDENCE = Evidence(sample=SAMPLE, limits=Limits(replay_turns=2000))


def test_one_trajectory_alone_takes_its_stages_one_after_the_other() -> None:
    """Prompt (an iteration's fixed part and its tokens), the other tokens, the environment; nothing is counted twice."""
    alone = replay([ONE], MACHINE, 0, 0, 1)
    prompts_s = 2 * 0.01 + 150e-4
    assert alone.makespan_s == pytest.approx(prompts_s + (10 + 20) * 0.01 + 5.0)
    assert alone.computed == 150
    split = replay([ONE], msgspec.structs.replace(MACHINE, transfer_s=1e-3), 1, 1, 0)
    # The prefill worker does not know what was replied: 11 tokens more. A hand-over is what the decoder lacks.
    assert split.computed == 161
    assert split.makespan_s == pytest.approx(2 * 0.01 + 161e-4 + 0.30 + 5.0 + 0.150, abs=0.02)


def test_prompts_hold_up_decoding_on_a_shared_worker_and_queue_on_a_prefill_worker() -> None:
    steady = ((10, 500, 0.0, 1),)
    heavy = ((5000, 2, 0.0, 1),)
    together = replay([steady, heavy, heavy], MACHINE, 0, 0, 1).ends_s
    apart = replay([steady, heavy, heavy], MACHINE, 1, 1, 0)
    assert together[-1] > 500 * 0.01 + 1.0  # 10,000 prompt tokens take 1 s, on top of 500 iterations
    assert apart.makespan_s < together[-1]
    assert apart.ends_s[0] > 0.5 and apart.ends_s[1] > 1.0  # the second prompt waited for the first


def test_a_prefix_that_was_evicted_is_computed_again() -> None:
    batch = [((1000, 2, 1.0, 1), (10, 2, 0.0, 1))] * 4
    roomy = replay(batch, MACHINE, 0, 0, 1)
    tight = replay(batch, msgspec.structs.replace(MACHINE, capacity=2100), 0, 0, 1)
    rewritten = replay(batch, msgspec.structs.replace(MACHINE, missed=1.0), 0, 0, 1)
    assert roomy.computed == 4 * 1010
    assert tight.computed > 6 * 1000
    assert rewritten.computed == 4 * (1000 + 1012)


def test_more_workers_while_it_runs() -> None:
    batch = [((200, 400, 0.1, 1),)] * 32
    machine = msgspec.structs.replace(MACHINE, kv_s=1e-5, tokens_per_request=10**6, max_running=4)
    alone = replay(batch, machine, 0, 0, 2, in_flight=8)
    helped = replay(batch, machine, 0, 0, 2, in_flight=8, grow=Grow(24, 1.0, 0, 0, 2))
    late = replay(batch, machine, 0, 0, 2, in_flight=8, grow=Grow(24, 1e6, 0, 0, 2))
    assert helped.makespan_s < 0.9 * alone.makespan_s
    assert late.ends_s == alone.ends_s
    assert helped.left_s == alone.ends_s[7]


PIPELINE = Pipeline(size=4, group=2, in_flight=6, ahead=2, train_s=0.0)


def test_batches_that_overlap_are_admitted_as_the_pipeline_does() -> None:
    """At most six trajectories at once, in groups of two, and none of a batch before all but one of the earlier ones are trained."""
    batches = [((10, 101, 0.0, 1),)] * 12
    played = flow(batches, MACHINE, 0, 0, 6, PIPELINE)
    assert [len(batch) for batch in played.ends_s] == [4, 4, 4]
    starts = played.starts_s
    assert starts[0] == (0.0,) * 4 and starts[1][:2] == (0.0, 0.0), "six fit at once"
    assert starts[1][2] >= min(played.ends_s[0]) and starts[1][2] == starts[1][3]
    assert min(starts[2]) >= max(played.ends_s[0]), "the third waits for the first one's training"
    trained = flow(batches, MACHINE, 0, 0, 6, msgspec.structs.replace(PIPELINE, train_s=50.0))
    assert min(trained.starts_s[2]) == pytest.approx(max(trained.ends_s[0]) + 50.0)
    assert trained.begun_s[1] >= trained.begun_s[0] + 50.0
    assert trained.period_s == trained.begun_s[-1] / 3
    assert played.stay_s == pytest.approx(1.0, abs=0.1), "a prompt and a hundred tokens at 10 ms"


def test_a_batch_never_waits_for_a_slot_that_its_own_group_needs() -> None:
    narrow = Pipeline(size=4, group=4, in_flight=1, ahead=1, train_s=1.0)
    assert len(flow([((10, 5, 0.0, 1),)] * 8, MACHINE, 1, 1, 0, narrow).begun_s) == 2


def test_how_long_the_last_ones_stay_is_seen_at_a_random_moment() -> None:
    """One is left from 10 s to 30 s: seen in between, on average 10 s to the end. With all left a batch has just begun."""
    alone = Flowed((30.0,), ((0.0, 0.0),), ((10.0, 30.0),))
    assert alone.left_s(1) == pytest.approx(10.0)
    assert alone.left_s(2) == pytest.approx(30.0)
    assert alone.left_s(9) == alone.left_s(2), "no more are left than there are"
    assert Flowed((5.0,), ((0.0, 0.0),), ((5.0, 5.0),)).left_s(1) == 5.0


@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(
        st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 300), st.floats(0, 5)), min_size=1, max_size=6),
        min_size=1,
        max_size=12,
    ),
    workers=st.tuples(st.integers(0, 3), st.integers(1, 3)),
    capacity=st.floats(100, 1e5),
    running=st.integers(1, 8),
)
def test_every_trajectory_ends_on_whatever_machine(
    batch: list, workers: tuple[int, int], capacity: float, running: int
) -> None:
    """Also where a context is larger than the KV cache; and no trajectory ends before its environment alone would."""
    machine = msgspec.structs.replace(MACHINE, capacity=capacity, max_running=running, kv_s=1e-7, transfer_s=1e-6)
    turns = [tuple((new, reply, env_s, 1) for new, reply, env_s in each) for each in batch]
    prefill, others = workers
    found = replay(turns, machine, prefill, others if prefill else 0, 0 if prefill else others)
    assert len(found.ends_s) == len(batch) and list(found.ends_s) == sorted(found.ends_s)
    assert found.makespan_s >= max(sum(env_s for _, _, env_s in each) for each in batch) - 1e-6
    assert found == replay(turns, machine, prefill, others if prefill else 0, 0 if prefill else others)


def test_merged_turns_have_the_same_sums() -> None:
    assert merged(ONE, 2) == ((150, 32, 5.0, 2),)
    assert merged(ONE, 1) is ONE


@given(st.integers(1, 60), st.floats(1, 24))
def test_merged_turns_are_all_about_as_long(count: int, most: float) -> None:
    turns = [(index, 1, 0.5, 1) for index in range(count)]
    found = merged(turns, most)
    assert sum(new for new, _, _, _ in found) == sum(range(count))
    lengths = [parts for _, _, _, parts in found]
    assert sum(lengths) == count and max(lengths) - min(lengths) <= 1
    assert len(found) - 1 < count / most <= len(found)


def test_the_queueing_network_agrees_with_the_replay_where_nothing_queues() -> None:
    batch = [tuple((100, 50, 1.0, 1) for _ in range(8))] * 6
    machine = msgspec.structs.replace(MACHINE, kv_s=1e-6)
    for counts in ((0, 0, 6), (6, 6, 0)):
        ranked = makespan_s(phases_of(batch), machine, *counts)
        assert ranked == pytest.approx(replay(batch, machine, *counts).makespan_s, rel=0.1)


def test_what_was_measured_corrects_its_own_configuration_most() -> None:
    learned = correction([Observed(2, 6, 0, 100.0, 130.0), Observed(2, 6, 0, 100.0, 130.0)])
    own, near, far, other = (learned.factor(c) for c in ((2, 6, 0), (3, 5, 0), (7, 1, 0), (0, 0, 8)))
    assert 1.2 < own < 1.31 and own > near > far > other > 1.1  # constants that are wrong are wrong for all
    assert learned.spread((2, 6, 0)) < learned.spread((7, 1, 0)) < learned.spread((0, 0, 8))
    assert correction([]).factor((1, 1, 0)) == 1.0
    for nothing in (Observed(1, 1, 0, 0.0, 5.0), Observed(1, 1, 0, 5.0, 0.0)):
        assert correction([nothing]).factor((1, 1, 0)) == 1.0


def test_the_newest_measurement_counts_most() -> None:
    counts = (2, 6, 0)
    slow, fast = Observed(*counts, 100.0, 150.0), Observed(*counts, 100.0, 100.0)
    later_slow, later_fast = (correction(each).factor(counts) for each in ([fast, slow], [slow, fast]))
    assert later_fast < later_slow


def test_the_time_between_ends_of_batches_that_overlap_says_less() -> None:
    counts = (2, 6, 0)
    measured = [Observed(*counts, 100.0, 130.0)]
    apart, overlapping = correction(measured), correction(measured, overlap=True)
    assert 1.0 < overlapping.factor(counts) < apart.factor(counts)
    assert overlapping.spread(counts) > apart.spread(counts)


@pytest.mark.parametrize("counts", [(2, 0, 0), (0, 2, 0), (0, 0, 0), (2, 0, 3), (0, 2, 3)])
def test_a_measurement_of_workers_that_cannot_serve_by_themselves_says_nothing(counts: tuple[int, int, int]) -> None:
    sound = Observed(2, 6, 0, 100.0, 130.0)
    learned = correction([Observed(*counts, 100.0, 300.0), sound])
    assert learned == correction([sound])
    assert learned.factor((7, 1, 0)) > 1.0


def test_the_luck_of_a_replay_is_shared_with_its_neighbours() -> None:
    found = smoothed({(2, 6, 0): 1.0, (3, 5, 0): 1.04, (4, 4, 0): 1.0}, [(2, 6, 0), (3, 5, 0), (5, 3, 0)])
    assert 1.0 < found[3, 5, 0] < 1.035 and 0.99 < found[5, 3, 0] < 1.03
    assert smoothed({}, [(1, 1, 0)]) == {(1, 1, 0): 1.0}


def test_a_ratio_that_the_network_misjudges_says_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prefill worker too few: the network predicts twice what the replay finds. Its neighbour, where nothing waits, is no faster for it."""
    replayed = {(1, 7, 0): 100.0, (2, 6, 0): 65.0, (3, 5, 0): 66.0, (4, 4, 0): 67.0}
    ranked = {(1, 7, 0): 200.0, (2, 6, 0): 50.0, (3, 5, 0): 50.0, (4, 4, 0): 50.0}
    wrong = (1, 7, 0)
    monkeypatch.setattr(predict, "_replayed_s", lambda key, *counts: replayed.get(counts, 70.0))
    monkeypatch.setattr(predict, "_ranked_s", lambda key, *counts: ranked.get(counts, 50.0))
    options = predict.candidates(PROFILE, 8, EVIDENCE, judged=[wrong])
    found = {(each.prefill, each.decode, each.colocated): each.base_s for each in options}
    assert found[wrong] == pytest.approx(100.0)
    assert found[2, 6, 0] == pytest.approx(65.0, rel=0.02)


def test_what_was_computed_is_remembered_for_the_newest_models_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept by sample, and a sample may be a third of a megabyte: a job has a new one each train step."""
    asked: list[object] = []
    real = predict.makespan_s
    monkeypatch.setattr(predict, "makespan_s", lambda *given: (asked.append(given), real(*given))[1])

    def rank(number: int) -> int:
        asked.clear()
        sample = tuple((*each[:-1], each[-1] + number) for each in SAMPLE)
        predict.candidates(PROFILE, 4, msgspec.structs.replace(EVIDENCE, sample=sample, quick=True))
        return len(asked)

    assert rank(1000) == 4 and rank(1000) == 0
    for number in range(1, MODELS):
        rank(1000 + number)
    assert rank(1000) == 0
    for number in range(1, MODELS + 1):
        rank(2000 + number)
    assert rank(1000) == 4


def test_no_time_at_all_is_predicted_and_not_divided_by() -> None:
    """A workload of which nothing takes any time: every configuration is as good."""
    nothing = msgspec.structs.replace(
        PROFILE, A_s=0.0, b_s=0.0, t_prefill_s=0.0, kv_bytes_per_token=0.0, T_env_s=0.0, T_over_s=0.0
    )
    sample = tuple(tuple(0 if at % 3 == 2 else value for at, value in enumerate(each)) for each in SAMPLE)
    options = predict.candidates(nothing, 4, msgspec.structs.replace(EVIDENCE, sample=sample))
    assert len(options) == 4 and all(each.feasible and 0 <= (each.makespan_s or 0.0) < 0.1 for each in options)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("constants", [(0.0, 4e-4, 4e-5), (0.0, 4e-4, 0.0), (0.0, 0.0, 4e-5), (8e-3, 0.0, 0.0)])
def test_constants_that_are_zero_let_time_go_by(constants: tuple[float, float, float], empty: bool) -> None:
    """A profile may say so: measured costs are clipped at 0, and a first prompt may be all in the cache."""
    profile = msgspec.structs.replace(PROFILE, A_s=constants[0], b_s=constants[1], t_prefill_s=constants[2], B=8)
    sample = tuple((0, *each[1:]) for each in SAMPLE) if empty else SAMPLE
    evidence = Evidence(sample=sample, limits=Limits(replay_turns=100))
    for fused in (0, 1):
        limits = msgspec.structs.replace(evidence.limits, fused=fused)
        options = predict.candidates(profile, 3, msgspec.structs.replace(evidence, limits=limits))
        assert len(options) == 3 and all(each.makespan_s and math.isfinite(each.makespan_s) for each in options)


@pytest.mark.parametrize("batch", [16, 256])
@pytest.mark.parametrize("turns", [5, 37, 512])
@pytest.mark.parametrize("percent", [0, 150])
def test_what_is_replayed_does_not_grow_with_the_length_of_trajectories(batch: int, turns: int, percent: int) -> None:
    """A configuration's share of `replay_turns`, and where that does not go round one for each trajectory."""
    limits = Limits(replay_turns=4000, in_flight_percent=percent)
    evidence = Evidence(sample=tuple((250, 60, 300) * turns for _ in range(4)), limits=limits)
    model = model_of(key_of(msgspec.structs.replace(PROFILE, B=batch), evidence, 16))
    trajectories = [turns for draw in model.draws for turns in draw]
    assert sum(len(each) for each in trajectories) <= 4000 / 5 + len(trajectories)
    assert {sum(turn[3] for turn in each) for each in trajectories} == {turns}


def test_what_runs_is_compared_alike_before_and_after_its_sample_is_remembered() -> None:
    """Else a decision would change with nothing new: on the next event, by the same profile."""
    split = Running(mode=Mode.DISAGGREGATED, prefill=3, decode=5, colocated=0)
    known = kept((), predict.candidates(PROFILE, 8, EVIDENCE), -1)
    newer = msgspec.structs.replace(EVIDENCE, sample=SAMPLE[:9], averages=known)

    def chosen(evidence: Evidence) -> Choice:
        return choose(PROFILE, 8, split, Policy(), Replays(PROFILE, Policy(), evidence, Stakes(role_s=0.0)))

    first = chosen(newer)
    again = chosen(msgspec.structs.replace(newer, averages=kept(known, first.candidates, PROFILE.train_step)))
    assert first.incumbent is not None and again.incumbent is not None
    assert again.incumbent.makespan_s == pytest.approx(first.incumbent.makespan_s, rel=1e-9)
    assert again.chosen.prefill == first.chosen.prefill and again.reason == first.reason


# ---- several samples ----


def test_one_sample_s_luck_is_averaged_out() -> None:
    logs = {1: 0.2, 2: 0.05}
    first = averaged((), 8, 1, logs)
    assert (dict(first.logs), first.weight, first.shift) == (logs, 1.0, 0.0)
    second = averaged((first,), 8, 2, {1: 0.0, 2: -0.15})
    assert second.weight == pytest.approx(1 + 0.8)
    assert dict(second.logs) == pytest.approx({1: 0.8 * 0.2 / 1.8, 2: (0.8 * 0.05 - 0.15) / 1.8})
    assert second.shift == pytest.approx(0.8 * 0.2 / 1.8)
    # A ratio that was not listed before is moved as the others are; one that is not listed now is forgotten.
    third = dict(averaged((first,), 8, 2, {2: -0.15, 3: -0.1}).logs)
    assert third[3] == pytest.approx(-0.1 + third[2] + 0.15) and 1 not in third


def test_a_sample_counts_once_however_often_it_is_asked() -> None:
    first = averaged((), 8, 1, {1: 0.2})
    second = averaged((first,), 8, 2, {1: 0.0})
    assert averaged((second,), 8, 2, {1: 0.0}) == second
    assert dict(averaged((second,), 8, 2, {1: 0.0, 2: 0.1}).logs)[2] == pytest.approx(0.1 + second.shift)


def test_old_samples_are_forgotten() -> None:
    first = averaged((), 8, 1, {1: 0.2})
    assert dict(averaged((first,), 8, 40, {1: 0.0}).logs)[1] == pytest.approx(0.0, abs=1e-4)


def test_a_sample_s_luck_is_known_at_another_number_of_workers() -> None:
    here = averaged((averaged((), 8, 1, {1: 0.2}),), 8, 2, {1: 0.0})
    there = averaged((here,), 6, 2, {1: -0.1, 2: 0.0})
    assert dict(there.logs) == pytest.approx({1: -0.1 + here.shift, 2: here.shift}) and there.weight == here.weight
    assert averaged((here,), 6, 3, {1: -0.1}).logs == ((1, -0.1),), "nothing is known of a newer sample"


def test_averages_are_of_what_was_replayed_and_few() -> None:
    options = predict.candidates(PROFILE, 8, EVIDENCE)
    (found,) = kept((), options, 0)
    assert found.workers == 8 and set(dict(found.logs)) == set(range(1, 8))
    assert dict(found.logs)[3] == pytest.approx(math.log((options[3].base_s or 0.0) / (options[0].base_s or 1.0)))
    quick = predict.candidates(PROFILE, 8, msgspec.structs.replace(EVIDENCE, quick=True))
    assert kept((found,), quick, 1) == (found,)
    many = (found,)
    for workers in range(9, 20):
        many = kept(many, predict.candidates(PROFILE, workers, EVIDENCE), 0)
    assert [each.workers for each in many] == [16, 17, 18, 19]


def test_what_earlier_samples_predicted_moves_a_prediction_and_the_incumbent_s_alike() -> None:
    plain = {each.prefill: each for each in predict.candidates(PROFILE, 8, EVIDENCE)}
    assert plain[0].makespan_s == plain[0].base_s
    for prefill in (2, 3):
        assert plain[prefill].makespan_s == pytest.approx((plain[prefill].base_s or 0.0) * math.exp(predict.LUCKIEST))
    (now,) = kept((), tuple(plain.values()), -1)
    slower = msgspec.structs.replace(now, logs=tuple((prefill, log + 0.18) for prefill, log in now.logs))
    taught = msgspec.structs.replace(EVIDENCE, averages=(slower,))
    moved = {each.prefill: each for each in predict.candidates(PROFILE, 8, taught)}
    by = math.exp(0.18 * 0.8 / 1.8)
    assert moved[0] == plain[0]
    for prefill in (2, 3):
        assert moved[prefill].makespan_s == pytest.approx((plain[prefill].makespan_s or 0.0) * by)
        assert moved[prefill].base_s == plain[prefill].base_s
    before = predict.least(PROFILE, [(3, 5, 0)], EVIDENCE)
    after = predict.least(PROFILE, [(3, 5, 0)], msgspec.structs.replace(EVIDENCE, averages=(slower,)))
    assert before is not None and after is not None and before.base_s == after.base_s
    assert (after.makespan_s or 0.0) > 1.05 * (before.makespan_s or 0.0)


def test_candidates_say_how_they_came_about() -> None:
    options = predict.candidates(PROFILE, 8, EVIDENCE)
    assert len(options) == 8 and all(option.feasible and option.makespan_s for option in options)
    methods = [option.method for option in options]
    assert options[0].colocated == 8 and methods[0] == "replay" and methods.count("replay") >= 4
    best = predict.best(options)
    assert best is not None and best.method == "replay"
    quick = predict.candidates(PROFILE, 8, msgspec.structs.replace(EVIDENCE, quick=True))
    assert {option.method for option in quick} == {"queueing"}
    impossible = predict.candidates(PROFILE, 8, EVIDENCE, impossible="off")
    assert [option.feasible for option in impossible] == [True] + [False] * 7
    assert predict.candidates(PROFILE, 0, EVIDENCE) == ()


def test_a_thousand_workers_are_a_grid_and_a_small_replay() -> None:
    profile = msgspec.structs.replace(PROFILE, B=4000)
    options = predict.candidates(profile, 1000, EVIDENCE)
    assert len(options) < 60 and all(sum((o.prefill, o.decode, o.colocated)) == 1000 for o in options)


def test_the_end_of_a_batch_gains_less_from_borrowed_workers_than_its_share() -> None:
    """Eq. 7 takes the last quarter of the trajectories for a quarter of the gain; they are the longest, and run nearly alone."""
    whole = predict.saved_s(PROFILE, (0, 0, 2), (0, 0, 6), 32, 0.0, EVIDENCE)
    end = predict.saved_s(PROFILE, (0, 0, 2), (0, 0, 6), 2, 0.0, EVIDENCE)
    assert whole > 0 and end < whole / 4
    assert predict.saved_s(PROFILE, (0, 0, 2), (0, 0, 6), 32, 1e6, EVIDENCE) == 0.0


# ---- what a change costs ----


def test_a_change_must_win_more_than_it_costs_before_the_budget_changes() -> None:
    split = Running(mode=Mode.DISAGGREGATED, prefill=6, decode=2, colocated=0)

    def chosen(horizon_s: float, role_s: float) -> tuple[Mode, str]:
        stakes = Stakes(horizon_s=horizon_s, role_s=role_s)
        choice = choose(PROFILE, 8, split, Policy(), Replays(PROFILE, Policy(), EVIDENCE, stakes))
        return (choice.mode, choice.reason) if choice.chosen != choice.incumbent else (Mode.PAUSED, choice.reason)

    assert chosen(3600.0, 1.0)[0] is not Mode.PAUSED  # far from the best: worth changing
    held, reason = chosen(20.0, 60.0)
    assert held is Mode.PAUSED and "held back" in reason and "costs" in reason


def test_workers_that_will_not_stay_are_not_prepared() -> None:
    running = Running(mode=Mode.COLOCATED, prefill=0, decode=0, colocated=4)

    def workers(worker_life_s: float) -> int:
        stakes = Stakes(worker_life_s=worker_life_s, prepare_s=60.0, pause_s=5.0)
        policy = Policy(impossible="off")
        chosen = choose(PROFILE, 6, running, policy, Replays(PROFILE, policy, EVIDENCE, stakes)).chosen
        return chosen.colocated

    assert workers(3600.0) == 6
    assert workers(30.0) == 4


def test_expected_lives_follow_what_was_seen() -> None:
    life = Life()
    assert life.mean_s(600) == 600
    for _ in range(20):
        life = life.waited(30.0).ended()
    assert 30 < life.mean_s(600) < 200
    assert life.waited(10_000).mean_s(600) > 1000  # nothing has ended for long


# ---- learning, the trial, shrinking ----

ENGINE = DecisionEngineCore(
    Config(
        policy=Policy(),
        cold_start=PROFILE,
        policy_name="planner",
        planner=Planner(limits=Limits(replay_turns=2000), probe_share=0.5),
        switch_guess_s=0.1,
    )
)


def budget(number: int, workers: int, training: int | None = None) -> BudgetChanged:
    return BudgetChanged(
        budget_id=number,
        dedicated=tuple(WorkerId(f"n-w{index}") for index in range(workers)),
        overlap=(),
        leaving=(),
        training_batch=training,
        cause="test",
    )


def table(epoch: int, prefill: int, decode: int, colocated: int) -> RoleTable:
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode + [Role.COLOCATED] * colocated
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
    return RoleTable(job="j", epoch=Epoch(epoch), rows=rows)


def run(state: State, *events: tuple[int, object]) -> tuple[State, list[DecisionRecord], list[TargetConfiguration]]:
    records: list[DecisionRecord] = []
    targets: list[TargetConfiguration] = []
    for now_s, message in events:
        effects: Effects
        state, effects = ENGINE.step(state, Input(1000 * now_s, message))  # type: ignore[arg-type]
        records += [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, DecisionRecord)]
        targets += [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, TargetConfiguration)]
    return state, records, targets


def batches(state: State, counts: tuple[int, int, int], first: int, at_s: int, lasts_s: int, many: int) -> State:
    """So many batches, each of which training waits for; table and budget stay."""
    workers = sum(counts)
    state, _, _ = run(state, (at_s, table(first + 1, *counts)))
    for index in range(many):
        at_s += lasts_s
        state, _, _ = run(
            state,
            (at_s, budget(2 * (first + index) + 10, workers, training=first + index)),
            (at_s, budget(2 * (first + index) + 11, workers)),
        )
    return state


def test_a_realised_makespan_is_learned_for_the_configuration_that_served() -> None:
    state, _, targets = run(ENGINE.initial(), (1, budget(1, 4)), (1, table(1, 0, 0, 4)))
    assert targets[-1].colocated == 4 or targets[-1].prefill
    state = batches(state, (0, 0, 4), 0, 1, 60, 3)
    observed = state.learned.observed
    assert len(observed) == 2  # the first end only begins the measuring
    assert {(each.prefill, each.decode, each.colocated) for each in observed} == {(0, 0, 4)}
    assert all(each.realised_s == pytest.approx(60.0) and each.predicted_s > 0 for each in observed)


def test_a_batch_that_many_configurations_served_says_nothing() -> None:
    learned = Learned(ended_ms=1).on_serving((0, 0, 4), 1)
    for second in range(40):
        learned = learned.on_serving((0, 0, 4 + second % 2), 1000 * second + 2)
    assert learned.broken and len(learned.served) <= 12
    after = learned.on_batch_end(lambda _: 50.0, 1, 50_000)
    assert after.observed == () and not after.broken
    nobody = Learned(ended_ms=1).on_batch_end(lambda _: 50.0, 1, 50_000)
    assert nobody.observed == (), "no table was seen yet"
    half = Learned(ended_ms=1).on_serving((0, 0, 4), 1).on_serving((0, 0, 6), 25_000)
    assert half.on_batch_end(lambda _: 50.0, 1, 50_000).observed == ()
    mostly = Learned(ended_ms=1).on_serving((0, 0, 4), 1).on_serving((0, 0, 6), 45_000)
    (found,) = mostly.on_batch_end(lambda counts: 50.0 if counts[2] == 4 else 25.0, 1, 50_000).observed
    assert found.colocated == 4 and found.realised_s == pytest.approx(45 + 2 * 5, rel=0.01)


def test_one_trial_of_the_mode_that_was_never_measured_and_no_second() -> None:
    state, _, _ = run(ENGINE.initial(), (1, budget(1, 4)))
    assert state.target is not None
    first = (state.target.prefill, state.target.decode, state.target.colocated)
    as_predicted_s = round(predict.predicted_s(PROFILE, first, EVIDENCE))
    state, _, _ = run(state, (1, table(1, *first)))
    records: list[DecisionRecord] = []
    at_s = 1
    for batch in range(3):
        at_s += as_predicted_s
        ends = (at_s, budget(2 * batch + 10, 4, training=batch)), (at_s, budget(2 * batch + 11, 4))
        state, more, _ = run(state, *ends)
        records += more
    trials = [record for record in records if record.probe]
    assert trials and "never measured" in trials[0].reason and trials[0].may_probe
    assert state.learned.probed and state.target is not None
    trial = (state.target.prefill, state.target.decode, state.target.colocated)
    assert state.learned.holding == trial and (trial[0] > 0) is not (first[0] > 0)
    # It goes on until a batch has measured it; it lost badly, so the mode from before comes back, and stays.
    state = batches(state, trial, 40, at_s, 10 * as_predicted_s, 1)
    state = batches(state, trial, 50, at_s + 10 * as_predicted_s, 4 * as_predicted_s, 1)
    assert state.learned.holding is None and len({each.prefill > 0 for each in state.learned.observed}) == 2
    state, records, targets = run(state, (at_s + 1000, budget(200, 4)))
    assert (targets[-1].prefill > 0) is (first[0] > 0) and not records[-1].probe and not records[-1].may_probe


def test_a_decision_remembers_what_its_sample_predicted_and_its_record_what_it_knew() -> None:
    state, records, _ = run(ENGINE.initial(), (1, budget(1, 4)))
    (first,) = state.learned.averages
    assert first.workers == 4 and records[-1].averages == ()
    newer = msgspec.structs.replace(PROFILE, train_step=1, sample=SAMPLE[:8])
    state, _, _ = run(state, (2, newer), (3, budget(2, 5)))
    assert [each.workers for each in state.learned.averages] == [4, 5]
    assert state.learned.averages[0].weight == pytest.approx(1.8)
    state, records, _ = run(state, (4, budget(3, 6)))
    assert records[-1].averages == state.learned.averages[:2]
    again = answer(question_of(records[-1]))
    assert (again.choice.chosen, again.choice.candidates) == (records[-1].chosen, records[-1].candidates)


@pytest.mark.parametrize(
    ("serving", "coming", "mode"),
    [((0, 0, 2), (2, 4, 0), Mode.COLOCATED), ((1, 1, 0), (0, 0, 6), Mode.DISAGGREGATED)],
)
def test_a_mode_whose_newcomers_never_came_is_not_what_runs(
    serving: tuple[int, int, int], coming: tuple[int, int, int], mode: Mode
) -> None:
    """A reclaim in the middle of a preparation: the workers that serve keep their roles unless changing them pays."""
    target = TargetConfiguration(
        decision_id=DecisionId("d1"),
        budget_id=1,
        mode=Mode.COLOCATED if coming[2] else Mode.DISAGGREGATED,
        prefill=coming[0],
        decode=coming[1],
        colocated=coming[2],
        borrow=False,
        usable=tuple(WorkerId(f"n-w{index}") for index in range(6)),
        leaving=(),
        training_batch=None,
        forced=False,
        reason="",
    )
    state, _, _ = run(ENGINE.initial(), (1, budget(1, 2)))
    state, records, _ = run(msgspec.structs.replace(state, target=target), (2, table(1, *serving)), (3, budget(2, 2)))
    running = records[-1].running
    assert running is not None and running.mode is mode
    assert (running.prefill, running.decode, running.colocated) == serving
    # In the middle of a change of mode the last target is what runs,
    switching = table(3, *serving)
    rows = (msgspec.structs.replace(switching.rows[0], stage=Stage.SWITCHING), *switching.rows[1:])
    state, records, _ = run(
        msgspec.structs.replace(state, target=target),
        (4, msgspec.structs.replace(switching, rows=rows)),
        (4, budget(4, 2)),
    )
    assert records[-1].running is not None and records[-1].running.mode is target.mode
    # and without a loss: its workers are still coming.
    state, records, _ = run(msgspec.structs.replace(state, target=target), (5, table(4, *serving)), (6, budget(5, 6)))
    assert records[-1].running is not None and records[-1].running.mode is target.mode


def test_a_shrink_is_answered_at_once_and_decided_again_on_the_next_tick() -> None:
    state, records, _ = run(ENGINE.initial(), (1, budget(1, 8)), (2, table(1, 0, 0, 8)))
    assert not records[-1].quick and any(option.method == "replay" for option in records[-1].candidates)
    state, records, _ = run(state, (60, budget(2, 5)))
    assert records[-1].quick and {option.method for option in records[-1].candidates} == {"queueing"}
    state, records, _ = run(state, (61, Tick()))
    assert not state.shrunk
    for record in records:
        assert not record.quick


def test_predictions_scale_with_constants() -> None:
    """All times doubled double the makespan: seconds in, seconds out."""
    slow = msgspec.structs.replace(
        PROFILE,
        A_s=2 * PROFILE.A_s,
        b_s=2 * PROFILE.b_s,
        t_prefill_s=2 * PROFILE.t_prefill_s,
        bandwidth_bytes_per_s=PROFILE.bandwidth_bytes_per_s / 2,
    )
    later = msgspec.structs.replace(
        EVIDENCE, sample=tuple(tuple(v * 2 if i % 3 == 2 else v for i, v in enumerate(each)) for each in SAMPLE)
    )
    for counts in ((0, 0, 4), (1, 3, 0)):
        once = predict.predicted_s(PROFILE, counts, EVIDENCE)
        assert predict.predicted_s(slow, counts, later) == pytest.approx(2 * once, rel=1e-6)
        assert math.isfinite(once) and once > 0
