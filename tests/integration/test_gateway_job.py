"""A whole job whose only agent is a harness over HTTP: it trains, also when the gateway and a worker are killed."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import openai

from examples.http_harness.harness import keep_playing
from tests.integration.running_job import assert_zeros, running_job

CLIENTS = 12


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_harness_over_http_trains_the_policy(tmp_path: Path) -> None:
    port = free_port()
    more = f'processes = 0\n[gateway]\nbind = "127.0.0.1:{port}"\nsession_idle_ms = 20000\n'
    async with running_job(tmp_path, steps=6, more=more) as run:
        gateway = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        ended: list[float] = []
        playing = [asyncio.create_task(keep_playing(gateway, ended)) for _ in range(CLIENTS)]
        try:
            await run.until(lambda: len(run.board.steps) >= 1, "the first train step")
            await run.kill("reserved-w0")
            await run.until(lambda: len(run.board.steps) >= 2, "the second train step")
            await run.kill("router")
            report = await run.finished()
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
    assert_zeros(report, run.job)
    # A client whose gateway died between the trajectory's end and the answer does not know that it ended.
    assert len(ended) + CLIENTS >= report.completed > 0
    assert report.delivered > 0
