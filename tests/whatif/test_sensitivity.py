"""Each constant is changed alone, and by what it says; the runner compares what it should."""

from __future__ import annotations

import msgspec
import pytest

from services.environments.workload import Workload, load
from services.preemption_feed.traces import parse
from services.simulator.whatif import sensitivity
from services.simulator.whatif.constants import changed, constants
from services.simulator.whatif.settings import Settings
from services.timing.hardware import BUILT_IN, Curve, Value
from services.timing.hardware import load as load_hardware

WORKLOAD = load("swebench-mini")
SMALL = Workload("few", WORKLOAD.trajectories[:3], WORKLOAD.delay_share)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_constant_of_a_description_is_named_with_its_source(name: str) -> None:
    hardware = load_hardware(name)
    named = dict(constants(hardware, Settings()))
    assert all(named.values())
    for field in hardware.__struct_fields__:
        value = getattr(hardware, field)
        if isinstance(value, Value):
            assert (field in named) == (value.value > 0)
        elif isinstance(value, Curve):
            assert field in named


def test_a_change_touches_one_constant_only() -> None:
    hardware, settings = load_hardware(BUILT_IN[0]), Settings(train_s=100.0)
    inputs = (hardware, SMALL, settings)
    before = msgspec.to_builtins(inputs)
    for name, _ in constants(hardware, settings):
        after = msgspec.to_builtins(changed(inputs, name, 1.2))
        differing = [
            (part, key)
            for part, (old, new) in enumerate(zip(before, after, strict=True))
            for key in old
            if old[key] != new[key]
        ]
        assert len(differing) == 1, name
    assert changed(inputs, "", 1.2) == inputs
    assert changed(inputs, "host_s", 1.5)[0].host_s.value == pytest.approx(1.5 * hardware.host_s.value)
    assert changed(inputs, "linear", 0.5)[0].linear.seconds[0] == pytest.approx(0.5 * hardware.linear.seconds[0])
    small = msgspec.structs.replace(hardware, kv_capacity_tokens=settings.max_context_tokens + 1)
    least = changed((small, SMALL, settings), "kv_capacity_tokens", 0.5)[0].kv_capacity_tokens
    assert least == settings.max_context_tokens, "a worker that holds no whole context cannot be simulated"
    for name in ("layers", "name", "nonsense"):
        with pytest.raises(KeyError):
            changed(inputs, name, 1.2)


def test_the_runner_compares_policies_under_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    def rate(inputs: object, change: tuple[str, float], policy: object) -> float:
        asked.append(change)
        name, factor = change
        return (30.0 if policy.name == "pearl" else 10.0) / (factor if name == "host_s" else 1.0) ** (
            policy.name == "pearl"
        )  # type: ignore[attr-defined]

    monkeypatch.setattr(sensitivity, "_rate", rate)
    said: list[int] = []
    found = sensitivity.examine(
        parse("time_s,available_gpus\n0,0\n"),
        SMALL,
        load_hardware(BUILT_IN[0]),
        ["pearl", "roll"],
        reference="roll",
        processes=1,
        progress=lambda done, of, told: said.append(of),
    )
    assert found.base == 3.0 and found.best == "pearl" and not found.overturned
    row = next(each for each in found.rows if each.constant == "host_s")
    assert row.low == pytest.approx(3.0 / 0.8) and row.high == pytest.approx(2.5)
    assert len(asked) == 2 * (1 + 2 * len(found.rows)) == len(said) and set(said) == {len(asked)}
