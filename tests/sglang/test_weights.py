"""Every way that weights come to a real server, under load, each verified by the server's checksums."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from messages.ids import PolicyVersion, Role
from services.jobfile import WEIGHT_WAYS, RolloutSection
from services.rollout_worker.engines.base import EngineError
from services.rollout_worker.engines.sglang import push
from services.rollout_worker.engines.sglang.engine import SglangEngine
from services.rollout_worker.engines.sglang.weights import Held
from tests.engine_contract import streams
from tests.engine_contract.conftest import sglang_logs, torch_snapshots  # noqa: F401 - fixtures
from tests.engine_contract.streams import first_chunk, joined, run, spec
from tests.sglang import real

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not real.PYTHON, reason=real.NO_PYTHON)]
PARTS = 1 << 20
"""Bytes: so that the tiny model goes in several."""


@pytest.fixture(scope="module")
def server(torch_snapshots: list[str], sglang_logs: Path) -> Any:  # noqa: F811
    made = real.RealServer(real.PYTHON, torch_snapshots[0], Role.COLOCATED, sglang_logs / "weights.log")
    made.start(Role.COLOCATED)
    yield made
    made.kill()


def sums(engine: SglangEngine) -> Any:
    held = engine._held
    assert isinstance(held, Held) and held.sums, "the server's checksums are what it was verified by"
    return dict(held.sums)


@pytest.mark.parametrize("way", WEIGHT_WAYS)
async def test_weights_come_under_load(
    server: Any,
    torch_snapshots: list[str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    monkeypatch.setitem(streams.DEFAULTS, "temperature", 0.0)
    monkeypatch.setattr(push, "BATCH_BYTES", PARTS)
    section = real.settings(real.PYTHON)
    reference = SglangEngine(
        RolloutSection(engine="sglang", sglang=section), "cpu", "", tmp_path / "log", adopt=server.url
    )
    engine = SglangEngine(
        RolloutSection(engine="sglang", sglang=real.with_weights(section, way)),
        "cpu",
        "",
        tmp_path / "log",
        adopt=server.url,
    )
    try:
        await reference.start()
        wanted: list[Any] = []
        for version in (0, 1):  # what it says, and holds, when it has read them itself
            await reference.load_snapshot(torch_snapshots[version], PolicyVersion(version))
            wanted.append((joined(await run(reference, spec(f"{way}-{version}"))), sums(reference)))
        assert wanted[0][0] != wanted[1][0] and wanted[0][1] != wanted[1][1]
        await engine.start()
        await engine.load_snapshot(torch_snapshots[0], PolicyVersion(0))
        assert sums(engine) == wanted[0][1]
        await asyncio.to_thread(server.pace, 0.004)
        running = [engine.generate(spec(f"{way}-r{each}", max_new_tokens=60)) for each in range(4)]
        chunks = [[await first_chunk(stream)] for stream in running]
        await engine.pause("in_place")
        await engine.load_snapshot(torch_snapshots[1], PolicyVersion(1))
        await engine.resume()
        for stream, had in zip(running, chunks, strict=True):
            had += [chunk async for chunk in stream]
            assert len(joined(had)) == 60 and {chunk.version for chunk in had if chunk.tokens} == {0, 1}
        assert sums(engine) == wanted[1][1]
        await asyncio.to_thread(server.pace, None)
        assert joined(await run(engine, spec(f"{way}-after"))) == wanted[1][0]
        empty = tmp_path / "empty"
        empty.mkdir()
        with pytest.raises(EngineError):
            await engine.load_snapshot(str(empty), PolicyVersion(2))
        assert engine.version == 1 and joined(await run(engine, spec(f"{way}-still"))) == wanted[1][0]
    finally:
        await asyncio.to_thread(server.pace, None)
        await engine.stop()
        await reference.stop()
