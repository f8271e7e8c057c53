"""The OpenAPI description of the gateway, made from the types that its requests are decoded into. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from services.router.gateway import api
from services.router.gateway.errors import ErrorBody
from services.router.gateway.sessions import Result

Json = dict[str, Any]

_ANY: Final[Json] = {"type": "object"}

ENDPOINTS: Final[tuple[tuple[str, str, type[msgspec.Struct] | None, int, str], ...]] = (
    ("post", "/v1/chat/completions", api.ChatRequest, 200, "A chat completion, whole or as server-sent events."),
    ("post", "/v1/completions", api.CompletionRequest, 200, "A completion of text or token ids."),
    ("get", "/v1/models", None, 200, "The model that is served."),
    ("get", "/v1/models/{id}", None, 200, "One model."),
    ("post", "/generate", api.GenerateRequest, 200, "SGLang's interface: tokens and log-probabilities."),
    ("post", "/abort_request", api.AbortRequest, 200, "End requests; each is answered with what it has."),
    ("get", "/model_info", None, 200, "The model and the policy's version."),
    ("get", "/get_model_info", None, 200, "The same under SGLang's older name."),
    ("get", "/workers", None, 200, "This gateway as the one worker."),
    ("get", "/v1/loads", None, 200, "Requests in flight."),
    ("post", "/v1/sessions", api.OpenSession, 201, "Open a session; its key stands for it."),
    ("get", "/v1/sessions/{id}", None, 200, "Where a session stands."),
    ("delete", "/v1/sessions/{id}", None, 200, "Give a session up; it is not trained on."),
    ("get", "/v1/sessions/{id}/trajectory", None, 200, "What was generated, token by token."),
    ("post", "/v1/sessions/{id}/reward", api.PostReward, 200, "End a session; its trajectory goes to training."),
    ("get", "/health", None, 200, "Whether the gateway listens."),
    ("get", "/ready", None, 200, "Whether some worker serves."),
    ("get", "/health_generate", None, 200, "The same under SGLang's name."),
    ("get", "/metrics", None, 200, "Counters in Prometheus' text format."),
    ("get", "/openapi.json", None, 200, "This description."),
)
"""Method, path, body, status of success, what it is."""

_REFUSALS: Final = {
    "400": "The request makes no sense here; `param` names the field.",
    "401": "No key, or none that is known.",
    "403": "The key is another session's, or not its owner's.",
    "404": "There is no such path, model or session.",
    "409": "The version asked for cannot be had, or the session's state forbids it.",
    "413": "The body is too large.",
    "429": "Too much at once, or no task: try again after Retry-After seconds.",
    "500": "The gateway or an engine failed.",
    "503": "No worker serves, or the bus is away: try again after Retry-After seconds.",
}
_OPEN: Final = ("/health", "/ready", "/health_generate", "/openapi.json")
_ANSWERS: Final[dict[str, str]] = {"/v1/sessions/{id}/reward": "Result", "delete /v1/sessions/{id}": "Result"}


def description() -> Json:
    """An OpenAPI 3.1 document."""
    bodies = sorted({body for _, _, body, _, _ in ENDPOINTS if body is not None}, key=lambda body: body.__name__)
    schemas, components = msgspec.json.schema_components(
        [*bodies, ErrorBody, Result], ref_template="#/components/schemas/{name}"
    )
    by_name = dict(zip([*(body.__name__ for body in bodies), "ErrorBody", "Result"], schemas, strict=True))
    paths: dict[str, Json] = {}
    for method, path, body, status, summary in ENDPOINTS:
        operation: Json = {"summary": summary, "operationId": _name(method, path)}
        if "{id}" in path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        if body is not None:
            content = {"application/json": {"schema": by_name[body.__name__]}}
            operation["requestBody"] = {"required": body is not api.OpenSession, "content": content}
        kind = "text/plain" if path == "/metrics" else "application/json"
        told = _ANSWERS.get(f"{method} {path}") or _ANSWERS.get(path)
        success: Json = {
            kind: {"schema": by_name[told] if told else {"type": "string"} if kind != "application/json" else _ANY}
        }
        if path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            success["text/event-stream"] = {"schema": {"type": "string"}}
        refusal = {"application/json": {"schema": by_name["ErrorBody"]}}
        operation["responses"] = {str(status): {"description": "Done.", "content": success}} | {
            code: {"description": text, "content": refusal} for code, text in _REFUSALS.items()
        }
        if path in _OPEN:
            operation["security"] = []
        if path in ("/ready", "/health_generate"):
            operation["responses"]["503"] = {
                "description": "No worker serves.",
                "content": {"application/json": {"schema": _ANY}},
            }
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "PEARL gateway", "version": "1", "description": "See docs/gateway.md."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _name(method: str, path: str) -> str:
    return method + "".join(part.strip("{}").replace("_", " ").title().replace(" ", "") for part in path.split("/"))
