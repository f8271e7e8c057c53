"""`pearl bench pace`: whether paced colocated workers are as fast as eq. 1 says (paper 4.3.1).

Engines of the job's rollout section in this process, each with its share of `B` clients that send turn after turn.
Without a paced time there is nothing to compare with. Agents, routers and NATS take no part.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from messages.decision_engine import WorkloadProfile
from messages.ids import PolicyVersion, Role
from services.decision_engine.makespan import colocated_makespan_s
from services.jobfile import JobFile
from services.models import initial_model
from services.models.config import ModelConfig
from services.profile import built_in
from services.rollout_worker.engines import make_engine
from services.rollout_worker.engines.base import Engine, GenerateSpec

WARM_UP_TURNS = 2
"""The first turns of all clients begin together, and models are cold."""


async def measure(job: JobFile, workers: int, *, prompt: int, turns: int) -> dict[str, Any]:
    """Seconds a turn with prompts of `prompt` fresh tokens, beside eq. 1's. Any: a JSON object."""
    engines = [make_engine(job.rollout, job.model.device) for _ in range(workers)]
    model = str(await asyncio.to_thread(initial_model, job))
    vocabulary = ModelConfig.load(model).vocab_size
    for engine in engines:
        await engine.start()
        await engine.load_snapshot(model, PolicyVersion(0))
        await engine.set_role(Role.COLOCATED)
    clients = job.pipeline.batch_trajectories
    spans: list[tuple[float, float]] = []
    try:
        await asyncio.gather(
            *(
                _client(engines[index % workers], index, prompt, vocabulary, job, turns, spans)
                for index in range(clients)
            )
        )
        load = [engine.load() for engine in engines]
    finally:
        for engine in engines:
            await engine.stop()
    took_s = sum(end - begin for begin, end in spans) / len(spans)
    profile = _profile(job, prompt, clients)
    predicted_s = colocated_makespan_s(profile, workers)
    return {
        "workers": workers,
        "clients": clients,
        "turn_s": round(took_s, 4),
        "predicted_s": round(predicted_s, 4),
        "ratio": round(took_s / predicted_s, 4),
        "decode_batch": round(
            sum(each.decode_batch_sum for each in load) / sum(each.decode_iterations for each in load), 1
        ),
        "tokens_per_s": round(clients * job.pipeline.max_new_tokens / took_s, 1),
    }


def _profile(job: JobFile, prompt: int, clients: int) -> WorkloadProfile:
    """One turn of every client: S = 1, no environment; the first token comes from the prefill."""
    import msgspec

    return msgspec.structs.replace(
        built_in(job),
        B=clients,
        S=1.0,
        r=float(job.pipeline.max_new_tokens - 1),
        dL=float(prompt),
        A_s=job.rollout.pace_decode_ms / 1e3,
        b_s=job.rollout.pace_decode_ms_per_sequence / 1e3,
        t_prefill_s=job.rollout.pace_prefill_us_per_token / 1e6,
        T_over_s=0.0,
        T_env_s=0.0,
    )


async def _client(
    engine: Engine, index: int, prompt: int, vocabulary: int, job: JobFile, turns: int, spans: list[tuple[float, float]]
) -> None:
    draw = random.Random(index)
    for turn in range(turns + WARM_UP_TURNS):
        spec = GenerateSpec(
            request=f"c{index}/{turn}",
            attempt=1,
            prompt=[draw.randrange(vocabulary) for _ in range(prompt)],
            prefix=[],
            max_new_tokens=job.pipeline.max_new_tokens,
            temperature=1.0,
            seed=index * 1000 + turn,
            stop_ids=[],
        )
        began = time.monotonic()
        async for chunk in engine.generate(spec):
            assert chunk.finish in ("", "length"), chunk.reason
        if turn >= WARM_UP_TURNS:
            spans.append((began, time.monotonic()))
