"""Sessions: what an agent said and was answered over HTTP, token by token, until its reward makes a trajectory of it.

No I/O, no clock, no randomness: `trajectories.py` does what is said here. Mutable objects, like the router's core: a session
lives in one gateway, as long as its client talks to it.

Invariants:
- A turn's context is its parent's context, the tokens that the parent's reply consists of, and `prompt_new`: nothing that
  the engine made is ever tokenized again.
- A harness that rewrites its history, or asks the same again, begins a branch. The trajectory is the path from the first turn
  to the last that ended; turns off this path are counted and not trained on.
- A session ends once: with a reward, or abandoned. Abandoned ones make no trajectory.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from messages.agent import RequestInterrupted, RolloutTask, TurnFinished, VersionSpan
from messages.ids import PolicyVersion, RequestId, WorkerId
from messages.pipeline_scheduler import TrajectoryCompleted
from services.edge.request_state import Reply
from services.router.gateway.errors import ApiError

MOST_TURNS: Final = 10_000
"""Of one session: a harness in a loop is stopped some day."""
REMEMBERED: Final = 4096
"""Ended sessions whose result can be asked for again."""

KEY_PREFIX: Final = "pearl-"
"""Of the keys of sessions: "pearl-<session>.<secret>"."""
SESSION_ID: Final = re.compile(r"gw[0-9a-f]{8}-[0-9]+-[0-9a-f]{8}")
"""Of every session, of every gateway."""
NO_PARENT: Final = -1


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a session, before its reply. `digest` stands for the conversation up to the prompt."""

    number: int  # of all requests of the session, from 0
    parent: int  # turn whose context and reply come before `prompt_new`; NO_PARENT: none does
    depth: int  # turns before this one on its path
    repeat: int  # requests before this one with the same parent
    prompt_new: list[int]
    digest: bytes = b""
    text: str = ""  # of a text prompt, all of it
    began_ms: int = 0


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was answered."""

    asked: Asked
    request: RequestId
    reply: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish: str
    attempts: int
    worker: WorkerId
    cached_tokens: int
    action: str  # the reply as text
    ended_ms: int

    @staticmethod
    def of(asked: Asked, request: RequestId, reply: Reply, text: str, now_ms: int) -> Turn:
        """The turn that a reply makes of a request."""
        return Turn(
            asked=asked,
            request=request,
            reply=reply.tokens,
            logprobs=reply.logprobs,
            spans=reply.spans,
            finish="stop" if reply.finish == "abort" else reply.finish,
            attempts=reply.attempts,
            worker=reply.worker,
            cached_tokens=reply.cached_tokens,
            action=text,
            ended_ms=now_ms,
        )


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a session ended. `status`: "completed", "truncated" or "abandoned"."""

    session: str
    trajectory: str
    status: str
    reward: float | None
    turns: int
    turns_off_path: int
    generated_tokens: int
    min_version: int
    max_version: int
    reason: str = ""


class Session(msgspec.Struct, kw_only=True):
    """One conversation. Without a task it is recorded and can be read, and makes no trajectory."""

    id: str
    secret: bytes  # digest of its key
    holding: str  # new for every time a task is taken up
    task: RolloutTask | None
    opened_ms: int
    touched_ms: int
    turns: list[Turn] = []
    asked: int = 0
    running: int = 0
    ending: bool = False  # its trajectory is being written
    owner: bytes = b""  # digest of the key that is needed to end it; empty: none is
    idle_ms: int | None = None  # of its own, where that is less than the gateway's
    superseded: bool = False  # another process writes this trajectory now
    journal_seq: int = 0  # last sequence on the trajectory's subject
    unsure: TurnFinished | RequestInterrupted | None = None  # a record of which nobody knows whether it is stored
    written: list[TurnFinished] = []  # the trajectory's turns, once its reward was posted
    journal: list[int] = []  # sequences of those that are stored
    heads: dict[bytes, int] = {}  # conversation including a reply -> turn
    children: dict[int, int] = {}  # parent -> requests that continue it

    @property
    def trajectory(self) -> str:
        """The trajectory it becomes, or its own name."""
        return self.task.trajectory if self.task is not None else self.id

    def context(self, turn: int) -> list[int]:
        """All tokens up to and including a turn's reply."""
        tokens: list[int] = []
        for index in self.path(turn):
            tokens += self.turns[index].asked.prompt_new
            tokens += self.turns[index].reply
        return tokens

    def path(self, turn: int) -> list[int]:
        """The turns from the first to this one."""
        found: list[int] = []
        while turn != NO_PARENT:
            found.append(turn)
            turn = self.turns[turn].asked.parent
        return found[::-1]

    # --- what a request continues

    def of_messages(self, digests: Sequence[bytes]) -> tuple[int, int]:
        """The turn that a chat continues and how many of its messages that covers; `digests` as `chat_digests` makes them.

        (NO_PARENT, 0) where no reply of ours is followed by something new.
        """
        for count in range(len(digests) - 2, 0, -1):
            turn = self.heads.get(digests[count])
            if turn is not None:
                return turn, count
        return NO_PARENT, 0

    def of_text(self, prompt: str) -> tuple[int, str]:
        """The turn that a text prompt continues, and what it adds to it."""
        for index in range(len(self.turns) - 1, -1, -1):
            turn = self.turns[index]
            if turn.asked.text:
                whole = turn.asked.text + turn.action
                if len(prompt) > len(whole) and prompt.startswith(whole):
                    return index, prompt[len(whole) :]
        return NO_PARENT, prompt

    def of_tokens(self, prompt: list[int]) -> tuple[int, list[int]]:
        """The turn that a prompt of token ids continues, and what it adds to it."""
        for index in range(len(self.turns) - 1, -1, -1):
            context = self.context(index)
            if len(prompt) > len(context) and prompt[: len(context)] == context:
                return index, prompt[len(context) :]
        return NO_PARENT, prompt

    # --- turns

    def ask(self, parent: int, prompt_new: list[int], now_ms: int, *, digest: bytes = b"", text: str = "") -> Asked:
        """A request begins. Raises ApiError."""
        if self.ending or self.superseded:
            raise ended(self.id)
        if len(self.turns) + self.running >= MOST_TURNS:
            raise ApiError(400, f"session {self.id} has had {MOST_TURNS} turns", code="session_too_long")
        asked = Asked(
            number=self.asked,
            parent=parent,
            depth=0 if parent == NO_PARENT else len(self.path(parent)),
            repeat=self.children.get(parent, 0),
            prompt_new=prompt_new,
            digest=digest,
            text=text,
            began_ms=now_ms,
        )
        self.asked += 1
        self.running += 1
        self.children[parent] = asked.repeat + 1
        self.touched_ms = now_ms
        return asked

    def request_id(self, asked: Asked) -> RequestId:
        """The id of a request: begins with the trajectory's, as agents' do."""
        return RequestId(f"{self.trajectory}/{asked.number}/{self.holding}")

    def is_mine(self, request: str) -> bool:
        """Whether a request is one of its own, and not of another session of the same trajectory."""
        return request.startswith(f"{self.trajectory}/") and request.endswith(f"/{self.holding}")

    def stopped(self, now_ms: int) -> None:
        """A request ended, with a turn or without."""
        self.running -= 1
        self.touched_ms = now_ms

    def took(self, turn: Turn, reply_digest: bytes = b"") -> None:
        """A request was answered, and the answer goes to the client."""
        self.turns.append(turn)
        if reply_digest:
            self.heads[reply_digest] = len(self.turns) - 1

    # --- the end

    def trained(self) -> list[Turn]:
        """The turns of the trajectory."""
        return [self.turns[index] for index in self.path(len(self.turns) - 1)]

    def records(self, now_ms: int) -> list[TurnFinished]:
        """The trajectory's turns as the journal has them. Only of a session with a task."""
        task, turns = self.task, self.trained()
        assert task is not None
        next_ms = [*(turn.asked.began_ms for turn in turns[1:]), now_ms]
        return [
            TurnFinished(
                trajectory=task.trajectory,
                group=task.group,
                batch=task.batch,
                retry=task.retry,
                turn=index,
                request=turn.request,
                attempts=turn.attempts,
                prompt_new=turn.asked.prompt_new,
                reply=turn.reply,
                logprobs=turn.logprobs,
                spans=turn.spans,
                finish=turn.finish,
                action=turn.action,
                env_s=max(0, next_ms[index] - turn.ended_ms) / 1000,
                wall_s=max(0, next_ms[index] - turn.asked.began_ms) / 1000,
                worker=turn.worker,
                cached_tokens=turn.cached_tokens,
            )
            for index, turn in enumerate(turns)
        ]

    def result(self, status: str, reward: float | None, reason: str = "") -> Result:
        """What its client is told at the end."""
        turns = self.trained() if self.turns else []
        versions = [int(span.version) for turn in turns for span in turn.spans]
        oldest = self.task.min_version if self.task is not None else 0
        return Result(
            session=self.id,
            trajectory=self.trajectory,
            status=status,
            reward=reward,
            turns=len(turns),
            turns_off_path=len(self.turns) - len(turns),
            generated_tokens=sum(len(turn.reply) for turn in turns),
            min_version=min(versions, default=oldest),
            max_version=max(versions, default=oldest),
            reason=reason,
        )


def end_of(
    task: RolloutTask, result: Result, records: Sequence[TurnFinished], journal: Sequence[int]
) -> TrajectoryCompleted:
    """The trajectory's end as the pipeline scheduler gets it. Abandoned ones failed: they are tried again."""
    failed = result.status == "abandoned"
    return TrajectoryCompleted(
        trajectory=task.trajectory,
        group=task.group,
        batch=task.batch,
        retry=task.retry,
        status="failed" if failed else result.status,
        reward=0.0 if failed or result.reward is None else result.reward,
        turns=len(journal),
        generated_tokens=sum(len(record.reply) for record in records),
        min_version=PolicyVersion(task.min_version if failed else result.min_version),
        max_version=PolicyVersion(task.min_version if failed else result.max_version),
        journal=tuple(journal),
        env_s=sum(record.env_s for record in records),
        wall_s=sum(record.wall_s for record in records),
        reason=result.reason,
    )


class SessionBook:
    """The sessions of one gateway."""

    def __init__(self, most: int) -> None:
        self.abandoned = 0
        self.rewarded = 0
        self.opened = 0
        self._most = most
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, tuple[bytes, Result]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session: Session) -> None:
        """Take a new one. Raises ApiError if there are too many."""
        self.check_room()
        assert session.id not in self._open
        self.opened += 1
        self._open[session.id] = session

    def check_room(self) -> None:
        """Raises ApiError if there are too many."""
        if len(self._open) >= self._most:
            raise ApiError(
                429, f"{self._most} sessions are open (gateway.max_sessions)", code="too_many_sessions", retry_after_s=5
            )

    def find(self, session: str) -> Session:
        """An open session. Raises ApiError."""
        found = self._open.get(session)
        if found is None:
            raise ended(session) if session in self._ended else unknown(session)
        return found

    def knows(self, session: str, secret: bytes) -> bool:
        """Whether this is the key of a session, open or ended."""
        found = self._open.get(session)
        if found is not None:
            return found.secret == secret
        over = self._ended.get(session)
        return over is not None and over[0] == secret

    def result(self, session: str) -> Result | None:
        """How it ended, if it did."""
        found = self._ended.get(session)
        return found[1] if found is not None else None

    def of_task(self, trajectory: str, retry: int) -> Session | None:
        """The open session of a task."""
        return next(
            (
                session
                for session in self._open.values()
                if session.task is not None and (session.task.trajectory, session.task.retry) == (trajectory, retry)
            ),
            None,
        )

    def all(self) -> tuple[Session, ...]:
        """Open sessions, oldest first."""
        return tuple(self._open.values())

    def idle(self, now_ms: int, idle_ms: int) -> tuple[Session, ...]:
        """Sessions that nobody has talked to for so long, or for as long as they say."""
        return tuple(
            session
            for session in self._open.values()
            if not session.running
            and now_ms - session.touched_ms >= min(idle_ms, idle_ms if session.idle_ms is None else session.idle_ms)
        )

    def close(self, session: Session, result: Result) -> None:
        """It ended. Harmless to repeat."""
        if self._open.pop(session.id, None) is None:
            return
        if result.status == "abandoned":
            self.abandoned += 1
        else:
            self.rewarded += 1
        self._ended[session.id] = (session.secret, result)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)


def session_of(key: str) -> str:
    """The session that a key names; "" for a key that is no session's."""
    return key.removeprefix(KEY_PREFIX).rpartition(".")[0] if key.startswith(KEY_PREFIX) else ""


def turn_seed(sample_seed: int, depth: int, repeat: int) -> int:
    """The seed of a turn: the built-in agent's, unless the same was asked before, when it is another one."""
    text = f"{sample_seed}/{depth}" if repeat == 0 else f"{sample_seed}/{depth}/{repeat}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 11


def chat_digests(messages: Sequence[Mapping[str, Any]], rest: object) -> list[bytes]:
    """One digest for each beginning of a chat, that of no message first. `rest`: what else the prompt depends on (tools)."""
    digest = hashlib.blake2b(msgspec.json.encode(rest, order="sorted"), digest_size=16).digest()
    digests = [digest]
    for message in messages:
        digest = extended(digest, message)
        digests.append(digest)
    return digests


def extended(digest: bytes, message: Mapping[str, Any]) -> bytes:
    """The digest of a chat with one message more."""
    return hashlib.blake2b(digest + msgspec.json.encode(_essence(message), order="sorted"), digest_size=16).digest()


def _essence(message: Mapping[str, Any]) -> dict[str, Any]:
    """What of a message reaches the model. Harnesses strip replies, drop empty fields and write arguments anew as JSON."""
    role, content = message.get("role"), message.get("content") or ""
    found: dict[str, Any] = {"role": role, "content": content.strip() if role == "assistant" else content}
    for key in ("name", "tool_call_id"):
        if message.get(key):
            found[key] = message[key]
    calls = cast("list[dict[str, Any]]", message.get("tool_calls") or [])
    if calls:
        found["tool_calls"] = [(call["function"]["name"], _json(call["function"]["arguments"])) for call in calls]
    return found


def _json(text: Any) -> Any:  # Any: JSON text, or what it says
    if not isinstance(text, str):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text


def unknown(session: str) -> ApiError:
    """No such session here."""
    return ApiError(
        404, f"no session {session[:80]!r} in this gateway: open one with POST /v1/sessions", code="session_not_found"
    )


def ended(session: str) -> ApiError:
    """It was there."""
    return ApiError(409, f"session {session} has ended: open another one", code="session_ended")
