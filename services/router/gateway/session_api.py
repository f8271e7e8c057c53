"""Sessions over HTTP: open one, look at it, post its reward, give it up."""

from __future__ import annotations

import hmac
from typing import Any

import msgspec
from aiohttp import web

from services.router.gateway import api
from services.router.gateway.config import digest_of
from services.router.gateway.errors import ApiError
from services.router.gateway.server import Call, answer
from services.router.gateway.sessions import Result, Session, session_of
from services.router.gateway.trajectories import Trajectories


class SessionApi:
    """The endpoints. Raises ApiError."""

    def __init__(self, trajectories: Trajectories) -> None:
        self._trajectories = trajectories

    async def open(self, call: Call) -> web.StreamResponse:
        """POST /v1/sessions"""
        body = api.parse(call.body or b"{}", api.OpenSession)
        session = await self._trajectories.open(train=body.train, wait_s=body.wait_s, task=body.task)
        told = {**described(session), "key": self._trajectories.key_of(session)}
        if body.owner_key:
            told["owner_key"] = self._trajectories.owner_key_of(session)
        session.idle_ms = None if body.idle_s is None else round(body.idle_s * 1000)
        return answer(told, 201)

    async def show(self, call: Call) -> web.StreamResponse:
        """GET /v1/sessions/{id}. With its owner's key it keeps the session from being abandoned."""
        result = self._trajectories.book.result(call.rest)
        if result is not None:
            self._check_owner(call)
            return answer(msgspec.structs.asdict(result))
        session = self._find(call)
        if session.owner and self._owns(call, session):
            session.touched_ms = self._trajectories.now_ms()
        return answer(described(session))

    async def trajectory(self, call: Call) -> web.StreamResponse:
        """GET /v1/sessions/{id}/trajectory: the tokens of its path so far."""
        session = self._find(call)
        turns = [
            {
                "prompt_new": turn.asked.prompt_new,
                "reply": turn.reply,
                "logprobs": turn.logprobs,
                "versions": [{"version": span.version, "start": span.start, "end": span.end} for span in turn.spans],
                "finish": turn.finish,
                "attempts": turn.attempts,
                "text": turn.action,
            }
            for turn in (session.trained() if session.turns else ())
        ]
        return answer({"id": session.id, "trajectory": session.trajectory, "turns": turns})

    async def reward(self, call: Call) -> web.StreamResponse:
        """POST /v1/sessions/{id}/reward. Posted again, it is answered as the first time."""
        body = api.parse(call.body, api.PostReward)
        self._check_owner(call)
        known = self._trajectories.book.result(call.rest)
        if known is None:
            known = await self._trajectories.reward(self._find_owned(call), body.reward, body.status)
        if (known.reward, known.status) != (body.reward, body.status):
            raise _over(known)
        return answer(msgspec.structs.asdict(known))

    async def abandon(self, call: Call) -> web.StreamResponse:
        """DELETE /v1/sessions/{id}. What still runs for it ends too."""
        self._check_owner(call)
        known = self._trajectories.book.result(call.rest)
        if known is None:
            known = await self._trajectories.abandon(self._find_owned(call), "given up by its client")
        return answer(msgspec.structs.asdict(known))

    def _find(self, call: Call) -> Session:
        self._check_owner(call)
        return self._trajectories.book.find(call.rest)

    def _find_owned(self, call: Call) -> Session:
        session = self._find(call)
        if session.owner and not self._owns(call, session):
            raise ApiError(
                403, "this session is ended with its owner's key, in X-Session-Owner", code="owner_key_needed"
            )
        return session

    @staticmethod
    def _owns(call: Call, session: Session) -> bool:
        return hmac.compare_digest(digest_of(call.header("X-Session-Owner")), session.owner)

    @staticmethod
    def _check_owner(call: Call) -> None:
        """A session's key opens that session only."""
        owner = session_of(call.key)
        if owner and owner != call.rest:
            raise ApiError(403, "this key is another session's", code="wrong_session")


def described(session: Session) -> dict[str, Any]:
    """A session for people and programs. `task_seed` says which task it is: sessions of a group share it."""
    task = session.task
    return {
        "id": session.id,
        "status": "open",
        "trajectory": session.trajectory,
        "task": None
        if task is None
        else {
            "task_seed": task.task_seed,
            "group": task.group,
            "batch": task.batch,
            "retry": task.retry,
            "min_version": task.min_version,
            "temperature": task.temperature,
            "evaluation": task.evaluation,
        },
        "turns": len(session.turns),
        "turns_off_path": len(session.turns) - len(session.path(len(session.turns) - 1)) if session.turns else 0,
        "running": session.running,
        "generated_tokens": sum(len(turn.reply) for turn in session.turns),
    }


def _over(known: Result) -> ApiError:
    return ApiError(
        409, f"session {known.session} ended as {known.status} with reward {known.reward}", code="session_ended"
    )
