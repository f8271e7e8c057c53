"""A whole job of real processes for tests: NATS, every service, workers and trainer, below a temporary folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil

from messages.ids import Zone
from services import jobfile
from services.checker.collect import check
from services.checker.core_report import Report
from services.connect import connect
from services.jobfile import JobFile, rollout_slots
from services.monitor.board import Board
from services.monitor.collector import Collector
from services.runtime.bus import Bus
from services.supervisor.service import Supervisor
from tests.integration.commands import CommandWatch

NODES = """
[[nodes]]
name = "reserved"
zone = "reserved"
gpus = 2
[[nodes]]
name = "spot1"
zone = "preemptible"
gpus = 1
"""
JOB = f"""
[job]
name = "test"
data_dir = "{{data_dir}}"
seed = {{seed}}
[model]
device = "cpu"
{NODES}
[[nodes]]
name = "train"
zone = "training"
gpus = 1
[pipeline]
batch_trajectories = 32
group_size = 8
train_steps = {{steps}}
keep_journal = true
[timeouts]
drain_ms = 2000
[agent]
silence_ms = 3000
task_ack_wait_ms = 4000
{{more}}
"""
"""What every job of a test has; `NODES` are the rollout's."""

EMULATED = (
    JOB.replace("{more}", "")
    + """
[rollout]
engine = "emulated"
kv_cache_tokens = 200000
prefill_chunk_tokens = 4096
workers_per_process = {per_process}
[training]
engine = "emulated"
[emulation]
time_scale = 20.0
train_s = 4.0
[environment]
entry = "services.environments.replay:Replay"
tokenizer = "services.environments.replay:ReplayTokenizer"
options = {{ workload = "{data_dir}/workload.csv" }}
time_scale = 20.0
{more}
"""
)
"""The same job without arithmetic, on a recorded workload."""


def write_workload(folder: Path) -> None:
    """Short trajectories: three to seven turns of a few dozen tokens."""
    rng = random.Random(1)
    lines = ["traj,turn,prompt_tokens,completion_tokens,env_time_s,reward"]
    for trajectory in range(40):
        context = rng.randint(200, 900)
        for turn in range(rng.randint(3, 7)):
            reply = rng.randint(10, 90)
            lines.append(f"{trajectory},{turn},{context},{reply},{rng.random() * 2:.2f},{trajectory % 2}")
            context += reply + rng.randint(5, 200)
    (folder / "workload.csv").write_text("\n".join(lines) + "\n")


class RunningJob:
    """One running job, and what a test wants to know of it and do to it."""

    def __init__(self, job: JobFile, supervisor: Supervisor, bus: Bus, collector: Collector) -> None:
        self.job = job
        self.supervisor = supervisor
        self.bus = bus
        self.collector = collector
        self.commands: CommandWatch | None = None  # of the harness; None where a test sends commands of its own

    @property
    def board(self) -> Board:
        """What the monitor sees."""
        return self.collector.board

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
        """Wait for a condition; a failure says what was waited for and where the logs are."""
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() - begun < timeout_s, (
                f"not within {timeout_s} s: {what}; logs: {self.job.run_dir}/logs"
            )
            await asyncio.sleep(0.05)

    def pid(self, name: str) -> int:
        """Process id by name prefix: a service of the roster, `nats-server`, or a worker slot."""
        found = [each for each in self.supervisor.processes() if each.name == name or each.name.startswith(f"{name}.")]
        assert found, f"no process {name}: {[each.name for each in self.supervisor.processes()]}"
        return found[0].pid

    async def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal a process and wait for its end; returns the pid it had."""
        pid = self.pid(name)
        os.kill(pid, number)
        await self.until(lambda: not _runs(pid), f"end of {name}")
        return pid

    async def finished(self, timeout_s: float = 150.0) -> Report:
        """Wait for the last train step, then let the checker judge the run."""
        steps = self.job.pipeline.train_steps
        await self.until(lambda: len(self.board.steps) >= steps, f"{steps} train steps", timeout_s)
        if self.commands is not None:
            overlap = frozenset(slot.worker for slot in rollout_slots(self.job) if slot.zone is Zone.OVERLAP)
            assert await self.commands.needless(overlap) == [], "commands to workers that no plan changes"
        return await check(self.bus, self.job)


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.asynccontextmanager
async def running_job(
    folder: Path, *, steps: int = 8, seed: int = 0, more: str = "", template: str = JOB, **places: object
) -> AsyncIterator[RunningJob]:
    """Start everything; stop everything at the end, whatever happened."""
    path = folder / "job.toml"
    path.write_text(template.format(data_dir=folder, steps=steps, seed=seed, more=more, **places))
    job = jobfile.load(path)
    supervisor = Supervisor(job, path)
    stop = asyncio.Event()
    try:
        await supervisor.start()
        bus = await connect(job, "monitor")
        collector = Collector(bus, job)
        await collector.start()
        following = asyncio.create_task(collector.follow(stop))
        watch = CommandWatch(bus, job.job.name)
        try:
            await watch.start()
            run = RunningJob(job, supervisor, bus, collector)
            run.commands = watch
            yield run
        finally:
            await watch.stop()
            stop.set()
            await asyncio.wait([following], timeout=10)
            await bus.close()
    finally:
        await supervisor.stop()


def assert_zeros(report: Report, job: JobFile) -> None:
    """What every run promises, as the checker counts it."""
    assert report.violations == ()
    assert (report.lost, report.duplicated, report.regenerated) == (0, 0, 0)
    assert report.staleness_max <= job.pipeline.staleness
    assert report.completed >= job.pipeline.train_steps * job.pipeline.batch_trajectories
