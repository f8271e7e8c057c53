"""The GRPO objective against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer import grpo


def test_advantages_are_normalised_within_each_group() -> None:
    found = grpo.group_advantages([1.0, 0.0, 3.0, 0.0, 1.0, 2.0], ["a", "b", "a", "b", "a", "a"])
    # Group a: rewards 1, 3, 1, 2; mean 7/4, population variance 11/16. Group b: 0, 0.
    spread = math.sqrt(11) / 4
    expected = [(1 - 1.75) / spread, 0.0, (3 - 1.75) / spread, 0.0, (1 - 1.75) / spread, (2 - 1.75) / spread]
    assert found.values.tolist() == pytest.approx(expected, abs=1e-5)
    assert found.informative.tolist() == [True, False, True, False, True, True]
    assert found.flat_groups == 1


def test_a_group_of_equal_rewards_is_counted_and_says_nothing() -> None:
    found = grpo.group_advantages([0.1, 0.1, 0.1, 0.7], ["a", "a", "a", "b"])
    assert found.values.tolist() == [0.0] * 4
    assert not found.informative.any()
    assert found.flat_groups == 2


def test_logprobs_are_of_the_next_token_at_the_sampling_temperature() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1.0, 1.0, 1.0]]]))
    tokens = torch.tensor([[0, 1, 1]])
    chosen, entropies = grpo.reply_logprobs(logits, tokens, 1.0)
    assert chosen.tolist()[0] == pytest.approx([math.log(0.25), math.log(0.8)])
    assert entropies[0, 0].item() == pytest.approx(1.5 * math.log(2))
    # At temperature 0.5 probabilities are squared and normalised: 0.0625 / (0.25 + 0.0625 + 0.0625) = 1/6.
    assert grpo.reply_logprobs(logits, tokens, 0.5)[0][0, 0].item() == pytest.approx(math.log(1 / 6))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, 2.0),
        (1.5, 2.0, 1.2 * 2.0),  # clipped from above: no reason to go further
        (0.5, 2.0, 0.5 * 2.0),  # below the range but wrong way: not clipped
        (1.5, -2.0, 1.5 * -2.0),
        (0.5, -2.0, 0.9 * -2.0),
    ],
)
def test_clipping_is_the_pessimistic_one(ratio: float, advantage: float, expected: float) -> None:
    current = torch.tensor([[math.log(ratio) - 1.0]])
    proximal = torch.tensor([[-1.0]])
    found = grpo.objective(
        current,
        proximal,
        proximal,
        torch.tensor([advantage]),
        clip_low=0.1,
        clip_high=0.2,
        importance_cap=2.0,
    )
    assert found.item() == pytest.approx(expected)


def test_stale_tokens_are_weighted_up_to_the_cap() -> None:
    proximal = torch.log(torch.tensor([[0.4, 0.1, 0.9]]))
    behaviour = torch.log(torch.tensor([[0.4, 0.2, 0.1]]))
    assert grpo.importance_weights(proximal, behaviour, 2.0).tolist()[0] == pytest.approx([1.0, 0.5, 2.0])
    found = grpo.objective(
        proximal, proximal, behaviour, torch.tensor([3.0]), clip_low=0.2, clip_high=0.2, importance_cap=2.0
    )
    assert found.tolist()[0] == pytest.approx([3.0, 1.5, 6.0])


def test_the_gradient_at_the_proximal_policy_is_the_policy_gradient() -> None:
    current = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    fixed = current.detach().clone()
    grpo.objective(
        current, fixed, fixed, torch.tensor([0.7]), clip_low=0.2, clip_high=0.2, importance_cap=2.0
    ).sum().backward()
    assert current.grad is not None
    assert current.grad.tolist()[0] == pytest.approx([0.7, 0.7])
