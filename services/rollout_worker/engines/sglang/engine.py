"""The engine `sglang`: an SGLang server behind the worker's engine interface (DESIGN 9).

Owns one server and the replies that stream from it. Token ids go in and come out: the server makes no text. Weights come from
snapshots, read by the server or pushed (`push`); `weight_version` is the policy version. What SGLang leaves to its user is done here:

- the prefix cache of old weights serves no new request (each version has its own cache key);
- memory is released only after a verified drain (released while busy, the whole server exits);
- prefill and decode requests of different versions never meet, and neither waits for a dead other (`rooms`);
- an update of weights is believed only when the server's checksums bear it out (`weights`);
- a request is never aborted while its KV cache may be on its way: it is left to come to its first token, then aborted.

Not as in the embedded engine: with a temperature, a resumed reply draws what an uninterrupted one would have drawn only where the
server runs with `--enable-deterministic-inference`; where a request has stop ids, the model's own end-of-text ids stop it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec

from messages.ids import PolicyVersion, Role
from services.jobfile import RolloutSection
from services.rollout_worker.engines.base import EngineError, GenerateSpec, Load, Tokens
from services.rollout_worker.engines.ends import finish_of
from services.rollout_worker.engines.sglang.api import (
    CHECKER,
    LOAD_S,
    LOADS,
    Api,
    ApiError,
    Ended,
    Piece,
    ServerGoneError,
    VersionSpan,
)
from services.rollout_worker.engines.sglang.push import PushError, push
from services.rollout_worker.engines.sglang.rooms import End, Joined, RefusedError, Room, Rooms, join
from services.rollout_worker.engines.sglang.server import MODES, Server
from services.rollout_worker.engines.sglang.weights import (
    Held,
    WeightFileError,
    mismatch,
    sources,
    stored_type,
    sums_of,
)
from services.runtime.log import get_logger

NO_WEIGHTS: Final = PolicyVersion(-1)
QUEUE_FACTOR: Final = 8
"""Requests that may wait here, in units of `max_running`, as in the other engines."""
QUIET_S: Final = 0.1
"""Before weights change, streams have been silent for so long: tokens of the old ones have left the server."""
ABORT_AGAIN_S: Final = 0.2
DRAIN_S: Final = 30.0
MEMORY_TAGS: Final = ("weights", "kv_cache")

log = get_logger("rollout_worker")


class _Stop(msgspec.Struct, frozen=True):
    """A reply ends here, whatever its server makes of it."""

    finish: str
    reason: str


class _Reply:
    """A request that the server has, or will have. Its reader fills `events`; who streams it empties them."""

    __slots__ = ("aborted", "arrived", "ended", "events", "first", "over", "rid", "role", "sent", "spec")

    def __init__(self, spec: GenerateSpec, rid: str, role: Role) -> None:
        self.spec = spec
        self.rid = rid
        self.role = role
        self.sent = len(spec.prefix)
        self.first = False  # its first token came: it decodes
        self.aborted = False  # it was told to end
        self.arrived = False  # its first token came from the server, whoever has seen it
        self.ended = asyncio.Event()  # the server's stream of it is over
        self.over = False  # nobody waits for it any more, or it has ended
        self.events: asyncio.Queue[Piece | _Stop] = asyncio.Queue()

    @property
    def in_transfer(self) -> bool:
        """Its KV cache may be on its way: an abort now could corrupt another request's pages."""
        return self.role is not Role.COLOCATED and not self.first


class SglangEngine:
    """See `Engine` and the module. `model`: folder with configuration and weights to start from. `room_s`: patience of PD sides."""

    def __init__(
        self,
        rollout: RolloutSection,
        device: str,
        model: str,
        log_file: Path,
        *,
        address: str = "127.0.0.1",
        adopt: str = "",
        room_s: float = 20.0,
        first_role: Role = Role.COLOCATED,
    ) -> None:
        self.role = first_role
        self._rollout = rollout
        self._server = Server(rollout, model, device, address, log_file, adopt)
        self._rooms = Rooms(address, self._server.bootstrap_port, room_s)
        self._room_s = room_s
        self._version = NO_WEIGHTS
        self._snapshot = ""
        self._model = model
        self._fresh = False  # the server has what it was launched with
        self._held: Held | None = None  # what it was last seen to have; None: of an adopted one, at first
        self._verifies = rollout.sglang.verify_weights
        self._dtype = ""
        self._ranks = rollout.gpus_per_worker
        self._released = False
        self._paused = ""  # the mode
        self._context_limit = 0  # tokens of context and reply together
        self._input_limit = 0  # tokens that can be submitted: a little less
        self._numbers = itertools.count(1)
        self._life = secrets.token_hex(4)  # SGLang aborts a dropped request late, and all whose ids begin alike
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: dict[str, _Reply] = {}
        self._open = 0  # streams of the server's that have not ended
        self._silent_since = 0.0
        self._sums = Load()
        self._at = 0.0  # until when busy time was summed
        self._iterations = 0.0
        self._deterministic = "--enable-deterministic-inference" in rollout.sglang.args

    # ---- life ----

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def endpoint(self) -> str:
        return self._rooms.endpoint

    @property
    def _api(self) -> Api:
        return self._server.api

    async def start(self) -> None:
        try:
            await self._rooms.start()
            await self._server.start(self.role)
            await self._look()
        except EngineError:
            await self.stop()
            raise

    async def stop(self) -> None:
        await self._rooms.stop()
        for reply in self._replies.values():
            reply.events.put_nowait(_Stop("interrupted", "the engine stops"))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop()

    async def failed(self) -> str:
        return await self._server.failed()

    async def _look(self) -> None:
        """Learn what the server is; an adopted one may be anything. Raises EngineError."""
        try:
            missing, consequences = await self._api.surface(self._rollout.sglang.weights)
            info = await self._api.get("/server_info")
            described = await self._api.get("/model_info")
        except (ApiError, ServerGoneError) as error:
            raise EngineError(
                f"the server at {self._api.url} is not an SGLang server that can be driven: {error}"
            ) from error
        if missing:
            raise EngineError(f"SGLang {info.get('version')} at {self._api.url} lacks {', '.join(missing)}")
        for consequence in consequences:
            log.warning(f"SGLang {info.get('version')}: {consequence}", action="sglang.surface")
        if any(each.startswith(CHECKER) for each in consequences):
            self._verifies = False
        self._dtype = str(info.get("dtype", ""))
        size = info.get("tp_size")
        self._ranks = size if isinstance(size, int) else self._rollout.gpus_per_worker
        self._held, self._fresh = None, not self._server.adopted
        limits = (info.get("max_total_num_tokens"), info.get("context_length"))
        known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
        self._context_limit = min([*known, self._rollout.kv_cache_tokens])
        most = info.get("max_req_input_len")
        self._input_limit = min(self._context_limit, most) if isinstance(most, int) else self._context_limit
        if self._server.adopted:
            mode = described.get("disaggregation_mode", "null")
            self.role = next((role for role, name in MODES.items() if name == mode), Role.COLOCATED)
            port = info.get("disaggregation_bootstrap_port")
            self._rooms.announce(port if isinstance(port, int) else 0)
            if info.get("incremental_streaming_output") is not True:
                raise EngineError(f"the adopted server at {self._api.url} must run with --incremental-streaming-output")

    async def set_role(self, role: Role) -> None:
        if role not in MODES:
            raise EngineError(f"no engine serves as {role}")
        if self._replies:
            raise EngineError(f"{len(self._replies)} requests run: drain before a change of role")
        if role is self.role:
            return
        await self._idle()
        in_place = Role.COLOCATED not in (role, self.role) and self._server.switches
        if in_place:
            await self._switch(role)
        else:
            version, snapshot = self._version, self._snapshot
            await self._server.relaunch(role)
            await self._look()
            self._version, self._snapshot = NO_WEIGHTS, ""
            if snapshot:
                self.role = role
                await self.load_snapshot(snapshot, version)
        self.role = role

    async def _switch(self, role: Role) -> None:
        body: dict[str, Any] = {"new_role": MODES[role]}
        if role is Role.DECODE:
            body["decode_cuda_graph_memory_gb"] = self._rollout.sglang.decode_cuda_graph_gb
        await self._flush()  # a page that an aborted request has leaked would be counted against the new role
        try:
            await self._api.post("/pd_role_switch", within_s=LOAD_S, **body)
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"from {self.role} to {role}: {error}") from error

    # ---- weights and memory ----

    async def load_snapshot(self, directory: str, version: PolicyVersion) -> None:
        if self._released:
            raise EngineError("device memory is released: restore it first")
        if self._verifies and self._fresh:
            self._held = await self._holds(self._model)
        self._fresh = False
        try:
            if self._rollout.sglang.weights == "disk":
                await self._api.post(
                    "/update_weights_from_disk",
                    within_s=LOAD_S,
                    model_path=directory,
                    weight_version=str(version),
                    flush_cache=False,  # which fails an update that was made, where any request is under way
                    keep_pause=bool(self._paused),
                )
            else:
                await self._push(directory, version)
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"version {version} from {directory}: {error}") from error
        if self._paused == "retract" or not self._replies:
            await self._flush()  # else they go on with theirs, see `extra_key`
        if self._verifies:
            await self._verify(directory, version)
        self._version, self._snapshot = version, directory
        for reply in self._replies.values():
            if reply.in_transfer:
                self._end_soon(reply, f"weights of version {version} came")

    async def _push(self, directory: str, version: PolicyVersion) -> None:
        """Several calls, between which nothing may be generated: weights are of two versions then."""
        if not self._paused:
            await self._api.post("/pause_generation", mode="in_place")
        try:
            way, address = self._rollout.sglang.weights, self._server.address
            await push(self._api, way, directory, version, ranks=self._ranks, address=address)
        except PushError as error:
            if error.mixed:
                self._distrust(f"weights of version {version} have come in part")
                self._held = None
            raise EngineError(f"version {version} from {directory}: {error}") from error
        finally:
            if not self._paused:
                await self._api.post("/continue_generation")

    def _distrust(self, reason: str) -> None:
        """Nothing more is served with what the server holds, until an update has come."""
        self._version, self._snapshot = NO_WEIGHTS, ""
        for reply in self._replies.values():
            reply.events.put_nowait(_Stop("interrupted", reason))

    async def _verify(self, directory: str, version: PolicyVersion) -> None:
        """The server holds what is in that folder. Raises EngineError; then nothing more is served, or ended, with what it holds."""
        held = await self._holds(directory)
        problem = mismatch(self._held, held) if held is not None and self._held is not None else ""
        if not problem:
            self._held = held or self._held
            return
        self._distrust(f"weights of version {version} are not as they should be")
        raise EngineError(f"version {version} from {directory}: the server says it is loaded, but {problem}")

    async def _holds(self, directory: str) -> Held | None:
        """What is in the folder, and in the server, which is thought to have loaded it. None, with a warning: that cannot be known."""
        try:
            answer, found = await asyncio.gather(
                self._api.post(CHECKER, within_s=LOAD_S, action="checksum"),
                asyncio.to_thread(sources, directory),
            )
        except (ApiError, ServerGoneError, WeightFileError, OSError) as error:
            log.warning(f"weights are not verified: {error}", action="sglang.unverified")
            return None
        return Held(sources=found, sums=sums_of(answer.get("ranks", [])), dtype=stored_type(self._dtype, directory))

    async def _flush(self) -> None:
        """Forget prefixes of old weights. Refused while a context is on its way: then they age, since no new request finds them."""
        try:
            await self._api.post("/flush_cache")
        except ApiError as error:
            log.info(f"prefixes of old weights stay until they are displaced: {error}", action="sglang.flush")
        except ServerGoneError as error:
            raise EngineError(str(error)) from error

    async def release(self) -> int:
        if self._replies:
            raise EngineError(f"{len(self._replies)} requests run: drain before memory is released")
        before = self.occupied()
        await self._idle()
        try:
            await self._api.post("/release_memory_occupation", within_s=LOAD_S, tags=list(MEMORY_TAGS))
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"release: {error}") from error
        self._released = True
        self._version, self._snapshot = NO_WEIGHTS, ""
        return max(0, before - self.occupied())

    async def restore(self) -> None:
        if not self._released:
            return
        try:
            await self._api.post("/resume_memory_occupation", within_s=LOAD_S, tags=list(MEMORY_TAGS))
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"restore: {error}") from error
        self._released = False

    def occupied(self) -> int:
        return self._server.memory()

    async def _idle(self) -> None:
        """The server says itself that nothing runs. Raises EngineError."""
        try:
            async with asyncio.timeout(DRAIN_S):
                while await self._busy():  # noqa: ASYNC110 - the server tells nobody
                    await asyncio.sleep(QUIET_S)
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"whether the server is idle cannot be known: {error}") from error
        except TimeoutError:
            raise EngineError(f"the server has not become idle within {DRAIN_S:g} s") from None

    async def _busy(self) -> int:
        """Requests of ours that it has not ended, and all that it counts itself, of whoever's."""
        answer = await self._api.get(LOADS)
        loads: list[dict[str, Any]] = answer.get("loads", [])
        moving = sum(int(each.get("disaggregation", {}).get("prefill_inflight_queue_reqs", 0)) for each in loads)
        return (
            self._open + moving + sum(int(each["num_running_reqs"]) + int(each["num_waiting_reqs"]) for each in loads)
        )

    # ---- pauses ----

    async def pause(self, mode: str) -> None:
        if mode not in ("abort", "retract", "in_place"):
            raise EngineError(f"pause mode {mode!r}: use abort, retract or in_place")
        try:
            await self._api.post("/pause_generation", mode=mode)
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"pause: {error}") from error
        self._paused = mode
        while time.monotonic() - self._silent_since < QUIET_S:  # noqa: ASYNC110
            await asyncio.sleep(QUIET_S / 4)

    async def resume(self) -> None:
        self._paused = ""
        try:
            await self._api.post("/continue_generation")
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"resume: {error}") from error

    async def abort(self, request: str | None = None) -> int:
        replies = [
            reply for reply in self._replies.values() if request in (None, reply.spec.request) and not reply.aborted
        ]
        for reply in replies:
            reply.aborted = True
            self._end_soon(reply, "aborted")
        return len(replies)

    def _end_soon(self, reply: _Reply, reason: str) -> None:
        """Its stream ends as interrupted: where it decodes, with what the server still hands out."""
        if reply.in_transfer:
            reply.events.put_nowait(_Stop("interrupted", reason))
        else:
            self._in_background(self._tell_abort(reply))

    async def _tell_abort(self, reply: _Reply) -> None:
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

    # ---- replies ----

    def generate(self, spec: GenerateSpec) -> AsyncGenerator[Tokens, None]:
        return self._generate(spec)

    async def _generate(self, spec: GenerateSpec) -> AsyncGenerator[Tokens, None]:
        offset = len(spec.prefix)
        if problem := self._problem(spec):
            yield _last(offset, self._version, "refused", problem)
            return
        if finish := finish_of(spec):
            yield _last(offset, self._version, finish, "")
            return
        reply = _Reply(spec, f"{spec.request}#{spec.attempt}.{next(self._numbers)}.{self._life}", self.role)
        self._account()
        self._replies[reply.rid] = reply
        try:
            streams = {Role.PREFILL: self._prefill, Role.DECODE: self._decode}.get(self.role, self._colocated)
            async for chunk in streams(reply):
                yield chunk
        finally:
            self._account()
            del self._replies[reply.rid]

    def _problem(self, spec: GenerateSpec) -> str:
        """Why it cannot run here, "" if it can."""
        if self._version == NO_WEIGHTS:
            return "no weights loaded"
        if not spec.prompt:
            return "the prompt is empty"
        if min(itertools.chain(spec.prompt, spec.prefix)) < 0:
            return "token ids must not be negative"
        if len(spec.prompt) + len(spec.prefix) >= self._input_limit:
            return f"{len(spec.prompt) + len(spec.prefix)} tokens leave no room in a context of {self._context_limit}"
        if self.role is not Role.COLOCATED and (not spec.bootstrap_host or spec.bootstrap_room < 0):
            return f"a {self.role} engine needs the bootstrap triple"
        if len(self._replies) >= (1 + QUEUE_FACTOR) * self._rollout.max_running:
            return "the queue is full"
        return ""

    async def _colocated(self, reply: _Reply) -> AsyncGenerator[Tokens, None]:
        self._submit(reply)
        async for chunk in self._chunks(reply):
            yield chunk

    async def _decode(self, reply: _Reply) -> AsyncGenerator[Tokens, None]:
        spec, version = reply.spec, self._version
        meeting = asyncio.create_task(
            join(spec.bootstrap_host, spec.bootstrap_port, spec.bootstrap_room, version, self._room_s)
        )
        stopped = asyncio.create_task(reply.events.get())
        joined: Joined | None = None
        try:
            await asyncio.wait((meeting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                stop = stopped.result()
                assert isinstance(stop, _Stop), "nothing was submitted"
                yield _last(reply.sent, version, stop.finish, stop.reason)
                return
            stopped.cancel()
            try:
                joined = meeting.result()
            except RefusedError as error:
                yield _last(reply.sent, version, "refused", str(error))
                return
            joined.lost.add_done_callback(
                lambda task: None if task.cancelled() else reply.events.put_nowait(_Stop("interrupted", task.result()))
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

    async def _prefill(self, reply: _Reply) -> AsyncGenerator[Tokens, None]:
        spec, offset = reply.spec, reply.sent
        try:
            room = self._rooms.enter(spec.bootstrap_room, self._version)
        except RefusedError as error:
            yield _last(offset, self._version, "refused", str(error))
            return
        reason = "cancelled"
        stopped = asyncio.create_task(reply.events.get())
        try:
            await asyncio.wait((room.joined, stopped), timeout=self._room_s, return_when=asyncio.FIRST_COMPLETED)
            if not room.joined.done():
                stop = stopped.result() if stopped.done() else None
                assert stop is None or isinstance(stop, _Stop), "nothing was submitted"
                reason = f"no decode side came within {self._room_s:g} s" if stop is None else stop.reason
                yield _last(offset, self._version, "interrupted", reason)
                return
            if reason := room.joined.result():
                yield _last(offset, self._version, "refused", reason)
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
                if isinstance(event, _Stop):
                    end, reason = event.finish, event.reason
                    break
                ended = event.meta_info.finish_reason
                if ended is not None:
                    end, reason = _end_of(ended)
                    end = "handed_over" if end in ("length", "stop") else end
                    reason = "" if end == "handed_over" else reason
                    break
                stopped = asyncio.create_task(reply.events.get())
            yield _last(offset, self._version, end, reason)
        finally:
            stopped.cancel()
            reply.over = True
            self._rooms.leave(spec.bootstrap_room, reason)

    async def _watch(self, reply: _Reply, room: Room) -> None:
        """If the decode server ends before it has the context, nobody will take it, and nobody's pages are written to any more."""
        if not await room.over:
            await self._tell_abort(reply)

    async def _see_out(self, joined: Joined, reply: _Reply) -> None:
        """Nobody waits for it here any more; its prefill side hears what its server makes of it."""
        try:
            await reply.ended.wait()
            if reply.arrived:
                joined.say(End.HAVE)
        finally:
            await joined.close()

    async def _chunks(self, reply: _Reply) -> AsyncGenerator[Tokens, None]:
        """What its reader puts there, as chunks, until it ends. Left early, the request is aborted as soon as that is safe."""
        ended = False
        try:
            while not ended:
                event = await reply.events.get()
                if isinstance(event, _Stop):
                    ended = event.finish == "refused"
                    yield _last(reply.sent, self._version, event.finish, event.reason)
                    return
                chunk = self._chunk(reply, event)
                ended = bool(chunk.finish)
                if chunk.tokens or ended:
                    yield chunk
        finally:
            reply.over = True
            if not (ended or reply.in_transfer):
                self._in_background(self._tell_abort(reply))

    def _chunk(self, reply: _Reply, piece: Piece) -> Tokens:
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
        finish, reason = ("", "") if ended is None else _end_of(ended)
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
        most = min(spec.max_new_tokens, self._context_limit - len(spec.prompt)) - len(spec.prefix)
        sampling: dict[str, Any] = {
            "max_new_tokens": 1 if self.role is Role.PREFILL else most,
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
        return f"v{self._version}" if self.role is not Role.DECODE else f"v{self._version}.{rid}"

    def _submit(self, reply: _Reply, bootstrap_port: int = 0) -> None:
        """Hand it to the server."""
        self._open += 1
        self._in_background(self._read(reply, self._body(reply.spec, reply.rid, bootstrap_port)))

    async def _read(self, reply: _Reply, body: dict[str, Any]) -> None:
        """The server's stream into `events`. A reply that nobody waits for is aborted once its KV cache has arrived."""
        told = False
        try:
            async for piece in self._api.generate(body):
                self._silent_since = time.monotonic()
                if piece.meta_info.finish_reason is not None:
                    told = True
                reply.arrived = reply.arrived or bool(piece.output_ids)
                reply.events.put_nowait(piece)
                if reply.over and not told:
                    told = True
                    self._in_background(self._tell_abort(reply))
            if not told:
                reply.events.put_nowait(_Stop("interrupted", "the server ended the stream"))
        except ApiError as error:
            reply.events.put_nowait(_Stop("interrupted" if reply.first else "refused", str(error)))
        except ServerGoneError as error:
            reply.events.put_nowait(_Stop("interrupted", str(error)))
        finally:
            reply.ended.set()
            self._open -= 1

    # ---- accounts ----

    def load(self) -> Load:
        self._account()
        running = sum(reply.first for reply in self._replies.values())
        return msgspec.structs.replace(
            self._sums,
            running=running,
            queued=len(self._replies) - running,
            decode_iterations=math.ceil(self._iterations),
        )

    def _account(self) -> None:
        """Time until now: of decoding while any reply decodes, of prefill while any waits for its first token."""
        now = time.monotonic()
        span, self._at = now - self._at, now
        if self._paused or not self._replies:
            return
        decodes = any(reply.first for reply in self._replies.values())
        waits = any(not reply.first for reply in self._replies.values())
        self._sums = msgspec.structs.replace(
            self._sums,
            decode_s=self._sums.decode_s + (span if decodes else 0.0),
            prefill_s=self._sums.prefill_s + (span if waits else 0.0),
        )

    def _count(self, *, decoded: int, prefilled: int = 0) -> None:
        """Tokens. A token of a batch of n is one n-th of an iteration, since the server does not tell its iterations."""
        batch = max(1, sum(reply.first for reply in self._replies.values()))
        self._iterations += decoded / batch
        self._sums = msgspec.structs.replace(
            self._sums,
            decode_tokens=self._sums.decode_tokens + decoded,
            decode_batch_sum=self._sums.decode_batch_sum + decoded,
            prefill_tokens=self._sums.prefill_tokens + prefilled,
        )

    def _named(self, weight_version: str) -> PolicyVersion:
        return PolicyVersion(int(weight_version)) if weight_version.isdecimal() else self._version

    def _hold_against(self, reply: _Reply, spans: list[VersionSpan]) -> None:
        """The server's final account of versions against the last one that was streamed."""
        last = spans[-1].version
        if self._named(last) > self._version:
            log.error(f"{reply.rid}: tokens of version {last}, but {self._version} is loaded", action="sglang.versions")


def _last(offset: int, version: PolicyVersion, finish: str, reason: str) -> Tokens:
    return Tokens(offset=offset, tokens=[], logprobs=[], version=version, finish=finish, reason=reason)


def _end_of(ended: Ended) -> tuple[str, str]:
    """`finish_reason` in the worker's words."""
    if ended.type in ("stop", "length"):
        return ended.type, ""
    if ended.status_code is not None and 400 <= ended.status_code < 500:
        return "refused", ended.message or "refused by the server"
    return "interrupted", ended.message or ended.type
