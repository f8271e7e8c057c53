"""What the trainer reads of the job file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from services.jobfile import ConfigError, JobFile

ENGINES: Final = ("torch", "emulated", "external")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One frozen configuration for all ranks."""

    engine: str  # "torch" | "emulated" | "external"
    seed: int
    ranks: int
    device: str
    lr: float
    warmup_steps: int
    epochs: int
    minibatch_trajectories: int
    clip_low: float
    clip_high: float
    importance_cap: float
    entropy_coefficient: float
    grad_clip: float
    weight_decay: float
    temperature: float
    keep_snapshots: int
    run_dir: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the optimiser checkpoints."""
        return self.run_dir / "checkpoints"

    @property
    def snapshots(self) -> Path:
        """Folder of the published snapshots."""
        return self.run_dir / "snapshots"

    @property
    def metrics(self) -> Path:
        """Folder of metrics: JSON lines and TensorBoard."""
        return self.run_dir / "metrics"

    @staticmethod
    def of(job: JobFile) -> Config:
        """The configuration of a job. Raises ConfigError."""
        training = job.training
        if training.engine not in ENGINES:
            raise ConfigError(f"training.engine = {training.engine!r}: there is {', '.join(ENGINES)}")
        if training.engine != "emulated" and job.rollout.engine == "emulated":
            raise ConfigError(
                f'training.engine = "{training.engine}" needs the tokens of a model: set rollout.engine = "torch" too'
            )
        if training.engine == "emulated" and job.rollout.engine != "emulated":
            raise ConfigError('training.engine = "emulated" makes no weights: set rollout.engine = "emulated" too')
        if training.engine == "external" and not training.command and job.decision.lending:
            raise ConfigError(
                "decision.lending = true with a trainer that nobody here could stop if it kept its GPUs: "
                "give training.command, so that the node agent runs it"
            )
        if training.engine != "external" and training.command:
            raise ConfigError(f'training.command is for training.engine = "external", not "{training.engine}"')
        return Config(
            engine=training.engine,
            seed=job.job.seed,
            ranks=training.ranks,
            device=job.model.device,
            lr=training.lr,
            warmup_steps=training.warmup_steps,
            epochs=training.epochs,
            minibatch_trajectories=training.minibatch_trajectories,
            clip_low=training.clip_low,
            clip_high=training.clip_high,
            importance_cap=training.importance_cap,
            entropy_coefficient=training.entropy_coefficient,
            grad_clip=training.grad_clip,
            weight_decay=training.weight_decay,
            temperature=job.pipeline.temperature,
            keep_snapshots=training.keep_snapshots,
            run_dir=job.run_dir.resolve(),
        )
