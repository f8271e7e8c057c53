"""Keeps the processes of several ranks: all of them, or none.

A rank that ends takes its group with it: the others are killed, since they wait for it in a collective, and all start again
and go on from the checkpoint. They are in the service's process group, so that whoever kills that gets them all; and a
rank whose service is gone all the same ends itself, because its GPU is about to be given to its successor.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.runtime.log import get_logger

MAX_QUICK_ENDS: Final = 3
"""Groups in a row that ended within `QUICK_S`, before the service itself fails and its node agent takes over."""
QUICK_S: Final = 30.0
RESTART_S: Final = 0.5
PARENT_CHECK_S: Final = 0.5
ORPHANED: Final = 3
"""Exit status of a rank that ended itself."""

log = get_logger("trainer")


class RanksFailedError(Exception):
    """The ranks could not be kept running; their own output says why."""


async def keep_ranks(job_path: Path, ranks: int, stop: asyncio.Event) -> None:
    """Run the ranks of a job on this node until `stop`. Raises RanksFailedError."""
    quick = 0
    while True:
        begun = time.monotonic()
        ended = await _run_group(job_path, ranks, stop)
        if stop.is_set():
            return
        quick = quick + 1 if time.monotonic() - begun < QUICK_S else 0
        log.error(f"{ended}; all {ranks} ranks start again", action="trainer.ranks_lost")
        if quick >= MAX_QUICK_ENDS:
            raise RanksFailedError(f"{quick} times in a row within {QUICK_S:.0f} s of the start: {ended}")
        await asyncio.sleep(RESTART_S)


async def keep_command(job_path: Path, command: Sequence[str], stop: asyncio.Event) -> None:
    """Run a trainer that is not ours until `stop`, or for as long as it runs. Without a command: until `stop`.

    It finds the job file in PEARL_JOB_FILE, and is in this process's group, so that whoever kills that gets both. Raises
    RanksFailedError if it ends by itself: it is the node agent's to start again.
    """
    if not command:
        await stop.wait()
        return
    program = sys.executable if command[0] == "python" else command[0]
    try:
        process = await asyncio.create_subprocess_exec(
            program, *command[1:], env={**os.environ, "PEARL_JOB_FILE": str(job_path)}
        )
    except OSError as error:
        raise RanksFailedError(f"training.command: {program} cannot be run: {error.strerror or error}") from error
    ended, stopping = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            raise RanksFailedError(f"the trainer ({' '.join(command)}) ended with status {ended.result()}")
        if process.returncode is None:
            process.terminate()
        await ended
    finally:
        stopping.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _run_group(job_path: Path, ranks: int, stop: asyncio.Event) -> str:
    """Start the ranks; return when one has ended, or all after `stop`. None is left. Says which ended, and how."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes: list[Process] = []
    waits: dict[asyncio.Task[int], int] = {}
    stopping = asyncio.create_task(stop.wait())
    try:
        for rank in range(ranks):
            command = (sys.executable, "-m", "services.trainer.rank_main", str(job_path))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(await asyncio.create_subprocess_exec(*command, env={**os.environ, **shared, **own}))
            waits[asyncio.create_task(processes[-1].wait())] = rank
        await asyncio.wait((*waits, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            # Rank 0 finishes what it does and tells the others to end.
            if processes[0].returncode is None:
                processes[0].terminate()
            await asyncio.wait(waits)
        ended = [(waits[task], task.result()) for task in waits if task.done()]
        return "; ".join(f"rank {rank} ended with status {status}" for rank, status in sorted(ended))
    finally:
        stopping.cancel()
        for process in processes:
            if process.returncode is None:
                process.kill()
        if waits:
            await asyncio.wait(waits)


def end_with_service() -> None:
    """In a rank: watch, in a thread, that the service lives; end this process when it does not."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="service", daemon=True).start()


def end_by_order_only() -> None:
    """In every rank but 0: a signal to the whole process group is rank 0's to act on; it tells the others."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
