"""Every constant of a what-if run with its source, and the same run with one of them changed (`--sensitivity`). Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from services.environments.workload import Workload
from services.simulator.whatif.settings import SOURCES, Settings
from services.timing.hardware import Curve, Hardware, Value

WORKLOAD_DELAYS: Final = "workload delays"
ASSUMED: Final = ("notice_s", "chunk_tokens", "prefix_reuse")
"""Settings that are assumptions about the world; the others are the user's own choice of what to compare."""

Inputs = tuple[Hardware, Workload, Settings]


def constants(hardware: Hardware, settings: Settings) -> list[tuple[str, str]]:
    """(name, source) of each, in a fixed order. A constant that is 0 cannot be changed by a share of it, and is left out."""
    found: list[tuple[str, str]] = []
    for name in hardware.__struct_fields__:
        value: object = getattr(hardware, name)
        if (isinstance(value, Value) and value.value > 0) or isinstance(value, Curve):
            found.append((name, value.source))
    found.append(("kv_capacity_tokens", f"hardware description {hardware.name}"))
    found.append(
        (WORKLOAD_DELAYS, "how much of the recorded delay was the environment's (services/environments/workload.py)")
    )
    found += [(name, SOURCES.get(name, "settings")) for name in ASSUMED if getattr(settings, name) > 0]
    if settings.train_s > 0:
        found.append(("settings.train_s", "given"))
    return found


def changed(inputs: Inputs, name: str, factor: float) -> Inputs:
    """The inputs with constant `name` times `factor`, or as near to it as can run; as they are for "". Raises KeyError for a name that `constants` does not give."""
    hardware, workload, settings = inputs
    if not name:
        return inputs
    if name == WORKLOAD_DELAYS:
        return hardware, msgspec.structs.replace(workload, delay_share=workload.delay_share * factor), settings
    if name in ASSUMED:
        value = getattr(settings, name) * factor
        if name == "prefix_reuse":
            value = min(1.0, value)
        return (
            hardware,
            workload,
            msgspec.structs.replace(settings, **{name: round(value) if name == "chunk_tokens" else value}),
        )
    if name == "settings.train_s":
        return hardware, workload, msgspec.structs.replace(settings, train_s=settings.train_s * factor)
    if name == "kv_capacity_tokens":
        tokens = max(settings.max_context_tokens, round(hardware.kv_capacity_tokens * factor))  # less: it cannot run
        return msgspec.structs.replace(hardware, kv_capacity_tokens=tokens), workload, settings
    value = getattr(hardware, name, None)
    match value:
        case Value():
            new = msgspec.structs.replace(value, value=value.value * factor)
        case Curve():
            new = msgspec.structs.replace(value, seconds=tuple(each * factor for each in value.seconds))
        case _:
            raise KeyError(name)
    return msgspec.structs.replace(hardware, **{name: new}), workload, settings
