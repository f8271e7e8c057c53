"""From an HTTP request to replies: admission, versions, and the request state machine that agents use too.

Owns: the requests in flight of one gateway. Never decides where they run. What a client is sent follows from its own
request and the policy alone: workers that die, drain or change role show in nothing but time.

Invariants: a request counts against `max_requests` exactly while it runs; leaving `run` in whatever way cancels what still
runs for it on workers.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from messages.agent import PLAIN, VersionSpan
from messages.ids import Activity, PolicyVersion, RequestId, TrajectoryId
from pearl_state.model import RoleTable, Row
from services.edge.request import (
    Interruption,
    NoTokenError,
    OnInterruption,
    PolicyMovedError,
    Reply,
    RequestEdge,
    RequestFailedError,
    RequestSpec,
    RequestState,
    TableReplica,
)
from services.router.gateway.config import Config
from services.router.gateway.errors import ApiError
from services.router.gateway.metrics import Metrics
from services.router.gateway.sessions import Session
from services.router.gateway.text import TextStream
from services.router.gateway.vocabulary import Vocabulary

RETRY_AFTER_S: Final = 1
SEED_BITS: Final = 53
HOLD_MS: Final = 100
"""How long a worker may hold tokens of a reply that is sent whole, and that nobody trains on: so much a request that is aborted, or
loses its worker, has to do without."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to generate one or several replies to a prompt of tokens."""

    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: list[int]
    stops: tuple[str, ...] = ()
    min_version: int = 0
    max_version: int = -1


class Choice:
    """One reply while it comes. `fresh` is text that was not sent yet; `logged` tokens whose log-probabilities were."""

    def __init__(self, index: int, text: TextStream, wake: Callable[[], None] | None) -> None:
        self.index = index
        self.text = text
        self.fresh = ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: tuple[VersionSpan, ...] = ()
        self.logged = 0
        self.reply: Reply | None = None
        self.on_first: Callable[[], None] | None = None
        self._seen = 0
        self._wake = wake

    @property
    def read_along(self) -> bool:
        """Whether somebody wants its tokens before the last has come."""
        return self._wake is not None or bool(self.text.stops)

    def on_tokens(self, state: RequestState) -> int | None:
        """Called by the edge with each chunk."""
        if self.on_first is not None:
            self.on_first()
            self.on_first = None
        if not self.read_along:
            return None
        tokens = state.tokens
        new = tokens[self._seen :]
        self._seen = len(tokens)
        self.fresh += self.text.feed(new)
        if self.text.enough is None:
            self.tokens += new
            self.logprobs += state.logprobs[len(self.logprobs) :]
        if self._wake is not None:
            self._wake()
        return self.text.enough

    def end(self, reply: Reply) -> None:
        """The reply is whole."""
        if self._seen < len(reply.tokens):  # nobody listened while it came
            self.text.feed(reply.tokens)
        self.fresh += self.text.end()
        self.reply = reply
        self.tokens, self.logprobs, self.spans = reply.tokens, reply.logprobs, reply.spans


class Generation:
    """Runs requests of HTTP clients."""

    def __init__(
        self, config: Config, edge: RequestEdge, replica: TableReplica, vocabulary: Vocabulary, metrics: Metrics
    ) -> None:
        self.in_flight = 0
        self._config = config
        self._edge = edge
        self._replica = replica
        self._vocabulary = vocabulary
        self._metrics = metrics
        self._running: set[str] = set()  # request ids
        self._seeds = random.Random()
        self._silent = frozenset((vocabulary.eos_id,))

    @property
    def policy_version(self) -> int:
        """The newest published."""
        return _policy_version(self._replica.table)

    @property
    def serving(self) -> int:
        """Workers that generate now."""
        return len(_serving(self._replica.table))

    def admit(self, replies: int) -> None:
        """Raises ApiError where that many more would be too many."""
        most = self._config.max_requests
        if replies > most:
            raise ApiError(400, f"{replies} replies are more than gateway.max_requests = {most}", code="invalid_value")
        if self.in_flight + replies > most:
            raise ApiError(
                429,
                f"{self.in_flight} requests are in flight, gateway.max_requests = {most}",
                code="too_many_requests",
                retry_after_s=RETRY_AFTER_S,
            )

    def check_version(self, sampling: Sampling) -> None:
        """Raises ApiError 409 for a version that nobody has and nobody will have without training."""
        if sampling.min_version <= 0 and sampling.max_version < 0:
            return
        table = self._replica.table
        newest = _policy_version(table)
        rows = _serving(table)
        if sampling.min_version > newest:
            raise _no_version(f"version {sampling.min_version} is not published, {newest} is", rows)
        exact = sampling.max_version
        if 0 <= exact < newest and not any(row.version == exact for row in rows):
            raise _no_version(f"no worker serves version {exact} any more", rows)

    def length(self, prompt: int, wanted: int | None, otherwise: int) -> int:
        """How long a reply may be: as wanted, or `otherwise` as far as it fits. Raises ApiError."""
        most = self._config.max_context_tokens
        room = most - prompt
        if prompt < 1:
            raise ApiError(400, "the prompt is empty", code="empty_prompt")
        if room < 1 or (wanted is not None and wanted > room):
            asked = f"{prompt} tokens and {wanted} to come" if wanted is not None else f"{prompt} tokens"
            raise ApiError(
                400,
                f"the context of this model is {most} tokens, the prompt has {asked}: shorten it",
                code="context_length_exceeded",
            )
        return min(otherwise, room) if wanted is None else wanted

    def check_tokens(self, tokens: list[int], param: str) -> None:
        """Raises ApiError for ids outside the vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary.size:
            raise ApiError(
                400, f"{param}: token ids are from 0 to {self._vocabulary.size - 1}", code="invalid_token", param=param
            )

    def choice(self, index: int, stops: tuple[str, ...], wake: Callable[[], None] | None = None) -> Choice:
        """An empty reply."""
        return Choice(index, TextStream(self._vocabulary.decode, stops, self._silent), wake)

    def any_seed(self) -> int:
        """For a request that asks for none."""
        return self._seeds.getrandbits(SEED_BITS)

    async def run(
        self,
        choice: Choice,
        prompt: list[int],
        sampling: Sampling,
        *,
        request: str,
        session: str,
        on_interruption: OnInterruption,
        last_worker: str = "",
        hold_ms: int = 0,
    ) -> Reply:
        """One reply, into `choice`. Raises ApiError. `hold_ms`: unless somebody reads along, tokens may come so late."""
        began = time.monotonic()
        if request in self._running:
            raise ApiError(409, f"request {request[:80]} is running", code="request_exists", param="rid")
        spec = RequestSpec(
            request=RequestId(request),
            session=TrajectoryId(session),
            prompt=prompt,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop_ids=sampling.stop_ids,
            min_version=PolicyVersion(max(0, sampling.min_version)),
            max_version=sampling.max_version,
            last_worker=last_worker,
            hold_ms=0 if choice.read_along else hold_ms,
            queue_ms=self._config.queue_s * 1000,
        )
        self.in_flight += 1
        self._running.add(request)
        try:
            choice.on_first = lambda: self._metrics.first_token.add(time.monotonic() - began)
            reply = await self._edge.generate(spec, on_interruption, choice.on_tokens)
        except NoTokenError:
            raise self._late(sampling) from None
        except PolicyMovedError as error:
            raise _no_version(str(error), _serving(self._replica.table)) from error
        except RequestFailedError as error:
            raise ApiError(500, str(error), code="generation_failed") from error
        finally:
            self.in_flight -= 1
            self._running.discard(request)
        choice.end(reply)
        self._metrics.completion_tokens += len(reply.tokens)
        self._metrics.prompt_tokens += len(prompt)
        self._metrics.attempts += reply.attempts
        self._metrics.whole.add(time.monotonic() - began)
        return reply

    def abort(self, request: str) -> int:
        """End one request, or with "" all but sessions' turns, with what it has; returns how many."""
        wanted = [request] if request else sorted(each for each in self._running if each.startswith(PLAIN))
        return sum(self._edge.abort(each) for each in wanted)

    def abort_turns(self, session: Session) -> int:
        """End what runs for a session; returns how many."""
        return sum(self._edge.abort(each) for each in sorted(filter(session.is_mine, self._running)))

    async def count_interruption(self, interruption: Interruption) -> None:
        """Nobody trains on this request: it is only counted."""
        self._metrics.interruptions += interruption.cause not in ("stop_string", "abort")

    def _late(self, sampling: Sampling) -> ApiError:
        """Why there was no token for so long."""
        rows = _serving(self._replica.table)
        waited = f"no token within {self._config.queue_s:g} s"
        if not rows:
            return ApiError(503, f"{waited}: no worker serves now", code="no_worker", retry_after_s=5)
        fits = [row for row in rows if row.version >= sampling.min_version]
        if sampling.max_version >= 0:
            fits = [row for row in fits if row.version <= sampling.max_version]
        if not fits:
            return _no_version(f"{waited}: no worker has the version asked for", rows)
        return ApiError(429, f"{waited}: the workers are full", code="overloaded", retry_after_s=RETRY_AFTER_S)


def seed_of(seed: int, index: int) -> int:
    """The seed of the nth reply to a request."""
    if index:
        digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big")
    return seed & ((1 << SEED_BITS) - 1)


def spans_of(choices: Sequence[Choice]) -> tuple[int, int] | None:
    """Oldest and newest version among the tokens of some replies."""
    versions = [int(span.version) for choice in choices for span in choice.spans]
    return (min(versions), max(versions)) if versions else None


def _policy_version(table: RoleTable | None) -> int:
    return int(table.policy_version) if table is not None else 0


def _serving(table: RoleTable | None) -> list[Row]:
    """Workers that generate."""
    rows = table.rows if table is not None else ()
    return [row for row in rows if row.activity is Activity.ACTIVE and row.role.value in ("colocated", "decode")]


def _no_version(why: str, rows: list[Row]) -> ApiError:
    there = sorted({int(row.version) for row in rows})
    return ApiError(
        409, f"{why}; serving now: {there or 'nothing'}", code="version_unavailable", retry_after_s=RETRY_AFTER_S
    )
