"""`pearl up`: every service of a job file, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from pathlib import Path

from services import jobfile
from services.cli.preflight import preflight
from services.cli.progress import progress
from services.nats_server.process import ServerError
from services.supervisor.roster import roster
from services.supervisor.service import Supervisor, on_interrupt


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 after a clean stop."""
    path = Path(os.path.realpath(arguments.config))
    job = jobfile.load(path)
    with progress("looking at what the job file names"):
        preflight(job, path)
    return asyncio.run(_up(job, path, arguments.view))


async def _up(job: jobfile.JobFile, path: Path, view: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    on_interrupt(loop, stop.set)
    supervisor = Supervisor(job, path, on_event=_tell)
    try:
        with progress("starting NATS and the services"):
            await supervisor.start()
        _tell(f"job {job.job.name}: {len(roster(job))} services; logs in {job.run_dir}/logs; Ctrl-C stops")
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
        with progress("stopping all processes"):
            await supervisor.stop()
    return 0


def _tell(text: str) -> None:
    """For people, if anybody still reads: the job goes on, and is stopped in order, all the same."""
    with contextlib.suppress(OSError):
        print(text, flush=True)
