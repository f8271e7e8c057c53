"""The asynchronous RL loop (paper 4.1, DESIGN 7): which groups run, when training begins, which version serves.

Owns: task groups, staleness, batches, policy versions. Never talks to the trainer: `training.begin` goes to the
elastic scheduler, which gets the training GPUs back first.

Invariants:
- Batch k trains version k into k + 1, and is admitted only while the serving version is at least k - staleness.
- At most `most_in_flight` trajectories are in flight (held-out evaluation, and what still runs of a group given up, apart).
- A trajectory's end counts once; a batch is exactly its groups, each exactly its size.
"""

from __future__ import annotations

import math
from typing import assert_never

import msgspec

from messages.agent import RolloutTask
from messages.decision_engine import BatchProgress
from messages.elastic_scheduler import TrainingBegin, TrainingFinished
from messages.envelope import Message, brief
from messages.ids import Activity, PolicyVersion, Role, Stage, WorkerId
from messages.pipeline_scheduler import (
    BatchItem,
    BatchReady,
    StepFinished,
    TrajectoryCompleted,
    WeightsPublished,
)
from messages.rollout_worker import UpdateWeights
from messages.subjects import message_id
from pearl_state.model import RoleTable, Row
from pearl_state.peers import wrong_version, wrong_weights
from services.pipeline_scheduler.batches import (
    Batch,
    Group,
    Member,
    group_id,
    locate,
    task,
    trajectory_id,
    with_group,
    with_member,
)
from services.pipeline_scheduler.config import Config
from services.pipeline_scheduler.core_evaluation import HeldOut
from services.runtime.core import Effect, Effects, Input, Note, Refuse, Send, Tick

PROGRESS_MARKS = 8
"""Batch progress is reported at every eighth: often enough for the gate of eq. 7, rare enough to decide on."""


MOST_REWARD = 1e9
"""Beyond it float32, in which advantages are computed, has no precision left."""


class TasksLost(msgspec.Struct, frozen=True):
    """Tasks (trajectory, retry) that are in flight by this state, and neither in the queue nor ended: the broker lost them."""

    tasks: frozenset[tuple[str, int]]


class PipelineState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the loop needs after a restart."""

    batches: tuple[Batch, ...] = ()  # open ones, oldest first: admitted, not yet trained
    admitted: int = 0  # batches that have at least one admitted group
    trained: int = 0  # train steps finished; also the version they made
    begun: int | None = None  # batch whose training began and whose result does not serve yet
    published: WeightsPublished | None = None
    published_ms: int = 0
    serving: PolicyVersion = PolicyVersion(-1)
    asked_ms: int = 0  # when UpdateWeights was last sent
    held_out: HeldOut = HeldOut()
    ended: int = 0  # trajectories that counted
    retried: int = 0
    replaced_groups: int = 0
    floors: tuple[int, ...] = ()  # newest journal sequence of each of the last batches trained
    journal_floor: int = 0  # journal sequences up to this are no longer needed by anyone


class PipelineSchedulerCore:
    """See the module's docstring."""

    name = "pipeline_scheduler"
    inputs: tuple[type[Message], ...] = (TrajectoryCompleted, WeightsPublished, StepFinished)
    state_type = PipelineState

    def __init__(self, config: Config) -> None:
        self.config = config
        self._table: RoleTable | None = None  # replica; not state: it comes again after a restart

    def initial(self) -> PipelineState:
        """Nothing admitted, nothing published."""
        return PipelineState()

    def step(self, state: PipelineState, event: Input) -> tuple[PipelineState, Effects]:
        """See `services.runtime.core.Core`."""
        match event.message:
            case TrajectoryCompleted() as message:
                state, effects = self.on_trajectory_completed(state, message)
            case WeightsPublished() as message:
                state, effects = self.on_weights_published(state, message, event.now_ms)
            case StepFinished() as message:
                state, effects = self.on_step_finished(state, message)
            case RoleTable() as table:
                self._table = table
                effects = ()
            case TasksLost() as lost:
                effects = self.on_tasks_lost(state, lost, event.now_ms)
            case Tick():
                effects = ()
            case _:
                assert_never(event.message)  # pyright: ignore[reportArgumentType]
        state, more = self.converge(state, event.now_ms)
        return state, (*effects, *more)

    # --- what happened

    def on_trajectory_completed(
        self, state: PipelineState, message: TrajectoryCompleted
    ) -> tuple[PipelineState, Effects]:
        """Count an end once; a failed one is tried again, or its group replaced."""
        if problem := self._problem_of_end(message):
            return state, (Refuse(problem),)
        if message.trajectory.startswith("eval-"):
            held_out, effects = state.held_out.ended(message, self.config)
            return msgspec.structs.replace(state, held_out=held_out), effects
        found = locate(state.batches, message)
        if found is None:
            return state, (Note("ignored", f"end of {message.trajectory}, which no open batch waits for", "debug"),)
        batch, group, index = found
        member = group.members[index]
        if member.ended is not None or message.retry != member.retry:
            return state, (Note("ignored", f"repeated end of {message.trajectory} try {message.retry}", "debug"),)
        if message.status != "failed" and message.max_version > batch.batch:
            # Only training on this very batch makes that version: the broker lost it, and the trainer will say so.
            text = f"end of {message.trajectory}: tokens of version {message.max_version} in batch {batch.batch}"
            return state, (Note("too_new", text, "warning"),)
        stale = message.status != "failed" and message.min_version < batch.batch - self.config.staleness
        if message.status == "failed" or stale:
            reason = f"tokens of version {message.min_version}" if stale else message.reason
            return self._retry(state, batch, group, index, reason)
        item = BatchItem(message.trajectory, message.group, message.reward, message.status, message.journal)
        batch = with_member(batch, group, index, msgspec.structs.replace(member, ended=item))
        return msgspec.structs.replace(_with_batch(state, batch), ended=state.ended + 1), ()

    def on_weights_published(
        self, state: PipelineState, message: WeightsPublished, now_ms: int
    ) -> tuple[PipelineState, Effects]:
        """A newer version to bring to every active worker."""
        if problem := wrong_weights(message, self.config.train_steps):
            return state, (Refuse(problem),)
        if state.published is not None and message.version <= state.published.version:
            return state, ()
        notes: Effects = ()
        if message.version > state.trained + (state.begun == state.trained):
            state, notes = self._catch_up(state, message.version)
        return msgspec.structs.replace(state, published=message, published_ms=now_ms, asked_ms=0), notes

    def _catch_up(self, state: PipelineState, version: int) -> tuple[PipelineState, Effects]:
        """The trainer is ahead of this state: the broker lost what happened since. Batches below its version are trained.

        What is under way for them is in vain; its ends will be ignored.
        """
        forgotten = sum(batch.running + batch.ended for batch in state.batches if batch.batch < version)
        text = f"version {version} is published, {state.trained} was due: {forgotten} trajectories of trained batches are in vain"
        state = msgspec.structs.replace(
            state,
            batches=tuple(batch for batch in state.batches if batch.batch >= version),
            trained=version,
            admitted=max(state.admitted, version),
            floors=(),
        )
        return state, (Note("caught_up", text, "warning"),)

    def on_tasks_lost(self, state: PipelineState, lost: TasksLost, now_ms: int) -> Effects:
        """Give out again what is still in flight, under ids of their own; a task that runs twice is journalled once."""
        again = [
            self._task(batch.batch, group, member)
            for batch in state.batches
            for group in batch.groups
            for member in range(len(group.members))
            if not group.waiting and group.members[member].ended is None
        ]
        again += state.held_out.tasks_left(self.config)
        effects: list[Effect] = []
        for each in again:
            if (each.trajectory, each.retry) in lost.tasks:
                effects.append(Note("task_lost", f"{each.trajectory} try {each.retry}: given out again", "warning"))
                effects.append(Send(each, msg_id=f"{message_id(each)}:{now_ms}"))
        return tuple(effects)

    def on_step_finished(self, state: PipelineState, message: StepFinished) -> tuple[PipelineState, Effects]:
        """The batch is committed: forget it, and let its journal go in time."""
        if message.batch < state.trained:
            return state, (Refuse(f"batch {message.batch} is negative"),) if message.batch < 0 else ()
        if message.batch > state.trained:
            return state, (Refuse(f"train step of batch {message.batch} while {state.trained} is due"),)
        if state.begun != message.batch or not math.isfinite(message.reward_mean):
            return state, (
                Refuse(f"train step of batch {message.batch}, which has not begun, or a reward that is none"),
            )
        batch = next((batch for batch in state.batches if batch.batch == message.batch), None)
        newest = max((seq for item in (batch.items() if batch else ()) for seq in item.journal), default=0)
        # Batch k + 1 was admitted only after batch k - staleness was trained, so every journal entry up to the newest of
        # that one belongs to batches that are trained by now.
        floors = (*state.floors, newest)[-(self.config.staleness + 1) :]
        complete = len(floors) == self.config.staleness + 1
        floor = floors[0] if complete else state.journal_floor
        floor = min((floor, *(max(each, state.journal_floor) for each in state.held_out.floors(self.config))))
        return msgspec.structs.replace(
            state,
            batches=tuple(other for other in state.batches if other.batch != message.batch),
            trained=message.batch + 1,
            floors=floors,
            journal_floor=floor,
        ), ()

    def _problem_of_end(self, message: TrajectoryCompleted) -> str:
        """What nobody can mean by the end of a trajectory, or ""."""
        if message.status not in ("completed", "truncated", "failed"):
            return f"{brief(message.trajectory, 80)} ended as {brief(message.status, 40)!r}"
        if not math.isfinite(message.reward) or abs(message.reward) > MOST_REWARD:
            return f"{brief(message.trajectory, 80)} has reward {message.reward}"
        if wrong := wrong_version(message.batch, self.config.train_steps):  # held-out episodes: the last version's too
            return f"{brief(message.trajectory, 80)}: {wrong}"
        if min(message.retry, message.turns, message.generated_tokens) < 0 or len(message.journal) != message.turns:
            return f"{brief(message.trajectory, 80)}: {message.turns} turns and {len(message.journal)} journal entries"
        if not 0 <= message.min_version <= message.max_version <= self.config.train_steps:
            return f"{brief(message.trajectory, 80)}: versions {message.min_version} to {message.max_version}"
        return ""

    # --- what follows from it

    def converge(self, state: PipelineState, now_ms: int) -> tuple[PipelineState, Effects]:
        """Bring workers to the published version, begin and finish training, admit groups. Harmless to repeat."""
        effects: list[Effect] = []
        state = self._update_workers(state, now_ms, effects)
        if state.begun is not None and state.trained > state.begun and state.serving >= state.trained:
            effects.append(Send(TrainingFinished(batch=state.begun, version=PolicyVersion(state.trained))))
            state = msgspec.structs.replace(state, begun=None)
        held_out, tasks = state.held_out.began(state.serving, state.floors[-1] if state.floors else 0, self.config)
        state = msgspec.structs.replace(state, held_out=held_out)
        effects.extend(tasks)
        state = self._begin_training(state, effects)
        state = self._admit(state, effects)
        state = self._tell_progress(state, effects)
        return state, tuple(effects)

    def _update_workers(self, state: PipelineState, now_ms: int, effects: list[Effect]) -> PipelineState:
        if self._table is None or state.published is None:
            return state
        active = _active(self._table)
        published = state.published
        behind = [row for row in active if row.version < published.version]
        if state.serving < published.version:
            patience_over = now_ms - state.published_ms > self.config.update_patience_ms
            late = bool(behind) and patience_over and len(behind) < len(active)
            if late:
                names = ", ".join(row.worker for row in behind)
                effects.append(Note("update_late", f"version {published.version} serves without {names}", "warning"))
            # Without any worker training must still end: it may be the GPUs it then lends that rollout goes on with. Who
            # joins later does so at the newest version.
            nobody = state.begun is not None and not _has_workers(self._table)
            if late or nobody or (active and not behind):
                state = msgspec.structs.replace(state, serving=published.version)
        if behind and now_ms - state.asked_ms >= self.config.command_retry_ms:
            effects.extend(
                Send(
                    UpdateWeights(
                        worker=WorkerId(row.worker),
                        incarnation=row.incarnation,
                        version=published.version,
                        uri=published.uri,
                        manifest_sha256=published.manifest_sha256,
                    )
                )
                for row in behind
            )
            return msgspec.structs.replace(state, asked_ms=now_ms)
        return state

    def _begin_training(self, state: PipelineState, effects: list[Effect]) -> PipelineState:
        batch = state.batches[0] if state.batches else None
        if state.begun is not None or batch is None or batch.batch != state.trained:
            return state
        if batch.ended < self.config.batch_trajectories:
            return state
        items = batch.items()
        effects.append(Send(BatchReady(batch=batch.batch, items=items)))
        effects.append(Send(TrainingBegin(batch=batch.batch)))
        return msgspec.structs.replace(state, begun=batch.batch)

    def _admit(self, state: PipelineState, effects: list[Effect]) -> PipelineState:
        running = sum(batch.running for batch in state.batches)
        while running + self.config.group_size <= self.config.most_in_flight:
            waiting = ((batch, group) for batch in state.batches for group in batch.groups if group.waiting)
            batch, group = next(waiting, (None, None))
            if batch is None or group is None:
                batch = self._admissible(state)
                if batch is None:
                    break
                group = Group(index=len(batch.groups), members=(Member(),) * self.config.group_size)
                batch = msgspec.structs.replace(batch, groups=(*batch.groups, group))
            group = msgspec.structs.replace(group, waiting=False)
            state = _with_batch(state, with_group(batch, group))
            state = msgspec.structs.replace(state, admitted=max(state.admitted, batch.batch + 1))
            effects.extend(Send(message) for message in self._tasks(batch.batch, group))
            running += self.config.group_size
        return state

    def _admissible(self, state: PipelineState) -> Batch | None:
        """The batch that may admit its next group now, or None."""
        newest = state.batches[-1] if state.batches else None
        if newest is not None and len(newest.groups) < self.config.groups:
            batch = newest
        else:
            if state.admitted >= self.config.train_steps:
                return None
            if not self.config.early_start and newest is not None and newest.ended < self.config.batch_trajectories:
                return None
            batch = Batch(batch=state.admitted)
        if state.serving < 0 or state.serving < batch.batch - self.config.staleness:
            return None
        return batch

    def in_flight(self, state: PipelineState) -> frozenset[tuple[str, int]]:
        """Tasks (trajectory, retry) that were given out and have not ended."""
        trained_on = {
            (trajectory_id(batch.batch, group, index), member.retry)
            for batch in state.batches
            for group in batch.groups
            for index, member in enumerate(group.members)
            if not group.waiting and member.ended is None
        }
        return frozenset(
            {*trained_on, *((each.trajectory, each.retry) for each in state.held_out.tasks_left(self.config))}
        )

    def _tasks(self, batch: int, group: Group) -> tuple[RolloutTask, ...]:
        return tuple(self._task(batch, group, member) for member in range(len(group.members)))

    def _task(self, batch: int, group: Group, member: int) -> RolloutTask:
        config = self.config
        return task(config.seed, config.groups, batch, group, member, self.min_version(batch), config.temperature)

    def min_version(self, batch: int) -> PolicyVersion:
        """Oldest version that may generate for a batch (DESIGN 7)."""
        return PolicyVersion(max(0, batch - self.config.staleness))

    def _retry(
        self, state: PipelineState, batch: Batch, group: Group, index: int, reason: str
    ) -> tuple[PipelineState, Effects]:
        member = group.members[index]
        if member.retry < self.config.max_retries:
            batch = with_member(batch, group, index, Member(retry=member.retry + 1))
            again = next(other for other in batch.groups if other.index == group.index)
            note = Note("retry", f"{group_id(batch.batch, group)} member {index}: {reason}", "warning")
            state = msgspec.structs.replace(_with_batch(state, batch), retried=state.retried + 1)
            return state, (note, Send(self._task(batch.batch, again, index)))
        fresh = Group(
            index=group.index,
            replacement=group.replacement + 1,
            waiting=True,
            members=(Member(),) * self.config.group_size,
        )
        note = Note("replace_group", f"{group_id(batch.batch, group)} given up: {reason}", "warning")
        state = _with_batch(state, with_group(batch, fresh))
        state = msgspec.structs.replace(state, replaced_groups=state.replaced_groups + 1)
        return state, (note,)

    def _tell_progress(self, state: PipelineState, effects: list[Effect]) -> PipelineState:
        """At coarse marks, how far the batch is that training waits for. Of its end `training.begin` tells."""
        if not state.batches:
            return state
        batch, size = state.batches[0], self.config.batch_trajectories
        mark = batch.ended * PROGRESS_MARKS // size
        if mark <= batch.marked or batch.ended >= size:
            return state
        left = size - batch.ended
        remaining = min(size, left + min(left, self._admissible_next(state, batch.batch + 1)))
        effects.append(Send(BatchProgress(batch=batch.batch, size=size, done=batch.ended, remaining=remaining)))
        return _with_batch(state, msgspec.structs.replace(batch, marked=mark))

    def _admissible_next(self, state: PipelineState, batch: int) -> int:
        """Trajectories of the next batch that may still be admitted while this one runs: one in each slot that frees up.

        They are work too that borrowed GPUs do before training begins (R of eq. 7, DESIGN 5).
        """
        allowed = batch < self.config.train_steps and state.serving >= batch - self.config.staleness
        if not self.config.early_start or not allowed:
            return 0
        admitted = next((len(other.groups) for other in state.batches if other.batch == batch), 0)
        return (self.config.groups - admitted) * self.config.group_size


def _active(table: RoleTable) -> tuple[Row, ...]:
    """Rollout workers that serve."""
    return tuple(row for row in table.rows if row.activity is Activity.ACTIVE and row.role is not Role.TRAINING)


def _has_workers(table: RoleTable) -> bool:
    """Whether some rollout worker serves, or is changing role and will."""
    return any(
        row.role is not Role.TRAINING and (row.activity is Activity.ACTIVE or row.stage is Stage.SWITCHING)
        for row in table.rows
    )


def _with_batch(state: PipelineState, batch: Batch) -> PipelineState:
    known = any(other.batch == batch.batch for other in state.batches)
    batches = (
        tuple(batch if other.batch == batch.batch else other for other in state.batches)
        if known
        else (*state.batches, batch)
    )
    return msgspec.structs.replace(state, batches=batches)
