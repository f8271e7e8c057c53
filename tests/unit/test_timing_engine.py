"""The timing model of one engine: its arithmetic against one iteration at a time, its memory, what interferes with what."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.timing.engine import NEVER, EngineModel, Event
from services.timing.hardware import Curve, Hardware, HardwareError, load, parse

HARDWARE = load("h800-qwen3-8b")


def model(**changes: int) -> EngineModel:
    sizes = {"max_running": 64, "chunk_tokens": 2048, "kv_tokens": HARDWARE.kv_capacity_tokens, **changes}
    return EngineModel(HARDWARE, **sizes)


def context(number: int, length: int) -> range:
    return range(number << 32, (number << 32) + length)


def drain(engine: EngineModel) -> list[Event]:
    events: list[Event] = []
    while (at := engine.next_event_s()) < NEVER:
        events += engine.advance_to(at)
    return events


def test_one_request_takes_its_prefill_and_its_iterations():
    engine = model()
    engine.submit(1, context(1, 1100), 1000)
    first, end = drain(engine)
    prefill = HARDWARE.iteration_s(0, 0, ((1000, 0),), 1)
    assert (first.kind, first.at_s) == ("first", pytest.approx(prefill))
    decodes = sum(HARDWARE.decode_s(1, 1001 + index) for index in range(99))
    assert (end.kind, end.at_s) == ("end", pytest.approx(prefill + decodes))
    assert engine.sums.decoded == 99 and engine.sums.prefilled == 1000
    assert engine.sums.decode_s + engine.sums.prefill_s == pytest.approx(end.at_s)


@pytest.mark.parametrize("seed", range(8))
def test_steps_in_closed_form_are_the_iterations_one_by_one(seed: int):
    """Looking often or seldom changes nothing, beyond the knee of the attention cost too."""

    def run(pace: float) -> list[tuple[int, str, float]]:
        generator = random.Random(seed)
        engine = model(max_running=6)
        events: list[Event] = []
        arrivals = sorted((generator.uniform(0, 3), key) for key in range(1, 25))
        for at, key in arrivals:
            if pace:
                moment = engine.now_s
                while (moment := moment + generator.uniform(0.001, pace)) < at:
                    events += engine.advance_to(moment)
            events += engine.advance_to(at)
            size = random.Random(key).randint(10, 9000)
            engine.submit(key, context(key, size + random.Random(-key).randint(1, 400)), size)
        events += drain(engine)
        return sorted((event.key, event.kind, round(event.at_s, 6)) for event in events)

    seldom = run(0.0)
    assert len(seldom) == 48
    often = run(0.05)
    for (key, kind, at), (other_key, other_kind, other_at) in zip(seldom, often, strict=True):
        assert (key, kind) == (other_key, other_kind) and at == pytest.approx(other_at, abs=1e-4)


def test_a_prefill_holds_decoding_up_by_its_chunk():
    engine = model(chunk_tokens=512)
    engine.submit(1, context(1, 2000), 100)
    engine.advance_to(1.0)
    before = engine.made(1)
    engine.submit(2, context(2, 20_100), 20_000)
    engine.advance_to(engine.now_s + 0.4)
    slow = engine.made(1) - before
    assert 0 < slow < 0.4 / HARDWARE.decode_s(1, 2000) * 0.75


def test_an_engine_with_passes_of_its_own_for_prompts_decodes_between_two_of_them():
    hardware = msgspec.structs.replace(HARDWARE, prefill=Curve((1, 2048), (0.5, 1.0), "made up"))
    engine = EngineModel(hardware, max_running=8, chunk_tokens=1024, kv_tokens=100_000)
    engine.submit(1, context(1, 1002), 1000)
    engine.submit(2, context(2, 2002), 2000)
    events = {(event.key, event.kind): event.at_s for event in drain(engine)}
    chunk_s = hardware.iteration_s(0, 0, ((1000, 0), (24, 0)), 1)
    assert events[1, "first"] == pytest.approx(chunk_s)
    decode_s = hardware.decode_s(1, 1001)
    assert events[1, "end"] == pytest.approx(chunk_s + decode_s)  # though prompts wait
    rest_s = hardware.iteration_s(0, 0, ((1024, 24),), 0) + hardware.iteration_s(0, 0, ((952, 1048),), 1)
    assert events[2, "first"] == pytest.approx(events[1, "end"] + rest_s)
    assert engine.sums.prefill_s == pytest.approx(chunk_s + rest_s)


def test_the_next_turn_computes_only_what_is_new():
    engine = model()
    engine.submit(1, context(1, 5000), 4000)
    drain(engine)
    engine.submit(2, context(1, 5600), 5400)
    engine.advance_to(engine.now_s)
    assert engine.cached(2) == 4999  # the last token made has no KV yet
    drain(engine)
    assert engine.sums.prefilled == 4000 + 401


def test_a_full_cache_makes_the_youngest_wait_and_all_finish():
    engine = model(kv_tokens=3000, max_running=8)
    for key in range(1, 5):
        engine.submit(key, context(key, 1400), 600)
    ends = [event.key for event in drain(engine) if event.kind == "end"]
    assert sorted(ends) == [1, 2, 3, 4] and engine.sums.retracted > 0
    assert engine.cache.held == 0 and engine.cache.stored <= 3000


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_asked_the_accounts_hold(seed: int):
    generator = random.Random(seed)
    engine = model(kv_tokens=4000, max_running=5, chunk_tokens=300)
    made: dict[int, int] = {}
    for key in range(1, 300):
        action = generator.random()
        if action < 0.5:
            size = generator.randint(1, 1500)
            remote = generator.random() < 0.2
            engine.submit(key, context(generator.randint(1, 6), size + generator.randint(1, 300)), size, remote=remote)
        elif action < 0.6 and engine.requests():
            engine.end(generator.choice(engine.requests()))
        elif action < 0.65:
            engine.retract()
        elif action < 0.7:
            engine.new_weights()
        elif action < 0.75:
            engine.pause()
            engine.resume()
        for event in engine.advance_to(engine.now_s + generator.expovariate(3)):
            if event.kind == "reserved" and event.key in engine:
                engine.arrived(event.key)
            made[event.key] = made.get(event.key, 0) + (event.kind == "end")
        assert engine.cache.held + engine.cache.stored <= 4000
    while engine.next_event_s() < NEVER:
        for event in engine.advance_to(engine.next_event_s()):
            if event.kind == "reserved":
                engine.arrived(event.key)
    assert not engine.requests() and engine.cache.held == 0 and max(made.values()) == 1


def test_a_paused_engine_makes_nothing_and_goes_on():
    engine = model()
    engine.submit(1, context(1, 700), 200)
    engine.advance_to(1.0)
    engine.pause()
    made = engine.made(1)
    assert engine.next_event_s() == NEVER
    engine.advance_to(9.0)
    assert engine.made(1) == made
    engine.resume()
    assert drain(engine)[-1].kind == "end"


def test_a_remote_context_waits_for_its_arrival():
    engine = model()
    engine.submit(1, context(1, 1010), 1000, remote=True)
    assert [event.kind for event in engine.advance_to(0.0)] == ["reserved"]
    assert engine.next_event_s() == NEVER and engine.cache.held == 1000
    engine.advance_to(2.0)
    assert engine.arrived(1) is False and engine.made(1) == 1
    (end,) = drain(engine)
    assert end.kind == "end" and engine.sums.prefilled == 0


@pytest.mark.parametrize("name", ["h800-qwen3-8b", "h800-qwen3-30b-a3b"])
def test_built_in_descriptions_are_plausible(name: str):
    hardware = load(name)
    assert 0.004 < hardware.fixed_decode_s() < 0.02  # A
    assert 1e-4 < hardware.decode_s_per_sequence(12_000) < 2e-3  # b
    assert 5e-6 < hardware.prefill_s_per_token(2048, 8000) < 1e-4
    assert hardware.linear.at(3) < hardware.linear.at(5000) < hardware.linear.at(100_000)


def test_a_built_in_description_that_was_copied_and_changed_is_told_from_it(tmp_path):
    name = "h800-qwen3-8b"
    text = msgspec.json.encode(load(name))
    mine = tmp_path / "my-gpu.json"
    mine.write_bytes(text)
    assert load(str(mine)) == load(name), "a copy is the same"
    faster = msgspec.json.decode(text)
    faster["host_s"]["value"] /= 2
    mine.write_bytes(msgspec.json.encode(faster))
    assert load(str(mine)).name == "h800-qwen3-8b (changed: my-gpu.json)"
    mine.write_bytes(msgspec.json.encode({**faster, "name": "mine"}))
    assert load(str(mine)).name == "mine"
    assert load(name).name == name


def test_a_wrong_description_is_named(tmp_path):
    good = msgspec.to_builtins(HARDWARE)
    for change, word in (
        ({"linear": {"tokens": [1, 1], "seconds": [1, 2], "source": ""}}, "increase"),
        ({"linear": {"tokens": [1], "seconds": [1, 2], "source": ""}}, "as many seconds"),
        ({"host_s": 3}, "host_s"),
        ({"surprise": 3}, "surprise"),
        ({"load_bytes_per_s": {"value": 0, "source": ""}}, "above 0"),
        ({"weights_bytes": -1}, "weights_bytes"),
    ):
        with pytest.raises(HardwareError, match=word):
            parse(msgspec.json.encode({**good, **change}), "mine.json")
    with pytest.raises(HardwareError, match="cannot be read"):
        load(str(tmp_path / "none.json"))
    assert isinstance(parse(msgspec.json.encode(good)), Hardware)


def test_the_built_in_descriptions_are_what_their_sources_make():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "docs/make_hardware.py", "--check"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
