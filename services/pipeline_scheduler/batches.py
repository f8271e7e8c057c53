"""Batches of groups of trajectories: pure bookkeeping of what was admitted and what has ended.

A *slot* is one member of one group of one batch. Its trajectory id never changes; `retry` counts the tries at it. A group
whose member failed on every try is *replaced*: a new task, new trajectory ids, the same place in the batch.
"""

from __future__ import annotations

import hashlib

import msgspec

from messages.agent import RolloutTask
from messages.ids import GroupId, PolicyVersion, TrajectoryId
from messages.pipeline_scheduler import BatchItem, TrajectoryCompleted


class Member(msgspec.Struct, frozen=True):
    """One slot. `ended` is None while it runs."""

    retry: int = 0
    ended: BatchItem | None = None


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories of one task. `replacement` counts the groups given up at this place; a replacement waits for room."""

    index: int
    replacement: int = 0
    waiting: bool = False  # its tasks are not sent yet
    members: tuple[Member, ...]

    @property
    def running(self) -> int:
        """Members in flight."""
        return 0 if self.waiting else sum(member.ended is None for member in self.members)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What trains version `batch` into `batch` + 1; `groups` are those admitted so far."""

    batch: int
    groups: tuple[Group, ...] = ()
    marked: int = -1  # progress reported so far, in eighths; -1: none yet

    @property
    def running(self) -> int:
        """Trajectories in flight."""
        return sum(group.running for group in self.groups)

    @property
    def ended(self) -> int:
        """Trajectories that have ended."""
        return sum(member.ended is not None for group in self.groups for member in group.members)

    def items(self) -> tuple[BatchItem, ...]:
        """All ended members, in slot order."""
        return tuple(member.ended for group in self.groups for member in group.members if member.ended is not None)


def group_id(batch: int, group: Group) -> GroupId:
    """`b3-g2`, or `b3-g2r1` for its first replacement."""
    suffix = f"r{group.replacement}" if group.replacement else ""
    return GroupId(f"b{batch}-g{group.index}{suffix}")


def trajectory_id(batch: int, group: Group, member: int) -> TrajectoryId:
    """`b3-g2-m5`."""
    return TrajectoryId(f"{group_id(batch, group)}-m{member}")


def derived_seed(seed: int, *path: object) -> int:
    """A 53-bit seed (exact in JSON readers that use doubles) that depends on the job's seed and on what it is for."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


REPLACEMENT_STRIDE = 1_000_003
"""Far from the running numbers of groups: the task of a replaced group is not soon met again."""


def task_seed(seed: int, groups: int, batch: int, group: Group) -> int:
    """Tasks are numbered through the job from a base that depends on its seed, so that an environment which takes the
    number modulo its task set goes through that set evenly, without repeats within a pass."""
    running = batch * groups + group.index + group.replacement * REPLACEMENT_STRIDE
    return derived_seed(seed, "tasks") + running


def task(
    seed: int,
    groups: int,
    batch: int,
    group: Group,
    member: int,
    min_version: PolicyVersion,
    temperature: float,
) -> RolloutTask:
    """The task of one slot, as it stands (its current retry). `groups` is the number of groups a batch."""
    retry = group.members[member].retry
    return RolloutTask(
        trajectory=trajectory_id(batch, group, member),
        group=group_id(batch, group),
        batch=batch,
        retry=retry,
        task_seed=task_seed(seed, groups, batch, group),
        sample_seed=derived_seed(seed, "sample", batch, group.index, group.replacement, member, retry),
        min_version=min_version,
        temperature=temperature,
    )


def locate(batches: tuple[Batch, ...], message: TrajectoryCompleted) -> tuple[Batch, Group, int] | None:
    """The open slot that a trajectory's end belongs to; None if there is none (trained, replaced or never admitted)."""
    for batch in batches:
        if batch.batch != message.batch:
            continue
        for group in batch.groups:
            if group_id(batch.batch, group) != message.group:
                continue
            for member in range(len(group.members)):
                if trajectory_id(batch.batch, group, member) == message.trajectory:
                    return batch, group, member
    return None


def with_member(batch: Batch, group: Group, member: int, value: Member) -> Batch:
    """The batch with one member replaced."""
    members = (*group.members[:member], value, *group.members[member + 1 :])
    return with_group(batch, msgspec.structs.replace(group, members=members))


def with_group(batch: Batch, group: Group) -> Batch:
    """The batch with the group at the same place replaced."""
    groups = tuple(group if other.index == group.index else other for other in batch.groups)
    return msgspec.structs.replace(batch, groups=groups)
