"""`pearl bench calibrate`: a hardware description measured on a running engine; `--validate`: what it predicts, and what is.

Engines of a job's rollout section are started in this process and asked for replies: decode iterations by batch size and by
context length, prefill by its tokens, hand-overs, weight loads, changes of role, giving device memory back. The result has the
form of the built-in descriptions (`services/timing/hardware.py`), each number with how it was measured, so that `pearl simulate
run --hardware FILE` and the emulated engine take it. Process starts and train steps are not measured here.

Validation plays the same clients against the same engines, colocated and disaggregated, once for real and once in the
simulator's engine model, and compares what their turns take.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from messages.ids import PolicyVersion, Role
from services.bench.pace import WARM_UP_TURNS, Play
from services.bench.pace import measure as pace
from services.jobfile import JobFile
from services.models import initial_model
from services.models.config import ModelConfig
from services.rollout_worker.engines import make_engine
from services.rollout_worker.engines.base import Engine, GenerateSpec
from services.simulator.whatif.engine import NEVER, Costs, FastEngine, Work
from services.timing.hardware import Curve, Hardware, Value

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_ENV_S: Final = 2.0
"""Of the environment after each turn that a validation plays."""
PROMPTS: Final = (4, 16, 64, 256, 1024)
DECODED: Final = 6
"""Tokens that each reply of a decode measurement has: so many iterations less one."""
SHORT: Final = 8
ROUNDS: Final = 3
"""Each measurement's median over so many: a busy machine disturbs single ones."""


class Ask:
    """Requests to engines, with fresh prompts, so that nothing is cached."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._numbers = itertools.count(1)
        self._rooms = itertools.count(1)

    def spec(self, prompt: int, tokens: int) -> GenerateSpec:
        number = next(self._numbers)
        return GenerateSpec(
            request=f"calibrate/{number}",
            attempt=1,
            prompt=[(number * 7919 + index * 104729) % self._vocabulary for index in range(prompt)],
            prefix=[],
            max_new_tokens=tokens,
            temperature=1.0,
            seed=number,
            stop_ids=[],
        )

    async def batch(self, engine: Engine, count: int, prompt: int, tokens: int) -> None:
        """So many requests at once."""
        await asyncio.gather(*(_drain(engine, self.spec(prompt, tokens)) for _ in range(count)))

    async def handed_over(self, prefill: Engine, decode: Engine, prompt: int) -> float:
        """Seconds of one request of one token more than its first, through both."""
        host, _, port = prefill.endpoint.rpartition(":")
        spec = msgspec.structs.replace(
            self.spec(prompt, 2), bootstrap_host=host, bootstrap_port=int(port), bootstrap_room=next(self._rooms)
        )
        began = time.perf_counter()
        await asyncio.gather(_drain(decode, spec), _drain(prefill, spec))
        return time.perf_counter() - began


async def _drain(engine: Engine, spec: GenerateSpec) -> None:
    async for chunk in engine.generate(spec):
        assert chunk.finish in ("", "length", "handed_over"), f"{chunk.finish}: {chunk.reason}"


async def calibrate(job: JobFile, *, say: Callable[[str], None] = lambda _: None) -> Hardware:
    """Measure engines of this job's rollout section on its model."""
    folder = str(await asyncio.to_thread(initial_model, job))
    model = ModelConfig.load(folder)
    ask = Ask(model.vocab_size)
    engine, other = (make_engine(job.rollout, job.model.device) for _ in range(2))
    began = time.perf_counter()
    await engine.start()
    start_s = time.perf_counter() - began
    await other.start()
    try:
        load_s = await _took(lambda: engine.load_snapshot(folder, PolicyVersion(0)))
        await other.load_snapshot(folder, PolicyVersion(0))
        role_s = await _took(lambda: engine.set_role(Role.COLOCATED))
        await ask.batch(engine, 2, SHORT, DECODED)  # warm
        rollout = job.rollout
        batches = [each for each in BATCHES if each <= rollout.max_running]
        decode = [await _decode_s(engine, ask, each, SHORT) for each in batches]
        say(f"decode iteration: {decode[0] * 1e3:.1f} ms alone, {decode[-1] * 1e3:.1f} ms at {batches[-1]}")
        longest = min(rollout.kv_cache_tokens // 8, job.pipeline.max_context_tokens) - DECODED - 1
        slope = 0.0
        if longest > 4 * SHORT:
            far_s, near_s = await _decode_s(engine, ask, 4, longest), await _decode_s(engine, ask, 4, SHORT)
            slope = max(0.0, (far_s - near_s) / (4 * (longest - SHORT)))
        most = min(rollout.prefill_chunk_tokens, max(longest, PROMPTS[0]))
        prompts = [each for each in PROMPTS if each <= most] or [most]
        prefill = [await _prefill_s(engine, ask, each) for each in prompts]
        say(f"prefill: {prefill[-1] / prompts[-1] * 1e6:.0f} us a token")
        await engine.set_role(Role.PREFILL)
        switch_s = await _took(lambda: other.set_role(Role.DECODE))
        hand_s = [await ask.handed_over(engine, other, prompts[0]) for _ in range(ROUNDS)]
        fixed_s = max(0.0, median(hand_s) - prefill[0] - decode[0])
        await engine.set_role(Role.COLOCATED)
        release_s = await _took(engine.release)
        restore_s = await _took(engine.restore)
        weights = await asyncio.to_thread(_bytes_in, Path(folder))
    finally:
        await engine.stop()
        await other.stop()
    kv_bytes = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * 4

    def measured(value: float, how: str) -> Value:
        return Value(value, f"measured: {how}")

    many = f"median of {ROUNDS} on engine {rollout.engine!r}"
    return Hardware(
        name=f"{rollout.engine}-{Path(job.model.path.replace(':', '-')).name}"[:60],
        text=f"{job.model.path} on engine {rollout.engine}, device {job.model.device}, measured by pearl bench calibrate",
        gpus=rollout.gpus_per_worker,
        layers=model.num_hidden_layers,
        max_context_tokens=job.pipeline.max_context_tokens,
        weights_bytes=max(1.0, weights),
        kv_bytes_per_token=float(kv_bytes),
        kv_capacity_tokens=rollout.kv_cache_tokens,
        linear=_curve(batches, decode, f"decode iterations with contexts of {SHORT} tokens, {many}"),
        head=Curve((1.0,), (1e-9,), "in `linear`"),
        host_s=Value(0.0, "in `linear`"),
        attention_floor_s=Value(0.0, "in `linear`"),
        attention_fixed_s=Value(0.0, "in `linear`"),
        attention_s_per_token=measured(slope, f"4 contexts of {max(longest, SHORT)} against {SHORT} tokens, {many}"),
        prefill_attention_s_per_pair=Value(0.0, "in `prefill`"),
        transfer_bytes_per_s=Value(1e9, "assumed: the engines here share one machine; what a hand-over takes is fixed"),
        transfer_fixed_s=measured(fixed_s, "a hand-over of one short context, less its prefill and decode"),
        load_bytes_per_s=measured(max(1.0, weights) / max(load_s, 1e-6), "the first load of the model"),
        prepare_s=measured(start_s, "an engine's start in a process that runs; the process's own start is not in it"),
        finalize_s=measured(load_s + role_s, "first weights and first role"),
        activate_s=measured(restore_s + load_s, "device memory restored, and weights"),
        deactivate_s=measured(release_s, "device memory given back"),
        set_role_s=measured(switch_s, "a change of role"),
        train_s=Value(0.0, "not measured here: set train_s"),
        train_batch=job.pipeline.batch_trajectories,
        train_gpus=1,
        prefill=_curve(prompts, prefill, f"one context's prefill, {many}"),
    )


def _curve(xs: Sequence[int], ys: Sequence[float], source: str) -> Curve:
    """Measured points, made to rise: noise must not make more work cheaper."""
    level = list(itertools.accumulate(ys, max))
    return Curve(tuple(float(x) for x in xs), tuple(max(1e-9, y) for y in level), source)


async def _took(operation: Callable[[], Any]) -> float:  # Any: whatever it returns is of no interest
    began = time.perf_counter()
    await operation()
    return time.perf_counter() - began


async def _decode_s(engine: Engine, ask: Ask, batch: int, prompt: int) -> float:
    """Seconds a decode iteration of so many requests."""
    found: list[float] = []
    for _ in range(ROUNDS):
        before = engine.load()
        await ask.batch(engine, batch, prompt, DECODED)
        after = engine.load()
        iterations = max(1, after.decode_iterations - before.decode_iterations)
        found.append((after.decode_s - before.decode_s) / iterations)
    return median(found)


async def _prefill_s(engine: Engine, ask: Ask, prompt: int) -> float:
    """Seconds of one context's prefill."""
    found: list[float] = []
    for _ in range(ROUNDS):
        before = engine.load()
        await ask.batch(engine, 1, prompt, 1)
        after = engine.load()
        tokens = max(1, after.prefill_tokens - before.prefill_tokens)
        found.append((after.prefill_s - before.prefill_s) * prompt / tokens)
    return median(found)


def _bytes_in(folder: Path) -> float:
    return float(sum(path.stat().st_size for path in folder.glob("*.safetensors")))


# Validation


async def validate(
    job: JobFile, hardware: Hardware, configurations: Sequence[tuple[int, int, int]], *, prompt: int, turns: int
) -> list[dict[str, Any]]:
    """(prefill, decode, colocated) workers: what the same clients' turns take, run and simulated. Any: JSON objects.

    Their environments take up to `MOST_ENV_S`: without, all clients go in step, or in two groups by turns where prefill and decode have
    workers of their own, and which of the two is chance, in a run as in the model.
    """
    found: list[dict[str, Any]] = []
    for prefill, decode, colocated in configurations:
        play = Play(
            prefill=prefill, decode=decode, colocated=colocated, prompt=prompt, turns=turns, most_env_s=MOST_ENV_S
        )
        real = await pace(job, play)
        simulated_s = predict(job, hardware, play)
        found.append(
            {
                "prefill": prefill,
                "decode": decode,
                "colocated": colocated,
                "turn_s": real["turn_s"],
                "simulated_s": round(simulated_s, 4),
                "error": round(simulated_s / real["turn_s"] - 1, 4),
            }
        )
    return found


def predict(job: JobFile, hardware: Hardware, play: Play) -> float:
    """Seconds a turn of `pace`'s clients, in the simulator's engine model."""
    rollout, prompt, turns = job.rollout, play.prompt, play.turns
    costs = Costs(hardware, rollout.max_running, rollout.prefill_chunk_tokens)

    def engines(count: int) -> list[FastEngine]:
        return [
            FastEngine(
                costs,
                max_running=rollout.max_running,
                chunk_tokens=rollout.prefill_chunk_tokens,
                kv_tokens=rollout.kv_cache_tokens,
            )
            for _ in range(count)
        ]

    prefillers, decoders = engines(play.prefill), engines(play.decode + play.colocated)
    for engine in prefillers:
        engine.prefill_only = True
    left = [turns + WARM_UP_TURNS] * job.pipeline.batch_trajectories
    begun = [0.0] * len(left)
    spans: list[float] = []
    heap: list[tuple[float, int, str, Any]] = []
    ties = itertools.count()
    now = 0.0
    touched: dict[int, FastEngine] = {}

    def later(at_s: float, kind: str, what: Any) -> None:
        heapq.heappush(heap, (at_s, next(ties), kind, what))

    def put(engine: FastEngine, work: Work) -> None:
        if id(engine) not in touched:
            engine.advance(now)
        engine.submit(work)
        touched[id(engine)] = engine

    def begin(client: int) -> None:
        begun[client] = now
        engine = min(decoders, key=_requests)
        total = prompt + job.pipeline.max_new_tokens
        put(engine, Work(f"c{client}/{left[client]}", prompt, total, client, remote=bool(prefillers)))

    contexts: dict[Work, Work] = {}  # of a decoder's request that waits for its context: what computes that

    def take(engine: FastEngine) -> None:
        dropped, engine.dropped = engine.dropped, []
        for work in dropped:  # it waits for room again, and its context is computed anew
            context = contexts.pop(work, None)
            prefiller = context.engine if context is not None else None
            if context is not None and prefiller is not None:
                touched[id(prefiller)] = prefiller
                prefiller.advance(now)
                if context.engine is not None:
                    prefiller.end(context)
        reserved, engine.reserved = engine.reserved, []
        for work in reserved:
            contexts[work] = Work(work.session, prompt, prompt + 1, work)
            put(min(prefillers, key=_requests), contexts[work])
        ended, engine.ended = engine.ended, []
        for at_s, work in ended:
            if isinstance(work.of, Work):
                later(at_s + hardware.transfer_s(prompt), "arrived", work)
                continue
            client = work.of
            assert isinstance(client, int)
            if left[client] <= turns:
                spans.append(at_s - begun[client])
            turn = turns + WARM_UP_TURNS - left[client]
            left[client] -= 1
            if left[client]:
                later(at_s + play.env_s(client, turn), "turn", client)

    for client in range(len(left)):
        later(0.0, "turn", client)
    while heap:
        # All that happens at one moment, then the engines: requests that come together are served together.
        now = max(now, heap[0][0])
        while heap and heap[0][0] <= now:
            _, _, kind, what = heapq.heappop(heap)
            if kind == "turn":
                begin(what)
            elif kind == "arrived":
                work = what.of
                if contexts.get(work) is not what:
                    continue
                engine = work.engine
                if id(engine) not in touched:
                    engine.advance(now)
                touched[id(engine)] = engine
                if work not in engine.dropped:  # else it has lost its room just now
                    del contexts[work]
                    if engine.arrived(work):
                        engine.ended.append((now, work))
            else:
                touched[id(what)] = what
        while touched:
            engines_now, touched = list(touched.values()), {}
            for engine in engines_now:
                engine.advance(now)
                take(engine)
                if engine.next_s < NEVER:
                    later(engine.next_s, "engine", engine)
    return sum(spans) / len(spans)


def _requests(engine: FastEngine) -> int:
    return engine.requests
