"""A router and a worker that do what a test tells them, a table that a test writes, and what came of it: for edges of all kinds."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from messages.agent import Assignment, AttemptLogged, NotNow, RequestInterrupted, RolloutTask, TokenChunk, TurnFinished
from messages.envelope import decode, encode
from messages.ids import Activity, Role, Zone
from messages.pipeline_scheduler import TrajectoryCompleted
from messages.rollout_worker import CancelRequest, Generate
from messages.router import AssignRequest
from pearl_state.model import RoleTable, Row
from services.checker.core import check
from services.checker.core_report import Expected, Journalled, Report
from services.runtime.bus import Bus, StreamSpec

Answer = Callable[[Generate], list[int]]
Answered = Assignment | NotNow


def task_of(trajectory: str = "b0-g0-m0", **changes: Any) -> RolloutTask:
    task = RolloutTask(
        trajectory=trajectory,
        group="b0-g0",
        batch=0,
        retry=0,
        task_seed=4,
        sample_seed=9,
        min_version=0,
        temperature=1.0,
    )
    return msgspec.structs.replace(task, **changes)


async def create_streams(bus: Bus) -> None:
    for name, subjects, retention in (
        ("demo_EV", "pearl.demo.ev.>", "limits"),
        ("demo_TASKS", "pearl.demo.task.>", "workqueue"),
        ("demo_JOURNAL", "pearl.demo.journal.>", "limits"),
        ("demo_DEAD", "pearl.demo.dead.>", "limits"),
    ):
        await bus.ensure_stream(StreamSpec(name=name, subjects=(subjects,), retention=retention))


class Table:
    """A replica of one worker's row. Until it is written there is no table."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[RoleTable], None]] = []
        self.table: RoleTable | None = None

    def write(self, version: int = 0, *, serving: bool = True, published: int | None = None) -> None:
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


class Cluster:
    """Router and worker `a-w0`. `script` says what becomes of the next attempts; an empty one serves them whole.

    "cut:n" interrupts after n tokens, "die:n" falls silent after n, "refuse", "lose" drops the request, "not_now" is the router's,
    "hold:n" waits for `release` after n, "garble:n" sends one chunk after n whose log-probability is no number, and then no more.
    Each chunk has `chunk` tokens.
    """

    def __init__(self, bus: Bus, answer: Answer, *script: str, chunk: int = 3) -> None:
        self.bus = bus
        self.answer = answer
        self.script = deque(script)
        self.chunk = chunk
        self.log: list[AttemptLogged] = []
        self.asked: list[AssignRequest] = []
        self.assigned: list[Assignment] = []
        self.ended: list[Assignment] = []  # as an edge beside the router tells it
        self.generates: list[Generate] = []
        self.cancels: list[CancelRequest] = []
        self.cancelled = asyncio.Event()
        self.reached = asyncio.Event()  # a "hold"
        self.release = asyncio.Event()
        self.on_death: Callable[[], object] | None = None
        self.before: asyncio.Event | None = None  # attempts wait for it before their first token
        self.not_now: NotNow | None = None  # the router's answer to everything
        self.version = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Answer over the bus; an edge beside the router calls `assign` itself."""
        asks = await self.bus.subscribe("pearl.demo.assign", queue="router")
        generates = await self.bus.subscribe("pearl.demo.gen.*")
        self._tasks |= {asyncio.create_task(self._route(asks)), asyncio.create_task(self._work(generates))}

    async def stop(self) -> None:
        """Raises what an attempt raised."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _route(self, asks: Any) -> None:
        async for delivery in asks:
            await self.bus.publish(delivery.reply, encode(self.assign(decode(delivery.data, AssignRequest))))

    def assign(self, ask: AssignRequest) -> Answered:
        self.asked.append(ask)
        if self.not_now is not None:
            return msgspec.structs.replace(self.not_now, request=ask.request, attempt=ask.attempt)
        if self.script and self.script[0] == "not_now":
            self.script.popleft()
            return NotNow(request=ask.request, attempt=ask.attempt, retry_after_ms=5, reason="no worker")
        self.assigned.append(
            Assignment(request=ask.request, attempt=ask.attempt, worker="a-w0", incarnation=1, role_generation=1)
        )
        return self.assigned[-1]

    async def _work(self, generates: Any) -> None:
        async for delivery in generates:
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
        if self.before is not None:
            await self.before.wait()
        tokens = whole[begin:] if what == "whole" else whole[begin : begin + int(count)]
        ended = "stop" if whole and whole[-1] in message.stop_ids else "length"
        finish = {"whole": ended, "cut": "interrupted", "die": "", "garble": "", "hold": ""}[what]
        for index in range(0, len(tokens), self.chunk):
            last = index + self.chunk >= len(tokens)
            await self._say(message, begin + index, tokens[index : index + self.chunk], finish if last else "")
        if not tokens and finish:
            await self._say(message, begin, [], finish)
        if what == "hold":
            self.reached.set()
            await self.release.wait()
            at = begin + len(tokens)
            tokens, finish = whole[begin:], ended
            await self._say(message, at, whole[at:], finish)
        if what == "garble":
            await self._say(message, begin + len(tokens), [whole[begin + len(tokens)]], "", logprob=math.nan)
        elif what != "die":
            self._note(message, len(tokens), finish)
        elif self.on_death is not None:
            self.on_death()

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

    async def _say(
        self, message: Generate, offset: int, tokens: Sequence[int], finish: str, logprob: float | None = None
    ) -> None:
        piece = TokenChunk(
            request=message.request,
            attempt=message.attempt,
            worker=message.worker,
            incarnation=message.incarnation,
            offset=offset,
            tokens=list(tokens),
            logprobs=[
                -0.25 * (1 + (offset + index) % 4) if logprob is None else logprob for index in range(len(tokens))
            ],
            version=self.version,
            finish=finish,
        )
        await self.bus.publish(message.reply, encode(piece))


class Records:
    """What is in the streams, of a world with a `bus` and a `cluster`."""

    bus: Bus
    cluster: Cluster

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

    async def report(self) -> Report:
        """What the checker says of all that was recorded."""
        return check(
            Expected(batch_trajectories=1, group_size=1, staleness=1),
            journal=await self.journal(),
            attempts=self.cluster.log,
            ends=await self.ends(),
            batches=(),
            steps=(),
        )
