"""`pearl bench pace`: whether paced workers are as fast as eq. 1-3 say, colocated and disaggregated (paper 4.3.1).

Engines of the job's rollout section in this process, serving `B` clients that send turn after turn, each to the least
loaded. Without a paced time there is nothing to compare with. Agents, routers and NATS take no part.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import Any

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.ids import PolicyVersion, Role
from services.decision_engine.makespan import colocated_makespan_s, disaggregated_makespan_s
from services.jobfile import JobFile
from services.models import initial_model
from services.models.config import ModelConfig
from services.profile import built_in
from services.rollout_worker.engines import make_engine
from services.rollout_worker.engines.base import Engine, GenerateSpec

WARM_UP_TURNS = 2
"""The first turns of all clients begin together, and models are cold."""


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """Clients' turns on a configuration; a turn's prompt has `prompt` fresh tokens."""

    prefill: int  # workers
    decode: int
    colocated: int
    prompt: int
    turns: int  # of each client, after those of the warm-up
    most_env_s: float = 0.0  # of the environment after a turn

    def env_s(self, client: int, turn: int) -> float:
        """Seconds that a client's environment takes after a turn: the same for the same turn."""
        return random.Random(f"{client}/{turn}").uniform(0, self.most_env_s)


class _Side:
    """Engines of one role, and how many requests each has."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self.load = [0] * len(engines)

    def take(self) -> int:
        index = self.load.index(min(self.load))
        self.load[index] += 1
        return index


class _Bench:
    """The engines of one configuration; `prefill` is empty where they are colocated."""

    def __init__(self, job: JobFile, prefill: list[Engine], decode: list[Engine], vocabulary: int) -> None:
        self.job = job
        self.prefill, self.decode = _Side(prefill), _Side(decode)
        self.vocabulary = vocabulary
        self.rooms = itertools.count(1)
        self.spans: list[tuple[float, float]] = []

    async def client(self, index: int, play: Play) -> None:
        """So many turns of fresh prompts, one after the other."""
        draw = random.Random(index)
        for turn in range(play.turns + WARM_UP_TURNS):
            spec = GenerateSpec(
                request=f"c{index}/{turn}",
                attempt=1,
                prompt=[draw.randrange(self.vocabulary) for _ in range(play.prompt)],
                prefix=[],
                max_new_tokens=self.job.pipeline.max_new_tokens,
                temperature=1.0,
                seed=index * 1000 + turn,
                stop_ids=[],
            )
            began = time.monotonic()
            await self._turn(spec)
            if turn >= WARM_UP_TURNS:
                self.spans.append((began, time.monotonic()))
            await asyncio.sleep(play.env_s(index, turn))

    async def _turn(self, spec: GenerateSpec) -> None:
        decode = self.decode.take()
        engine = self.decode.engines[decode]
        if not self.prefill.engines:
            await _run(engine, spec)
        else:
            prefill = self.prefill.take()
            host, _, port = self.prefill.engines[prefill].endpoint.rpartition(":")
            spec = msgspec.structs.replace(
                spec, bootstrap_host=host, bootstrap_port=int(port), bootstrap_room=next(self.rooms)
            )
            first = asyncio.create_task(self._prefilled(prefill, spec))
            await _run(engine, spec)
            await first
        self.decode.load[decode] -= 1

    async def _prefilled(self, index: int, spec: GenerateSpec) -> None:
        await _run(self.prefill.engines[index], spec)
        self.prefill.load[index] -= 1


async def _run(engine: Engine, spec: GenerateSpec) -> None:
    async for chunk in engine.generate(spec):
        assert chunk.finish in ("", "length", "handed_over"), f"{chunk.finish}: {chunk.reason}"


async def measure(job: JobFile, play: Play) -> dict[str, Any]:
    """Seconds a turn, beside the models', which leave environments out. Any: a JSON object."""
    prefill, decode, colocated = play.prefill, play.decode, play.colocated
    model = str(await asyncio.to_thread(initial_model, job))
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode + [Role.COLOCATED] * colocated
    engines = [make_engine(job.rollout, job.model.device) for _ in roles]
    for engine, role in zip(engines, roles, strict=True):
        await engine.start()
        await engine.load_snapshot(model, PolicyVersion(0))
        await engine.set_role(role)
    clients = job.pipeline.batch_trajectories
    bench = _Bench(job, engines[:prefill], engines[prefill:], ModelConfig.load(model).vocab_size)
    try:
        await asyncio.gather(*(bench.client(index, play) for index in range(clients)))
    finally:
        for engine in engines:
            await engine.stop()
    took_s = sum(end - begin for begin, end in bench.spans) / len(bench.spans)
    profile = _profile(job, play.prompt, clients)
    predicted_s = (
        colocated_makespan_s(profile, colocated) if colocated else disaggregated_makespan_s(profile, prefill, decode)
    )
    return {
        "prefill": prefill,
        "decode": decode,
        "colocated": colocated,
        "clients": clients,
        "turn_s": round(took_s, 4),
        "predicted_s": round(predicted_s, 4),
        "ratio": round(took_s / predicted_s, 4),
        "tokens_per_s": round(clients * job.pipeline.max_new_tokens / took_s, 1),
    }


def _profile(job: JobFile, prompt: int, clients: int) -> WorkloadProfile:
    """One turn of every client: S = 1, no environment; the first token comes from the prefill."""
    return msgspec.structs.replace(
        built_in(job),
        B=clients,
        S=1.0,
        r=float(job.pipeline.max_new_tokens - 1),
        dL=float(prompt),
        theta=0.0,
        A_s=job.rollout.pace_decode_ms / 1e3,
        b_s=job.rollout.pace_decode_ms_per_sequence / 1e3,
        t_prefill_s=job.rollout.pace_prefill_us_per_token / 1e6,
        T_over_s=0.0,
        T_env_s=0.0,
    )
