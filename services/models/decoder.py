"""A decoder-only transformer of the Qwen3 and Llama families, with Hugging Face's parameter names.

Owns the arithmetic, nothing else: no files, no cache management. Training runs `forward(tokens)`; an engine passes
its own `attend`, which stores this call's keys and values wherever it likes and attends over all it holds.
Hugging Face's own forward is the oracle of its tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from services.models.config import ModelConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B,H,T,D], k [B,Hkv,T,D], v [B,Hkv,T,D]) -> [B,H,T,D]; q and k are rotated already."""


class Norm(nn.Module):
    """Root mean square normalisation over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query self-attention up to the choice of what is attended over."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, bias, self.head_dim = config.hidden_size, config.attention_bias, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
            self.k_norm = Norm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, -1, self.head_dim)
        k = self.k_proj(x).view(batch, length, -1, self.head_dim)
        v = self.v_proj(x).view(batch, length, -1, self.head_dim)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        mixed = attend(layer, q, k, v.transpose(1, 2))
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer block; the unit of sharding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Body(nn.Module):
    """What Hugging Face calls `model`: all but the output head. Only a name space; `Decoder.forward` runs it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """tokens -> logits. With tied embeddings there is no `lm_head` parameter."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.position_limit = config.max_position_embeddings  # an engine lowers it to its longest context
        self._rope: tuple[Tensor, Tensor] | None = None

    @property
    def layers(self) -> list[Layer]:
        """The blocks, in order."""
        return [cast(Layer, layer) for layer in self.model.layers]

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Logits [B,T,V] (float32) of `tokens` [B,T], causal.

        Rows may be right-padded: attention never looks to the right, so logits at valid places do not depend on the
        padding, and those at or beyond `lengths` [B] mean nothing. With `lengths` the padding may be any integer
        (-100, say). `positions` [B,T], below `position_limit`, and `attend` are for engines with a KV cache; with `rows` [N], indices into
        the flattened B*T places, only those are projected on the vocabulary: [N,V].
        """
        if lengths is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            tokens = tokens.masked_fill(places >= lengths.to(tokens.device)[:, None], 0)
        x = self.model.embed_tokens(tokens)
        cos, sin = self._rotation(x, positions)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, index, attend or causal)
        if rows is not None:
            x = x.reshape(-1, x.shape[-1])[rows]
        x = self.model.norm(x)
        logits = linear(x, self.model.embed_tokens.weight) if self.config.tie_word_embeddings else self.lm_head(x)
        return logits.float()

    def _rotation(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin [B or 1, 1, T, D] in x's type, from a table that grows by doubling."""
        needed = x.shape[1] if positions is None else self.position_limit
        table = self._rope
        if table is None or table[0].shape[0] < needed or table[0].device != x.device or table[0].dtype != x.dtype:
            size = max(needed, 1024 if table is None else 2 * table[0].shape[0])
            angle = torch.outer(
                torch.arange(size, device=x.device, dtype=torch.float32), frequencies(self.config, x.device)
            )
            angle = torch.cat((angle, angle), dim=-1)
            table = self._rope = (angle.cos().to(x.dtype), angle.sin().to(x.dtype))
        if positions is None:
            return table[0][None, None, : x.shape[1]], table[1][None, None, : x.shape[1]]
        return table[0][positions].unsqueeze(1), table[1][positions].unsqueeze(1)


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over this call's own tokens."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def frequencies(config: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Angular frequency of each pair of dimensions, [head_dim / 2], with Llama 3's scaling where configured."""
    exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    # Turns that fit into the original context decide: many, keep; few, divide by the factor; between, blend.
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)
