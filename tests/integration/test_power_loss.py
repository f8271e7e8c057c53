"""A broker that comes back with an older store under a running job, as after a power cut between two fsyncs.

The job goes on: no watcher's epoch falls, nothing runs twice, what the broker lost is done again and counted so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from messages.elastic_scheduler import GpuAvailable
from messages.envelope import encode
from messages.ids import NodeId
from messages.monitor import StoreRewound
from messages.subjects import decode_on, event_subject, stream, subject_of
from pearl_state.watch import Replica
from services.checker.collect import check
from services.connect import connect
from tests.integration.running_job import EMULATED, RunningJob, running_job, write_workload
from tests.integration.test_kill_each import active

SLOW = EMULATED.replace(
    "[pipeline]", "[pipeline]\nmax_turns = 10\nmax_new_tokens = 500\nmax_context_tokens = 8192"
).replace("time_scale = 20.0", "time_scale = 8.0")
ALL = {"reserved-w0", "reserved-w1", "spot1-w0"}


class Store:
    """The embedded server's store: copied while the server stands still, put back while it is down."""

    def __init__(self, run: RunningJob) -> None:
        assert run.supervisor.server is not None
        self.run = run
        self.server = run.supervisor.server
        self.folder = run.job.run_dir / "nats" / "store"
        self.copy = run.job.run_dir / "nats" / "earlier"

    async def remember(self) -> None:
        pid = self.run.pid("nats-server")
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.to_thread(shutil.copytree, self.folder, self.copy)
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def lost(self) -> AsyncIterator[None]:
        """The server is killed; what is in the block happens while it is down; it comes back with the earlier store."""
        put_back = asyncio.Event()
        start = self.server.start

        async def held():  # the supervisor starts it again at once: not before the store is put back
            await put_back.wait()
            return await start()

        self.server.start = held  # type: ignore[method-assign]
        await self.run.kill("nats-server")
        await asyncio.to_thread(shutil.rmtree, self.folder)
        await asyncio.to_thread(shutil.copytree, self.copy, self.folder)
        yield
        put_back.set()


@contextlib.asynccontextmanager
async def epochs_seen(run: RunningJob) -> AsyncIterator[list[int]]:
    """Every epoch that a watcher of its own takes in, in order."""
    bus = await connect(run.job, "agent")
    replica = Replica()
    seen: list[int] = []
    replica.on_change(lambda table: seen.append(table.epoch))
    await replica.start(bus, run.job.job.name)
    try:
        yield seen
    finally:
        await replica.stop()
        await bus.close()


def processes_of_slots(run: RunningJob) -> dict[str, list[int]]:
    """Living worker processes of this job by slot, whoever remembers them."""
    found: dict[str, list[int]] = {}
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(run.job.run_dir.parent / "job.toml") in line and "rollout_worker" in line:
            found.setdefault(line[line.index("--worker") + 1], []).append(process.pid)
    return found


async def rewound(run: RunningJob) -> list[StoreRewound]:
    name = run.job.job.name
    return [
        decode_on(name, each.subject, each.data, StoreRewound)
        async for each in run.bus.read(stream(name, "ev"), event_subject(name, StoreRewound))
    ]


async def spot_arrives(run: RunningJob) -> None:
    feed = await connect(run.job, "cli")
    spot = GpuAvailable(node=NodeId("spot1"), gpus=(0,))
    await feed.publish_durable(subject_of("test", spot), encode(spot), msg_id="spot")
    await feed.close()


async def steps_more(run: RunningJob, count: int, what: str) -> None:
    """So many train steps that the board has not seen: it keeps those that the broker lost."""
    before = len(run.board.steps)
    await run.until(lambda: len(run.board.steps) >= before + count, what, 150)


@pytest.mark.slow
@pytest.mark.parametrize(
    "victims", [(), ("orchestrator", "pipeline_scheduler", "agent-0", "reserved-w0")], ids=["alone", "with-others"]
)
async def test_an_older_store_under_a_running_job(tmp_path: Path, victims: tuple[str, ...]) -> None:
    """`with-others`: what remembered more dies in the same moment."""
    write_workload(tmp_path)
    async with running_job(tmp_path, steps=10_000, template=SLOW, per_process=1) as run, epochs_seen(run) as epochs:
        run.commands = None  # workers that were adopted hear commands of no plan
        await spot_arrives(run)
        await run.until(lambda: active(run) >= ALL, "three active workers")
        await steps_more(run, 1, "a train step")
        store = Store(run)
        await store.remember()
        # What will be lost: a worker's death and its successor (incarnations, epochs, plans), and train steps.
        await run.kill("reserved-w1")
        await run.until(lambda: "reserved-w1" not in active(run), "the loss is seen")
        await run.until(lambda: active(run) >= ALL, "its successor serves")
        await steps_more(run, 2, "two train steps that will be lost")
        newest, trained = epochs[-1], run.board.steps[-1].batch
        async with store.lost():
            for victim in victims:
                await run.kill(victim)
        await run.until(lambda: epochs[-1] > newest, "an epoch above all that were seen", 120)
        await steps_more(run, 3, "three train steps that nobody has seen")
        await run.until(lambda: active(run) >= ALL, "all workers active")
        assert epochs == sorted(set(epochs)), "no watcher's epoch falls"
        said = await rewound(run)
        assert (said and said[0].seen_epoch >= newest) or "incarnation" in said[0].reason
        assert all(len(pids) == 1 for pids in processes_of_slots(run).values()), "one process a slot"
        assert [step.batch for step in run.board.steps] == sorted({step.batch for step in run.board.steps})
        assert run.board.steps[-1].batch > trained, "training goes on above what it had trained"
        report = await check(run.bus, run.job)
        assert report.violations == ()
        assert (report.lost, report.duplicated, report.regenerated) == (0, 0, 0)
        assert report.staleness_max <= run.job.pipeline.staleness
        print(f"redone {report.redone} tokens, forgotten {report.forgotten} train steps, adopted {said[0].adopted}")
