"""Emulated workers and their node agents in one process, so that a thousand of them fit on a machine.

Owns: what the node agents and rollout workers in it own. The agents are the ordinary ones; instead of a process they start a
task, and ending it is what a signal would be. All agents share one connection to the bus, all workers another. A trainer is a
process of its own here, too. Killed, a fleet takes its workers with it, as a rack without power would: the orchestrator learns
it from the node heartbeats of the next one, which know nothing of them.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from messages.ids import Incarnation, WorkerId
from services.connect import connect
from services.emulated_fleet.config import nodes_of
from services.jobfile import JobFile
from services.node_agent.config import Config as NodeConfig
from services.node_agent.processes import PidFile, Pids, Process
from services.node_agent.service import NodeAgent
from services.rollout_worker.service import run_worker
from services.runtime.bus import Bus
from services.runtime.log import get_logger

FILES_PER_WORKER: Final = 4
"""Its attempt log, its KV socket and a connection or two."""
FILES: Final = 512

log = get_logger("emulated_fleet")


async def serve(job: JobFile, stop: asyncio.Event, job_path: Path, index: int = 0) -> None:
    """Be fleet `index` until `stop`. Raises ConfigError, BusUnavailable."""
    nodes = nodes_of(job, index)
    _allow_files(FILES + FILES_PER_WORKER * 2 * job.rollout.workers_per_process)
    agents, workers = await connect(job, "node_agent"), await connect(job, "rollout_worker")
    try:
        async with asyncio.TaskGroup() as group:
            for node in nodes:
                config = NodeConfig.of(job, node, job_path)
                tasks = Tasks(job, workers, config.run_dir)
                group.create_task(NodeAgent(config, agents, job.job.name, pids=tasks).run(stop), name=node)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await workers.close()
        await agents.close()


class Tasks(Pids):
    """Starts rollout workers as tasks of this process, and everything else as processes."""

    def __init__(self, job: JobFile, bus: Bus, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._job = job
        self._bus = bus

    def start(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        gpus: tuple[int, ...],
        service: str,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> Process:
        """See `Pids.start`; a worker in this process has no pid file, since it cannot be found again."""
        if service != "rollout_worker":
            return super().start(worker, incarnation, gpus, service, command, environment)
        record = PidFile(
            worker=worker,
            incarnation=incarnation,
            pid=os.getpid(),
            start_time=time.time(),
            gpus=gpus,
            service=service,
        )
        return WorkerTask(record, self._job, self._bus)


class WorkerTask:
    """A rollout worker as a task (`node_agent.processes.Process`). It begins at once."""

    def __init__(self, record: PidFile, job: JobFile, bus: Bus) -> None:
        self.record = record
        self._stop = asyncio.Event()
        running = run_worker(job, bus, record.worker, record.incarnation, self._stop)
        self._task = asyncio.create_task(running, name=f"{record.worker}.{record.incarnation}")

    def signal(self, hard: bool) -> None:
        """SIGKILL cancels it, SIGTERM asks it to stop."""
        if hard:
            self._task.cancel()
        else:
            self._stop.set()

    async def ended(self) -> str:
        """Wait for its end and say how, as for a process. What it raised is logged."""
        await asyncio.wait([self._task])
        if self._task.cancelled():
            return "signal:9"
        error = self._task.exception()
        if error is None:
            return "exit:0"
        log.error(f"{self.record.worker} ended: {type(error).__name__}: {error}", action="worker_failed")
        return "exit:1"


def _allow_files(wanted: int) -> None:
    """Raise the limit of open files, as far as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning(f"only {most} open files are allowed here, {wanted} may be needed (ulimit -n)", action="files")
