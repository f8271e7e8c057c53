"""The emulated engine's own promises: what its life takes, and that its clock can be any."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from messages.ids import PolicyVersion, Role
from services.jobfile import RolloutSection
from services.rollout_worker.engines.base import EngineError, GenerateSpec
from services.rollout_worker.engines.emulated import FIRST_ID, IDS, EmulatedEngine, made_up
from services.snapshot import write_folder
from services.timing import hardware

HARDWARE = hardware.load("h800-qwen3-30b-a3b")


class Jumping:
    """A clock that stands still but for sleeps, which it takes at once and writes down."""

    def __init__(self) -> None:
        self.at = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.at

    def real(self, seconds: float) -> float:
        return 0.0 if seconds <= 0 else 3600.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(max(0.0, seconds))
        self.at += max(0.0, seconds)

    def total(self) -> float:
        total, self.slept = sum(self.slept), []
        return total


def snapshot(folder: Path, version: int) -> str:
    return write_folder(lambda draft: (draft / "config.json").write_text("{}") and None, folder, version).uri


async def test_its_life_takes_what_table_3_says(tmp_path: Path):
    clock = Jumping()
    engine = EmulatedEngine(HARDWARE, RolloutSection(), clock, prepared_s=10.0)
    await engine.start()
    assert clock.total() == pytest.approx(67.06 - 10.0)
    await engine.load_snapshot(snapshot(tmp_path, 3), PolicyVersion(3))
    await engine.set_role(Role.COLOCATED)
    assert clock.total() == pytest.approx(17.89)  # finalisation: weights and joining
    await engine.release()
    assert clock.total() == pytest.approx(4.38)
    await engine.restore()
    await engine.load_snapshot(snapshot(tmp_path, 3), PolicyVersion(3))
    await engine.set_role(Role.COLOCATED)
    assert clock.total() == pytest.approx(6.09)  # activation, weights included
    await engine.load_snapshot(snapshot(tmp_path, 4), PolicyVersion(4))
    assert clock.total() == pytest.approx(61.06e9 / 80e9, rel=0.01)
    await engine.set_role(Role.DECODE)
    assert clock.total() == HARDWARE.set_role_s.value
    await engine.stop()


async def test_a_snapshot_of_another_version_is_refused(tmp_path: Path):
    engine = EmulatedEngine(HARDWARE, RolloutSection(), Jumping())
    await engine.start()
    with pytest.raises(EngineError, match="holds version 3, not 4"):
        await engine.load_snapshot(snapshot(tmp_path, 3), PolicyVersion(4))
    with pytest.raises(EngineError, match="manifest"):
        await engine.load_snapshot(str(tmp_path / "none"), PolicyVersion(4))
    await engine.stop()


@pytest.mark.parametrize(
    ("prompt", "prefix", "why"), [([1], [2**31], "below"), ([2**70], [], "below"), ([-1], [], "negative")]
)
async def test_token_ids_that_no_model_has_are_refused(tmp_path: Path, prompt: list[int], prefix: list[int], why: str):
    engine = EmulatedEngine(HARDWARE, RolloutSection(), Jumping())
    await engine.start()
    await engine.load_snapshot(snapshot(tmp_path, 0), PolicyVersion(0))
    spec = GenerateSpec(
        request="r", attempt=1, prompt=prompt, prefix=prefix, max_new_tokens=9, temperature=1.0, seed=3, stop_ids=[]
    )
    (only,) = [tokens async for tokens in engine.generate(spec)]
    assert only.finish == "refused" and why in only.reason
    await engine.stop()


async def test_a_request_takes_the_models_time_on_any_clock(tmp_path: Path):
    clock = Jumping()
    engine = EmulatedEngine(HARDWARE, RolloutSection(prefill_chunk_tokens=4096), clock)
    await engine.start()
    await engine.load_snapshot(snapshot(tmp_path, 0), PolicyVersion(0))
    spec = GenerateSpec(
        request="r", attempt=1, prompt=[1] * 1000, prefix=[], max_new_tokens=50, temperature=1.0, seed=3, stop_ids=[]
    )
    stream = engine.generate(spec)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    prefill = HARDWARE.iteration_s(0, 0, ((1000, 0),), 1)
    clock.at += prefill * 0.99
    await engine.abort("somebody else")  # any command brings the model to now
    assert not reading.done()
    clock.at += prefill * 0.02
    await engine.abort("somebody else")
    first = await reading
    assert (len(first.tokens), first.cached_tokens) == (1, 0)
    clock.at += sum(HARDWARE.decode_s(1, 1001 + index) for index in range(49)) + 1e-6
    await engine.abort("somebody else")
    last = await anext(stream)
    assert (last.finish, len(last.tokens)) == ("length", 49)
    assert first.tokens + last.tokens == [made_up(3, index) for index in range(50)]
    await engine.stop()


def test_made_up_tokens_are_spread():
    drawn = {made_up(seed, index) for seed in range(40) for index in range(50)}
    assert drawn == set(range(FIRST_ID, FIRST_ID + IDS))
    assert len({tuple(made_up(seed, index) for index in range(8)) for seed in range(2000)}) == 2000
