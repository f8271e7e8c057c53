"""Prefill and decode engines of every kind: whatever is cut off, replies go on right and all is freed (DESIGN 7; paper 4.2, 5)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from messages.ids import PolicyVersion, Role
from services.rollout_worker.engines.kv_transfer import Limits
from tests.engine_contract.streams import PROMPT, both, first_chunk, joined, paired, run, spec, until_idle

LONG = [*PROMPT, *PROMPT, *PROMPT]
"""Of slow engines: on its way for 135 ms."""


async def sides(kit: Any, **options: Any) -> tuple[Any, Any]:
    chunk = {"prefill_chunk_tokens": 8} if options.get("slow") else {}
    return await kit.make(Role.PREFILL, **chunk, **options), await kit.make(Role.DECODE, **options)


async def under_way(kit: Any, prefill: Any, decode: Any) -> None:
    """Until a context is on its way."""
    async with asyncio.timeout(5):
        while not kit.under_way(prefill, decode):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_disaggregated_makes_what_colocated_does(kit: Any):
    alone = await kit.make()
    prefill, decode = await sides(kit)
    specs = [spec(f"r{index}", seed=index, prompt=spec().prompt[: 1 + 6 * index]) for index in range(7)]
    wholes = [joined(await run(alone, each)) for each in specs]
    tasks = [both(prefill, decode, each) for each in specs]
    for whole, (at_prefill, at_decode) in zip(wholes, tasks, strict=True):
        (end,) = await at_prefill
        assert (end.finish, end.tokens) == ("handed_over", [])
        assert joined(await at_decode) == whole
    assert prefill.load().decode_tokens == 0 and decode.load().prefill_tokens == 0
    await until_idle(kit, prefill, decode)


async def test_a_reply_of_one_token_and_one_that_had_ended(kit: Any):
    prefill, decode = await sides(kit)
    _, at_decode = both(prefill, decode, spec(max_new_tokens=1))
    chunks = await at_decode
    assert len(joined(chunks)) == 1 and chunks[-1].finish == "length"
    for task in both(prefill, decode, spec("r2", prefix=[1, 2], max_new_tokens=2)):
        (chunk,) = await task
        assert chunk.finish == "length"
    await until_idle(kit, prefill, decode)


async def test_the_bootstrap_triple_is_needed(kit: Any):
    for engine in await sides(kit):
        (chunk,) = await run(engine, spec())
        assert chunk.finish == "refused" and "bootstrap" in chunk.reason


@pytest.mark.parametrize("cancelled", [0, 1])
@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.045])
async def test_a_cancel_that_races_the_transfer_frees_both_sides(kit: Any, cancelled: int, delay_s: float):
    prefill, decode = await sides(kit, slow=True)
    tasks = both(prefill, decode, spec(prompt=LONG, max_new_tokens=3))
    await under_way(kit, prefill, decode)
    await asyncio.sleep(delay_s)
    tasks[cancelled].cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(ended[1 - cancelled], list)
    await until_idle(kit, prefill, decode)
    _, again = both(prefill, decode, spec(attempt=2, max_new_tokens=3))  # and the next is not confused by it
    assert len(joined(await again)) == 3


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_abort_on_either_side_interrupts(kit: Any, side: str):
    prefill, decode = await sides(kit, slow=True)
    at_prefill, at_decode = both(prefill, decode, spec(prompt=LONG))
    await under_way(kit, prefill, decode)
    assert await (prefill if side == "prefill" else decode).abort() == 1
    (end,), chunks = await at_prefill, await at_decode
    assert chunks[-1].finish == "interrupted" and not joined(chunks)
    assert end.finish == ("interrupted" if side == "prefill" else "abandoned")
    await until_idle(kit, prefill, decode)


async def test_a_prefill_engine_that_dies_interrupts_and_one_that_is_gone_refuses(kit: Any):
    whole = joined(await run(await kit.make(), spec(max_new_tokens=6)))
    prefill, decode = await sides(kit, slow=True)
    at_prefill, at_decode = both(prefill, decode, spec(prompt=LONG))
    await under_way(kit, prefill, decode)
    await asyncio.sleep(0.01)
    kit.sever(prefill)
    (chunk,) = await at_decode
    assert chunk.finish in ("interrupted", "refused")
    at_prefill.cancel()
    asked = paired(prefill, spec("r2"))
    await prefill.stop()
    (chunk,) = await run(decode, asked)
    assert chunk.finish == "refused" and "cannot be reached" in chunk.reason
    other = await kit.make(Role.PREFILL)
    _, again = both(other, decode, spec(attempt=2, max_new_tokens=6))
    assert joined(await again) == whole
    await until_idle(kit, decode, other)


async def test_a_decode_engine_that_dies_leaves_the_prefill_engine_free(kit: Any):
    prefill, decode = await sides(kit, slow=True)
    at_prefill, at_decode = both(prefill, decode, spec(prompt=LONG))
    await under_way(kit, prefill, decode)
    await asyncio.sleep(0.01)
    await decode.stop()
    at_decode.cancel()
    (end,) = await at_prefill
    assert end.finish in ("abandoned", "interrupted", *(() if kit.paced else ("handed_over",)))
    await until_idle(kit, prefill)
    await prefill.set_role(Role.DECODE)  # nothing of it is left: it can take the other's place


async def test_a_side_that_never_comes_is_given_up(kit: Any):
    limits = Limits(room_s=0.1, join_s=0.1)
    prefill, decode = await kit.make(Role.PREFILL, limits=limits), await kit.make(Role.DECODE, limits=limits)
    (end,) = await run(prefill, paired(prefill, spec()))
    assert end.finish == "interrupted"
    (chunk,) = await run(decode, paired(prefill, spec("r2")))
    assert chunk.finish == "refused"
    await until_idle(kit, prefill, decode)


async def test_kv_of_another_version_is_refused(kit: Any):
    prefill, decode = await kit.make(Role.PREFILL, version=1), await kit.make(Role.DECODE)
    at_prefill, at_decode = both(prefill, decode, spec())
    (chunk,), (end,) = await at_decode, await at_prefill
    assert (chunk.finish, end.finish) == ("refused", "refused") and "prefill side has version 1" in chunk.reason
    await until_idle(kit, prefill, decode)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_new_weights_on_either_side_end_what_is_on_its_way(kit: Any, side: str, mode: str):
    prefill, decode = await sides(kit, slow=True)
    at_prefill, at_decode = both(prefill, decode, spec(prompt=LONG))
    await under_way(kit, prefill, decode)
    await asyncio.sleep(0.005)
    engine = prefill if side == "prefill" else decode
    await engine.pause(mode)
    await engine.load_snapshot(kit.snapshot(1), PolicyVersion(1))
    await engine.resume()
    chunks = await at_decode
    had = joined(chunks)
    if had and not kit.paced:  # it had arrived before the pause: then its tokens are as without a transfer
        assert chunks[0].version == 0 and len(had) == 40
    else:
        assert chunks[-1].finish == "interrupted" and not had
    await at_prefill
    await until_idle(kit, prefill, decode)


async def test_roles_change_and_a_reply_goes_on(kit: Any):
    one, two = await kit.make(), await kit.make()
    whole = joined(await run(one, spec()))
    await one.set_role(Role.PREFILL)
    await two.set_role(Role.DECODE)
    _, rest = both(one, two, spec(attempt=2, prefix=whole[:13]))
    assert joined(await rest) == whole[13:]
    await until_idle(kit, one, two)
    await one.set_role(Role.DECODE)
    await two.set_role(Role.PREFILL)
    _, rest = both(two, one, spec(attempt=3, prefix=whole[:21]))
    assert joined(await rest) == whole[21:]
    await until_idle(kit, one, two)


async def test_two_hundred_requests_at_once_all_end_right(kit: Any):
    alone = await kit.make()
    prefill, decode = await sides(kit)
    specs = [
        spec(f"r{index}", seed=index, prompt=PROMPT[: 1 + index % 40], max_new_tokens=1 + index % 7)
        for index in range(200)
    ]
    tasks = [both(prefill, decode, each) for each in specs]
    for index, (each, (at_prefill, at_decode)) in enumerate(zip(specs, tasks, strict=True)):
        (end,), chunks = await at_prefill, await at_decode
        assert end.finish == "handed_over" and len(joined(chunks)) == each.max_new_tokens
        if index % 67 == 0:
            assert joined(chunks) == joined(await run(alone, each))
    await until_idle(kit, prefill, decode)


async def test_roles_change_under_load_and_no_token_is_made_again(kit: Any):
    """As a plan does it: those that change are drained, and their replies go on elsewhere from what their clients have."""
    alone = await kit.make()
    one, two = await sides(kit, slow=True)
    specs = [spec(f"r{index}", seed=index, prompt=PROMPT[index:], max_new_tokens=200) for index in range(6)]
    wholes = [joined(await run(alone, each)) for each in specs]
    asked = [paired(one, each) for each in specs]
    at_prefill = [asyncio.create_task(run(one, each)) for each in asked]
    streams = [two.generate(each) for each in asked]
    had = [[await first_chunk(stream)] for stream in streams]
    assert await two.abort() == 6
    for chunks, stream in zip(had, streams, strict=True):
        chunks += [chunk async for chunk in stream]
        assert chunks[-1].finish == "interrupted"
    await asyncio.gather(*at_prefill)
    await until_idle(kit, one, two)
    await asyncio.gather(one.set_role(Role.DECODE), two.set_role(Role.PREFILL))
    kept = [joined(chunks) for chunks in had]
    tasks = [
        both(two, one, msgspec.structs.replace(each, attempt=2, prefix=prefix))
        for each, prefix in zip(specs, kept, strict=True)
    ]
    for whole, prefix, (_, at_decode) in zip(wholes, kept, tasks, strict=True):
        rest = await at_decode
        assert rest[0].offset == len(prefix) > 0 and prefix + joined(rest) == whole
    await until_idle(kit, one, two)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_new_weights_on_both_sides_and_replies_that_decode_go_on(kit: Any, mode: str):
    prefill, decode = await sides(kit, slow=True)
    asked = [paired(prefill, spec(f"r{index}", seed=index, max_new_tokens=60)) for index in range(4)]
    at_prefill = [asyncio.create_task(run(prefill, each)) for each in asked]
    streams = [decode.generate(each) for each in asked]
    chunks = [[await first_chunk(stream)] for stream in streams]
    await asyncio.gather(*at_prefill)
    for engine in (decode, prefill):
        await engine.pause(mode)
        await engine.load_snapshot(kit.snapshot(1), PolicyVersion(1))
        await engine.resume()
    for stream, had in zip(streams, chunks, strict=True):
        had += [chunk async for chunk in stream]
        assert len(joined(had)) == 60, had[-1]
        versions = [chunk.version for chunk in had if chunk.tokens]
        assert versions == sorted(versions) and set(versions) == {0, 1}
    _, fresh = both(prefill, decode, spec("fresh", max_new_tokens=3))
    assert {chunk.version for chunk in await fresh} == {1}
    await until_idle(kit, prefill, decode)


async def test_a_decode_engine_dies_while_it_decodes_and_another_goes_on(kit: Any):
    whole = joined(await run(await kit.make(), spec(max_new_tokens=30)))
    prefill, decode = await sides(kit, slow=True)
    asked = paired(prefill, spec(max_new_tokens=30))
    at_prefill = asyncio.create_task(run(prefill, asked))
    stream = decode.generate(asked)
    had = (await first_chunk(stream)).tokens
    assert (await at_prefill)[-1].finish == "handed_over"
    await decode.stop()
    had += [token async for chunk in stream for token in chunk.tokens]
    assert 0 < len(had) < 30
    other = await kit.make(Role.DECODE)
    _, rest = both(prefill, other, spec(attempt=2, prefix=had, max_new_tokens=30))
    assert had + joined(await rest) == whole
    await until_idle(kit, prefill, other)


async def test_after_its_first_token_a_reply_needs_its_prefill_engine_no_more(kit: Any):
    prefill, decode = await sides(kit, slow=True)
    asked = paired(prefill, spec(max_new_tokens=30))
    at_prefill = asyncio.create_task(run(prefill, asked))
    stream = decode.generate(asked)
    chunks = [await first_chunk(stream)]
    assert (await at_prefill)[-1].finish == "handed_over"
    await prefill.stop()
    chunks += [chunk async for chunk in stream]
    assert len(joined(chunks)) == 30
