"""Drawing the next token, reproducibly.

Token i of a reply depends on its logits, its temperature and (seed, i) only, not on the batch it was computed in nor
on where the reply was interrupted: it is the maximum of log-probability plus Gumbel noise, which is a hash of
(seed, i, token). Batches of another shape change logits in their last bits; the maximum changes with them only where two
tokens are that close, once in about a million tokens. (Where a cumulative sum passes a random number would be one draw
a token instead of one a word of the vocabulary, but every word's boundary is then a place where bits can tip.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


def tensor_of(array: npt.NDArray[Any]) -> Tensor:
    """A tensor on the array's memory. (`Any`: torch's stub of it is untyped.)"""
    untyped: Any = torch
    return untyped.from_numpy(array)


def sample(
    logits: Tensor, temperatures: Sequence[float], seeds: Sequence[int], indices: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Next tokens of N rows of logits [N,V], and the log-probability the behaviour policy gave each.

    That is log-softmax(logits / temperature) at the token. With temperature 0 the token is the most likely one, and
    the log-probability is that of temperature 1 (that of the greedy policy itself is always 0 and says nothing).
    """
    greedy = [temperature <= 0 for temperature in temperatures]
    if any(temperature not in (0, 1) for temperature in temperatures):
        scale = [1.0 if cold else temperature for temperature, cold in zip(temperatures, greedy, strict=True)]
        logits = logits / torch.tensor(scale, device=logits.device, dtype=logits.dtype)[:, None]
    logp = torch.log_softmax(logits, dim=-1)
    score = logp
    if not all(greedy):
        noise = gumbel(seeds, indices, logits.shape[1], logits.device)
        if any(greedy):
            noise[torch.tensor(greedy, device=logits.device)] = 0.0
        score = noise.add_(logp)
    tokens = score.argmax(dim=-1, keepdim=True)
    drawn: Any = tokens[:, 0]
    logprobs: Any = logp.gather(1, tokens)[:, 0]
    return drawn.tolist(), logprobs.tolist()


def gumbel(seeds: Sequence[int], indices: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise [N, size] (float64), a hash of (seed, index, column)."""
    uniform = uniforms(seeds, indices, size, device)
    return uniform.log_().neg_().log_().neg_()


def uniforms(seeds: Sequence[int], indices: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Numbers within (0, 1), [N, size] (float64): SplitMix64 of (seed, index, column)."""
    rows = _mix_rows(np.array([value & _MASK for value in seeds], dtype=np.uint64))
    rows = _mix_rows(rows + (np.array(indices, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    z = (
        torch.arange(1, size + 1, device=device).mul_(_signed(_GOLDEN))
        + tensor_of(rows.view(np.int64)).to(device)[:, None]
    )
    z = _xor_shift(z, 30).mul_(_signed(_FIRST))
    z = _xor_shift(z, 27).mul_(_signed(_SECOND))
    z = _xor_shift(z, 31)
    # 52 bits and a half: never 0, never 1
    return ((z >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)


def _mix_rows(z: npt.NDArray[Any]) -> npt.NDArray[Any]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def _xor_shift(z: Tensor, bits: int) -> Tensor:
    """z ^ (z >>> bits): torch's shift of int64 keeps the sign, so its copies are masked out."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(z)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number; products wrap alike."""
    return value - (1 << 64) if value >> 63 else value
