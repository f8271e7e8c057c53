"""Benchmarks that need a server, on tiny sizes: they run and say what they promise. Speed is never asserted."""

from __future__ import annotations

from pathlib import Path

from services.bench import engine, gateway, processes, router, scale, stream, table


async def test_table_figures(tmp_path: Path) -> None:
    found = await table.measure(tmp_path, watchers=(1, 3), events=3, workers=2)
    assert [each.case for each in found] == ["1 watcher, p50", "1 watcher, p99", "3 watchers, p50", "3 watchers, p99"]
    assert all(each.value > 0 and each.reference and each.unit == "ms" for each in found)


async def test_router_figures(tmp_path: Path) -> None:
    (found,) = await router.measure(tmp_path, requests=100, workers=4)
    assert found.unit == "1/s" and found.value > 0 and found.reference


async def test_stream_figures(tmp_path: Path) -> None:
    found = await stream.measure(tmp_path, tokens=6, rounds=1, alone=1)
    assert [each.unit for each in found] == ["us", "us", "ms"]
    assert all(each.reference for each in found)


async def test_engine_figures(tmp_path: Path) -> None:
    found = await engine.measure(tmp_path, batches=(1, 2), tokens=4, rounds=1)
    assert [each.case for each in found] == [f"batch {n}, {way}" for n in (1, 2) for way in ("direct", "in service")]
    assert all(each.value > 0 for each in found)


async def test_the_bare_turn_costs_something(tmp_path: Path) -> None:
    assert await processes.bare_turn_ms(tmp_path, 50) >= 0


async def test_scale_counts_plans_and_heartbeats(tmp_path: Path) -> None:
    said: list[str] = []
    run = await scale.measure(tmp_path, workers=4, seconds=8.0, period_s=3.0, time_scale=200.0, say=said.append)
    assert run.workers == 4 and run.heartbeats > 0 and not run.restarts
    assert run.plans >= 1 and run.propagation_ms, "a reclaimed worker is a plan, and an epoch"
    assert {"orchestrator", "router", "nats-server", "emulated_fleet"} <= run.memory.keys() == run.cpu_s.keys()
    assert all(len(samples) == len(run.at_s) for samples in run.memory.values())
    assert said


async def test_the_gateways_figures(tmp_path: Path) -> None:
    found = {each.case: each for each in await gateway.measure(tmp_path, alone=2, requests=128, streams=64)}
    assert found["direct connection, p50"].value > 0
    gateways = [each for case, each in found.items() if case.startswith("gateway: ")]
    assert [each.unit for each in gateways] == ["ms", "ms", "1/s", "us", "%"]
    beside = any(case.startswith("sglang-router: ") for case in found)
    assert all((each.reference is not None) == beside for each in gateways[:4])
