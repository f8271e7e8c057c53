"""One step of the embedded engine as arrays: which tokens, at which positions, in which slots of the KV cache; and its logits.

Shapes: N replies, T tokens of each (1 in decoding), B blocks of the longest. What is not used is padded: its KV goes to TRASH.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.models import Decoder
from services.rollout_worker.engines.batching import Reply
from services.rollout_worker.engines.kv_cache import BLOCK, TRASH, KvCache, PagedAttention
from services.rollout_worker.engines.sampling import tensor_of

Array = np.ndarray[Any, Any]  # Any: numpy's shapes are not typed; all are int64


class Inputs(NamedTuple):
    """What the model is given, on the host."""

    tokens: Array  # [N,T]
    positions: Array  # [N,T]
    slots: Array  # [N,T], or [N] in decoding: where the KV of these tokens goes
    tables: Array  # [N,B]
    rows: Array | None  # of [N*T]: whose logits are wanted; None: of all, which are one a reply


def prefill_inputs(chunk: list[tuple[Reply, int]]) -> tuple[Inputs, list[Reply]]:
    """So many further tokens of each context, and the replies whose contexts these complete, in the order of `rows`."""
    longest = max(count for _, count in chunk)
    shape = (len(chunk), longest)
    tokens, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    slots = np.full(shape, TRASH, dtype=np.int64)
    tables = _tables([reply for reply, _ in chunk], [reply.computed + count for reply, count in chunk])
    complete: list[Reply] = []
    rows: list[int] = []
    for row, (reply, count) in enumerate(chunk):
        start = reply.computed
        tokens[row, :count] = reply.tokens[start : start + count]
        places = np.arange(start, start + count)
        positions[row, :count] = places
        slots[row, :count] = tables[row, places // BLOCK] * BLOCK + places % BLOCK
        if start + count == len(reply.tokens):
            complete.append(reply)
            rows.append(row * longest + count - 1)
    return Inputs(tokens, positions, slots, tables, np.array(rows, dtype=np.int64)), complete


def decode_inputs(batch: list[Reply]) -> Inputs:
    """The last token of each context."""
    tokens = np.array([[reply.tokens[-1]] for reply in batch], dtype=np.int64)
    places = np.array([reply.computed for reply in batch], dtype=np.int64)
    tables = _tables(batch, [reply.computed + 1 for reply in batch])
    slots = tables[np.arange(len(batch)), places // BLOCK] * BLOCK + places % BLOCK
    return Inputs(tokens, places[:, None], slots, tables, None)


def slots_of(reply: Reply, start: int, count: int) -> Tensor:
    """Where the KV of so many tokens of a reply's context lies, on the host."""
    places = np.arange(start, start + count)
    return tensor_of(np.array(reply.blocks, dtype=np.int64)[places // BLOCK] * BLOCK + places % BLOCK)


def forward(model: Decoder, cache: KvCache, device: torch.device, inputs: Inputs) -> Tensor:
    """Logits of the wanted tokens [rows or N, vocabulary], on the device. Writes the KV of all into the cache."""
    places = tensor_of(inputs.positions).to(device)
    attend = PagedAttention(
        cache, tensor_of(inputs.slots).reshape(-1).to(device), tensor_of(inputs.tables).to(device), places
    )
    wanted = None if inputs.rows is None else tensor_of(inputs.rows).to(device)
    logits = model(tensor_of(inputs.tokens).to(device), positions=places, attend=attend, rows=wanted)
    return logits[:, 0] if inputs.rows is None else logits


def _tables(replies: list[Reply], lengths: list[int]) -> Array:
    width = -(-max(lengths) // BLOCK)
    tables = np.full((len(replies), width), TRASH, dtype=np.int64)
    for row, (reply, length) in enumerate(zip(replies, lengths, strict=True)):
        used = -(-length // BLOCK)
        tables[row, :used] = reply.blocks[:used]
    return tables
