"""`pearl up`: every service of a job file, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
from pathlib import Path
from statistics import fmean
from typing import Final

from messages.envelope import UndecodableMessage
from messages.pipeline_scheduler import StepFinished
from messages.subjects import decode_on, event_subject, stream
from services import jobfile
from services.cli.preflight import preflight
from services.cli.progress import progress
from services.cli.run_log import run_log
from services.connect import connect
from services.jobfile import JobFile
from services.nats_server.process import ServerError
from services.runtime.bus import BusError
from services.runtime.follow import Follower
from services.runtime.log import get_logger
from services.supervisor.roster import roster
from services.supervisor.service import Supervisor, on_interrupt

POLL_S: Final = 1.0
EVERY_S: Final = 10.0
"""Least time between two lines about train steps; the last one is told at once."""
EDGE_STEPS: Final = 5
"""Rewards are compared between the means of the first and the last so many train steps."""


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 after a clean stop. The end of the job's train steps is told and ends nothing: services stay up until Ctrl-C."""
    path = Path(os.path.realpath(arguments.config))
    job = jobfile.load(path)
    with progress("looking at what the job file names"):
        preflight(job, path)
    with run_log(job, _tell):
        return asyncio.run(_up(job, path, arguments.view))


async def _up(job: JobFile, path: Path, view: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    on_interrupt(loop, stop.set)
    supervisor = Supervisor(job, path)
    following: asyncio.Task[None] | None = None
    try:
        with progress("starting NATS and the services"):
            await supervisor.start()
        _tell(f"job {job.job.name}: {len(roster(job))} services; logs in {job.run_dir}/logs; Ctrl-C stops")
        following = asyncio.create_task(_follow(job, TrainSteps(job, path), stop))
        if view:
            from services.monitor.view import watch

            await watch(job, stop)
        else:
            await stop.wait()
    except ServerError:
        if not stop.is_set():  # a server being started hears Ctrl-C too, until it has a session of its own
            raise
    finally:
        if supervisor.started:
            _tell("stopping")
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        with progress("stopping all processes"):
            await supervisor.stop()
    return 0


class TrainSteps:
    """What a person is told of a job's train steps as they are done: some of them, and the end. Holds no clock."""

    def __init__(self, job: JobFile, path: Path) -> None:
        self._job = job
        self._path = path
        self._rewards: dict[int, float] = {}
        self._told = 0
        self._told_at_s = float("-inf")

    def take(self, step: StepFinished) -> None:
        """A train step, new or told of again."""
        if 0 <= step.batch < self._job.pipeline.train_steps:
            self._rewards.setdefault(step.batch, step.reward_mean)

    def news(self, at_s: float) -> str:
        """What is to be said at this moment, each thing once, or ""."""
        # Batches are trained in order: with the newest step, all before it are done, though the stream may not hold them any more.
        done, wanted = max(self._rewards, default=-1) + 1, self._job.pipeline.train_steps
        if done == self._told or (done < wanted and at_s < self._told_at_s + EVERY_S):
            return ""
        self._told, self._told_at_s = done, at_s
        rewards = [self._rewards[batch] for batch in sorted(self._rewards)]
        if done < wanted:
            return f"train step {done} of {wanted} done, reward {rewards[-1]:.3f}"
        first, last = fmean(rewards[:EDGE_STEPS]), fmean(rewards[-EDGE_STEPS:])
        folders = [self._job.run_dir / each for each in ("snapshots", "metrics", "checkpoints")]
        left = ", ".join(str(each) for each in folders if each.is_dir())
        given = shlex.quote(str(self._path))
        lines = [f"the job is done: all {wanted} train steps, reward {first:.3f} -> {last:.3f}"]
        if len(rewards) < wanted:
            lines[0] += f" over the {len(rewards)} that are still in the event stream"
        lines += [f"it left {left}"] if left else []
        lines += [f"its services stay up until Ctrl-C: look with pearl status -c {given}, or pearl check -c {given}"]
        return "\n".join(lines)


async def _follow(job: JobFile, steps: TrainSteps, stop: asyncio.Event) -> None:
    """Tell of train steps until `stop`. A bus that is away for a while delays this, and ends nothing."""
    loop, log = asyncio.get_running_loop(), get_logger("up")
    while not stop.is_set():
        try:
            bus = await connect(job, "monitor")
        except BusError as error:
            log.warning(f"train steps cannot be followed yet: {error}", action="not_followed")
        else:
            name = job.job.name
            follower = Follower(bus, stream(name, "ev"), event_subject(name, StepFinished))
            try:
                while not stop.is_set():
                    async for delivery in follower.more():
                        with contextlib.suppress(UndecodableMessage):
                            steps.take(decode_on(name, delivery.subject, delivery.data, StepFinished))
                    if news := steps.news(loop.time()):
                        _tell(news)
                    await _pause(stop)
            except BusError as error:
                log.info(f"train steps are followed again in a moment: {error}", action="not_followed")
            finally:
                await bus.close()
        await _pause(stop)


async def _pause(stop: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), POLL_S)


def _tell(text: str) -> None:
    """For people, if anybody still reads: the job goes on, and is stopped in order, all the same."""
    with contextlib.suppress(OSError):
        print(text, flush=True)
