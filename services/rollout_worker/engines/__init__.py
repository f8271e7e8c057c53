"""Engines: what generates tokens behind a rollout worker. `make_engine` is the only place that knows them all."""

from __future__ import annotations

from pathlib import Path

from services.jobfile import EmulationSection, RolloutSection
from services.rollout_worker.engines.base import Engine


def make_engine(
    rollout: RolloutSection,
    device: str,
    address: str = "127.0.0.1",
    *,
    emulation: EmulationSection = EmulationSection(),  # noqa: B008 - frozen
    age_s: float = 0.0,
    model: str = "",
    log_file: Path = Path("sglang.log"),
    worker: str = "",
) -> Engine:
    """The engine that `rollout.engine` names (checked by the worker's Config), on a node with this address.

    `age_s`: how long the process has been starting, which an emulated preparation counts as done. `model`: the folder that an SGLang
    server starts from; its output goes to `log_file`. Raises ConfigError.
    """
    if rollout.engine == "emulated":
        from services.rollout_worker.engines.emulated import EmulatedEngine, ScaledClock
        from services.rollout_worker.engines.replies import load_replies
        from services.timing import hardware

        clock = ScaledClock(emulation.time_scale)
        prepared_s = age_s * emulation.time_scale
        return EmulatedEngine(
            hardware.load(emulation.hardware),
            rollout,
            clock,
            address=address,
            prepared_s=prepared_s,
            replies=load_replies(emulation.replies),
        )
    if rollout.engine == "sglang":
        from services.rollout_worker.engines.sglang.engine import SglangEngine

        adopt = rollout.sglang.adopt.get(worker, "")
        return SglangEngine(rollout, device, model, log_file, address=address, adopt=adopt)
    assert rollout.engine == "torch", f"no engine {rollout.engine!r}"
    from services.rollout_worker.engines.torch_engine import TorchEngine  # torch: heavy

    return TorchEngine(rollout, device, address=address)
