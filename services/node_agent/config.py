"""What a node agent needs of the job file, and the command line and environment of the processes it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from messages.ids import Incarnation, NodeId, WorkerId, Zone
from services.jobfile import ConfigError, JobFile, rollout_slots

RESTART_FIRST_MS = 500
"""Pause before a trainer that died is started again; doubled each time."""
RESTART_MOST_MS = 15_000
STEADY_MS = 30_000
"""A trainer that lived so long has not failed at start: the pause begins anew."""


BEATS_A_LEASE = 6
"""So many heartbeats may be lost or late before the orchestrator takes the node's workers for dead."""
HEARTBEAT_MOST_MS = 5_000


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One node. Times in ms."""

    node: NodeId
    zone: Zone
    gpus: int
    gpus_of: dict[WorkerId, tuple[int, ...]]  # of every worker slot, and of the trainer
    workers: tuple[WorkerId, ...]  # every slot of the node, and the trainer's
    trainer: WorkerId | None  # the trainer that this agent keeps running, None if another node does
    threads: int
    cpu_only: bool
    run_dir: Path
    job_path: Path
    kill_grace_ms: int
    heartbeat_ms: int = 500

    @classmethod
    def of(cls, job: JobFile, node: str, job_path: str | Path) -> Config:
        """Raises ConfigError for a node that the job file does not have."""
        section = next((section for section in job.nodes if section.name == node), None)
        if section is None:
            known = ", ".join(section.name for section in job.nodes) or "none"
            raise ConfigError(f"--node {node}: the job file has no such node (it has {known})")
        first = next((section.name for section in job.nodes if section.zone is Zone.TRAINING), None)
        trainer = WorkerId(f"{node}-t0") if node == first else None
        slots = [slot for slot in rollout_slots(job) if slot.node == node]
        gpus_of = {slot.worker: tuple(gpu.index for gpu in slot.gpus) for slot in slots}
        if trainer is not None:
            gpus_of[trainer] = tuple(range(section.gpus))
        return cls(
            node=NodeId(node),
            zone=section.zone,
            gpus=section.gpus,
            gpus_of=gpus_of,
            workers=tuple(gpus_of),
            trainer=trainer,
            threads=job.rollout.threads,
            cpu_only=job.model.device == "cpu",
            run_dir=job.run_dir.resolve(),
            job_path=Path(job_path).resolve(),
            kill_grace_ms=job.timeouts.kill_grace_ms,
            heartbeat_ms=min(HEARTBEAT_MOST_MS, job.timeouts.lease_ms // BEATS_A_LEASE),
        )


def command_line(config: Config, service: str, worker: str, incarnation: Incarnation) -> tuple[str, ...]:
    """The process of a worker: a rollout worker, or the trainer."""
    command = (sys.executable, "-m", "services.cli", "service", service, "-c", str(config.job_path))
    return (*command, "--worker", worker, "--incarnation", str(incarnation))


def environment(config: Config, service: str, gpus: tuple[int, ...]) -> dict[str, str]:
    """What a process inherits: this process's environment, its own GPUs only, and its share of the cores."""
    threads = {} if service == "trainer" else {name: str(config.threads) for name in _THREADS}
    visible = "" if config.cpu_only else ",".join(str(index) for index in gpus)
    return {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "TOKENIZERS_PARALLELISM": "false", **threads}


_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
