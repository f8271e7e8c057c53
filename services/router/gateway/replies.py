"""What both interfaces share: replies, alone or as a session's next turn, and what requests say about them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from services.edge.request import Interruption
from services.router.gateway.errors import ApiError
from services.router.gateway.generation import Choice, Generation, Sampling, spans_of
from services.router.gateway.server import Call
from services.router.gateway.sessions import NO_PARENT, SESSION_ID, Asked, Session, Turn, session_of
from services.router.gateway.trajectories import Trajectories


class Replies:
    """Runs replies. Raises ApiError."""

    def __init__(self, generation: Generation, trajectories: Trajectories) -> None:
        self._generation = generation
        self._trajectories = trajectories

    def session(self, call: Call) -> Session | None:
        """The open session that a key or a header names. Clients also send names of their own there, which are no session's."""
        header = call.header("X-Session-Id")
        named = session_of(call.key) or (header if SESSION_ID.fullmatch(header) else "")
        return self._trajectories.book.find(named) if named else None

    def stopped(self, session: Session | None) -> None:
        """A request of a session has ended, with a turn or without."""
        if session is not None:
            session.stopped(self._trajectories.now_ms())

    async def plain(
        self, choice: Choice, prompt: list[int], sampling: Sampling, *, request: str, affinity: str
    ) -> None:
        """A reply outside of any session."""
        await self._generation.run(
            choice, prompt, sampling, request=request, session=affinity, on_interruption=self._count
        )

    async def turn(
        self,
        choice: Choice,
        prompt: list[int],
        sampling: Sampling,
        session: Session,
        asked: Asked,
        digest: Callable[[], bytes] | None = None,
    ) -> None:
        """A session's next turn, which it is before its client sees the end of it. `digest`: of the chat with the reply."""

        async def journal(interruption: Interruption) -> None:
            await self._generation.count_interruption(interruption)
            await self._trajectories.interrupted(session, interruption)

        request = session.request_id(asked)
        reply = await self._generation.run(
            choice,
            prompt,
            sampling,
            request=request,
            session=session.trajectory,
            on_interruption=journal,
            last_worker=session.turns[asked.parent].worker if asked.parent != NO_PARENT else "",
        )
        turn = Turn.of(asked, request, reply, choice.text.text, self._trajectories.now_ms())
        session.took(turn, digest() if digest is not None else b"")
        await self._trajectories.tell(session, turn, reply)

    async def _count(self, interruption: Interruption) -> None:
        await self._generation.count_interruption(interruption)
        await self._trajectories.interrupted_plain(interruption)


async def all_of(works: Sequence[Awaitable[None]]) -> None:
    """Until each is done; the first error ends the others."""
    if len(works) == 1:
        await works[0]
        return
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- what requests say


def affinity_of(routing: str) -> str:
    """A name of any client's as one that a router takes."""
    return "http-" + hashlib.blake2b(routing.encode("utf-8", "replace"), digest_size=16).hexdigest()


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def versions_of(call: Call, oldest: int | None, exact: int | None) -> tuple[int, int]:
    """The oldest and newest version that may serve, from the body or from headers; (0, -1): any. Raises ApiError."""
    oldest = _header_version(call, "X-Pearl-Min-Version") if oldest is None else oldest
    exact = _header_version(call, "X-Pearl-Version") if exact is None else exact
    if exact is not None:
        if oldest is not None and oldest > exact:
            raise ApiError(400, f"min_version {oldest} and version {exact} exclude each other", code="invalid_value")
        return exact, exact
    return oldest or 0, -1


def _header_version(call: Call, name: str) -> int | None:
    text = call.header(name)
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ApiError(400, f"{name}: {text[:40]!r} is no version", code="invalid_value", param=name)
    return int(text)


# --- what replies say


def metadata_of(choice: Choice) -> dict[str, Any]:
    """Which versions of the policy made which tokens, as SGLang says it."""
    spans = [{"version": str(span.version), "start": span.start, "end": span.end} for span in choice.spans]
    return {"weight_version": spans[-1]["version"] if spans else None, "weight_versions": spans}


def versions_told(choice: Choice) -> dict[str, Any]:
    """The same for OpenAI's interface, whose clients expect no lists in `metadata`."""
    found = metadata_of(choice)
    return {"metadata": {"weight_version": found["weight_version"] or ""}, "weight_versions": found["weight_versions"]}


def version_header(choices: Sequence[Choice]) -> dict[str, str]:
    """The span served, "3" or "3-4"."""
    span = spans_of(choices)
    if span is None:
        return {}
    return {"X-Pearl-Version": str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"}
