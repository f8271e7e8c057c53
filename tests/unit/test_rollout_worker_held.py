"""Tokens that a worker holds back: fewer chunks, the same reply, in order, and none waits longer than it was said."""

from __future__ import annotations

from messages.ids import PolicyVersion
from services.rollout_worker.engines.base import Tokens
from services.rollout_worker.held import Held


def chunk(offset: int, *tokens: int, version: int = 1, finish: str = "") -> Tokens:
    return Tokens(
        offset=offset,
        tokens=list(tokens),
        logprobs=[-float(token) for token in tokens],
        version=PolicyVersion(version),
        finish=finish,
        cached_tokens=7 if offset == 0 else 0,
    )


def test_without_holding_every_chunk_goes_as_it_is() -> None:
    held = Held(0)
    for each in (chunk(0, 1), chunk(1, 2, 3), chunk(3, finish="length")):
        assert held.add(each, 5.0) == (each,)
    assert held.rest() is None


def test_tokens_wait_for_others_until_the_oldest_has_waited_long_enough() -> None:
    held = Held(100)
    assert held.add(chunk(0, 1), 5.0) == ()
    assert held.add(chunk(1, 2), 5.09) == ()
    assert held.add(chunk(2, 3), 5.11) == (chunk(0, 1, 2, 3),)
    assert held.add(chunk(3, 4), 5.12) == ()
    assert held.add(chunk(4, 5), 5.21) == ()


def test_the_end_waits_for_nothing_and_brings_what_waited() -> None:
    held = Held(100)
    assert held.add(chunk(0, 1), 5.0) == ()
    assert held.add(chunk(1, finish="interrupted"), 5.01) == (chunk(0, 1, finish="interrupted"),)


def test_a_chunk_is_of_one_version() -> None:
    held = Held(100)
    assert held.add(chunk(0, 1), 5.0) == ()
    assert held.add(chunk(1, 2, version=2), 5.05) == (chunk(0, 1),)
    assert held.add(chunk(2, 3, version=2), 5.11) == ()
    assert held.add(chunk(3, 4, version=3, finish="stop"), 5.12) == (
        chunk(1, 2, 3, version=2),
        chunk(3, 4, version=3, finish="stop"),
    )


def test_what_waits_can_be_asked_for_and_then_waits_no_more() -> None:
    held = Held(100)
    assert held.add(chunk(0, 1), 5.0) == ()
    assert held.rest() == chunk(0, 1)
    assert held.rest() is None
    assert held.add(chunk(1, 2), 9.0) == ()
