"""A gateway on the in-memory bus, with workers that say what a test wants them to, and HTTP clients of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from messages.agent import Assignment, AttemptLogged, NotNow, RequestInterrupted, RolloutTask, TokenChunk, TurnFinished
from messages.envelope import decode, encode
from messages.ids import Activity, Role, Zone
from messages.pipeline_scheduler import TrajectoryCompleted
from messages.rollout_worker import CancelRequest, Generate
from messages.router import AssignRequest
from messages.subjects import message_id, subject_of
from pearl_state.model import RoleTable, Row
from services.checker.core import Expected, Journalled, check
from services.environments.byte_tokenizer import ByteTokenizer
from services.jobfile import EnvironmentSection, GatewaySection, JobFile, PipelineSection
from services.router.gateway.config import Config, digest_of
from services.router.gateway.service import Gateway
from services.router.gateway.vocabulary import Vocabulary
from services.runtime.bus_memory import MemoryBroker
from services.runtime.clock import ManualClock
from tests.unit.test_episode import create_streams

KEY = "sk-test"
MODEL = "tiny"
TOKENIZER = ByteTokenizer()

Answer = Callable[[Generate], list[int]]


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


class Table:
    """A replica that a test writes."""

    def __init__(self, version: int = 3) -> None:
        self.callbacks: list[Callable[[RoleTable], None]] = []
        self.table: RoleTable | None = None
        self.write(version)

    def write(self, version: int, *, serving: bool = True, published: int | None = None) -> None:
        row = Row(
            worker="a-w0",
            gpus=(),
            zone=Zone.RESERVED,
            role=Role.COLOCATED,
            activity=Activity.ACTIVE if serving else Activity.INACTIVE,
            incarnation=1,
            role_generation=1,
            version=version,
        )
        epoch = self.table.epoch + 1 if self.table is not None else 1
        self.table = RoleTable(
            job="demo", epoch=epoch, rows=(row,), policy_version=version if published is None else published
        )
        for callback in self.callbacks:
            callback(self.table)

    def on_change(self, callback: Callable[[RoleTable], None]) -> None:
        self.callbacks.append(callback)


class Fleet:
    """One worker, `a-w0`. `script` says what becomes of the next attempts; an empty one serves them whole.

    "cut:n" interrupts after n tokens, "die:n" falls silent after n, "refuse", "lose" drops the request, "hold:n" waits for
    `release` after n.
    """

    def __init__(self, broker: MemoryBroker, answer: Answer = hello) -> None:
        self.bus = broker.connect()
        self.answer = answer
        self.script: deque[str] = deque()
        self.log: list[AttemptLogged] = []
        self.generates: list[Generate] = []
        self.cancels: list[CancelRequest] = []
        self.release = asyncio.Event()
        self.reached = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.version = 3
        self.not_now: NotNow | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def assign(self, ask: AssignRequest) -> Assignment | NotNow:
        if self.not_now is not None:
            return msgspec.structs.replace(self.not_now, request=ask.request, attempt=ask.attempt)
        return Assignment(request=ask.request, attempt=ask.attempt, worker="a-w0", incarnation=1, role_generation=1)

    async def start(self) -> None:
        subscription = await self.bus.subscribe("pearl.demo.gen.*")
        self._tasks.add(asyncio.create_task(self._work(subscription)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, subscription: Any) -> None:
        async for delivery in subscription:
            message = decode(delivery.data, Generate, CancelRequest)
            if isinstance(message, CancelRequest):
                self.cancels.append(message)
                self.cancelled.set()
                continue
            self.generates.append(message)
            what = self.script.popleft() if self.script else "whole"
            self._tasks.add(asyncio.create_task(self._attempt(message, what)))

    async def _attempt(self, message: Generate, what: str) -> None:
        what, _, count = what.partition(":")
        begin = len(message.prefix)
        whole = self.answer(msgspec.structs.replace(message, prefix=[]))[: message.max_new_tokens]
        assert message.prefix == whole[:begin], "no token is made up, none is asked for again"
        if what == "lose":
            return
        if what == "refuse":
            return await self._say(message, begin, [], "refused")
        self._note(message, 0, "")
        tokens = whole[begin:] if what == "whole" else whole[begin : begin + int(count)]
        stopped = whole and whole[-1] in message.stop_ids
        finish = {"whole": "stop" if stopped else "length", "cut": "interrupted", "die": "", "hold": ""}[what]
        for index in range(0, len(tokens), 3):
            last = index + 3 >= len(tokens)
            await self._say(message, begin + index, tokens[index : index + 3], finish if last else "")
        if not tokens and finish:
            await self._say(message, begin, [], finish)
        if what == "hold":
            self.reached.set()
            await self.release.wait()
            at = begin + len(tokens)
            await self._say(message, at, whole[at:], "stop" if stopped else "length")
        if what != "die":
            self._note(message, len(tokens), finish or "stop")

    def _note(self, message: Generate, generated: int, finish: str) -> None:
        self.log.append(
            AttemptLogged(
                worker=message.worker,
                incarnation=message.incarnation,
                request=message.request,
                attempt=message.attempt,
                start_offset=len(message.prefix),
                generated=generated,
                version=self.version,
                finish=finish,
                at_ms=0,
            )
        )

    async def _say(self, message: Generate, offset: int, tokens: list[int], finish: str) -> None:
        piece = TokenChunk(
            request=message.request,
            attempt=message.attempt,
            worker=message.worker,
            incarnation=message.incarnation,
            offset=offset,
            tokens=tokens,
            logprobs=[-0.25 * (1 + (offset + index) % 4) for index in range(len(tokens))],
            version=self.version,
            finish=finish,
        )
        await self.bus.publish(message.reply, encode(piece))


def task_of(trajectory: str = "b3-g0-m0", **changes: Any) -> RolloutTask:
    task = RolloutTask(
        trajectory=trajectory,
        group="b3-g0",
        batch=3,
        retry=0,
        task_seed=4,
        sample_seed=9,
        min_version=2,
        temperature=1.0,
    )
    return msgspec.structs.replace(task, **changes)


class World:
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
        self.fleet = Fleet(self.broker, answer)
        self.table = Table()
        self.gateway = Gateway(
            self.config,
            self.broker.connect(),
            self.table,
            Vocabulary.load(self.job),
            ask_router=self.fleet.assign,
            clock=self.clock,
        )

    async def __aenter__(self) -> World:
        await create_streams(self.bus)
        await self.fleet.start()
        await self.gateway.start()
        self.http = aiohttp.ClientSession(self.gateway.url, headers={"Authorization": f"Bearer {KEY}"})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        await self.gateway.stop()
        await self.fleet.stop()

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

    async def journal(self) -> list[Journalled]:
        return [
            Journalled(d.seq, decode(d.data, TurnFinished, RequestInterrupted))
            async for d in self.bus.read("demo_JOURNAL", "pearl.demo.journal.*")
        ]

    async def turns(self) -> list[TurnFinished]:
        return [entry.record for entry in await self.journal() if isinstance(entry.record, TurnFinished)]

    async def ends(self) -> list[TrajectoryCompleted]:
        subject = "pearl.demo.ev.trajectory_completed.*"
        return [decode(d.data, TrajectoryCompleted) async for d in self.bus.read("demo_EV", subject)]

    async def report(self):
        """What the checker says of all that was recorded."""
        return check(
            Expected(batch_trajectories=1, group_size=1, staleness=1),
            journal=await self.journal(),
            attempts=self.fleet.log,
            ends=await self.ends(),
            batches=(),
            steps=(),
        )


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """A chat of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"model": MODEL, "messages": messages, **more}
