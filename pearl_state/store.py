"""The writer's side of the role table: compare-and-set, and the lease by which one orchestrator is in charge.

Owns: the one value of bucket `<job>_roles`, the one value of `<job>_lease`. Never decides what is in the table.
Used by the orchestrator's shell only; nobody else's user may write these buckets.

Two guards, for two purposes. The *revision* guard of each write is what makes a single writer: whoever writes
first on a revision wins, the other is `Deposed` and must stop. The *lease* only keeps a standby from trying, and
tells it within seconds when to begin; nothing is wrong if it ever fails to.

Race: a write is stored, its acknowledgement is lost, the bus repeats it and is refused, since the revision has moved.
The store therefore reads back after any failure: if its own bytes are there, the write has succeeded. All reads here ask the
bucket's leader: what a replica that lags has is neither what a write must follow nor proof that nobody else wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import msgspec

from messages.ids import Revision
from messages.subjects import LEASE_KEY, TABLE_KEY, lease_bucket, roles_bucket
from pearl_state.codec import decode_table, encode_table
from pearl_state.invariants import check
from pearl_state.model import RoleTable
from pearl_state.ports import Failed, StoredValue, TableWriter, attempt

LEASE_TTL_S: Final = 3
"""Lifetime of an unrenewed lease. The broker counts whole seconds; below 2 a slow renewal would lose it."""
RENEW_S: Final = LEASE_TTL_S / 3
ACQUIRE_POLL_S: Final = 0.25
"""How often a standby looks: a takeover takes at most LEASE_TTL_S plus this, plus the broker's own expiry delay."""


class Deposed(Exception):
    """Someone else has written the table or taken the lease: this process must stop at once and change nothing."""


class TableStore:
    """The role table's bucket value, as its only writer sees it."""

    def __init__(self, bus: TableWriter, job: str) -> None:
        self._bus = bus
        self._job = job
        self._bucket = roles_bucket(job)
        self._revision: Revision | None = None
        self._table: RoleTable | None = None
        self._writing = False

    @property
    def revision(self) -> Revision:
        """Revision of the last table restored or written; 0 where there is none."""
        assert self._revision is not None, "restore the table before anything else"
        return self._revision

    async def restore(self) -> RoleTable | None:
        """The table as it is, None where there is none yet. Later writes are guarded on what this has seen.

        Raises UnreadableTableError, and what the bus raises.
        """
        entry = await self._bus.get(self._bucket, TABLE_KEY, from_leader=True)
        table = None if entry is None else decode_table(entry.data, self._job)
        self._revision = Revision(0 if entry is None else entry.revision)
        self._table = table
        return table

    async def write(self, table: RoleTable) -> Revision:
        """Replace the table by its next epoch, in which every invariant must hold; returns its revision. One at a time.

        Raises Deposed if another process has written since, and what the bus raises if it is away: then the table
        is as it was, or as given, and the same write may be repeated.
        """
        assert self._revision is not None, "restore the table before the first write"
        assert not self._writing, "two writes of the table at once"
        assert table.job == self._job, f"table of job {table.job!r} in the store of {self._job!r}"
        check(self._table, table)
        before = 0 if self._table is None else self._table.epoch
        assert table.epoch == before + 1, f"epoch {table.epoch} does not follow epoch {before}"
        return await self._put(table)

    async def write_rebuilt(self, table: RoleTable) -> Revision:
        """Replace the table by one that does not follow from it: the store went back, and the cluster has gone on meanwhile.

        Guarded as `write` is. Epoch, incarnations and role generations may still only rise. Raises what `write` raises.
        """
        before = self._table
        assert self._revision is not None and before is not None, "restore the table before it is rebuilt"
        assert not self._writing, "two writes of the table at once"
        assert table.epoch > before.epoch, f"epoch {table.epoch} is not above epoch {before.epoch}"
        for old, new in zip(before.rows, table.rows, strict=True):
            assert (old.worker, old.gpus, old.zone) == (new.worker, new.gpus, new.zone), f"{old.worker}: another slot"
            risen = new.incarnation >= old.incarnation and new.role_generation >= old.role_generation
            assert risen, f"{old.worker}: incarnation or role generation fell"
        check(None, table)
        return await self._put(table)

    async def _put(self, table: RoleTable) -> Revision:
        assert self._revision is not None
        before = 0 if self._table is None else self._table.epoch
        data = encode_table(table)
        self._writing = True
        try:
            revision = await _guarded_put(self._bus, self._bucket, TABLE_KEY, data, self._revision, None)
        finally:
            self._writing = False
        if revision is None:
            raise Deposed(f"the role table of job {self._job} was written by someone else after epoch {before}")
        self._revision = Revision(revision)
        self._table = table
        return self._revision


class _Holding(msgspec.Struct, frozen=True):
    """The lease's value: who holds it. `beat` makes each renewal's bytes its own."""

    holder: str
    beat: int


class Lease:
    """The right to be the orchestrator in charge, lost by whoever does not renew it.

    `holder` must be unique to this process (host, pid, start time), else two would believe in one lease.
    """

    def __init__(self, bus: TableWriter, job: str, holder: str, *, ttl_s: int = LEASE_TTL_S) -> None:
        assert ttl_s >= 1, "the broker counts the life of a value in whole seconds"
        self._bus = bus
        self._job = job
        self._bucket = lease_bucket(job)
        self._holder = holder
        self._ttl_s = ttl_s
        self._revision: int | None = None
        self._beat = 0
        self._renewed_at = 0.0
        self._renewing = asyncio.Lock()
        self.taken = 0
        """How often it was taken anew: between two takings somebody else may have had it."""

    @property
    def held(self) -> bool:
        """Whether nobody else can have the lease, by this process's clock: it counts from before the broker heard of it."""
        return self._revision is not None and asyncio.get_running_loop().time() < self._renewed_at + self._ttl_s

    async def acquire(self) -> bool:
        """Take the lease if nobody has it. Raises what the bus raises."""
        return await self._put(0)

    async def wait_acquire(self, stop: asyncio.Event, *, poll_s: float = ACQUIRE_POLL_S) -> bool:
        """Stand by until the lease is ours (True) or `stop` is set (False). Raises what the bus raises."""
        while not stop.is_set():
            if await self.acquire():
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), poll_s)
        return False

    async def renew(self) -> None:
        """Keep it for another `ttl_s`. Raises Deposed if someone else has it now, and what the bus raises.

        A lease that ran out while the bus was away, and that nobody took, is taken again: had another orchestrator
        written meanwhile, the revision guard of the next table write would tell; `taken` tells that it is time to look.
        """
        async with self._renewing:
            # None: never acquired, or another caller has just found it gone.
            if self._revision is not None and (await self._put(self._revision) or await self._put(0)):
                return
            self._revision = None
        raise Deposed(f"the orchestrator lease of job {self._job} has gone to another process")

    async def keep(self, stop: asyncio.Event, *, every_s: float = RENEW_S) -> None:
        """Renew until `stop`, then give it up. Raises Deposed; a bus that is away is asked again."""
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), every_s)
            if stop.is_set():
                break
            match await attempt(self.renew()):
                case Failed(error=Deposed() as deposed):
                    raise deposed
                case _:
                    pass  # renewed; or the bus is away, and `held` tells for how long the lease still counts
        await self.release()

    async def release(self) -> None:
        """Give it up: it ends within a second instead of within `ttl_s`. Never raises for a bus that is away."""
        if self._revision is None:
            return
        revision, self._revision = self._revision, None
        # If this fails, it ends by itself.
        await attempt(self._bus.put(self._bucket, LEASE_KEY, b"{}", last_revision=revision, ttl_s=1))

    async def _put(self, last_revision: int) -> bool:
        self._beat += 1
        begun = asyncio.get_running_loop().time()
        data = msgspec.json.encode(_Holding(self._holder, self._beat))
        revision = await _guarded_put(self._bus, self._bucket, LEASE_KEY, data, last_revision, self._ttl_s)
        if revision is None:
            return False
        self._revision = revision
        self._renewed_at = begun
        self.taken += last_revision == 0
        return True


async def _guarded_put(
    bus: TableWriter, bucket: str, key: str, data: bytes, last_revision: int, ttl_s: int | None
) -> int | None:
    """The new revision, or None if the value has moved on from `last_revision`. Raises what the bus raises."""
    result = await attempt(bus.put(bucket, key, data, last_revision=last_revision, ttl_s=ttl_s))
    if not isinstance(result, Failed):
        return result
    entry: StoredValue | None = await bus.get(bucket, key, from_leader=True)
    if entry is not None and entry.data == data:
        return entry.revision
    if (0 if entry is None else entry.revision) == last_revision:
        raise result.error
    return None
