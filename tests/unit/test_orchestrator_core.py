"""Orchestrator core: what each event makes of the role table. Each step's invariants are asserted by the core."""

from __future__ import annotations

import msgspec
import pytest

from messages.elastic_scheduler import NodeUp
from messages.ids import Activity, NodeId, PolicyVersion, Residency, Role, Stage, WorkerId
from messages.orchestrator import RoleSet, WeightsApplied, WorkerLost, WorkerReady
from messages.pipeline_scheduler import WeightsPublished
from messages.toggle_manager import TrainerReady
from pearl_state.model import RoleTable, servable
from services.orchestrator.core import OrchestratorCore
from services.runtime.core import Input, Refuse, Tick
from tests.unit.fake_cluster import FakeCluster, job_of

R = ["r0-w0", "r0-w1"]
S = ["s0-w0", "s0-w1", "s1-w0", "s1-w1"]


def published(version: int) -> WeightsPublished:
    return WeightsPublished(version=PolicyVersion(version), uri=f"mem:{version}", manifest_sha256="", bytes=1)


def all_serving(history: list[RoleTable]) -> bool:
    return all(servable(table) for table in history)


# Growth


def test_initial_table_has_every_slot_inactive():
    cluster = FakeCluster()
    assert [row.worker for row in cluster.table.rows] == [*R, *S, "t0-t0", "t0-w0", "t0-w1"]
    assert all(row.activity is Activity.INACTIVE for row in cluster.table.rows)
    assert [pair.residency for pair in cluster.table.pairs] == [Residency.TRAINING] * 2
    assert cluster.row("t0-t0").incarnation == 1 and cluster.row("t0-t0").role is Role.TRAINING


def test_growth_prepares_in_the_background_then_admits_at_once():
    cluster = FakeCluster()
    cluster.target(usable=R, colocated=2)
    [plan] = cluster.plans
    assert plan.stage == "preparing" and plan.epoch == cluster.table.epoch
    assert [(a.worker, a.incarnation, a.role_generation) for a in plan.add] == [("r0-w0", 1, 1), ("r0-w1", 1, 1)]
    assert {cluster.row(w).stage for w in R} == {Stage.LAUNCHING}
    assert cluster.table.admission_paused is None

    cluster.feed(*cluster.facts_of("r0-w0"))
    assert cluster.row("r0-w0").stage is Stage.PREPARED and cluster.row("r0-w0").endpoint == "tcp:r0-w0"
    cluster.feed(*cluster.facts_of("r0-w1"))
    assert cluster.table.plan is not None and cluster.table.plan.stage == "preparing"  # the rebuilder has not said so
    cluster.feed(cluster.report("prepared"))
    assert [plan.stage for plan in cluster.plans] == ["preparing", "applying"]
    assert cluster.table.admission_paused == "p1" and cluster.roles == {}

    cluster.apply()
    assert cluster.counts == (0, 0, 2)
    assert cluster.table.plan is None and cluster.table.admission_paused is None
    assert cluster.row("r0-w0").role_generation == 1
    # never half a group
    assert {len([r for r in t.rows if r.activity is Activity.ACTIVE]) for t in cluster.history} == {0, 2}


def test_report_before_facts_waits_for_the_facts():
    cluster = FakeCluster()
    cluster.target(usable=R, colocated=2)
    cluster.feed(cluster.report("prepared"))
    assert cluster.table.plan is not None and cluster.table.plan.stage == "preparing"
    cluster.feed(*cluster.facts_of("r0-w0"), *cluster.facts_of("r0-w1"))
    assert cluster.table.plan is not None and cluster.table.plan.stage == "applying"


def test_admission_waits_for_the_current_version():
    cluster = FakeCluster()
    cluster.target(usable=["r0-w0"], colocated=1)
    cluster.prepare()
    cluster.feed(published(1))
    cluster.feed(cluster.report("applied"))
    assert cluster.roles == {}  # it holds version 0
    cluster.feed(cluster.facts_of("r0-w0")[1])
    assert cluster.roles == {"r0-w0": "colocated"} and cluster.row("r0-w0").version == 1


def test_growth_leaves_serving_workers_alone():
    cluster = FakeCluster().grown(*R)
    before = {w: cluster.row(w) for w in R}
    cluster.target(usable=R + S, colocated=6)
    cluster.settle()
    assert cluster.counts == (0, 0, 6)
    assert {w: cluster.row(w) for w in R} == before
    assert all_serving(cluster.history)


# Shrink


def test_reclaim_is_cut_at_once_with_its_deadline():
    cluster = FakeCluster().grown(*R, *S)
    deadline = cluster.now_ms + 5000
    cluster.target(usable=[*R, *S[:2]], colocated=4, leaving=((S[2], deadline), (S[3], 0)))
    [plan] = cluster.plans
    assert plan.stage == "applying" and {(x.worker, x.deadline_ms) for x in plan.remove} == {
        (S[2], deadline),
        (S[3], 0),
    }
    assert cluster.row(S[2]).stage is Stage.DRAINING and cluster.row(S[2]).role_generation == 2
    assert cluster.table.admission_paused is None
    cluster.settle()
    assert set(cluster.roles) == {*R, *S[:2]} and all_serving(cluster.history)


def test_reclaim_and_growth_in_one_target_returns_first():
    cluster = FakeCluster().grown(*R, *S[:2])
    cluster.target(usable=[*R, *S[2:]], colocated=4, leaving=((S[0], 1), (S[1], 1)))
    [plan] = cluster.plans
    assert plan.stage == "applying" and not plan.add and len(plan.remove) == 2
    cluster.settle()
    assert set(cluster.roles) == {*R, *S[2:]}
    assert [p.stage for p in cluster.plans] == ["applying", "preparing", "applying"]


def test_shrink_that_leaves_no_decode_worker_falls_back():
    cluster = FakeCluster().grown(*R, S[0], prefill=1, decode=2)
    prefill = next(w for w, role in cluster.roles.items() if role == "prefill")
    assert prefill == R[0]  # prefill goes to a reserved slot
    cluster.target(usable=[R[0]], colocated=1, leaving=((R[1], 0), (S[0], 0)))
    [plan] = cluster.plans
    assert [(a.worker, a.role) for a in plan.reassign] == [(R[0], Role.COLOCATED)] and len(plan.remove) == 2
    cluster.settle()
    assert cluster.roles == {R[0]: "colocated"}


def test_dropped_without_need_leaves_by_whole_nodes():
    cluster = FakeCluster().grown(*R, *S)
    cluster.target(usable=R + S, colocated=4)
    cluster.settle()
    assert set(cluster.roles) == {*R, *S[:2]}


def test_zero_budget_is_a_defined_state():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[])
    cluster.settle()
    assert cluster.roles == {} and cluster.table.plan is None
    cluster.target(usable=R, colocated=2)
    cluster.settle()
    assert cluster.counts == (0, 0, 2)
    assert cluster.row(R[0]).incarnation == 2 and cluster.row(R[0]).role_generation == 3


# Roles


def test_ratio_change_switches_one_worker():
    cluster = FakeCluster().grown(*R, *S, prefill=1, decode=5)
    before = cluster.roles
    cluster.target(usable=R + S, prefill=2, decode=4)
    [plan] = cluster.plans
    assert plan.stage == "applying" and len(plan.reassign) == 1 and not plan.add and not plan.remove
    switched = plan.reassign[0]
    assert cluster.row(switched.worker).stage is Stage.SWITCHING
    assert (cluster.row(switched.worker).role_generation, switched.role_generation) == (2, 3)
    cluster.settle()
    assert cluster.counts == (2, 4, 0)
    assert sum(before[w] != cluster.roles[w] for w in before) == 1 and all_serving(cluster.history)


@pytest.mark.parametrize("workers", [3, 4, 6])
def test_mode_switch_goes_in_waves_and_always_serves(workers: int):
    cluster = FakeCluster().grown(*[*R, *S][:workers])
    cluster.target(usable=[*R, *S][:workers], prefill=1, decode=workers - 1)
    cluster.settle()
    assert cluster.counts == (1, workers - 1, 0)
    assert all_serving(cluster.history)
    assert sum(len(plan.reassign) for plan in cluster.plans if plan.stage == "applying") == workers  # no change twice
    cluster.target(usable=[*R, *S][:workers], colocated=workers)
    cluster.settle()
    assert cluster.counts == (0, 0, workers) and all_serving(cluster.history)


def test_mode_switch_of_two_has_no_wave():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=R, prefill=1, decode=1)
    cluster.settle()
    assert cluster.counts == (1, 1, 0) and len(cluster.plans) == 1


# Supersession


def test_newer_target_adopts_joiners():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, *S[:2]], colocated=4)
    cluster.feed(*cluster.facts_of(S[0]))
    cluster.target(usable=[*R, S[0], S[2]], colocated=4, leaving=((S[1], 0),))
    assert cluster.row(S[0]).stage is Stage.PREPARED and cluster.row(S[0]).incarnation == 1
    assert cluster.row(S[1]).activity is Activity.INACTIVE  # reclaimed while preparing: the group goes on without it
    cluster.settle()
    assert set(cluster.roles) == {*R, S[0], S[2]} and cluster.row(S[0]).incarnation == 1


def test_prepared_joiners_do_not_wait_for_newer_ones():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, S[0]], colocated=3)
    cluster.feed(*cluster.facts_of(S[0]))
    cluster.target(usable=[*R, S[0], S[1]], colocated=4)
    assert cluster.table.plan is not None and [a.worker for a in cluster.table.plan.add] == [S[0]]
    cluster.settle()
    assert set(cluster.roles) == {*R, *S[:2]}


def test_same_wish_again_does_not_disturb_the_plan():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, S[0]], colocated=3)
    plan = cluster.table.plan
    cluster.target(usable=[*R, S[0]], colocated=3, training_batch=0)
    assert plan is not None and cluster.table.plan is not None and cluster.table.plan.plan_id == plan.plan_id
    assert cluster.table.training_batch == 0


def test_target_waits_for_the_apply_section():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, S[0]], colocated=3)
    cluster.prepare()
    applying = cluster.table.plan
    cluster.target(usable=R, colocated=2, leaving=((S[0], 0),))
    assert cluster.table.plan == applying
    assert cluster.table.writer.target is not None and cluster.table.writer.target.colocated == 2
    cluster.settle()
    assert set(cluster.roles) == set(R)


# Failure


def test_failed_joiner_cancels_the_whole_expansion():
    cluster = FakeCluster().grown(*R)
    before = {w: cluster.row(w) for w in R}
    cluster.target(usable=[*R, *S[:2]], colocated=4)
    cluster.feed(*cluster.facts_of(S[0]))
    cluster.feed(cluster.gone(S[1], "launch_failed: no such device"))
    assert {cluster.row(w).activity for w in S} == {Activity.INACTIVE}
    assert {w: cluster.row(w) for w in R} == before
    assert cluster.table.plan is None and cluster.table.admission_paused is None
    assert cluster.table.writer.failed_plans == 1 and S[1] in cluster.table.writer.last_failure
    # The rebuilder's own report comes late.
    cluster.feed(cluster.report("failed", S[1], plan_id="p2"))
    assert cluster.table.writer.failed_plans == 1
    # After the hold the others are tried again, without the one that failed, whose own wait is longer.
    assert cluster.plans[-1].stage == "preparing"
    cluster.pass_time(cluster.config.hold_ms - 1)
    assert cluster.table.plan is None
    cluster.pass_time(1)
    assert cluster.table.plan is not None and [a.worker for a in cluster.table.plan.add] == [S[0]]
    cluster.settle()
    cluster.pass_time(cluster.config.backoff_first_ms)
    cluster.settle()
    assert cluster.counts == (0, 0, 4) and cluster.table.writer.backoffs == ()


def test_backoff_doubles_and_ends_with_success_or_news_of_the_slot():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, S[0]], colocated=3)
    waits: list[int] = []
    for _ in range(3):
        cluster.feed(cluster.report("failed", S[0], reason="not ready"))
        [entry] = cluster.table.writer.backoffs
        waits.append(entry.until_ms - cluster.now_ms)
        cluster.pass_time(waits[-1])
        assert cluster.table.plan is not None
    assert waits == [2000, 4000, 8000]
    cluster.feed(cluster.report("failed", S[0], reason="not ready"))
    assert cluster.table.plan is None
    cluster.feed(NodeUp(node=NodeId("s0"), gpus=(0, 1), agent_incarnation=2, host="h"))
    cluster.pass_time(cluster.config.backoff_first_ms)
    cluster.settle()
    assert S[0] in cluster.roles and cluster.table.writer.backoffs == ()


def test_slot_that_comes_back_is_tried_anew():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, S[0]], colocated=3)
    cluster.feed(cluster.report("failed", S[0]))
    cluster.target(usable=R, colocated=2)
    cluster.target(usable=[*R, S[0]], colocated=3)
    assert cluster.table.plan is not None and cluster.table.plan.add[0].incarnation == 2


def test_preparation_deadline_rolls_back():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, S[0]], colocated=3)
    cluster.pass_time(cluster.config.preparing_ms - 1)
    assert cluster.table.plan is not None
    cluster.pass_time(1)
    assert cluster.table.plan is None and cluster.row(S[0]).activity is Activity.INACTIVE
    assert "deadline" in cluster.table.writer.last_failure


def test_apply_deadline_gives_a_consistent_table():
    cluster = FakeCluster().grown(*R, *S, prefill=2, decode=4)
    cluster.target(usable=R + S, prefill=4, decode=2)
    plan = cluster.table.plan
    assert plan is not None
    one, other = plan.reassign
    cluster.feed(
        RoleSet(worker=one.worker, incarnation=one.incarnation, role=one.role, role_generation=one.role_generation)
    )
    cluster.pass_time(cluster.config.apply_ms)
    assert cluster.roles[one.worker] == "prefill"  # it serves its new role already
    assert cluster.row(other.worker).activity is Activity.INACTIVE  # it does not answer: to be killed and started anew
    assert cluster.row(other.worker).role_generation == other.role_generation
    cluster.pass_time(cluster.config.backoff_first_ms)
    cluster.settle()
    assert cluster.counts == (4, 2, 0)


def test_joiner_dies_while_applying():
    cluster = FakeCluster().grown(*R, *S[:2], prefill=1, decode=3)
    cluster.target(usable=[*R, *S[:3]], prefill=2, decode=3)
    cluster.prepare()
    plan = cluster.table.plan
    assert plan is not None and cluster.table.admission_paused == plan.plan_id
    cluster.feed(cluster.gone(S[2]))
    assert cluster.table.plan is None and cluster.table.admission_paused is None
    assert cluster.counts == (1, 3, 0)
    cluster.pass_time(cluster.config.backoff_first_ms)
    cluster.settle()
    assert cluster.counts == (2, 3, 0)


def test_healthy_role_changers_survive_a_failed_admission():
    cluster = FakeCluster().grown(*R, *S[:2], prefill=1, decode=3)
    cluster.target(usable=[*R, *S[:3]], prefill=3, decode=2)
    cluster.prepare()
    switching = [row for row in cluster.table.rows if row.stage is Stage.SWITCHING]
    assert switching
    cluster.feed(cluster.gone(S[2]))
    follow_up = cluster.table.plan
    assert follow_up is not None and follow_up.stage == "applying" and not follow_up.add
    for row in switching:  # what was announced before is never used again
        assert all(a.role_generation > row.role_generation + 1 for a in follow_up.reassign if a.worker == row.worker)
        assert cluster.row(row.worker).incarnation == row.incarnation
    cluster.settle()
    assert sum(cluster.counts) == 4 and servable(cluster.table)


def test_a_joiner_that_lacks_the_newest_weights_is_the_one_to_blame():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, *S[:2]], colocated=4)
    cluster.prepare()
    plan = cluster.table.plan
    assert plan is not None and plan.stage == "applying"
    cluster.feed(published(1), *(cluster.role_set(assign) for assign in plan.add))
    cluster.feed(cluster.facts_of(S[0])[1])
    cluster.pass_time(cluster.config.apply_ms)
    assert [entry.worker for entry in cluster.table.writer.backoffs] == [S[1]]


# Death


def test_dead_worker_leaves_the_table_at_once_and_is_replaced():
    cluster = FakeCluster().grown(*R)
    cluster.feed(cluster.gone(R[0]))
    assert cluster.roles == {R[1]: "colocated"}
    assert cluster.row(R[0]).stage is Stage.LAUNCHING and cluster.row(R[0]).incarnation == 2
    cluster.settle()
    assert cluster.counts == (0, 0, 2)


def test_death_of_the_last_decode_worker_falls_back_before_it_is_replaced():
    cluster = FakeCluster().grown(*R, prefill=1, decode=1)
    decode = next(w for w, role in cluster.roles.items() if role == "decode")
    cluster.feed(cluster.gone(decode))
    [plan] = cluster.plans
    assert plan.stage == "applying" and [a.role for a in plan.reassign] == [Role.COLOCATED]
    cluster.apply()
    assert cluster.counts == (0, 0, 1)
    cluster.settle()
    assert cluster.counts == (1, 1, 0)


def test_death_while_preparing_makes_survivors_serve_first():
    cluster = FakeCluster().grown(*R, S[0], prefill=1, decode=2)
    cluster.target(usable=[*R, *S], prefill=2, decode=4)
    cluster.feed(*cluster.facts_of(S[1]))
    cluster.feed(cluster.gone(R[0]))  # the only prefill worker
    assert cluster.table.plan is not None and cluster.table.plan.stage == "applying"
    assert cluster.row(S[1]).stage is Stage.PREPARED  # preparation goes on meanwhile
    cluster.apply()
    assert servable(cluster.table)
    cluster.settle()
    assert cluster.counts == (2, 4, 0) and cluster.row(S[1]).incarnation == 1


def test_death_of_everyone_starts_anew():
    cluster = FakeCluster().grown(*R)
    cluster.feed(cluster.gone(R[0]), cluster.gone(R[1]))
    cluster.settle()
    assert cluster.counts == (0, 0, 2)


def test_lost_node_is_not_counted_on_for_a_while():
    cluster = FakeCluster().grown(*R, S[0])
    row = cluster.row(S[0])
    cluster.feed(WorkerLost(worker=row.worker, incarnation=row.incarnation, reason="silent"))
    assert cluster.table.plan is None and S[0] not in cluster.roles
    cluster.pass_time(cluster.config.backoff_first_ms)
    assert cluster.table.plan is not None and cluster.table.plan.add[0].incarnation == row.incarnation + 1


def test_killed_by_a_reclaim_is_not_started_again_before_the_budget_says_so():
    cluster = FakeCluster().grown(*R, S[0])
    cluster.feed(cluster.gone(S[0], "killed:reclaimed"))
    assert cluster.table.plan is None
    cluster.target(usable=R, colocated=2, leaving=((S[0], 0),))
    assert cluster.table.plan is None and cluster.counts == (0, 0, 2)


def test_role_changer_dies_and_the_plan_goes_on():
    cluster = FakeCluster().grown(*R, *S, prefill=1, decode=5)
    cluster.target(usable=R + S, prefill=2, decode=4)
    plan = cluster.table.plan
    assert plan is not None
    [assign] = plan.reassign
    cluster.feed(cluster.gone(assign.worker))
    cluster.feed(cluster.report("failed", assign.worker, plan_id=plan.plan_id))
    cluster.pass_time(cluster.config.backoff_first_ms)
    cluster.settle()
    assert cluster.counts == (2, 4, 0)


# Stale and senseless


def test_stale_facts_change_nothing():
    cluster = FakeCluster().grown(*R)
    cluster.feed(cluster.gone(R[0]))
    cluster.settle()
    before = cluster.table
    cluster.feed(cluster.gone(R[0], incarnation=1))
    cluster.feed(WorkerReady(worker=WorkerId(R[0]), incarnation=1, endpoint="x", pid=1, init_ms=1))  # type: ignore[arg-type]
    cluster.feed(WeightsApplied(worker=WorkerId(R[0]), incarnation=1, version=PolicyVersion(9)))  # type: ignore[arg-type]
    cluster.feed(cluster.report("applied", plan_id="p1"))
    cluster.feed(published(0))
    assert cluster.table is before
    assert len(cluster.notes("fact_stale")) == 3 and not cluster.refusals


def test_a_target_of_an_older_budget_is_late_and_not_senseless():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=R, colocated=2)
    before = cluster.table
    cluster.feed(msgspec.structs.replace(cluster.make_target(usable=[], colocated=0), budget_id=1))
    assert cluster.table is before and len(cluster.notes("target_stale")) == 1 and not cluster.refusals


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"usable": ("x0-w0",)}, "no slot x0-w0"),
        ({"colocated": 3}, "3 roles for 2 usable"),
        ({"colocated": -1}, "negative"),
        ({"usable": ("r0-w0", "r0-w0")}, "twice"),
        ({"usable": ("r0-w0", "t0-t0")}, "overlap slot only"),
        ({"usable": ("r0-w0", "t0-w0"), "training_batch": 1}, "not usable while training"),
        ({"training_batch": -4}, "negative"),
        ({"mode": "unknown"}, "unknown mode"),
    ],
)
def test_senseless_targets_are_refused(change: dict[str, object], says: str):
    cluster = FakeCluster()
    before = cluster.table
    good = cluster.make_target(usable=R, colocated=2)
    bad = msgspec.convert({**msgspec.to_builtins(good), **msgspec.to_builtins(change)}, type(good))
    cluster.feed(bad)
    assert cluster.table is before and len(cluster.refusals) == 1 and says in cluster.refusals[0]


def test_unknown_workers_and_reports_are_refused():
    cluster = FakeCluster()
    cluster.feed(WeightsApplied(worker=WorkerId("x9-w9"), incarnation=1, version=PolicyVersion(0)))  # type: ignore[arg-type]
    cluster.feed(cluster.report("finished", plan_id="p1"))
    cluster.feed(object())
    assert len(cluster.refusals) == 3
    cluster.target(usable=R, colocated=2)
    cluster.feed(cluster.report("applied"))
    assert "before its cut" in cluster.refusals[-1]


def test_counts_that_cannot_serve_fall_back_to_colocation():
    cluster = FakeCluster()
    cluster.target(usable=R, prefill=2)
    cluster.settle()
    assert cluster.counts == (0, 0, 2)


# Redelivery and restart


def test_redelivered_inputs_change_nothing():
    cluster = FakeCluster()
    inputs: list[Input] = []
    step = cluster.step
    cluster.step = lambda batch: (inputs.extend(batch), step(batch))[1]  # type: ignore[method-assign]
    cluster.target(usable=R, colocated=2)
    cluster.settle()
    cluster.target(usable=[*R, S[0]], colocated=3)
    cluster.feed(*cluster.facts_of(S[0]))
    before = cluster.table
    step([msgspec.structs.replace(event, redelivered=True) for event in inputs])
    assert cluster.table is before
    for event in inputs:
        step([event])
    assert cluster.table is before


def test_restart_at_every_point_ends_the_same():
    def play(restart_at: int) -> tuple[dict[str, str], int]:
        cluster = FakeCluster()
        count = 0
        step = cluster.step

        def with_restart(batch: list[Input]):
            nonlocal count
            count += 1
            if count == restart_at:
                cluster.table = msgspec.json.decode(msgspec.json.encode(cluster.table), type=RoleTable)
                cluster.restart()
            return step(batch)

        cluster.step = with_restart  # type: ignore[method-assign]
        cluster.target(usable=R, colocated=2)
        cluster.settle()
        cluster.target(usable=[*R, *S], prefill=2, decode=4)
        cluster.settle()
        cluster.target(usable=[*R, *S[:1]], prefill=1, decode=2, leaving=tuple((w, 0) for w in S[1:]))
        cluster.settle()
        return cluster.roles, count

    expected, steps = play(0)
    for point in range(1, steps + 1):
        assert play(point)[0] == expected


def test_cursor_follows_the_stream():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, S[0]], colocated=3)
    assert cluster.table.writer.cursor == cluster.seq == cluster.table.writer.target_seq


def test_tick_without_cause_changes_nothing():
    cluster = FakeCluster().grown(*R)
    before = cluster.table
    assert cluster.pass_time(10_000_000) == () and cluster.table is before


# Training


def test_training_hand_over():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=R, colocated=2, training_batch=3)
    assert cluster.table.training_batch == 3 and cluster.row("t0-t0").activity is Activity.ACTIVE
    assert cluster.table.plan is None and cluster.counts == (0, 0, 2)
    cluster.target(usable=R, colocated=2)
    assert cluster.table.training_batch is None and cluster.row("t0-t0").activity is Activity.INACTIVE


def test_training_does_not_wait_for_a_plan():
    cluster = FakeCluster().grown(*R)
    cluster.target(usable=[*R, S[0]], colocated=3)
    cluster.prepare()
    cluster.target(usable=[*R, S[0]], colocated=3, training_batch=0)
    assert cluster.table.plan is not None and cluster.table.training_batch == 0


def test_dead_trainer_gets_a_new_incarnation_and_keeps_its_batch():
    cluster = FakeCluster().grown(*R)
    cluster.feed(TrainerReady(start_id="a", version=4, ranks=1))
    cluster.target(usable=R, colocated=2, training_batch=4)
    assert cluster.row("t0-t0").version == 4
    cluster.feed(cluster.gone("t0-t0", "exit:1"))
    row = cluster.row("t0-t0")
    assert row.incarnation == 2 and row.activity is Activity.ACTIVE and cluster.table.training_batch == 4


# Slots


def test_new_slots_join_the_table_and_changed_ones_are_an_error():
    cluster = FakeCluster(job_of(preemptible=2)).grown(*R)
    more = FakeCluster(job_of(preemptible=4)).core.with_slots(cluster.table)
    assert [row.worker for row in more.rows if row.worker.startswith("s1")] == ["s1-w0", "s1-w1"]
    assert more.row(R[0]) == cluster.row(R[0])
    with pytest.raises(ValueError, match="r0-w0"):
        OrchestratorCore(
            msgspec.structs.replace(
                cluster.config,
                slots=tuple(msgspec.structs.replace(slot, gpus=slot.gpus * 2) for slot in cluster.config.slots),
            )
        ).with_slots(cluster.table)


def test_step_is_the_plain_core_protocol():
    cluster = FakeCluster()
    table, effects = cluster.core.step(cluster.table, Input(5, Tick()))
    assert table is cluster.table and effects == ()
    table, effects = cluster.core.step(cluster.table, Input(5, cluster.make_target(usable=["x"], colocated=1), 9))
    assert table is cluster.table and isinstance(effects[0], Refuse)
