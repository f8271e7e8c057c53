"""An event loop on a virtual clock, and processes that share it without sharing a fate.

Nothing here waits: time jumps to the next thing that happens. What happens at one moment happens in the order in which it
was asked for, so that one seed is one run. Every callback and task belongs to the process in whose context it was made
(`contextvars`); a process can be frozen (SIGSTOP: what is due waits) and killed (SIGKILL: its tasks are cancelled, and what
they still try reaches nobody, because the outside world no longer takes anything from it).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

START_S: Final = 1_000_000.0
"""The clock at the beginning, in Unix seconds: 12 days after the epoch, so that no time is mistaken for 0."""
MOST_ROUNDS: Final = 1000
"""Rounds in which a killed process's tasks may unwind; one that goes on longer is left where it is."""
EXECUTOR_S: Final = 0.001
"""What a call in a thread takes."""

Action = Callable[[], object]


current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("current", default=None)
"""The process whose code runs."""


class Process:
    """What lives and dies as one. `doom`: outside calls after which it dies at once; 0: none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self.mute = False  # nothing that it does reaches the outside any more
        self.context = contextvars.Context()
        self.context.run(current.set, self)
        self.calls = 0
        self.doom = 0
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in the order in which they were made
        self.stash: list[Call] = []  # what was due while it was frozen

    def __repr__(self) -> str:
        return f"Process({self.name})"


class Call:
    """A callback that is due now or later; what asyncio calls a handle."""

    __slots__ = ("args", "callback", "context", "dropped", "when_s")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context, when_s: float
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.when_s = when_s
        self.dropped = False

    def cancel(self) -> None:
        self.dropped = True

    def cancelled(self) -> bool:
        return self.dropped

    def when(self) -> float:
        return self.when_s


class VirtualLoop(asyncio.BaseEventLoop):
    """Run it with `run_to`."""

    def __init__(self) -> None:
        self._due: deque[Call] = deque()
        self._later: list[tuple[float, int, Call]] = []
        self._numbers = 0
        self.now_s = START_S
        super().__init__()
        self.create_future = functools.partial(asyncio.Future[Any], loop=self)  # type: ignore[method-assign] - it is hot
        self.problems: list[str] = []  # what tasks raised that nobody waited for
        self.world = contextvars.Context()  # of nobody's process

    # -- what asyncio asks of a loop

    def time(self) -> float:
        return self.now_s

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """There is nothing to debug that the record does not show."""

    def close(self) -> None:
        """Nothing is open."""

    def is_closed(self) -> bool:
        return True

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        call = Call(callback, args, contextvars.copy_context() if context is None else context, self.now_s)
        self._due.append(call)
        return call

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        when_s = self.now_s + delay
        call = Call(callback, args, contextvars.copy_context() if context is None else context, when_s)
        self._numbers += 1
        heapq.heappush(self._later, (when_s, self._numbers, call))
        return call

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        call = Call(callback, args, contextvars.copy_context() if context is None else context, when)
        self._numbers += 1
        heapq.heappush(self._later, (when, self._numbers, call))
        return call

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: object = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        owner = current.get() if context is None else context.get(current)
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=str(name or "task"), context=context)
        if owner is not None:
            owner.tasks[task] = None
            task.add_done_callback(lambda done: owner.tasks.pop(done, None), context=self.world)
        return task

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Threads do not exist here: the call is made after a moment, all at once."""
        future: asyncio.Future[Any] = self.create_future()

        def call() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except (ArithmeticError, OSError, RuntimeError, ValueError, LookupError, *self.raised_in_threads) as error:
                future.set_exception(error)

        self.call_later(EXECUTOR_S, call)
        return future

    raised_in_threads: tuple[type[Exception], ...] = ()
    """Further exceptions that calls in threads may raise, which are their callers' to handle."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What a task raised that nobody waited for."""
        error = context.get("exception")
        self.problems.append(f"{context.get('message')}: {type(error).__name__}: {error}")

    # -- what the simulation asks of it

    def at(self, when_s: float, action: Action) -> Call:
        """`action` happens then, as nobody's doing: it outlives whoever asks for it."""
        return self.call_at(max(when_s, self.now_s), action, context=self.world)

    def start(self, process: Process, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """A task of the process that no other of its tasks asked for."""
        context = process.context.copy()
        return context.run(lambda: self.create_task(work(), name=process.name))

    def run_to(self, until_s: float, reached: Callable[[], bool] | None = None) -> bool:
        """Let things happen until `until_s`, or until `reached()` after one of them; whether it came to that."""
        due, later = self._due, self._later
        while True:
            if due:
                call = due.popleft()
                if call.dropped:
                    continue
            else:
                if not later or later[0][0] > until_s:
                    self.now_s = max(self.now_s, until_s)
                    return False
                when_s, _, call = heapq.heappop(later)
                if call.dropped:
                    continue
                if when_s > self.now_s:
                    self.now_s = when_s
            owner = call.context.get(current)
            if owner is not None:
                if owner.frozen:
                    owner.stash.append(call)
                    continue
                if not owner.alive:
                    continue
            call.context.run(call.callback, *call.args)
            if reached is not None and reached():
                return True

    def freeze(self, process: Process) -> None:
        process.frozen = True

    def thaw(self, process: Process) -> None:
        """It goes on, with all that was due meanwhile."""
        process.frozen = False
        stash, process.stash = process.stash, []
        self._due.extend(stash)

    def kill(self, process: Process) -> None:
        """End it. The caller has seen to it that nothing of it reaches the outside any more.

        Its tasks unwind here and now; whatever of it is due later is dropped.
        """
        assert current.get() is not process, f"{process.name} cannot end itself: let the world do it"
        self.thaw(process)
        for _ in range(MOST_ROUNDS):
            living = [task for task in process.tasks if not task.done()]
            if not living:
                break
            for task in living:
                task.cancel()
            self._unwind(process)
        process.alive = False
        process.tasks.clear()

    def _unwind(self, process: Process) -> None:
        """Run what is due of this process only, until nothing is."""
        for _ in range(MOST_ROUNDS):
            own = [call for call in self._due if call.context.get(current) is process]
            if not own:
                return
            others = [call for call in self._due if call.context.get(current) is not process]
            self._due.clear()
            self._due.extend(others)
            for call in own:
                if not call.dropped:
                    call.context.run(call.callback, *call.args)
