"""Start and end of a service process, and its bounded background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Final

from services.runtime.log import get_logger

STOP_GRACE_S: Final = 10.0  # what has not ended so long after the stop signal is cancelled


def run_service(serve: Callable[[asyncio.Event], Awaitable[None]], *, name: str = "service") -> int:
    """Run `serve(stop)` on uvloop until it returns; SIGTERM and SIGINT set `stop`. Returns the exit code.

    After STOP_GRACE_S, or at a second signal, it is cancelled. An exception is logged and gives 1: whoever supervises
    the process starts it again, and it restores itself from its checkpoint.
    """
    if not __debug__:
        sys.stderr.write(f"{name} refuses to run under python -O: its invariants are assertions\n")
        return 2
    log = get_logger(name)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(serve, log.info))
    except Exception as error:
        log.error(f"{type(error).__name__}: {error}", action="service.failed")
        _print_traceback(error)
        return 1
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop


def _print_traceback(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error, file=sys.stderr)


async def _serve(serve: Callable[[asyncio.Event], Awaitable[None]], say: Callable[..., None]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    work = asyncio.ensure_future(serve(stop))

    def on_signal(number: int) -> None:
        if stop.is_set():
            work.cancel()
            return
        say(f"stopping on {signal.Signals(number).name}", action="service.stopping")
        stop.set()
        loop.call_later(STOP_GRACE_S, work.cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # Windows, or not the main thread
            loop.add_signal_handler(number, on_signal, number)
    try:
        await work
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


def collect_less() -> None:
    """Look for reference cycles more rarely, and never in what is there now.

    For a process that makes many objects which die at once, after its start: `pearl bench gateway` took 10 % less CPU with it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class Tasks:
    """Background tasks of a service: at most `limit` at once, all ended when the block ends.

    A task that fails ends the block with its exception (as asyncio.TaskGroup does).
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 1, "the limit of background tasks must be positive"
        self._slots = asyncio.Semaphore(limit)
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Tasks:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        await self._group.__aexit__(kind, error, trace)

    @property
    def count(self) -> int:
        """How many are running."""
        return len(self._running)

    async def spawn(self, work: Coroutine[Any, Any, None], *, name: str = "") -> asyncio.Task[None]:
        """Start `work` as soon as fewer than `limit` run."""
        try:
            await self._slots.acquire()
        except BaseException:
            work.close()
            raise
        task = self._group.create_task(work, name=name or None)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._slots.release()
