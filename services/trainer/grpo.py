"""Group-relative policy optimisation on token-level data with behaviour log-probabilities. Pure torch.

For trajectory i of group g with reward R_i the advantage is A_i = (R_i - mean_g R) / (std_g R + eps), the same for all its
reply tokens. A group whose rewards are all equal says nothing: its advantages are zero.

Three policies matter when rollout is asynchronous: the *behaviour* policy mu that generated a token (of version k - eta to
k), the *proximal* policy p (version k as training of batch k begins), and the current one pi. A token's objective is

    w min(rho A, clip(rho, 1 - c_low, 1 + c_high) A),   rho = pi / p,   w = min(p / mu, cap)

so that clipping keeps the update near version k, and the truncated weight w corrects for who generated the token. On tokens
of version k itself, w is 1 and this is PPO's clipped objective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6
"""Keeps the division defined; far below the spread of any group that has one."""


def group_advantages(rewards: Sequence[float], groups: Sequence[str]) -> tuple[Tensor, int]:
    """Advantages [N] (float32) of N trajectories, and how many groups had no variance in reward."""
    assert len(rewards) == len(groups), "one group name a reward"
    values = torch.tensor(rewards, dtype=torch.float32)
    advantages = torch.zeros_like(values)
    flat = 0
    for name in sorted(set(groups)):
        members = torch.tensor([index for index, group in enumerate(groups) if group == name])
        own = values[members]
        spread = own.std(unbiased=False)
        if spread < EPSILON:
            flat += 1
            continue
        advantages[members] = (own - own.mean()) / (spread + EPSILON)
    return advantages, flat


def reply_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability [B,T-1] of tokens 1.. given what is before them, at the sampling temperature; and entropies."""
    log_probabilities = (logits[:, :-1].float() / temperature).log_softmax(-1)
    chosen = log_probabilities.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    entropies = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return chosen, entropies


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
    weight = (proximal - behaviour).exp().clamp(max=importance_cap)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return weight * torch.minimum(ratio * advantage, clipped * advantage)
