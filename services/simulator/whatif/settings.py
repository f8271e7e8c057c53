"""What a what-if run assumes beside trace, workload and hardware: every number with its source. Pure.

One set for all policies and all segments: nothing here, and nothing in a policy, is tuned to a trace.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from services.jobfile import ConfigError
from services.timing.hardware import Hardware

Count = Annotated[int, Meta(ge=1, le=10**9)]
Some = Annotated[int, Meta(ge=0, le=10**9)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
Share = Annotated[float, Meta(ge=0, le=1)]
Price = Annotated[float, Meta(ge=0, le=1e9)]

PLACEMENTS: Final = ("affinity", "least-loaded")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `SOURCES` for where each default comes from."""

    reserved_gpus: Count = 4
    most_preemptible_gpus: Some = 12
    training_gpus: Some = 16
    batch_trajectories: Count = 64
    group_size: Count = 16
    staleness: Some = 1
    max_context_tokens: Count = 32768
    prefix_reuse: Share = 0.45  # of the turns; before the others the history is rendered anew
    train_s: Seconds = 0.0  # of a train step; 0: as the hardware description says for this batch on these GPUs
    notice_s: Seconds = 30.0
    no_notice_share: Share = 0.0
    max_running: Count = 256
    chunk_tokens: Count = 8192
    placement: str = "affinity"
    in_flight: Annotated[float, Meta(ge=1, le=10)] = 1.5  # batches' trajectories in flight, where the next starts early
    early_start: bool | None = None  # None: as each policy does; else for all
    spot_price: Price = 0.0  # a GPU hour
    reserved_price: Price = 0.0
    spans: bool = True  # record each GPU's uses


SOURCES: Final[dict[str, str]] = {
    "reserved_gpus": "paper 6.1: four reserved rollout GPUs",
    "most_preemptible_gpus": "paper 6.1: up to 12 preemptible GPUs; what a trace has beyond it is not used",
    "training_gpus": "paper 6.1: 16 reserved training GPUs",
    "batch_trajectories": "paper 6.1: rollout batch size 64",
    "group_size": "paper 6.1: group size 16",
    "staleness": "paper 6.1: maximum policy staleness of one training step",
    "max_context_tokens": "paper 6.1: maximum trajectory length of 32K tokens",
    "prefix_reuse": "calibrated: colocated prefill then computes 29 tokens for each generated one, as in the paper's Figure 2(b)",
    "train_s": "paper 3.1: 163.8 s on 8 GPUs, in proportion to batch and GPUs, as the emulated trainer takes it: 81.9 s on 16",
    "notice_s": "Google Cloud's Spot VMs get 30 s of notice (AWS: 120 s); the paper gives none",
    "no_notice_share": "assumed: every reclaim is announced",
    "max_running": "assumed: more than a worker's share of a batch, so that KV capacity is the bound",
    "chunk_tokens": "SGLang's default chunked prefill size on 80 GB GPUs",
    "placement": "the production router; least-loaded: the naive one",
}


def checked(settings: Settings, hardware: Hardware) -> Settings:
    """The same settings. Raises ConfigError where they contradict each other, or the hardware."""
    problem = ""
    longest = min(hardware.max_context_tokens, hardware.kv_capacity_tokens)
    if settings.batch_trajectories % settings.group_size:
        problem = f"batch_trajectories = {settings.batch_trajectories} is not a multiple of group_size = {settings.group_size}"
    elif settings.placement not in PLACEMENTS:
        problem = f"placement = {settings.placement!r}: use one of {', '.join(PLACEMENTS)}"
    elif settings.reserved_gpus < hardware.gpus:
        problem = f"reserved_gpus = {settings.reserved_gpus}: a worker of this hardware takes {hardware.gpus}"
    elif settings.max_context_tokens > longest:
        problem = (
            f"max_context_tokens = {settings.max_context_tokens}: a worker of {hardware.name} holds a context of at most "
            f"{longest}; use --set max_context_tokens={longest}, or less"
        )
    if problem:
        raise ConfigError(f"settings: {problem}")
    return settings
