"""A batch as tensors: from its description and its journal records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from messages.agent import TurnFinished
from messages.pipeline_scheduler import BatchItem, BatchReady

NO_VERSION = -1
"""In `Batch.versions`, where a token is not the policy's own."""


class UnusableBatchError(Exception):
    """The journal does not hold what the batch's description refers to; the message names trajectory and sequence."""


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
    """Concatenate each trajectory's turns; `records` maps journal sequences to turns. Raises UnusableBatchError.

    Every reference must be there, in turn order, of the right trajectory; every reply token must have a log-probability
    and a version, none newer than the version that the batch trains.
    """
    rows = [_row(item, records, ready.batch) for item in ready.items]
    if not any(any(row.own) for row in rows):
        raise UnusableBatchError(f"batch {ready.batch}: none of its {len(rows)} trajectories has a reply token")
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


def _row(item: BatchItem, records: Mapping[int, TurnFinished], batch: int) -> _Row:
    row = _Row([], [], [], [])
    for turn, seq in enumerate(item.journal):
        where = f"batch {batch}, {item.trajectory}, turn {turn}, journal sequence {seq}"
        record = records.get(seq)
        if record is None:
            raise UnusableBatchError(f"{where}: missing from the journal (purged, or never written)")
        if record.trajectory != item.trajectory or record.turn != turn:
            raise UnusableBatchError(f"{where}: holds turn {record.turn} of {record.trajectory}")
        new, reply = record.prompt_new, record.reply
        if len(reply) != len(record.logprobs):
            raise UnusableBatchError(f"{where}: {len(reply)} reply tokens but {len(record.logprobs)} log-probabilities")
        if turn == 0 and not new:
            raise UnusableBatchError(f"{where}: the first turn has no prompt")
        row.ids.extend((*new, *reply))
        row.own.extend([0.0] * len(new) + [1.0] * len(reply))
        row.logprobs.extend([0.0] * len(new) + record.logprobs)
        row.versions.extend([NO_VERSION] * len(new) + _versions(record, batch, where))
    if not row.ids:  # ended before its first turn: it counts in its group's rewards, and has nothing to train on
        return _Row([0], [0.0], [0.0], [NO_VERSION])
    return row


def _versions(record: TurnFinished, batch: int, where: str) -> list[int]:
    """The version of each reply token. The spans must tile the reply."""
    versions: list[int] = []
    for span in record.spans:
        if span.start != len(versions) or span.end < span.start:
            break
        versions += [int(span.version)] * (span.end - span.start)
    if len(versions) != len(record.reply):
        raise UnusableBatchError(f"{where}: its version spans {record.spans} do not cover {len(record.reply)} tokens")
    if versions and max(versions) > batch:
        raise UnusableBatchError(f"{where}: has tokens of version {max(versions)}, newer than the batch may have")
    return versions
