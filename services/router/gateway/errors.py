"""What an HTTP client is told when its request cannot be served: a status and an OpenAI-style body. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """As OpenAI's: `code` is one word for machines, `param` the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer with a status from 400."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that is refused. `retry_after_s`: sent as Retry-After."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> ErrorBody:
        """What is sent."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return ErrorBody(error=ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code))

    @property
    def headers(self) -> dict[str, str]:
        """What goes with it."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def of_status(status: int, message: str = "") -> ApiError:
    """An error about HTTP itself."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "error"
    return ApiError(status, message or phrase, code=phrase.lower().replace(" ", "_").replace("-", "_"))


def unsupported(param: str, value: object, why: str) -> ApiError:
    """A parameter that would change the answer, and cannot."""
    return ApiError(400, f"{param} = {value!r} is not supported: {why}", code="unsupported_parameter", param=param)
