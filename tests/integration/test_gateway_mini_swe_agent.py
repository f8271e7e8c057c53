"""mini-swe-agent's own command, unchanged, against the gateway, while its workers are killed, drained and given other roles.

Workers are real processes, prefill and decode; their engine is emulated, with replies that repair the built-in tasks, so that the
agent issues real commands. The agent does not stream; the same conversations are held streaming by the `openai` client. Some reply of
both is in the middle when a decode worker is killed, and when the other is drained.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from pearl_state.model import Move
from services import jobfile
from services.harness.bug_fixer import TURNS
from services.harness.sandbox import Folders, Limits
from services.harness.tasks import BUILT_IN, Task, grade, load_tasks, prepare
from tests.integration.test_gateway_clients import KEY, Served, on, prefilled_on
from tests.integration.test_pd_workers import JOB, until

EMULATED = (
    JOB.replace("[rollout]", '[rollout]\nengine = "emulated"\nkv_cache_tokens = 400000').replace(
        "prefill_chunk_tokens = 16", "prefill_chunk_tokens = 4096"
    )
    + """
[emulation]
time_scale = 8.0
replies = "services.harness.bug_fixer:BugFixer"
[pipeline]
max_context_tokens = 50000
[environment]
tokenizer = "services.environments.byte_tokenizer:ByteTokenizer"
[gateway]
bind = "127.0.0.1:0"
api_keys_file = "{folder}/keys"
model = "pearl-test"
"""
)
LONG = 150
"""Tokens of a reply by which it is certainly not over: the shortest, which ends the task, has fewer."""


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    path = tmp_path / "job.toml"
    path.write_text(EMULATED.format(folder=tmp_path))
    made = Served(jobfile.load(path), path)
    async with AsyncExitStack() as stack:
        await made.start(stack)
        yield made


class Run:
    """`mini` on one task, in a working copy of its own."""

    def __init__(self, task: Task, folder: Path, url: str) -> None:
        self.task = task
        self.folders = Folders(folder / task.name)
        prepare(task, self.folders, 1 << 20)
        self.url = url
        self.trajectory = self.folders.root / "trajectory.json"

    async def play(self) -> None:
        given = [
            "-t",
            self.task.statement,
            "-m",
            "openai/pearl-test",
            "-o",
            str(self.trajectory),
            "-y",
            "--exit-immediately",
        ]
        more = ["-c", "mini.yaml", "-c", "model.model_kwargs.temperature=0"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "minisweagent.run.mini", *given, *more),
            cwd=self.folders.work,
            env={
                **{
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "HOME": str(self.folders.root / "home"),
                },
                **{"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
                **{"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
                "MSWEA_GLOBAL_CONFIG_DIR": str(self.folders.root / "home"),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-3000:]

    def said(self) -> list[tuple[str, list[str]]]:
        """What the model answered, turn by turn: text and commands."""
        found = json.loads(self.trajectory.read_text())
        assert found["info"]["exit_status"] == "Submitted"
        return [
            (
                message.get("content") or "",
                [json.loads(call["function"]["arguments"])["command"] for call in message["tool_calls"]],
            )
            for message in found["messages"]
            if message["role"] == "assistant"
        ]

    def asked(self) -> list[dict[str, Any]]:
        """The conversation as it was before the second reply, for whoever asks it again."""
        kept = ("role", "content", "tool_calls", "tool_call_id")
        messages = [
            {key: value for key, value in message.items() if key in kept and value is not None}
            for message in json.loads(self.trajectory.read_text())["messages"]
        ]
        second = [index for index, message in enumerate(messages) if message["role"] == "assistant"][1]
        return messages[:second]

    async def solved(self) -> bool:
        limits = Limits(seconds=60, output_bytes=10_000)
        return (await grade(self.task, self.folders, limits, 1 << 20, "test")).passed


async def streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> tuple[str, list[str]]:
    """The same as a stream: text and commands."""
    tool: Any = {"type": "function", "function": {"name": "bash", "description": "Execute a bash command"}}
    stream = await client.chat.completions.create(
        model="pearl-test", messages=messages, tools=[tool], temperature=0, stream=True
    )
    text, arguments = "", {}
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    return text.strip(), [json.loads(arguments[index])["command"] for index in sorted(arguments)]


async def test_mini_swe_agent_notices_nothing(served: Served, tmp_path: Path) -> None:
    """Issue 7: answers equal those of an undisturbed run, and so does the work that they lead to."""
    url, tasks = served.gateway.url, load_tasks(BUILT_IN)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    calm = [Run(task, tmp_path / "calm", url) for task in tasks]
    await asyncio.gather(*(run.play() for run in calm))
    assert served.gateway.metrics.interruptions == 0
    undisturbed = [run.said() for run in calm]
    assert [len(said) for said in undisturbed] == [TURNS] * len(tasks)
    assert [await run.solved() for run in calm] == [True] * len(tasks)
    assert await streamed(client, calm[0].asked()) == undisturbed[0][1]

    states = served.states
    runs: list[Run] = []
    enough = asyncio.Event()

    async def play_again(task: Task) -> None:
        """As long as there is something to come: on a slow machine the agents would be done before it."""
        while not enough.is_set():
            runs.append(Run(task, tmp_path / f"disturbed-{len(runs)}", url))
            await runs[-1].play()

    playing = [asyncio.create_task(play_again(task)) for task in tasks]

    async def ask_streaming(run: Run, second: tuple[str, list[str]]) -> None:
        while not enough.is_set():
            assert await streamed(client, run.asked()) == second

    streams = [asyncio.create_task(ask_streaming(run, said[1])) for run, said in zip(calm, undisturbed, strict=True)]

    def midway(worker: str) -> set[bool]:
        """Of the replies that this worker is in the middle of, whether they are streamed: what is sent whole may be held back."""
        running = [each.state for each in states.values() if on(each, worker)]
        return {state.spec.hold_ms == 0 for state in running if 0 < len(state.tokens) < LONG}

    await until(lambda: any(prefilled_on(each, "n1-w0") and each.state.spec.hold_ms for each in states.values()))
    await served.kill("n1-w0")  # prefill
    await served.move(["n1-w0"], Move.LOSE)
    await until(lambda: len(midway("n1-w2")) == 2)
    await served.kill("n1-w2")  # decode
    await served.move(["n1-w2"], Move.LOSE)
    await until(lambda: len(midway("n1-w3")) == 2)
    await served.drain_to_colocated("n1-w1", "n1-w3")

    enough.set()
    await asyncio.gather(*streams)
    await asyncio.gather(*playing)
    said_calmly = {run.task.name: run.said() for run in calm}
    for run in runs:
        assert run.said() == said_calmly[run.task.name]
        assert await run.solved()
    hit = {(record.worker, record.cause == "interrupted") for record in await served.assert_nothing_regenerated()}
    assert hit >= {("n1-w2", False), ("n1-w3", True)}
