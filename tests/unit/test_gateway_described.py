"""The gateway against its own description: whatever fits it, or does not, is answered as it says (Schemathesis)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from services.router.gateway.openapi import ENDPOINTS, description
from services.router.gateway.service import endpoints_of
from tests.gateway_world import KEY, World, chat

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
schema = schemathesis.openapi.from_dict(description())


class Live:
    """A gateway in a thread of its own, for clients that block."""

    def __init__(self) -> None:
        self.url = ""
        self.world: World
        self._up = threading.Event()
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self.world = World(queue_s=2.0, receive_s=2.0)
        async with self.world as world:
            self.url = world.gateway.url
            self._up.set()
            await self._stop.wait()
            await world.post("/v1/chat/completions", chat("Still there?"))
            assert world.gateway.generation.in_flight == 0

    def __enter__(self) -> Live:
        self._thread.start()
        assert self._up.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live() as found:
        yield found


def test_every_endpoint_is_described() -> None:
    none: list = [type("Any", (), {"__getattr__": lambda self, name: None})() for _ in range(4)]
    served = {(endpoint.method.lower(), endpoint.path) for endpoint in endpoints_of(*none)}
    assert served == {(method, path) for method, path, *_ in ENDPOINTS}


@schema.parametrize()
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_answers_are_as_described(case: schemathesis.Case, live: Live) -> None:
    if case.path == "/v1/sessions" and isinstance(case.body, dict):
        case.body["wait_s"] = 0
    case.call_and_validate(base_url=live.url, headers={"Authorization": f"Bearer {KEY}"}, checks=CHECKS, timeout=20)
