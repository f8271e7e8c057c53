"""`pearl simulate record`: a workload file out of a job's journal, while it runs or after it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from messages.agent import TurnFinished
from messages.envelope import UndecodableMessage
from messages.pipeline_scheduler import TrajectoryCompleted
from messages.subjects import decode_on, event_subject, stream
from services.cli.runs import connect_running, job_of
from services.environments.workload import as_csv
from services.jobfile import ConfigError, JobFile
from services.nats_server.process import EmbeddedServer
from services.runtime.bus import Bus, BusError
from services.simulator.whatif.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S: Final = 0.5
"""Between two looks at the journal; a batch's records are kept until its train step is done, which takes far longer."""


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 if nothing was recorded."""
    job = job_of(arguments)
    out = Path(arguments.out)
    if out.is_dir() or not Path(os.path.realpath(out)).parent.is_dir():
        raise ConfigError(f"--out {out}: give a file in a folder that exists")
    recorder = Recorder()
    quiet = arguments.json

    def say(done: int) -> None:
        if not quiet:
            print(f"{done} of {arguments.trajectories} trajectories", file=sys.stderr, flush=True)

    with contextlib.suppress(KeyboardInterrupt):  # what is recorded so far is written
        asyncio.run(record(job, recorder, arguments.trajectories, arguments.once, say))
    found = recorder.trajectories[: arguments.trajectories]
    if not found:
        print(
            f"pearl simulate record: no trajectory of job {job.job.name} has ended with all its turns in the journal; "
            "a job keeps the turns of batches that are trained only with pipeline.keep_journal = true: record while it runs",
            file=sys.stderr,
        )
        return 1
    try:
        out.write_text(as_csv(found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error})") from error
    report = {
        "out": str(out),
        "trajectories": len(found),
        "turns": sum(len(each.turns) for each in found),
        "failed": recorder.failed,
        "incomplete": recorder.incomplete,
    }
    if quiet:
        print(json.dumps(report))
    else:
        print(f"{report['trajectories']} trajectories, {report['turns']} turns: {out}")
        if recorder.incomplete:
            print(f"{recorder.incomplete} more had ended, but their first turns were gone from the journal already")
    return 0


async def record(job: JobFile, recorder: Recorder, most: int, once: bool, say: Callable[[int], None]) -> None:
    """Feed the recorder until it has `most` trajectories or the job ends; `once`: with what is there now.

    A job that has ended and had its own NATS server gets it back for as long as this reads. Raises BusError, ConfigError.
    """
    server = EmbeddedServer(job)
    ended = job.nats.embedded and server.pid is None
    if ended and not (job.run_dir / "nats" / "store").is_dir():
        raise ConfigError(f"job {job.job.name} left nothing in {job.run_dir.absolute()}: did it ever run?")
    if ended:
        await server.start()
    try:
        bus = await connect_running(job, "monitor")
        try:
            follow = Follow(bus, job.job.name, recorder)
            while True:
                try:
                    await follow.look()
                except BusError:
                    if recorder.trajectories and job.nats.embedded and server.pid is None:
                        return  # the job ended meanwhile
                    raise
                say(min(len(recorder.trajectories), most))
                if once or ended or len(recorder.trajectories) >= most:
                    return
                await asyncio.sleep(POLL_S)
        finally:
            await bus.close()
    finally:
        if ended:
            await server.stop()


class Follow:
    """Reads on from where it was."""

    def __init__(self, bus: Bus, job: str, recorder: Recorder) -> None:
        self._bus = bus
        self._job = job
        self._recorder = recorder
        self._ends_from = 1
        self._turns_from = 1

    async def look(self) -> None:
        """All that is new: ends first, so that the journal, read later, has all of their turns. Raises BusError."""
        ends: list[TrajectoryCompleted] = []
        ev, journal = stream(self._job, "ev"), stream(self._job, "journal")
        subject = event_subject(self._job, TrajectoryCompleted)
        async for delivery in self._bus.read(ev, subject, first_seq=self._ends_from):
            self._ends_from = delivery.seq + 1
            with contextlib.suppress(UndecodableMessage):  # counted by whom it was for
                ends.append(decode_on(self._job, delivery.subject, delivery.data, TrajectoryCompleted))
        async for delivery in self._bus.read(journal, f"pearl.{self._job}.journal.*", first_seq=self._turns_from):
            self._turns_from = delivery.seq + 1
            with contextlib.suppress(UndecodableMessage):  # an interruption, or no record of ours
                self._recorder.turn(delivery.seq, decode_on(self._job, delivery.subject, delivery.data, TurnFinished))
        for end in ends:
            self._recorder.end(end)
