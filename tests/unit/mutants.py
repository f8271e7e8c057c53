"""Bytes that a broken or hostile peer could send: golden bytes of a message, changed. Deterministic in the generator passed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec

HUGE = "9" * 400
_STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, 5e-324, "", "0",
    "\x00", "\ud7ff", "a" * 5_000, "..", "*", ">", "b0-g0-m0", "r0-w0", "t0-t0", [], {}, [None], [[]], [0] * 200, {"": 0}, {"kind": "x"},
)  # fmt: skip
"""Values put where another type, or another size, is expected."""


def mutant(data: bytes, rng: random.Random, tags: tuple[str, ...]) -> bytes:
    """One changed copy."""
    changes: tuple[Callable[[bytes, random.Random, tuple[str, ...]], bytes], ...] = (
        _truncated, _flipped, _spliced, _padded, _swapped, _swapped, _swapped, _nested, _wrong_tag, _renamed, _repeated_key, _raw_number,
    )  # fmt: skip
    changed = rng.choice(changes)(data, rng, tags)
    return rng.choice(changes)(changed, rng, tags) if rng.random() < 0.3 else changed


def _truncated(data: bytes, rng: random.Random, tags: tuple[str, ...]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flipped(data: bytes, rng: random.Random, tags: tuple[str, ...]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _spliced(data: bytes, rng: random.Random, tags: tuple[str, ...]) -> bytes:
    if not data:
        return data
    begin, end = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    at = rng.randrange(len(data))
    return data[:at] + data[begin:end] * rng.choice((1, 2, 50)) + data[at:]


def _padded(data: bytes, rng: random.Random, tags: tuple[str, ...]) -> bytes:
    junk = rng.choice((b"", b" ", b"\n{", b"\xc1", b"\x00" * 40, rng.randbytes(20)))
    return rng.choice((data + junk, junk + data, junk))


def _value(data: bytes) -> tuple[Any, bool]:
    """What the bytes say, as far as a decoder without types reads them; and whether they are JSON."""
    if data[:1] == b"{":
        try:
            return json.loads(data), True
        except (ValueError, RecursionError):
            return None, True
    try:
        return msgspec.msgpack.decode(data), False
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None, False


def _bytes(value: Any, as_json: bool) -> bytes:
    """The value again; what the one encoding cannot say is said in the other, or as text."""
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass") if as_json else msgspec.msgpack.encode(value)
    except (OverflowError, ValueError, TypeError, RecursionError, msgspec.MsgspecError):
        return repr(value).encode("utf-8", "surrogatepass")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a value."""
    keys: list[Any] = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    found = [(value, key) for key in keys]
    for key in keys:
        found += _places(value[key])
    return found


def _swapped(data: bytes, rng: random.Random, tags: tuple[str, ...]) -> bytes:
    """A value of another type or size, anywhere but in the tag."""
    value, as_json = _value(data)
    places = [(inside, key) for inside, key in _places(value) if key != "kind"]
    for inside, key in rng.sample(places, min(len(places), rng.choice((1, 1, 2)))):
        old = inside[key]
        inside[key] = rng.choice((*_STRANGE, [old], {"x": old}, str(old)))
    return _bytes(value, as_json) if places else data


def _nested(data: bytes, rng: random.Random, tags: tuple[str, ...]) -> bytes:
    """Depth that a recursive reader would not survive."""
    depth = rng.choice((50, 2_000, 200_000))
    value, as_json = _value(data)
    if not isinstance(value, dict) or not value:
        return b"[" * depth
    key = rng.choice(sorted(map(str, value)))
    if as_json:
        inner = rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "0" + "}" * depth))
        return (
            b'{"kind":'
            + json.dumps(str(value.get("kind"))).encode()
            + b","
            + json.dumps(key).encode()
            + b":"
            + inner.encode()
            + b"}"
        )
    return data[:1] + b"\x91" * depth + data[1:]


def _wrong_tag(data: bytes, rng: random.Random, tags: tuple[str, ...]) -> bytes:
    value, as_json = _value(data)
    if not isinstance(value, dict):
        return data
    value["kind"] = rng.choice((*tags, "", "no.such/1", "worker.ready/2", 7, None, ["kind"], "x" * 10_000))
    if rng.random() < 0.1:
        del value["kind"]
    return _bytes(value, as_json if rng.random() < 0.8 else not as_json)


def _renamed(data: bytes, rng: random.Random, tags: tuple[str, ...]) -> bytes:
    """A field is missing, and another is there."""
    value, as_json = _value(data)
    if not isinstance(value, dict) or len(value) < 2:
        return data
    key = rng.choice(sorted(map(str, value.keys() - {"kind"})) or ["kind"])
    value["x" + key] = value.pop(key, None)
    return _bytes(value, as_json)


def _repeated_key(data: bytes, rng: random.Random, tags: tuple[str, ...]) -> bytes:
    if data[:1] != b"{":
        return data
    return data[:-1] + b',"kind":' + json.dumps(rng.choice(tags)).encode() + b"}"


def _raw_number(data: bytes, rng: random.Random, tags: tuple[str, ...]) -> bytes:
    """What `json.dumps` would not write."""
    strange = rng.choice(
        (b"NaN", b"Infinity", b"-Infinity", HUGE.encode(), b"-" + HUGE.encode(), b"1e999", b"01", b"0x1", b"+1", b"1.")
    )
    digits = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if data[:1] != b"{" or not digits:
        return data
    at = rng.choice(digits)
    return data[:at] + strange + data[at + 1 :]
