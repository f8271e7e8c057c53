"""One request of a server's, and what its replies have to know of the server."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from messages.ids import PolicyVersion, Role
from services.rollout_worker.engines.base import GenerateSpec
from services.rollout_worker.engines.sglang.api import Ended, Piece

NO_WEIGHTS: Final = PolicyVersion(-1)


class Stop(msgspec.Struct, frozen=True):
    """A reply ends here, whatever its server makes of it."""

    finish: str
    reason: str


class Reply:
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
        self.events: asyncio.Queue[Piece | Stop] = asyncio.Queue()

    @property
    def in_transfer(self) -> bool:
        """Its KV cache may be on its way: an abort now could corrupt another request's pages."""
        return self.role is not Role.COLOCATED and not self.first


class Served:
    """What the server is now; its engine's to say."""

    __slots__ = ("context_limit", "input_limit", "paused", "role", "version")

    def __init__(self, role: Role) -> None:
        self.role = role
        self.version = NO_WEIGHTS
        self.paused = ""  # the mode
        self.context_limit = 0  # tokens of context and reply together
        self.input_limit = 0  # tokens that can be submitted: a little less


def end_of(ended: Ended) -> tuple[str, str]:
    """`finish_reason` in the worker's words."""
    if ended.type in ("stop", "length"):
        return ended.type, ""
    if ended.status_code is not None and 400 <= ended.status_code < 500:
        return "refused", ended.message or "refused by the server"
    return "interrupted", ended.message or ended.type
