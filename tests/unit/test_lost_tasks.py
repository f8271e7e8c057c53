"""Tasks that the broker lost, and ends that came before anybody waited for them."""

from __future__ import annotations

from messages.envelope import Message, encode
from messages.subjects import message_id, stream, subject_of
from services.pipeline_scheduler.core import TasksLost
from services.pipeline_scheduler.service import look
from services.runtime.bus import StreamSpec
from services.runtime.bus_memory import MemoryBroker
from tests.unit.test_pipeline_scheduler import Loop, end

JOB = "t"


async def test_a_task_that_is_nowhere_is_lost_and_one_that_has_ended_is_counted() -> None:
    bus = MemoryBroker().connect()
    await bus.ensure_stream(
        StreamSpec(name=stream(JOB, "task"), subjects=(f"pearl.{JOB}.task.*",), retention="workqueue")
    )
    await bus.ensure_stream(StreamSpec(name=stream(JOB, "ev"), subjects=(f"pearl.{JOB}.ev.>",)))

    async def store(message: Message) -> None:
        await bus.publish_durable(subject_of(JOB, message), encode(message), msg_id=str(message_id(message)))

    loop = Loop()
    loop.serve(0)
    queued, ended, lost, other = loop.tasks()
    await store(queued)
    await store(end(ended))
    in_flight = loop.core.in_flight(loop.state)
    assert len(in_flight) == 4
    missing, found = await look(JOB, bus, in_flight, frozenset())
    assert {name for name, _ in missing} == {ended.trajectory, lost.trajectory, other.trajectory}
    assert found == (), "what ended a moment ago looks the same"
    await store(other)
    missing, found = await look(JOB, bus, in_flight, missing)
    assert found == (end(ended), TasksLost(frozenset({(lost.trajectory, 0)})))
    for message in found:
        loop.feed(message)
    assert loop.state.ended == 1
    assert loop.tasks()[4:] == [lost]
