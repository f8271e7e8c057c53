"""One rank of the learner: model and optimiser under FSDP2, train steps, checkpoints, snapshots.

Every method is collective: all ranks call it together, in the same order. Arithmetic blocks; the service runs it in a thread.
The same code runs on CPU with gloo and on GPUs with NCCL; the GPU path has not been run by the project's tests.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from messages.ids import PolicyVersion
from messages.pipeline_scheduler import StepFinished
from services.models.config import ModelConfig
from services.models.decoder import Decoder
from services.models.files import load_weights
from services.snapshot import Snapshot, write_snapshot
from services.trainer import grpo
from services.trainer.config import Config
from services.trainer.data import Batch

META = "pearl.json"
KEEP_CHECKPOINTS = 2
"""The newest, and one more in case that one's disk is bad."""


class CheckpointMeta(msgspec.Struct, frozen=True):
    """Beside the tensors: which version they are, and what to say of the step that made it."""

    version: int
    finished: StepFinished | None


def join_ranks(config: Config) -> tuple[int, torch.device]:
    """Join the process group that torchrun describes, or one of our own; returns (rank, device)."""
    cuda = config.device != "cpu" and torch.cuda.is_available()
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if not dist.is_initialized():
        backend = "nccl" if cuda else "gloo"
        if config.ranks == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
    assert dist.get_world_size() == config.ranks, "torchrun started another number of ranks than training.ranks"
    return rank, device


class Learner:
    """Version `version` of the policy, and what makes the next one of it."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        self.config = config
        self.model_dir = model_dir
        self.rank, self.device = join_ranks(config)
        self.version = 0
        self.finished: StepFinished | None = None
        self._model: Any = None
        self._optimizer: Any = None
        self._build()

    def _build(self) -> None:
        torch.manual_seed(self.config.seed)
        model = Decoder(ModelConfig.load(self.model_dir))
        load_weights(model, self.model_dir)
        model.to(self.device)
        mesh = init_device_mesh(self.device.type, (self.config.ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._model = model
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay
        )

    # --- training

    def train(self, number: int, batch: Batch) -> StepFinished:
        """Train batch `number` (version `number` into `number` + 1), in memory only: `checkpoint` makes it last."""
        assert number == self.version, f"batch {number} trains version {number}, this is version {self.version}"
        config = self.config
        begun = time.monotonic()
        advantages, flat = grpo.group_advantages(batch.rewards, batch.groups)
        for group in self._optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (number + 1) / max(1, config.warmup_steps))
        proximal = self._proximal(batch)
        losses: list[float] = []
        norms: list[float] = []
        ratios: list[float] = []
        entropies: list[float] = []
        for rows in self._minibatches(number, len(batch.rewards)):
            loss, entropy, weight = self._minibatch(batch, rows, proximal, advantages)
            norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.grad_clip)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            entropies.append(entropy)
            ratios.append(weight)
        self.version = number + 1
        rewards = torch.tensor(batch.rewards)
        self.finished = StepFinished(
            batch=number,
            version=PolicyVersion(self.version),
            train_s=time.monotonic() - begun,
            trained_tokens=batch.reply_tokens,
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std(unbiased=False)),
            loss=_mean(losses),
            grad_norm=_mean(norms),
            zero_variance_groups=flat,
            metrics={
                "entropy": _mean(entropies),
                "importance_weight": _mean(ratios),
                "staleness": float(number - min(batch.versions)),
                "trajectories": float(len(batch.rewards)),
            },
        )
        return self.finished

    def _minibatches(self, number: int, size: int) -> Iterator[Tensor]:
        """Index tensors of every epoch's minibatches; the order follows from seed and batch, so a repeat is the same."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + number)
        for _ in range(self.config.epochs):
            order = torch.randperm(size, generator=generator)
            yield from order.split(self.config.minibatch_trajectories)

    def _proximal(self, batch: Batch) -> Tensor:
        """Log-probabilities [B,T-1] under the version that training begins with."""
        with torch.no_grad():
            chunks = [
                self._logprobs(batch, rows)[0].cpu()
                for rows in torch.arange(len(batch.rewards)).split(self.config.minibatch_trajectories)
            ]
        return torch.cat(chunks)

    def _logprobs(self, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        tokens = batch.tokens[rows].to(self.device)
        logits = self._model(tokens, batch.lengths[rows].to(self.device))
        return grpo.reply_logprobs(logits, tokens, self.config.temperature)

    def _minibatch(
        self, batch: Batch, rows: Tensor, proximal: Tensor, advantages: Tensor
    ) -> tuple[float, float, float]:
        """Gradients of one minibatch: this rank's share of its rows, normalised by the tokens of all ranks."""
        total = batch.mask[rows].sum().clamp(min=1.0).to(self.device)
        mine = rows[self.rank :: self.config.ranks]
        if len(mine) == 0:  # every rank must take part in the collectives
            mine = rows[:1]
            share = 0.0
        else:
            share = 1.0
        mask = batch.mask[mine].to(self.device) * share
        current, entropies = self._logprobs(batch, mine)
        behaviour = batch.behaviour[mine].to(self.device)
        before = proximal[mine].to(self.device)
        gain = grpo.objective(
            current,
            before,
            behaviour,
            advantages[mine].to(self.device),
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            importance_cap=self.config.importance_cap,
        )
        gain = gain + self.config.entropy_coefficient * entropies
        # FSDP averages gradients over ranks; the sum over all tokens divided by their number is wanted.
        loss = -(gain * mask).sum() / total * self.config.ranks
        loss.backward()
        with torch.no_grad():
            weight = (before - behaviour).exp().clamp(max=self.config.importance_cap)
            own = mask.sum().clamp(min=1.0)
            return float(loss), float((entropies * mask).sum() / own), float((weight * mask).sum() / own)

    # --- what lasts (DESIGN 8: checkpoint, then snapshot, then news)

    def checkpoint(self) -> None:
        """Write parameters and optimiser of this version atomically; prune old ones."""
        target = self.config.checkpoints / f"v{self.version:06d}"
        draft = target.with_suffix(".part")
        if self.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        dist.barrier()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(draft))
        if self.rank == 0:
            (draft / META).write_bytes(msgspec.json.encode(CheckpointMeta(self.version, self.finished)))
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
            for old in complete_checkpoints(self.config.checkpoints)[:-KEEP_CHECKPOINTS]:
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier()

    def restore(self) -> bool:
        """Load the newest complete checkpoint; False if there is none (the initial model stays)."""
        found = complete_checkpoints(self.config.checkpoints)
        if not found:
            return False
        meta = msgspec.json.decode((found[-1] / META).read_bytes(), type=CheckpointMeta)
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=str(found[-1]))
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.version, self.finished = meta.version, meta.finished
        return True

    def snapshot(self) -> Snapshot | None:
        """Gather the full weights and write them as version `version` (rank 0 returns what to announce)."""
        full = get_model_state_dict(self._model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.rank != 0:
            return None
        return write_snapshot(
            full, self.config.snapshots, self.version, self.model_dir, keep=self.config.keep_snapshots
        )


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were finished, oldest first."""
    return sorted(path.parent for path in folder.glob(f"v[0-9]*/{META}") if path.parent.suffix == "")


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
