"""Two ranks as real processes on a real server: a lost rank, a killed service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from messages.envelope import Message, decode, encode
from messages.ids import Epoch
from messages.pipeline_scheduler import BatchItem, BatchReady, StepFinished
from messages.subjects import event_subject, message_id, stream, subject_of
from messages.toggle_manager import TrainerReady
from messages.trainer import TrainerResume
from services import jobfile
from services.runtime.bus import Bus, StreamSpec
from services.runtime.bus_nats import connect
from tests.integration.trainer_batches import job_toml, make_batch
from tests.nats_fixture import NatsServer

SOON_S = 90.0
AGAIN_S = 0.5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    found = NatsServer(tmp_path)
    found.start()
    yield found
    found.stop()


def ranks_of(service: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The rank processes below a trainer's service, rank 0 first."""
    found = [
        process
        for process in psutil.Process(service.pid).children(recursive=True)
        if "services.trainer.rank_main" in process.cmdline()
    ]
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))


def start(path: Path) -> subprocess.Popen[bytes]:
    """The trainer's service."""
    command = [sys.executable, "-m", "services.cli", "service", "trainer", "-c", str(path)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], start_new_session=True)


async def store(bus: Bus, message: Message) -> int:
    identity = message_id(message)
    assert identity is not None
    return await bus.publish_durable(subject_of("two", message), encode(message), msg_id=identity)


async def put_batch(bus: Bus, number: int) -> None:
    turns, items = make_batch(number)
    sequences = [await store(bus, turn) for turn in turns]
    moved = tuple(
        BatchItem(i.trajectory, i.group, i.reward, i.status, tuple(sequences[seq - 1] for seq in i.journal))
        for i in items
    )
    await store(bus, BatchReady(batch=number, items=moved))


async def train(bus: Bus, batch: int) -> StepFinished:
    """Tell the trainer until it says that it did."""
    async with asyncio.timeout(SOON_S):
        while True:
            command = TrainerResume(epoch=Epoch(1), batch=batch)
            await bus.publish(subject_of("two", command), encode(command))
            await asyncio.sleep(AGAIN_S)
            last = await bus.last(stream("two", "ev"), event_subject("two", StepFinished, "-"))
            if last is not None and (step := decode(last.data, StepFinished)).batch == batch:
                return step


async def ready(bus: Bus) -> list[tuple[int, int]]:
    """Version and ranks of every trainer that said that it is ready."""
    events = bus.read(stream("two", "ev"), event_subject("two", TrainerReady, "-"))
    said = [decode(each.data, TrainerReady) async for each in events]
    return [(each.version, each.ranks) for each in said]


@pytest.mark.slow
async def test_a_lost_rank_restarts_its_group_and_a_killed_service_leaves_no_rank(
    tmp_path: Path, server: NatsServer
) -> None:
    path = tmp_path / "two.toml"
    path.write_text(f'{job_toml(str(tmp_path), 2, "two")}\n[nats]\nembedded = false\nurl = "{server.url}"\n')
    jobfile.load(path)
    bus = await connect(server.url, name="test", inbox_prefix="_INBOX_test")
    for family in ("ev", "journal", "dead"):
        await bus.ensure_stream(StreamSpec(name=stream("two", family), subjects=(f"pearl.two.{family}.>",)))
    for number in range(2):
        await put_batch(bus, number)
    service = start(path)
    ranks: list[psutil.Process] = []
    try:
        assert (await train(bus, 0)).version == 1
        ranks = ranks_of(service)
        assert len(ranks) == 2
        ranks[1].kill()
        assert (await train(bus, 1)).version == 2
        ranks = ranks_of(service)
        assert len(ranks) == 2
        assert await ready(bus) == [(0, 2), (1, 2)]
        service.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, SOON_S)
        assert not alive
        service.wait()

        # Told to stop, as a whole group, it ends in order.
        service = start(path)
        async with asyncio.timeout(SOON_S):
            # Not by a train step: that of batch 1 is in the stream.
            while await ready(bus) != [(0, 2), (1, 2), (2, 2)]:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(AGAIN_S)
        ranks = ranks_of(service)
        assert len(ranks) == 2
        os.killpg(service.pid, signal.SIGTERM)
        assert await asyncio.to_thread(service.wait, SOON_S) == 0
        assert not psutil.wait_procs(ranks, 0)[1]
    finally:
        for process in (service, *ranks):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        await bus.close()
