"""The makespan models and the feasible configurations they choose among (paper 4.2, 4.3.1; DESIGN 5). Pure.

`profile` is a `workload.profile/1`: SI units, names as in the paper. All results are seconds unless stated.
"""

from __future__ import annotations

from messages.decision_engine import WorkloadProfile
from messages.monitor import Candidate


def colocated_makespan_s(profile: WorkloadProfile, workers: int) -> float:
    """Eq. 1: every turn of the slowest trajectory waits for the batch's prefill, its own decode and the overhead.

    The decode batch is B / N whatever the environments do: prefill takes the capacity that they free.
    """
    assert workers >= 1
    p = profile
    prefill_turn = p.B * p.dL / workers * p.t_prefill_s
    decode_turn = p.r * (p.A_s + p.b_s * p.B / workers)
    return p.S * (prefill_turn + decode_turn + p.T_over_s) + p.T_env_s


def decode_path_s(profile: WorkloadProfile, decode: int) -> float:
    """Eq. 2: the decode pool's path. Trajectories in their environments leave only B / (1 + theta) decoding."""
    assert decode >= 1
    p = profile
    return p.S * p.r * (p.A_s + p.b_s * p.B / (decode * (1 + p.theta))) * (1 + p.theta)


def prefill_path_s(profile: WorkloadProfile, prefill: int) -> float:
    """Eq. 3: the prefill pool's path, with the least time the KV cache needs between the pools."""
    assert prefill >= 1
    p = profile
    compute_turn = p.B * p.dL / prefill * p.t_prefill_s
    transfer_turn = p.B * p.dL * p.kv_bytes_per_token / p.bandwidth_bytes_per_s
    return p.S * (compute_turn + transfer_turn)


def disaggregated_makespan_s(profile: WorkloadProfile, prefill: int, decode: int) -> float:
    """`T_dis = max(T_prefill, T_decode) + T_env` (paper 4.3.1): the longer of the two paths."""
    return max(prefill_path_s(profile, prefill), decode_path_s(profile, decode)) + profile.T_env_s


def prefill_utilisation(profile: WorkloadProfile, prefill: int, decode: int) -> float:
    """`B S dL t_prefill / (N_P T_dis)`: the share of the makespan that prefill workers compute.

    Our reading of "without building queues that delay decode" (paper 4.2, which gives no formula).
    """
    makespan = disaggregated_makespan_s(profile, prefill, decode)
    work = profile.B * profile.S * profile.dL * profile.t_prefill_s
    return work / (prefill * makespan) if makespan > 0 else 0.0


def kv_cache_fits(profile: WorkloadProfile, decode: int) -> bool:
    """`B K_seq <= N_D H_max` (paper 4.2): decode workers hold the whole batch's KV cache, at its actual lengths."""
    return profile.B * profile.kv_bytes_per_trajectory <= decode * profile.kv_capacity_bytes_per_worker


def borrowing_pays(remaining: int, batch: int, dedicated_s: float, full_s: float, toggle_s: float) -> bool:
    """Eq. 7: what the unfinished share of the batch gains from the borrowed GPUs exceeds activation plus return.

    `remaining` of `batch` trajectories are not yet completed; `dedicated_s` and `full_s` are the best makespans
    without and with all overlap workers; `toggle_s` is the learned incremental cost of a toggled step.
    """
    assert batch >= 1 and remaining >= 0
    return remaining / batch * (dedicated_s - full_s) > toggle_s


def colocated_candidate(profile: WorkloadProfile, workers: int) -> Candidate:
    """The colocated configuration of `workers` workers; always feasible (an engine short of KV cache queues)."""
    return Candidate(0, 0, workers, colocated_makespan_s(profile, workers), True)


def disaggregated_candidate(
    profile: WorkloadProfile, prefill: int, decode: int, rho_max: float, impossible: str = ""
) -> Candidate:
    """One P:D configuration with its prediction, or why it is not feasible. `impossible`: a reason that holds for all."""
    if impossible:
        return Candidate(prefill, decode, 0, None, False, impossible)
    if not kv_cache_fits(profile, decode):
        need = profile.B * profile.kv_bytes_per_trajectory / profile.kv_capacity_bytes_per_worker
        return Candidate(prefill, decode, 0, None, False, f"KV cache of the batch needs {need:.2f} decode workers")
    rho = prefill_utilisation(profile, prefill, decode)
    if rho > rho_max:
        return Candidate(
            prefill,
            decode,
            0,
            None,
            False,
            f"prefill utilisation {rho:.3f} is above {rho_max:g}: queues would delay decode",
        )
    return Candidate(prefill, decode, 0, disaggregated_makespan_s(profile, prefill, decode), True)


def candidates(profile: WorkloadProfile, workers: int, rho_max: float, impossible: str = "") -> tuple[Candidate, ...]:
    """Pi'(N) of paper 4.2 with the infeasible ones kept and explained: colocation first, then N_P = 1 .. N-1.

    `impossible`, where not empty, is why no disaggregated configuration can run at all. No workers: no candidates.
    """
    if workers < 1:
        return ()
    return (
        colocated_candidate(profile, workers),
        *(
            disaggregated_candidate(profile, prefill, workers - prefill, rho_max, impossible)
            for prefill in range(1, workers)
        ),
    )


def best(options: tuple[Candidate, ...]) -> Candidate | None:
    """The feasible candidate of least makespan; on a tie colocation, then fewer prefill workers. None: none feasible."""
    feasible = [option for option in options if option.feasible]
    return min(feasible, key=_rank, default=None)


def _rank(option: Candidate) -> tuple[float, int]:
    assert option.makespan_s is not None, "a feasible candidate has a prediction"
    return (option.makespan_s, option.prefill)
