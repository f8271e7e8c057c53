"""A stand-in for an SGLang server: its HTTP surface as services/rollout_worker/engines/sglang uses it, over made-up tokens.

What it answers was copied from a real 0.5.23 (fields, statuses, order of events), so that the engine's own logic can be tested without
one. With PEARL_SGLANG_PYTHON pytest runs the same tests on real servers. Tokens depend on the version, the seed where there is a temperature, and the position alone.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.numpy import load_file

from services.rollout_worker.engines.emulated import made_up
from services.rollout_worker.engines.sglang.api import NEEDED, OPTIONAL, UPDATES

VERSION = "0.5.23"
GROUP = ("/init_weights_update_group", "/destroy_weights_update_group")
TRANSFERS: dict[tuple[int, int], dict[str, asyncio.Event]] = {}
"""(bootstrap port, room) -> "here": the decode side came, "sent": the KV cache is over."""


class StandIn:
    """One server. `slow_s`: per decoded token, and per 8 tokens of prefill. `limit`: tokens of a context."""

    def __init__(self, *, slow_s: float = 0.0, limit: int = 65536, running: int = 64, mode: str = "null") -> None:
        self.mode = mode
        self.version = "default"
        self.released = False
        self.url = ""
        self.requests: dict[str, asyncio.Event] = {}  # rid -> it is to be aborted
        self.bootstrap_port = 0
        self.sins: list[str] = []  # what must not be done to a real server
        self.release = VERSION
        self.folder = ""  # what it holds the weights of
        self.calls: list[str] = []  # of updates from memory, in order
        self.fails = ""  # the call that does
        self.tensors: dict[str, Any] = {}  # what such updates have brought
        self.ignores_updates = False  # it says that it has loaded what it has not
        self._slow_s = slow_s
        self._moving = 0  # requests whose KV cache is on its way
        self._limit = limit
        self._slots = asyncio.Semaphore(running)
        self._going = asyncio.Event()
        self._going.set()
        self._cached: dict[str, set[tuple[int, ...]]] = {}
        self.paths = [*NEEDED, *OPTIONAL, *(path for paths in UPDATES.values() for path in paths)]
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Its URL."""
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/ready", self._ready),
                web.get("/openapi.json", self._openapi),
                web.get("/server_info", self._server_info),
                web.get("/model_info", self._model_info),
                web.get("/v1/loads", self._loads),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/update_weights_from_disk", self._update),
                *(web.post(path, self._pushed) for path in {*UPDATES["tensor"], *UPDATES["distributed"]}),
                web.post("/release_memory_occupation", self._release),
                web.post("/resume_memory_occupation", self._resume),
                web.post("/pd_role_switch", self._switch),
                web.post("/weights_checker", self._checker),
                web.post("/flush_cache", self._flush),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.bootstrap_port = port  # any number that names this server
        self.url = f"http://{host}:{port}"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            sins, self.sins = self.sins, []
            for abort in self.requests.values():
                abort.set()
            await self._runner.cleanup()
            self.sins = sins
            self._runner = None

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {} for path in self.paths}})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": self.release,
                "dtype": "float32",
                "max_total_num_tokens": self._limit,
                "max_req_input_len": self._limit,
                "incremental_streaming_output": True,
                "disaggregation_bootstrap_port": self.bootstrap_port,
                "internal_states": [{}],
            }
        )

    async def _loads(self, request: web.Request) -> web.Response:
        waiting = self._moving if self.mode == "decode" else 0
        inflight = self._moving if self.mode == "prefill" else 0
        load = {
            "num_running_reqs": len(self.requests) - self._moving,
            "num_waiting_reqs": waiting,
            "disaggregation": {"prefill_inflight_queue_reqs": inflight},
        }
        return web.json_response({"version": self.release, "loads": [load]})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version, "disaggregation_mode": self.mode})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        if rid in self.requests:
            self.requests[rid].set()
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        self._going.clear()
        if (await request.json())["mode"] == "abort":
            for abort in self.requests.values():
                abort.set()
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self._going.set()
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not await asyncio.to_thread((Path(body["model_path"]) / "config.json").is_file):
            return web.json_response({"success": False, "message": f"no model in {body['model_path']}"}, status=400)
        self.version = body["weight_version"]
        if not self.ignores_updates:
            self.folder = body["model_path"]
        if body["flush_cache"] and not self._flushed():
            message = (
                "Weights were updated, but the cache was not flushed because requests are still running or queued."
            )
            return web.json_response({"success": False, "message": message}, status=400)
        return web.json_response({"success": True, "message": "ok"})

    async def _pushed(self, request: web.Request) -> web.Response:
        """A call of an update from memory. Of tensors it takes what they are; a group it does not join."""
        call, body = request.path, await request.json() if request.can_read_body else {}
        self.calls.append(call)
        if self._going.is_set() and call not in GROUP:
            self.sins.append(f"{call} while it generates: tokens would come of weights of two versions")
        if call == self.fails:
            return web.json_response({"success": False, "message": "it fails"}, status=400)
        if call == "/update_weights_from_tensor":
            (handle,) = body["serialized_named_tensors"]
            for name, tensor in pickle.loads(base64.b64decode(handle)):
                self.tensors[name] = tensor.clone().numpy()
            assert body["flush_cache"] is False
            self.version = body.get("weight_version", self.version)
        return web.json_response({"success": True, "message": "ok"})

    def _flushed(self) -> bool:
        """A pause takes those that decode from the batch; those whose context is on its way stay."""
        if self.requests and (self._going.is_set() or self._moving):
            return False
        self._cached.clear()
        return True

    async def _flush(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._flushed() else 400, text="Flush cache failed.\n")

    async def _checker(self, request: web.Request) -> web.Response:
        held = self.tensors or (await asyncio.to_thread(held_in, self.folder) if self.folder else {})
        checksums = checksums_of(held)
        rank = {"checksums": checksums, "per_gpu_checksum": "", "parallelism_info": {"role": "target"}}
        return web.json_response({"success": True, "message": "Success.", "ranks": [rank]})

    async def _release(self, request: web.Request) -> web.Response:
        if self.requests:
            self.sins.append("released while busy: a real server exits")
        self.released = True
        return web.Response()

    async def _resume(self, request: web.Request) -> web.Response:
        self.released = False
        return web.Response()

    async def _switch(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["new_role"] == "decode" and "decode_cuda_graph_memory_gb" not in body:
            return web.json_response({"error": {"message": "decode_cuda_graph_memory_gb is required"}}, status=400)
        if self.requests:
            text = "instance is not idle; drain all requests before switching"
            return web.json_response({"error": {"message": text}}, status=400)
        self.mode = body["new_role"]
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids, sampling, rid = body["input_ids"], body["sampling_params"], body["rid"]
        if len(ids) >= self._limit:
            text = f"The input ({len(ids)} tokens) is longer than the model's context length ({self._limit} tokens)."
            return web.json_response({"error": {"message": text}}, status=400)
        abort = self.requests[rid] = asyncio.Event()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            async with self._slots:
                await self._reply(response, body, ids, sampling, abort)
            await response.write(b"data: [DONE]\n\n")
        finally:
            del self.requests[rid]
        return response

    async def _reply(
        self,
        response: web.StreamResponse,
        body: dict[str, Any],
        ids: list[int],
        sampling: dict[str, Any],
        abort: asyncio.Event,
    ) -> None:
        spans: list[dict[str, Any]] = []
        made = 0

        async def tell(tokens: list[int], finish: dict[str, Any] | None) -> None:
            for _ in tokens:
                if not spans or spans[-1]["version"] != self.version:
                    spans.append({"version": self.version, "start": made, "end": made})
                spans[-1]["end"] += 1
            meta = {
                "id": body["rid"],
                "finish_reason": finish,
                "weight_version": self.version,
                "output_token_logprobs": [[-1.0, token, None] for token in tokens],
                "cached_tokens": cached,
                "completion_tokens": made + len(tokens),
            }
            if finish is not None:
                meta["weight_versions"] = spans
            piece = json.dumps({"output_ids": tokens, "meta_info": meta})
            await response.write(f"data: {piece}\n\n".encode())

        cached = self._prefix(body["extra_key"], ids)
        aborted = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        if not await self._context(body, ids, abort, cached):
            return await tell([], aborted)
        for index in range(sampling["max_new_tokens"]):
            if not await self._moment(self._slow_s if index else 0.0, abort):
                return await tell([], aborted)
            seed = sampling.get("sampling_seed", 0) if sampling["temperature"] else 0
            token = made_up(seed + ids[0], len(ids) + index)
            stopped = token in sampling["stop_token_ids"] and not sampling["ignore_eos"]
            finish = None
            if stopped:
                finish = {"type": "stop", "matched": token}
            elif index + 1 == sampling["max_new_tokens"]:
                finish = {"type": "length", "length": index + 1}
            await tell([token], finish)
            made += 1
            if finish is not None:
                return None
        return None

    async def _context(self, body: dict[str, Any], ids: list[int], abort: asyncio.Event, cached: int) -> bool:
        """Compute it, or get it from the other side. False: aborted."""
        key = (body.get("bootstrap_port", 0), body.get("bootstrap_room", -1))
        if self.mode != "decode" and not await self._moment(self._slow_s * (len(ids) - cached) / 8, abort):
            return False
        if self.mode == "null":
            return True
        self._moving += 1
        try:
            return await self._transfer(key, abort)
        finally:
            self._moving -= 1

    async def _transfer(self, key: tuple[int, int], abort: asyncio.Event) -> bool:
        """Until the other side has done its part. False: aborted."""
        meeting = TRANSFERS.setdefault(key, {"here": asyncio.Event(), "sent": asyncio.Event()})
        mine, other = ("sent", "here") if self.mode == "prefill" else ("here", "sent")
        meeting[mine].set()
        waits = [asyncio.ensure_future(meeting[other].wait()), asyncio.ensure_future(abort.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if abort.is_set() and not meeting[other].is_set() and self.mode == "decode":
            self.sins.append("aborted while its KV cache is on its way: a real server may corrupt pages")
        return not abort.is_set()

    async def _moment(self, seconds: float, abort: asyncio.Event) -> bool:
        """Time passes, not while paused. False: aborted."""
        if seconds:
            await asyncio.sleep(seconds)
        while not self._going.is_set() and not abort.is_set():
            waits = [asyncio.ensure_future(self._going.wait()), asyncio.ensure_future(abort.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        return not abort.is_set()

    def _prefix(self, key: str, ids: list[int]) -> int:
        held = self._cached.setdefault(key, set())
        cut = next((length for length in range(len(ids) - 1, 0, -1) if tuple(ids[:length]) in held), 0)
        held.add(tuple(ids[:-1]))
        return cut


def held_in(folder: str) -> dict[str, Any]:
    """The tensors of a snapshot."""
    found: dict[str, Any] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found.update(load_file(file))
    return found


def checksums_of(tensors: dict[str, Any]) -> dict[str, str]:
    """As a server on CPUs makes them: q, k and v are one tensor there, and so are gate and up."""
    held = dict(tensors)
    parts: dict[str, list[bytes]] = {}
    for fused, names in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        for name in names:
            for tensor in [each for each in held if f".{name}." in each]:
                parts.setdefault(tensor.replace(name, fused), []).append(held.pop(tensor).tobytes())
    parts |= {name: [tensor.tobytes()] for name, tensor in held.items()}
    return {name: hashlib.sha256(b"".join(each)).hexdigest()[:16] for name, each in parts.items()}
