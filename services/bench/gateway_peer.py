"""The engine's side of `pearl bench gateway`, a process of its own: one emulated engine, reached in two ways.

As a rollout worker on the bus, which the gateway's requests come to; and by SGLang's `/generate` over HTTP, which is what
sglang-router, and a client without anything between, talk to. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, Final

import msgspec
import uvloop
from aiohttp import web

from messages.ids import Incarnation, PolicyVersion, Role
from services import jobfile
from services.bench.cell import WORKER
from services.connect import connect
from services.rollout_worker.config import Config
from services.rollout_worker.engines.base import GenerateSpec
from services.rollout_worker.engines.emulated import EmulatedEngine, ScaledClock
from services.rollout_worker.service import RolloutWorker
from services.timing import hardware

FLUSH_S: Final = 0.0005
"""Less than an iteration takes: each token is a chunk of its own, the most a streamed reply can cost."""


class _Params(msgspec.Struct):
    max_new_tokens: int = 16
    temperature: float = 1.0


class _Generate(msgspec.Struct):
    input_ids: list[int]
    sampling_params: _Params
    stream: bool = False


class SGLangLike:
    """What a router needs of an SGLang server."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self._engine = engine
        self._requests = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every path."""
        if request.path != "/generate":
            return self._answer({"model_path": "bench", "weight_version": "0", "is_generation": True, "status": "ok"})
        body = msgspec.json.decode(await request.read(), type=_Generate)
        self._requests += 1
        spec = GenerateSpec(
            request=f"direct-{self._requests}",
            attempt=1,
            prompt=body.input_ids,
            prefix=[],
            max_new_tokens=body.sampling_params.max_new_tokens,
            temperature=body.sampling_params.temperature,
            seed=self._requests,
            stop_ids=[],
        )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"}) if body.stream else None
        if response is not None:
            await response.prepare(request)
        tokens: list[int] = []
        async for chunk in self._engine.generate(spec):
            tokens += chunk.tokens
            if response is not None and chunk.tokens:
                await response.write(b"data: " + msgspec.json.encode(_result(tokens, chunk.finish)) + b"\n\n")
        if response is None:
            return self._answer(_result(tokens, "length"))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    @staticmethod
    def _answer(body: dict[str, Any]) -> web.Response:
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _result(tokens: list[int], finish: str) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": finish} if finish else None,
        "completion_tokens": len(tokens),
        "weight_version": "0",
    }
    return {"text": bytes(tokens).decode("latin-1"), "output_ids": tokens, "meta_info": meta}


async def serve(path: str) -> None:
    """Until the end of standard input. Prints the port of the HTTP side when the engine runs."""
    job = jobfile.load(path)
    described = hardware.load(job.emulation.hardware)
    engine = EmulatedEngine(
        described,
        job.rollout,
        ScaledClock(job.emulation.time_scale),
        prepared_s=described.prepare_s.value,
        flush_s=FLUSH_S,
    )
    bus = await connect(job, "rollout_worker")
    stop = asyncio.Event()
    worker = RolloutWorker(Config.of(job, "n"), bus, engine, WORKER, Incarnation(1), began=time.monotonic())
    running = asyncio.create_task(worker.run(stop))
    while (
        worker.state.version < PolicyVersion(0) or not worker.state.serving or worker.state.role is not Role.COLOCATED
    ):
        await asyncio.sleep(0.02)
        if running.done():
            running.result()
    server = web.ServerRunner(web.Server(SGLangLike(engine).handle, access_log=None))
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    print(server.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    await running
    await server.cleanup()
    await bus.close()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
