"""A batch for a trainer that is not ours: plain lists, from its description and its journal records. Pure, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Final

import msgspec

from messages.agent import TurnFinished
from messages.ids import PolicyVersion
from messages.pipeline_scheduler import BatchReady, StepFinished
from services.trainer.turns import checked

FLAT: Final = 1e-6
"""A group whose rewards spread less says nothing, as in `grpo`."""


class Trajectory(msgspec.Struct, frozen=True):
    """One episode as tokens: prompt, reply, observation, reply, ... The four lists are equally long."""

    id: str
    group: str  # trajectories of one task; their rewards are compared with one another
    reward: float
    status: str  # "completed" or "truncated"
    tokens: list[int]
    own: list[bool]  # the token is the policy's own, to be trained on
    logprobs: list[float]  # of the policy's own tokens when they were sampled; 0.0 elsewhere
    versions: list[int]  # which version of the policy sampled it; -1 elsewhere


class Batch(msgspec.Struct, frozen=True):
    """Batch `number`: it makes version `number` + 1 of version `number`."""

    number: int
    trajectories: tuple[Trajectory, ...]

    @property
    def reply_tokens(self) -> int:
        """How many tokens are trained on."""
        return sum(sum(each.own) for each in self.trajectories)


def build(ready: BatchReady, records: Mapping[int, TurnFinished]) -> Batch:
    """A batch from its description and its turns by journal sequence. Raises UnusableBatchError."""
    rows: list[Trajectory] = []
    for item, turns in zip(ready.items, checked(ready, records), strict=True):
        tokens: list[int] = []
        own: list[bool] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for turn in turns:
            new, reply = len(turn.prompt_new), len(turn.reply)
            tokens += [*turn.prompt_new, *turn.reply]
            own += [False] * new + [True] * reply
            logprobs += [0.0] * new + list(turn.logprobs)
            versions += [-1] * new
            for span in turn.spans:
                versions += [int(span.version)] * (span.end - span.start)
        rows.append(
            Trajectory(str(item.trajectory), str(item.group), item.reward, item.status, tokens, own, logprobs, versions)
        )
    return Batch(ready.batch, tuple(rows))


def step_of(batch: Batch, train_s: float, loss: float, grad_norm: float, metrics: Mapping[str, float]) -> StepFinished:
    """What is said of a train step: the caller's figures, and those that follow from the batch."""
    rewards = [each.reward for each in batch.trajectories]
    members: dict[str, list[float]] = {}
    for each in batch.trajectories:
        members.setdefault(each.group, []).append(each.reward)
    oldest = min(_oldest(batch.trajectories), default=batch.number)
    return StepFinished(
        batch=batch.number,
        version=PolicyVersion(batch.number + 1),
        train_s=train_s,
        trained_tokens=batch.reply_tokens,
        reward_mean=fmean(rewards),
        reward_std=pstdev(rewards),
        loss=loss,
        grad_norm=grad_norm,
        zero_variance_groups=sum(pstdev(each) < FLAT for each in members.values()),
        metrics={"staleness": float(batch.number - oldest), "trajectories": float(len(rewards)), **metrics},
    )


def _oldest(trajectories: Sequence[Trajectory]) -> Iterator[int]:
    for each in trajectories:
        yield from (version for version in each.versions if version >= 0)
