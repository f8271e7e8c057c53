"""The gateway over HTTP, in memory: what clients get, and what they get when they ask for what cannot be."""

from __future__ import annotations

import asyncio
import gzip
import socket

import msgspec
import pytest

from messages.agent import NotNow
from messages.ids import PolicyVersion, RequestId, TrajectoryId
from services.edge.request import FEW, Interruption, RequestEdge, RequestSpec
from services.router.gateway.config import Config
from services.router.gateway.generation import HOLD_MS
from services.router.gateway.openapi import ENDPOINTS
from tests.gateway_world import MODEL, World, chat, hello, job_of, said
from tests.waiting import until


async def test_a_chat_whole_and_streamed_says_the_same() -> None:
    async with World() as world:
        whole = await world.post("/v1/chat/completions", chat("Hi", logprobs=True))
        assert whole["object"] == "chat.completion" and whole["model"] == MODEL
        choice = whole["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == 14
        assert whole["weight_versions"] == [{"version": "3", "start": 0, "end": 14}]
        assert len(choice["logprobs"]["content"]) == 14 and choice["logprobs"]["content"][0]["token"] == "H"
        body = chat("Hi", logprobs=True, stream_options={"include_usage": True})
        events = await world.events("/v1/chat/completions", body)
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content") or "" for delta in deltas) == "Hello, world!"
        content = [
            each
            for event in events
            for choice_ in event["choices"]
            for each in (choice_["logprobs"] or {}).get("content", [])
        ]
        assert content == choice["logprobs"]["content"]
        assert events[-1]["usage"] == whole["usage"]
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        prompt = bytes(world.cluster.generates[0].prompt[1:3])
        assert prompt == b"us" and world.cluster.generates[0].prompt == world.cluster.generates[1].prompt


async def test_completions_take_text_ids_and_lists() -> None:
    async with World() as world:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 5, "logprobs": 0}
        whole = await world.post("/v1/completions", body)
        assert whole["choices"][0]["text"] == "Hello" and whole["choices"][0]["finish_reason"] == "length"
        assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        events = await world.events("/v1/completions", body)
        assert "".join(event["choices"][0]["text"] for event in events) == "Hello"
        await world.post("/v1/completions", {**body, "prompt": [72, 105]})
        assert world.cluster.generates[-1].prompt == [72, 105]
        several = await world.post("/v1/completions", {**body, "prompt": ["Hi", [72]], "n": 2, "seed": 7})
        assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
        assert len({generate.seed for generate in world.cluster.generates[-4:]}) == 4
        assert several["usage"]["prompt_tokens"] == 3 and several["usage"]["completion_tokens"] == 20


async def test_stop_strings_end_a_reply_at_the_same_token_however_it_comes() -> None:
    async with World() as world:
        for stop in ("lo, w", ["zzz", "lo, w", "rld"]):
            body = chat("Hi", stop=stop, return_token_ids=True)
            whole = await world.post("/v1/chat/completions", body)
            assert whole["choices"][0]["message"]["content"] == "Hel"
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["choices"][0]["token_ids"] == said("Hello, w", ended=False)
            events = await world.events("/v1/chat/completions", body)
            assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == "Hel"
            ids = [token for e in events for token in e["choices"][0].get("token_ids", [])]
            assert ids == said("Hello, w", ended=False)


async def test_what_becomes_of_its_workers_shows_in_nothing() -> None:
    scripts = (
        ["cut:4", "refuse", "die:2", "lose", "cut:0"],
        ["lose"],
        ["cut:13", "cut:1"],
        ["refuse", "refuse"],
        ["cut:4", "not_now", "refuse", "not_now"],
    )
    async with World(silence_ms=60) as world:
        for stream in (False, True):
            for script in scripts:
                world.cluster.script.extend(script)
                if stream:
                    events = await world.events("/v1/chat/completions", chat("Hi"))
                    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
                else:
                    whole = await world.post("/v1/chat/completions", chat("Hi"))
                    text = whole["choices"][0]["message"]["content"]
                assert text == "Hello, world!" and not world.cluster.script
        report = await world.report()
        assert report.regenerated == 0 and report.ok, report.violations
        assert world.gateway.metrics.interruptions >= 10
        assert world.cluster.ended == world.cluster.assigned, "the router is told of every end, once"


async def test_the_router_is_told_of_the_end_of_placements_that_the_table_forbids() -> None:
    async with World(queue_s=0.05) as world:
        world.table.write(3, serving=False)
        await world.post("/v1/chat/completions", chat("Hi"), status=503)
        assert world.cluster.assigned and not world.cluster.generates
        assert world.cluster.ended == world.cluster.assigned


async def test_an_abort_after_the_last_token_changes_nothing() -> None:
    async with World() as world:
        whole = said("Hello, world!")
        edge = RequestEdge(world.broker.connect(), "demo", "e", silence_ms=60_000, ask_router=world.cluster.assign)
        await edge.start()
        journalled: list[Interruption] = []

        async def journal(interruption: Interruption) -> None:
            journalled.append(interruption)
            assert len(journalled) == 1 and edge.abort(interruption.request), "it is still known"

        world.cluster.script.append(f"cut:{len(whole)}")
        spec = RequestSpec(
            request=RequestId("r"),
            session=TrajectoryId("s"),
            prompt=[1],
            max_new_tokens=50,
            temperature=1.0,
            seed=1,
            stop_ids=whole[-1:],
            min_version=PolicyVersion(0),
        )
        reply = await edge.generate(spec, journal)
        assert (reply.finish, reply.tokens, len(journalled)) == ("stop", whole, 1)
        assert not edge.abort("r")
        await edge.stop()


async def test_tools_go_through_the_template_and_calls_come_back() -> None:
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {}}},
    }
    reply = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
    async with World(lambda message: said(reply)) as world:
        whole = await world.post("/v1/chat/completions", chat("1+2?", tools=[tool]))
        assert '"name": "add"' in bytes(i for i in world.cluster.generates[0].prompt if i < 256).decode()
        message, finish = whole["choices"][0]["message"], whole["choices"][0]["finish_reason"]
        assert finish == "tool_calls" and message["content"] == "Let me see."
        call = message["tool_calls"][0]
        assert call["function"] == {"name": "add", "arguments": '{"a":1,"b":[2]}'} and call["id"].startswith("call_")
        events = await world.events("/v1/chat/completions", chat("1+2?", tools=[tool]))
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content") or "" for delta in deltas).strip() == "Let me see."
        streamed = [each for delta in deltas for each in delta.get("tool_calls", [])]
        assert streamed[0]["function"] == call["function"]
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        none = await world.post("/v1/chat/completions", chat("1+2?", tools=[tool], tool_choice="none"))
        assert none["choices"][0]["message"]["content"] == reply


async def test_sglangs_generate_and_what_slime_asks_around_it() -> None:
    async with World() as world:
        body = {"input_ids": [72, 105], "sampling_params": {"max_new_tokens": 64, "top_k": -1}, "return_logprob": True}
        whole = await world.post("/generate", body)
        meta = whole["meta_info"]
        assert [each[1] for each in meta["output_token_logprobs"]] == whole["output_ids"] == said("Hello, world!")
        assert meta["finish_reason"]["type"] == "stop" and meta["weight_version"] == "3"
        events = await world.events("/generate", body)
        assert events[-1]["output_ids"] == whole["output_ids"] and events[-1]["text"] == "Hello, world!"
        assert len(events) > 1 and events[0]["meta_info"]["finish_reason"] is None
        workers = await world.get("/workers")
        assert workers["workers"][0]["url"] == world.gateway.url
        world.cluster.script.append("hold:3")
        running = asyncio.create_task(world.post("/generate", {**body, "rid": "mine"}))
        await world.cluster.reached.wait()
        assert (await world.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 1
        assert await world.post("/abort_request", {"abort_all": True}) == {"aborted": 1}
        aborted = await running
        assert aborted["meta_info"]["finish_reason"]["type"] == "abort" and aborted["output_ids"] == [72, 101, 108]
        assert (await world.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 0


async def test_a_client_that_goes_away_frees_its_worker() -> None:
    async with World() as world:
        for path, body in (("/v1/chat/completions", chat("Hi", stream=True)), ("/v1/chat/completions", chat("Hi"))):
            world.cluster.script.append("hold:3")
            world.cluster.reached.clear()
            world.cluster.cancelled.clear()
            request = asyncio.create_task(world.post(path, body))
            await world.cluster.reached.wait()
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            async with asyncio.timeout(5):
                await world.cluster.cancelled.wait()
        assert world.gateway.generation.in_flight == 0
        assert world.gateway.metrics.cancelled == 2


async def test_versions_are_asked_for_and_told() -> None:
    async with World() as world:
        async with world.http.post("/v1/chat/completions", json=chat("Hi", min_version=3)) as response:
            assert response.status == 200 and response.headers["X-Pearl-Version"] == "3"
        await world.post("/v1/chat/completions", chat("Hi", version=3))
        assert world.cluster.generates[-1].min_version == 3
        for body, headers in (
            (chat("Hi", min_version=4), {}),
            (chat("Hi", version=2), {}),
            (chat("Hi"), {"X_Pearl_Min_Version": "4"}),
            (chat("Hi"), {"X_Pearl_Version": "9"}),
        ):
            answer = await world.post("/v1/chat/completions", body, status=409, **headers)
            assert answer["error"]["code"] == "version_unavailable"
        await world.post("/v1/chat/completions", chat("Hi"), status=400, X_Pearl_Version="new")
        world.cluster.script.append("hold:3")
        request = asyncio.create_task(world.post("/v1/chat/completions", chat("Hi", version=3), status=409))
        await world.cluster.reached.wait()
        world.cluster.version = 4
        world.cluster.release.set()
        assert (await request)["error"]["code"] == "version_unavailable"


async def test_only_replies_that_nobody_reads_along_come_in_fewer_chunks() -> None:
    async with World() as world:
        body = {"input_ids": [72], "sampling_params": {"max_new_tokens": 8}}
        await world.post("/generate", body)
        await world.events("/generate", body)
        await world.post("/v1/chat/completions", chat("Hi"))
        await world.post("/v1/chat/completions", chat("Hi", stop="zebra"))
        assert [message.hold_ms for message in world.cluster.generates] == [HOLD_MS, 0, HOLD_MS, 0]


async def test_messages_of_many_requests_go_out_together_each_once_and_a_cancel_after_its_request() -> None:
    many = 4 * FEW
    async with World() as world:
        world.cluster.script.extend(["hold:3"] * many)
        running = [asyncio.create_task(world.post("/v1/chat/completions", chat("Hi"))) for _ in range(many)]
        async with asyncio.timeout(10):
            while len(world.cluster.generates) < many:  # noqa: ASYNC110 - yields to the gateway under test
                await asyncio.sleep(0)
            running[0].cancel()
            await world.cluster.cancelled.wait()
        world.cluster.release.set()
        replies = await asyncio.gather(*running[1:])
        assert {reply["choices"][0]["message"]["content"] for reply in replies} == {"Hello, world!"}
        assert len({message.request for message in world.cluster.generates}) == len(world.cluster.generates) == many
        assert len(world.cluster.cancels) == 1


async def test_too_much_at_once_is_429() -> None:
    async with World(max_requests=1) as world:
        world.cluster.script.append("hold:3")
        running = asyncio.create_task(world.post("/v1/chat/completions", chat("Hi")))
        await world.cluster.reached.wait()
        async with world.http.post("/v1/chat/completions", json=chat("Hi")) as response:
            assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        world.cluster.release.set()
        await running


async def test_a_first_token_is_waited_for_as_long_as_the_job_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    time, ahead_s = loop.time, [0.0]
    monkeypatch.setattr(loop, "time", lambda: time() + ahead_s[0])
    async with World(queue_s=Config.of(job_of(queue_ms=20_000)).queue_s) as world:
        for late_s, status in ((15.0, 200), (25.0, 429)):
            world.cluster.script.append("hold:0")
            asked = asyncio.create_task(world.post("/v1/chat/completions", chat("Hi"), status=status))
            await world.cluster.reached.wait()
            ahead_s[0] += late_s
            for _ in range(10):  # whatever is due by now
                await asyncio.sleep(0)
            if status == 200:
                world.cluster.release.set()
            await asked
            world.cluster.reached.clear()
            world.cluster.release.clear()


async def test_full_workers_are_429_and_nobody_serving_503() -> None:
    async with World(queue_s=0.05) as world:
        world.cluster.not_now = NotNow(request="", attempt=1, retry_after_ms=20, reason="all workers full")
        assert (await world.post("/v1/chat/completions", chat("Hi"), status=429))["error"]["code"] == "overloaded"
        world.table.write(3, published=4)
        answer = await world.post("/v1/chat/completions", chat("Hi", min_version=4), status=409)
        assert answer["error"]["code"] == "version_unavailable"
        world.table.write(3, serving=False)
        assert (await world.post("/v1/chat/completions", chat("Hi"), status=503))["error"]["code"] == "no_worker"
        assert (await world.get("/ready", status=503))["workers"] == 0
        assert (await world.get("/health"))["status"] == "ok"
        assert world.gateway.generation.in_flight == 0


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"model": "gpt-4"}, 404, "model_not_found", "model"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
        ({"messages": "Hi"}, 400, "invalid_value", "messages"),
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"top_p": 0.9}, 400, "unsupported_parameter", "top_p"),
        ({"presence_penalty": 1}, 400, "unsupported_parameter", "presence_penalty"),
        ({"logit_bias": {"1": 2}}, 400, "unsupported_parameter", "logit_bias"),
        ({"top_logprobs": 3}, 400, "unsupported_parameter", "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format.type"),
        ({"tool_choice": "required"}, 400, "unsupported_parameter", "tool_choice"),
        ({"n": 1000}, 400, "invalid_value", "n"),
        ({"seed": 2**70}, 400, "invalid_value", "seed"),
        ({"stop": ["a"] * 99}, 400, "invalid_value", "stop"),
        ({"max_tokens": 1999}, 400, "context_length_exceeded", None),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "context_length_exceeded", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "unsupported_parameter",
            "messages[0].content",
        ),
    ],
)
async def test_what_is_wrong_is_named(change, status, code, param) -> None:
    async with World() as world:
        error = (await world.post("/v1/chat/completions", chat("Hi", **{}) | change, status=status))["error"]
        assert (error["code"], error["param"]) == (code, param), error
        assert not world.cluster.generates
        await world.post("/v1/chat/completions", chat("Hi"))


async def test_keys_are_asked_for() -> None:
    async with World() as world:
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}, {"Authorization": "Basic x"}):
            answer = await world.post("/v1/chat/completions", chat("Hi"), status=401, **headers)
            assert answer["error"]["code"] == "invalid_api_key"
        answer = await world.post("/v1/chat/completions", chat("Hi"), Authorization="", X_Api_Key="sk-test")
        assert answer["choices"]
        await world.get("/health")
    async with World(keys=()) as world:
        await world.post("/v1/chat/completions", chat("Hi"), Authorization="")


OTHERS_KEYS = [
    {"Authorization": "Bearer sk-wrong"},
    {"Authorization": ""},
    {"Authorization": "", "X_Api_Key": "sk-wrong"},
]


@pytest.mark.parametrize(("method", "path"), sorted({(method, path) for method, path, *_ in ENDPOINTS}))
async def test_every_path_asks_for_the_key_or_is_meant_for_all(method: str, path: str) -> None:
    async with World() as world:
        free = path in ("/health", "/ready", "/health_generate", "/openapi.json")
        for headers in OTHERS_KEYS:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            async with world.http.request(method, path.replace("{id}", "x"), data=b"{", headers=named) as response:
                answer = msgspec.json.decode(await response.read())
            if free:
                assert response.status in (200, 503) and "error" not in answer
            else:
                assert response.status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert not world.cluster.generates


LONG = {"messages": [{"role": "user", "content": "x" * 3000}], "prompt": "x" * 3000, "text": "x" * 3000}
WITHOUT_MODEL = ("/generate",)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize(
    ("wrong", "status", "code"),
    [
        ("model", 404, "model_not_found"),
        ("context", 400, "context_length_exceeded"),
        ("room", 400, "context_length_exceeded"),
        ("key", 401, "invalid_api_key"),
        ("size", 413, "body_too_large"),
        ("form", 400, "invalid_json"),
    ],
)
async def test_a_request_that_cannot_be_disturbs_no_other(path, stream, wrong, status, code) -> None:
    """Each is refused with its status before any stream begins, while another client's reply goes on."""
    if wrong == "model" and path in WITHOUT_MODEL:
        pytest.skip("SGLang's requests name no model")
    fields = {"/v1/chat/completions": ("messages", "max_tokens"), "/v1/completions": ("prompt", "max_tokens")}
    what, length = fields.get(path, ("text", ""))
    body = {what: [{"role": "user", "content": "Hi"}] if what == "messages" else "Hi", "stream": stream}
    if path not in WITHOUT_MODEL:
        body["model"] = "gpt-4" if wrong == "model" else MODEL
    if wrong == "context":
        body[what] = LONG[what]
    if wrong == "room":
        body |= {length: 1999} if length else {"sampling_params": {"max_new_tokens": 1999}}
    data = msgspec.json.encode(body)
    data = data + b" " * 5000 if wrong == "size" else data[:-1] if wrong == "form" else data
    async with World(max_body_bytes=5000) as world:
        world.cluster.script.append("hold:3")
        other = asyncio.create_task(world.events("/v1/chat/completions", chat("Hi")))
        await world.cluster.reached.wait()
        key = {"Authorization": "Bearer sk-wrong"} if wrong == "key" else {}
        error = (await world.post(path, data, status=status, **key))["error"]
        assert error["code"] == code and error["message"] and set(error) == {"message", "type", "param", "code"}
        assert len(world.cluster.generates) == 1 and world.gateway.generation.in_flight == 1
        world.cluster.release.set()
        text = "".join(each["choices"][0]["delta"].get("content") or "" for each in await other)
        assert text == "Hello, world!" and not world.cluster.cancels


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"model": "tiny"}', b"\xff\xfe", b"[" * 100_000, b"1" * 5000]
)
async def test_bodies_that_are_none(body) -> None:
    async with World() as world:
        for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/sessions/x/reward"):
            error = (await world.post(path, body, status=400))["error"]
            assert error["type"] == "invalid_request_error" and error["message"]


async def test_paths_and_methods_that_are_none() -> None:
    async with World() as world:
        assert (await world.get("/v1/nothing", status=404))["error"]["code"] == "unknown_url"
        async with world.http.get("/v1/chat/completions") as response:
            assert response.status == 405 and response.headers["Allow"] == "POST"
        assert (await world.get("/v1/models/other", status=404))["error"]["code"] == "model_not_found"
        assert (await world.get(f"/v1/models/{MODEL}"))["id"] == MODEL
        assert (await world.get("/v1/models"))["data"][0]["id"] == MODEL


async def raw(world: World, data: bytes, *, half_close: bool = False) -> bytes:
    """What comes back for these bytes, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.port)
    writer.write(data)
    if half_close:
        writer.write_eof()
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


BOMB = gzip.compress(b" " * 20_000_000)
"""20 kB that become more than a body may have."""
WHOLE = msgspec.json.encode(chat("Hi"))
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-test\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("data", "half_close", "status"),
    [
        (b"NONSENSE\r\n\r\n", False, b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", False, b"400"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", False, b"400"),
        (HEAD + b"Content-Length: nine\r\n\r\n{}", False, b"400"),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n{}", False, b"400"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", False, b"400"),
        (HEAD + b"Content-Length: 100\r\n\r\n{", False, b"408"),  # slow
        (b"POST /v1/cha", False, b"408"),
        (HEAD + b"Content-Length: 999999999\r\n\r\n", False, b"413"),
        (HEAD + b"Content-Length: 100\r\n\r\n{", True, b"400"),  # half closed before it is whole
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", True, b"400"),
        (b"POST /v1/cha", True, b"400"),
        (HEAD.replace(b"sk-test", b"sk-none") + b"Content-Length: 100\r\n\r\n{", False, b"401"),
        (HEAD + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE, True, b""),  # whole, and nobody is there any more
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ", False, b"400"),
        (HEAD + b"X-Session-Id: a\x00b\r\nContent-Length: 2\r\n\r\n{}", False, b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", False, b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50), False, b"400"),  # TLS
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB, False, b"413"),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\nnot gzip!", False, b"400"),
    ],
)
async def test_malformed_slow_large_and_half_closed_requests(data, half_close, status) -> None:
    async with World(receive_s=1.5) as world:
        world.cluster.script.append("hold:3")
        other = asyncio.create_task(world.post("/v1/chat/completions", chat("Hi")))
        await world.cluster.reached.wait()
        answer = await raw(world, data, half_close=half_close)
        world.cluster.release.set()
        assert (await other)["choices"][0]["message"]["content"] == "Hello, world!"
        if status:
            assert answer[:9] in (b"HTTP/1.1 ", b"HTTP/1.0 ") and answer[9:12] == status, answer[:200]
            assert b'"error"' in answer
        else:
            assert answer == b""


async def test_a_large_body_is_refused_while_it_comes() -> None:
    async with World(max_body_bytes=1000) as world:
        error = (await world.post("/v1/chat/completions", chat("x" * 2000), status=413))["error"]
        assert error["code"] == "body_too_large"

        async def pieces():
            for _ in range(40):
                yield b" " * 100

        async with world.http.post("/v1/chat/completions", data=pieces()) as response:
            assert response.status == 413


async def test_a_client_that_takes_nothing_of_its_stream_is_dropped() -> None:
    """Its reply is larger than what sockets hold."""
    sampling = b'{"max_new_tokens": 1900, "n": 128}'
    body = b'{"input_ids": [72], "sampling_params": ' + sampling + b', "return_logprob": true, "stream": true}'
    head = HEAD.replace(b"/v1/chat/completions", b"/generate") + b"Content-Length: %d\r\n\r\n" % len(body)
    async with World(lambda message: [97] * 1900, send_s=0.2) as world:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.connect(("127.0.0.1", world.gateway.port))
        _, writer = await asyncio.open_connection(sock=small, limit=1024)
        writer.write(head + body)
        await until(lambda: world.gateway.metrics.cancelled)
        assert world.gateway.generation.in_flight == 0
        writer.close()
        world.cluster.answer = hello
        await world.post("/v1/chat/completions", chat("Hi"))


async def test_metrics_count() -> None:
    async with World() as world:
        await world.post("/v1/chat/completions", chat("Hi"))
        await world.post("/v1/chat/completions", chat("Hi", top_p=0.5), status=400)
        async with world.http.get("/metrics") as response:
            text = await response.text()
        assert 'pearl_gateway_requests_total{endpoint="/v1/chat/completions",status="200"} 1' in text
        assert 'pearl_gateway_requests_total{endpoint="/v1/chat/completions",status="400"} 1' in text
        assert "pearl_gateway_completion_tokens_total 14" in text and "pearl_gateway_request_seconds_count 1" in text


def test_the_fixture_says_hello() -> None:
    assert hello(None)[-1] == 257  # type: ignore[arg-type]
