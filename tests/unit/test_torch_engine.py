"""The embedded engine against plain forwards of the same weights: whatever happens on the way, the tokens are the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from messages.ids import PolicyVersion, Role
from services.jobfile import JobFile, JobSection, RolloutSection
from services.models import Decoder, ModelConfig, initial_model, load_weights, save_weights
from services.rollout_worker.engines import sampling, torch_thread
from services.rollout_worker.engines.base import EngineError, GenerateSpec, Tokens
from services.rollout_worker.engines.torch_engine import TorchEngine
from tests.waiting import until

VOCAB = 40
PROMPT = [(7 * index) % VOCAB for index in range(45)]


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two versions of the tiny model, with predictions sharp enough to tell tokens apart."""
    torch.set_num_threads(1)
    folders: list[str] = []
    for seed in (1, 2):
        folder = initial_model(
            JobFile(job=JobSection(data_dir=str(tmp_path_factory.mktemp("model")), seed=seed)), VOCAB
        )
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
async def engines() -> AsyncIterator[Any]:
    made: list[TorchEngine] = []

    async def make(folder: str = "", **options: Any) -> TorchEngine:
        engine = TorchEngine(RolloutSection(**options), "cpu")
        made.append(engine)
        await engine.start()
        if folder:
            await engine.load_snapshot(folder, PolicyVersion(0))
        return engine

    yield make
    for engine in made:
        await engine.stop()


def spec(request: str = "r", **changes: Any) -> GenerateSpec:
    base = GenerateSpec(
        request=request, attempt=1, prompt=PROMPT, prefix=[], max_new_tokens=40, temperature=1.0, seed=5, stop_ids=[]
    )
    return msgspec.structs.replace(base, **changes)


async def run(engine: TorchEngine, wanted: GenerateSpec) -> list[Tokens]:
    return [chunk async for chunk in engine.generate(wanted)]


def joined(chunks: list[Tokens]) -> tuple[list[int], list[float]]:
    """All tokens, after checking that they are contiguous."""
    offset = chunks[0].offset
    for chunk in chunks:
        assert chunk.offset == offset and len(chunk.tokens) == len(chunk.logprobs)
        offset += len(chunk.tokens)
    assert [bool(chunk.finish) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return tokens, [logprob for chunk in chunks for logprob in chunk.logprobs]


def scored(folder: str, prompt: list[int], reply: list[int]) -> torch.Tensor:
    """Log-probabilities of a reply by one plain forward."""
    with torch.no_grad():
        logp = torch.log_softmax(loaded(folder)(torch.tensor([prompt + reply]))[0], dim=-1)
    return logp[len(prompt) - 1 : -1].gather(1, torch.tensor(reply)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_and_log_probabilities_are_the_models(engines: Any, snapshots: list[str], temperature: float):
    engine = await engines(snapshots[0])
    tokens, logprobs = joined(await run(engine, spec(temperature=temperature)))
    assert len(tokens) == 40
    expected = scored(snapshots[0], PROMPT, tokens)
    assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-5)
    if temperature == 0:
        with torch.no_grad():
            logits = loaded(snapshots[0])(torch.tensor([PROMPT + tokens]))[0]
        assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens


async def test_temperature_is_in_the_log_probability(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0])
    tokens, logprobs = joined(await run(engine, spec(temperature=0.5)))
    with torch.no_grad():
        logits = loaded(snapshots[0])(torch.tensor([PROMPT + tokens]))[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits / 0.5, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_resumed_anywhere_equals_uninterrupted(engines: Any, snapshots: list[str], temperature: float):
    engine = await engines(snapshots[0])
    whole, logprobs = joined(await run(engine, spec(temperature=temperature)))
    other = await engines(snapshots[0])

    async def resumed(cut: int) -> tuple[list[int], list[float]]:
        return joined(await run(other, spec(f"r{cut}", prefix=whole[:cut], temperature=temperature)))

    for cut, (rest, rest_logprobs) in enumerate(await asyncio.gather(*map(resumed, range(40)))):
        assert rest == whole[cut:]
        assert rest_logprobs == pytest.approx(logprobs[cut:], abs=1e-4)


async def test_a_reply_that_had_ended_ends_at_once(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0])
    for changes, finish in (
        ({"prefix": [1, 2], "max_new_tokens": 2}, "length"),
        ({"prefix": [1, 9], "stop_ids": [9]}, "stop"),
    ):
        (chunk,) = await run(engine, spec(**changes))
        assert (chunk.finish, chunk.offset, chunk.tokens) == (finish, 2, [])


async def test_batches_do_not_change_replies(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0])
    specs = [
        spec(f"r{index}", prompt=PROMPT[: 3 + 5 * index], seed=index, max_new_tokens=5 + 3 * index)
        for index in range(8)
    ]
    together = await asyncio.gather(*(run(engine, each) for each in specs))
    alone = await engines(snapshots[0])
    for each, chunks in zip(specs, together, strict=True):
        assert joined(chunks)[0] == joined(await run(alone, each))[0]


async def test_the_next_turn_finds_the_last_ones_kv(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0])
    reply, _ = joined(await run(engine, spec()))
    turn = [*PROMPT, *reply, 1, 2, 3]
    (*_, last) = again = await run(engine, spec("r2", prompt=turn))
    assert again[0].cached_tokens == (45 + 39) // 16 * 16
    assert last.cached_tokens == 0 or len(again) == 1
    tokens, logprobs = joined(again)
    fresh, fresh_logprobs = joined(await run(await engines(snapshots[0]), spec("r2", prompt=turn)))
    assert tokens == fresh
    assert logprobs == pytest.approx(fresh_logprobs, abs=1e-5)


async def test_chunked_prefill_equals_whole(engines: Any, snapshots: list[str]):
    whole, whole_logprobs = joined(await run(await engines(snapshots[0]), spec()))
    engine = await engines(snapshots[0], prefill_chunk_tokens=7)
    long, short = await asyncio.gather(run(engine, spec()), run(engine, spec("s", prompt=PROMPT[:3])))
    assert joined(long)[0] == whole
    assert joined(long)[1] == pytest.approx(whole_logprobs, abs=1e-5)
    assert joined(short)[0] == joined(await run(await engines(snapshots[0]), spec("s", prompt=PROMPT[:3])))[0]


async def test_a_full_cache_retracts_and_all_finish_the_same(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0], kv_cache_tokens=128)
    specs = [spec(f"r{index}", prompt=PROMPT[index:], seed=index) for index in range(6)]
    squeezed = await asyncio.gather(*(run(engine, each) for each in specs))
    roomy = await engines(snapshots[0])
    for each, chunks in zip(specs, squeezed, strict=True):
        assert joined(chunks)[0] == joined(await run(roomy, each))[0]


async def test_stop_ids_end_a_reply(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0])
    whole, _ = joined(await run(engine, spec()))
    stop = whole[20]
    chunks = await run(engine, spec("r2", stop_ids=[stop, 39]))
    assert chunks[-1].finish == "stop"
    assert joined(chunks)[0] == whole[: whole.index(stop) + 1]


async def queued(engine: TorchEngine, count: int) -> None:
    while engine.load().queued < count:  # noqa: ASYNC110 - the engine's thread has no event for it
        await asyncio.sleep(0.001)


async def first_chunk(stream: AsyncIterator[Tokens]) -> Tokens:
    return await anext(aiter(stream))


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_weights_change_under_a_running_reply(engines: Any, snapshots: list[str], mode: str):
    engine = await engines(snapshots[0], pace_decode_ms=1)
    stream = engine.generate(spec(max_new_tokens=120))
    chunks = [await first_chunk(stream)]
    await engine.pause(mode)
    await engine.load_snapshot(snapshots[1], PolicyVersion(1))
    await engine.resume()
    chunks += [chunk async for chunk in stream]
    tokens, logprobs = joined(chunks)
    assert len(tokens) == 120
    assert [chunk.version for chunk in chunks] == sorted(chunk.version for chunk in chunks)
    cut = sum(len(chunk.tokens) for chunk in chunks if chunk.version == 0)
    assert 0 < cut < 120
    assert torch.allclose(torch.tensor(logprobs[:cut]), scored(snapshots[0], PROMPT, tokens)[:cut], atol=1e-5)
    recomputed = torch.allclose(torch.tensor(logprobs[cut:]), scored(snapshots[1], PROMPT, tokens)[cut:], atol=1e-5)
    assert recomputed is (mode == "retract")
    # KV of the old weights, whole or mixed, is not for new requests
    (fresh, *_) = await run(engine, spec("r2", prompt=PROMPT + tokens, max_new_tokens=1))
    assert fresh.version == 1
    assert fresh.cached_tokens == (0 if mode == "in_place" else (45 + 119) // 16 * 16)
    assert fresh.logprobs == pytest.approx(scored(snapshots[1], PROMPT + tokens, fresh.tokens).tolist(), abs=1e-5)


async def test_abort_hands_out_what_there_is(engines: Any, snapshots: list[str]):
    whole, _ = joined(await run(await engines(snapshots[0]), spec(max_new_tokens=200)))
    engine = await engines(snapshots[0], pace_decode_ms=1)
    stream = engine.generate(spec(max_new_tokens=200))
    other = engine.generate(spec("other", max_new_tokens=200))
    chunks = [await first_chunk(stream)]
    await first_chunk(other)
    assert await engine.abort("r") == 1
    chunks += [chunk async for chunk in stream]
    had, _ = joined(chunks)
    assert chunks[-1].finish == "interrupted"
    assert had == whole[: len(had)]
    rest, _ = joined(await run(engine, spec("r", prefix=had, max_new_tokens=200)))
    assert had + rest == whole
    assert await engine.abort() in (0, 1)


async def test_paused_requests_wait(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0])
    await engine.pause("abort")
    task = asyncio.create_task(run(engine, spec(max_new_tokens=3)))
    await queued(engine, 1)
    assert not task.done()
    await engine.resume()
    assert len(joined(await task)[0]) == 3


async def test_a_client_that_leaves_frees_everything(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0], pace_decode_ms=1)
    stream = engine.generate(spec(max_new_tokens=500))
    await first_chunk(stream)
    await stream.aclose()
    assert await engine.abort() == 0  # answered after the cancellation
    assert engine.load().running == 0
    pool = engine._thread.batcher.pool
    assert pool.available == pool.capacity


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": PROMPT * 3}, "no room in a context of 128"),
        ({"prompt": []}, "empty"),
        ({"prompt": [VOCAB]}, "token ids"),
        ({"prefix": [-1]}, "token ids"),
    ],
)
async def test_what_cannot_run_is_refused_with_a_reason(engines: Any, snapshots: list[str], changes: Any, reason: str):
    engine = await engines(snapshots[0], kv_cache_tokens=128)
    (chunk,) = await run(engine, spec(**changes))
    assert chunk.finish == "refused"
    assert reason in chunk.reason


async def test_the_queue_is_bounded(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0], max_running=1)
    await engine.pause("in_place")
    tasks = [asyncio.create_task(run(engine, spec(f"r{index}", max_new_tokens=1))) for index in range(12)]
    await queued(engine, 9)
    await engine.resume()
    finishes = [chunks[-1].finish for chunks in await asyncio.gather(*tasks)]
    assert finishes.count("length") == 9
    assert finishes.count("refused") == 3


async def test_a_reply_ends_where_the_context_does(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0], kv_cache_tokens=64)
    chunks = await run(engine, spec(max_new_tokens=100))
    assert chunks[-1].finish == "length"
    assert len(joined(chunks)[0]) == 64 - 45


async def test_release_frees_measured_memory_and_restore_serves_again(engines: Any, tmp_path: Path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 20000,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    save_weights(Decoder(ModelConfig.load(tmp_path)).state_dict(), tmp_path)
    engine = await engines(str(tmp_path))
    before, _ = joined(await run(engine, spec(max_new_tokens=3, temperature=0)))
    freed = await engine.release()
    assert freed > 30e6  # two matrices of 20 MB
    assert engine.version == -1
    (refused,) = await run(engine, spec())
    assert refused.reason == "no weights loaded"
    with pytest.raises(EngineError, match="restore"):
        await engine.load_snapshot(str(tmp_path), PolicyVersion(0))
    await engine.restore()
    await engine.load_snapshot(str(tmp_path), PolicyVersion(0))
    assert joined(await run(engine, spec(max_new_tokens=3, temperature=0)))[0] == before


async def test_release_while_busy_is_refused(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0], pace_decode_ms=1)
    stream = engine.generate(spec(max_new_tokens=500))
    await first_chunk(stream)
    with pytest.raises(EngineError, match="1 requests run"):
        await engine.release()
    await stream.aclose()


async def test_a_bad_snapshot_leaves_the_old_weights(engines: Any, snapshots: list[str], tmp_path: Path):
    engine = await engines(snapshots[0])
    with pytest.raises(EngineError, match=r"config\.json"):
        await engine.load_snapshot(str(tmp_path), PolicyVersion(1))
    assert engine.version == 0
    whole, logprobs = joined(await run(engine, spec()))
    assert torch.allclose(torch.tensor(logprobs), scored(snapshots[0], PROMPT, whole), atol=1e-5)


async def test_without_weights_it_starts_and_refuses(engines: Any):
    engine = await engines()
    assert engine.version == -1
    (chunk,) = await run(engine, spec())
    assert chunk.finish == "refused"
    with pytest.raises(EngineError, match="training"):
        await engine.set_role(Role.TRAINING)
    await engine.set_role(Role.COLOCATED)


async def test_pace_and_load_account_for_every_token(engines: Any, snapshots: list[str]):
    engine = await engines(snapshots[0], pace_decode_ms=2, pace_prefill_us_per_token=100)
    await asyncio.gather(*(run(engine, spec(f"r{index}", max_new_tokens=9)) for index in range(3)))
    load = engine.load()
    assert load.decode_tokens == load.decode_batch_sum == 3 * 8  # the first token of each comes from its prefill
    assert load.decode_s >= 0.002 * load.decode_iterations
    assert load.prefill_tokens <= 3 * 45
    assert load.prefill_s >= 100e-6 * load.prefill_tokens


async def test_a_paced_iteration_tells_at_its_end(engines: Any, snapshots: list[str]):
    whole, _ = joined(await run(await engines(snapshots[0]), spec()))
    engine = await engines(snapshots[0], pace_decode_ms=3_600_000)
    running = asyncio.create_task(run(engine, spec(max_new_tokens=2)))
    await until(lambda: engine.load().decode_tokens == 1)  # all is computed; its time is not over
    assert not running.done()
    await engine.stop()
    chunks = await running
    assert (joined(chunks)[0], chunks[-1].finish) == (whole[:2], "length")


async def test_a_drain_waits_for_nothing_that_a_paced_iteration_has_ended(engines: Any, snapshots: list[str]):
    whole, _ = joined(await run(await engines(snapshots[0]), spec()))
    engine = await engines(snapshots[0], pace_decode_ms=3_600_000)
    running = asyncio.create_task(run(engine, spec(max_new_tokens=2)))
    await until(lambda: engine.load().decode_tokens == 1)
    assert await engine.abort() == 0, "it has ended, nobody knows yet"
    chunks = await running
    assert (joined(chunks)[0], chunks[-1].finish) == (whole[:2], "length")


async def test_what_a_paced_iteration_made_comes_before_the_end_of_what_is_broken_off(
    engines: Any, snapshots: list[str], monkeypatch: pytest.MonkeyPatch
):
    whole, _ = joined(await run(await engines(snapshots[0]), spec()))
    monkeypatch.setattr(torch_thread, "FLUSH_S", 0.0)
    engine = await engines(snapshots[0], pace_decode_ms=3_600_000)
    running = asyncio.create_task(run(engine, spec()))
    await until(lambda: engine.load().decode_tokens == 1)
    assert await engine.abort() == 1
    chunks = await running
    assert [chunk.tokens for chunk in chunks] == [whole[:2], []] and chunks[-1].finish == "interrupted"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_failing_engine_says_so(engines: Any, snapshots: list[str], monkeypatch: pytest.MonkeyPatch):
    engine = await engines(snapshots[0])

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._thread, "_forward", broken)
    reading = asyncio.create_task(run(engine, spec()))
    assert await engine.failed() == "RuntimeError: out of luck"
    reading.cancel()


def test_noise_is_spread_and_independent_of_the_batch():
    cpu = torch.device("cpu")
    drawn = sampling.uniforms([seed for seed in range(100) for _ in range(10)], [*range(10)] * 100, 100, cpu)
    assert abs(float(drawn.mean()) - 0.5) < 0.005
    assert len(set(drawn.flatten().tolist())) == 100_000
    assert 0 < float(drawn.min()) < float(drawn.max()) < 1
    assert torch.equal(sampling.uniforms([7], [3], 100, cpu)[0], drawn[73])
    assert torch.equal(sampling.uniforms([-3], [2], 5, cpu), sampling.uniforms([-3 + (1 << 64)], [2], 5, cpu))


def test_tokens_are_drawn_as_often_as_they_are_likely():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    tokens, logprobs = sampling.sample(probabilities.log().repeat(count, 1), [1.0] * count, range(count), [0] * count)
    share = torch.bincount(torch.tensor(tokens), minlength=4) / count
    assert torch.allclose(share, probabilities, atol=0.015)
    assert torch.allclose(torch.tensor(logprobs), probabilities[tokens].log(), atol=1e-6)


def test_greedy_and_sampled_rows_share_a_batch():
    logits = torch.tensor([[0.0, 1.0, 0.5]] * 50)
    tokens, _ = sampling.sample(logits, [0.0, 1.0] * 25, range(50), [0] * 50)
    assert set(tokens[::2]) == {1}
    assert len(set(tokens[1::2])) == 3
