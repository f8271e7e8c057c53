"""One gateway: its parts put together, in the process and event loop of a router.

Owns: a connection to the bus as user "gateway", an edge, an HTTP server, and `<run>/gateway-<index>.json`, which says where it
listens. Never decides where requests run: it asks the router beside it. Driven by HTTP clients, token chunks, the role table.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator

import msgspec
from aiohttp import web

from services.connect import connect
from services.edge.request import AskRouter, RequestEdge, TableReplica, TellRouter
from services.jobfile import ConfigError, JobFile
from services.router.gateway.config import Config, digest_of
from services.router.gateway.generation import Generation
from services.router.gateway.metrics import Metrics
from services.router.gateway.openai import OpenAI
from services.router.gateway.openapi import description
from services.router.gateway.server import Call, Endpoint, HttpServer, answer
from services.router.gateway.session_api import SessionApi
from services.router.gateway.sessions import session_of
from services.router.gateway.sglang import SGLang
from services.router.gateway.trajectories import Trajectories
from services.router.gateway.vocabulary import Vocabulary
from services.runtime.bus import Bus
from services.runtime.clock import Clock, now_ms
from services.runtime.lifecycle import collect_less
from services.runtime.log import get_logger

log = get_logger("gateway")


class Gateway:
    """One instance on one bus. `start`, then `stop`; `port` is known in between."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        replica: TableReplica,
        vocabulary: Vocabulary,
        *,
        ask_router: AskRouter | None = None,
        tell_router: TellRouter | None = None,
        clock: Clock = now_ms,
    ) -> None:
        instance = f"gw{secrets.token_hex(4)}"
        self.config = config
        self.metrics = Metrics()
        self.edge = RequestEdge(
            bus,
            config.job,
            instance,
            silence_ms=config.silence_ms,
            replica=replica,
            ask_router=ask_router,
            tell_router=tell_router,
        )
        self.generation = Generation(config, self.edge, replica, vocabulary, self.metrics)
        self.trajectories = Trajectories(config, bus, instance, clock, self.generation.abort_turns)
        self.server = HttpServer(
            config,
            endpoints_of(
                OpenAI(config, self.generation, vocabulary, self.trajectories),
                SGLang(config, self.generation, vocabulary, self.trajectories),
                SessionApi(self.trajectories),
                self,
            ),
            self.metrics,
            self._knows_session_key,
        )
        self._keeper: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.server.port

    @property
    def url(self) -> str:
        """Where its clients find it."""
        address = f"[{self.config.address}]" if ":" in self.config.address else self.config.address
        return f"{'https' if self.config.tls is not None else 'http'}://{address}:{self.port}"

    async def start(self) -> None:
        """Serve. Raises ConfigError where the port is taken."""
        await self.edge.start()
        try:
            await self.server.start()
        except OSError as error:
            raise ConfigError(
                f"gateway.bind: cannot listen on {self.config.address}:{self.config.port}: {error}"
            ) from error
        self._keeper = asyncio.create_task(self.trajectories.keep(), name="gateway-sessions")
        log.info(f"listening on {self.url}", action="gateway.started")

    async def stop(self) -> None:
        """Close connections, give tasks back."""
        await self.server.stop()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        await self.trajectories.stop()
        await self.edge.stop()
        sessions = self.trajectories.book
        text = f"{sessions.rewarded} of {sessions.opened} sessions rewarded, {sessions.abandoned} abandoned"
        log.info(text, action="gateway.stopped")

    def _knows_session_key(self, key: str) -> bool:
        return self.trajectories.book.knows(session_of(key), digest_of(key))

    # --- about itself

    async def health(self, call: Call) -> web.StreamResponse:
        """GET /health: 200 while it listens, whether workers serve or not."""
        return answer({"status": "ok", "workers": self.generation.serving, "version": self.generation.policy_version})

    async def ready(self, call: Call) -> web.StreamResponse:
        """GET /ready, /health_generate: 200 while some worker serves, else 503."""
        serving = self.generation.serving
        return answer({"status": "ok" if serving else "no worker", "workers": serving}, 200 if serving else 503)

    async def show_metrics(self, call: Call) -> web.StreamResponse:
        """GET /metrics"""
        book = self.trajectories.book
        gauges = {
            "in_flight": self.generation.in_flight,
            "workers": self.generation.serving,
            "policy_version": self.generation.policy_version,
            "sessions_open": len(book),
            "sessions_opened": book.opened,
            "sessions_rewarded": book.rewarded,
            "sessions_abandoned": book.abandoned,
            "late_chunks": self.edge.late_chunks,
        }
        return web.Response(text=self.metrics.text(gauges), content_type="text/plain")

    async def describe(self, call: Call) -> web.StreamResponse:
        """GET /openapi.json"""
        return answer(description())


def endpoints_of(openai: OpenAI, sglang: SGLang, sessions: SessionApi, gateway: Gateway) -> tuple[Endpoint, ...]:
    """Every path."""
    return (
        Endpoint(method="POST", path="/v1/chat/completions", handler=openai.chat),
        Endpoint(method="POST", path="/v1/completions", handler=openai.completions),
        Endpoint(method="GET", path="/v1/models", handler=openai.models),
        Endpoint(method="GET", path="/v1/models/{id}", handler=openai.model),
        Endpoint(method="POST", path="/generate", handler=sglang.generate),
        Endpoint(method="POST", path="/abort_request", handler=sglang.abort, session_key=False),
        Endpoint(method="GET", path="/model_info", handler=sglang.model_info),
        Endpoint(method="GET", path="/get_model_info", handler=sglang.model_info),
        Endpoint(method="GET", path="/workers", handler=sglang.workers),
        Endpoint(method="GET", path="/v1/loads", handler=sglang.loads),
        Endpoint(method="POST", path="/v1/sessions", handler=sessions.open, session_key=False),
        Endpoint(method="GET", path="/v1/sessions/{id}", handler=sessions.show),
        Endpoint(method="DELETE", path="/v1/sessions/{id}", handler=sessions.abandon),
        Endpoint(method="GET", path="/v1/sessions/{id}/trajectory", handler=sessions.trajectory),
        Endpoint(method="POST", path="/v1/sessions/{id}/reward", handler=sessions.reward),
        Endpoint(method="GET", path="/health", handler=gateway.health, open=True),
        Endpoint(method="GET", path="/ready", handler=gateway.ready, open=True),
        Endpoint(method="GET", path="/health_generate", handler=gateway.ready, open=True),
        Endpoint(method="GET", path="/metrics", handler=gateway.show_metrics, session_key=False),
        Endpoint(method="GET", path="/openapi.json", handler=gateway.describe, open=True),
    )


@contextlib.asynccontextmanager
async def serving(
    job: JobFile, index: int, replica: TableReplica, ask_router: AskRouter, tell_router: TellRouter | None = None
) -> AsyncGenerator[Gateway]:
    """A gateway for as long as the block runs. Raises ConfigError, BusUnavailable."""
    config = Config.of(job, index)
    vocabulary = await asyncio.to_thread(Vocabulary.load, job)
    bus = await connect(job, "gateway")
    gateway = Gateway(config, bus, replica, vocabulary, ask_router=ask_router, tell_router=tell_router)
    try:
        await gateway.start()
        collect_less()
        told = job.gateway_file(index)
        told.parent.mkdir(parents=True, exist_ok=True)
        told.write_bytes(msgspec.json.encode({"url": gateway.url, "model": config.model, "pid": os.getpid()}))
        try:
            yield gateway
        finally:
            told.unlink(missing_ok=True)
            await gateway.stop()
    finally:
        await bus.close()
