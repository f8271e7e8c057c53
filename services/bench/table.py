"""`pearl bench table`: from an event to the role table that shows it, as watchers see it, on a real server.

An orchestrator process takes the event from its stream, steps, writes the table by compare-and-set; the server
republishes it. Watchers are replicas in this process, each on a connection of its own. The reference is what the same
connections need for a message of the table's size by bare publish and subscribe: nothing stored, nothing decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from messages.envelope import encode
from messages.ids import PolicyVersion
from messages.pipeline_scheduler import WeightsPublished
from messages.subjects import message_id, subject_of
from pearl_state.codec import encode_table
from pearl_state.model import RoleTable
from pearl_state.watch import Replica
from services.bench.cell import bus_of, job_in
from services.bench.figures import Figure, figure, percentile
from services.jobfile import JobFile
from services.runtime.bus import Bus, Subscription
from services.supervisor.service import Supervisor

TARGET_MS = 25.0
TARGET_WATCHERS = 50
PAUSE_S = 0.03
"""Between two events, so that each is an epoch of its own."""
ROUND_S = 20.0
"""No watcher needs longer, or something is broken."""


async def measure(
    folder: Path, *, watchers: Sequence[int] = (1, 50), events: int = 60, workers: int = 16
) -> list[Figure]:
    """Milliseconds, 50th and 99th percentile over all watchers and events."""
    job, path = job_in(folder, workers)
    supervisor = Supervisor(job, path)
    found: list[Figure] = []
    version = 0
    try:
        await supervisor.start(only=("orchestrator",))
        for count in watchers:
            async with contextlib.AsyncExitStack() as stack:
                buses = [await stack.enter_async_context(bus_of(job, "agent")) for _ in range(count)]
                trainer = await stack.enter_async_context(bus_of(job, "trainer"))
                worker = await stack.enter_async_context(bus_of(job, "rollout_worker"))
                seen, size, version = await _tables(job, buses, trainer, events, version)
                bare = await _bare(job, buses, worker, events, size)
            for share in (0.5, 0.99):
                target = TARGET_MS if (count, share) == (TARGET_WATCHERS, 0.99) else None
                found.append(
                    figure(
                        "table",
                        f"{count} watcher{'s' * (count > 1)}, p{share * 100:.0f}",
                        percentile(seen, share),
                        "ms",
                        percentile(bare, share),
                        "bare publish-subscribe",
                        below=target,
                    )
                )
    finally:
        await supervisor.stop()
    return found


async def _tables(
    job: JobFile, buses: Sequence[Bus], trainer: Bus, events: int, version: int
) -> tuple[list[float], int, int]:
    """Latencies in ms, size of the table, the last version published."""
    took: list[float] = []
    missing: set[int] = set()
    begun, wanted = 0.0, -1
    all_seen = asyncio.Event()

    def watch(index: int) -> Replica:
        replica = Replica()

        def changed(table: RoleTable) -> None:
            if table.policy_version == wanted and index in missing:
                took.append((time.perf_counter() - begun) * 1000)
                missing.discard(index)
                if not missing:
                    all_seen.set()

        replica.on_change(changed)
        return replica

    replicas = [watch(index) for index in range(len(buses))]
    for replica, bus in zip(replicas, buses, strict=True):
        await replica.start(bus, job.job.name)
    try:
        for number in range(events + 1):
            version += 1
            event = WeightsPublished(version=PolicyVersion(version), uri=f"mem:{version}", manifest_sha256="", bytes=1)
            all_seen.clear()
            missing.update(range(len(buses)))
            wanted, begun = version, time.perf_counter()
            await trainer.publish_durable(
                subject_of(job.job.name, event), encode(event), msg_id=message_id(event) or ""
            )
            async with asyncio.timeout(ROUND_S):
                await all_seen.wait()
            if number == 0:
                took.clear()  # the orchestrator may have been starting
            await asyncio.sleep(PAUSE_S)
        table = replicas[0].table
        assert table is not None
        return took, len(encode_table(table)), version
    finally:
        for replica in replicas:
            await replica.stop()


async def _bare(job: JobFile, buses: Sequence[Bus], publisher: Bus, rounds: int, size: int) -> list[float]:
    """Latencies in ms of a message of `size` bytes to each of the same connections."""
    subject = f"pearl.{job.job.name}.tok.bench"
    subscriptions: list[Subscription] = [await bus.subscribe(subject) for bus in buses]
    await asyncio.sleep(10 * PAUSE_S)  # the server has them all
    took: list[float] = []
    begun = 0.0

    async def next_of(subscription: Subscription) -> None:
        assert await subscription.next(ROUND_S) is not None, "a bare message was lost"
        took.append((time.perf_counter() - begun) * 1000)

    for _ in range(rounds):
        waiting = [asyncio.create_task(next_of(each)) for each in subscriptions]
        await asyncio.sleep(PAUSE_S)
        begun = time.perf_counter()
        await publisher.publish(subject, bytes(size))
        await asyncio.gather(*waiting)
    for subscription in subscriptions:
        await subscription.stop()
    return took
