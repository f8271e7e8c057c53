"""A batch as tensors: from its description and its journal records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from messages.agent import TurnFinished
from messages.pipeline_scheduler import BatchReady
from services.trainer.turns import checked

NO_VERSION = -1
"""In `Batch.versions`, where a token is not the policy's own."""


class Batch(msgspec.Struct, frozen=True):
    """B trajectories padded to T tokens. Of `mask`, `behaviour`, `versions` [B,T-1], entry t is about token t + 1."""

    tokens: Tensor  # [B,T] int64: prompt, reply, observation, reply, ...
    lengths: Tensor  # [B] int64
    mask: Tensor  # float32: 1 where the token is the policy's own
    behaviour: Tensor  # float32: its log-probability when it was generated
    versions: Tensor  # int64: which version generated it
    rewards: tuple[float, ...]
    groups: tuple[str, ...]

    @property
    def reply_tokens(self) -> int:
        """How many tokens are trained on."""
        return int(self.mask.sum())

    @property
    def oldest_version(self) -> int:
        """The oldest version among its tokens; there is one."""
        return int(self.versions[self.mask > 0].min())


class _Row(NamedTuple):
    ids: list[int]
    own: list[float]
    logprobs: list[float]
    versions: list[int]


def build(ready: BatchReady, records: Mapping[int, TurnFinished]) -> Batch:
    """Concatenate each trajectory's turns; `records` maps journal sequences to turns. Raises UnusableBatchError."""
    rows = [_row(turns) for turns in checked(ready, records)]
    length = max(len(row.ids) for row in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    mask, behaviour = torch.zeros(len(rows), length), torch.zeros(len(rows), length)
    versions = torch.full((len(rows), length), NO_VERSION, dtype=torch.int64)
    for index, row in enumerate(rows):
        end = len(row.ids)
        tokens[index, :end] = torch.tensor(row.ids)
        mask[index, :end] = torch.tensor(row.own)
        behaviour[index, :end] = torch.tensor(row.logprobs)
        versions[index, :end] = torch.tensor(row.versions)
    return Batch(
        tokens=tokens,
        lengths=torch.tensor([len(row.ids) for row in rows]),
        mask=mask[:, 1:].contiguous(),
        behaviour=behaviour[:, 1:].contiguous(),
        versions=versions[:, 1:].contiguous(),
        rewards=tuple(item.reward for item in ready.items),
        groups=tuple(str(item.group) for item in ready.items),
    )


def _row(turns: list[TurnFinished]) -> _Row:
    row = _Row([], [], [], [])
    for record in turns:
        new, reply = record.prompt_new, record.reply
        row.ids.extend((*new, *reply))
        row.own.extend([0.0] * len(new) + [1.0] * len(reply))
        row.logprobs.extend([0.0] * len(new) + record.logprobs)
        row.versions.extend([NO_VERSION] * len(new))
        for span in record.spans:
            row.versions.extend([int(span.version)] * (span.end - span.start))
    if not row.ids:  # ended before its first turn: it counts in its group's rewards, and has nothing to train on
        return _Row([0], [0.0], [0.0], [NO_VERSION])
    return row
