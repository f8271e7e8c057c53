"""Stands for SGLang's kernels where there is no GPU: the one that its CPU path calls; every other says what it is."""

from __future__ import annotations

from collections.abc import Callable

import torch

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache locations into its row."""
    taken = 0
    for index, request in enumerate(req_pool_indices.tolist()):
        first, last = int(start[index]), int(end[index])
        places = out_cache_loc[taken : taken + last - first]
        req_to_token[request, first:last] = places.to(req_to_token.dtype)
        taken += last - first


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: not on CPUs")

    return missing
