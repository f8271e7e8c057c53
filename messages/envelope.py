"""How a message becomes bytes and comes back.

Every message is a frozen Struct with an explicit tag `noun.verb/1` in the field `kind`. Control
messages are JSON, so that any NATS tool can read a subject and `nats pub` can feed one; bulk
rollout payloads (`Bulk`) are MessagePack maps with the same `kind` field. A reader tells the two
apart by the first byte: a JSON object starts with `{` or white space, a MessagePack map never does.

Decoding is in two stages: `kind_of` reads the tag only, then `decode` reads the body strictly. The
ways to fail are exceptions of their own, all `UndecodableMessage`, so that a receiver can dead-letter
with a reason. Unknown fields are ignored (a newer sender may add defaulted ones). No decoded field is NaN or
infinite: JSON cannot say such numbers, and the floats of `Bulk` kinds are declared `Finite`. A receiver of
a subject uses `messages.subjects.decode_on`, which also holds the message against the subject it came on.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, ClassVar, Final, TypeVar, cast

import msgspec

Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A float that MessagePack carries: decoding refuses NaN and infinities, for the price of a comparison each."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="message/0"):
    """Base of all control messages (JSON on the wire)."""

    bulk: ClassVar[bool] = False


class Bulk(Message, frozen=True, kw_only=True, tag="bulk/0", gc=False):
    """Base of bulk rollout payloads (MessagePack on the wire)."""

    bulk: ClassVar[bool] = True


class UndecodableMessage(ValueError):
    """A peer's message that cannot be read. `reason` says what is wrong and, where known, in which field."""

    def __init__(self, reason: str) -> None:
        super().__init__(brief(reason))
        self.reason = brief(reason)


class NotAMessage(UndecodableMessage):
    """Not JSON or MessagePack, or no string field `kind`."""


class UnknownKind(UndecodableMessage):
    """A well-formed envelope of a kind that this release, or this receiver, does not know."""


class BadBody(UndecodableMessage):
    """The kind is known, the body does not fit it."""


class Misplaced(UndecodableMessage):
    """The message is well-formed, but not one that its subject carries: whoever sent it may not say that."""


M = TypeVar("M", bound="Message")
P = TypeVar("P", bound=msgspec.Struct)

LONGEST_REASON: Final = 300
"""Characters of a reason: it quotes what a peer sent, and must fit into log lines and dead letters."""


def brief(text: str, most: int = LONGEST_REASON) -> str:
    """A peer's text, cut to what a log line bears."""
    return text if len(text) <= most else f"{text[: most - 30]}... ({len(text)} characters)"


class _Envelope(msgspec.Struct, frozen=True):
    kind: str


_json_envelope = msgspec.json.Decoder(_Envelope)
_msgpack_envelope = msgspec.msgpack.Decoder(_Envelope)
_json_encoder = msgspec.json.Encoder()
_msgpack_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Message], msgspec.json.Decoder[Any]] = {}
_bulk_readers: dict[type[Message], tuple[bytes, msgspec.msgpack.Decoder[Any]]] = {}

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""The embedded server's max_payload; larger messages are refused before decoding."""


def tag_of(kind: type[Message]) -> str:
    """The wire tag of a message class, `noun.verb/1`."""
    tag = kind.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def registry() -> dict[str, type[Message]]:
    """Every concrete message class by its tag. Import `messages` (the package) first: it imports all files."""
    found: dict[str, type[Message]] = {}
    pending: list[type[Message]] = [Message]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        tag = tag_of(cls)
        if not tag.endswith("/0"):
            assert tag not in found, f"two message classes share the tag {tag}"
            found[tag] = cls
    return dict(sorted(found.items()))


def encode(message: Message) -> bytes:
    """Bytes of a message: MessagePack if its class is `Bulk`, JSON otherwise."""
    return _msgpack_encoder.encode(message) if message.bulk else _json_encoder.encode(message)


def _bulk_reader(cls: type[M]) -> tuple[bytes, msgspec.msgpack.Decoder[M]]:
    """What stands behind the first byte of a message of this class, where it has fewer than 16 fields; and its decoder."""
    reader = _bulk_readers.get(cls)
    if reader is None:
        begins = msgspec.msgpack.encode({"kind": tag_of(cls)})[1:]
        reader = _bulk_readers[cls] = begins, msgspec.msgpack.Decoder(cls)
    return reader


def _is_json(data: bytes) -> bool:
    return data[:1] in (b"{", b" ", b"\t", b"\r", b"\n")


def kind_of(data: bytes) -> str:
    """The tag of an encoded message, without decoding its body. Raises `NotAMessage`."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise NotAMessage(f"message of {len(data)} bytes is larger than the limit of {MAX_MESSAGE_BYTES}")
    try:
        envelope = _json_envelope.decode(data) if _is_json(data) else _msgpack_envelope.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotAMessage(f"not a message with a string field 'kind': {error}") from error
    return envelope.kind


def decode(data: bytes, *accepted: type[M]) -> M:
    """Decode one message of one of the `accepted` classes.

    Raises `NotAMessage`, `UnknownKind` (a kind that is not among `accepted`) or `BadBody`.
    """
    if len(accepted) == 1 and accepted[0].bulk and len(data) <= MAX_MESSAGE_BYTES:
        begins, decoder = _bulk_reader(accepted[0])
        if data.startswith(begins, 1):  # as we write it: one look is enough
            try:
                return decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                pass  # said below, with its kind
    kind = kind_of(data)
    for cls in accepted:
        if tag_of(cls) == kind:
            break
    else:
        raise UnknownKind(f"kind {kind!r} is not one of {sorted(tag_of(cls) for cls in accepted)}")
    try:
        if _is_json(data):
            if cls not in _decoders:
                _decoders[cls] = msgspec.json.Decoder(cls)
            message = _decoders[cls].decode(data)
            if _LONG_NUMBER.search(data) is not None and _has_long_integer(msgspec.json.decode(data)):
                raise BadBody(f"{kind}: an integer beyond 64 bits")
            return message
        if not cls.bulk:
            # MessagePack would let in what JSON cannot say: numbers that are none.
            raise BadBody(f"{kind}: control messages are JSON")
        return _bulk_reader(cls)[1].decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"{kind}: {error}") from error


def part_of(data: bytes, part: type[P]) -> P | None:
    """The fields that `part` declares, of a message whose body as a whole may not be readable; None if these are not either.

    A body that breaks off, or that is none, has no parts.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        return None
    try:
        return msgspec.json.decode(data, type=part) if _is_json(data) else msgspec.msgpack.decode(data, type=part)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")


def _has_long_integer(value: object) -> bool:
    """Whether decoded JSON holds an integer that no checkpoint could store (JSON itself knows no bound)."""
    if isinstance(value, int):
        return not -(1 << 63) <= value < 1 << 63
    if isinstance(value, dict):
        return any(_has_long_integer(each) for each in cast("dict[str, object]", value).values())
    if isinstance(value, list):
        return any(_has_long_integer(each) for each in cast("list[object]", value))
    return False
