"""`pearl bench scale`: the control plane of a large job, for minutes: processors, memory, and how fast the role table spreads.

All services are real processes; the workers are emulated ones that share processes (`services/emulated_fleet`) and beat every
five seconds. Every period one preemptible worker's GPU is reclaimed or comes back, which makes a plan each. A few
recorded trajectories run meanwhile, so that the data path is not idle; the figures are the control plane's.

How propagation and growth are taken of what is measured is in `scale_figures.py`. Emulated engines keep the prefixes that they
have seen, as real ones do in their GPUs' memory, up to the KV cache's size; contexts are short here, so that this, which is no part
of the control plane, stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import psutil

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import Message, encode
from messages.ids import Activity, NodeId, Role, Zone
from messages.runtime_tracker import WorkerHeartbeat
from messages.subjects import subject_of, telemetry_subject
from pearl_state.codec import encode_table
from pearl_state.model import RoleTable, Row
from pearl_state.watch import Replica
from services import jobfile
from services.bench.cell import bus_of
from services.bench.processes import service_of
from services.bench.scale_figures import MIB, Run
from services.jobfile import ConfigError, JobFile
from services.runtime.bus import Bus, Subscription
from services.supervisor.service import Supervisor

GPUS_A_NODE: Final = 8
SPOT_SHARE: Final = 10
"""Every tenth worker is preemptible."""
LEAST_WORKERS: Final = 4
WORKERS_A_PROCESS: Final = 128
WATCHERS: Final = 4
"""Replicas in this process, beside those of the services."""
READY_S: Final = 600.0
SAMPLES: Final = 60
"""Of memory in a run, but none closer than LEAST_SAMPLE_S."""
LEAST_SAMPLE_S: Final = 0.5
PROGRESS_S: Final = 15.0
NOTICE_MS: Final = 5000
TIME_SCALE: Final = 4.0
"""A worker needs 70 s to start (paper Table 3): so scaled, one that comes back serves before the next one goes."""

JOB: Final = """
[job]
name = "scale"
data_dir = {data_dir}
[model]
device = "cpu"
{nodes}
[rollout]
engine = "emulated"
heartbeat_ms = 5000
kv_cache_tokens = 16384
workers_per_process = {per_process}
[emulation]
time_scale = {time_scale}
[pipeline]
batch_trajectories = 16
group_size = 8
train_steps = 1000000
max_turns = 150
max_new_tokens = 32768
max_context_tokens = 8192
[environment]
entry = "services.environments.replay:Replay"
tokenizer = "services.environments.replay:ReplayTokenizer"
time_scale = {time_scale}
[training]
engine = "emulated"
[decision]
disaggregation = true
[timeouts]
lease_ms = 30000
command_retry_ms = 5000
prepare_ms = 300000
apply_ms = 120000
"""


class ScaleError(Exception):
    """The job did not get so far that there is something to measure: what was missing."""


def job_of(folder: Path, workers: int, time_scale: float = TIME_SCALE) -> Path:
    """The job file of `workers` workers of one GPU each, written into `folder`. Raises ConfigError."""
    most = jobfile.MOST_WORKERS - 1  # the training node's overlap slot, which nobody borrows here, is one more
    if not LEAST_WORKERS <= workers <= most:
        raise ConfigError(f"--workers {workers}: from {LEAST_WORKERS} to {most}")
    spot = max(1, workers // SPOT_SHARE)
    nodes = [
        *_nodes("r", Zone.RESERVED, workers - spot),
        *_nodes("s", Zone.PREEMPTIBLE, spot),
        *_nodes("t", Zone.TRAINING, 1),
    ]
    path = folder / "scale.toml"
    text = JOB.format(
        data_dir=msgspec.json.encode(str(folder)).decode(),
        nodes="\n".join(nodes),
        time_scale=time_scale,
        per_process=max(2, min(WORKERS_A_PROCESS, workers)),
    )
    path.write_text(text, encoding="utf-8")
    return path


def _nodes(prefix: str, zone: Zone, gpus: int) -> list[str]:
    return [
        f'[[nodes]]\nname = "{prefix}{number}"\nzone = "{zone.value}"\ngpus = {min(GPUS_A_NODE, gpus - begin)}'
        for number, begin in enumerate(range(0, gpus, GPUS_A_NODE))
    ]


async def measure(
    folder: Path,
    *,
    workers: int,
    seconds: float,
    period_s: float = 60.0,
    time_scale: float = TIME_SCALE,
    say: Callable[[str], None] = lambda _: None,
) -> Run:
    """Bring the job up, measure for so long, stop it. `say` hears of progress. Raises ConfigError, ScaleError.

    `time_scale` makes the emulated start of the workers faster, and the trajectories.
    """
    path = job_of(folder, workers, time_scale)
    job = jobfile.load(path)
    supervisor = Supervisor(job, path)
    begun = time.monotonic()
    try:
        say(f"starting the services and {workers} emulated workers ...")
        await supervisor.start()
        async with contextlib.AsyncExitStack() as stack:
            buses = [await stack.enter_async_context(bus_of(job, "monitor")) for _ in range(WATCHERS)]
            feed = await stack.enter_async_context(bus_of(job, "feed"))
            agent = await stack.enter_async_context(bus_of(job, "agent"))
            watch = Watch()
            for bus in buses:
                await stack.enter_async_context(watch.on(bus, job.job.name))
            heartbeats = await buses[0].subscribe(telemetry_subject(job.job.name, WorkerHeartbeat))
            beats = Beats(heartbeats)
            counting = asyncio.create_task(beats.count())
            try:
                await _all_serving(job, feed, watch, begun, say)
                return await _observe(
                    job, supervisor, feed, agent, watch, beats, time.monotonic() - begun, seconds, period_s, say
                )
            finally:
                counting.cancel()
                await asyncio.wait([counting])
                await heartbeats.stop()
    finally:
        say("stopping all processes ...")
        await supervisor.stop()


class Watch:
    """Replicas of the table, and how long each new one took to get there."""

    def __init__(self) -> None:
        self.table: RoleTable | None = None
        self.took_ms: list[float] = []
        self.most_serving = 0

    @contextlib.asynccontextmanager
    async def on(self, bus: Bus, job: str):  # noqa: ANN201 - an async context manager of None
        """Follow the table on this connection."""
        replica = Replica()
        await replica.start(bus, job)
        replica.on_change(self._changed)
        try:
            yield
        finally:
            await replica.stop()

    def _changed(self, table: RoleTable) -> None:
        self.took_ms.append(max(0.0, time.time() * 1000 - table.written_ms))
        if self.table is None or table.epoch >= self.table.epoch:
            self.table = table
            self.most_serving = max(self.most_serving, self.serving())

    def serving(self) -> int:
        """Workers that serve, in the newest table."""
        return 0 if self.table is None else sum(map(_serves, self.table.rows))


def _serves(row: Row) -> bool:
    return row.activity is Activity.ACTIVE and row.role is not Role.TRAINING


class Beats:
    """Counts worker heartbeats."""

    def __init__(self, subscription: Subscription) -> None:
        self.seen = 0
        self._subscription = subscription

    async def count(self) -> None:
        """Until cancelled."""
        async for _ in self._subscription:
            self.seen += 1


async def _all_serving(job: JobFile, feed: Bus, watch: Watch, begun: float, say: Callable[[str], None]) -> None:
    """Make all preemptible GPUs available, and wait for every dedicated worker to serve. Raises ScaleError."""
    for node in job.nodes:
        if node.zone is Zone.PREEMPTIBLE:
            await _publish(feed, job, GpuAvailable(node=NodeId(node.name), gpus=tuple(range(node.gpus))), 0)
    wanted = sum(node.gpus for node in job.nodes if node.zone is not Zone.TRAINING)
    said = begun
    while watch.serving() < wanted:
        await asyncio.sleep(0.2)
        now = time.monotonic()
        if now - said > PROGRESS_S:
            said = now
            say(f"{now - begun:.0f} s: {watch.serving()} of {wanted} workers serve")
        if now - begun > READY_S:
            raise ScaleError(
                f"after {READY_S:.0f} s only {watch.serving()} of {wanted} workers serve: this machine is too slow for so many, "
                "or something is wrong (see the logs below the data folder); try fewer --workers"
            )


async def _observe(
    job: JobFile,
    supervisor: Supervisor,
    feed: Bus,
    agent: Bus,
    watch: Watch,
    beats: Beats,
    ready_s: float,
    seconds: float,
    period_s: float,
    say: Callable[[str], None],
) -> Run:
    spot = [(node, index) for node in job.nodes if node.zone is Zone.PREEMPTIBLE for index in range(node.gpus)]
    first = watch.table
    assert first is not None
    watch.took_ms.clear()
    beats.seen = 0
    begun, cpu_before = time.monotonic(), _cpu(supervisor)
    cpu: dict[tuple[str, int], float] = dict(cpu_before)
    every_s = max(LEAST_SAMPLE_S, seconds / SAMPLES)
    next_sample, next_event, said, events = begun, begun + min(period_s, seconds) / 2, begun, 0
    at_s: list[float] = []
    samples: list[dict[str, tuple[int, ...]]] = []
    stored_ms: list[float] = []
    say(f"all workers serve after {ready_s:.0f} s; measuring for {seconds:.0f} s")
    while (now := time.monotonic()) < begun + seconds:
        if now >= next_sample:
            next_sample += every_s
            at_s.append(now - begun)
            samples.append(_memory(supervisor))
            cpu.update(_cpu(supervisor))
            stored_ms.append(await _store(agent, job, len(stored_ms)))
        if now >= next_event:
            next_event += period_s
            node, gpu = spot[events // 2 % len(spot)]
            events += 1
            event = (
                GpuReclaimed(node=NodeId(node.name), gpus=(gpu,), notice_ms=NOTICE_MS)
                if events % 2
                else GpuAvailable(node=NodeId(node.name), gpus=(gpu,))
            )
            await _publish(feed, job, event, events)
        if now - said > PROGRESS_S:
            said = now
            plans = 0 if watch.table is None else watch.table.writer.plans - first.writer.plans
            total = sum(sum(sizes) for sizes in samples[-1].values()) / MIB
            say(
                f"{now - begun:.0f} of {seconds:.0f} s: {plans} plans, {watch.serving()} workers serve, {total:.0f} MiB in all"
            )
        await asyncio.sleep(max(0.0, min(next_sample, next_event, begun + seconds) - time.monotonic()))
    at_s.append(time.monotonic() - begun)
    samples.append(_memory(supervisor))
    cpu.update(_cpu(supervisor))
    last = watch.table
    assert last is not None
    used: dict[str, float] = {}
    for key, value in cpu.items():
        used[key[0]] = used.get(key[0], 0.0) + value - cpu_before.get(key, 0.0)
    services = sorted({service for sample in samples for service in sample})
    return Run(
        workers=watch.most_serving,
        seconds=at_s[-1],
        ready_s=ready_s,
        events=events,
        plans=last.writer.plans - first.writer.plans,
        failed_plans=last.writer.failed_plans - first.writer.failed_plans,
        epochs=last.epoch - first.epoch,
        table_bytes=len(encode_table(last)),
        heartbeats=beats.seen,
        propagation_ms=tuple(watch.took_ms),
        stored_ms=tuple(stored_ms),
        cpu_s=used,
        processes={service: len(samples[-1].get(service, (0,))) for service in services},
        at_s=tuple(at_s),
        memory={service: tuple(sum(sample.get(service, ())) for sample in samples) for service in services},
        restarts=dict(supervisor.restarts),
    )


async def _publish(bus: Bus, job: JobFile, event: Message, number: int) -> None:
    subject = subject_of(job.job.name, event)
    await bus.publish_durable(subject, encode(event), msg_id=f"scale:{subject}:{number}")


async def _store(bus: Bus, job: JobFile, number: int) -> float:
    """Milliseconds until a message that nobody reads is stored and acknowledged."""
    begun = time.perf_counter()
    await bus.publish_durable(f"pearl.{job.job.name}.journal.bench", bytes(800), msg_id=f"scale:{number}")
    return (time.perf_counter() - begun) * 1000


def _each(supervisor: Supervisor) -> list[tuple[str, psutil.Process]]:
    found: list[tuple[str, psutil.Process]] = []
    for each in supervisor.processes():
        with contextlib.suppress(psutil.Error):
            found.append((service_of(each.name), psutil.Process(each.pid)))
    return found


def _cpu(supervisor: Supervisor) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = {}
    for service, process in _each(supervisor):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[service, process.pid] = times.user + times.system
    return found


def _memory(supervisor: Supervisor) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for service, process in _each(supervisor):
        with contextlib.suppress(psutil.Error):
            full = process.memory_full_info()
            found[service] = (*found.get(service, ()), int(getattr(full, "pss", full.uss)))
    return found
