"""Every message tag has golden bytes; they never change once landed (a changed meaning is a new tag).

Add bytes for new tags with `python -m tests.contract.test_golden_bytes`. It never rewrites existing ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import messages
from messages.envelope import decode, encode, kind_of
from tests.contract.samples import sample

GOLDEN = Path(__file__).with_name("golden.json")
TAGS = messages.envelope.registry()


def golden() -> dict[str, str]:
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


@pytest.mark.parametrize("tag", sorted(TAGS))
def test_bytes_of_this_release_are_readable_and_unchanged(tag: str) -> None:
    data = bytes.fromhex(golden()[tag])
    assert kind_of(data) == tag
    message = decode(data, TAGS[tag])
    if (
        encode(sample(TAGS[tag])) != data
    ):  # a defaulted field was added: old bytes must still decode, to the same fields
        assert encode(message)[:1] == data[:1]
    else:
        assert message == sample(TAGS[tag])


def test_no_tag_was_dropped() -> None:
    assert set(golden()) <= set(TAGS), "a landed tag is gone: readers of old streams need it for one release"


def add_missing() -> None:
    """Append bytes for tags that have none."""
    known = golden()
    known.update({tag: encode(sample(cls)).hex() for tag, cls in TAGS.items() if tag not in known})
    GOLDEN.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


if __name__ == "__main__":
    add_missing()
