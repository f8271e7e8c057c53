"""What one request does next, until its reply is whole. No clock, no I/O; `request.py` does what it says.

Invariants (DESIGN 7, paper 4.5 "partial trajectories"):
- One attempt at a request is outstanding; chunks of any other are dropped and counted.
- A token that arrived is never asked for again: each attempt starts where the reply in hand ends.
- Every attempt that ended early is journalled before the next is asked for.

`RequestState` changes in place, unlike a control core: it lives as long as one reply, is never stored, and copying the
tokens at every chunk would make long replies quadratic.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from messages.agent import Assignment, NotNow, TokenChunk, VersionSpan
from messages.ids import Activity, Incarnation, PolicyVersion, RequestId, RoleGeneration, TrajectoryId, WorkerId
from messages.rollout_worker import CancelRequest, Generate
from messages.router import AssignRequest
from pearl_state.model import RoleTable

ASK_AGAIN_MS: Final = 100
"""First pause when no router answers; doubles up to `ASK_AGAIN_MOST_MS`."""
BARREN_MS: Final = 20
"""Pause after the second attempt in a row without a token (the first is retried at once); doubles up to
`ASK_AGAIN_MOST_MS`. Two replicas of the role table differ for about that long."""
ASK_AGAIN_MOST_MS: Final = 1000
LIVES: Final = 100
"""Attempts in a row without one new token after which a request is given up: it is the request that is at fault then.
Waiting for a worker is no attempt, so a budget of zero never counts."""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be generated. `session` groups requests whose prompts share prefixes."""

    request: RequestId
    session: TrajectoryId
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: list[int]
    min_version: PolicyVersion
    last_worker: str = ""
    max_version: int = -1  # no token of a newer policy is taken: the request fails then; -1: any
    hold_ms: int = 0  # how long the worker may hold tokens back, so that chunks are fewer
    queue_ms: float = 0.0  # without a first token for so long the request fails; 0: it waits as long as it takes


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply. `finish` is "stop", "length" or, where its client ended it, "abort"; `spans` cover the tokens; times are seconds."""

    tokens: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish: str
    attempts: int
    worker: WorkerId  # of the last attempt
    cached_tokens: int
    queue_s: float  # first question to a router until the first token
    decode_s: float  # first token until the last


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """Attempt `attempt` began at `prefix_len` and ended early with `received` tokens of its own."""

    request: RequestId
    attempt: int
    worker: WorkerId
    prefix_len: int
    received: int
    cause: str


class NoAnswer(msgspec.Struct, frozen=True):
    """No router answered."""


class Elapsed(msgspec.Struct, frozen=True):
    """`deadline_ms` has come, perhaps."""


class WorkerLost(msgspec.Struct, frozen=True):
    """The role table shows that the attempt's worker no longer runs it."""


class Unreadable(msgspec.Struct, frozen=True):
    """A chunk of which no more than this can be read."""

    kind: str
    request: RequestId
    attempt: int
    worker: WorkerId
    incarnation: Incarnation


class Ask(msgspec.Struct, frozen=True):
    """Ask a router."""

    message: AssignRequest


class Run(msgspec.Struct, frozen=True):
    """Send the attempt to its workers: decode or colocated first, prefill second."""

    messages: tuple[Generate, ...]


class Cancel(msgspec.Struct, frozen=True):
    """Tell the workers, as far as they live, that the attempt is no longer wanted."""

    workers: tuple[WorkerId, ...]
    message: CancelRequest


class Journal(msgspec.Struct, frozen=True):
    """Record before going on."""

    interruption: Interruption


Event = Assignment | NotNow | TokenChunk | Unreadable | NoAnswer | Elapsed | WorkerLost
Effect = Ask | Run | Cancel | Journal


def is_lost(table: RoleTable, worker: str, incarnation: Incarnation, role_generation: RoleGeneration) -> bool:
    """Whether the table shows that an attempt under this fence cannot be running. An older table says nothing."""
    row = table.row(worker)
    if row is None or row.incarnation < incarnation:
        return False
    if row.incarnation > incarnation:
        return True
    if row.activity is Activity.INACTIVE:
        return row.role_generation >= role_generation
    return row.activity is Activity.ACTIVE and row.role_generation > role_generation


class RequestState:
    """One request, from its first question to its reply. `step` returns what to do; no clock, no I/O."""

    def __init__(self, spec: RequestSpec, *, reply_to: str, silence_ms: float) -> None:
        assert spec.max_new_tokens > 0 and spec.prompt, f"{spec.request}: empty prompt or no token wanted"
        self.spec = spec
        self.reply: Reply | None = None
        self.failed = ""
        self.overdue = False  # failed because of `queue_ms`
        self.moved = False  # failed because the policy is newer than `max_version` by now
        self.deadline_ms: float | None = None  # of the attempt, or of a pause
        self.assignment: Assignment | None = None  # of the attempt that is outstanding
        self.attempt = 1
        self.tokens: list[int] = []
        self.late = self.duplicates = self.gaps = self.refusals = 0  # counters, for telemetry
        self._reply_to = reply_to
        self._silence_ms = silence_ms
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []  # spans of one version each, merged
        self._start = 0  # reply tokens in hand when the attempt began
        self._avoid: tuple[str, ...] = ()
        self._last_worker = spec.last_worker
        self._barren = self._unanswered = 0  # in a row
        self._first_by_ms = math.inf
        self._began_ms = self._first_ms = self._last_ms = 0.0
        self._cached = 0

    def begin(self, now_ms: float) -> tuple[Effect, ...]:
        """The first thing to do."""
        self._began_ms = now_ms
        if self.spec.queue_ms:
            self._first_by_ms = now_ms + self.spec.queue_ms
        return self._ask()

    def step(self, event: Event, now_ms: float) -> tuple[Effect, ...]:
        """Take one event. Events out of place are dropped."""
        if self.done:
            if isinstance(event, TokenChunk | Unreadable):
                self.late += 1
            return ()
        match event:
            case TokenChunk():
                return self._on_chunk(event, now_ms)
            case Unreadable():
                return self._on_unreadable(event, now_ms)
            case Assignment():
                return self._on_assignment(event, now_ms)
            case NotNow():
                self._avoid, self._unanswered = (), 0
                return self._pause(min(max(event.retry_after_ms, 1), ASK_AGAIN_MOST_MS), now_ms)
            case NoAnswer():
                self._unanswered += 1
                return self._pause(_backoff(ASK_AGAIN_MS, self._unanswered), now_ms)
            case WorkerLost():
                return self._interrupted("worker_gone", now_ms) if self.assignment is not None else ()
            case Elapsed():
                if not self.tokens and now_ms >= self._first_by_ms:
                    return self._overdue()
                if self.deadline_ms is None or now_ms < self.deadline_ms:
                    return ()
                return self._interrupted("silence", now_ms) if self.assignment is not None else self._ask()

    @property
    def due_ms(self) -> float | None:
        """When to step with Elapsed at the latest."""
        if self.tokens or self._first_by_ms == math.inf:
            return self.deadline_ms
        return self._first_by_ms if self.deadline_ms is None else min(self.deadline_ms, self._first_by_ms)

    @property
    def logprobs(self) -> list[float]:
        """Of `tokens`."""
        return self._logprobs

    @property
    def done(self) -> bool:
        """The reply is there, or never will be."""
        return self.reply is not None or bool(self.failed)

    def lost_in(self, table: RoleTable) -> bool:
        """Whether the outstanding attempt cannot be running, by this table."""
        held = self.assignment
        if held is None:
            return False
        if is_lost(table, held.worker, held.incarnation, held.role_generation):
            return True
        # A prefill worker has done its part once the first token is there.
        waiting = held.prefill_worker != "" and len(self.tokens) == self._start
        return waiting and is_lost(table, held.prefill_worker, held.prefill_incarnation, held.prefill_role_generation)

    def stop_at(self, count: int, effects: tuple[Effect, ...] = (), finish: str = "stop") -> tuple[Effect, ...]:
        """End the reply with its first `count` tokens; `effects` are those of the step that brought the last.

        For a client that finds a stop string in the text, which engines do not know of, or wants no more ("abort"). What the
        attempt made beyond it is journalled as an interruption, since its worker logs it.
        """
        assert 0 <= count <= len(self.tokens) and not self.failed
        cancel = self.cancellation()
        worker = self.assignment.worker if self.assignment is not None else WorkerId(self._last_worker)
        journalled = [each.interruption for each in effects if isinstance(each, Journal)]
        cut = Interruption(
            request=self.spec.request,
            attempt=journalled[-1].attempt if journalled else self.attempt,
            worker=worker,
            prefix_len=self._start,
            received=max(0, count - self._start),
            cause="stop_string" if finish == "stop" else finish,
        )
        others = tuple(each for each in effects if isinstance(each, Cancel))
        del self.tokens[count:], self._logprobs[count:]
        spans = [msgspec.structs.replace(span, end=min(span.end, count)) for span in self._spans if span.start < count]
        self.deadline_ms = self.assignment = None
        self.reply = self._reply(finish, worker, cut.attempt, tuple(spans))
        return (*others, Journal(cut)) if cancel is None else (*others, cancel, Journal(cut))

    def cancellation(self) -> Cancel | None:
        """What tells the workers that nobody wants this any more."""
        held = self.assignment
        if held is None:
            return None
        workers = (held.worker, WorkerId(held.prefill_worker)) if held.prefill_worker else (held.worker,)
        return Cancel(workers, CancelRequest(request=self.spec.request, attempt=self.attempt))

    # --- asking

    def _ask(self) -> tuple[Effect, ...]:
        self.deadline_ms = None
        spec = self.spec
        return (
            Ask(
                AssignRequest(
                    request=spec.request,
                    trajectory=spec.session,
                    attempt=self.attempt,
                    min_version=spec.min_version,
                    context_tokens=len(spec.prompt) + len(self.tokens),
                    last_worker=self._last_worker,
                    avoid=self._avoid,
                    max_version=self.spec.max_version,
                )
            ),
        )

    def _pause(self, pause_ms: float, now_ms: float) -> tuple[Effect, ...]:
        if self.assignment is None:
            self.deadline_ms = now_ms + pause_ms
        return ()

    def _on_assignment(self, event: Assignment, now_ms: float) -> tuple[Effect, ...]:
        if self.assignment is not None:
            return ()
        if event.request != self.spec.request or event.attempt != self.attempt:
            return self.step(NoAnswer(), now_ms)  # answers something else
        self._unanswered = 0
        self.assignment = event
        self._start = len(self.tokens)
        self.deadline_ms = now_ms + self._silence_ms
        host, _, port = event.prefill_endpoint.rpartition(":")
        spec = self.spec
        decode_side = Generate(
            request=spec.request,
            trajectory=spec.session,
            attempt=self.attempt,
            worker=event.worker,
            incarnation=event.incarnation,
            role_generation=event.role_generation,
            min_version=spec.min_version,
            prompt=spec.prompt,
            prefix=self.tokens.copy(),
            max_new_tokens=spec.max_new_tokens,
            temperature=spec.temperature,
            seed=spec.seed,
            stop_ids=spec.stop_ids,
            reply=self._reply_to,
            bootstrap_host=host,
            bootstrap_port=int(port) if port.isdecimal() else 0,
            bootstrap_room=event.room,
            hold_ms=spec.hold_ms,
        )
        if not event.prefill_worker:
            return (Run((decode_side,)),)
        prefill_side = msgspec.structs.replace(
            decode_side,
            worker=WorkerId(event.prefill_worker),
            incarnation=event.prefill_incarnation,
            role_generation=event.prefill_role_generation,
        )
        return (Run((decode_side, prefill_side)),)

    # --- tokens

    def _on_chunk(self, chunk: TokenChunk, now_ms: float) -> tuple[Effect, ...]:
        held = self.assignment
        if held is None or chunk.attempt != self.attempt or chunk.request != self.spec.request:
            self.late += 1
            return ()
        if chunk.worker == held.prefill_worker and chunk.incarnation == held.prefill_incarnation:
            return self._on_prefill_chunk(chunk, now_ms)
        if chunk.worker != held.worker or chunk.incarnation != held.incarnation:
            self.late += 1
            return ()
        self.deadline_ms = now_ms + self._silence_ms
        if chunk.finish == "refused":
            return self._refused(chunk, now_ms)
        have, end = len(self.tokens), chunk.offset + len(chunk.tokens)
        torn = len(chunk.logprobs) != len(chunk.tokens) or not all(map(math.isfinite, chunk.logprobs))
        if chunk.offset > have or torn or min(chunk.tokens, default=0) < 0 or (chunk.finish and end < have):
            self.gaps += 1
            return self._interrupted("gap", now_ms)
        if end > have:
            if chunk.version < self.spec.min_version:
                return self._interrupted("stale", now_ms)  # not a token of it is kept
            if 0 <= self.spec.max_version < chunk.version:
                return self._moved(chunk.version)
            self._take(chunk, have - chunk.offset, now_ms)
        elif chunk.tokens:
            self.duplicates += 1
        if chunk.finish in ("stop", "length"):
            return self._finish(chunk.finish)
        if chunk.finish:
            return self._interrupted("interrupted", now_ms)
        return ()

    def _on_unreadable(self, chunk: Unreadable, now_ms: float) -> tuple[Effect, ...]:
        """What it held is missing now, as if it had been lost; from the prefill side it matters before the first token only."""
        held = self.assignment
        if held is None or chunk.attempt != self.attempt or chunk.request != self.spec.request:
            self.late += 1
            return ()
        by = (chunk.worker, chunk.incarnation)
        prefills = by == (held.prefill_worker, held.prefill_incarnation) and len(self.tokens) == self._start
        if not prefills and by != (held.worker, held.incarnation):
            self.late += 1
            return ()
        self.gaps += 1
        return self._interrupted("gap", now_ms, by=chunk.worker)

    def _on_prefill_chunk(self, chunk: TokenChunk, now_ms: float) -> tuple[Effect, ...]:
        """The prefill side only says that it will not, or that it stopped before its part was done."""
        if chunk.finish == "refused":
            return self._refused(chunk, now_ms)
        if chunk.finish == "interrupted" and len(self.tokens) == self._start:
            return self._interrupted("interrupted", now_ms, by=chunk.worker)
        return ()

    def _take(self, chunk: TokenChunk, known: int, now_ms: float) -> None:
        room = self.spec.max_new_tokens - len(self.tokens)
        new = chunk.tokens[known : known + room]
        if not self.tokens:
            self._first_ms = now_ms
            self._cached = chunk.cached_tokens
        self._last_ms = now_ms
        self._last_worker = chunk.worker
        self._barren = 0
        start = len(self.tokens)
        self.tokens += new
        self._logprobs += chunk.logprobs[known : known + room]
        if self._spans and self._spans[-1].version == chunk.version:
            start = self._spans.pop().start
        self._spans.append(VersionSpan(chunk.version, start, len(self.tokens)))

    # --- ends of an attempt

    def _refused(self, chunk: TokenChunk, now_ms: float) -> tuple[Effect, ...]:
        """Nothing ran: nothing to journal. A decode side that goes on without its prefill side is told not to."""
        held = self.assignment
        assert held is not None
        self.refusals += 1
        self._barren += 1
        cancel = self.cancellation() if held.prefill_worker else None
        if len(self.tokens) > self._start:  # refused after tokens: a peer's contradiction
            return self._interrupted("interrupted", now_ms)
        again = self._next_attempt(self._suspects(chunk.worker), chunk.reason or "refused", now_ms)
        return (cancel, *again) if cancel is not None else again

    def _suspects(self, by: WorkerId) -> tuple[str, ...]:
        """Whom to avoid next. Until its first token a decode side speaks of its prefill side as well."""
        held = self.assignment
        assert held is not None
        pair = by == held.worker and held.prefill_worker != "" and len(self.tokens) == self._start
        return (by, held.prefill_worker) if pair else (by,)

    def _interrupted(self, cause: str, now_ms: float, by: WorkerId | None = None) -> tuple[Effect, ...]:
        """`by` the decode side, unless told otherwise."""
        held = self.assignment
        assert held is not None
        received = len(self.tokens) - self._start
        effects: list[Effect] = []
        cancel = self.cancellation()
        if cancel is not None and (cause != "interrupted" or held.prefill_worker):
            effects.append(cancel)
        effects.append(
            Journal(
                Interruption(
                    request=self.spec.request,
                    attempt=self.attempt,
                    worker=held.worker,
                    prefix_len=self._start,
                    received=received,
                    cause=cause,
                )
            )
        )
        self._barren += received == 0
        # The end of the reply may be all that was lost.
        if self.tokens and self.tokens[-1] in self.spec.stop_ids:
            return (*effects, *self._finish("stop"))
        if len(self.tokens) >= self.spec.max_new_tokens:
            return (*effects, *self._finish("length"))
        return (*effects, *self._next_attempt(self._suspects(by or held.worker), cause, now_ms))

    def _next_attempt(self, avoid: tuple[str, ...], reason: str, now_ms: float) -> tuple[Effect, ...]:
        self.assignment = None
        if self._barren >= LIVES:
            self.failed = f"{LIVES} attempts in a row without a token; the last, on {' and '.join(avoid)}: {reason}"
            return ()
        self.attempt += 1
        self._avoid = tuple(sorted({*self._avoid, *avoid}))
        if self._barren > 1:
            return self._pause(_backoff(BARREN_MS, self._barren - 1), now_ms)
        return self._ask()

    def _finish(self, finish: str) -> tuple[Effect, ...]:
        held = self.assignment
        assert held is not None
        self.deadline_ms = None
        self.assignment = None
        self.reply = self._reply(finish, held.worker, self.attempt, tuple(self._spans))
        return ()

    def _reply(self, finish: str, worker: WorkerId, attempts: int, spans: tuple[VersionSpan, ...]) -> Reply:
        return Reply(
            tokens=self.tokens,
            logprobs=self._logprobs,
            spans=spans,
            finish=finish,
            attempts=attempts,
            worker=worker,
            cached_tokens=self._cached,
            queue_s=max(0.0, self._first_ms - self._began_ms) / 1000 if self.tokens else 0.0,
            decode_s=(self._last_ms - self._first_ms) / 1000,
        )

    def _overdue(self) -> tuple[Effect, ...]:
        cancel = self.cancellation()
        self.assignment = self.deadline_ms = None
        self.overdue = True
        self.failed = f"no token within {self.spec.queue_ms / 1000:g} s"
        return (cancel,) if cancel is not None else ()

    def _moved(self, version: PolicyVersion) -> tuple[Effect, ...]:
        """Weights were swapped under a request that wants no newer ones."""
        cancel = self.cancellation()
        self.assignment = self.deadline_ms = None
        self.moved = True
        self.failed = f"the policy is at version {version} by now, at most {self.spec.max_version} was asked for"
        return (cancel,) if cancel is not None else ()


def _backoff(first_ms: int, tries: int) -> float:
    return min(first_ms << min(tries - 1, 10), ASK_AGAIN_MOST_MS)
