"""One rank of the learner: model and optimiser under FSDP2, train steps, checkpoints, snapshots, lending.

Every public method is collective: all ranks call it together, in the same order. They block; the service calls them in a
thread. All ranks see the run directory (a shared file system where they are on several nodes). The same code runs on the CPU
with gloo and on GPUs with NCCL.

Minibatch order follows from seed and batch number, so a checkpoint needs no generator state: a batch trained again from the
same checkpoint gives the same version.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch's stubs are partial)

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from messages.ids import PolicyVersion
from messages.pipeline_scheduler import StepFinished
from services.models.config import ModelConfig
from services.models.decoder import Decoder
from services.models.files import load_weights
from services.snapshot import Snapshot, find_snapshot, write_snapshot
from services.trainer import checkpoints, grpo, torch_checkpoint
from services.trainer.checkpoints import CheckpointMeta
from services.trainer.config import Config
from services.trainer.data import Batch

_NEVER: Final = timedelta(days=365)
"""Ranks wait for orders as long as rollout takes. A rank that died is noticed by their launcher, not by a timeout."""


def join_ranks(config: Config) -> tuple[int, torch.device]:
    """Join the process group that the environment describes (as torchrun's would), or one of our own; returns (rank, device)."""
    cuda = config.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # a rank a core
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if config.ranks == 1:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented, but not re-exported
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
    found = dist.get_world_size()
    assert found == config.ranks, f"training.ranks = {config.ranks}, but {found} processes were started"
    return dist.get_rank(), device


def leave_ranks() -> None:
    """Leave the process group. A rank that exits within it takes gloo's threads down while they run, and may abort."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Learner:
    """Version `version` of the policy, and what makes the next one of it."""

    def __init__(self, config: Config, model_dir: Path, *, resident: bool = True) -> None:
        """`resident` False: parameters and optimiser come with `acquire`, since the GPUs may be lent just now."""
        self.config = config
        self.model_dir = model_dir
        self.rank, self.device = join_ranks(config)
        # Orders travel apart: waiting for one must not occupy a GPU, and may take hours.
        group: Any = dist.new_group(backend="gloo", timeout=_NEVER) if config.ranks > 1 else None
        self.orders: dist.ProcessGroup | None = group
        self.version = 0
        self.finished: StepFinished | None = None  # the step that made `version`
        self._model: Any = None  # fully_shard changes a module's class; its stubs do not say so
        self._optimizer: Any = None
        if resident:
            self._build()

    @property
    def resident(self) -> bool:
        """Whether parameters and optimiser are in memory; not so while the GPUs are lent."""
        return self._model is not None

    def _build(self) -> None:
        model = Decoder(ModelConfig.load(self.model_dir))
        load_weights(model, self.model_dir)
        model.to(self.device)
        mesh = init_device_mesh(self.device.type, (self.config.ranks,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._model = model
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay
        )

    # ---- training ----

    def train(self, number: int, batch: Batch) -> StepFinished:
        """Train batch `number` (version `number` into `number` + 1), in memory only: `checkpoint` makes it last."""
        assert number == self.version, f"batch {number} trains version {number}, this is version {self.version}"
        assert self.resident, "the parameters were released: acquire first"
        config = self.config
        begun = time.monotonic()
        advantages = grpo.group_advantages(batch.rewards, batch.groups)
        for group in self._optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (number + 1) / max(1, config.warmup_steps))
        proximal = self._proximal(batch)
        sums: list[Tensor] = []  # one [loss, entropy, importance weight, clipped] a minibatch, this rank's part
        norms: list[float] = []
        for rows in self._minibatches(number, len(batch.rewards)):
            sums.append(self._minibatch(batch, rows, proximal, advantages))
            norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.grad_clip)
            norms.append(float(_whole(norm)))
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        means = torch.stack(sums).mean(0)
        dist.all_reduce(means)
        loss, entropy, weight, clipped = means.tolist()
        self.version = number + 1
        rewards = torch.tensor(batch.rewards)
        stale = ((batch.versions < number) * batch.mask).sum() / batch.mask.sum()
        self.finished = StepFinished(
            batch=number,
            version=PolicyVersion(self.version),
            train_s=time.monotonic() - begun,
            trained_tokens=batch.reply_tokens,
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std(unbiased=False)),
            loss=loss,
            grad_norm=sum(norms) / len(norms),
            zero_variance_groups=advantages.flat_groups,
            metrics={
                "entropy": entropy,
                "importance_weight": weight,
                "clipped_share": clipped,
                "staleness": float(number - batch.oldest_version),
                "stale_share": float(stale),
                "trajectories": float(len(batch.rewards)),
                "lr": float(self._optimizer.param_groups[0]["lr"]),
            },
        )
        return self.finished

    def _minibatches(self, number: int, size: int) -> Iterator[Tensor]:
        """Rows of every epoch's minibatches; the order follows from seed and batch."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + number)
        for _ in range(self.config.epochs):
            order = torch.randperm(size, generator=generator)
            yield from order.split(self.config.minibatch_trajectories)

    def _share(self, rows: Tensor) -> tuple[Tensor, float]:
        """This rank's rows, and their weight: a rank without any computes one for nothing, as all must take part."""
        mine = rows[self.rank :: self.config.ranks]
        return (mine, 1.0) if len(mine) else (rows[:1], 0.0)

    def _proximal(self, batch: Batch) -> Tensor:
        """Log-probabilities [B,T-1] under the version that training begins with; the ranks share the work."""
        found = torch.zeros_like(batch.behaviour)
        with torch.no_grad():
            for rows in torch.arange(len(batch.rewards)).split(self.config.minibatch_trajectories):
                mine, weight = self._share(rows)
                found[mine] += weight * self._logprobs(batch, mine)[0].cpu()
        dist.all_reduce(found)
        return found

    def _logprobs(self, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        tokens = batch.tokens[rows].to(self.device)
        logits = self._model(tokens, batch.lengths[rows].to(self.device))
        return grpo.reply_logprobs(logits, tokens, self.config.temperature)

    def _minibatch(self, batch: Batch, rows: Tensor, proximal: Tensor, advantages: grpo.Advantages) -> Tensor:
        """Gradients of one minibatch: this rank's rows, normalised by the tokens of all ranks' rows."""
        config = self.config
        total = batch.mask[rows].sum().clamp(min=1.0).to(self.device)
        mine, share = self._share(rows)
        mask = batch.mask[mine].to(self.device) * share
        useful = mask * advantages.informative[mine].unsqueeze(1).to(self.device)
        before, behaviour = proximal[mine].to(self.device), batch.behaviour[mine].to(self.device)
        current, entropies = self._logprobs(batch, mine)
        gain = grpo.objective(
            current,
            before,
            behaviour,
            advantages.values[mine].to(self.device),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            importance_cap=config.importance_cap,
        )
        loss = -((gain + config.entropy_coefficient * entropies) * useful).sum() / total
        # FSDP averages gradients over ranks; the sum over all tokens divided by their number is wanted.
        (loss * config.ranks).backward()
        with torch.no_grad():
            weights = grpo.importance_weights(before, behaviour, config.importance_cap)
            ratio = (current - before).exp()
            clipped = (ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)
            parts = [(values * mask).sum() / total for values in (entropies, weights, clipped)]
            return torch.stack([loss.detach(), *parts]).cpu()

    # ---- what lasts (DESIGN 8: checkpoint, then snapshot, then news) ----

    def checkpoint(self) -> None:
        """Write parameters and optimiser of this version, complete or not at all; prune old ones."""
        assert self.finished is not None and self.resident, "only a trained version is worth a checkpoint"
        target = checkpoints.folder_of(self.config.checkpoints, self.version)
        draft = target.with_suffix(".part")
        if self.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        dist.barrier()
        torch_checkpoint.save(self._model, self._optimizer, draft)
        if self.rank == 0:
            checkpoints.commit(draft, target, CheckpointMeta(self.version, self.finished))
        dist.barrier()

    def restore(self) -> bool:
        """Go on from the newest complete checkpoint; False if there is none (the initial model stays, version 0).

        Its tensors are loaded now if memory for them is held, else with `acquire`.
        """
        found = checkpoints.newest(self.config.checkpoints)
        if found is None:
            return False
        folder, meta = found
        if self.resident:
            torch_checkpoint.load(self._model, self._optimizer, folder)
        self.version, self.finished = meta.version, meta.finished
        return True

    def snapshot(self) -> Snapshot | None:
        """Gather the full weights and write them as version `version`; rank 0 returns what to announce.

        Without memory, what was written before is found again; what was not, takes memory.
        """
        if not self.resident:
            found = find_snapshot(self.config.snapshots, self.version)
            dist.barrier()  # nobody writes before all have looked
            if found is not None:
                return found if self.rank == 0 else None
            self.acquire()
        full: dict[str, Tensor] = {}
        for name, parameter in cast(nn.Module, self._model).named_parameters():
            value = _whole(parameter.detach())  # collective
            if self.rank == 0:
                full[name] = value.cpu()
        if self.rank != 0:
            return None
        return write_snapshot(
            full, self.config.snapshots, self.version, self.model_dir, keep=self.config.keep_snapshots
        )

    # ---- lending (DESIGN 6: borrow and return) ----

    def release(self) -> int:
        """Give up parameters, gradients and optimiser; bytes freed on all ranks, as the driver or the system sees it.

        What was given up is in the newest checkpoint (at version 0, in the initial model).
        """
        before = self._occupied()
        self._model = self._optimizer = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # or the allocator keeps it for this process
        freed = torch.tensor([max(0, before - self._occupied())], dtype=torch.int64)
        dist.all_reduce(freed)
        return int(freed.item())

    def acquire(self) -> int:
        """Take parameters and optimiser back, as they were when released; bytes taken on all ranks, measured likewise.

        Harmless, and 0 bytes, if they are held.
        """
        if self.resident:
            return 0
        before, expected = self._occupied(), self.version
        self._build()
        self.restore()
        assert self.version == expected, f"released at version {expected}, but the checkpoint is {self.version}"
        taken = torch.tensor([max(0, self._occupied() - before)], dtype=torch.int64)
        dist.all_reduce(taken)
        return int(taken.item())

    def _occupied(self) -> int:
        """Bytes that this rank takes from others: of the GPU's memory, or of the host's."""
        if self.device.type == "cuda":
            return torch.cuda.memory_reserved(self.device)
        return int(psutil.Process().memory_info().rss)


def _whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; collective."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
