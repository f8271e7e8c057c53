"""Prefill and decode engines against a colocated one with the same weights: whatever happens, the tokens are the same."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import torch

from messages.ids import PolicyVersion, Role
from services.jobfile import JobFile, JobSection, RolloutSection
from services.models import Decoder, ModelConfig, initial_model, load_weights, save_weights
from services.rollout_worker.engines.base import EngineError, GenerateSpec, Tokens
from services.rollout_worker.engines.kv_protocol import First, Hello, Pages, frame
from services.rollout_worker.engines.kv_transfer import Limits
from services.rollout_worker.engines.torch_engine import TorchEngine
from tests.waiting import until

VOCAB = 40
PROMPT = [(7 * index) % VOCAB for index in range(70)]
NEAR_TIE = 1e-4
"""Batches of another shape change logits in their last bits; two tokens as close as this may change places."""
ROOM = itertools.count(1)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two versions of the tiny model, with predictions sharp enough to tell tokens apart."""
    torch.set_num_threads(1)
    folders: list[str] = []
    for seed in (1, 2):
        job = JobFile(job=JobSection(data_dir=str(tmp_path_factory.mktemp("model")), seed=seed))
        folder = initial_model(job, VOCAB)
        model = loaded(str(folder))
        state = model.state_dict()
        state["lm_head.weight"] *= 10
        save_weights(state, folder)
        folders.append(str(folder))
    return folders


def loaded(folder: str) -> Decoder:
    model = Decoder(ModelConfig.load(folder))
    load_weights(model, folder)
    return model


@pytest.fixture
async def engines(snapshots: list[str]) -> AsyncIterator[Any]:
    made: list[TorchEngine] = []

    async def make(role: Role, limits: Limits | None = None, version: int = 0, **options: Any) -> TorchEngine:
        engine = TorchEngine(RolloutSection(**options), "cpu", limits=limits or Limits())
        made.append(engine)
        await engine.start()
        await engine.load_snapshot(snapshots[version], PolicyVersion(version))
        await engine.set_role(role)
        return engine

    yield make
    for engine in made:
        await engine.stop()


def spec(request: str = "r", **changes: Any) -> GenerateSpec:
    base = GenerateSpec(
        request=request, attempt=1, prompt=PROMPT, prefix=[], max_new_tokens=40, temperature=0.0, seed=5, stop_ids=[]
    )
    return msgspec.structs.replace(base, **changes)


async def run(engine: TorchEngine, wanted: GenerateSpec) -> list[Tokens]:
    return [chunk async for chunk in engine.generate(wanted)]


def paired(prefill: TorchEngine, wanted: GenerateSpec) -> GenerateSpec:
    host, _, port = prefill.endpoint.rpartition(":")
    return msgspec.structs.replace(wanted, bootstrap_host=host, bootstrap_port=int(port), bootstrap_room=next(ROOM))


async def both(prefill: TorchEngine, decode: TorchEngine, wanted: GenerateSpec) -> tuple[list[Tokens], Tokens]:
    """What the decode side streams, and how the prefill side ends."""
    wanted = paired(prefill, wanted)
    chunks, (end,) = await asyncio.gather(run(decode, wanted), run(prefill, wanted))
    return chunks, end


def joined(chunks: list[Tokens]) -> tuple[list[int], list[float]]:
    offset = chunks[0].offset
    for chunk in chunks:
        assert chunk.offset == offset and len(chunk.tokens) == len(chunk.logprobs)
        offset += len(chunk.tokens)
    assert [bool(chunk.finish) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return [t for chunk in chunks for t in chunk.tokens], [p for chunk in chunks for p in chunk.logprobs]


def assert_same(folder: str, wanted: GenerateSpec, got: list[int], logprobs: list[float], reference: list[int]) -> None:
    """The reference's tokens up to a near tie, and in any case the model's log-probabilities of what was said."""
    context = [*wanted.prompt, *wanted.prefix]
    with torch.no_grad():
        logits = loaded(folder)(torch.tensor([context + got]))[0, len(context) - 1 : -1]
    said = torch.log_softmax(logits, -1).gather(1, torch.tensor(got)[:, None])[:, 0]
    assert logprobs == pytest.approx(said.tolist(), abs=1e-4)
    for index, (mine, other) in enumerate(zip(got, reference, strict=False)):
        if mine != other:
            assert abs(float(logits[index, mine] - logits[index, other])) < NEAR_TIE
            return
    assert len(got) == len(reference)


async def quiet(*sides: TorchEngine) -> None:
    """Everything that ended is freed: no request, no block in use, no room, no connection."""
    async with asyncio.timeout(5):
        for engine in sides:
            while engine._streams or engine._receiving or engine._prefill_side.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await engine.abort()
            assert not engine._thread.replies and not engine._thread.senders and not engine._prefill_side.waiting
            assert not engine._prefill_side._rooms.receivers and not engine._prefill_side._senders
            pool = engine._thread.batcher.pool
            assert pool.available == pool.capacity


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [512, 16, 7])
async def test_disaggregated_equals_colocated(engines: Any, snapshots: list[str], temperature: float, chunk: int):
    alone = await engines(Role.COLOCATED)
    prefill = await engines(Role.PREFILL, prefill_chunk_tokens=chunk)
    decode = await engines(Role.DECODE)
    specs = [
        spec(f"r{index}", prompt=PROMPT[: 1 + 9 * index], seed=index, temperature=temperature) for index in range(7)
    ]
    wholes = [joined(await run(alone, each)) for each in specs]
    done = await asyncio.gather(*(both(prefill, decode, each) for each in specs))
    for each, whole, (chunks, end) in zip(specs, wholes, done, strict=True):
        assert (end.finish, end.tokens) == ("handed_over", [])
        tokens, logprobs = joined(chunks)
        assert_same(snapshots[0], each, tokens, logprobs, whole[0])
        assert logprobs == pytest.approx(whole[1], abs=1e-4)
    assert prefill.load().decode_tokens == 0
    assert decode.load().prefill_tokens == 0
    await quiet(prefill, decode)


async def test_a_reply_of_one_token_comes_from_the_prefill_side(engines: Any):
    alone, prefill, decode = await engines(Role.COLOCATED), await engines(Role.PREFILL), await engines(Role.DECODE)
    for wanted in (spec(max_new_tokens=1), spec(prefix=[3, 4], max_new_tokens=3), spec("p", prompt=[5])):
        (chunks, _), whole = await both(prefill, decode, wanted), await run(alone, wanted)
        assert joined(chunks)[0] == joined(whole)[0]
        assert chunks[-1].finish == "length"
    assert await both(prefill, decode, spec(prefix=[1, 2], max_new_tokens=2))  # had ended: neither side runs it
    await quiet(prefill, decode)


async def test_only_the_missing_kv_travels(engines: Any, monkeypatch: pytest.MonkeyPatch):
    alone, prefill, decode = await engines(Role.COLOCATED), await engines(Role.PREFILL), await engines(Role.DECODE)
    sent: list[tuple[int, int]] = []
    write = decode._thread.take_pages

    def counted(number: int, lease: int, pages: Pages, data: bytes) -> None:
        sent.append((pages.start, pages.count))
        write(number, lease, pages, data)

    monkeypatch.setattr(decode._thread, "take_pages", counted)
    reply, _ = joined((await both(prefill, decode, spec()))[0])
    assert sent == [(0, 70)]
    sent.clear()
    turn = spec("r2", prompt=[*PROMPT, *reply, 1, 2, 3])
    chunks, _ = await both(prefill, decode, turn)
    held = (70 + 39) // 16 * 16  # the decode side has its own tokens' KV as well
    assert sent == [(held, 113 - held)]
    assert chunks[0].cached_tokens == 70 // 16 * 16  # the prefill side only the prompt's
    assert joined(chunks)[0] == joined(await run(alone, turn))[0]
    await quiet(prefill, decode)


async def test_the_sides_come_in_either_order(engines: Any):
    prefill, decode = await engines(Role.PREFILL), await engines(Role.DECODE)
    side = prefill._prefill_side
    for first, second in ((prefill, decode), (decode, prefill)):
        wanted = paired(prefill, spec(max_new_tokens=3))
        leading = asyncio.create_task(run(first, wanted))
        await until(lambda: side.waiting or side._rooms.receivers)
        await asyncio.gather(leading, run(second, wanted))
        assert leading.result()[-1].finish in ("length", "handed_over")
    await quiet(prefill, decode)


async def test_a_live_engine_changes_its_role(engines: Any, snapshots: list[str]):
    """Whole on one engine, resumed disaggregated, then with the sides exchanged, then colocated again."""
    one, two = await engines(Role.COLOCATED), await engines(Role.COLOCATED)
    whole, logprobs = joined(await run(one, spec()))
    await one.set_role(Role.PREFILL)
    await two.set_role(Role.DECODE)
    rest, rest_logprobs = joined((await both(one, two, spec(prefix=whole[:13])))[0])
    assert rest == whole[13:]
    assert rest_logprobs == pytest.approx(logprobs[13:], abs=1e-4)
    await quiet(one, two)
    await one.set_role(Role.DECODE)
    await two.set_role(Role.PREFILL)
    rest, rest_logprobs = joined((await both(two, one, spec(prefix=whole[:21])))[0])
    assert rest == whole[21:]
    assert rest_logprobs == pytest.approx(logprobs[21:], abs=1e-4)
    await quiet(one, two)
    await two.set_role(Role.COLOCATED)
    assert joined(await run(two, spec(prefix=whole[:30])))[0] == whole[30:]


async def test_roles_are_checked(engines: Any):
    engine = await engines(Role.PREFILL)
    (chunk,) = await run(engine, spec())
    assert (chunk.finish, chunk.reason) == ("refused", "a prefill engine needs the bootstrap triple")
    waiting = asyncio.create_task(run(engine, paired(engine, spec())))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="1 requests wait"):
        await engine.set_role(Role.DECODE)
    assert await engine.abort() == 1
    assert await engine.abort() == 0
    assert (await waiting)[0].finish == "interrupted"
    await engine.set_role(Role.DECODE)
    (chunk,) = await run(engine, spec())
    assert chunk.finish == "refused"


async def test_a_paced_context_is_handed_over_at_the_end_of_its_time(engines: Any):
    prefill, decode = await engines(Role.PREFILL, pace_prefill_us_per_token=2000), await engines(Role.DECODE)
    began = time.perf_counter()
    await both(prefill, decode, spec())
    assert time.perf_counter() - began >= 2e-3 * prefill.load().prefill_tokens > 0


async def test_a_drain_hands_over_what_a_paced_iteration_has_computed(engines: Any):
    prefill, decode = await engines(Role.PREFILL, pace_prefill_us_per_token=1e9), await engines(Role.DECODE)
    running = asyncio.create_task(both(prefill, decode, spec()))
    await until(lambda: prefill.load().prefill_tokens > 0)  # all is computed; its time is not over
    assert not running.done()
    assert await prefill.abort() == 0
    await running


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_interruption_on_either_side_resumes_the_same(engines: Any, side: str):
    alone = await engines(Role.COLOCATED)
    whole, _ = joined(await run(alone, spec()))
    prefill = await engines(Role.PREFILL, prefill_chunk_tokens=8, pace_prefill_us_per_token=1000)
    decode = await engines(Role.DECODE, pace_decode_ms=1)
    sides = {"prefill": prefill, "decode": decode}
    wanted = paired(prefill, spec())
    tasks = [asyncio.create_task(run(each, wanted)) for each in (decode, prefill)]
    await under_way(decode)
    assert await sides[side].abort() == 1
    chunks, (end,) = await asyncio.gather(*tasks)
    assert (chunks[-1].finish, chunks[-1].tokens) == ("interrupted", [])
    assert end.finish == ("interrupted" if side == "prefill" else "abandoned")
    await quiet(prefill, decode)
    # and after some tokens
    stream = decode.generate(first := paired(prefill, spec("r2")))
    handing = asyncio.create_task(run(prefill, first))
    chunks = [await anext(aiter(stream))]
    assert (await handing)[0].finish == "handed_over"
    await sides[side].abort()  # a prefill side has done its part
    await decode.abort()
    chunks += [chunk async for chunk in stream]
    had, _ = joined(chunks)
    assert 0 < len(had) < 40
    rest, _ = joined((await both(prefill, decode, spec("r2", attempt=2, prefix=had)))[0])
    assert had + rest == whole
    await quiet(prefill, decode)


async def under_way(decode: TorchEngine) -> None:
    """Until some pages, not all, are there."""
    await until(lambda: any(reply.receiving and reply.computed for reply in tuple(decode._thread.replies.values())))


async def test_a_cancel_on_either_side_frees_both(engines: Any):
    prefill = await engines(Role.PREFILL, prefill_chunk_tokens=8, pace_prefill_us_per_token=1000)
    decode = await engines(Role.DECODE)
    for cancelled in (0, 1):
        wanted = paired(prefill, spec(f"r{cancelled}", prompt=[*range(20 * cancelled), *PROMPT][:60]))
        tasks = [asyncio.create_task(run(each, wanted)) for each in (decode, prefill)]
        await under_way(decode)
        tasks[cancelled].cancel()
        (chunk,) = await tasks[1 - cancelled]
        assert chunk.finish == ("abandoned" if cancelled == 0 else "interrupted")
        await quiet(prefill, decode)


@pytest.mark.parametrize("swapped", ["prefill", "decode"])
async def test_kv_of_another_version_is_refused(engines: Any, swapped: str):
    prefill = await engines(Role.PREFILL, version=1 if swapped == "prefill" else 0)
    decode = await engines(Role.DECODE, version=1 if swapped == "decode" else 0)
    (chunk,), end = await both(prefill, decode, spec())
    assert (chunk.finish, end.finish) == ("refused", "refused")
    assert "prefill side has version" in chunk.reason
    await quiet(prefill, decode)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_swap_on_either_side_ends_what_is_on_its_way(engines: Any, snapshots: list[str], side: str, mode: str):
    prefill = await engines(Role.PREFILL, prefill_chunk_tokens=8, pace_prefill_us_per_token=1000)
    decode = await engines(Role.DECODE)
    wanted = paired(prefill, spec())
    tasks = [asyncio.create_task(run(each, wanted)) for each in (decode, prefill)]
    await under_way(decode)
    engine = prefill if side == "prefill" else decode
    await engine.pause(mode)
    await engine.load_snapshot(snapshots[1], PolicyVersion(1))
    await engine.resume()
    (chunk,), (end,) = await asyncio.gather(*tasks)
    assert chunk.finish == "interrupted"
    assert end.finish == ("interrupted" if side == "prefill" else "abandoned")
    await (decode if side == "prefill" else prefill).load_snapshot(snapshots[1], PolicyVersion(1))
    tokens, logprobs = joined((await both(prefill, decode, spec(attempt=2)))[0])
    alone = await engines(Role.COLOCATED, version=1)
    assert_same(snapshots[1], spec(), tokens, logprobs, joined(await run(alone, spec()))[0])
    await quiet(prefill, decode)


async def test_a_dead_prefill_side_interrupts_and_a_missing_one_refuses(engines: Any):
    prefill = await engines(Role.PREFILL, prefill_chunk_tokens=8, pace_prefill_us_per_token=1000)
    decode = await engines(Role.DECODE)
    wanted = paired(prefill, spec())
    tasks = [asyncio.create_task(run(each, wanted)) for each in (decode, prefill)]
    await under_way(decode)
    for connection in tuple(prefill._prefill_side._connections):
        connection.cancel()  # the socket closes, as the kernel does it for a process that dies
    (chunk,) = await tasks[0]
    assert (chunk.finish, chunk.tokens) == ("interrupted", []) and "is gone" in chunk.reason
    await tasks[1]
    await quiet(prefill, decode)
    prefill._prefill_side._server.close()
    (chunk,) = await run(decode, wanted)
    assert chunk.finish == "refused" and "cannot be reached" in chunk.reason
    await quiet(decode)


async def test_a_side_that_does_not_come_is_waited_for_a_bounded_time(engines: Any):
    limits = Limits(room_s=0.05, join_s=0.05)
    prefill, decode = await engines(Role.PREFILL, limits), await engines(Role.DECODE, limits)
    (chunk,) = await run(decode, paired(prefill, spec()))
    assert chunk.finish == "refused" and "no request for room" in chunk.reason
    (chunk,) = await run(prefill, paired(prefill, spec()))
    assert chunk.finish == "interrupted" and "no decode engine" in chunk.reason
    await quiet(prefill, decode)


async def test_a_silent_prefill_side_is_given_up(engines: Any):
    decode = await engines(Role.DECODE, Limits(idle_s=0.1))
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    wanted = spec(bootstrap_host="127.0.0.1", bootstrap_port=port, bootstrap_room=1)
    (chunk,) = await run(decode, wanted)
    assert chunk.finish == "interrupted" and "is silent" in chunk.reason
    await quiet(decode)
    server.close()
    for writer in held:
        writer.close()


async def test_signs_of_life_keep_a_slow_transfer(engines: Any):
    limits = Limits(idle_s=0.2, beat_s=0.02)
    prefill, decode = await engines(Role.PREFILL, limits), await engines(Role.DECODE, limits)
    await prefill.pause("in_place")
    running = asyncio.create_task(both(prefill, decode, spec(max_new_tokens=3)))
    await asyncio.sleep(0.5)  # more than idle_s
    await prefill.resume()
    assert (await running)[0][-1].finish == "length"


@pytest.mark.parametrize(
    "answers",
    [
        [(Pages(start=0, count=3), b"short")],
        [(Pages(start=16, count=1), None)],
        [(Pages(start=0, count=71), None)],
        [(First(token=1, logprob=0.0, cached=0), b"")],
        [(Hello(room=1, request="", attempt=1, context=b"", version=0, cached=0, layout=""), b"")],
    ],
)
async def test_nonsense_is_never_written(engines: Any, answers: Any):
    decode = await engines(Role.DECODE)
    before = [pool.clone() for pool in decode._thread.cache.pools]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for header, body in answers:
            data = bytes(header.count * decode._thread.cache.token_bytes) if body is None else body
            writer.write(frame(header, len(data)) + data)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    wanted = spec(bootstrap_host="127.0.0.1", bootstrap_port=server.sockets[0].getsockname()[1], bootstrap_room=1)
    (chunk,) = await run(decode, wanted)
    assert chunk.finish == "interrupted"
    assert all(torch.equal(old, new) for old, new in zip(before, decode._thread.cache.pools, strict=True))
    await quiet(decode)
    server.close()


async def test_late_pages_are_not_written_into_blocks_of_another(engines: Any):
    """The race itself: the blocks were given back and taken again before the pages are written."""
    decode = await engines(Role.DECODE, kv_cache_tokens=96)
    prefill = await engines(Role.PREFILL)
    first = asyncio.create_task(run(decode, paired(prefill, spec("a", prompt=PROMPT[:60]))))
    await until(lambda: decode._thread.replies)
    ((number, old),) = decode._thread.replies.items()
    lease, data = old.lease, bytes(60 * decode._thread.cache.token_bytes)
    await decode.abort()
    await first
    second = asyncio.create_task(run(decode, paired(prefill, spec("b", prompt=PROMPT[5:65]))))
    thread = decode._thread
    await until(lambda: any(each.spec.request == "b" and each.receiving for each in tuple(thread.replies.values())))
    before = [pool.clone() for pool in thread.cache.pools]
    await thread.call(lambda: thread.take_pages(number, lease, Pages(start=0, count=60), data))
    await thread.call(lambda: thread.take_first(number, lease, First(token=1, logprob=0.0, cached=0)))
    assert all(torch.equal(a, b) for a, b in zip(before, decode._thread.cache.pools, strict=True))
    await decode.abort()
    await second
    await quiet(decode)


async def test_a_full_decode_side_takes_kv_back_and_all_finish_the_same(engines: Any):
    alone, prefill = await engines(Role.COLOCATED), await engines(Role.PREFILL)
    decode = await engines(Role.DECODE, kv_cache_tokens=160)
    specs = [spec(f"r{index}", prompt=PROMPT[index:], seed=index, temperature=1.0) for index in range(6)]
    done = await asyncio.gather(*(both(prefill, decode, each) for each in specs))
    for each, (chunks, _) in zip(specs, done, strict=True):
        assert joined(chunks)[0] == joined(await run(alone, each))[0]
    await quiet(prefill, decode)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_cut_off_what_ends_is_right_and_all_is_freed(engines: Any, snapshots: list[str], seed: int):
    """Many requests through small caches; cancels, aborts on either side, and changes of weights between."""
    rng = random.Random(seed)
    alone = await engines(Role.COLOCATED)
    options = {"prefill_chunk_tokens": 8, "pace_prefill_us_per_token": 50, "max_running": 6}
    limits = Limits(room_s=0.2, join_s=0.2)
    prefill = await engines(Role.PREFILL, limits, kv_cache_tokens=256, **options)
    decode = await engines(Role.DECODE, limits, kv_cache_tokens=208, **options)
    outcomes: dict[str, int] = {}

    async def one(index: int) -> None:
        wanted = spec(
            f"r{index}",
            prompt=PROMPT[rng.randrange(8) : rng.randrange(10, 70)],
            seed=index,
            temperature=1.0,
            max_new_tokens=rng.randrange(1, 20),
        )
        truth = joined(await run(alone, wanted))[0]
        have: list[int] = []
        for attempt in range(1, 40):
            asked = paired(prefill, msgspec.structs.replace(wanted, attempt=attempt, prefix=have))
            sides = [asyncio.create_task(run(each, asked)) for each in (decode, prefill)]
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.03)
                rng.choice(sides).cancel()
            ended = (await asyncio.gather(*sides, return_exceptions=True))[0]
            if isinstance(ended, BaseException):
                continue
            have = have + [token for chunk in ended for token in chunk.tokens]
            finish = ended[-1].finish
            outcomes[finish] = outcomes.get(finish, 0) + 1
            assert have == truth[: len(have)]
            if finish == "length":
                assert have == truth
                return
        raise AssertionError("no end in sight")

    async def disturb() -> None:
        while True:
            await asyncio.sleep(rng.random() * 0.05)
            side = rng.choice((prefill, decode))
            if rng.random() < 0.5:
                await side.abort(f"r{rng.randrange(16)}")
            else:  # a swap to the same weights ends what is on its way as any other
                await side.pause(rng.choice(("in_place", "retract")))
                await side.load_snapshot(snapshots[0], PolicyVersion(0))
                await side.resume()

    disturbing = asyncio.create_task(disturb())
    async with asyncio.timeout(30):
        await asyncio.gather(*(one(index) for index in range(16)))
    disturbing.cancel()
    assert outcomes["length"] == 16
    await quiet(prefill, decode)
