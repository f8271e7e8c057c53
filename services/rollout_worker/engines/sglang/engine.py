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
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

from messages.ids import PolicyVersion, Role
from services.jobfile import RolloutSection
from services.rollout_worker.engines.base import EngineError, GenerateSpec, Load, Tokens
from services.rollout_worker.engines.sglang.api import CHECKER, LOAD_S, LOADS, Api, ApiError, ServerGoneError
from services.rollout_worker.engines.sglang.push import PushError, push
from services.rollout_worker.engines.sglang.reply import NO_WEIGHTS, Served
from services.rollout_worker.engines.sglang.rooms import Rooms
from services.rollout_worker.engines.sglang.server import MODES, Server
from services.rollout_worker.engines.sglang.streams import Streams
from services.rollout_worker.engines.sglang.weights import (
    Held,
    WeightFileError,
    mismatch,
    sources,
    stored_type,
    sums_of,
)
from services.runtime.log import get_logger

QUIET_S: Final = 0.1
"""Before weights change, streams have been silent for so long: tokens of the old ones have left the server."""
DRAIN_S: Final = 30.0
MEMORY_TAGS: Final = ("weights", "kv_cache")

log = get_logger("rollout_worker")


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
        self._rollout = rollout
        self._server = Server(rollout, model, device, address, log_file, adopt)
        self._rooms = Rooms(address, self._server.bootstrap_port, room_s)
        self._now = Served(first_role)
        self._streams = Streams(rollout, self._server.api, self._rooms, room_s, self._now)
        self._snapshot = ""
        self._model = model
        self._fresh = False  # the server has what it was launched with
        self._held: Held | None = None  # what it was last seen to have; None: of an adopted one, at first
        self._verifies = rollout.sglang.verify_weights
        self._dtype = ""
        self._ranks = rollout.gpus_per_worker
        self._released = False

    # ---- life ----

    @property
    def version(self) -> PolicyVersion:
        return self._now.version

    @property
    def role(self) -> Role:
        """What it serves as."""
        return self._now.role

    @property
    def endpoint(self) -> str:
        return self._rooms.endpoint

    @property
    def _api(self) -> Api:
        return self._server.api

    async def start(self) -> None:
        try:
            await self._rooms.start()
            await self._server.start(self._now.role)
            await self._look()
        except EngineError:
            await self.stop()
            raise

    async def stop(self) -> None:
        await self._rooms.stop()
        await self._streams.close()
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
        self._now.context_limit = min([*known, self._rollout.kv_cache_tokens])
        most = info.get("max_req_input_len")
        self._now.input_limit = min(self._now.context_limit, most) if isinstance(most, int) else self._now.context_limit
        if self._server.adopted:
            mode = described.get("disaggregation_mode", "null")
            self._now.role = next((role for role, name in MODES.items() if name == mode), Role.COLOCATED)
            port = info.get("disaggregation_bootstrap_port")
            self._rooms.announce(port if isinstance(port, int) else 0)
            if info.get("incremental_streaming_output") is not True:
                raise EngineError(f"the adopted server at {self._api.url} must run with --incremental-streaming-output")

    async def set_role(self, role: Role) -> None:
        if role not in MODES:
            raise EngineError(f"no engine serves as {role}")
        if self._streams.replies:
            raise EngineError(f"{len(self._streams.replies)} requests run: drain before a change of role")
        if role is self._now.role:
            return
        await self._idle()
        in_place = Role.COLOCATED not in (role, self._now.role) and self._server.switches
        if in_place:
            await self._switch(role)
        else:
            version, snapshot = self._now.version, self._snapshot
            await self._server.relaunch(role)
            await self._look()
            self._now.version, self._snapshot = NO_WEIGHTS, ""
            if snapshot:
                self._now.role = role
                await self.load_snapshot(snapshot, version)
        self._now.role = role

    async def _switch(self, role: Role) -> None:
        body: dict[str, Any] = {"new_role": MODES[role]}
        if role is Role.DECODE:
            body["decode_cuda_graph_memory_gb"] = self._rollout.sglang.decode_cuda_graph_gb
        await self._flush()  # a page that an aborted request has leaked would be counted against the new role
        try:
            await self._api.post("/pd_role_switch", within_s=LOAD_S, **body)
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"from {self._now.role} to {role}: {error}") from error

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
                    keep_pause=bool(self._now.paused),
                )
            else:
                await self._push(directory, version)
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"version {version} from {directory}: {error}") from error
        if self._now.paused == "retract" or not self._streams.replies:
            await self._flush()  # else they go on with theirs, see `extra_key`
        if self._verifies:
            await self._verify(directory, version)
        self._now.version, self._snapshot = version, directory
        for reply in self._streams.replies.values():
            if reply.in_transfer:
                self._streams.end_soon(reply, f"weights of version {version} came")

    async def _push(self, directory: str, version: PolicyVersion) -> None:
        """Several calls, between which nothing may be generated: weights are of two versions then."""
        if not self._now.paused:
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
            if not self._now.paused:
                await self._api.post("/continue_generation")

    def _distrust(self, reason: str) -> None:
        """Nothing more is served with what the server holds, until an update has come."""
        self._now.version, self._snapshot = NO_WEIGHTS, ""
        self._streams.interrupt(reason)

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
        if self._streams.replies:
            raise EngineError(f"{len(self._streams.replies)} requests run: drain before memory is released")
        before = self.occupied()
        await self._idle()
        try:
            await self._api.post("/release_memory_occupation", within_s=LOAD_S, tags=list(MEMORY_TAGS))
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"release: {error}") from error
        self._released = True
        self._now.version, self._snapshot = NO_WEIGHTS, ""
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
            self._streams.open
            + moving
            + sum(int(each["num_running_reqs"]) + int(each["num_waiting_reqs"]) for each in loads)
        )

    # ---- pauses ----

    async def pause(self, mode: str) -> None:
        if mode not in ("abort", "retract", "in_place"):
            raise EngineError(f"pause mode {mode!r}: use abort, retract or in_place")
        try:
            await self._api.post("/pause_generation", mode=mode)
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"pause: {error}") from error
        self._now.paused = mode
        while time.monotonic() - self._streams.silent_since < QUIET_S:  # noqa: ASYNC110
            await asyncio.sleep(QUIET_S / 4)

    async def resume(self) -> None:
        self._now.paused = ""
        try:
            await self._api.post("/continue_generation")
        except (ApiError, ServerGoneError) as error:
            raise EngineError(f"resume: {error}") from error

    async def abort(self, request: str | None = None) -> int:
        return self._streams.abort(request)

    def generate(self, spec: GenerateSpec) -> AsyncGenerator[Tokens, None]:
        return self._streams.generate(spec)

    def load(self) -> Load:
        return self._streams.load()
