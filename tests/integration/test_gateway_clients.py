"""Official clients against the gateway, unchanged, while its workers are killed, drained and given other roles."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from messages.agent import RequestInterrupted
from messages.envelope import decode
from messages.ids import Incarnation, Role, RoleGeneration, WorkerId
from messages.orchestrator import WorkerDrained
from messages.rollout_worker import Drain
from pearl_state.model import Move
from pearl_state.watch import Replica
from services import jobfile
from services.checker.core import check
from services.checker.core_report import Expected, Journalled
from services.connect import connect
from services.environments.byte_tokenizer import ByteTokenizer
from services.router.gateway.service import Gateway, serving
from tests.integration.test_pd_workers import JOB, Cluster, until

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be fetched at import otherwise

KEY = "sk-integration"
PROMPTS = [f"Tell me of pearl number {index}, slowly." for index in range(12)]
TOKENS = 40


class Served(Cluster):
    """The same with a gateway beside the router."""

    vocabulary = ByteTokenizer.vocab_size
    gateway: Gateway

    async def start(self, stack: AsyncExitStack) -> None:
        await super().start(stack)
        bus = await connect(self.job, "gateway")
        stack.push_async_callback(bus.close)
        replica = Replica()
        await replica.start(bus, self.job.job.name)
        stack.push_async_callback(replica.stop)
        self.gateway = await stack.enter_async_context(serving(self.job, 0, replica, self.router.place))

    @property
    def states(self) -> dict[str, Any]:
        return self.gateway.edge._running

    async def drain_to_colocated(self, *left: str) -> None:
        """Interrupt what these workers run; afterwards they serve in both roles."""
        await self.move(left, Move.SWITCH)
        for slot in left:
            await self.say(Drain(worker=WorkerId(slot), incarnation=Incarnation(1), role_generation=RoleGeneration(2)))
        await self.facts(WorkerDrained, 2)
        await self.set_roles(dict.fromkeys(left, Role.COLOCATED), 3)
        await self.move(left, Move.ADMIT, role=Role.COLOCATED, generation=RoleGeneration(3))

    async def assert_nothing_regenerated(self) -> list[RequestInterrupted]:
        """By the journal and the workers' own logs; the interruptions that were journalled."""
        records = [
            Journalled(d.seq, decode(d.data, RequestInterrupted))
            async for d in self.eyes.read("pd_JOURNAL", "pearl.pd.journal.*")
        ]
        report = check(
            Expected(batch_trajectories=1, group_size=1, staleness=1),
            journal=records,
            attempts=self.logged(),
            ends=(),
            batches=(),
            steps=(),
        )
        assert report.interrupted == self.gateway.metrics.interruptions and report.regenerated == 0
        assert report.ok, report.violations
        return [decode(d.data, RequestInterrupted) async for d in self.eyes.read("pd_JOURNAL", "pearl.pd.journal.*")]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    keys = tmp_path / "keys"
    keys.write_text(f"# for the test\n{KEY}\n")
    path = tmp_path / "job.toml"
    path.write_text(
        JOB.format(folder=tmp_path)
        + f"""
[environment]
tokenizer = "services.environments.byte_tokenizer:ByteTokenizer"
[gateway]
bind = "127.0.0.1:0"
api_keys_file = "{keys}"
model = "pearl-test"
"""
    )
    made = Served(jobfile.load(path), path)
    async with AsyncExitStack() as stack:
        await made.start(stack)
        yield made


Ask = Callable[[str], Awaitable[str]]


def askers(url: str) -> dict[str, Ask]:
    """Ways to ask for a chat: two clients, whole and streamed."""
    import litellm

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    common: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}

    def said(prompt: str) -> list[Any]:
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]

    async def whole(prompt: str) -> str:
        done = await client.chat.completions.create(model="pearl-test", messages=said(prompt), logprobs=True, **common)
        assert done.usage is not None and done.usage.completion_tokens > 0
        assert done.choices[0].logprobs is not None
        assert len(done.choices[0].logprobs.content or ()) == done.usage.completion_tokens
        return done.choices[0].message.content or ""

    async def streamed(prompt: str) -> str:
        stream = await client.chat.completions.create(
            model="pearl-test", messages=said(prompt), stream=True, stream_options={"include_usage": True}, **common
        )
        text, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert usage is not None and usage.completion_tokens > 0
        return text

    more = {"model": "openai/pearl-test", "api_base": f"{url}/v1", "api_key": KEY, "num_retries": 0}

    async def lite(prompt: str) -> str:
        done: Any = await litellm.acompletion(messages=said(prompt), **more, **common)
        return done.choices[0].message.content or ""

    async def lite_streamed(prompt: str) -> str:
        stream: Any = await litellm.acompletion(messages=said(prompt), stream=True, **more, **common)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    return {"openai": whole, "openai stream": streamed, "litellm": lite, "litellm stream": lite_streamed}


@pytest.mark.parametrize("name", ["openai", "openai stream", "litellm", "litellm stream"])
async def test_kills_drains_and_changes_of_role_show_in_nothing(served: Served, name: str) -> None:
    """Issue 7: answers equal those of an undisturbed run (greedy). Requests of each client, streaming and not, lose their prefill
    worker, lose their decode worker, and are drained from one that changes role."""
    asks = askers(served.gateway.url)
    undisturbed = [await asks["openai"](prompt) for prompt in PROMPTS]
    assert await asks[name](PROMPTS[0]) == undisturbed[0]
    assert len(set(undisturbed)) > 2 and served.gateway.metrics.interruptions == 0

    states = served.states
    enough = asyncio.Event()

    async def keep_asking(prompt: str, expected: str) -> None:
        while not enough.is_set():
            assert await asks[name](prompt) == expected

    asking = [asyncio.create_task(keep_asking(*pair)) for pair in zip(PROMPTS, undisturbed, strict=True)]
    await until(lambda: any(not each.state.tokens and prefilled_on(each, "n1-w0") for each in states.values()))
    await served.kill("n1-w0")  # prefill
    await served.move(["n1-w0"], Move.LOSE)
    await until(lambda: any(midway(each) and on(each, "n1-w2") for each in states.values()))
    await served.kill("n1-w2")  # decode
    await served.move(["n1-w2"], Move.LOSE)
    await until(lambda: any(midway(each) and on(each, "n1-w3") for each in states.values()))
    await served.drain_to_colocated("n1-w1", "n1-w3")
    enough.set()
    await asyncio.gather(*asking)

    hit = {(record.worker, record.cause == "interrupted") for record in await served.assert_nothing_regenerated()}
    assert hit >= {("n1-w2", False), ("n1-w3", True)}, "a request in the middle lost its worker, and one was drained"


async def test_clients_understand_refusals_models_and_sessions(served: Served) -> None:
    url = served.gateway.url
    assert served.job.gateway_file().is_file()
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    hi: list[Any] = [{"role": "user", "content": "Hi"}]
    assert [model.id async for model in client.models.list()] == ["pearl-test"]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.chat.completions.create(model="gpt-4", messages=hi)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-wrong").chat.completions.create(model="pearl-test", messages=hi)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="pearl-test", messages=hi, top_p=0.5)
    assert caught.value.code == "unsupported_parameter" and caught.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="pearl-test", prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.ConflictError):
        await client.chat.completions.create(model="pearl-test", messages=hi, extra_headers={"X-Pearl-Version": "7"})
    several = await client.completions.create(model="pearl-test", prompt="Hi", n=3, seed=1, max_tokens=8, logprobs=0)
    again = await client.completions.create(model="pearl-test", prompt="Hi", n=3, seed=1, max_tokens=8)
    assert [choice.text for choice in several.choices] == [choice.text for choice in again.choices]
    assert len({choice.text for choice in several.choices}) > 1
    # A harness that knows a URL and a key.
    session: Any = await client.post("/sessions", body={"train": False}, cast_to=object)
    harness = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session["key"])
    messages = list(hi)
    for _ in range(3):
        done = await harness.chat.completions.create(model="pearl-test", messages=messages, max_tokens=12)
        messages += [done.choices[0].message, {"role": "user", "content": "More"}]
    exact: Any = await harness.get(f"/sessions/{session['id']}/trajectory", cast_to=object)
    assert len(exact["turns"]) == 3 and all(len(turn["logprobs"]) == len(turn["reply"]) for turn in exact["turns"])


def on(running: Any, worker: str) -> bool:
    return running.state.assignment is not None and running.state.assignment.worker == worker


def prefilled_on(running: Any, worker: str) -> bool:
    return running.state.assignment is not None and running.state.assignment.prefill_worker == worker


def midway(running: Any) -> bool:
    return 3 < len(running.state.tokens) < TOKENS - 10
