"""Sections 4.2, 4.3 and 4.6 of the paper: each equation against numbers worked out by hand, and the choices of Table 2."""

from __future__ import annotations

import msgspec
import pytest

from messages.decision_engine import WorkloadProfile
from messages.ids import Mode
from services.decision_engine import makespan
from services.decision_engine.choose import Policy, Running, choose
from services.decision_engine.command import decide

HAND = WorkloadProfile(
    train_step=0,
    B=8,
    S=10.0,
    r=100.0,
    dL=50.0,
    theta=1.0,
    A_s=0.01,
    b_s=0.001,
    t_prefill_s=0.002,
    T_over_s=0.5,
    T_env_s=3.0,
    kv_bytes_per_token=1000.0,
    bandwidth_bytes_per_s=1e6,
    kv_bytes_per_trajectory=4.0,
    kv_capacity_bytes_per_worker=10.0,
)

QWEN3_8B = {
    "B": 64,  # the paper's rollout batch (6.1)
    "S": 108,
    "r": 212,
    "dL": 9500,
    "theta": 2.45,
    "A_s": 8.4e-3,
    "b_s": 0.51e-3,
    "t_prefill_s": 30e-6,
    "T_over_s": 3.75,
    "T_env_s": 26,
    "kv_bytes_per_token": 147456,
    "bandwidth_bytes_per_s": 81e9,
    # 24.9k tokens a trajectory (the workload's mean), and a capacity at which the batch needs three decode workers
    "kv_bytes_per_trajectory": 24866 * 147456,
    "kv_capacity_bytes_per_worker": 90e9,
}
"""One parameter set that is meant to satisfy all of the paper's Qwen3-8B choices."""

TABLE_2 = {5: (2, 3), 6: (3, 3), 8: (3, 5), 13: (4, 9), 14: (4, 10), 16: (4, 12)}
"""Workers (TP2) -> the (P, D) that the paper selected. 13, 14 and 16: with all eight overlap workers."""


def test_equation_1_colocated_makespan() -> None:
    # N = 4: prefill turn 8*50/4*0.002 = 0.2; decode turn 100*(0.01 + 0.001*2) = 1.2; 10*(0.2 + 1.2 + 0.5) + 3
    assert makespan.colocated_makespan_s(HAND, 4) == pytest.approx(22.0)


def test_equation_2_decode_path() -> None:
    # N_D = 2, theta = 1: 10*100*(0.01 + 0.001*8/(2*2))*2 = 1000*0.012*2
    assert makespan.decode_path_s(HAND, 2) == pytest.approx(24.0)


def test_equation_2_touches_only_the_fixed_term_with_theta() -> None:
    # x1 (1 + theta) + x2 / N_D with x1 = S r A = 10 and x2 = S r b B = 8
    for theta in (0.0, 0.5, 2.0):
        profile = msgspec.structs.replace(HAND, theta=theta)
        assert makespan.decode_path_s(profile, 4) == pytest.approx(10 * (1 + theta) + 8 / 4)


def test_equation_3_prefill_path() -> None:
    # N_P = 2: 10*(8*50/2*0.002 + 8*50*1000/1e6) = 10*(0.4 + 0.4)
    assert makespan.prefill_path_s(HAND, 2) == pytest.approx(8.0)


def test_disaggregated_makespan_is_the_longer_path_plus_the_environment() -> None:
    assert makespan.disaggregated_makespan_s(HAND, 2, 2) == pytest.approx(24.0 + 3.0)
    slow_prefill = msgspec.structs.replace(HAND, t_prefill_s=0.02)  # 10*(4 + 0.4) = 44
    assert makespan.disaggregated_makespan_s(slow_prefill, 2, 2) == pytest.approx(44.0 + 3.0)


def test_capacity_decode_workers_hold_the_batchs_kv_cache() -> None:
    # B K_seq = 32 <= N_D * 10 needs four
    assert not makespan.kv_cache_fits(HAND, 3)
    assert makespan.kv_cache_fits(HAND, 4)
    refused = makespan.disaggregated_candidate(HAND, 1, 3, 0.95)
    assert not refused.feasible and refused.makespan_s is None and "3.20" in refused.reason


def test_capacity_prefill_keeps_up_without_queues() -> None:
    # 8*10*50*0.002 = 8 s of work over N_P = 1 and T_dis = max(12, 10 + 10 + 2) + 3 = 25
    assert makespan.prefill_utilisation(HAND, 1, 4) == pytest.approx(8 / 25)
    assert makespan.disaggregated_candidate(HAND, 1, 4, 8 / 25 + 1e-9).feasible
    refused = makespan.disaggregated_candidate(HAND, 1, 4, 8 / 25 - 1e-9)
    assert not refused.feasible and "utilisation" in refused.reason


def test_the_feasible_set_is_colocation_and_every_split() -> None:
    found = makespan.candidates(HAND, 5, 0.95)
    assert [(each.prefill, each.decode, each.colocated) for each in found] == [
        (0, 0, 5), (1, 4, 0), (2, 3, 0), (3, 2, 0), (4, 1, 0),
    ]  # fmt: skip
    assert makespan.candidates(HAND, 0, 0.95) == ()


def test_equation_7_borrow_only_if_the_rest_of_the_batch_gains_more_than_toggling_costs() -> None:
    # R/B = 16/64 of a gain of 40 s is 10 s
    assert makespan.borrowing_pays(16, 64, 100.0, 60.0, 9.9)
    assert not makespan.borrowing_pays(16, 64, 100.0, 60.0, 10.0)  # strictly more
    assert not makespan.borrowing_pays(0, 64, 100.0, 60.0, 0.0)
    assert not makespan.borrowing_pays(64, 64, 60.0, 60.0, 0.0)


@pytest.mark.parametrize(("workers", "chosen"), TABLE_2.items())
def test_table_2_choices_by_regret(workers: int, chosen: tuple[int, int]) -> None:
    result = decide(QWEN3_8B, workers)
    by_counts = {(each["prefill"], each["decode"]): each for each in result["candidates"]}
    assert result["chosen"]["mode"] == "disaggregated"
    regret = by_counts[chosen]["makespan_s"] / result["chosen"]["makespan_s"] - 1
    assert by_counts[chosen]["feasible"] and regret <= 0.005  # the paper's own distance to the empirical best (0.4 %)


def test_two_workers_colocate() -> None:
    assert decide(QWEN3_8B, 2)["chosen"] == {
        "mode": "colocated", "prefill": 0, "decode": 0, "colocated": 2,
        "makespan_s": pytest.approx(108 * (9.12 + 5.24064 + 3.75) + 26),
    }  # fmt: skip


def _profile_where_disaggregation_gains(share: float, workers: int) -> WorkloadProfile:
    """HAND with an overhead of colocation such that the best split is better than colocation by `share`."""
    base = msgspec.structs.replace(HAND, kv_capacity_bytes_per_worker=1e3, T_over_s=0.0)
    best = makespan.best(makespan.candidates(base, workers, 0.95)[1:])
    assert best is not None and best.makespan_s is not None
    over = (best.makespan_s / (1 - share) - makespan.colocated_makespan_s(base, workers)) / base.S
    assert over > 0
    return msgspec.structs.replace(base, T_over_s=over)


def test_hysteresis_is_larger_for_a_mode_switch_than_for_a_ratio_change() -> None:
    running = Running(mode=Mode.COLOCATED, prefill=0, decode=0, colocated=6)
    policy = Policy(ratio_threshold=0.03, mode_threshold=0.08)
    small = choose(_profile_where_disaggregation_gains(0.07, 6), 6, running, policy)
    large = choose(_profile_where_disaggregation_gains(0.09, 6), 6, running, policy)
    assert (small.mode, large.mode) == (Mode.COLOCATED, Mode.DISAGGREGATED)
    assert not small.forced and not large.forced


def test_a_forced_switch_bypasses_hysteresis() -> None:
    # One worker cannot disaggregate: whatever the thresholds, rollout falls back to colocation (4.2).
    running = Running(mode=Mode.DISAGGREGATED, prefill=1, decode=4, colocated=0)
    choice = choose(HAND, 1, running, Policy(mode_threshold=1.0, ratio_threshold=1.0))
    assert (choice.mode, choice.forced) == (Mode.COLOCATED, True)


def test_a_shrink_without_prefill_workers_reassigns_survivors() -> None:
    profile = msgspec.structs.replace(HAND, kv_capacity_bytes_per_worker=1e3)
    running = Running(mode=Mode.DISAGGREGATED, prefill=2, decode=4, colocated=0, survivors=(0, 4))
    choice = choose(profile, 4, running, Policy(mode_threshold=1.0, ratio_threshold=1.0))
    assert choice.mode is Mode.DISAGGREGATED and choice.forced and choice.chosen.prefill >= 1
