"""The hand-over's frames and rooms: bounds, nonsense, and two sides that come in any order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout_worker.engines.kv_protocol import (
    LENGTHS,
    MOST_BODY,
    MOST_HEADER,
    Alive,
    Broken,
    First,
    Hello,
    Pages,
    ProtocolError,
    Refused,
    Rooms,
    digest,
    frame,
    lengths,
    read_answer,
    read_hello,
)

HELLO = Hello(room=1 << 61, request="t/0", attempt=3, context=b"x" * 16, version=4, cached=32, layout="2x4x16:float32")


def header_of(data: bytes, body: int = 0) -> bytes:
    size, length = lengths(data[: LENGTHS.size])
    assert (len(data), length) == (LENGTHS.size + size, body)
    return data[LENGTHS.size :]


def test_frames_come_back_as_they_were():
    assert read_hello(header_of(frame(HELLO))) == HELLO
    for answer in (First(token=3, logprob=-0.25, cached=16), Alive(), Refused("why"), Broken("how")):
        assert read_answer(header_of(frame(answer))) == answer
    pages = Pages(start=16, count=2)
    assert read_answer(header_of(frame(pages, 1024), 1024)) == pages


@pytest.mark.parametrize(("header", "body"), [(0, 0), (MOST_HEADER + 1, 0), (1, MOST_BODY + 1)])
def test_a_frame_beyond_its_bounds_is_not_read(header: int, body: int):
    with pytest.raises(ProtocolError, match="a frame of"):
        lengths(LENGTHS.pack(header, body))


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_none_is_an_error_of_the_peer(logprob: float):
    with pytest.raises(ProtocolError, match="logprob"):
        read_answer(header_of(frame(First(token=3, logprob=logprob, cached=0))))


@given(st.binary(max_size=60))
def test_nonsense_is_an_error_of_the_peer(data: bytes):
    for read in (read_hello, read_answer):
        try:
            read(data)
        except ProtocolError:
            continue
        assert read(data) is not None
    with pytest.raises(ProtocolError):
        read_answer(header_of(frame(HELLO)))
    with pytest.raises(ProtocolError):
        read_hello(header_of(frame(Alive())))


def test_a_digest_is_of_exactly_these_tokens():
    assert digest([1, 2, 3]) == digest((1, 2, 3))
    assert len({digest(tokens) for tokens in ([], [1], [1, 2], [2, 1], [1, 2, 0], [258])}) == 6


MOVES = st.tuples(st.sampled_from(["request", "receiver", "request leaves", "receiver leaves"]), st.integers(0, 4))


@given(st.lists(MOVES, max_size=60))
def test_each_room_brings_at_most_one_of_each_together(moves: list[tuple[str, int]]):
    most = 3
    rooms: Rooms[object, object] = Rooms(most)
    waiting: dict[tuple[str, int], object] = {}
    for move, number in moves:
        side = move.split()[0]
        other = "receiver" if side == "request" else "request"
        key, who = (number, "r", 1), object()
        if "leaves" in move:
            there = waiting.pop((side, number), None)
            assert rooms.leave(key, there or who) is (there is not None)
            continue
        come = rooms.request_came if side == "request" else rooms.receiver_came
        expected = waiting.get((other, number))
        full = sum(1 for name, _ in waiting if name == side) >= most
        if expected is None and ((side, number) in waiting or full):
            with pytest.raises(ProtocolError):
                come(key, who)
            continue
        assert come(key, who) is expected
        if expected is None:
            waiting[side, number] = who
        else:
            del waiting[other, number]
    assert len(rooms.requests) + len(rooms.receivers) == len(waiting)
