"""A read-only replica of the role table, for everyone but the orchestrator (and the workers, who get commands).

Never writes. Two sources: the feed, on which the broker republishes each write within milliseconds, and the snapshot,
read from the bucket at the start, after each reconnection and every few seconds. The feed is a hint: it may lose a
message, and another user might try to inject one; the snapshot is what counts. Epochs only rise, with one exception:
a snapshot that is older than the replica OLDER_SNAPSHOTS times in a row is believed, since then the replica holds something that
was never in the bucket. Once could be a broker node that lags behind. It says so to the orchestrator, since
the store may have lost its last moments: then the orchestrator raises the epoch above what was seen, and no replica goes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from messages.ids import Epoch
from messages.subjects import TABLE_KEY, roles_bucket, roles_feed
from pearl_state.codec import UnreadableTableError, decode_table
from pearl_state.model import RoleTable
from pearl_state.ports import Failed, Feed, FeedMessage, TableReader, attempt

REFRESH_S: Final = 3.0
"""Longest time for which a lost feed message goes unnoticed."""
OLDER_SNAPSHOTS: Final = 5
"""So many older snapshots in a row are believed: by then the orchestrator has raised the epoch above what was seen, if the store
went back, and a replica of the broker's has caught up."""
ORIGIN_HEADER: Final = "Nats-Subject"
"""Set by the broker on each republished message: the bucket's subject it was written to."""
_FEED_LIMIT: Final = 256
"""Feed messages kept for a slow reader; only the newest matters."""


class Replica:
    """The role table as last heard. Start it once; it is safe to read from then on."""

    def __init__(self, *, refresh_s: float = REFRESH_S, tell: Callable[[Epoch], Awaitable[None]] | None = None) -> None:
        """`tell(epoch)` is called while the bucket is older than the replica, which has `epoch`."""
        self.table: RoleTable | None = None
        self.refused = 0
        """Feed messages and snapshots not believed: forged, unreadable, or of another job."""
        self.problem = ""
        """Why the last one was refused, or why the last snapshot could not be read; for people."""
        self._refresh_s = refresh_s
        self._tell = tell
        self._callbacks: list[Callable[[RoleTable], None]] = []
        self._changed = asyncio.Event()
        self._older_snapshots = 0
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._bus: TableReader | None = None
        self._feed: Feed | None = None
        self._job = ""

    async def start(self, bus: TableReader, job_name: str) -> None:
        """Begin to follow; returns with the current table (None where none was ever written). Raises what the bus raises."""
        assert self._bus is None, "a replica is started once"
        self._bus, self._job = bus, job_name
        # First listen, then read: a write in between arrives on the feed.
        self._feed = await bus.subscribe(roles_feed(job_name), limit=_FEED_LIMIT)
        bus.on_reconnect(self.refresh)
        await self._read_snapshot()
        self._tasks = (
            asyncio.create_task(self._follow(self._feed), name="replica-feed"),
            asyncio.create_task(self._refresh_forever(), name="replica-refresh"),
        )

    async def stop(self) -> None:
        """Stop following; the table stays as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = ()
        if self._feed is not None:
            await self._feed.stop()

    def on_change(self, callback: Callable[[RoleTable], None]) -> None:
        """Call `callback(table)` after each change, in order. It must not block."""
        self._callbacks.append(callback)

    async def wait_changed(self, epoch: int) -> RoleTable:
        """The table, as soon as its epoch is above `epoch` (at once, if it is)."""
        while self.table is None or self.table.epoch <= epoch:
            await self._changed.wait()
        return self.table

    async def refresh(self) -> None:
        """Read the snapshot now. A bus that is away is no error: the next refresh comes."""
        result = await attempt(self._read_snapshot())
        if isinstance(result, Failed):
            self.problem = f"snapshot: {result.error}"

    async def _follow(self, feed: Feed) -> None:
        async for message in feed:
            self.hear(message)

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            await self.refresh()

    def hear(self, message: FeedMessage) -> None:
        """Take one feed message, if it is what it says."""
        expected = f"$KV.{roles_bucket(self._job)}.{TABLE_KEY}"
        origin = message.headers.get(ORIGIN_HEADER)
        if message.subject != roles_feed(self._job) or origin != expected:
            self._refuse(f"feed: message on {message.subject} comes from {origin!r}, not from {expected}")
            return
        try:
            table = decode_table(message.data, self._job)
        except UnreadableTableError as error:
            self._refuse(str(error))
            return
        if self.table is None or table.epoch > self.table.epoch:
            self._accept(table)

    async def _read_snapshot(self) -> None:
        assert self._bus is not None
        entry = await self._bus.get(roles_bucket(self._job), TABLE_KEY)
        if entry is None:
            return
        try:
            table = decode_table(entry.data, self._job)
        except UnreadableTableError as error:
            self._refuse(str(error))
            return
        held = self.table
        if held is None or table.epoch > held.epoch:
            self._older_snapshots = 0
            self._accept(table)
        elif table != held and table.epoch == held.epoch:
            # Same number, other content: only one of the two was ever in the bucket, and that is what was read.
            self._accept(table)
        elif table.epoch < held.epoch:
            self._older_snapshots += 1
            if self._tell is not None:
                await attempt(self._tell(held.epoch))
            if self._older_snapshots >= OLDER_SNAPSHOTS:
                self._older_snapshots = 0
                self._refuse(f"epoch {held.epoch} was never in the bucket; back to epoch {table.epoch}")
                self._accept(table)
        else:
            self._older_snapshots = 0

    def _accept(self, table: RoleTable) -> None:
        self.table = table
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for callback in self._callbacks:
            callback(table)

    def _refuse(self, problem: str) -> None:
        self.refused += 1
        self.problem = problem
