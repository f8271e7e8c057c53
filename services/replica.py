"""A service's read-only role table, on its own connection: it tells the orchestrator where the bucket is older than itself."""

from __future__ import annotations

from messages.envelope import encode
from messages.ids import Epoch
from messages.orchestrator import TableAhead
from messages.subjects import subject_of
from pearl_state.watch import Replica
from services.runtime.bus import Bus


def replica_of(bus: Bus, job_name: str) -> Replica:
    """A replica, yet to be started, for a user that may publish `table.ahead/1`."""

    async def tell(epoch: Epoch) -> None:
        message = TableAhead(epoch=epoch)
        await bus.publish(subject_of(job_name, message), encode(message))

    return Replica(tell=tell)
