"""What a prefill and a decode engine say to each other: frames, their bounds, and who meets in which room. Pure.

One connection carries one hand-over (paper 4.2, 5). The decode side connects once it has blocks for the whole context,
says `Hello`, and reads; the prefill side answers `Refused`, or `Pages` chunk by chunk while it computes them and `First` at
the end, with `Alive` in between where that takes long; `Broken` where it stops half-way. Either side gives up by
closing. A frame is two lengths (big-endian), a MessagePack header, and a body: the raw bytes of `Pages`, else nothing.

KV is only good for the context and the weights it was computed with, so `Hello` names both, and how the bytes lie.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import msgspec

from messages.envelope import Finite

LENGTHS: Final = struct.Struct(">II")
MOST_HEADER: Final = 1 << 16
MOST_BODY: Final = 64 << 20
SEND_BODY: Final = 1 << 20
"""Bytes of KV a sender puts into one frame, if one token's are not more: what a receiver holds beside its cache."""


class ProtocolError(Exception):
    """The peer said what makes no sense; the message says what."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """decode -> prefill: the KV of `context` from token `cached` on, computed with `version`, is wanted."""

    room: int
    request: str
    attempt: int
    context: bytes  # digest of the tokens
    version: int
    cached: int  # leading tokens whose KV, of exactly this context and version, the receiver has
    layout: str


class Pages(msgspec.Struct, frozen=True, kw_only=True, tag="pages"):
    """prefill -> decode: KV of tokens [start, start + count). Frames follow on one another without gaps."""

    start: int
    count: int


class First(msgspec.Struct, frozen=True, kw_only=True, tag="first"):
    """prefill -> decode, the end: all KV is sent, and this is the token that follows the context."""

    token: int
    logprob: Finite
    cached: int  # leading tokens the sender had not to compute


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """prefill -> decode: it takes longer, and goes on."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """prefill -> decode, the end: nothing ran."""

    reason: str


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """prefill -> decode, the end: what ran has stopped."""

    reason: str


Answer = Pages | First | Alive | Refused | Broken
END: Final = (First, Refused, Broken)

_hello = msgspec.msgpack.Decoder(Hello)
_answer = msgspec.msgpack.Decoder(Answer)


def frame(header: Hello | Answer, body_length: int = 0) -> bytes:
    """The bytes that go before a body of this length."""
    packed = msgspec.msgpack.encode(header)
    assert len(packed) <= MOST_HEADER and body_length <= MOST_BODY, "a frame beyond its bounds"
    return LENGTHS.pack(len(packed), body_length) + packed


def lengths(data: bytes) -> tuple[int, int]:
    """Bytes of header and body that follow. Raises ProtocolError."""
    header, body = LENGTHS.unpack(data)
    if not 0 < header <= MOST_HEADER or body > MOST_BODY:
        raise ProtocolError(f"a frame of {header} + {body} bytes; at most {MOST_HEADER} + {MOST_BODY}")
    return header, body


def read_hello(header: bytes) -> Hello:
    """Raises ProtocolError."""
    try:
        return _hello.decode(header)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"no hello: {error}") from error


def read_answer(header: bytes) -> Answer:
    """Raises ProtocolError."""
    try:
        return _answer.decode(header)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"no answer: {error}") from error


def digest(tokens: Sequence[int]) -> bytes:
    """Of exactly these tokens."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).digest()


Key = tuple[int, str, int]
"""Room, request, attempt."""

G = TypeVar("G")
H = TypeVar("H")
T = TypeVar("T")


class Rooms(Generic[G, H]):
    """Where the request (a `G`) and the receiver (an `H`) of one hand-over meet, whoever comes first.

    Who waits is given up by `leave`; each side does so after its own time, so none waits for ever.
    """

    def __init__(self, most: int) -> None:
        """`most`: that may wait on each side."""
        self._most = most
        self.requests: dict[Key, G] = {}
        self.receivers: dict[Key, H] = {}

    def request_came(self, key: Key, request: G) -> H | None:
        """Its receiver, if that waits. Raises ProtocolError for a room that is taken, or one too many."""
        receiver = self.receivers.pop(key, None)
        if receiver is None:
            self._wait(self.requests, key, request)
        return receiver

    def receiver_came(self, key: Key, receiver: H) -> G | None:
        """Its request, if that waits. Raises ProtocolError for a room that is taken, or one too many."""
        request = self.requests.pop(key, None)
        if request is None:
            self._wait(self.receivers, key, receiver)
        return request

    def leave(self, key: Key, who: G | H) -> bool:
        """Wait no longer; False for one that does not."""
        if self.requests.get(key) is who:
            del self.requests[key]
        elif self.receivers.get(key) is who:
            del self.receivers[key]
        else:
            return False
        return True

    def _wait(self, side: dict[Key, T], key: Key, who: T) -> None:
        if key in side:
            raise ProtocolError(f"room {key[0]} is taken")
        if len(side) >= self._most:
            raise ProtocolError(f"{len(side)} wait already")
        side[key] = who
