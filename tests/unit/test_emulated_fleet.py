"""Which nodes share a process, and workers as tasks of one: on the in-memory bus."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from messages.envelope import Message, decode, encode
from messages.ids import Incarnation, WorkerId, Zone
from messages.node_agent import Kill, Launch
from messages.orchestrator import GpuFree, WorkerGone, WorkerReady
from messages.subjects import event_subject, stream, subject_of
from services import jobfile
from services.emulated_fleet.config import fleets, nodes_of
from services.emulated_fleet.service import Tasks
from services.jobfile import (
    AgentSection,
    ConfigError,
    EmulationSection,
    JobFile,
    JobSection,
    NodeSection,
    RolloutSection,
)
from services.node_agent.config import Config as NodeConfig
from services.node_agent.service import NodeAgent
from services.runtime.bus import StreamSpec
from services.runtime.bus_memory import MemoryBroker
from services.supervisor.roster import roster


def job_of(folder: str, per_process: int, *gpus: int, engine: str = "emulated") -> JobFile:
    return JobFile(
        job=JobSection(name="job", data_dir=folder),
        nodes=tuple(NodeSection(name=f"n{index}", zone=Zone.RESERVED, gpus=count) for index, count in enumerate(gpus)),
        rollout=RolloutSection(engine=engine, gpus_per_worker=2, workers_per_process=per_process),
        emulation=EmulationSection(time_scale=1e5),
        agent=AgentSection(),
    )


def test_nodes_share_a_process_up_to_its_workers():
    assert fleets(job_of("", 1, 8, 8)) == ()
    assert fleets(job_of("", 8, 8, 8, 8)) == (("n0", "n1"), ("n2",))
    assert fleets(job_of("", 3, 8, 2, 4)) == (("n0",), ("n1", "n2"))  # a node is never split
    names = [process.name for process in roster(job_of("", 8, 8, 8, 8))]
    assert [name for name in names if "fleet" in name or "node" in name] == ["emulated_fleet-0", "emulated_fleet-1"]
    assert [process.name for process in roster(job_of("", 1, 8)) if "node" in process.name] == ["node_agent-n0"]
    with pytest.raises(ConfigError, match="makes 1 fleets"):
        nodes_of(job_of("", 8, 8), 1)


def test_only_emulated_workers_share(tmp_path: Path):
    file = tmp_path / "job.toml"
    file.write_text("[rollout]\nworkers_per_process = 4\n")
    with pytest.raises(ConfigError, match="only emulated workers share"):
        jobfile.load(file)


class Rig:
    """A node agent whose workers are tasks."""

    def __init__(self, folder: Path) -> None:
        self.job = job_of(str(folder), 8, 8)
        self.broker = MemoryBroker()
        self.bus = self.broker.connect()
        self.stop = asyncio.Event()

    async def start(self) -> None:
        for family in ("ev", "journal", "dead"):
            await self.bus.ensure_stream(StreamSpec(name=stream("job", family), subjects=(f"pearl.job.{family}.>",)))
        config = NodeConfig.of(self.job, "n0", "job.toml")
        tasks = Tasks(self.job, self.broker.connect(), config.run_dir)
        agent = NodeAgent(config, self.broker.connect(), "job", pids=tasks)
        self.running = asyncio.create_task(agent.run(self.stop))

    async def tell(self, message: Message) -> None:
        await self.bus.publish(subject_of("job", message), encode(message))

    async def until(self, kind: type[Message], count: int, repeat: Message) -> list[Any]:
        """Tell again, as executors do, until `kind` was said so often."""
        async with asyncio.timeout(10):
            while True:
                await self.tell(repeat)
                subject = event_subject("job", kind)
                found = [d async for d in self.bus.read(stream("job", "ev"), subject)]
                if len(found) >= count:
                    return [decode(each.data, kind) for each in found]
                await asyncio.sleep(0.01)


def launch(slot: int, incarnation: int = 1) -> Launch:
    return Launch(
        worker=WorkerId(f"n0-w{slot}"),
        incarnation=Incarnation(incarnation),
        gpus=(2 * slot, 2 * slot + 1),
        service="rollout_worker",
    )


async def test_workers_are_launched_killed_and_launched_again(tmp_path: Path):
    rig = Rig(tmp_path)
    await rig.start()
    for slot in range(4):
        await rig.until(WorkerReady, slot + 1, launch(slot))
    kill = Kill(worker=WorkerId("n0-w1"), incarnation=Incarnation(1), grace_ms=0, reason="test")
    (gone,) = await rig.until(WorkerGone, 1, kill)
    assert (gone.worker, gone.incarnation) == ("n0-w1", 1)
    await rig.until(GpuFree, 1, kill)
    ready = await rig.until(WorkerReady, 5, launch(1, 2))
    assert (ready[-1].worker, ready[-1].incarnation) == ("n0-w1", 2)
    rig.stop.set()
    async with asyncio.timeout(10):
        await rig.running
    facts = [d async for d in rig.bus.read(stream("job", "ev"), event_subject("job", WorkerGone))]
    ended = [decode(each.data, WorkerGone) for each in facts]
    assert {(each.worker, each.incarnation) for each in ended} == {(f"n0-w{slot}", 1) for slot in range(4)} | {
        ("n0-w1", 2)
    }
