"""A batch as tensors: from its description and its journal records."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from messages.agent import TurnFinished
from messages.pipeline_scheduler import BatchItem, BatchReady


class IncompleteBatch(Exception):
    """The journal does not hold what the batch's description refers to; the message names the trajectory."""


class Batch(msgspec.Struct, frozen=True):
    """B trajectories padded to T tokens. `mask`, `behaviour` are [B,T-1]: entry t is about token t + 1."""

    tokens: Tensor  # [B,T] int64
    lengths: Tensor  # [B] int64
    mask: Tensor  # [B,T-1] float32: 1 where token t + 1 is the policy's own
    behaviour: Tensor  # [B,T-1] float32: its log-probability when it was generated
    rewards: tuple[float, ...]
    groups: tuple[str, ...]
    versions: tuple[int, ...]  # every version that generated some token, sorted

    @property
    def reply_tokens(self) -> int:
        """How many tokens are trained on."""
        return int(self.mask.sum())


def build(ready: BatchReady, records: Mapping[int, TurnFinished]) -> Batch:
    """Concatenate each trajectory's turns: prompt, reply, observation, reply, ... Raises IncompleteBatch."""
    rows = [_row(item, records) for item in ready.items]
    length = max(len(tokens) for tokens, _, _ in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length)
    behaviour = torch.zeros(len(rows), length)
    for index, (ids, own, logprobs) in enumerate(rows):
        tokens[index, : len(ids)] = torch.tensor(ids)
        mask[index, : len(ids)] = torch.tensor(own)
        behaviour[index, : len(ids)] = torch.tensor(logprobs)
    versions = {span.version for item in ready.items for seq in item.journal for span in records[seq].spans}
    return Batch(
        tokens=tokens,
        lengths=torch.tensor([len(ids) for ids, _, _ in rows]),
        mask=mask[:, 1:].contiguous(),
        behaviour=behaviour[:, 1:].contiguous(),
        rewards=tuple(item.reward for item in ready.items),
        groups=tuple(item.group for item in ready.items),
        versions=tuple(sorted(versions)),
    )


def _row(item: BatchItem, records: Mapping[int, TurnFinished]) -> tuple[list[int], list[float], list[float]]:
    ids: list[int] = []
    own: list[float] = []
    logprobs: list[float] = []
    for turn, seq in enumerate(item.journal):
        record = records.get(seq)
        if record is None:
            raise IncompleteBatch(f"{item.trajectory}: journal sequence {seq} (turn {turn}) is missing")
        if record.trajectory != item.trajectory or record.turn != turn:
            raise IncompleteBatch(
                f"{item.trajectory}: journal sequence {seq} holds turn {record.turn} of {record.trajectory}, not turn {turn}"
            )
        if len(record.reply) != len(record.logprobs):
            raise IncompleteBatch(
                f"{item.trajectory} turn {turn}: {len(record.reply)} tokens, {len(record.logprobs)} logprobs"
            )
        ids += [*record.prompt_new, *record.reply]
        own += [0.0] * len(record.prompt_new) + [1.0] * len(record.reply)
        logprobs += [0.0] * len(record.prompt_new) + record.logprobs
    if not any(own):
        raise IncompleteBatch(f"{item.trajectory}: no reply token in its {len(item.journal)} turns")
    return ids, own, logprobs
