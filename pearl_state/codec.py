"""The role table as bytes and back: JSON, so that any NATS tool can read it."""

from __future__ import annotations

import functools

import msgspec

from pearl_state.invariants import violations
from pearl_state.model import RoleTable

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RoleTable)


class UnreadableTableError(ValueError):
    """The bucket, or the feed, holds something that is no role table, or one that nobody may act on."""


def encode_table(table: RoleTable) -> bytes:
    """Bytes of a table."""
    return _encoder.encode(table)


@functools.lru_cache(4)
def decode_table(data: bytes, job: str) -> RoleTable:
    """The table of job `job`, with its invariants checked. Raises UnreadableTableError.

    Replicas of one process read the same bytes: they share what was read.
    """
    try:
        table = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableTableError(f"role table of job {job}: {error}") from error
    if table.job != job:
        raise UnreadableTableError(f"role table of job {job}: it says it is of job {table.job!r}")
    if broken := violations(table):
        raise UnreadableTableError(f"role table of job {job}, epoch {table.epoch}: {'; '.join(broken)}")
    return table
