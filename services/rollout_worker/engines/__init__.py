"""Engines: what generates tokens behind a rollout worker. `make_engine` is the only place that knows them all."""

from __future__ import annotations

from services.jobfile import RolloutSection
from services.rollout_worker.engines.base import Engine


def make_engine(rollout: RolloutSection, device: str, address: str = "127.0.0.1") -> Engine:
    """The engine that `rollout.engine` names (checked by the worker's Config), on a node with this address."""
    assert rollout.engine == "torch", f"no engine {rollout.engine!r}"
    from services.rollout_worker.engines.torch_engine import TorchEngine  # torch: heavy

    return TorchEngine(rollout, device, address=address)
