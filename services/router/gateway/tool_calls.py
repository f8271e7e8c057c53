"""Tool calls in a model's output, in the form that Qwen and Hermes models are trained on. Pure.

    <tool_call>
    {"name": "search", "arguments": {"query": "pearls"}}
    </tool_call>

What is between the marks and is no such object stays text: a model's mistake is its harness's to judge.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class Call(msgspec.Struct, frozen=True):
    """One call; `arguments` is JSON text, as OpenAI's interface has it."""

    name: str
    arguments: str


def parse(text: str) -> tuple[str, tuple[Call, ...]]:
    """The text outside the calls, and the calls."""
    content: list[str] = []
    calls: list[Call] = []
    rest = text
    while True:
        before, mark, rest = rest.partition(OPEN)
        content.append(before)
        if not mark:
            break
        inner, _, rest = rest.partition(CLOSE)
        call = _call(inner)
        if call is None:
            content.append(mark + inner + (CLOSE if _ else ""))
        else:
            calls.append(call)
    said = "".join(content)
    return (said.strip() if calls else said), tuple(calls)


def _call(inner: str) -> Call | None:
    try:
        found: Any = msgspec.json.decode(inner.strip())  # Any: whatever the model wrote
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    fields = cast("dict[str, Any]", found)
    name = fields.get("name")
    arguments = fields.get("arguments", fields.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return Call(name, arguments)
    return Call(name, msgspec.json.encode(arguments).decode())


class ToolText:
    """Splits text while it comes: what is content goes out at once, what may be a call waits for the end."""

    def __init__(self) -> None:
        self._waiting = ""

    def feed(self, piece: str) -> str:
        """The content that this piece completes."""
        self._waiting += piece
        at = self._waiting.find(OPEN)
        if at < 0:
            at = len(self._waiting) - _partial(self._waiting)
        out, self._waiting = self._waiting[:at], self._waiting[at:]
        return out

    def end(self) -> tuple[str, tuple[Call, ...]]:
        """What is left: content, and the calls."""
        content, calls = parse(self._waiting)
        self._waiting = ""
        return content, calls


def _partial(text: str) -> int:
    """Characters at the end that may be the beginning of a mark."""
    return next(
        (length for length in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-length:])), 0
    )
