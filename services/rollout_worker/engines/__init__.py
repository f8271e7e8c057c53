"""Engines: what generates tokens behind a rollout worker. `make_engine` is the only place that knows them all."""

from __future__ import annotations

from services.jobfile import EmulationSection, RolloutSection
from services.rollout_worker.engines.base import Engine


def make_engine(
    rollout: RolloutSection,
    device: str,
    address: str = "127.0.0.1",
    *,
    emulation: EmulationSection = EmulationSection(),  # noqa: B008 - frozen
    age_s: float = 0.0,
) -> Engine:
    """The engine that `rollout.engine` names (checked by the worker's Config), on a node with this address.

    `age_s`: how long the process has been starting, which an emulated preparation counts as done. Raises ConfigError.
    """
    if rollout.engine == "emulated":
        from services.rollout_worker.engines.emulated import EmulatedEngine, ScaledClock
        from services.timing import hardware

        clock = ScaledClock(emulation.time_scale)
        prepared_s = age_s * emulation.time_scale
        return EmulatedEngine(hardware.load(emulation.hardware), rollout, clock, address=address, prepared_s=prepared_s)
    assert rollout.engine == "torch", f"no engine {rollout.engine!r}"
    from services.rollout_worker.engines.torch_engine import TorchEngine  # torch: heavy

    return TorchEngine(rollout, device, address=address)
