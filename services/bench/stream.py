"""`pearl bench stream`: what a streamed token costs on its way through worker, server and edge.

The same engine makes the same replies twice: read directly, and through an edge over the bus. The difference of the CPU
times (of this process and the server) and of a lone reply's time is what the way adds; the direct run is the reference.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from messages.ids import PolicyVersion, RequestId, TrajectoryId
from services.bench.cell import Cell, cell, cpu_s, job_in
from services.bench.figures import Figure, figure, percentile
from services.edge.request import Interruption, RequestSpec
from services.models.config import ModelConfig
from services.rollout_worker.engines.base import Engine, GenerateSpec

PROMPT = 16
CONCURRENT = 16

Ask = Callable[[str], Awaitable[int]]
"""Makes a reply by this name; returns its tokens."""


async def measure(folder: Path, *, tokens: int = 128, rounds: int = 6, alone: int = 16) -> list[Figure]:
    """CPU and latency a token: of `CONCURRENT` replies at once, and of one alone."""
    job, _ = job_in(folder, 1)
    async with cell(job) as found:
        vocabulary = ModelConfig.load(str(job.run_dir / "models" / "initial")).vocab_size
        direct, through = askers(found, tokens, vocabulary)
        for ask in (direct, through):
            await many(ask, "warm", 1)
        # In turn, so that a busy machine disturbs both alike.
        cpu = [[await _cpu_us(found, ask, f"cpu{round_}-") for ask in (direct, through)] for round_ in range(rounds)]
        took = [[await _alone_s(ask, f"alone{round_}") for ask in (direct, through)] for round_ in range(alone)]
    direct_cpu, through_cpu = (percentile([each[way] for each in cpu], 0.5) for way in (0, 1))
    direct_s, through_s = (percentile([each[way] for each in took], 0.5) for way in (0, 1))
    return [
        figure(
            "stream", f"CPU a token added, {CONCURRENT} at once", through_cpu - direct_cpu, "us", direct_cpu, "engine"
        ),
        figure(
            "stream",
            "reply alone, added a token",
            (through_s - direct_s) / tokens * 1e6,
            "us",
            direct_s / tokens * 1e6,
            "engine",
        ),
        figure("stream", f"reply of {tokens} tokens alone", through_s * 1e3, "ms", direct_s * 1e3, "engine"),
    ]


def askers(found: Cell, tokens: int, vocabulary: int) -> tuple[Ask, Ask]:
    """Reading the engine directly, and through the edge."""

    async def direct(name: str) -> int:
        return await read_engine(found.engine, f"d{name}", tokens, vocabulary)

    async def through(name: str) -> int:
        name = f"t{name}"
        spec = RequestSpec(
            request=RequestId(name),
            session=TrajectoryId(name.partition("/")[0]),
            min_version=PolicyVersion(0),
            prompt=prompt_of(name, vocabulary),
            max_new_tokens=tokens,
            temperature=1.0,
            seed=len(name),
            stop_ids=[],
        )
        return len((await found.edge.generate(spec, _not_interrupted)).tokens)

    return direct, through


async def read_engine(engine: Engine, name: str, tokens: int, vocabulary: int) -> int:
    """One reply, straight from the engine."""
    spec = GenerateSpec(
        request=name,
        attempt=1,
        prompt=prompt_of(name, vocabulary),
        prefix=[],
        max_new_tokens=tokens,
        temperature=1.0,
        seed=len(name),
        stop_ids=[],
    )
    count = 0
    async for chunk in engine.generate(spec):
        assert chunk.finish in ("", "length"), chunk.reason
        count += len(chunk.tokens)
    assert count == tokens
    return count


def prompt_of(name: str, vocabulary: int) -> list[int]:
    """Made-up ids that follow from the name, so that no prompt is another's."""
    draw = random.Random(name)
    return [draw.randrange(vocabulary) for _ in range(PROMPT)]


async def _not_interrupted(interruption: Interruption) -> None:
    raise AssertionError(f"interrupted: {interruption}")


async def many(ask: Ask, name: str, rounds: int, concurrent: int = CONCURRENT) -> int:
    """So many replies at once, again and again; returns the tokens."""
    count = 0
    for round_ in range(rounds):
        count += sum(await asyncio.gather(*(ask(f"{name}{index}/{round_}") for index in range(concurrent))))
    return count


async def _cpu_us(found: Cell, ask: Ask, name: str) -> float:
    before = cpu_s(found.server)
    count = await many(ask, name, 1)
    return (cpu_s(found.server) - before) / count * 1e6


async def _alone_s(ask: Ask, name: str) -> float:
    begun = time.perf_counter()
    await ask(f"{name}/0")
    return time.perf_counter() - begun
