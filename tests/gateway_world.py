"""A gateway on the in-memory bus, before a scripted cluster, and HTTP clients of it."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from messages.agent import RolloutTask
from messages.envelope import decode, encode
from messages.rollout_worker import Generate
from messages.subjects import message_id, stream_of, subject_of
from services.environments.byte_tokenizer import ByteTokenizer
from services.jobfile import EnvironmentSection, GatewaySection, JobFile, PipelineSection
from services.router.gateway.config import Config, digest_of
from services.router.gateway.service import Gateway
from services.router.gateway.vocabulary import Vocabulary
from services.runtime.bus_memory import MemoryBroker
from services.runtime.clock import ManualClock
from tests import scripted_cluster
from tests.scripted_cluster import Answer, Cluster, Records, Table, create_streams

KEY = "sk-test"
MODEL = "tiny"
VERSION = 3
TOKENIZER = ByteTokenizer()


def job_of(**gateway: Any) -> JobFile:
    return JobFile(
        environment=EnvironmentSection(tokenizer="services.environments.byte_tokenizer:ByteTokenizer"),
        pipeline=PipelineSection(
            batch_trajectories=1, group_size=1, max_turns=8, max_new_tokens=128, max_context_tokens=2000
        ),
        gateway=GatewaySection(bind="127.0.0.1:0", **gateway),
    )


def said(text: str, *, ended: bool = True) -> list[int]:
    """A reply of this text."""
    return TOKENIZER.encode(text) + ([TOKENIZER.eos_id] if ended else [])


def hello(message: Generate) -> list[int]:
    return said("Hello, world!")


def task_of(trajectory: str = "b3-g0-m0", **changes: Any) -> RolloutTask:
    """A task of the batch after the version that serves here."""
    return scripted_cluster.task_of(trajectory, **{"group": "b3-g0", "batch": 3, "min_version": 2, **changes})


class World(Records):
    """Gateway, worker and client. `async with`; `post` and `get` speak JSON."""

    def __init__(
        self, answer: Answer = hello, *, keys: tuple[str, ...] = (KEY,), job: JobFile | None = None, **config: Any
    ):
        self.job = job or job_of()
        self.config = msgspec.structs.replace(
            Config.of(self.job), keys=frozenset(map(digest_of, keys)), model=MODEL, **{"silence_ms": 60_000, **config}
        )
        self.clock = ManualClock()
        self.broker = MemoryBroker(self.clock)
        self.bus = self.broker.connect()
        self.cluster = Cluster(self.broker.connect(), answer)
        self.cluster.version = VERSION
        self.table = Table()
        self.table.write(VERSION)
        self.gateway = Gateway(
            self.config,
            self.broker.connect(),
            self.table,
            Vocabulary.load(self.job),
            ask_router=self.cluster.assign,
            tell_router=self.cluster.ended.append,
            clock=self.clock,
        )

    async def __aenter__(self) -> World:
        await create_streams(self.bus)
        await self.cluster.start()
        await self.gateway.start()
        self.http = aiohttp.ClientSession(self.gateway.url, headers={"Authorization": f"Bearer {KEY}"})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        await self.gateway.stop()
        await self.cluster.stop()

    async def post(self, path: str, body: Any, *, status: int = 200, **headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.http.post(path, data=data, headers={"Content-Type": "application/json", **named}) as response:
            text = await response.read()
            assert response.status == status, text
            return msgspec.json.decode(text)

    async def get(self, path: str, *, status: int = 200) -> Any:
        async with self.http.get(path) as response:
            text = await response.read()
            assert response.status == status, text
            return msgspec.json.decode(text)

    async def events(self, path: str, body: Any, **headers: str) -> list[Any]:
        """A stream to its end; what is before `[DONE]`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(path, json={**body, "stream": True}, headers=named) as response:
            text = await response.read()
            assert response.status == 200, text
            assert response.content_type == "text/event-stream"
        events = text.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [msgspec.json.decode(each.removeprefix("data: ")) for each in events[:-2]]

    async def give(self, task: RolloutTask) -> None:
        """Put a task in the queue."""
        await self.bus.publish_durable(subject_of("demo", task), encode(task), msg_id=message_id(task) or "")

    async def left(self) -> list[str]:
        """The trajectories of tasks that nobody has acknowledged."""
        queue = self.bus.read(stream_of("demo", RolloutTask) or "", "pearl.demo.task.*")
        return [decode(delivery.data, RolloutTask).trajectory async for delivery in queue]


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """A chat of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"model": MODEL, "messages": messages, **more}
