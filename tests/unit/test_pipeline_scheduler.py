"""The asynchronous RL loop: admission, staleness, early start, retries, training hand-over."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages.agent import RolloutTask
from messages.decision_engine import BatchProgress
from messages.elastic_scheduler import TrainingBegin, TrainingFinished
from messages.ids import Activity, Epoch, Gpu, Incarnation, PolicyVersion, Role, RoleGeneration, Stage, WorkerId, Zone
from messages.pipeline_scheduler import BatchReady, Evaluated, StepFinished, TrajectoryCompleted, WeightsPublished
from messages.rollout_worker import UpdateWeights
from pearl_state.model import RoleTable, Row
from services.jobfile import JobFile
from services.pipeline_scheduler.config import Config
from services.pipeline_scheduler.core import PipelineSchedulerCore, PipelineState, TasksLost
from services.runtime.core import Input, Note, Refuse, Send, Tick

CONFIG = msgspec.structs.replace(
    Config.of(JobFile()), batch_trajectories=4, group_size=2, train_steps=3, command_retry_ms=500, in_flight=1.0
)


def table(*versions: int, activity: Activity = Activity.ACTIVE) -> RoleTable:
    rows = tuple(
        Row(
            worker=WorkerId(f"n{index}-w0"),
            gpus=(Gpu(f"n{index}", 0),),
            zone=Zone.RESERVED,
            role=Role.COLOCATED,
            activity=activity,
            stage=Stage.NONE,
            incarnation=Incarnation(1),
            role_generation=RoleGeneration(1),
            version=PolicyVersion(version),
        )
        for index, version in enumerate(versions)
    )
    return RoleTable(job="t", epoch=Epoch(1), rows=rows)


def published(version: int) -> WeightsPublished:
    return WeightsPublished(version=PolicyVersion(version), uri=f"/snap/{version}", manifest_sha256="0", bytes=1)


def end(task: RolloutTask, status: str = "completed", version: int | None = None, seq: int = 1) -> TrajectoryCompleted:
    served = task.min_version if version is None else PolicyVersion(version)
    return TrajectoryCompleted(
        trajectory=task.trajectory,
        group=task.group,
        batch=task.batch,
        retry=task.retry,
        status=status,
        reward=1.0,
        turns=1,
        generated_tokens=2,
        min_version=served,
        max_version=served,
        journal=(seq,),
        env_s=0.0,
        wall_s=0.0,
    )


def step_finished(batch: int) -> StepFinished:
    return StepFinished(
        batch=batch,
        version=PolicyVersion(batch + 1),
        train_s=1.0,
        trained_tokens=1,
        reward_mean=0.0,
        reward_std=0.0,
        loss=0.0,
        grad_norm=0.0,
        zero_variance_groups=0,
    )


class Loop:
    """A core with its state, and everything it has sent."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.core = PipelineSchedulerCore(config)
        self.state: PipelineState = self.core.initial()
        self.sent: list[object] = []
        self.notes: list[Note] = []
        self.now = 1_000_000

    def feed(self, message: object, after_ms: int = 10) -> list[object]:
        self.now += after_ms
        self.state, effects = self.core.step(self.state, Input(self.now, message))
        sent = [effect.message for effect in effects if isinstance(effect, Send)]
        self.notes += [effect for effect in effects if isinstance(effect, Note)]
        assert not [effect for effect in effects if isinstance(effect, Refuse)], effects
        self.sent += sent
        return sent

    def serve(self, version: int) -> list[object]:
        return [*self.feed(published(version)), *self.feed(table(version))]

    def tasks(self) -> list[RolloutTask]:
        return [message for message in self.sent if isinstance(message, RolloutTask)]


def kinds(messages: list[object], kind: type) -> list:
    return [message for message in messages if isinstance(message, kind)]


def test_nothing_is_admitted_before_a_version_serves() -> None:
    loop = Loop()
    assert loop.feed(published(0)) == []
    assert loop.feed(Tick()) == []
    assert len(kinds(loop.feed(table(0)), RolloutTask)) == CONFIG.batch_trajectories


def test_members_of_a_group_share_the_task_and_differ_in_sampling() -> None:
    loop = Loop()
    loop.serve(0)
    first, second, third, _ = loop.tasks()
    assert first.task_seed == second.task_seed != third.task_seed
    assert first.sample_seed != second.sample_seed
    assert first.group == second.group != third.group


def test_more_than_a_batch_in_flight_begins_the_next_one_sooner_within_the_same_bound() -> None:
    loop = Loop(msgspec.structs.replace(CONFIG, in_flight=1.5))
    loop.serve(0)
    assert [task.batch for task in loop.tasks()] == [0, 0, 0, 0, 1, 1], "half of the next batch, and no more"
    strict = Loop(msgspec.structs.replace(CONFIG, in_flight=1.5, staleness=0))
    strict.serve(0)
    assert [task.batch for task in strict.tasks()] == [0, 0, 0, 0]
    alone = Loop(msgspec.structs.replace(CONFIG, in_flight=1.5, early_start=False))
    alone.serve(0)
    assert [task.batch for task in alone.tasks()] == [0, 0, 0, 0]


def test_early_start_admits_the_next_batch_as_slots_free_up() -> None:
    loop = Loop()
    loop.serve(0)
    one, two, *_ = loop.tasks()
    assert kinds(loop.feed(end(one)), RolloutTask) == []  # a whole group does not fit yet
    admitted = kinds(loop.feed(end(two)), RolloutTask)
    assert {task.batch for task in admitted} == {1} and len(admitted) == 2


def test_batch_synchronous_waits_for_the_whole_batch() -> None:
    loop = Loop(msgspec.structs.replace(CONFIG, early_start=False))
    loop.serve(0)
    *most, last = loop.tasks()
    for each in most:
        assert kinds(loop.feed(end(each)), RolloutTask) == []
    assert {task.batch for task in kinds(loop.feed(end(last)), RolloutTask)} == {1}


def test_a_batch_beyond_the_staleness_bound_waits_for_the_version() -> None:
    loop = Loop()
    loop.serve(0)
    for each in loop.tasks():
        loop.feed(end(each))
    for each in [task for task in loop.tasks() if task.batch == 1]:
        loop.feed(end(each))
    assert {task.batch for task in loop.tasks()} == {0, 1}  # batch 2 needs version 1
    loop.feed(step_finished(0))
    loop.feed(published(1))
    loop.feed(table(0))
    assert {task.batch for task in loop.tasks()} == {0, 1}
    loop.feed(table(1))
    assert {task.batch for task in loop.tasks()} == {0, 1, 2}
    assert {task.min_version for task in loop.tasks() if task.batch == 2} == {1}


def test_a_complete_batch_is_described_before_training_begins() -> None:
    loop = Loop()
    loop.serve(0)
    first_batch = loop.tasks()
    for each in first_batch[:-1]:
        assert kinds(loop.feed(end(each)), TrainingBegin) == []
    sent = loop.feed(end(first_batch[-1]))
    ready, begin = kinds(sent, BatchReady), kinds(sent, TrainingBegin)
    assert sent.index(ready[0]) < sent.index(begin[0])
    assert [item.trajectory for item in ready[0].items] == [task.trajectory for task in first_batch]
    assert kinds(loop.feed(Tick()), TrainingBegin) == []


def test_training_finished_only_when_the_new_version_serves_everywhere() -> None:
    loop = Loop()
    loop.serve(0)
    for each in loop.tasks():
        loop.feed(end(each))
    assert kinds(loop.feed(published(1)), TrainingFinished) == []
    assert kinds(loop.feed(step_finished(0)), TrainingFinished) == []
    assert kinds(loop.feed(table(1, 0)), TrainingFinished) == []
    assert kinds(loop.feed(table(1, 1)), TrainingFinished) == [TrainingFinished(batch=0, version=PolicyVersion(1))]
    assert kinds(loop.feed(table(1, 1)), TrainingFinished) == []


def test_update_commands_are_repeated_to_those_behind_only() -> None:
    loop = Loop()
    loop.serve(0)
    loop.feed(table(0, 0))
    assert {command.worker for command in kinds(loop.feed(published(1)), UpdateWeights)} == {"n0-w0", "n1-w0"}
    assert loop.feed(table(1, 0)) == []
    assert [command.worker for command in kinds(loop.feed(Tick(), 600), UpdateWeights)] == ["n1-w0"]


def test_an_update_is_asked_for_again_when_its_time_has_come_and_not_before() -> None:
    loop = Loop()
    loop.feed(table(0, 1))
    (asked,) = kinds(loop.feed(published(1)), UpdateWeights)
    assert asked.worker == "n0-w0"
    assert kinds(loop.feed(Tick(), CONFIG.command_retry_ms - 1), UpdateWeights) == []
    assert kinds(loop.feed(Tick(), 1), UpdateWeights) == [asked]


def test_one_worker_that_never_updates_does_not_stop_the_job() -> None:
    loop = Loop()
    loop.serve(0)
    loop.feed(published(1))
    loop.feed(table(1, 0))
    assert loop.state.serving == 0
    loop.feed(Tick(), CONFIG.update_patience_ms + 1)
    assert loop.state.serving == 1
    assert "update_late" in [note.action for note in loop.notes]


def test_a_late_worker_is_told_until_it_has_the_version() -> None:
    loop = Loop()
    loop.serve(0)
    loop.feed(published(1))
    loop.feed(table(1, 0))
    loop.feed(Tick(), CONFIG.update_patience_ms + 1)
    assert loop.state.serving == 1
    assert [command.worker for command in kinds(loop.feed(Tick(), 600), UpdateWeights)] == ["n1-w0"]
    assert loop.feed(table(1, 1)) == [] and loop.feed(Tick(), 600) == []


def test_training_ends_although_nobody_serves_so_that_its_gpus_can_be_lent() -> None:
    loop = Loop()
    loop.serve(0)
    for each in loop.tasks():
        loop.feed(end(each))
    loop.feed(table(0, activity=Activity.INACTIVE))  # all spot workers are reclaimed meanwhile
    loop.feed(published(1))
    assert kinds(loop.feed(step_finished(0)), TrainingFinished) == [TrainingFinished(batch=0, version=PolicyVersion(1))]


def test_a_repeated_end_counts_once() -> None:
    loop = Loop()
    loop.serve(0)
    task = loop.tasks()[0]
    loop.feed(end(task))
    before = loop.state
    loop.feed(end(task))
    assert loop.state == before and loop.state.ended == 1


def test_a_failed_episode_is_retried_then_its_group_replaced() -> None:
    config = msgspec.structs.replace(CONFIG, max_retries=1)
    loop = Loop(config)
    loop.serve(0)
    task = loop.tasks()[0]
    (again,) = kinds(loop.feed(end(task, "failed")), RolloutTask)
    assert (again.trajectory, again.retry, again.task_seed) == (task.trajectory, 1, task.task_seed)
    assert again.sample_seed != task.sample_seed
    fresh = kinds(loop.feed(end(again, "failed")), RolloutTask)
    assert len(fresh) == 2 and fresh[0].group == "b0-g0r1" and fresh[0].task_seed != task.task_seed
    assert loop.state.replaced_groups == 1
    assert loop.feed(end(loop.tasks()[1])) == []  # the old group's other member ends in vain


def test_what_is_said_again_of_an_earlier_try_changes_nothing() -> None:
    loop = Loop()
    loop.serve(0)
    task = loop.tasks()[0]
    (again,) = kinds(loop.feed(end(task, "failed")), RolloutTask)
    before = loop.state
    assert loop.feed(end(task, "failed")) == [], "the broker delivers it again"
    assert loop.feed(end(task)) == [], "a second agent ended the try that the first gave up"
    assert loop.state == before
    loop.feed(end(again))
    assert loop.state.ended == 1


def test_tokens_older_than_the_bound_never_enter_a_batch() -> None:
    loop = Loop()
    loop.serve(0)
    for each in loop.tasks():
        loop.feed(end(each))
    for each in [task for task in loop.tasks() if task.batch == 1]:
        loop.feed(end(each))
    loop.feed(step_finished(0))
    loop.serve(1)
    task = next(task for task in loop.tasks() if task.batch == 2)
    (again,) = kinds(loop.feed(end(task, version=0)), RolloutTask)
    assert again.retry == 1


def test_the_job_ends_after_its_train_steps() -> None:
    loop = Loop()
    loop.serve(0)
    for version in range(CONFIG.train_steps):
        for each in [task for task in loop.tasks() if task.batch == version]:
            loop.feed(end(each))
        loop.feed(step_finished(version))
        loop.serve(version + 1)
    assert {task.batch for task in loop.tasks()} == {0, 1, 2}
    assert len(kinds(loop.sent, TrainingFinished)) == CONFIG.train_steps
    assert loop.state.batches == ()


def test_progress_is_reported_at_coarse_marks_with_what_remains() -> None:
    """R of eq. 7: what is left of the batch, and as much of the next as its freed slots may still admit."""
    for early_start, remaining in ((False, [4, 3, 2, 1]), (True, [4, 4, 4, 2])):
        loop = Loop(msgspec.structs.replace(CONFIG, early_start=early_start))
        loop.serve(0)
        for each in loop.tasks()[:3]:
            loop.feed(end(each))
        told = kinds(loop.sent, BatchProgress)
        assert [message.remaining for message in told] == remaining
        assert [message.done for message in told] == [0, 1, 2, 3]


def test_progress_is_of_the_batch_that_training_waits_for_and_begins_anew_with_the_next() -> None:
    loop = Loop()
    loop.serve(0)
    first = loop.tasks()
    for each in first[:2]:
        loop.feed(end(each))
    (early,) = [task for task in loop.tasks() if task.batch == 1][:1]
    before = len(kinds(loop.sent, BatchProgress))
    loop.feed(end(early))
    assert len(kinds(loop.sent, BatchProgress)) == before
    for each in first[2:]:
        loop.feed(end(each))
    assert kinds(loop.sent, BatchProgress)[-1].batch == 0  # of its end, training.begin tells
    loop.feed(step_finished(0))
    latest = kinds(loop.sent, BatchProgress)[-1]
    assert (latest.batch, latest.done) == (1, 1)


def test_held_out_episodes_never_enter_a_batch() -> None:
    loop = Loop(msgspec.structs.replace(CONFIG, evaluate_every=1, evaluate_episodes=2))
    loop.serve(0)
    held_out = [task for task in loop.tasks() if task.evaluation]
    assert len(held_out) == 2 and {task.temperature for task in held_out} == {0.0}
    loop.feed(end(held_out[0]))
    assert kinds(loop.feed(end(held_out[1])), Evaluated)[0].reward_mean == 1.0
    assert loop.state.ended == 0


def test_the_journal_is_kept_until_what_was_trained_from_it_is_committed() -> None:
    """Members of batch k + 1 end between those of batch k, so the newest entry of k is above entries still needed."""
    loop = Loop()
    loop.serve(0)
    seq, newest = 0, 0
    ended: set[str] = set()
    for version in range(CONFIG.train_steps):
        while due := [task for task in loop.tasks() if task.trajectory not in ended and task.batch == version]:
            early = [task for task in loop.tasks() if task.trajectory not in ended and task.batch == version + 1]
            for each in (*early[:1], due[0]):
                seq += 1
                ended.add(each.trajectory)
                loop.feed(end(each, seq=seq))
        loop.feed(step_finished(version))
        needed = [item.journal[0] for batch in loop.state.batches for item in batch.items()]
        last = version + 1 == CONFIG.train_steps
        assert last or min(needed) < seq, "some of the next batch have ended already"
        assert all(loop.state.journal_floor < entry for entry in needed)
        assert loop.state.journal_floor == newest, "and what the batch before was trained from is let go"
        newest = seq
        loop.serve(version + 1)


def test_the_journal_of_a_slow_evaluation_is_kept_until_it_ends() -> None:
    """Purged, its next turn would be refused, and the episode begun anew: also when a newer evaluation has begun and nobody waits for it."""
    loop = Loop(msgspec.structs.replace(CONFIG, train_steps=5, evaluate_every=2, evaluate_episodes=2))
    loop.serve(0)
    quick, slow = (task for task in loop.tasks() if task.evaluation)
    loop.feed(end(quick, seq=1))
    seq = 2  # of the first turn of the slow episode
    for version in range(4):
        for each in [task for task in loop.tasks() if task.batch == version and not task.evaluation]:
            seq += 1
            loop.feed(end(each, seq=seq))
        if version == 3:
            assert [(each.group, each.left) for each in loop.state.held_out.abandoned] == [
                ("eval-v0", (slow.trajectory,))
            ]
            loop.feed(end(slow, seq=2))
            assert loop.state.held_out.abandoned == ()
        loop.feed(step_finished(version))
        if version < 3:
            assert loop.state.journal_floor == 0
            loop.serve(version + 1)
    assert (current := loop.state.held_out.current) is not None and current.version == 2
    assert 1 < loop.state.journal_floor <= current.floor, "of the newer one nothing has ended"


def test_evaluations_that_never_end_do_not_keep_the_journal_for_good() -> None:
    loop = Loop(msgspec.structs.replace(CONFIG, train_steps=9, evaluate_every=1, evaluate_episodes=1))
    seq = 0
    for version in range(8):
        loop.serve(version)
        for each in [task for task in loop.tasks() if task.batch == version and not task.evaluation]:
            seq += 1
            loop.feed(end(each, seq=seq))
        loop.feed(step_finished(version))
    assert [each.group for each in loop.state.held_out.abandoned] == ["eval-v3", "eval-v4", "eval-v5", "eval-v6"]
    assert loop.state.journal_floor > 0


def test_one_held_out_episode_that_never_ends_does_not_keep_the_journal_for_good() -> None:
    """All evaluations after it end, so that it is the only one that is waited for."""
    loop = Loop(msgspec.structs.replace(CONFIG, train_steps=12, evaluate_every=1, evaluate_episodes=2))
    seq = 0
    for version in range(11):
        loop.serve(version)
        for each in [task for task in loop.tasks() if task.batch == version and task.trajectory != "eval-v0-m0"]:
            seq += 1
            loop.feed(end(each, seq=seq))
        loop.feed(step_finished(version))
        held = [each.group for each in loop.state.held_out.abandoned]
        assert held == (["eval-v0"] if 1 <= version <= 4 else [])
        assert (loop.state.journal_floor > 0) == (version > 4)


def test_a_held_out_episode_whose_task_is_lost_is_given_out_again() -> None:
    loop = Loop(msgspec.structs.replace(CONFIG, evaluate_every=1, evaluate_episodes=2))
    loop.serve(0)
    lost, other = (task for task in loop.tasks() if task.evaluation)
    assert {(lost.trajectory, 0), (other.trajectory, 0)} <= loop.core.in_flight(loop.state)
    loop.feed(end(other))
    assert (other.trajectory, 0) not in loop.core.in_flight(loop.state)
    _, effects = loop.core.step(loop.state, Input(loop.now, TasksLost(frozenset({(lost.trajectory, 0)}))))
    assert [each.message for each in effects if isinstance(each, Send)] == [lost]


def test_the_end_of_a_held_out_episode_counts_once() -> None:
    loop = Loop(msgspec.structs.replace(CONFIG, evaluate_every=1, evaluate_episodes=2))
    loop.serve(0)
    first, second = (task for task in loop.tasks() if task.evaluation)
    for each in (end(first), end(second), msgspec.structs.replace(end(first), reward=-1.0)):
        loop.feed(each)
    assert [each.reward_mean for each in kinds(loop.sent, Evaluated)] == [1.0]


def test_state_survives_a_restart_at_any_point() -> None:
    loop = Loop()
    loop.serve(0)
    loop.feed(end(loop.tasks()[0]))
    data = msgspec.json.encode(loop.state)
    assert msgspec.json.decode(data, type=PipelineState) == loop.state


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_invariants_hold_for_any_order_of_events(data: st.DataObject) -> None:
    staleness = data.draw(st.integers(0, 2))
    config = msgspec.structs.replace(CONFIG, train_steps=4, staleness=staleness, max_retries=1)
    loop = Loop(config)
    loop.serve(0)
    trained: set[int] = set()
    live: dict[tuple[str, int], RolloutTask] = {}
    seen = 0
    for _ in range(400):
        for task in loop.tasks()[seen:]:
            assert task.batch <= loop.state.serving + staleness
            live[task.trajectory, task.retry] = task
        seen = len(loop.tasks())
        assert sum(batch.running for batch in loop.state.batches) <= config.batch_trajectories
        begun = [message.batch for message in kinds(loop.sent, TrainingBegin)]
        assert begun == sorted(set(begun))
        due = [batch for batch in begun if batch not in trained]
        choices = [*sorted(live)] + ["train"] * len(due)
        if not choices:
            break
        choice = data.draw(st.sampled_from(choices))
        if choice == "train":
            loop.feed(step_finished(due[0]))
            trained.add(due[0])
            loop.serve(due[0] + 1)
        else:
            task = live.pop(choice)
            loop.feed(end(task, data.draw(st.sampled_from(["completed"] * 9 + ["failed"]))))
    for ready in kinds(loop.sent, BatchReady):
        assert len({item.trajectory for item in ready.items}) == config.batch_trajectories
    assert trained == set(range(config.train_steps)) or live or due


def test_a_step_that_skips_a_batch_is_refused() -> None:
    core = PipelineSchedulerCore(CONFIG)
    _, effects = core.step(core.initial(), Input(1, step_finished(5)))
    assert isinstance(effects[0], Refuse)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_min_version_follows_the_bound(staleness: int) -> None:
    core = PipelineSchedulerCore(msgspec.structs.replace(CONFIG, staleness=staleness))
    assert [core.min_version(batch) for batch in range(4)] == [max(0, batch - staleness) for batch in range(4)]


# -- a broker that lost its last moments


def test_a_trainer_that_is_ahead_takes_the_loop_along() -> None:
    loop = Loop()
    loop.serve(0)
    assert {task.batch for task in loop.tasks()} == {0}
    loop.feed(published(2))  # batches 0 and 1 were trained; the stream does not know it any more
    loop.feed(table(2))
    assert (loop.state.trained, loop.state.serving, loop.state.admitted) == (2, 2, 3)
    assert [batch.batch for batch in loop.state.batches] == [2]
    assert {task.batch for task in loop.tasks()} == {0, 2}
    assert "caught_up" in [note.action for note in loop.notes]
    before = loop.state
    loop.feed(step_finished(1))
    assert loop.state == before, "the trainer says its last step again: it is accounted for"


def test_a_trainer_that_is_ahead_leaves_what_runs_for_its_next_batch_alone() -> None:
    loop = Loop()
    loop.serve(0)
    for each in loop.tasks()[:3]:
        loop.feed(end(each))
    for each in [task for task in loop.tasks() if task.batch == 1]:
        loop.feed(end(each))
    (batch,) = [batch for batch in loop.state.batches if batch.batch == 1]
    assert (len(batch.groups), batch.ended, batch.running) == (CONFIG.groups, 2, 2), "all of batch 1 was admitted"
    loop.feed(published(1))  # trained from a batch 0 that this state never saw complete
    loop.feed(table(1))
    (batch,) = [batch for batch in loop.state.batches if batch.batch == 1]
    assert (batch.ended, batch.running) == (2, 2)
    given = [task.trajectory for task in loop.tasks()]
    assert len(given) == len(set(given)), "and none of it was given out twice"
    assert {task.batch for task in loop.tasks()} == {0, 1, 2}


def test_the_journals_floor_does_not_fall_when_the_trainer_got_ahead() -> None:
    """What is below it was let go; an evaluation that begins after that has nothing there."""
    loop = Loop(msgspec.structs.replace(CONFIG, evaluate_every=1, evaluate_episodes=1, staleness=0))
    loop.serve(0)
    for seq, each in enumerate(loop.tasks(), 1):
        loop.feed(end(each, seq=seq))
    loop.feed(step_finished(0))
    floor = loop.state.journal_floor
    assert floor > 0
    loop.serve(1)
    loop.serve(2)  # batch 1 was trained; the stream does not know it any more
    for seq, each in enumerate([task for task in loop.tasks() if task.batch == 2 and not task.evaluation], 10):
        loop.feed(end(each, seq=seq))
    loop.feed(step_finished(2))
    assert loop.state.trained == 3 and loop.state.journal_floor == floor, "version 2 is still being evaluated"


def test_training_that_was_begun_when_the_trainer_got_ahead_is_finished() -> None:
    loop = Loop()
    loop.serve(0)
    for task in loop.tasks():
        loop.feed(end(task))
    assert loop.state.begun == 0
    loop.feed(published(2))
    loop.feed(table(2))
    assert TrainingFinished(batch=0, version=PolicyVersion(2)) in loop.sent
    assert loop.state.begun is None


def test_tasks_that_the_broker_lost_are_given_out_again() -> None:
    loop = Loop()
    loop.serve(0)
    tasks = loop.tasks()
    loop.feed(end(tasks[0]))
    assert loop.core.in_flight(loop.state) == {(task.trajectory, task.retry) for task in loop.tasks()[1:]}
    seen = len(loop.tasks())
    loop.feed(TasksLost(frozenset((task.trajectory, task.retry) for task in tasks[:2])))
    again = loop.tasks()[seen:]
    assert again == [tasks[1]], "what has ended is not given out again"


def test_a_batch_takes_no_token_of_a_version_that_only_training_on_it_can_have_made() -> None:
    loop = Loop()
    loop.serve(0)
    for task in loop.tasks():
        loop.feed(end(task, version=2))
    assert (loop.state.ended, loop.state.begun) == (0, None)
    assert kinds(loop.sent, BatchReady) == []
    loop.feed(published(2))
    assert loop.state.trained == 2
