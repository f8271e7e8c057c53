"""Held-out evaluation: its episodes run beside the loop, are never trained on, and hold up nothing but their own journal. Pure."""

from __future__ import annotations

import msgspec

from messages.agent import RolloutTask
from messages.envelope import brief
from messages.ids import GroupId, PolicyVersion, TrajectoryId
from messages.pipeline_scheduler import Evaluated, TrajectoryCompleted
from services.pipeline_scheduler.batches import derived_seed
from services.pipeline_scheduler.config import Config
from services.runtime.core import Effects, Refuse, Send

MOST_ABANDONED = 4
"""Newer evaluations after whose beginning late episodes no longer keep their journal: one that is later still begins anew."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out episodes of one version that are running or ended. Their journal begins above `floor`."""

    version: PolicyVersion
    rewards: dict[str, float] = {}
    floor: int = 0

    @property
    def group(self) -> GroupId:
        """Of its episodes' tasks."""
        return GroupId(f"eval-v{self.version}")

    def episodes(self, config: Config) -> tuple[TrajectoryId, ...]:
        """All of its episodes."""
        return tuple(TrajectoryId(f"{self.group}-m{episode}") for episode in range(config.evaluate_episodes))

    def tasks(self, config: Config) -> tuple[RolloutTask, ...]:
        """One for each episode; every version gets the same tasks."""
        return tuple(
            RolloutTask(
                trajectory=name,
                group=self.group,
                batch=self.version,
                retry=0,
                task_seed=derived_seed(config.seed, "held-out") + episode,
                sample_seed=derived_seed(config.seed, "held-out", self.version, episode),
                min_version=self.version,
                temperature=0.0,
                evaluation=True,
            )
            for episode, name in enumerate(self.episodes(config))
        )

    def left(self, config: Config) -> tuple[TrajectoryId, ...]:
        """Its episodes that did not end."""
        return tuple(name for name in self.episodes(config) if name not in self.rewards)


class Abandoned(msgspec.Struct, frozen=True):
    """Held-out episodes that did not end before the next evaluation began: nobody waits for their reward, but agents still run them, and go
    on from their journal, which begins above `floor`. `newer`: evaluations that have begun since, but for the next."""

    group: str
    left: tuple[str, ...]
    floor: int
    newer: int = 0


class HeldOut(msgspec.Struct, frozen=True):
    """What evaluation needs after a restart: the newest one, and what is left of those before it, the newest last."""

    current: Evaluation | None = None
    abandoned: tuple[Abandoned, ...] = ()

    def began(self, serving: PolicyVersion, floor: int, config: Config) -> tuple[HeldOut, Effects]:
        """Where the version that serves is due, its episodes are given out. What they write to the journal comes after `floor`."""
        due = config.evaluate_every > 0 and serving >= 0 and serving % config.evaluate_every == 0
        if not due or (self.current is not None and self.current.version >= serving):
            return self, ()
        new = Evaluation(version=serving, floor=floor)
        tasks = tuple(Send(task) for task in new.tasks(config))
        older = (msgspec.structs.replace(each, newer=each.newer + 1) for each in self.abandoned)
        abandoned = tuple(each for each in older if each.newer < MOST_ABANDONED)
        if self.current is not None and (left := self.current.left(config)):
            abandoned = (*abandoned, Abandoned(self.current.group, left, self.current.floor))
        return HeldOut(new, abandoned), tasks

    def tasks_left(self, config: Config) -> tuple[RolloutTask, ...]:
        """Of the newest evaluation: given out, and not ended."""
        if self.current is None:
            return ()
        left = self.current.left(config)
        return tuple(task for task in self.current.tasks(config) if task.trajectory in left)

    def ended(self, message: TrajectoryCompleted, config: Config) -> tuple[HeldOut, Effects]:
        """An episode ended: with the last one, the version's reward is known."""
        current = self.current
        if current is None or message.group != current.group:
            return self._without(message.trajectory), ()
        if message.trajectory not in current.episodes(config):
            return self, (Refuse(f"{brief(message.trajectory, 80)} is no episode of this evaluation"),)
        if message.trajectory in current.rewards:
            return self, ()  # its end came again
        rewards = {**current.rewards, message.trajectory: message.reward}
        new = msgspec.structs.replace(self, current=msgspec.structs.replace(current, rewards=rewards))
        if len(rewards) < config.evaluate_episodes:
            return new, ()
        mean = sum(rewards[name] for name in sorted(rewards)) / len(rewards)
        return new, (Send(Evaluated(version=current.version, reward_mean=mean, episodes=len(rewards))),)

    def _without(self, trajectory: str) -> HeldOut:
        """An abandoned episode ended: its journal is needed no more."""
        late = next((each for each in self.abandoned if trajectory in each.left), None)
        if late is None:
            return self
        fewer = msgspec.structs.replace(late, left=tuple(name for name in late.left if name != trajectory))
        rest = (fewer if each is late else each for each in self.abandoned)
        return msgspec.structs.replace(self, abandoned=tuple(each for each in rest if each.left))

    def floors(self, config: Config) -> tuple[int, ...]:
        """Journal sequences above which something is still needed: of evaluations with episodes that have not ended."""
        current = self.current
        running = (current.floor,) if current is not None and current.left(config) else ()
        return (*running, *(each.floor for each in self.abandoned))
