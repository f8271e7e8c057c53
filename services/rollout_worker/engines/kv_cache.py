"""The paged KV cache: which blocks hold what (pure), and the tensors behind them.

A block holds the keys and values of `BLOCK` consecutive tokens in all layers. A full block is findable by the exact
tokens before and in it, as long as it was computed with the present weights; blocks that no request uses stay
findable until they are needed, least recently used first, the far end of a context before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.models.config import ModelConfig

BLOCK: Final = 16
"""Tokens a block: a turn recomputes at most so many tokens of its past, and tables stay short."""
TRASH: Final = 0
"""Block that padding writes into; never handed out."""
ROOT: Final = 0
"""The chain link before the first block of any context."""


class BlockPool:
    """Bookkeeping of `blocks` blocks. No tensors: the same for every model."""

    def __init__(self, blocks: int) -> None:
        assert blocks > 1, "a KV cache needs a block besides the trash block"
        self.capacity = blocks - 1
        self._free = list(range(blocks - 1, TRASH, -1))
        self._users = [0] * blocks
        self._key: list[tuple[int, tuple[int, ...]] | None] = [None] * blocks
        self._found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> block, link
        self._idle: OrderedDict[int, None] = OrderedDict()  # findable blocks without a user, oldest first
        self._links = ROOT

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give now."""
        return len(self._free) + len(self._idle)

    def match(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Up to `most` blocks that hold the beginning of `tokens`, now in use by the caller, and the last one's link."""
        blocks: list[int] = []
        link = ROOT
        for index in range(most):
            hit = self._found.get((link, tuple(tokens[index * BLOCK : (index + 1) * BLOCK])))
            if hit is None:
                break
            block, link = hit
            if self._users[block] == 0:
                del self._idle[block]
            self._users[block] += 1
            blocks.append(block)
        return blocks, link

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks for the caller to write, or None and no change."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._forget(self._idle.popitem(last=False)[0])
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def publish(self, block: int, link: int, tokens: tuple[int, ...]) -> int:
        """Make a full block findable after `link`; returns its link. Where an equal one is, that one's."""
        assert len(tokens) == BLOCK and self._users[block] > 0
        key = (link, tokens)
        hit = self._found.get(key)
        if hit is not None:
            return hit[1]
        self._links += 1
        self._found[key] = (block, self._links)
        self._key[block] = key
        return self._links

    def release(self, blocks: Sequence[int]) -> None:
        """The caller no longer uses these blocks of one context, given in order."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} released twice"
            if self._users[block] == 0:
                if self._key[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def flush(self) -> None:
        """Nothing is findable any more (the weights changed). Blocks in use stay in use."""
        for block in list(self._found.values()):
            self._key[block[0]] = None
        self._found.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, block: int) -> None:
        key = self._key[block]
        assert key is not None
        del self._found[key]
        self._key[block] = None
        self._free.append(block)


class KvCache:
    """The tensors: a layer's pool is [blocks * BLOCK, 2 * kv_heads, head_dim], keys before values."""

    def __init__(self, config: ModelConfig, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.heads = config.num_key_value_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        # Zeros, not empty: a masked place weighs 0, but 0 times a NaN from stale memory is a NaN.
        shape = (blocks * BLOCK, 2 * self.heads, config.head_dim)
        self.pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.token_bytes = len(self.pools) * 2 * self.heads * self.head_dim * dtype.itemsize
        self.layout = f"{len(self.pools)}x{2 * self.heads}x{self.head_dim}:{dtype}"

    def read(self, slots: Tensor) -> memoryview:
        """A copy of the KV at `slots` [N], as bytes: layers, then tokens, then heads."""
        held = torch.stack([pool.index_select(0, slots) for pool in self.pools]).cpu()
        array: Any = held.reshape(-1).view(torch.uint8).numpy()
        return memoryview(array)

    def write(self, slots: Tensor, data: bytes) -> None:
        """Put what `read` gave into `slots` [N]."""
        first = self.pools[0]
        held = torch.frombuffer(bytearray(data), dtype=first.dtype)
        held = held.view(len(self.pools), len(slots), 2 * self.heads, self.head_dim).to(first.device)
        for pool, layer in zip(self.pools, held, strict=True):
            pool.index_copy_(0, slots, layer)


class PagedAttention:
    """One forward's attention: stores its keys and values, then attends over each row's blocks.

    `slots` [B*T] is where each token's KV goes, `tables` [B,N] each row's blocks (padded with TRASH), `positions`
    [B,T] each token's place in its context. An `Attend` of the decoder.
    """

    def __init__(self, cache: KvCache, slots: Tensor, tables: Tensor, positions: Tensor) -> None:
        self.cache = cache
        self.slots = slots
        self.tables = tables.reshape(-1)
        self.length = tables.shape[1] * BLOCK
        places = torch.arange(self.length, device=positions.device)
        hidden = places > positions[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=cache.pools[0].dtype, device=positions.device)
        mask.masked_fill_(hidden, float("-inf"))
        # Heads that share a KV head become more query rows, so keys and values need not be repeated. One row is all rows'.
        self.mask = mask.repeat(1, 1, cache.groups, 1) if cache.groups > 1 and positions.shape[1] > 1 else mask

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache, pool = self.cache, self.cache.pools[layer]
        batch, heads, length, dim = q.shape
        pool.index_copy_(0, self.slots, torch.cat((k, v), dim=1).transpose(1, 2).reshape(-1, 2 * cache.heads, dim))
        held = pool.view(-1, BLOCK * 2 * cache.heads * dim).index_select(0, self.tables)
        held = held.view(batch, self.length, 2 * cache.heads, dim).transpose(1, 2)
        mixed = scaled_dot_product_attention(
            q.reshape(batch, cache.heads, cache.groups * length, dim),
            held[:, : cache.heads],
            held[:, cache.heads :],
            attn_mask=self.mask,
        )
        return mixed.reshape(batch, heads, length, dim)
