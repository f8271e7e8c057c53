"""`pearl bench snapshot`: from a trained state in memory to the weights in a model, beside a plain copy of the same bytes.

Publish writes the shards, their checksums and the manifest, all of it synced; apply verifies every byte, reads it and copies
it into a model's parameters, with one torch thread, as a worker does by default (two that wait for each other on busy cores take
five times as long). All in turn, and the median of each, since a disk that is synced takes half or twice as long from one time to the
next. References: `cp` and `sync`, one file of the same size read, written and synced; and the same
way without checksums, which shows what they cost.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import torch
from torch import nn

from services.bench.figures import Figure, figure
from services.models import load_weights, save_weights
from services.snapshot import fetch, write_snapshot

TARGET_RATIO = 0.6


class _Plain(nn.Module):
    def __init__(self, tensors: int, side: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.rand(side, side)) for _ in range(tensors))


def measure(folder: Path, *, mebibytes: int = 256, repeats: int = 9) -> list[Figure]:
    """Bytes a second, the median of `repeats`, publish-to-apply and plain copy in turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(folder, mebibytes, repeats)
    finally:
        torch.set_num_threads(threads)


def _measure(folder: Path, mebibytes: int, repeats: int) -> list[Figure]:
    side = 1024 if mebibytes >= 4 else 256
    model = _Plain(max(1, mebibytes * (1 << 20) // (4 * side * side)), side)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    size = sum(value.nbytes for value in state.values())
    config = folder / "config"
    config.mkdir(parents=True, exist_ok=True)
    (config / "config.json").write_bytes(msgspec.json.encode({"model_type": "bench"}))
    source, copied = folder / "source.bin", folder / "copied.bin"
    source.write_bytes(os.urandom(1 << 20) * (size >> 20))

    def publish_and_apply(version: int) -> None:
        snapshot = write_snapshot(state, folder / "snapshots", version, config, keep=1)
        load_weights(model, fetch(snapshot.uri, folder / "cache", snapshot.manifest_sha256))

    def plain_copy(_: int) -> None:
        shutil.copyfile(source, copied)
        with copied.open("rb") as file:
            os.fsync(file.fileno())

    def save_and_load(_: int) -> None:
        for file in save_weights(state, folder / "unchecked"):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        load_weights(model, folder / "unchecked")

    publish_and_apply(0)
    save_and_load(0)
    works = (publish_and_apply, plain_copy, save_and_load)
    took = [[_seconds(work, version) for work in works] for version in range(1, repeats + 1)]
    took_s, copy_s, unchecked_s = (median(each) for each in zip(*took, strict=True))
    mib = size / (1 << 20)
    return [
        figure(
            "snapshot",
            f"publish to applied, {mib:.0f} MiB",
            mib / took_s,
            "MiB/s",
            mib / copy_s,
            "plain copy, synced",
            ratio_from=TARGET_RATIO,
        ),
        figure("snapshot", "the same", mib / took_s, "MiB/s", mib / unchecked_s, "without checksums"),
    ]


def _seconds(work: Callable[[int], None], version: int) -> float:
    begun = time.perf_counter()
    work(version)
    return time.perf_counter() - begun
