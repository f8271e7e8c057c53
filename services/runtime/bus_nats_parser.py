"""The usual case of NATS's protocol, read quickly: whole messages without headers for subscriptions of ours.

The client's own parser takes several regular expressions, a coroutine and a copy of the buffer for each message. Here
a message costs one search; all else (headers, PING, INFO, errors, other subscriptions, very long messages) is still the client's.
`tests/unit/test_nats_parser.py` holds the two against each other on the same bytes, cut anywhere.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

AT_A_CONTROL_LINE: Final = 1
"""The client's parser in between two messages (nats.protocol.parser.AWAITING_CONTROL_LINE)."""
LONGEST_LINE: Final = 4096
LONGEST_HERE: Final = 32768
"""Bytes; what is longer comes in many reads, which the client's parser gathers without copying all of it each time."""


class Raw(msgspec.Struct):
    """What sinks need of a message; of the client's own `Msg` they use no more."""

    subject: str
    reply: str
    data: bytes
    headers: dict[str, str] | None = None


class QuickParser:
    """In the place of the client's parser `theirs`. `sink` is the class of what subscriptions of ours hold as their future."""

    def __init__(self, client: Any, theirs: Any, sink: type[Any]) -> None:  # Any: nats-py's own, which are not public
        self._client = client
        self._theirs = theirs
        self._sink = sink
        self._rest = b""

    def reset(self) -> None:
        """Another connection begins."""
        self._rest = b""
        self._theirs.reset()

    async def parse(self, data: bytes = b"") -> None:
        """Take what was read. Raises what the client's parser raises."""
        theirs = self._theirs
        if not theirs.buf and theirs.state == AT_A_CONTROL_LINE:
            data = self._take(self._rest + data if self._rest else data)
        if data:
            await theirs.parse(data)

    def _take(self, data: bytes) -> bytes:
        """Hand over the messages at the beginning; keep one that is not whole; return what is for the client's parser."""
        self._rest = b""
        stats: dict[str, int] = self._client.stats
        at, end = 0, len(data)
        while data.startswith(b"MSG ", at):
            line = data.find(b"\r\n", at, at + LONGEST_LINE)
            if line < 0:
                return self._wait_for_more(data, at, end - at < LONGEST_LINE)
            words = data[at + 4 : line].split()
            if len(words) not in (3, 4) or not words[-1].isdigit() or not words[1].isdigit():
                break
            size = int(words[-1])
            after = line + 2 + size
            if after + 2 > end:
                return self._wait_for_more(data, at, size <= LONGEST_HERE)
            subscription: Any = self._client._subs.get(int(words[1]))
            if subscription is None or type(subscription._future) is not self._sink or subscription._max_msgs:
                break
            stats["in_msgs"] += 1
            stats["in_bytes"] += size
            subscription._received += 1
            reply = words[2].decode() if len(words) == 4 else ""
            subscription._future.set_result(Raw(words[0].decode(), reply, data[line + 2 : after]))
            at = after + 2
        return data[at:] if at else data

    def _wait_for_more(self, data: bytes, at: int, here: bool) -> bytes:
        rest = data[at:]
        if not here:
            return rest
        self._rest = rest
        return b""
