"""Orchestrator core under random events in random order: whatever comes, invariants hold, and it ends at the target."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from messages.ids import Activity, PolicyVersion, Stage
from messages.orchestrator import WorkerLost
from messages.pipeline_scheduler import WeightsPublished
from pearl_state.model import RoleTable
from services.runtime.core import Input
from tests.unit.fake_cluster import FakeCluster

WORKERS = ["r0-w0", "r0-w1", "s0-w0", "s0-w1", "s1-w0", "s1-w1"]
EVENTS = st.sampled_from(
    ["target", "target", "prepare", "prepare", "role", "facts", "facts", "report", "report", "gone", "lost", "time", "late", "publish", "train", "again", "restart"]
)  # fmt: skip


def play(cluster: FakeCluster, data: st.DataObject) -> None:
    """One event that some actor could cause now."""
    draw = data.draw
    rows = [row for row in cluster.table.rows if row.worker in WORKERS and row.incarnation > 0]
    match draw(EVENTS):
        case "target" | "train" as kind:
            usable = draw(st.lists(st.sampled_from(WORKERS), unique=True))
            total = draw(st.integers(0, len(usable)))
            prefill = draw(st.integers(0, total))
            colocated = draw(st.booleans())
            lost = [w for w in WORKERS if w not in usable and draw(st.booleans())]
            cluster.target(
                usable=usable,
                prefill=0 if colocated else prefill,
                decode=0 if colocated else total - prefill,
                colocated=total if colocated else 0,
                leaving=tuple((w, draw(st.sampled_from([0, cluster.now_ms + 500]))) for w in lost),
                training_batch=draw(st.integers(0, 3)) if kind == "train" else None,
            )
        case "facts" if rows:
            cluster.feed(*cluster.facts_of(draw(st.sampled_from(rows)).worker))
        case "prepare" if cluster.table.plan is not None and cluster.table.plan.stage == "preparing":
            cluster.prepare()
        case "role" if cluster.table.plan is not None and cluster.table.plan.stage == "applying":
            parts = (*cluster.table.plan.add, *cluster.table.plan.reassign)
            if parts:
                cluster.feed(cluster.role_set(draw(st.sampled_from(parts))))
        case "report" if cluster.table.plan is not None:
            stage = cluster.table.plan.stage
            kind = draw(st.sampled_from(["prepared", "apply", "failed", "vetoed"]))
            if kind == "apply" and stage == "applying":
                cluster.apply()
            elif kind != "apply":
                named = [assign.worker for assign in cluster.table.plan.add if draw(st.booleans())]
                cluster.feed(cluster.report(kind, *named))
        case "gone" if rows:
            row = draw(st.sampled_from(rows))
            reason = draw(st.sampled_from(["signal:9", "killed:reclaimed", "exit:1"]))
            cluster.feed(
                cluster.gone(row.worker, reason, draw(st.integers(max(1, row.incarnation - 1), row.incarnation)))
            )
        case "lost" if rows:
            row = draw(st.sampled_from(rows))
            cluster.feed(WorkerLost(worker=row.worker, incarnation=row.incarnation, reason="silent"))
        case "time":
            cluster.pass_time(draw(st.sampled_from([100, 700, 2500])))
        case "late":
            cluster.pass_time(cluster.config.preparing_ms)
        case "publish":
            version = PolicyVersion(cluster.table.policy_version + 1)
            cluster.feed(WeightsPublished(version=version, uri="mem:x", manifest_sha256="", bytes=1))
        case "again" if SEEN:
            cluster.step(SEEN[-draw(st.integers(1, min(8, len(SEEN)))) :])
        case "restart":
            cluster.restart()
        case _:
            pass


SEEN: list[Input] = []


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_invariants_hold_and_the_target_is_reached(data: st.DataObject):
    cluster = FakeCluster()
    SEEN.clear()
    step = cluster.step

    def recording(batch: list[Input]):
        SEEN.extend(batch)
        return step(batch)

    cluster.step = recording  # type: ignore[method-assign]
    for _ in range(data.draw(st.integers(1, 40))):
        play(cluster, data)
        assert_plan_is_said(cluster)
    # Then nothing more goes wrong: waits end, executors do their work.
    for _ in range(12):
        cluster.pass_time(cluster.config.backoff_most_ms)
        if cluster.table.plan is not None:
            cluster.settle()
    target = cluster.table.writer.target
    assert cluster.table.plan is None
    assert all(row.activity is not Activity.TRANSITIONING for row in cluster.table.rows)
    if target is not None:
        asked = (target.prefill, target.decode, target.colocated)
        total = sum(asked)
        servable = target.colocated or (target.prefill and target.decode)
        assert cluster.counts == (asked if servable else (0, 0, total))
        assert set(cluster.roles) <= set(target.usable)
        assert cluster.table.training_batch == target.training_batch


def assert_plan_is_said(cluster: FakeCluster) -> None:
    """The plan in the table has been published, in its stage."""
    plan = cluster.table.plan
    if plan is not None:
        assert (plan.plan_id, plan.stage) in {(said.plan_id, said.stage) for said in cluster.plans}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_one_batch_is_as_good_as_single_steps(data: st.DataObject):
    """Facts that arrive together lead where they lead one by one."""
    single, batch = FakeCluster(), FakeCluster()
    target = single.make_target(usable=WORKERS[:4], prefill=1, decode=3)
    for cluster in (single, batch):
        cluster.feed(target)
    facts = [fact for worker in WORKERS[:4] for fact in single.facts_of(worker)]
    order = data.draw(st.permutations([*facts, single.report("prepared")]))
    for message in order:
        single.feed(message)
    batch.feed(*order)
    assert stages(single.table) == stages(batch.table) == {Stage.PREPARED}
    assert single.table.plan is not None and batch.table.plan is not None
    assert single.table.plan.stage == batch.table.plan.stage == "applying"
    assert batch.table.epoch <= single.table.epoch


def stages(table: RoleTable) -> set[Stage]:
    return {row.stage for row in table.rows if row.worker in WORKERS[:4]}
