"""Reading on in a stream, also in one that lost its newest messages."""

from __future__ import annotations

from services.runtime.bus import StreamSpec
from services.runtime.bus_memory import MemoryBroker
from services.runtime.follow import Follower


async def texts(follower: Follower) -> list[str]:
    return [delivery.data.decode() async for delivery in follower.more()]


async def test_reading_on_also_where_sequences_are_given_out_again() -> None:
    now = [1000]
    broker = MemoryBroker(clock=lambda: now[0])
    bus = broker.connect()
    await bus.ensure_stream(StreamSpec(name="s", subjects=("s.>",)))

    async def say(*words: str) -> None:
        for word in words:
            now[0] += 10
            await bus.publish_durable(f"s.{'x' if word.isupper() else 'y'}", word.encode(), msg_id=f"{word}{now[0]}")

    everything, some = Follower(bus, "s", "s.>"), Follower(bus, "s", "s.x")
    assert await texts(everything) == []
    await say("A", "b")
    assert (await texts(everything), await texts(some)) == (["A", "b"], ["A"])
    assert (await texts(everything), await texts(some)) == ([], [])
    snapshot = broker.snapshot()
    await say("C", "d", "E", "f")
    assert (await texts(everything), await texts(some)) == (["C", "d", "E", "f"], ["C", "E"])
    broker.go_down()
    broker.go_back(snapshot)
    await broker.come_up()
    assert (await texts(everything), await texts(some)) == ([], [])
    await say("G", "h")
    assert (await texts(everything), await texts(some)) == (["G", "h"], ["G"])
    await say("I", "j", "K", "l", "M")
    assert (await texts(everything), await texts(some)) == (["I", "j", "K", "l", "M"], ["I", "K", "M"])
    assert (await texts(everything), await texts(some)) == ([], [])


async def test_a_stream_that_lost_everything() -> None:
    now = [1000]
    broker = MemoryBroker(clock=lambda: now[0])
    bus = broker.connect()
    await bus.ensure_stream(StreamSpec(name="s", subjects=("s.>",)))
    snapshot = broker.snapshot()
    follower = Follower(bus, "s", "s.>")
    await bus.publish_durable("s.a", b"lost", msg_id="1")
    assert await texts(follower) == ["lost"]
    broker.go_down()
    broker.go_back(snapshot)
    await broker.come_up()
    assert await texts(follower) == []
    now[0] += 5
    await bus.publish_durable("s.a", b"new", msg_id="2")
    assert await texts(follower) == ["new"]
