"""HTTP: sockets, keys, limits, errors, and which path is whose. The interfaces themselves are in `openai.py` and others.

aiohttp's low-level server: of aiohttp, uvicorn with httptools and Granian's embedded server it took the least CPU a request in
this loop (docs/gateway.md); it lives in the router's event loop, ends a handler when its client goes away, and speaks TLS.

Owns: the listening socket. Invariants: whatever a client sends, it gets an OpenAI-style body or a closed connection, and no
other client notices.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.hdrs import CONTENT_TYPE
from aiohttp.web_protocol import RequestHandler

from services.router.gateway.config import Config, digest_of, tls_context
from services.router.gateway.errors import ApiError, of_status
from services.router.gateway.metrics import Metrics
from services.router.gateway.sessions import KEY_PREFIX
from services.runtime.log import get_logger

SERVER: Final = "pearl"
KEEPALIVE_S: Final = 75.0
MOST_HEADER_BYTES: Final = 16384

JSON: Final = "application/json"
DONE: Final = b"data: [DONE]\n\n"
"""The last event of a stream."""

log = get_logger("gateway")


class Call:
    """One request that has arrived whole."""

    __slots__ = ("body", "key", "path", "request", "rest")

    def __init__(self, request: web.BaseRequest, path: str, rest: str, body: bytes, key: str) -> None:
        self.request = request
        self.path = path  # as routed: "/v1/sessions/{id}/reward"
        self.rest = rest  # what stands for {id}
        self.body = body
        self.key = key

    def header(self, name: str) -> str:
        """A header's value, "" without one."""
        return self.request.headers.get(name, "")


Handler = Callable[[Call], Awaitable[web.StreamResponse]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """`session_key`: a session's key opens it too; `open`: no key is asked for."""

    method: str
    path: str
    handler: Handler
    open: bool = False
    session_key: bool = True


def answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON answer. `Any`: whatever msgspec encodes."""
    head = {"Content-Type": JSON, "Server": SERVER}
    if headers:
        head.update(headers)
    return web.Response(body=msgspec.json.encode(body), status=status, headers=head)


def refusal(error: ApiError, *, close: bool = False) -> web.Response:
    """An error as HTTP."""
    response = answer(error.body, error.status, error.headers)
    if close:
        response.force_close()
    return response


class _Protocol(RequestHandler):
    """aiohttp's, with our errors for what is no HTTP, and a limit on how long the first request may take to begin."""

    latest: tuple[Any, Any] | None = (
        None  # of the last request its content, and the writer of its answer; Any: aiohttp's own
    )

    def __init__(self, manager: web.Server, receive_s: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._receive_s = receive_s
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._limit = asyncio.get_running_loop().call_later(self._receive_s, self._too_slow)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Also for bytes that are no HTTP request."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if status >= 500:
            log.error(f"{type(exc).__name__}: {exc}", action="gateway.error")
            error = of_status(status, "the gateway failed; its log says why")
        else:
            error = of_status(status, f"not an HTTP request: {message or exc}"[:300])
        return refusal(error, close=True)

    def eof_received(self) -> None:
        """The client sends no more. Where a request of it is not whole, say so before the connection is closed; where it is, the
        client counts as gone, since that looks the same and its workers' time is worth more."""
        if self._messages:  # the last of them has arrived last; nothing of ours has seen it yet
            partial = not self._messages[-1][1].is_eof()
        elif self.latest is not None:
            content, writer = self.latest
            partial = not content.is_eof() and writer.output_size == 0
        else:
            partial = True
        if partial:
            self._say("400 Bad Request", of_status(400, "the request ended before it was whole"))
        super().eof_received()

    def _too_slow(self) -> None:
        if self.latest is not None:
            return
        self._say("408 Request Timeout", of_status(408, "no request came in time"))
        self.force_close()

    def _say(self, status: str, error: ApiError) -> None:
        """An answer outside of any handler; the connection is closed after it."""
        if self.transport is None:
            return
        body = msgspec.json.encode(error.body)
        head = f"HTTP/1.1 {status}\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)


class _Server(web.Server):
    """Makes protocols of ours and limits bodies."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], config: Config) -> None:
        super().__init__(handler, request_factory=self._request, handler_cancellation=True)
        self._config = config
        self._running_loop = asyncio.get_running_loop()

    def __call__(self) -> RequestHandler:
        return _Protocol(
            self,
            self._config.receive_s,
            loop=self._running_loop,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            max_line_size=MOST_HEADER_BYTES,
            max_field_size=MOST_HEADER_BYTES,
            lingering_time=1.0,
        )

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        # Any: aiohttp's own types, which only it makes
        if isinstance(protocol, _Protocol):
            protocol.latest = payload, writer
        return web.BaseRequest(
            message, payload, protocol, writer, task, self._running_loop, client_max_size=self._config.max_body_bytes
        )


class HttpServer:
    """Serves endpoints until stopped."""

    def __init__(
        self,
        config: Config,
        endpoints: tuple[Endpoint, ...],
        metrics: Metrics,
        knows_session_key: Callable[[str], bool],
    ) -> None:
        self.port = 0
        self._config = config
        self._metrics = metrics
        self._knows_session_key = knows_session_key
        self._exact: dict[str, dict[str, Endpoint]] = {}
        self._prefixed: list[tuple[str, str, dict[str, Endpoint]]] = []
        self._runner: web.ServerRunner | None = None
        for endpoint in endpoints:
            self._add(endpoint)

    def _add(self, endpoint: Endpoint) -> None:
        before, mark, after = endpoint.path.partition("{id}")
        if not mark:
            self._exact.setdefault(endpoint.path, {})[endpoint.method] = endpoint
            return
        for known_before, known_after, methods in self._prefixed:
            if (known_before, known_after) == (before, after):
                methods[endpoint.method] = endpoint
                return
        self._prefixed.append((before, after, {endpoint.method: endpoint}))

    async def start(self) -> None:
        """Listen. Raises OSError where the port is taken, ConfigError for TLS files that are none."""
        context = tls_context(self._config)
        self._runner = web.ServerRunner(_Server(self._handle, self._config), shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.address, self._config.port, ssl_context=context, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """End connections; handlers that run get a second."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, rest, methods = self._route(request.path)
        try:
            endpoint = methods.get(request.method) or (methods.get("GET") if request.method == "HEAD" else None)
            if endpoint is None:
                raise self._no_endpoint(request, methods)
            key = self._check_key(request, endpoint)
            body = await self._body(request)
            response = await endpoint.handler(Call(request, path, rest, body, key))
        except ApiError as error:
            response = refusal(error, close=error.status in (408, 413))
            if error.status == 405:
                response.headers["Allow"] = ", ".join(sorted(methods))
        except web.HTTPException as error:
            response = refusal(of_status(error.status, error.text or error.reason), close=True)
        except ConnectionError:
            self._metrics.cancelled += 1
            raise
        except asyncio.CancelledError:
            self._metrics.cancelled += 1
            raise
        self._metrics.answers[path, response.status] += 1
        return response

    def _route(self, path: str) -> tuple[str, str, dict[str, Endpoint]]:
        methods = self._exact.get(path)
        if methods is not None:
            return path, "", methods
        for before, after, found in self._prefixed:
            rest = path[len(before) : len(path) - len(after)]
            if path.startswith(before) and path.endswith(after) and rest and "/" not in rest:
                return f"{before}{{id}}{after}", rest, found
        return "other", "", {}

    @staticmethod
    def _no_endpoint(request: web.BaseRequest, methods: Mapping[str, Endpoint]) -> ApiError:
        if methods:
            return of_status(405, f"{request.path} takes {', '.join(sorted(methods))}, not {request.method}"[:300])
        return ApiError(404, f"there is no {request.path[:200]} here", code="unknown_url")

    def _check_key(self, request: web.BaseRequest, endpoint: Endpoint) -> str:
        """The key that was given; "" where none is needed and none was. Raises ApiError."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "")
        if endpoint.open:
            return key
        if key.startswith(KEY_PREFIX):
            if endpoint.session_key and self._knows_session_key(key):
                return key
            if endpoint.session_key:
                raise ApiError(401, "this session key is not known here", code="invalid_api_key")
        if not self._config.keys:
            return key
        digest = digest_of(key)
        if not key or not any([hmac.compare_digest(digest, known) for known in self._config.keys]):
            raise ApiError(401, "give a valid key: Authorization: Bearer KEY", code="invalid_api_key")
        return key

    async def _body(self, request: web.BaseRequest) -> bytes:
        if not request.can_read_body:
            return b""
        if request.content.is_eof() and request.headers.get(CONTENT_TYPE) == JSON:  # the usual, without looking twice
            return self._all_of(request)
        length = request.content_length
        if length is not None and length > self._config.max_body_bytes:
            raise self._too_large()
        if request.content_type not in (
            JSON,
            "application/octet-stream",
            "text/plain",
            "application/x-www-form-urlencoded",
        ):
            raise of_status(415, f"send {JSON}, not {request.content_type[:80]}")
        try:
            if request.content.is_eof():
                return self._all_of(request)
            async with asyncio.timeout(self._config.receive_s):
                return await request.read()
        except TimeoutError:
            raise of_status(408, "the request did not arrive in time") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except web.RequestPayloadError as error:
            raise of_status(400, f"the body cannot be read: {error}"[:300]) from error

    def _all_of(self, request: web.BaseRequest) -> bytes:
        """A body that is there to its end."""
        body = request.content.read_nowait()
        if len(body) > self._config.max_body_bytes:  # it came in pieces of which none told of the others
            raise self._too_large()
        return body

    def _too_large(self) -> ApiError:
        most = self._config.max_body_bytes
        return ApiError(413, f"a body has at most {most} bytes (gateway.max_body_bytes)", code="body_too_large")


class EventStream:
    """A response of server-sent events that begins with the first of them."""

    def __init__(self, call: Call, send_s: float) -> None:
        self.response: web.StreamResponse | None = None
        self._call = call
        self._send_s = send_s

    async def send(self, data: bytes) -> None:
        """Send whole events. Raises ConnectionError where the client is gone or takes nothing."""
        if self.response is None:
            self.response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream; charset=utf-8",
                    "Cache-Control": "no-cache",
                    "Server": SERVER,
                }
            )
            await self.response.prepare(self._call.request)
        try:
            async with asyncio.timeout(self._send_s):
                await self.response.write(data)
        except TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None

    async def end(self) -> web.StreamResponse:
        """After the last event."""
        assert self.response is not None
        await self.response.write_eof()
        return self.response


def event(body: Any) -> bytes:
    """One event. `Any`: whatever msgspec encodes."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
