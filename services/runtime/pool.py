"""Worker processes that never outlive whoever started them, and never more of them than a machine bears.

All work on several processes of this machine goes through `worker_pool`. Every worker holds the reading end of a pipe whose
only writing end is the parent's: the pipe closes when the parent dies, however it dies, and when the parent gives the work
up; either ends the worker at once. Nothing is asked of the operating system beyond that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Final

MOST_PROCESSES: Final = 64
"""Of one pool, on a machine with no more cores than that: a slip of the finger in `--jobs` is no fork bomb."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pool_size(wanted: int | None, tasks: int | None = None) -> int:
    """How many processes to start: `wanted` (None or 0: one a core), but no more than tasks, and a bounded number."""
    count = min(wanted or cores(), max(MOST_PROCESSES, cores()))
    return max(1, count if tasks is None else min(count, tasks))


@contextlib.contextmanager
def worker_pool(
    count: int, *, initializer: Callable[..., object] | None = None, initargs: tuple[Any, ...] = ()
) -> Generator[ProcessPoolExecutor]:
    """`count` processes for the length of the block. `initializer(*initargs)` runs first in each.

    A block that ends well waits for what it submitted. One that is left by an exception, Ctrl-C among them, ends the
    workers in the middle of their work. Workers ignore SIGINT: a terminal sends it to them too, and the parent decides.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    pool = _Pool(count, initializer=_begin, initargs=(reader, writer, initializer, initargs))
    try:
        yield pool
        pool.shutdown()
    finally:
        writer.close()
        pool.shutdown()
        reader.close()


class _Pool(ProcessPoolExecutor):
    """Its futures cannot be cancelled: they fail when the workers end, for which Python 3.11 wants them all pending."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As documented in Python's library."""
        future = super().submit(fn, *args, **kwargs)
        future.cancel = _never
        return future


def _never() -> bool:
    return False


def _begin(
    reader: Connection, writer: Connection, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]
) -> None:
    writer.close()  # a copy of the parent's
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(reader,), name="leash", daemon=True).start()
    if initializer is not None:
        initializer(*initargs)


def _end_with(reader: Connection) -> None:
    """Nothing is ever sent: reading returns when nobody holds the other end any more."""
    with contextlib.suppress(EOFError, OSError):
        reader.recv_bytes()
    os._exit(1)
