"""OpenAI's interface: chats, completions, models; whole or as a stream, alone or within a session."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from messages.agent import PLAIN
from services.router.gateway import api, tool_calls
from services.router.gateway.config import Config
from services.router.gateway.errors import ApiError
from services.router.gateway.generation import Choice, Generation, Sampling, seed_of
from services.router.gateway.replies import (
    Replies,
    affinity_of,
    all_of,
    stops_of,
    version_header,
    versions_of,
    versions_told,
)
from services.router.gateway.server import DONE, Call, EventStream, answer, event
from services.router.gateway.sessions import (
    NO_PARENT,
    Asked,
    Session,
    chat_digests,
    extended,
    turn_seed,
)
from services.router.gateway.trajectories import Trajectories
from services.router.gateway.vocabulary import Vocabulary

DEFAULT_COMPLETION_TOKENS: Final = 16
"""As OpenAI's legacy interface has it."""

OBJECT: Final = {"chat": "chat.completion", "text": "text_completion"}

Json = dict[str, Any]


class _Job(msgspec.Struct, kw_only=True):
    """What becomes of one HTTP request."""

    kind: str  # "chat" | "text"
    id: str
    created: int
    model: str
    prompts: list[list[int]]  # one each, in the order of choices
    choices: list[Choice]
    samplings: list[Sampling]
    logprobs: bool
    token_ids: bool
    tools: bool
    usage: bool = True
    affinity: str = ""
    session: Session | None = None
    asked: Asked | None = None
    splitters: list[tool_calls.ToolText] = []
    begun: set[int] = set()  # choices of a stream of which something was sent


class OpenAI:
    """The endpoints. Raises ApiError."""

    def __init__(
        self, config: Config, generation: Generation, vocabulary: Vocabulary, trajectories: Trajectories
    ) -> None:
        self._config = config
        self._generation = generation
        self._vocabulary = vocabulary
        self._replies = Replies(generation, trajectories)
        self._now_ms = trajectories.now_ms
        self._requests = 0
        self._instance = secrets.token_hex(4)
        self._started = int(time.time())

    # --- endpoints

    async def models(self, call: Call) -> web.StreamResponse:
        """GET /v1/models"""
        return answer({"object": "list", "data": [self._model()]})

    async def model(self, call: Call) -> web.StreamResponse:
        """GET /v1/models/{id}"""
        self._check_model(call.rest)
        return answer(self._model())

    async def chat(self, call: Call) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        body = api.parse(call.body, api.ChatRequest)
        session = self._replies.session(call)
        self._check_model(body.model)
        api.check_chat(body)
        messages = api.plain_messages(body.messages)
        tools = [] if body.tool_choice == "none" else api.plain_tools(body.tools)
        options = body.chat_template_kwargs or {}
        wanted = body.max_completion_tokens or body.max_tokens
        usage = not body.stream or (body.stream_options is not None and body.stream_options.include_usage)
        if session is None:
            prompt = self._vocabulary.encode(self._vocabulary.render(messages, tools, options), "messages")
            job = self._plain_job("chat", call, body, [prompt], wanted, self._config.max_context_tokens)
            job.usage = usage
            job.logprobs = bool(body.logprobs)
            return await self._respond(call, self._with_tools(job, bool(tools)), bool(body.stream))
        digests = chat_digests(messages, [tools, options])
        parent, covered = session.of_messages(digests)
        text = None
        if parent != NO_PARENT:
            reply = session.turns[parent].reply
            is_ended = reply[-1:] == [self._vocabulary.eos_id]
            text = self._vocabulary.continuation(messages[covered:], tools, options, ended=is_ended)
        if text is None:
            parent, text = NO_PARENT, self._vocabulary.render(messages, tools, options)
        prompt_new = self._vocabulary.encode(text, "messages")
        job = self._session_job("chat", call, body, session, parent, prompt_new, wanted, digest=digests[-1])
        job.usage = usage
        job.logprobs = bool(body.logprobs)
        return await self._respond(call, self._with_tools(job, bool(tools)), bool(body.stream))

    async def completions(self, call: Call) -> web.StreamResponse:
        """POST /v1/completions"""
        body = api.parse(call.body, api.CompletionRequest)
        session = self._replies.session(call)
        self._check_model(body.model)
        api.check_completion(body)
        prompts = api.prompts_of(body)
        usage = not body.stream or (body.stream_options is not None and body.stream_options.include_usage)
        if session is None:
            ids = [
                self._vocabulary.encode(prompt, "prompt") if isinstance(prompt, str) else prompt for prompt in prompts
            ]
            job = self._plain_job("text", call, body, ids, body.max_tokens, DEFAULT_COMPLETION_TOKENS)
        else:
            if len(prompts) != 1:
                raise ApiError(400, "a session takes one prompt at a time", code="invalid_value", param="prompt")
            prompt, text = prompts[0], ""
            if isinstance(prompt, str):
                parent, added = session.of_text(prompt)
                text, prompt_new = prompt, self._vocabulary.encode(added, "prompt")
            else:
                parent, prompt_new = session.of_tokens(prompt)
            job = self._session_job("text", call, body, session, parent, prompt_new, body.max_tokens, text=text)
        job.usage = usage
        job.logprobs = body.logprobs is not None
        return await self._respond(call, job, bool(body.stream))

    # --- what is asked

    def _check_model(self, model: str) -> None:
        if model != self._config.model:
            raise ApiError(
                404,
                f"the model {model[:100]!r} does not exist; {self._config.model!r} does",
                code="model_not_found",
                param="model",
            )

    def _id(self, kind: str) -> str:
        self._requests += 1
        return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{self._instance}-{self._requests}"

    def _plain_job(
        self, kind: str, call: Call, body: Any, prompts: Sequence[list[int]], wanted: int | None, otherwise: int
    ) -> _Job:
        api.check_sampling(body)
        count = body.n or 1
        if len(prompts) * count > api.MOST_CHOICES:
            raise ApiError(400, f"at most {api.MOST_CHOICES} choices", code="invalid_value", param="n")
        self._generation.admit(len(prompts) * count)
        base = self._generation.any_seed() if body.seed is None else body.seed
        oldest, newest = versions_of(call, body.min_version, body.version)
        samplings: list[Sampling] = []
        for index in range(len(prompts) * count):
            prompt = prompts[index // count]
            self._generation.check_tokens(prompt, "prompt")
            samplings.append(
                Sampling(
                    max_new_tokens=self._generation.length(len(prompt), wanted, otherwise),
                    temperature=1.0 if body.temperature is None else body.temperature,
                    seed=seed_of(base, index),
                    stop_ids=self._stop_ids(body),
                    stops=stops_of(body.stop),
                    min_version=oldest,
                    max_version=newest,
                )
            )
        self._generation.check_version(samplings[0])
        identity = self._id(kind)
        return self._job(
            kind, body, identity, samplings, [prompts[index // count] for index in range(len(samplings))], call
        )

    def _session_job(
        self,
        kind: str,
        call: Call,
        body: Any,
        session: Session,
        parent: int,
        prompt_new: list[int],
        wanted: int | None,
        *,
        digest: bytes = b"",
        text: str = "",
    ) -> _Job:
        if (body.n or 1) != 1:
            raise ApiError(400, "a session takes one reply at a time: n = 1", code="invalid_value", param="n")
        task, config = session.task, self._config
        prompt = [*session.context(parent), *prompt_new]
        self._generation.check_tokens(prompt_new, "prompt")
        length = self._generation.length(len(prompt), None, config.max_context_tokens)
        if task is None:
            api.check_sampling(body)
        else:  # the policy that is trained is sampled as its task says, whatever its harness asks for
            wanted = min(wanted or config.max_new_tokens, config.max_new_tokens)
        oldest, newest = versions_of(call, body.min_version, body.version) if task is None else (task.min_version, -1)
        self._generation.admit(1)
        seed = self._generation.any_seed() if body.seed is None else seed_of(body.seed, 0)
        temperature = 1.0 if body.temperature is None else body.temperature
        asked = session.ask(parent, prompt_new, self._now_ms(), digest=digest, text=text)
        sampling = Sampling(
            max_new_tokens=min(length, wanted or length),
            temperature=task.temperature if task is not None else temperature,
            seed=turn_seed(task.sample_seed, asked.depth, asked.repeat) if task is not None else seed,
            stop_ids=self._vocabulary.stop_ids if task is not None else self._stop_ids(body),
            stops=stops_of(body.stop),
            min_version=oldest,
            max_version=newest,
        )
        try:
            self._generation.check_version(sampling)
            job = self._job(kind, body, self._id(kind), [sampling], [prompt], call)
        except ApiError:
            self._replies.stopped(session)
            raise
        job.session, job.asked, job.affinity = session, asked, session.trajectory
        return job

    def _job(
        self, kind: str, body: Any, identity: str, samplings: list[Sampling], prompts: list[list[int]], call: Call
    ) -> _Job:
        routing = body.session_id or call.header("X-SMG-Routing-Key") or call.header("X-Session-Id") or body.user
        return _Job(
            kind=kind,
            id=identity,
            created=int(time.time()),
            model=self._config.model,
            prompts=prompts,
            choices=[],
            samplings=samplings,
            logprobs=False,
            token_ids=body.return_token_ids,
            tools=False,
            affinity=affinity_of(routing) if routing else identity,
        )

    def _stop_ids(self, body: Any) -> list[int]:
        own = [] if body.ignore_eos else self._vocabulary.stop_ids
        return [*own, *(body.stop_token_ids or ())]

    @staticmethod
    def _with_tools(job: _Job, tools: bool) -> _Job:
        job.tools = tools
        return job

    # --- replies

    async def _respond(self, call: Call, job: _Job, stream: bool) -> web.StreamResponse:
        try:
            if stream:
                return await self._stream(call, job)
            job.choices = [
                self._generation.choice(index, sampling.stops) for index, sampling in enumerate(job.samplings)
            ]
            await all_of([self._run(job, choice) for choice in job.choices])
            return answer(self._whole(job), headers=version_header(job.choices))
        finally:
            self._replies.stopped(job.session)

    async def _run(self, job: _Job, choice: Choice) -> None:
        prompt, sampling = job.prompts[choice.index], job.samplings[choice.index]
        session, asked = job.session, job.asked
        if session is None or asked is None:
            request = f"{PLAIN}{job.id}/{choice.index}"
            await self._replies.plain(choice, prompt, sampling, request=request, affinity=job.affinity)
            return

        def digest() -> bytes:
            return extended(asked.digest, self._message(job, choice)) if asked.digest else b""

        await self._replies.turn(choice, prompt, sampling, session, asked, digest)

    async def _stream(self, call: Call, job: _Job) -> web.StreamResponse:
        wake = asyncio.Event()
        job.choices = [
            self._generation.choice(index, sampling.stops, wake.set) for index, sampling in enumerate(job.samplings)
        ]
        job.splitters = [tool_calls.ToolText() for _ in job.choices]
        tasks = [asyncio.create_task(self._run(job, choice)) for choice in job.choices]
        for task in tasks:
            task.add_done_callback(lambda _: wake.set())
        stream = EventStream(call, self._config.send_s)
        open_choices = set(range(len(tasks)))
        try:
            while open_choices:
                await wake.wait()
                wake.clear()
                pieces: list[bytes] = []
                for index in sorted(open_choices):
                    choice, task = job.choices[index], tasks[index]
                    if task.done():
                        task.result()
                        open_choices.discard(index)
                    pieces += self._pieces(job, choice)
                if pieces:
                    await stream.send(b"".join(pieces))
        except ApiError as error:
            if stream.response is None:
                raise
            await stream.send(event(error.body) + DONE)
            return await stream.end()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        last = [event({**self._head(job, chunk=True), "choices": [], "usage": usage_of(job)})] if job.usage else []
        await stream.send(b"".join((*last, DONE)))
        return await stream.end()

    def _pieces(self, job: _Job, choice: Choice) -> list[bytes]:
        """Events that say what is new of a reply."""
        if not choice.tokens and choice.reply is None:
            return []
        first = choice.index not in job.begun
        job.begun.add(choice.index)
        over = choice.reply is not None
        text, choice.fresh = choice.fresh, ""
        calls: tuple[tool_calls.Call, ...] = ()
        if job.tools:
            splitter = job.splitters[choice.index]
            text = splitter.feed(text)
            if over:
                rest, calls = splitter.end()
                text += rest
        known, choice.logged = choice.logged, len(choice.tokens)
        new = choice.tokens[known:]
        extras: Json = {}
        if job.logprobs and new:
            extras["logprobs"] = self._logprobs(job, choice, known)
        if job.token_ids and new:
            extras["token_ids"] = new
        found: list[bytes] = []
        if text or extras or (first and job.kind == "chat"):
            delta = {"role": "assistant", "content": text} if job.kind == "chat" else None
            found.append(self._chunk(job, choice, delta, text, None, extras))
        if calls:
            found.append(self._chunk(job, choice, {"tool_calls": calls_of(job, choice, calls)}, "", None, {}))
        if over:
            assert choice.reply is not None
            finish = "tool_calls" if calls else choice.reply.finish
            ending = versions_told(choice)
            found.append(self._chunk(job, choice, {} if job.kind == "chat" else None, "", finish, {}, ending))
        return found

    def _chunk(
        self,
        job: _Job,
        choice: Choice,
        delta: Json | None,
        text: str,
        finish: str | None,
        extras: Mapping[str, Any],
        ending: Mapping[str, Any] | None = None,
    ) -> bytes:
        said: Json = {"delta": delta} if delta is not None else {"text": text}
        shown = {"index": choice.index, **said, "logprobs": None, "finish_reason": finish, **extras}
        return event({**self._head(job, chunk=True), "choices": [shown], **(ending or {})})

    def _head(self, job: _Job, *, chunk: bool = False) -> Json:
        kind = OBJECT[job.kind] + (".chunk" if chunk and job.kind == "chat" else "")
        return {"id": job.id, "object": kind, "created": job.created, "model": job.model}

    def _whole(self, job: _Job) -> Json:
        body = {
            **self._head(job),
            "choices": [self._choice(job, choice) for choice in job.choices],
            "usage": usage_of(job),
            **versions_told(job.choices[0]),
        }
        if job.session is not None:
            body["session_id"] = job.session.id
        if job.token_ids:
            body["prompt_token_ids"] = job.prompts[0]
        return body

    def _choice(self, job: _Job, choice: Choice) -> Json:
        assert choice.reply is not None
        shown: Json = {"index": choice.index, "finish_reason": choice.reply.finish}
        if job.kind == "chat":
            message = self._message(job, choice)
            shown["message"] = {**message, "refusal": None}
            if message.get("tool_calls"):
                shown["finish_reason"] = "tool_calls"
        else:
            shown["text"] = choice.text.text
        shown["logprobs"] = self._logprobs(job, choice, 0) if job.logprobs else None
        if job.token_ids:
            shown["token_ids"] = choice.tokens
        if len(job.choices) > 1:
            shown |= versions_told(choice)
        return shown

    def _message(self, job: _Job, choice: Choice) -> Json:
        """The assistant's message as its client gets it."""
        content, calls = tool_calls.parse(choice.text.text) if job.tools else (choice.text.text, ())
        message: Json = {"role": "assistant", "content": content or None if calls else content}
        if calls:
            message["tool_calls"] = calls_of(job, choice, calls)
        return message

    def _logprobs(self, job: _Job, choice: Choice, start: int) -> Json:
        """Of the sampled tokens from `start` on, in the form of the interface."""
        tokens, values = choice.tokens[start:], choice.logprobs[start:]
        pieces = [self._vocabulary.piece(token) for token in tokens]
        if job.kind == "chat":
            content = [
                {"token": piece, "logprob": value, "bytes": list(piece.encode("utf-8", "replace")), "top_logprobs": []}
                for piece, value in zip(pieces, values, strict=True)
            ]
            return {"content": content, "refusal": None}
        before = sum(len(self._vocabulary.piece(token)) for token in choice.tokens[:start])
        offsets: list[int] = []
        for piece in pieces:
            offsets.append(before)
            before += len(piece)
        return {"tokens": pieces, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}

    def _model(self) -> Json:
        return {
            "id": self._config.model,
            "object": "model",
            "created": self._started,
            "owned_by": "pearl",
            "max_model_len": self._config.max_context_tokens,
            "policy_version": self._generation.policy_version,
        }


def calls_of(job: _Job, choice: Choice, calls: Sequence[tool_calls.Call]) -> list[Json]:
    """Calls as the interface has them."""
    return [
        {
            "index": number,
            "id": f"call_{job.id.rpartition('-')[0].rpartition('-')[2]}{job.id.rpartition('-')[2]}_{choice.index}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]


def usage_of(job: _Job) -> Json:
    """Tokens of all replies; a prompt counts once however many replies it gets."""
    prompts = {id(prompt): len(prompt) for prompt in job.prompts}
    prompt, made = sum(prompts.values()), sum(len(choice.tokens) for choice in job.choices)
    cached = sum(choice.reply.cached_tokens for choice in job.choices if choice.reply is not None)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }
