"""The quick parser of NATS's protocol beside the client's own: the same bytes, cut anywhere, do the same."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import nats.errors
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.protocol.parser import Parser

from services.runtime.bus_nats_parser import LONGEST_HERE, LONGEST_LINE, QuickParser

OURS, THEIRS, ENDING, GONE = 1, 2, 3, 9


class Sink:
    """As the bus has it."""

    def __init__(self, seen: list[Any], sid: int) -> None:
        self.set_result = lambda msg: seen.append((sid, msg.subject, msg.reply, bytes(msg.data), msg.headers))


class Subscription:
    def __init__(self, future: Any, most: int = 0) -> None:
        self._future, self._max_msgs, self._received = future, most, 0


class Client:
    """What parsers need of the client, with `_process_msg` cut down to what concerns subscriptions."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.stats = {"in_msgs": 0, "in_bytes": 0}
        self._subs = {
            OURS: Subscription(Sink(self.seen, OURS)),
            THEIRS: Subscription(None),
            ENDING: Subscription(Sink(self.seen, ENDING), most=2),
        }
        self._ps: Any = Parser(self)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        if sid in self._subs:
            self._subs[sid]._received += 1
            self.seen.append((sid, subject.decode(), reply.decode(), data, headers))

    async def _process_ping(self) -> None:
        self.seen.append("ping")

    async def _process_pong(self) -> None:
        self.seen.append("pong")

    async def _process_err(self, text: str) -> None:
        self.seen.append(text)

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.seen.append(info)


def message(sid: int, subject: str, reply: str, data: bytes) -> bytes:
    return f"MSG {subject} {sid} {reply + ' ' if reply else ''}{len(data)}\r\n".encode() + data + b"\r\n"


MESSAGES = st.builds(
    message,
    st.sampled_from([OURS, OURS, OURS, THEIRS, ENDING, GONE]),
    st.sampled_from(["pearl.a.tok.e", "x"]),
    st.sampled_from(["", "", "_INBOX.1"]),
    st.binary(max_size=40) | st.sampled_from([b"", b"\r\n", b"MSG a 1 3\r\nabc\r\n", b"z" * (LONGEST_HERE + 5)]),
)
OTHERS = st.sampled_from(
    [
        b"PING\r\n",
        b"PONG\r\n",
        b"+OK\r\n",
        b"-ERR 'Stale Connection'\r\n",
        b'INFO {"max_payload":10}\r\n',
        b"HMSG a 1 12 15\r\nNATS/1.0\r\n\r\nabc\r\n",
        b"MSG\ta  1 2\r\nab\r\n",
    ]
)


def outcome(pieces: list[bytes], *, quick: bool) -> tuple[Any, ...]:
    client = Client()
    if quick:
        client._ps = QuickParser(client, client._ps, Sink)

    async def feed() -> str:
        for piece in pieces:
            try:
                await client._ps.parse(piece)
            except nats.errors.ProtocolError as error:
                return str(error)
        return ""

    problem = asyncio.run(feed())
    return client.seen, client.stats, [each._received for each in client._subs.values()], problem


@given(st.lists(MESSAGES | OTHERS, max_size=12), st.lists(st.integers(0, 10_000), max_size=8))
@settings(deadline=None, max_examples=200)
def test_the_same_bytes_do_the_same(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    edges = sorted({0, *(cut % (len(data) + 1) for cut in cuts), len(data)})
    pieces = [data[begin:end] for begin, end in itertools.pairwise(edges)]
    assert outcome(pieces, quick=True) == outcome(pieces, quick=False)


@pytest.mark.parametrize(
    "data",
    [b"NONSENSE\r\n", b"MSG a b c d e\r\n", b"MSG a 1 -3\r\nabc\r\n", b"MSG a 1\r\n", b"MSG " + b"a" * LONGEST_LINE],
)
def test_what_is_no_message_is_left_to_the_client(data: bytes) -> None:
    whole = message(OURS, "a", "", b"abc")
    for pieces in ([whole + data], [whole, data], [whole + data[:3], data[3:]]):
        assert outcome(pieces, quick=True) == outcome(pieces, quick=False)


def test_another_connection_begins_with_nothing_left() -> None:
    client = Client()
    parser = QuickParser(client, client._ps, Sink)
    asyncio.run(parser.parse(b"MSG a 1 3\r\nab"))
    parser.reset()
    asyncio.run(parser.parse(message(OURS, "b", "", b"c")))
    assert client.seen == [(OURS, "b", "", b"c", None)]
