"""Claims of the paper's section 4.4 (and of 4.1.2 and 4.5 where they are about the table), one test a claim."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from messages.ids import Activity, Role, Zone
from messages.pipeline_scheduler import WeightsPublished
from pearl_state.invariants import violations
from pearl_state.model import servable
from pearl_state.plan import Counts, minimal_change
from tests.unit.fake_cluster import FakeCluster, job_of

R = ["r0-w0", "r0-w1"]
S = ["s0-w0", "s0-w1", "s1-w0", "s1-w1"]


def test_4_4_two_zones_partition_the_rollout_gpus():
    """4.4: a dedicated zone and an overlap zone; training workers and their bindings stay fixed."""
    cluster = FakeCluster()
    dedicated = {gpu for row in cluster.table.rows if row.zone in (Zone.RESERVED, Zone.PREEMPTIBLE) for gpu in row.gpus}
    overlap = {gpu for row in cluster.table.rows if row.zone is Zone.OVERLAP for gpu in row.gpus}
    training = {gpu for row in cluster.table.rows if row.zone is Zone.TRAINING for gpu in row.gpus}
    assert overlap == training and not overlap & dedicated


def test_4_4_1_gpu_bindings_and_ids_never_change():
    """4.4.1, eq. 4: a worker occupies a stable slot with a fixed GPU set; scaling renumbers nobody, slots are reused."""
    cluster = FakeCluster()
    bindings = {row.worker: row.gpus for row in cluster.table.rows}
    for usable in ([*R, *S], R, [*R, *S[2:]], [*R, *S]):
        cluster.target(usable=usable, colocated=len(usable))
        cluster.settle()
    assert all({row.worker: row.gpus for row in table.rows} == bindings for table in cluster.history)
    assert cluster.row(S[0]).incarnation == 2  # the slot of a worker that left was reused


def test_4_4_1_activity_follows_the_three_states():
    """4.4.1: joiners, leavers and role-changers are transitioning: they serve nothing before they are done."""
    cluster = FakeCluster().grown(*R, *S[:2])
    cluster.target(usable=[*R, *S], prefill=2, decode=4)
    cluster.settle()
    for worker in (*R, *S):
        conditions = [(row.activity, row.role) for table in cluster.history if (row := table.row(worker))]
        for (before, was), (after, becomes) in itertools.pairwise(conditions):
            if after is Activity.ACTIVE and (before is Activity.INACTIVE or was is not becomes):
                assert before is Activity.TRANSITIONING


def test_4_4_1_one_phase_per_gpu():
    """4.4.1: training and its overlap worker share a GPU set; role and activity say which one uses it."""
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=R, colocated=2, training_batch=0)
    assert not violations(cluster.table)
    assert [row.worker for row in cluster.table.rows if row.zone is Zone.TRAINING and row.activity is Activity.ACTIVE]


def test_4_4_1_changes_are_serialised():
    """4.4.1: mapping updates are serialised; a target that arrives while a plan applies waits for it."""
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, S[0]], colocated=3)
    cluster.prepare()
    cluster.target(usable=[*R, *S], colocated=6)
    assert [plan.plan_id for plan in cluster.plans][-1] == "p2"
    cluster.settle()
    epochs = [table.epoch for table in cluster.history]
    assert epochs == list(range(epochs[0], epochs[0] + len(epochs)))
    assert cluster.counts == (0, 0, 6)


@pytest.mark.parametrize(
    ("now", "then", "d_worker", "d_role"),
    [
        (Counts(1, 5), Counts(2, 4), 0, 1),
        (Counts(2, 4), Counts(1, 5), 0, 1),
        (Counts(colocated=6), Counts(2, 4), 0, 6),
        (Counts(1, 3), Counts(1, 5), 2, 0),
        (Counts(2, 4), Counts(1, 3), 2, 0),
        (Counts(2, 4), Counts(2, 4), 0, 0),
        (Counts(3, 1), Counts(1, 5), 2, 2),
    ],
)
def test_4_4_2_change_counts(now: Counts, then: Counts, d_worker: int, d_role: int):
    """4.4.2, eq. 5-6: the counts by the formulas; unaffected workers appear in no part of the plan."""
    workers = [*R, *S]
    cluster = FakeCluster().grown(*workers[: now.total], prefill=now.prefill, decode=now.decode)
    cluster.target(usable=workers, prefill=then.prefill, decode=then.decode, colocated=then.colocated)
    made = {plan.plan_id: plan for plan in cluster.plans}
    cluster.settle()
    made |= {plan.plan_id: plan for plan in cluster.plans}
    joined = sum(len(plan.add) + len(plan.remove) for plan in made.values())
    switched = sum(len(plan.reassign) for plan in made.values())
    assert (joined, switched) == (d_worker, d_role)
    assert cluster.counts == (then.prefill, then.decode, then.colocated)


def test_4_4_2_survivors_keep_roles_up_to_the_target():
    """4.4.2: min(n_src, n_dst) survivors keep each role; the deficits go to joiners and reassigned survivors."""
    cluster = FakeCluster().grown(*R, *S[:2], prefill=2, decode=2)
    rows = cluster.table.rows
    members = [row.worker for row in rows if row.worker in (*R, *S)]
    plan = minimal_change(rows, members, Counts(1, 5))
    source = Counter(row.role for row in rows if row.activity is Activity.ACTIVE and row.role is not Role.TRAINING)
    kept = {Role.PREFILL: min(source[Role.PREFILL], 1), Role.DECODE: min(source[Role.DECODE], 5)}
    assert plan.d_role == sum(source.values()) - sum(kept.values()) == 1
    assert plan.d_worker == 2 and {p.role for p in plan.add} == {Role.DECODE}


def test_4_4_2_unaffected_workers_never_notice():
    """4.4.2: a change that touches a few workers does not rebuild the others: same row, same generation."""
    cluster = FakeCluster().grown(*R, *S[:2], prefill=1, decode=3)
    before = {w: cluster.row(w) for w in (*R, *S[:2])}
    cluster.target(usable=[*R, *S], prefill=1, decode=5)
    cluster.settle()
    cluster.target(usable=[*R, *S[:2]], prefill=1, decode=3, leaving=((S[2], 0), (S[3], 0)))
    cluster.settle()
    assert {w: cluster.row(w) for w in before} == before


def test_4_4_2_scale_does_not_grow_the_change():
    """4.4.2: at a thousand workers a one-worker change is still a one-worker plan."""
    job = job_of(reserved=200, preemptible=800, training=8, per_node=8)
    cluster = FakeCluster(job)
    workers = [row.worker for row in cluster.table.rows if row.zone in (Zone.RESERVED, Zone.PREEMPTIBLE)]
    rows = tuple(row if row.worker not in workers else _serving(row) for row in cluster.table.rows)
    plan = minimal_change(rows, workers[:-1], Counts(colocated=len(workers) - 1))
    assert (plan.d_worker, plan.d_role) == (1, 0) and len(workers) == 1000


def _serving(row):
    import msgspec

    return msgspec.structs.replace(row, activity=Activity.ACTIVE, incarnation=1, version=0)


def test_4_1_2_return_comes_before_growth():
    """4.1.2: GPUs that must be given back are scheduled first."""
    cluster = FakeCluster().grown(*R, *S[:2])
    cluster.target(usable=[*R, *S[2:]], colocated=4, leaving=((S[0], 0), (S[1], 0)))
    assert cluster.plans[0].remove and not cluster.plans[0].add


def test_4_3_3_forced_switch_keeps_a_feasible_topology():
    """4.3.2: when the topology becomes infeasible, survivors are re-roled or fall back to colocation."""
    cluster = FakeCluster().grown(*R, *S[:2], prefill=1, decode=3)
    cluster.feed(cluster.gone(R[0]))
    cluster.apply()
    assert servable(cluster.table) and cluster.counts[0] == 1


def test_4_5_expansion_is_all_or_nothing():
    """4.5: a worker that fails to initialise cancels the whole expansion; none of it was ever routable."""
    cluster = FakeCluster().grown(*R)
    before = [cluster.row(w) for w in R]
    cluster.target(usable=[*R, *S], colocated=6)
    for worker in S[:3]:
        cluster.feed(*cluster.facts_of(worker))
    cluster.feed(cluster.gone(S[3], "launch_failed: out of memory"))
    assert cluster.roles == dict.fromkeys(R, "colocated") and [cluster.row(w) for w in R] == before
    assert all(
        row.activity is not Activity.ACTIVE for table in cluster.history for row in table.rows if row.worker in S
    )


def test_4_5_group_is_admitted_at_the_current_version_at_once():
    """4.5: atomic finalisation; admission pauses only between the cut and the admit epoch."""
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, *S[:2]], colocated=4)
    assert all(table.admission_paused is None for table in cluster.history)
    cluster.prepare()
    assert cluster.table.admission_paused is not None
    cluster.feed(WeightsPublished(version=1, uri="mem:1", manifest_sha256="", bytes=1))  # type: ignore[arg-type]
    cluster.apply()
    assert cluster.table.admission_paused is None
    assert [cluster.row(w).version for w in S[:2]] == [1, 1]
    sizes = {sum(row.activity is Activity.ACTIVE for row in table.rows) for table in cluster.history}
    assert sizes == {2, 4}


def test_eq_6_is_the_excess_over_the_target():
    """Eq. 6, by enumeration of all small role counts."""
    workers = [*R, *S[:2]]
    for prefill in range(1, 4):
        cluster = FakeCluster().grown(*workers, prefill=prefill, decode=4 - prefill)
        for wanted in range(5):
            plan = minimal_change(cluster.table.rows, workers, Counts(wanted, 4 - wanted))  # type: ignore[arg-type]
            assert plan.d_role == math.fabs(prefill - wanted)
