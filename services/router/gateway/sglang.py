"""SGLang's interface, as far as rollout code of other trainers drives it: /generate, and what slime asks a router and a worker.

The gateway shows itself as one worker that is always there: who asks /workers is sent back to it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from messages.agent import PLAIN
from services.router.gateway import api
from services.router.gateway.config import Config
from services.router.gateway.errors import ApiError
from services.router.gateway.generation import Choice, Generation, Sampling, seed_of
from services.router.gateway.replies import Replies, affinity_of, all_of, metadata_of, stops_of, versions_of
from services.router.gateway.server import DONE, Call, EventStream, answer, event
from services.router.gateway.sessions import NO_PARENT, Asked, Session, turn_seed
from services.router.gateway.trajectories import Trajectories
from services.router.gateway.vocabulary import Vocabulary

DEFAULT_NEW_TOKENS: Final = 128
"""As SGLang has it."""

Json = dict[str, Any]


class SGLang:
    """The endpoints. Raises ApiError."""

    def __init__(
        self, config: Config, generation: Generation, vocabulary: Vocabulary, trajectories: Trajectories
    ) -> None:
        self._config = config
        self._generation = generation
        self._vocabulary = vocabulary
        self._replies = Replies(generation, trajectories)
        self._now_ms = trajectories.now_ms
        self._instance = secrets.token_hex(4)
        self._requests = 0

    async def generate(self, call: Call) -> web.StreamResponse:
        """POST /generate"""
        began = time.monotonic()
        body = api.parse(call.body, api.GenerateRequest)
        session = self._replies.session(call)
        api.check_generate(body)
        params = body.sampling_params
        parent, added = NO_PARENT, body.text if body.text is not None else list(body.input_ids or ())
        if session is not None:
            if params.n != 1:
                raise ApiError(400, "a session takes one reply at a time: n = 1", code="invalid_value", param="n")
            parent, added = session.of_text(added) if isinstance(added, str) else session.of_tokens(added)
        prompt_new = added if isinstance(added, list) else self._vocabulary.encode(added, "text")
        prompt = [*session.context(parent), *prompt_new] if session is not None else prompt_new
        self._generation.check_tokens(prompt_new, "input_ids")
        self._generation.admit(params.n)
        sampling, asked = self._sampling(call, body, session, parent, prompt, prompt_new)
        self._requests += 1
        rid = body.rid or f"{self._instance}-{self._requests}"
        try:
            self._generation.check_version(sampling)
            run = _Run(session, asked, prompt, rid, began, body.return_logprob)
            run.affinity = self._affinity(call, body, session, rid)
            if body.stream:
                return await self._stream(call, run, sampling, params.n)
            choices = [self._generation.choice(index, sampling.stops) for index in range(params.n)]
            await all_of([self._one(run, choice, sampling) for choice in choices])
            found = [self._result(run, choice) for choice in choices]
            return answer(found[0] if params.n == 1 else found)
        finally:
            self._replies.stopped(session)

    async def abort(self, call: Call) -> web.StreamResponse:
        """POST /abort_request: the aborted ones are answered with what they have."""
        body = api.parse(call.body, api.AbortRequest)
        if not body.abort_all and not body.rid:
            raise ApiError(400, "give rid, or abort_all", code="invalid_value", param="rid")
        if body.abort_all:
            return answer({"aborted": self._generation.abort("")})
        return answer(
            {"aborted": sum(self._generation.abort(f"{PLAIN}{body.rid}/{index}") for index in range(api.MOST_CHOICES))}
        )

    async def model_info(self, call: Call) -> web.StreamResponse:
        """GET /model_info, /get_model_info"""
        return answer(
            {
                "model_path": self._config.model,
                "served_model_name": self._config.model,
                "is_generation": True,
                "weight_version": str(self._generation.policy_version),
                "max_context_len": self._config.max_context_tokens,
            }
        )

    async def workers(self, call: Call) -> web.StreamResponse:
        """GET /workers: this gateway, under the name that its client knows it by."""
        scheme = "https" if self._config.tls is not None else "http"
        host = call.header("Host") or f"{self._config.address}:{self._config.port}"
        worker = {
            "id": "pearl",
            "url": f"{scheme}://{host}",
            "worker_type": "regular",
            "is_healthy": self._generation.serving > 0,
            "load": self._generation.in_flight,
        }
        return answer({"workers": [worker], "total": 1})

    async def loads(self, call: Call) -> web.StreamResponse:
        """GET /v1/loads"""
        running = self._generation.in_flight
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": 0, "num_total_reqs": running}
        return answer({"loads": [load]})

    # --- one request

    def _sampling(
        self,
        call: Call,
        body: api.GenerateRequest,
        session: Session | None,
        parent: int,
        prompt: list[int],
        prompt_new: list[int],
    ) -> tuple[Sampling, Asked | None]:
        """How to sample; and, in a session, the request that it is from now on."""
        params = body.sampling_params
        task = session.task if session is not None else None
        wanted, otherwise = params.max_new_tokens, DEFAULT_NEW_TOKENS
        if task is not None:  # as its task says, whatever is asked for
            otherwise = min(wanted or self._config.max_new_tokens, self._config.max_new_tokens)
            wanted = None
        length = self._generation.length(len(prompt), wanted, otherwise)
        oldest, newest = versions_of(call, body.min_version, body.version) if task is None else (task.min_version, -1)
        own = [] if params.ignore_eos and task is None else self._vocabulary.stop_ids
        asked = None
        if session is not None:
            text = body.text or ""
            asked = session.ask(parent, prompt_new, self._now_ms(), text=text)
        seed = self._generation.any_seed() if params.sampling_seed is None else params.sampling_seed
        if task is not None and asked is not None:
            seed = turn_seed(task.sample_seed, asked.depth, asked.repeat)
        sampling = Sampling(
            max_new_tokens=length,
            temperature=params.temperature if task is None else task.temperature,
            seed=seed,
            stop_ids=[*own, *(params.stop_token_ids or () if task is None else ())],
            stops=stops_of(params.stop),
            min_version=oldest,
            max_version=newest,
        )
        return sampling, asked

    @staticmethod
    def _affinity(call: Call, body: api.GenerateRequest, session: Session | None, rid: str) -> str:
        if session is not None:
            return session.trajectory
        named = body.session_id or call.header("X-SMG-Routing-Key") or call.header("X-Session-Id")
        return affinity_of(named or rid) if named or body.rid else f"{PLAIN}{rid}"

    async def _one(self, run: _Run, choice: Choice, sampling: Sampling) -> None:
        if run.session is not None and run.asked is not None:
            await self._replies.turn(choice, run.prompt, sampling, run.session, run.asked)
            return
        each = msgspec.structs.replace(sampling, seed=seed_of(sampling.seed, choice.index))
        request = f"{PLAIN}{run.rid}/{choice.index}"
        await self._replies.plain(choice, run.prompt, each, request=request, affinity=run.affinity)

    async def _stream(self, call: Call, run: _Run, sampling: Sampling, count: int) -> web.StreamResponse:
        """Each event has the whole reply so far, as SGLang's have."""
        wake = asyncio.Event()
        choices = [self._generation.choice(index, sampling.stops, wake.set) for index in range(count)]
        tasks = [asyncio.create_task(self._one(run, choice, sampling)) for choice in choices]
        for task in tasks:
            task.add_done_callback(lambda _: wake.set())
        stream = EventStream(call, self._config.send_s)
        open_choices = set(range(count))
        try:
            while open_choices:
                await wake.wait()
                wake.clear()
                pieces: list[bytes] = []
                for index in sorted(open_choices):
                    if tasks[index].done():
                        tasks[index].result()
                        open_choices.discard(index)
                    choice = choices[index]
                    if len(choice.tokens) > choice.logged or index not in open_choices:
                        choice.logged = len(choice.tokens)
                        result = self._result(run, choice)
                        pieces.append(event(result if count == 1 else {"index": index, **result}))
                if pieces:
                    await stream.send(b"".join(pieces))
        except ApiError as error:
            if stream.response is None:
                raise
            await stream.send(event(error.body))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await stream.send(DONE)
        return await stream.end()

    def _result(self, run: _Run, choice: Choice) -> Json:
        reply = choice.reply
        finish: Json | None = None
        if reply is not None:
            finish = {"type": reply.finish}
            if reply.finish == "length":
                finish["length"] = len(reply.tokens)
            elif reply.finish == "stop" and choice.text.enough is None and reply.tokens:
                finish["matched"] = reply.tokens[-1]
        meta: Json = {
            "id": run.rid,
            "finish_reason": finish,
            "prompt_tokens": len(run.prompt),
            "completion_tokens": len(choice.tokens),
            "cached_tokens": reply.cached_tokens if reply is not None else 0,
            **metadata_of(choice),
            "e2e_latency": time.monotonic() - run.began,
        }
        if run.logprobs:
            meta["output_token_logprobs"] = [
                [value, token, None] for value, token in zip(choice.logprobs, choice.tokens, strict=True)
            ]
        return {"text": choice.text.text, "output_ids": choice.tokens, "meta_info": meta}


class _Run:
    """What the replies to one request share."""

    def __init__(
        self,
        session: Session | None,
        asked: Asked | None,
        prompt: Sequence[int],
        rid: str,
        began: float,
        logprobs: bool,
    ) -> None:
        self.session = session
        self.asked = asked
        self.prompt = list(prompt)
        self.rid = rid
        self.began = began
        self.logprobs = logprobs
        self.affinity = ""
