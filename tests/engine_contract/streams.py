"""What contract tests do with any engine's streams."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec

from services.rollout_worker.engines.base import GenerateSpec, Tokens

PROMPT = [(7 * index) % 40 for index in range(45)]
ROOM = itertools.count(1)
DEFAULTS: dict[str, Any] = {"temperature": 1.0}
"""Of a request where a test says nothing; an engine without seeded sampling is greedy."""


def spec(request: str = "r", **changes: Any) -> GenerateSpec:
    """A request of 40 tokens after a prompt of 45."""
    base = GenerateSpec(
        request=request, attempt=1, prompt=PROMPT, prefix=[], max_new_tokens=40, temperature=1.0, seed=5, stop_ids=[]
    )
    return msgspec.structs.replace(base, **{**DEFAULTS, **changes})


async def run(engine: Any, wanted: GenerateSpec) -> list[Tokens]:
    return [chunk async for chunk in engine.generate(wanted)]


async def first_chunk(stream: Any) -> Tokens:
    return await anext(aiter(stream))


def joined(chunks: list[Tokens]) -> list[int]:
    """All tokens, after checking that they are contiguous and that the last chunk alone ends them."""
    offset = chunks[0].offset
    for chunk in chunks:
        assert chunk.offset == offset and len(chunk.tokens) == len(chunk.logprobs)
        assert all(logprob <= 0 for logprob in chunk.logprobs)
        offset += len(chunk.tokens)
    assert [bool(chunk.finish) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return [token for chunk in chunks for token in chunk.tokens]


def paired(prefill: Any, wanted: GenerateSpec) -> GenerateSpec:
    """The same request with a room on this prefill engine."""
    host, _, port = prefill.endpoint.rpartition(":")
    return msgspec.structs.replace(wanted, bootstrap_host=host, bootstrap_port=int(port), bootstrap_room=next(ROOM))


def both(
    prefill: Any, decode: Any, wanted: GenerateSpec
) -> tuple[asyncio.Task[list[Tokens]], asyncio.Task[list[Tokens]]]:
    """Start it on both sides: (prefill's chunks, decode's chunks)."""
    asked = paired(prefill, wanted)
    return asyncio.create_task(run(prefill, asked)), asyncio.create_task(run(decode, asked))


async def until_idle(kit: Any, *engines: Any) -> None:
    """Everything that ended is freed, soon."""
    async with asyncio.timeout(6):
        while not all(kit.idle(engine) for engine in engines):
            await asyncio.sleep(0.005)
            for engine in engines:
                await engine.abort()
