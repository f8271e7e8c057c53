"""The elastic scheduler's core: which slots rollout may use, when it says so, what it refuses."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages.decision_engine import BudgetChanged, Leave
from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, NodeUp, TrainingBegin, TrainingFinished
from messages.ids import Gpu, NodeId, PolicyVersion, Zone
from messages.pipeline_scheduler import WeightsPublished
from services.elastic_scheduler.config import Config
from services.elastic_scheduler.core import ElasticSchedulerCore, State
from services.jobfile import JobFile, NodeSection, RolloutSection
from services.runtime.core import Effects, Input, Note, Refuse, Send, Tick

JOB = JobFile(
    nodes=(
        NodeSection(name="r0", zone=Zone.RESERVED, gpus=2),
        NodeSection(name="p0", zone=Zone.PREEMPTIBLE, gpus=4),
        NodeSection(name="p1", zone=Zone.PREEMPTIBLE, gpus=2),
        NodeSection(name="t0", zone=Zone.TRAINING, gpus=2),
    ),
    rollout=RolloutSection(gpus_per_worker=2),
)
CORE = ElasticSchedulerCore(Config.of(JOB))


def available(node: str, *gpus: int) -> GpuAvailable:
    return GpuAvailable(node=NodeId(node), gpus=gpus)


def reclaimed(node: str, *gpus: int, notice_ms: int = 0) -> GpuReclaimed:
    return GpuReclaimed(node=NodeId(node), gpus=gpus, notice_ms=notice_ms)


def budgets(effects: Effects) -> list[BudgetChanged]:
    return [each.message for each in effects if isinstance(each, Send) and isinstance(each.message, BudgetChanged)]


def run(*steps: tuple[int, object], state: State | None = None) -> tuple[State, list[BudgetChanged], list[str]]:
    """The state, the budgets and the refusals after these (time, message) steps."""
    state = CORE.initial() if state is None else state
    found: list[BudgetChanged] = []
    refusals: list[str] = []
    for now_ms, message in steps:
        state, effects = CORE.step(state, Input(now_ms, message))
        found += budgets(effects)
        refusals += [each.reason for each in effects if isinstance(each, Refuse)]
    return state, found, refusals


def test_budget_1_at_the_start_is_reserved_and_overlap() -> None:
    _, found, _ = run((0, Tick()), (1, Tick()))
    (first,) = found
    assert (first.budget_id, first.dedicated, first.overlap, first.training_batch) == (1, ("r0-w0",), ("t0-w0",), None)


def test_arrivals_are_gathered_and_pass_after_the_window() -> None:
    _, found, _ = run((0, Tick()), (100, available("p0", 0, 1)), (200, available("p1", 0, 1)), (299, Tick()))
    assert len(found) == 1
    _, found, _ = run((0, Tick()), (100, available("p0", 0, 1)), (200, available("p1", 0, 1)), (300, Tick()))
    assert found[1].dedicated == ("r0-w0", "p0-w0", "p1-w0") and found[1].budget_id == 2
    assert found[1].cause == "gpu.available p0[0,1], gpu.available p1[0,1]"


def test_half_a_workers_gpus_are_not_a_slot() -> None:
    state, found, _ = run((0, Tick()), (100, available("p0", 1)), (400, Tick()))
    assert len(found) == 1
    _, found, _ = run((500, available("p0", 0)), (900, Tick()), state=state)
    assert found[0].dedicated == ("r0-w0", "p0-w0")


def test_a_reclaim_passes_at_once_with_its_deadline_and_takes_the_burst_along() -> None:
    state, _, _ = run((0, Tick()), (0, available("p0", 0, 1, 2, 3)), (200, Tick()))
    _, found, _ = run((1000, available("p1", 0, 1)), (1100, reclaimed("p0", 2, notice_ms=5000)), state=state)
    (budget,) = found
    assert budget.dedicated == ("r0-w0", "p0-w0", "p1-w0")
    assert budget.leaving == (Leave("p0-w1", 6100),)


@pytest.mark.parametrize(("first", "second"), [((0, 5000), (1, 1000)), ((1, 1000), (0, 5000))])
def test_a_worker_that_loses_its_gpus_one_by_one_leaves_by_the_earliest_deadline(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    state, _, _ = run((0, Tick()), (0, available("p1", 0, 1)), (200, Tick()))
    state, _, _ = run((1000, reclaimed("p1", first[0], notice_ms=first[1])), state=state)
    state, _, _ = run((1000, reclaimed("p1", second[0], notice_ms=second[1])), state=state)
    _, found, _ = run((1500, TrainingBegin(batch=0)), state=state)
    assert found[0].leaving[0] == Leave("p1-w0", 2000)


def test_a_reclaim_without_notice_is_gone_already() -> None:
    state, _, _ = run((0, Tick()), (0, available("p1", 0, 1)), (200, Tick()))
    _, found, _ = run((1000, reclaimed("p1", 0, 1)), state=state)
    assert found[0].leaving == (Leave("p1-w0", 0),) and found[0].dedicated == ("r0-w0",)


def test_gpus_that_come_back_before_the_deadline_cancel_the_leave() -> None:
    state, _, _ = run(
        (0, Tick()), (0, available("p1", 0, 1)), (200, Tick()), (1000, reclaimed("p1", 0, 1, notice_ms=5000))
    )
    _, found, _ = run((2000, available("p1", 0, 1)), (2200, Tick()), state=state)
    assert found[0].leaving == () and found[0].dedicated == ("r0-w0", "p1-w0")


def test_leaving_is_still_told_for_a_while_and_then_forgotten() -> None:
    state, _, _ = run((0, Tick()), (0, available("p1", 0, 1)), (200, Tick()), (1000, reclaimed("p1", 0, 1)))
    _, soon, _ = run((30_000, TrainingBegin(batch=0)), state=state)
    _, late, _ = run((70_000, TrainingBegin(batch=0)), state=state)
    lent = Leave("t0-w0", 30_000 + JOB.timeouts.return_ms)
    assert soon[0].leaving == (Leave("p1-w0", 0), lent) and len(late[0].leaving) == 1


def test_how_long_a_leave_without_notice_is_told_counts_from_when_it_was_heard() -> None:
    """It has no deadline to count from: times are Unix times, far above zero."""
    start = 10**12
    state, _, _ = run((start, Tick()), (start, available("p1", 0, 1)), (start + 200, Tick()))
    state, _, _ = run((start + 1000, reclaimed("p1", 0, 1)), state=state)
    _, soon, _ = run((start + 30_000, TrainingBegin(batch=0)), state=state)
    assert soon[0].leaving[0] == Leave("p1-w0", 0)


def test_a_second_reclaim_may_only_bring_the_deadline_forward() -> None:
    state, _, _ = run(
        (0, Tick()), (0, available("p1", 0, 1)), (200, Tick()), (1000, reclaimed("p1", 0, 1, notice_ms=5000))
    )
    same, found, refusals = run((2000, reclaimed("p1", 0, 1, notice_ms=5000)), state=state)
    assert (same, found, refusals) == (state, [], [])
    _, found, _ = run((2000, reclaimed("p1", 0, 1)), state=state)
    assert found[0].leaving == (Leave("p1-w0", 0),)


def test_a_reclaim_of_gpus_whose_deadline_has_passed_says_nothing_new() -> None:
    state, _, _ = run((0, Tick()), (0, available("p1", 0, 1)), (200, Tick()))
    state, _, _ = run((1000, reclaimed("p1", 0, 1, notice_ms=2000)), state=state)
    _, found, refusals = run((3001, reclaimed("p1", 0, 1)), state=state)
    assert (found, refusals) == ([], [])


def test_no_worker_leaves_gpus_of_which_some_were_never_there() -> None:
    """One with half of its GPUs never ran; it is not told to leave them."""
    state, _, _ = run((0, Tick()), (0, available("p0", 1)), (0, available("p1", 0, 1)), (200, Tick()))
    state, found, _ = run((1000, reclaimed("p0", 1, notice_ms=5000)), state=state)
    assert found == []
    _, found, _ = run((1000, reclaimed("p1", 1, notice_ms=5000)), state=state)
    assert found[0].leaving == (Leave("p1-w0", 6000),)


def test_training_has_its_gpus_between_begin_and_finished() -> None:
    begun, found, _ = run((0, Tick()), (1, TrainingBegin(batch=0)), (2, TrainingBegin(batch=0)))
    assert (found[1].training_batch, found[1].overlap, len(found)) == (0, (), 2)
    finished = TrainingFinished(batch=0, version=PolicyVersion(1))
    _, found, _ = run((3, finished), (4, finished), (5, TrainingBegin(batch=0)), state=begun)
    assert [(each.training_batch, each.overlap) for each in found] == [(None, ("t0-w0",))]


def test_overlap_slots_are_left_by_a_deadline_that_counts_from_the_asking() -> None:
    begun, found, _ = run((0, Tick()), (1000, TrainingBegin(batch=0)), (4000, TrainingBegin(batch=0)))
    assert [budget.leaving for budget in found[1:]] == [(Leave("t0-w0", 1000 + JOB.timeouts.return_ms),)]
    finished = TrainingFinished(batch=0, version=PolicyVersion(1))
    _, found, _ = run((9000, finished), (9500, TrainingBegin(batch=1)), state=begun)
    assert found[0].leaving == () and found[1].leaving == (Leave("t0-w0", 9500 + JOB.timeouts.return_ms),)


def test_finished_of_an_older_batch_does_not_end_the_newer_one() -> None:
    old = TrainingFinished(batch=0, version=PolicyVersion(1))
    state, _, refusals = run(
        (0, Tick()), (1, TrainingBegin(batch=0)), (2, old), (3, TrainingBegin(batch=1)), (4, old), (5, old)
    )
    assert (state.training_batch, state.trained, refusals) == (1, 0, [])


def test_a_batch_out_of_turn_does_not_stand_in_the_way_of_the_next() -> None:
    """It is one that the job has, only not now: believed, batches 0 to 4 would look old and never be trained."""
    before, _, _ = run((0, Tick()))
    state, found, refusals = run((1, TrainingBegin(batch=5)), (2, TrainingBegin(batch=1)), state=before)
    assert (state, found) == (before, []) and refusals[0].startswith("batch 5 begins, but batch 0 is next")
    state, _, _ = run((3, TrainingBegin(batch=0)), (4, TrainingBegin(batch=1)), state=before)
    assert state.training_batch == 0
    state, _, refusals = run((5, TrainingFinished(batch=0, version=PolicyVersion(1))), state=state)
    assert (state.trained, refusals) == (0, [])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (available("x9", 0), "node 'x9' is not in the job file"),
        (available("p1", 2), "node p1 has no GPU 2"),
        (available("p1", -1), "no GPU -1"),
        (available("p1"), "no GPU of node p1 is named"),
        (available("t0", 0), "training node"),
        (reclaimed("t0", 0), "only preemptible"),
        (reclaimed("r0", 0), "only preemptible"),
        (reclaimed("p1", 0), "GPUs [0] of node p1 are not available"),
        (reclaimed("p0", 0, notice_ms=-1), "negative"),
        (reclaimed("p0", 0, notice_ms=24 * 3600 * 1000 + 1), "longer than a day"),
        (NodeUp(node=NodeId("x9"), gpus=(0,), agent_incarnation=1, host="h"), "not in the job file"),
        (TrainingBegin(batch=-1), "the job has batches 0 to"),
        (TrainingBegin(batch=1_000_000), "the job has batches 0 to"),
        (TrainingFinished(batch=-2, version=PolicyVersion(0)), "the job has batches 0 to"),
        (TrainingFinished(batch=1, version=PolicyVersion(2)), "has not begun"),
        (3, "does not handle int"),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(message: object, reason: str) -> None:
    state, _, _ = run((0, Tick()), (1, available("p0", 0, 1, 2, 3)), (300, Tick()))
    after, found, refusals = run((400, message), state=state)
    assert after == state and found == [] and len(refusals) == 1 and reason in refusals[0]


def test_a_reclaim_of_some_unknown_gpus_still_takes_the_known_ones() -> None:
    state, _, _ = run((0, Tick()), (1, available("p0", 0, 1)), (300, Tick()))
    _, effects = CORE.step(state, Input(400, reclaimed("p0", 0, 1, 2)))
    assert budgets(effects)[0].dedicated == ("r0-w0",)
    assert any(isinstance(each, Note) and each.level == "warning" for each in effects)


def test_a_node_that_lacks_gpus_is_reported() -> None:
    _, effects = CORE.step(
        CORE.initial(), Input(0, NodeUp(node=NodeId("p0"), gpus=(0, 1), agent_incarnation=1, host="h"))
    )
    assert isinstance(effects[0], Note) and "lacks GPUs [2, 3]" in effects[0].text


def test_a_long_burst_names_its_first_causes_only() -> None:
    job = JobFile(nodes=(NodeSection(name="p0", zone=Zone.PREEMPTIBLE, gpus=12),))
    core = ElasticSchedulerCore(Config.of(job))
    state, _ = core.step(core.initial(), Input(0, Tick()))
    for index in range(12):
        state, _ = core.step(state, Input(1, available("p0", index)))
    _, effects = core.step(state, Input(300, Tick()))
    (budget,) = budgets(effects)
    assert len(budget.dedicated) == 12 and budget.cause.endswith("gpu.available p0[7], and 4 more")


messages = st.one_of(
    st.builds(
        lambda node, gpus: GpuAvailable(node=NodeId(node), gpus=tuple(gpus)),
        st.sampled_from(["r0", "p0", "p1", "t0", "x"]),
        st.lists(st.integers(-1, 4), max_size=5),
    ),
    st.builds(
        lambda node, gpus, notice: GpuReclaimed(node=NodeId(node), gpus=tuple(gpus), notice_ms=notice),
        st.sampled_from(["r0", "p0", "p1", "t0", "x"]),
        st.lists(st.integers(-1, 4), max_size=5),
        st.sampled_from([-1, 0, 100, 5000, 10**9]),
    ),
    st.builds(lambda batch: TrainingBegin(batch=batch), st.integers(-1, 5)),
    st.builds(lambda batch: TrainingFinished(batch=batch, version=PolicyVersion(0)), st.integers(-1, 5)),
    st.just(Tick()),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), messages), max_size=25))
def test_any_sequence_keeps_the_invariants(steps: list[tuple[int, object]]) -> None:
    state, now_ms, last_id = CORE.initial(), 0, 0
    for wait_ms, message in steps:
        now_ms += wait_ms
        state, effects = CORE.step(state, Input(now_ms, message))
        refused = any(isinstance(each, Refuse) for each in effects)
        for budget in budgets(effects):
            assert budget.budget_id == last_id + 1 and not refused
            last_id = budget.budget_id
            assert "r0-w0" in budget.dedicated
            assert not set(budget.dedicated) & {leave.worker for leave in budget.leaving}
            assert (budget.overlap == ()) == (budget.training_batch is not None)
            for slot in CORE.config.slots:
                if slot.zone is Zone.PREEMPTIBLE:
                    assert (slot.worker in budget.dedicated) == set(slot.gpus).issubset(state.available)
        assert not set(state.available) & {lost.gpu for lost in state.lost}
        assert len({lost.gpu for lost in state.lost}) == len(state.lost) <= 6
        assert all(gpu.node in ("p0", "p1") for gpu in state.available)
        # Repeating the input changes nothing more (but a reclaim of what is gone may be refused).
        again, more = CORE.step(state, Input(now_ms, message))
        assert again == state and not budgets(more)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State) == state
    _, effects = CORE.step(state, Input(now_ms + 10_000, Tick()))
    settled = budgets(effects)[-1] if budgets(effects) else state.last
    assert settled is not None and (Gpu(NodeId("p1"), 0) in state.available) >= ("p1-w0" in settled.dedicated)


def test_where_the_store_went_back_the_published_version_says_which_batch_is_next() -> None:
    core = CORE
    state, _ = core.step(core.initial(), Input(1, TrainingBegin(batch=5)))
    assert state.training_batch is None
    published = WeightsPublished(version=PolicyVersion(5), uri="/tmp/5", manifest_sha256="0" * 64, bytes=1)
    state, _ = core.step(state, Input(2, published))
    for batch, accepted in ((6, False), (5, True)):
        after, effects = core.step(state, Input(3, TrainingBegin(batch=batch)))
        assert (after.training_batch == batch) is accepted
        assert any(isinstance(effect, Refuse) for effect in effects) is not accepted
