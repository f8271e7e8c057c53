"""Where prefill and decode requests meet: what each side learns of the other, whoever has stopped waiting, left, or died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.rollout_worker.engines.sglang.rooms import End, Joined, RefusedError, Room, Rooms, join


@pytest.fixture
async def rooms() -> AsyncIterator[Rooms]:
    made = Rooms("127.0.0.1", 7000, 5.0)
    await made.start()
    async with asyncio.timeout(20):
        yield made
        await made.stop()


async def met(rooms: Rooms, number: int = 1) -> tuple[Room, Joined]:
    host, _, port = rooms.endpoint.rpartition(":")
    room = rooms.enter(number, 3)
    joined = await join(host, int(port), number, 3, 5.0)
    assert await room.joined == "" and joined.bootstrap_port == 7000
    return room, joined


async def test_a_context_that_came_is_over(rooms: Rooms) -> None:
    room, joined = await met(rooms)
    joined.say(End.HAVE)
    await joined.close()
    assert await room.ended is End.HAVE and await room.over


async def test_a_decode_side_that_dies_will_never_have_it(rooms: Rooms) -> None:
    room, joined = await met(rooms)
    await joined.close()
    assert await room.ended is End.GONE and not await room.over


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_decode_side_that_nobody_waits_for_says_what_its_server_makes_of_it(
    rooms: Rooms, arrives: bool
) -> None:
    room, joined = await met(rooms)
    joined.say(End.LEFT)
    assert await room.ended is End.LEFT and not room.over.done()
    if arrives:
        joined.say(End.HAVE)
    await joined.close()
    assert await room.over is arrives


async def test_a_prefill_side_that_gives_up_is_told_and_still_hears_the_other(rooms: Rooms) -> None:
    room, joined = await met(rooms)
    rooms.leave(1, "cancelled")
    assert await joined.lost == "cancelled" and not room.over.done()
    joined.say(End.LEFT)
    await joined.close()
    assert not await room.over


async def test_a_prefill_side_that_dies(rooms: Rooms) -> None:
    _, joined = await met(rooms)
    await rooms.stop()
    assert "is gone" in await joined.lost
    await joined.close()


async def test_other_versions_and_taken_rooms_are_refused(rooms: Rooms) -> None:
    host, _, port = rooms.endpoint.rpartition(":")
    room = rooms.enter(2, 4)
    with pytest.raises(RefusedError, match="prefill side has version 4, the decode side 3"):
        await join(host, int(port), 2, 3, 5.0)
    assert "version" in await room.joined
    with pytest.raises(RefusedError, match="room 2 is taken"):
        rooms.enter(2, 4)
    _, joined = await met(rooms, 3)
    with pytest.raises(RefusedError, match="has its decode side"):
        await join(host, int(port), 3, 3, 5.0)
    await joined.close()
