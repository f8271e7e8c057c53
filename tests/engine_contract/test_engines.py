"""What every engine does, whatever generates its tokens (services/rollout_worker/engines/base.py; DESIGN 7-9)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from messages.ids import PolicyVersion, Role
from services.rollout_worker.engines.base import EngineError
from tests.engine_contract.streams import PROMPT, first_chunk, joined, run, spec, until_idle


async def test_a_reply_streams_in_order_and_ends_at_its_length(kit: Any):
    engine = await kit.make()
    chunks = await run(engine, spec())
    assert len(joined(chunks)) == 40 and chunks[-1].finish == "length"
    assert {chunk.version for chunk in chunks} == {0}
    assert joined(await run(engine, spec("again"))) == joined(chunks)  # the seed decides
    await until_idle(kit, engine)


async def test_it_streams_while_it_generates(kit: Any):
    engine = await kit.make(slow=True)
    stream = engine.generate(spec(max_new_tokens=60))
    chunk = await first_chunk(stream)
    assert not chunk.finish and 0 < len(chunk.tokens) < 60
    await stream.aclose()
    await until_idle(kit, engine)


async def test_a_reply_resumed_anywhere_goes_on_as_it_would_have(kit: Any):
    engine = await kit.make()
    whole = joined(await run(engine, spec()))
    cuts = range(0, 40, 3)
    rests = await asyncio.gather(*(run(engine, spec(f"r{cut}", attempt=2, prefix=whole[:cut])) for cut in cuts))
    for cut, chunks in zip(cuts, rests, strict=True):
        assert chunks[0].offset == cut and joined(chunks) == whole[cut:]


async def test_a_reply_that_had_ended_ends_at_once(kit: Any):
    engine = await kit.make()
    for changes, finish in (
        ({"prefix": [1, 2], "max_new_tokens": 2}, "length"),
        ({"prefix": [1, 9], "stop_ids": [9]}, "stop"),
    ):
        (chunk,) = await run(engine, spec(**changes))
        assert (chunk.finish, chunk.offset, chunk.tokens) == (finish, 2, [])


async def test_an_answer_may_have_no_tokens_or_end_with_its_first(kit: Any):
    engine = await kit.make()
    (chunk,) = await run(engine, spec(max_new_tokens=0))
    assert (chunk.finish, chunk.offset, chunk.tokens) == ("length", 0, [])
    first = joined(await run(engine, spec("r2", max_new_tokens=1)))
    chunks = await run(engine, spec("r3", stop_ids=first))
    assert chunks[-1].finish == "stop" and joined(chunks) == first
    await until_idle(kit, engine)


async def test_stop_ids_end_a_reply_with_the_first_of_them(kit: Any):
    engine = await kit.make()
    whole = joined(await run(engine, spec()))
    chunks = await run(engine, spec("r2", stop_ids=[whole[20], 4000]))
    assert chunks[-1].finish == "stop" and joined(chunks) == whole[: whole.index(whole[20]) + 1]


async def test_an_abort_hands_out_what_there_is_and_names_one_request(kit: Any):
    engine = await kit.make(slow=True)
    whole = joined(await run(await kit.make(), spec(max_new_tokens=90)))
    streams = [engine.generate(spec(name, max_new_tokens=90)) for name in ("r", "other")]
    chunks = [[await first_chunk(stream)] for stream in streams]
    assert await engine.abort("r") == 1
    chunks[0] += [chunk async for chunk in streams[0]]
    had = joined(chunks[0])
    assert chunks[0][-1].finish == "interrupted" and 0 < len(had) < 90 and had == whole[: len(had)]
    assert await engine.abort() == 1 and await engine.abort() == 0
    chunks[1] += [chunk async for chunk in streams[1]]
    assert chunks[1][-1].finish == "interrupted"
    assert had + joined(await run(engine, spec("r", attempt=2, prefix=had, max_new_tokens=90))) == whole
    await until_idle(kit, engine)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_engine_makes_no_tokens_and_goes_on(kit: Any, mode: str):
    engine = await kit.make(slow=True)
    stream = engine.generate(spec(max_new_tokens=60))
    chunks = [await first_chunk(stream)]
    await engine.pause(mode)
    made = engine.load().decode_tokens
    waiting = asyncio.create_task(run(engine, spec("r2", max_new_tokens=2)))
    await asyncio.sleep(0.03)
    assert engine.load().decode_tokens == made and not waiting.done()
    await engine.resume()
    chunks += [chunk async for chunk in stream]
    assert len(joined(chunks)) == 60 and len(joined(await waiting)) == 2


async def test_a_pause_that_aborts_ends_all(kit: Any):
    engine = await kit.make(slow=True)
    stream = engine.generate(spec(max_new_tokens=60))
    chunks = [await first_chunk(stream)]
    await engine.pause("abort")
    chunks += [chunk async for chunk in stream]
    assert chunks[-1].finish == "interrupted"
    await engine.resume()
    with pytest.raises(EngineError, match="pause mode"):
        await engine.pause("later")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_weights_change_under_load_and_every_token_says_its_version(kit: Any, mode: str):
    engine = await kit.make(slow=True)
    streams = [engine.generate(spec(f"r{index}", seed=index, max_new_tokens=60)) for index in range(4)]
    chunks = [[await first_chunk(stream)] for stream in streams]
    await engine.pause(mode)
    await engine.load_snapshot(kit.snapshot(1), PolicyVersion(1))
    await engine.resume()
    assert engine.version == 1
    for stream, had in zip(streams, chunks, strict=True):
        had += [chunk async for chunk in stream]
        assert len(joined(had)) == 60
        versions = [chunk.version for chunk in had if chunk.tokens]
        assert versions == sorted(versions) and set(versions) == {0, 1}
    if mode == "in_place":  # KV of the old weights serves no new request
        (fresh, *_) = await run(engine, spec("fresh", max_new_tokens=1))
        assert fresh.version == 1 and fresh.cached_tokens == 0
    await until_idle(kit, engine)


async def test_a_bad_snapshot_leaves_the_old_weights(kit: Any):
    engine = await kit.make()
    with pytest.raises(EngineError):
        await engine.load_snapshot(kit.bad_snapshot(), PolicyVersion(1))
    assert engine.version == 0 and len(joined(await run(engine, spec()))) == 40


async def test_two_hundred_requests_at_once_all_end_right(kit: Any):
    engine = await kit.make(kv_cache_tokens=8192, max_running=48)
    alone = await kit.make()
    specs = [
        spec(f"r{index}", seed=index, prompt=PROMPT[: 1 + index % 40], max_new_tokens=1 + index % 7)
        for index in range(200)
    ]
    done = await asyncio.gather(*(run(engine, each) for each in specs))
    for each, chunks in zip(specs, done, strict=True):
        assert len(joined(chunks)) == each.max_new_tokens
    for index in (0, 77, 199):
        assert joined(done[index]) == joined(await run(alone, specs[index]))
    await until_idle(kit, engine)


async def test_a_cache_too_small_for_all_makes_some_wait(kit: Any):
    engine = await kit.make(kv_cache_tokens=128)
    specs = [spec(f"r{index}", prompt=PROMPT[index:], seed=index) for index in range(6)]
    for chunks in await asyncio.gather(*(run(engine, each) for each in specs)):
        assert len(joined(chunks)) == 40
    await until_idle(kit, engine)


async def test_the_queue_is_bounded_and_says_so(kit: Any):
    engine = await kit.make(max_running=1)
    await engine.pause("in_place")
    tasks = [asyncio.create_task(run(engine, spec(f"r{index}", max_new_tokens=1))) for index in range(12)]
    async with asyncio.timeout(5):
        while engine.load().queued < 9:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await engine.resume()
    finishes = [chunks[-1] for chunks in await asyncio.gather(*tasks)]
    refused = [chunk for chunk in finishes if chunk.finish == "refused"]
    assert len(refused) == 3 and refused[0].reason == "the queue is full"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": PROMPT * 3}, "no room in a context of 128"),
        ({"prefix": [1] * 90, "max_new_tokens": 200}, "no room in a context of 128"),
        ({"prompt": []}, "empty"),
        ({"prefix": [-1]}, "token ids"),
    ],
)
async def test_what_cannot_run_is_refused_with_a_reason(kit: Any, changes: dict[str, Any], reason: str):
    engine = await kit.make(kv_cache_tokens=128)
    (chunk,) = await run(engine, spec(**changes))
    assert chunk.finish == "refused" and reason in chunk.reason and not chunk.tokens
    await until_idle(kit, engine)


async def test_a_reply_ends_where_the_context_does(kit: Any):
    engine = await kit.make(kv_cache_tokens=64)
    chunks = await run(engine, spec(max_new_tokens=100))
    assert chunks[-1].finish == "length" and len(joined(chunks)) == 64 - 45


async def test_a_client_that_leaves_frees_everything(kit: Any):
    engine = await kit.make(slow=True)
    stream = engine.generate(spec(max_new_tokens=500))
    await first_chunk(stream)
    await stream.aclose()
    never_read = asyncio.create_task(run(engine, spec("r2", max_new_tokens=500)))
    await asyncio.sleep(0)
    never_read.cancel()
    await until_idle(kit, engine)
    assert await engine.abort() == 0 and engine.load().running == 0


async def test_release_and_restore(kit: Any):
    engine = await kit.make()
    before = joined(await run(engine, spec(temperature=0.0)))
    await engine.release()
    assert engine.version == -1
    (refused,) = await run(engine, spec())
    assert (refused.finish, refused.reason) == ("refused", "no weights loaded")
    with pytest.raises(EngineError, match="restore"):
        await engine.load_snapshot(kit.snapshot(1), PolicyVersion(1))
    await engine.restore()
    await engine.load_snapshot(kit.snapshot(0), PolicyVersion(0))
    assert joined(await run(engine, spec(temperature=0.0))) == before


async def test_release_while_busy_is_refused(kit: Any):
    engine = await kit.make(slow=True)
    stream = engine.generate(spec(max_new_tokens=500))
    await first_chunk(stream)
    with pytest.raises(EngineError, match="1 requests run"):
        await engine.release()
    await stream.aclose()


async def test_without_weights_it_starts_and_refuses(kit: Any):
    engine = await kit.make(version=None)
    assert engine.version == -1
    (chunk,) = await run(engine, spec())
    assert chunk.finish == "refused"


async def test_it_takes_every_serving_role_when_nothing_runs(kit: Any):
    engine = await kit.make()
    for role in (Role.DECODE, Role.PREFILL, Role.COLOCATED):
        await engine.set_role(role)
    assert len(joined(await run(engine, spec()))) == 40
    with pytest.raises(EngineError, match="training"):
        await engine.set_role(Role.TRAINING)


async def test_load_accounts_for_every_token(kit: Any):
    engine = await kit.make(slow=True)
    await asyncio.gather(*(run(engine, spec(f"r{index}", max_new_tokens=9)) for index in range(3)))
    load = engine.load()
    assert load.decode_tokens == load.decode_batch_sum == 3 * 8  # the first token of each comes from its prefill
    assert load.prefill_tokens <= 3 * 45 and load.decode_iterations >= 8
    assert load.decode_s > 0.004 * load.decode_iterations * 0.9 and load.prefill_s > 0
