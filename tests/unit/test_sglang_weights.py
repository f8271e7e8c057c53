"""A server's checksums against what changed between two snapshots; and an engine whose server only says that it loaded one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from messages.ids import PolicyVersion
from services.jobfile import RolloutSection, SglangSection
from services.rollout_worker.engines.base import EngineError
from services.rollout_worker.engines.sglang.engine import SglangEngine
from services.rollout_worker.engines.sglang.push import PushError, batches
from services.rollout_worker.engines.sglang.weights import (
    Held,
    Source,
    WeightFileError,
    mismatch,
    sources,
    stored_type,
    sums_of,
)
from tests.engine_contract.streams import first_chunk, joined, run, spec
from tests.sglang_stand_in import StandIn, held_in

NAMES = ("model.embed.weight", *(f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkvo"), "lm_head.weight")


def snapshot(folder: Path, **changes: float) -> str:
    """Tensors of ones; `changes` by the last but one part of a tensor's name."""
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    tensors = {name: np.full((4, 3), changes.get(name.split(".")[-2], 1.0), np.float32) for name in NAMES}
    save_file({name: tensors[name] for name in NAMES[:3]}, folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in NAMES[3:]}, folder / "model-2.safetensors")
    return str(folder)


def held(dtype: str = "F32", **digests: str) -> Held:
    """Sources `q`, `k`, `v`, `o`, ... of one layer, and the sums of a server of two ranks that has loaded them as they are."""
    of = {f"a.{name}_proj.weight": Source("F32", digest) for name, digest in digests.items()}
    qkv = "".join(digests[name] for name in "qkv")
    sums = {"a.qkv_proj.weight": (qkv, qkv), "a.o_proj.weight": (digests["o"], digests["o"])}
    return Held(sources=of, sums=sums, dtype=dtype)


BEFORE = held(q="1", k="1", v="1", o="1")


def swapped(after: Held, of: Held) -> Held:
    return Held(sources=after.sources, sums=of.sums, dtype=after.dtype)


def test_what_changed_in_the_snapshot_has_changed_in_the_server() -> None:
    after = held(q="1", k="2", v="1", o="1")
    assert mismatch(BEFORE, BEFORE) == mismatch(BEFORE, after) == mismatch(after, BEFORE) == ""
    assert "qkv_proj.weight is as it was, though the snapshot's a.k_proj" in mismatch(BEFORE, swapped(after, BEFORE))
    assert "o_proj.weight has changed, which" in mismatch(BEFORE, swapped(after, held(q="1", k="2", v="1", o="7")))
    one_rank = {**after.sums, "a.o_proj.weight": ("1", "9")}
    assert "o_proj.weight has changed" in mismatch(BEFORE, Held(sources=after.sources, sums=one_rank, dtype="F32"))


def test_a_small_change_may_be_lost_in_another_type_but_not_every_change() -> None:
    before, after = held("BF16", q="1", k="1", v="1", o="1"), held("BF16", q="1", k="1", v="2", o="2")
    assert mismatch(before, swapped(after, held(q="1", k="1", v="1", o="2"))) == ""
    assert "none of its tensors" in mismatch(before, swapped(after, before))


def test_what_has_no_counterpart_is_not_judged() -> None:
    before = Held(sources={"x.weight": Source("F32", "1")}, sums={"y.weight": ("1",)}, dtype="F32")
    after = Held(sources={"x.weight": Source("F32", "2")}, sums={"y.weight": ("1",)}, dtype="F32")
    assert mismatch(before, after) == ""


@pytest.mark.parametrize(
    ("tensor", "server"),
    [
        ("m.layers.3.mlp.experts.17.up_proj.weight", "m.layers.3.mlp.experts.w13_weight"),
        ("m.layers.3.mlp.experts.17.down_proj.weight", "m.layers.3.mlp.experts.w2_weight"),
        ("m.layers.3.mlp.gate_proj.weight", "m.layers.3.mlp.gate_up_proj.weight"),
        ("m.layers.3.self_attn.q_proj.bias", "m.layers.3.self_attn.qkv_proj.bias"),
        ("m.norm.weight", "m.norm.weight"),
    ],
)
def test_the_servers_names(tensor: str, server: str) -> None:
    before = Held(sources={tensor: Source("F32", "1")}, sums={server: ("1",)}, dtype="F32")
    after = Held(sources={tensor: Source("F32", "2")}, sums={server: ("1",)}, dtype="F32")
    assert mismatch(before, after).startswith(server)


def test_files_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    one, two = sources(snapshot(tmp_path / "1")), sources(snapshot(tmp_path / "2", k_proj=2.0))
    assert one.keys() == set(NAMES) and one[NAMES[0]].dtype == "F32"
    assert {name for name in NAMES if one[name] != two[name]} == {"model.layers.0.self_attn.k_proj.weight"}
    file = tmp_path / "2" / "model-2.safetensors"
    for cut in (0, 3, 30, file.stat().st_size - 4):
        file.write_bytes((tmp_path / "1" / file.name).read_bytes()[:cut])
        with pytest.raises(WeightFileError):
            sources(tmp_path / "2")


def test_the_type_that_a_server_stores(tmp_path: Path) -> None:
    snapshot(tmp_path / "1")
    assert stored_type("float32", tmp_path) == "F32" and stored_type("auto", tmp_path / "1") == "BF16"
    assert stored_type("auto", tmp_path) == "" == stored_type("fp8", tmp_path / "1")
    (tmp_path / "1" / "config.json").write_text('{"torch_dtype": "float32"}')
    assert stored_type("auto", tmp_path / "1") == ""


def test_a_tensors_sums_are_those_of_all_ranks() -> None:
    assert sums_of([{"checksums": {"a": "1"}}, {"checksums": {"a": "2", "b": "3"}}]) == {"a": ("1", "2"), "b": ("3",)}


async def test_a_server_that_only_says_that_it_loaded_serves_nothing_until_it_has(tmp_path: Path) -> None:
    folders = [snapshot(tmp_path / str(each), q_proj=float(each)) for each in range(3)]
    server = StandIn(slow_s=0.004)
    engine = SglangEngine(RolloutSection(engine="sglang"), "cpu", "", tmp_path / "log", adopt=await server.start())
    try:
        await engine.start()
        await engine.load_snapshot(folders[0], PolicyVersion(0))
        await engine.load_snapshot(folders[1], PolicyVersion(1))
        stream = engine.generate(spec(max_new_tokens=500))
        chunks = [await first_chunk(stream)]
        server.ignores_updates = True
        await engine.pause("in_place")
        with pytest.raises(EngineError, match=r"says it is loaded, but model.layers.0.self_attn.qkv_proj.weight is as"):
            await engine.load_snapshot(folders[2], PolicyVersion(2))
        await engine.resume()
        chunks += [chunk async for chunk in stream]
        assert chunks[-1].finish == "interrupted" and {chunk.version for chunk in chunks if chunk.tokens} == {1}
        (refused,) = await run(engine, spec("r2"))
        assert (engine.version, refused.finish) == (-1, "refused")
        server.ignores_updates = False
        await engine.load_snapshot(folders[2], PolicyVersion(2))
        again = await run(engine, spec("r3", max_new_tokens=3))
        assert len(joined(again)) == 3 and {chunk.version for chunk in again} == {2}
    finally:
        await engine.stop()
        await server.stop()
        await asyncio.sleep(0)


def by(way: str) -> RolloutSection:
    return RolloutSection(engine="sglang", sglang=SglangSection(weights=way))


def test_a_snapshot_goes_in_parts_of_bounded_size(tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "1")  # 48 bytes each, three in each file
    parts = batches(folder, 100)
    assert [len(part) for part in parts] == [2, 2, 2] and {each.name for part in parts for each in part} == set(NAMES)
    assert [len(part) for part in batches(folder, 1)] == [1] * 6, "a tensor that is larger goes alone"
    (tmp_path / "empty").mkdir()
    with pytest.raises(PushError, match="no safetensors"):
        batches(tmp_path / "empty", 100)
    (tmp_path / "empty" / "a.safetensors").write_bytes(b"no header")
    with pytest.raises(PushError, match="empty"):
        batches(tmp_path / "empty", 100)


@pytest.mark.parametrize("paused", [True, False])
async def test_tensors_come_through_shared_memory_and_are_verified(tmp_path: Path, paused: bool) -> None:
    folders = [snapshot(tmp_path / str(each), q_proj=float(each)) for each in range(2)]
    server = StandIn(slow_s=0.004)
    engine = SglangEngine(by("tensor"), "cpu", "", tmp_path / "log", adopt=await server.start())
    try:
        await engine.start()
        await engine.load_snapshot(folders[0], PolicyVersion(0))
        stream = engine.generate(spec(max_new_tokens=60))
        chunks = [await first_chunk(stream)]
        if paused:
            await engine.pause("in_place")
        await engine.load_snapshot(folders[1], PolicyVersion(1))
        if paused:
            await engine.resume()
        chunks += [chunk async for chunk in stream]
        assert len(joined(chunks)) == 60 and chunks[-1].version == 1 == engine.version
        wanted = held_in(folders[1])
        assert server.tensors.keys() == wanted.keys()
        assert all(np.array_equal(server.tensors[name], wanted[name]) for name in wanted)
        session = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
        assert server.calls == session * 2 and server.sins == []
    finally:
        await engine.stop()
        await server.stop()


@pytest.mark.parametrize(
    ("way", "call", "mixed"),
    [
        ("tensor", "/begin_weight_update", False),
        ("tensor", "/update_weights_from_tensor", True),
        ("distributed", "/init_weights_update_group", False),
    ],
)
async def test_an_update_that_fails_in_the_middle_leaves_nothing_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, call: str, mixed: bool
) -> None:
    monkeypatch.setattr("services.rollout_worker.engines.sglang.push.JOIN_S", 0.2)  # nobody joins
    folders = [snapshot(tmp_path / str(each), q_proj=float(each)) for each in range(2)]
    server = StandIn(slow_s=0.004)
    adopt = await server.start()
    first = SglangEngine(by("disk"), "cpu", "", tmp_path / "log", adopt=adopt)
    engine = SglangEngine(by(way), "cpu", "", tmp_path / "log", adopt=adopt)
    try:
        await engine.start()
        await first.start()
        await first.load_snapshot(folders[0], PolicyVersion(0))
        engine._now.version = PolicyVersion(0)
        stream = engine.generate(spec(max_new_tokens=60))
        chunks = [await first_chunk(stream)]
        server.fails = call
        with pytest.raises(EngineError, match="it fails"):
            await engine.load_snapshot(folders[1], PolicyVersion(1))
        chunks += [chunk async for chunk in stream]
        assert (chunks[-1].finish, engine.version) == (("interrupted", -1) if mixed else ("length", 0))
        assert server.calls[-1] == ("/end_weight_update" if mixed else call), "a session that stays open is in the way"
    finally:
        await engine.stop()
        await first.stop()
        await server.stop()
