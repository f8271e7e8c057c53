"""Group-relative policy optimisation on token-level data with behaviour log-probabilities. Pure torch.

For trajectory i of group g with reward R_i the advantage is A_i = (R_i - mean_g R) / (std_g R + eps), the same for all its
reply tokens. A group whose rewards are all equal says nothing: it contributes no gradient and is counted.

Three policies matter when rollout is asynchronous: the *behaviour* policy mu that generated a token (of version k - eta to
k), the *proximal* policy p (version k as training of batch k begins), and the current one pi. A token's objective is

    w min(rho A, clip(rho, 1 - c_low, 1 + c_high) A),   rho = pi / p,   w = min(p / mu, cap)

so that clipping keeps the update near version k, and the truncated weight w corrects for who generated the token. On tokens
of version k itself, w is 1 and this is PPO's clipped objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-6
"""Keeps the division defined; far below the spread of any group that has one."""


class Advantages(NamedTuple):
    """Of N trajectories: `values` [N] float32, `informative` [N] bool (their group's rewards differ), and flat groups."""

    values: Tensor
    informative: Tensor
    flat_groups: int


def group_advantages(rewards: Sequence[float], groups: Sequence[str]) -> Advantages:
    """Advantages of N trajectories from their rewards and the names of their groups."""
    assert len(rewards) == len(groups), "one group name a reward"
    rows: dict[str, list[int]] = {}
    for index, name in enumerate(groups):
        rows.setdefault(name, []).append(index)
    rewarded = torch.tensor(rewards, dtype=torch.float32)
    values = torch.zeros_like(rewarded)
    informative = torch.zeros(len(rewards), dtype=torch.bool)
    flat = 0
    for members in rows.values():
        own = rewarded[members]
        spread = own.std(unbiased=False)
        if spread < EPSILON:
            flat += 1
            continue
        values[members] = (own - own.mean()) / (spread + EPSILON)
        informative[members] = True
    return Advantages(values, informative, flat)


def reply_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Of logits [B,T,V] and tokens [B,T]: log-probabilities [B,T-1] of tokens 1.. at the sampling temperature; entropies.

    Entry t is about token t + 1, given all before it.
    """
    log_probabilities = (logits[:, :-1].float() / temperature).log_softmax(-1)
    chosen = log_probabilities.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    entropies = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return chosen, entropies


def importance_weights(proximal: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """w = min(p / mu, cap), elementwise from log-probabilities."""
    return (proximal - behaviour).exp().clamp(max=cap)


def objective(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> Tensor:
    """The token objective above, elementwise: log-probabilities [B,T-1] and advantages [B]; to be maximised."""
    advantage = advantages.unsqueeze(1)
    ratio = (current - proximal).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return importance_weights(proximal, behaviour, importance_cap) * torch.minimum(
        ratio * advantage, clipped * advantage
    )
