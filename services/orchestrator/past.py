"""What the event stream tells an orchestrator that comes into charge: reads of `<job>_EV`, and the table of a job whose bucket is empty."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import msgspec

from messages.envelope import Message, UndecodableMessage
from messages.executors import ReconfigurationPlan
from messages.ids import Incarnation, Zone
from messages.orchestrator import TargetConfiguration, WorkerGone, WorkerReady
from messages.pipeline_scheduler import WeightsPublished
from messages.subjects import decode_on, event_subject, stream
from pearl_state.model import RoleTable, with_rows
from services.runtime.bus import Bus, Delivery

M = TypeVar("M", bound=Message)


async def last(bus: Bus, job: str, kind: type[M]) -> tuple[Delivery, M] | None:
    """The newest event of a kind that has no key; one that cannot be read does not hide those before it."""
    subject = event_subject(job, kind, "-")
    newest: tuple[Delivery, M] | None = None
    async for delivery in bus.read(stream(job, "ev"), subject):
        with contextlib.suppress(UndecodableMessage):
            newest = (delivery, decode_on(job, subject, delivery.data, kind))
    return newest


async def since(bus: Bus, job: str, cursor: int, kinds: tuple[type[Message], ...]) -> list[Delivery]:
    """The events of these kinds after sequence `cursor`, straight from the stream."""
    wanted = {event_subject(job, kind).rpartition(".")[0] for kind in kinds}
    events = bus.read(stream(job, "ev"), f"pearl.{job}.ev.>", first_seq=cursor + 1)
    return [delivery async for delivery in events if delivery.subject.rpartition(".")[0] in wanted]


async def at_or_after(bus: Bus, job: str, sequence: int) -> int:
    """Sequence of the first event there is from this one on; 0: there is none."""
    async for delivery in bus.read(stream(job, "ev"), f"pearl.{job}.ev.>", first_seq=max(1, sequence)):
        return delivery.seq
    return 0


async def end(bus: Bus, job: str) -> int:
    """Sequence of the newest event; 0: there is none."""
    return max([each.seq async for each in bus.read(stream(job, "ev"), f"pearl.{job}.ev.>")], default=0)


async def continued(bus: Bus, job: str, table: RoleTable) -> tuple[RoleTable, TargetConfiguration | None]:
    """`table`, a job's first one, with what its stream says was given out before the bucket was lost; and the target it goes on to.

    Incarnations and plan ids are not used again. Normally the job is new, its stream is empty, and so nothing changes.
    """
    newest: dict[str, int] = {}
    for kind in (WorkerReady, WorkerGone):
        async for delivery in bus.read(stream(job, "ev"), event_subject(job, kind)):
            with contextlib.suppress(UndecodableMessage):
                fact = decode_on(job, delivery.subject, delivery.data, kind)
                newest[fact.worker] = max(newest.get(fact.worker, 0), fact.incarnation)
    # An overlap worker may hold device memory that nobody knows of: its successor's launch ends it.
    rows = [
        msgspec.structs.replace(
            row, incarnation=Incarnation(max(row.incarnation, newest[row.worker] + (row.zone is Zone.OVERLAP)))
        )
        for row in table.rows
        if row.worker in newest
    ]
    table = with_rows(table, rows)
    plan = await last(bus, job, ReconfigurationPlan)
    if plan is not None:
        number = int("0" + "".join(filter(str.isdigit, plan[1].plan_id)))
        table = msgspec.structs.replace(table, writer=msgspec.structs.replace(table.writer, plans=number))
    published, target = await last(bus, job, WeightsPublished), await last(bus, job, TargetConfiguration)
    if published is not None:
        table = msgspec.structs.replace(table, policy_version=published[1].version)
    if target is None:
        return table, None
    writer = msgspec.structs.replace(table.writer, cursor=target[0].seq - 1)  # the target is the first input
    return msgspec.structs.replace(table, writer=writer), target[1]
