"""Bodies of HTTP requests, as types: what is decoded, checked and described (`openapi.py`). Pure.

Unknown fields are ignored, as OpenAI's clients send what their version knows; a field that is known here and cannot be
honoured is refused by `problem_of_*`, since a silent default would be another answer than was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from msgspec import Meta

from messages.agent import RolloutTask
from services.router.gateway.errors import ApiError, unsupported

MOST_STOPS: Final = 16
MOST_CHOICES: Final = 128

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Version = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=MOST_STOPS)] | None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`include_usage`: a last chunk tells the token counts."""

    include_usage: bool = False


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a tool call."""

    name: Name
    arguments: str = "{}"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in an assistant's message."""

    function: Function
    id: str = ""
    type: str = "function"


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """Only text parts can be served."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message."""

    role: Annotated[str, Meta(pattern="^(system|developer|user|assistant|tool)$")]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None


class FunctionDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool does and takes; `parameters` is a JSON schema, which only the model reads."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    function: FunctionDescription
    type: Annotated[str, Meta(pattern="^function$")] = "function"


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: Name
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops = None
    seed: Int64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # PEARL's own
    min_version: Version | None = None  # of the policy: no older one may serve this
    version: Version | None = None  # exactly this one
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    session_id: Annotated[str, Meta(max_length=256)] | None = (
        None  # requests with the same one share their prefixes' KV cache
    )


class ChatRequest(_Common, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """Body of POST /v1/completions. A prompt is text or token ids; a list of either makes a choice (or `n`) of each."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's names. Fields that its clients always send are accepted at the values that change nothing."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Temperature = 1.0
    top_p: Probability = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: Choices = 1
    stop: Stops = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool = False
    sampling_seed: Int64 | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /generate: one prompt, as text or token ids."""

    text: str | None = None
    input_ids: list[TokenId] | None = None
    sampling_params: SamplingParams = SamplingParams()
    rid: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int = 0
    stream: bool = False
    session_id: Annotated[str, Meta(max_length=256)] | None = None
    min_version: Version | None = None
    version: Version | None = None


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/sessions.

    `train`: take the next rollout task, waiting up to `wait_s` for one. Without it the session is recorded and makes no
    trajectory. `task`: a task that the caller holds and acknowledges itself, instead of the next one. `owner_key`: only a key that
    the answer gives, in the header X-Session-Owner, can end the session; what speaks with the session's key cannot reward itself.
    `idle_s`: abandoned when nobody talks to it for so long, instead of gateway.session_idle_ms where that is longer. A GET of the
    session with the owner's key counts as talk.
    """

    train: bool = True
    wait_s: Annotated[float, Meta(ge=0, le=600)] = 10.0
    task: RolloutTask | None = None
    owner_key: bool = False
    idle_s: Annotated[float, Meta(ge=1, le=86400)] | None = None


class PostReward(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/sessions/{id}/reward."""

    reward: Annotated[float, Meta(ge=-1e9, le=1e9)]
    status: Annotated[str, Meta(pattern="^(completed|truncated)$")] = "completed"


B = TypeVar("B", bound=msgspec.Struct)
_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}
_WHERE: Final = re.compile(r"(.*) - at `\$\.?(.*)`")


def parse(data: bytes, kind: type[B]) -> B:
    """A body. Raises ApiError that names the field."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return cast(B, decoder.decode(data))
    except msgspec.ValidationError as error:
        found = _WHERE.fullmatch(str(error))
        text, where = (found[1], found[2]) if found is not None else (str(error), "")
        raise ApiError(400, f"{where}: {text}" if where else text, code="invalid_value", param=where or None) from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error


def check_sampling(body: _Common) -> None:
    """Raises ApiError for what no engine here can do."""
    if body.top_p is not None and body.top_p != 1:
        raise unsupported("top_p", body.top_p, "the engine samples from the whole distribution; leave it out, or 1")
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(body, name)
        if value:
            raise unsupported(name, value, "the engine has no penalties; leave it out, or 0")
    if body.logit_bias:
        raise unsupported("logit_bias", "{...}", "the engine biases no token; leave it out")


def check_chat(body: ChatRequest) -> None:
    """Raises ApiError for what a chat here cannot have."""
    if body.top_logprobs:
        raise unsupported("top_logprobs", body.top_logprobs, "only the sampled token's log-probability is known; use 0")
    form = (body.response_format or {}).get("type", "text")
    if form != "text":
        raise unsupported("response_format.type", form, "decoding is not constrained; use text")
    if body.tool_choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", body.tool_choice, 'the model cannot be forced to call; use "auto" or "none"')


def check_completion(body: CompletionRequest) -> None:
    """Raises ApiError for what a completion here cannot have."""
    if body.logprobs:
        raise unsupported("logprobs", body.logprobs, "only the sampled token's log-probability is known; use 0")
    if body.echo:
        raise unsupported("echo", True, "prompts have no log-probabilities; leave it out")
    if body.suffix:
        raise unsupported("suffix", body.suffix[:20], "the model does not fill in; leave it out")
    if body.best_of not in (None, 1, body.n or 1):
        raise unsupported("best_of", body.best_of, "all samples are returned; use n")


_NEUTRAL: Final[tuple[tuple[str, tuple[Any, ...]], ...]] = (
    ("top_p", (1.0,)), ("top_k", (-1, 0, 1 << 30)), ("min_p", (0.0,)), ("frequency_penalty", (0.0,)),
    ("presence_penalty", (0.0,)), ("repetition_penalty", (1.0,)), ("min_new_tokens", (0,)), ("json_schema", (None,)),
    ("regex", (None,)), ("ebnf", (None,)),
)  # fmt: skip
"""Values of sampling parameters that change nothing."""


def check_generate(body: GenerateRequest) -> None:
    """Raises ApiError for what SGLang could do and this cannot."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give either text or input_ids", code="invalid_value", param="input_ids")
    params = body.sampling_params
    for name, values in _NEUTRAL:
        value = getattr(params, name)
        if value not in values:
            raise unsupported(f"sampling_params.{name}", value, f"the engine knows only {values[0]!r}")
    if body.top_logprobs_num:
        raise unsupported("top_logprobs_num", body.top_logprobs_num, "only the sampled token's is known; use 0")


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, arguments of calls as objects. Raises ApiError."""
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        plain: dict[str, Any] = {"role": message.role, "content": _text(message, index)}
        if message.name:
            plain["name"] = message.name
        if message.tool_call_id:
            plain["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": _arguments(call)},
                }
                for call in message.tool_calls
            ]
        found.append(plain)
    return found


def _text(message: ChatMessage, index: int) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type != "text":
            raise unsupported(f"messages[{index}].content", part.type, "only text parts are")
    return "".join(part.text for part in message.content)


def _arguments(call: ToolCall) -> Any:  # Any: JSON
    try:
        return msgspec.json.decode(call.function.arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return call.function.arguments


def plain_tools(tools: Sequence[Tool] | None) -> list[Mapping[str, Any]]:
    """Tools as templates expect them."""
    return [
        {
            "type": "function",
            "function": {
                key: value for key, value in msgspec.structs.asdict(tool.function).items() if value is not None
            },
        }
        for tool in tools or ()
    ]


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion request, each text or token ids. Raises ApiError."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(each, int) for each in prompt):
        return [cast("list[int]", prompt)]
    if not prompt or any(isinstance(each, int) for each in prompt) or len(prompt) > MOST_CHOICES:
        raise ApiError(
            400,
            f"prompt: text, token ids, or a list of up to {MOST_CHOICES} of one kind",
            code="invalid_value",
            param="prompt",
        )
    return cast("list[str | list[int]]", prompt)
