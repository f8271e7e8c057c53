"""What the worker takes from the job file."""

from __future__ import annotations

from typing import Final

import msgspec

from messages.ids import WorkerId, Zone
from services.jobfile import ConfigError, EmulationSection, JobFile, RolloutSection, rollout_slots

ENGINES: Final = ("torch", "sglang", "emulated")
LIVENESS_MS: Final = 1000
"""A request without tokens for so long gets an empty chunk: its edge takes `agent.silence_ms` of nothing for death."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process's settings."""

    job: str
    rollout: RolloutSection
    emulation: EmulationSection
    device: str
    address: str  # of the node
    attempts_dir: str
    cache_dir: str  # of fetched snapshots; shared by the node's workers
    update_pause: str
    heartbeat_ms: int
    orphan_ms: int
    lent: tuple[WorkerId, ...] = ()  # workers on training GPUs: they begin without device memory

    @classmethod
    def of(cls, job: JobFile, node: str) -> Config:
        """Raises ConfigError for what this release cannot do."""
        if job.rollout.engine not in ENGINES:
            raise ConfigError(f"rollout.engine = {job.rollout.engine!r}: there is {', '.join(ENGINES)}")
        if job.rollout.update_pause not in ("in_place", "retract"):
            raise ConfigError(f"rollout.update_pause = {job.rollout.update_pause!r}: use 'in_place' or 'retract'")
        if job.agent.silence_ms <= 2 * LIVENESS_MS:
            raise ConfigError(
                f"agent.silence_ms = {job.agent.silence_ms}: a queued request is heard of every {LIVENESS_MS} ms only; "
                f"set more than {2 * LIVENESS_MS}"
            )
        return cls(
            job=job.job.name,
            rollout=job.rollout,
            emulation=job.emulation,
            device=job.model.device,
            address=next((each.address for each in job.nodes if each.name == node), "127.0.0.1"),
            attempts_dir=str(job.run_dir / "attempts"),
            cache_dir=str(job.run_dir / "cache" / node),
            update_pause=job.rollout.update_pause,
            heartbeat_ms=job.rollout.heartbeat_ms,
            orphan_ms=job.timeouts.orphan_ms,
            lent=tuple(slot.worker for slot in rollout_slots(job) if slot.zone is Zone.OVERLAP),
        )
