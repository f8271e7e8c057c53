"""SGLang's HTTP surface as this engine uses it: one method a call, and what each version of SGLang must have for it.

Owns the HTTP session of one server. Every failure is an `ApiError` with the server's own words; a server that cannot be reached, or
goes away in the middle, is a `ServerGoneError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

import aiohttp
import msgspec

LOADS: Final = "/v1/loads"
NEEDED: Final = (
    "/abort_request",
    "/continue_generation",
    "/generate",
    "/model_info",
    "/pause_generation",
    "/ready",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/server_info",
    LOADS,
)
"""Without one of these a server cannot be driven."""
UPDATES: Final = {
    "disk": ("/update_weights_from_disk",),
    "tensor": ("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"),
    "distributed": (
        "/begin_weight_update",
        "/destroy_weights_update_group",
        "/end_weight_update",
        "/init_weights_update_group",
        "/update_weights_from_distributed",
    ),
}
"""And none of these, by `rollout.sglang.weights`."""
CHECKER: Final = "/weights_checker"
OPTIONAL: Final = {
    CHECKER: "updates of weights are believed without a look at the server's checksums",
    "/flush_cache": "prefixes of old weights stay in the cache until they are displaced; no new request finds them",
    "/pd_role_switch": "prefill and decode workers change roles by a relaunch",
}
"""What is done without one of these."""
TESTED: Final = "0.5.23"
CALL_S: Final = 60.0
LOAD_S: Final = 1800.0
"""Weights of a large model from a slow disk."""
MOST_LINE: Final = 1 << 24
"""Bytes of one event of a stream."""


class ApiError(Exception):
    """The server answered, and not well: call, status and its message."""


class ServerGoneError(Exception):
    """Nobody answers there, or not any more."""


class Ended(msgspec.Struct, frozen=True):
    """`finish_reason` of a reply."""

    type: str
    message: str | None = None
    status_code: int | None = None


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens `start .. end` of a reply come from these weights."""

    version: str
    start: int
    end: int


class Meta(msgspec.Struct, frozen=True):
    """What is read of `meta_info`. With `--incremental-streaming-output` its log-probabilities are those of the event's own tokens."""

    finish_reason: Ended | None = None
    weight_version: str = ""
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    weight_versions: list[VersionSpan] | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0


class Piece(msgspec.Struct, frozen=True):
    """One event of a stream."""

    meta_info: Meta
    output_ids: list[int] = []


class _Trouble(msgspec.Struct, frozen=True):
    message: str = ""


class _Failed(msgspec.Struct, frozen=True):
    error: _Trouble


class Api:
    """Calls to the server at `url`. Close it."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=MOST_LINE,
        )
        self._pieces = msgspec.json.Decoder(Piece)
        self._failures = msgspec.json.Decoder(_Failed)

    async def close(self) -> None:
        """Drop all connections."""
        await self._session.close()

    async def ready(self) -> bool:
        """Whether requests are taken now."""
        try:
            async with self._session.get(f"{self.url}/ready", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object there. Raises ApiError, ServerGoneError."""
        return await self._call("GET", path, None, CALL_S)

    async def post(self, path: str, *, within_s: float = CALL_S, **body: Any) -> dict[str, Any]:
        """The JSON answer; an empty object where the answer has no body. Raises ApiError, ServerGoneError."""
        return await self._call("POST", path, body, within_s)

    async def _call(self, method: str, path: str, body: Any, within_s: float) -> dict[str, Any]:
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=aiohttp.ClientTimeout(total=within_s)
            ) as response:
                data = await response.read()
        except TimeoutError:
            raise ServerGoneError(f"{path}: no answer within {within_s:g} s") from None
        except aiohttp.ClientError as error:
            raise ServerGoneError(f"{path}: {error}") from error
        if response.status != 200:
            raise ApiError(f"{path} answered {response.status}: {_text(data)}")
        try:
            return msgspec.json.decode(data, type=dict[str, Any]) if data else {}
        except msgspec.DecodeError:
            return {}

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        """Stream a reply's events. Raises ApiError where it is refused or fails, ServerGoneError where it breaks off."""
        try:
            async with self._session.post(f"{self.url}/generate", json=body) as response:
                if response.status != 200:
                    raise ApiError(f"/generate answered {response.status}: {_text(await response.read())}")
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    try:
                        yield self._pieces.decode(line[6:])
                    except msgspec.ValidationError:
                        raise ApiError(f"/generate: {self._reason(line[6:])}") from None
        except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
            raise ServerGoneError(f"/generate: {error or type(error).__name__}") from error

    def _reason(self, data: bytes) -> str:
        try:
            return self._failures.decode(data).error.message
        except msgspec.DecodeError:
            return _text(data)

    async def surface(self, weights: str) -> tuple[list[str], list[str]]:
        """What this server lacks: (needed calls, consequences of missing optional ones). `weights`: how they come to it.

        Raises ApiError, ServerGoneError.
        """
        described = await self.get("/openapi.json")
        paths: Any = described.get("paths", {})
        return [path for path in (*NEEDED, *UPDATES[weights]) if path not in paths], [
            f"{path}: {consequence}" for path, consequence in OPTIONAL.items() if path not in paths
        ]


def _text(data: bytes) -> str:
    """A server's words, cut short."""
    text = data.decode(errors="replace").strip()
    try:
        told: Any = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return text[:400]
    if isinstance(told, dict):
        inner: Any = told.get("error", told)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(inner, dict) and "message" in inner:
            return str(inner["message"])[:400]  # pyright: ignore[reportUnknownArgumentType]
    return text[:400]
