"""Requests that a server has, and the replies that stream from it: of one pool, or of the two sides of a transfer.

Each reply has a reader of the server's stream, and whoever streams it on. A request is never aborted while its KV cache may be on its
way: it is left to come to its first token, then aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Final

from messages.ids import PolicyVersion, Role
from services.jobfile import RolloutSection
from services.rollout_worker.engines.base import GenerateSpec, Load, Tokens
from services.rollout_worker.engines.ends import finish_of, last_chunk
from services.rollout_worker.engines.sglang.accounts import Accounts
from services.rollout_worker.engines.sglang.api import Api, ApiError, Piece, ServerGoneError, VersionSpan
from services.rollout_worker.engines.sglang.reply import NO_WEIGHTS, Reply, Served, Stop, end_of
from services.rollout_worker.engines.sglang.rooms import End, Joined, RefusedError, Room, Rooms, join
from services.runtime.log import get_logger

QUEUE_FACTOR: Final = 8
"""Requests that may wait here, in units of `max_running`, as in the other engines."""
ABORT_AGAIN_S: Final = 0.2

log = get_logger("rollout_worker")


class Streams:
    """The replies of one server. `now`: what it is, which `api` is asked; `room_s`: patience of PD sides."""

    def __init__(self, rollout: RolloutSection, api: Api, rooms: Rooms, room_s: float, now: Served) -> None:
        self.replies: dict[str, Reply] = {}
        self.open = 0  # streams of the server's that have not ended
        self.silent_since = 0.0
        self._rollout = rollout
        self._api = api
        self._rooms = rooms
        self._room_s = room_s
        self._now = now
        self._accounts = Accounts()
        self._numbers = itertools.count(1)
        self._life = secrets.token_hex(4)  # SGLang aborts a dropped request late, and all whose ids begin alike
        self._tasks: set[asyncio.Task[None]] = set()
        self._deterministic = "--enable-deterministic-inference" in rollout.sglang.args

    def interrupt(self, reason: str) -> None:
        """All end here now, whatever the server makes of them."""
        for reply in self.replies.values():
            reply.events.put_nowait(Stop("interrupted", reason))

    async def close(self) -> None:
        """Let go of all."""
        self.interrupt("the engine stops")
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self, request: str | None = None) -> int:
        """End one or all; returns how many."""
        replies = [
            reply for reply in self.replies.values() if request in (None, reply.spec.request) and not reply.aborted
        ]
        for reply in replies:
            reply.aborted = True
            self.end_soon(reply, "aborted")
        return len(replies)

    def end_soon(self, reply: Reply, reason: str) -> None:
        """Its stream ends as interrupted: where it decodes, with what the server still hands out."""
        if reply.in_transfer:
            reply.events.put_nowait(Stop("interrupted", reason))
        else:
            self._in_background(self._tell_abort(reply))

    async def _tell_abort(self, reply: Reply) -> None:
        """Until it has ended: the server forgets an abort that overtakes its request."""
        while not reply.ended.is_set():
            with contextlib.suppress(ApiError, ServerGoneError):
                await self._api.post("/abort_request", rid=reply.rid)
            if not reply.ended.is_set():
                await asyncio.sleep(ABORT_AGAIN_S)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def generate(self, spec: GenerateSpec) -> AsyncGenerator[Tokens, None]:
        """As `Engine.generate`."""
        offset = len(spec.prefix)
        if problem := self._problem(spec):
            yield last_chunk(offset, self._now.version, "refused", problem)
            return
        if finish := finish_of(spec):
            yield last_chunk(offset, self._now.version, finish, "")
            return
        reply = Reply(spec, f"{spec.request}#{spec.attempt}.{next(self._numbers)}.{self._life}", self._now.role)
        self._account()
        self.replies[reply.rid] = reply
        try:
            streams = {Role.PREFILL: self._prefill, Role.DECODE: self._decode}.get(self._now.role, self._colocated)
            async for chunk in streams(reply):
                yield chunk
        finally:
            self._account()
            del self.replies[reply.rid]

    def _problem(self, spec: GenerateSpec) -> str:
        """Why it cannot run here, "" if it can."""
        if self._now.version == NO_WEIGHTS:
            return "no weights loaded"
        if not spec.prompt:
            return "the prompt is empty"
        if min(itertools.chain(spec.prompt, spec.prefix)) < 0:
            return "token ids must not be negative"
        if len(spec.prompt) + len(spec.prefix) >= self._now.input_limit:
            return (
                f"{len(spec.prompt) + len(spec.prefix)} tokens leave no room in a context of {self._now.context_limit}"
            )
        if self._now.role is not Role.COLOCATED and (not spec.bootstrap_host or spec.bootstrap_room < 0):
            return f"a {self._now.role} engine needs the bootstrap triple"
        if len(self.replies) >= (1 + QUEUE_FACTOR) * self._rollout.max_running:
            return "the queue is full"
        return ""

    async def _colocated(self, reply: Reply) -> AsyncGenerator[Tokens, None]:
        self._submit(reply)
        async for chunk in self._chunks(reply):
            yield chunk

    async def _decode(self, reply: Reply) -> AsyncGenerator[Tokens, None]:
        spec, version = reply.spec, self._now.version
        meeting = asyncio.create_task(
            join(spec.bootstrap_host, spec.bootstrap_port, spec.bootstrap_room, version, self._room_s)
        )
        stopped = asyncio.create_task(reply.events.get())
        joined: Joined | None = None
        try:
            await asyncio.wait((meeting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                stop = stopped.result()
                assert isinstance(stop, Stop), "nothing was submitted"
                yield last_chunk(reply.sent, version, stop.finish, stop.reason)
                return
            stopped.cancel()
            try:
                joined = meeting.result()
            except RefusedError as error:
                yield last_chunk(reply.sent, version, "refused", str(error))
                return
            joined.lost.add_done_callback(
                lambda task: None if task.cancelled() else reply.events.put_nowait(Stop("interrupted", task.result()))
            )
            self._submit(reply, joined.bootstrap_port)
            async for chunk in self._chunks(reply):
                if reply.first and joined is not None:
                    joined.say(End.HAVE)
                    await joined.close()
                    joined = None
                yield chunk
        finally:
            stopped.cancel()
            if joined is not None and not reply.ended.is_set():
                joined.say(End.LEFT)
                self._in_background(self._see_out(joined, reply))
            elif joined is not None:
                await joined.close()
            elif not meeting.done():
                meeting.cancel()
            elif not meeting.cancelled() and meeting.exception() is None and not reply.first:
                await meeting.result().close()  # nothing was submitted

    async def _prefill(self, reply: Reply) -> AsyncGenerator[Tokens, None]:
        spec, offset = reply.spec, reply.sent
        try:
            room = self._rooms.enter(spec.bootstrap_room, self._now.version)
        except RefusedError as error:
            yield last_chunk(offset, self._now.version, "refused", str(error))
            return
        reason = "cancelled"
        stopped = asyncio.create_task(reply.events.get())
        try:
            await asyncio.wait((room.joined, stopped), timeout=self._room_s, return_when=asyncio.FIRST_COMPLETED)
            if not room.joined.done():
                stop = stopped.result() if stopped.done() else None
                assert stop is None or isinstance(stop, Stop), "nothing was submitted"
                reason = f"no decode side came within {self._room_s:g} s" if stop is None else stop.reason
                yield last_chunk(offset, self._now.version, "interrupted", reason)
                return
            if reason := room.joined.result():
                yield last_chunk(offset, self._now.version, "refused", reason)
                return
            reason = "cancelled"
            self._submit(reply, self._rooms.bootstrap_port)
            self._in_background(self._watch(reply, room))
            while True:
                await asyncio.wait((stopped, room.ended), return_when=asyncio.FIRST_COMPLETED)
                if not stopped.done():
                    if room.ended.result() is End.HAVE:
                        end, reason = "handed_over", ""
                    else:
                        end, reason = "abandoned", "the decode side is gone"
                    break
                event = stopped.result()
                if isinstance(event, Stop):
                    end, reason = event.finish, event.reason
                    break
                ended = event.meta_info.finish_reason
                if ended is not None:
                    end, reason = end_of(ended)
                    end = "handed_over" if end in ("length", "stop") else end
                    reason = "" if end == "handed_over" else reason
                    break
                stopped = asyncio.create_task(reply.events.get())
            yield last_chunk(offset, self._now.version, end, reason)
        finally:
            stopped.cancel()
            reply.over = True
            self._rooms.leave(spec.bootstrap_room, reason)

    async def _watch(self, reply: Reply, room: Room) -> None:
        """If the decode server ends before it has the context, nobody will take it, and nobody's pages are written to any more."""
        if not await room.over:
            await self._tell_abort(reply)

    async def _see_out(self, joined: Joined, reply: Reply) -> None:
        """Nobody waits for it here any more; its prefill side hears what its server makes of it."""
        try:
            await reply.ended.wait()
            if reply.arrived:
                joined.say(End.HAVE)
        finally:
            await joined.close()

    async def _chunks(self, reply: Reply) -> AsyncGenerator[Tokens, None]:
        """What its reader puts there, as chunks, until it ends. Left early, the request is aborted as soon as that is safe."""
        ended = False
        try:
            while not ended:
                event = await reply.events.get()
                if isinstance(event, Stop):
                    ended = event.finish == "refused"
                    yield last_chunk(reply.sent, self._now.version, event.finish, event.reason)
                    return
                chunk = self._chunk(reply, event)
                ended = bool(chunk.finish)
                if chunk.tokens or ended:
                    yield chunk
        finally:
            reply.over = True
            if not (ended or reply.in_transfer):
                self._in_background(self._tell_abort(reply))

    def _chunk(self, reply: Reply, piece: Piece) -> Tokens:
        meta, tokens = piece.meta_info, piece.output_ids
        offset, ended = reply.sent, meta.finish_reason
        logprobs = [
            0.0 if each[0] is None else min(0.0, each[0]) for each in meta.output_token_logprobs[-len(tokens) :]
        ]
        assert not tokens or len(logprobs) == len(tokens), f"{len(tokens)} tokens, {len(logprobs)} log-probabilities"
        self._account()
        cached = 0
        if tokens and not reply.first:
            reply.first = True
            cached = meta.cached_tokens
            computed = 0 if reply.role is Role.DECODE else len(reply.spec.prompt) + len(reply.spec.prefix) - cached
            self._count(prefilled=max(0, computed), decoded=len(tokens) - 1)
        else:
            self._count(decoded=len(tokens))
        reply.sent += len(tokens)
        finish, reason = ("", "") if ended is None else end_of(ended)
        if finish == "length" and reply.sent < reply.spec.max_new_tokens:
            reason = "the context is full"
        if ended is not None and meta.weight_versions:
            self._hold_against(reply, meta.weight_versions)
        return Tokens(
            offset=offset,
            tokens=tokens,
            logprobs=logprobs if tokens else [],
            version=self._named(meta.weight_version),
            finish=finish,
            reason=reason,
            cached_tokens=cached,
        )

    def _body(self, spec: GenerateSpec, rid: str, bootstrap_port: int = 0) -> dict[str, Any]:
        most = min(spec.max_new_tokens, self._now.context_limit - len(spec.prompt)) - len(spec.prefix)
        sampling: dict[str, Any] = {
            "max_new_tokens": 1 if self._now.role is Role.PREFILL else most,
            "temperature": spec.temperature,
            "ignore_eos": not spec.stop_ids,
            "stop_token_ids": spec.stop_ids,
        }
        if self._deterministic:
            sampling["sampling_seed"] = spec.seed
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": spec.prompt + spec.prefix,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            "extra_key": self._cache_key(rid),
        }
        if bootstrap_port:
            body["bootstrap_host"] = spec.bootstrap_host
            body["bootstrap_port"] = bootstrap_port
            body["bootstrap_room"] = spec.bootstrap_room
        return body

    def _cache_key(self, rid: str) -> str:
        """What shares prefixes. On a decode server nothing does: one that was a prefill server has a prefix cache, and leaks what it finds."""
        return f"v{self._now.version}" if self._now.role is not Role.DECODE else f"v{self._now.version}.{rid}"

    def _submit(self, reply: Reply, bootstrap_port: int = 0) -> None:
        """Hand it to the server."""
        self.open += 1
        self._in_background(self._read(reply, self._body(reply.spec, reply.rid, bootstrap_port)))

    async def _read(self, reply: Reply, body: dict[str, Any]) -> None:
        """The server's stream into `events`. A reply that nobody waits for is aborted once its KV cache has arrived."""
        told = False
        try:
            async for piece in self._api.generate(body):
                self.silent_since = time.monotonic()
                if piece.meta_info.finish_reason is not None:
                    told = True
                reply.arrived = reply.arrived or bool(piece.output_ids)
                reply.events.put_nowait(piece)
                if reply.over and not told:
                    told = True
                    self._in_background(self._tell_abort(reply))
            if not told:
                reply.events.put_nowait(Stop("interrupted", "the server ended the stream"))
        except ApiError as error:
            reply.events.put_nowait(Stop("interrupted" if reply.first else "refused", str(error)))
        except ServerGoneError as error:
            reply.events.put_nowait(Stop("interrupted", str(error)))
        finally:
            reply.ended.set()
            self.open -= 1

    def load(self) -> Load:
        """Of all so far."""
        self._account()
        running = sum(reply.first for reply in self.replies.values())
        return self._accounts.load(running, len(self.replies) - running)

    def _account(self) -> None:
        first = [reply.first for reply in self.replies.values()]
        idle = bool(self._now.paused)
        self._accounts.look(decodes=any(first) and not idle, waits=not all(first) and not idle)

    def _count(self, *, decoded: int, prefilled: int = 0) -> None:
        self._accounts.count(sum(reply.first for reply in self.replies.values()), decoded, prefilled)

    def _named(self, weight_version: str) -> PolicyVersion:
        return PolicyVersion(int(weight_version)) if weight_version.isdecimal() else self._now.version

    def _hold_against(self, reply: Reply, spans: list[VersionSpan]) -> None:
        """The server's final account of versions against the last one that was streamed."""
        newest = spans[-1].version
        if self._named(newest) > self._now.version:
            log.error(
                f"{reply.rid}: tokens of version {newest}, but {self._now.version} is loaded", action="sglang.versions"
            )
