"""Start and end of a service process; bounded background tasks; log lines."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from services.runtime.clock import ManualClock
from services.runtime.lifecycle import Tasks, run_service
from services.runtime.log import Logger


def test_a_signal_sets_the_stop_event() -> None:
    async def serve(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(3):
            await stop.wait()

    assert run_service(serve) == 0


def test_a_failure_is_logged_and_gives_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    async def serve(stop: asyncio.Event) -> None:
        raise AssertionError("epoch went back")

    assert run_service(serve, name="orchestrator") == 1
    line = json.loads(capsys.readouterr().err.splitlines()[0])
    assert (line["actor"], line["action"], line["level"]) == ("orchestrator", "service.failed", "error")
    assert "epoch went back" in line["text"]


async def test_background_tasks_are_bounded_and_end_with_the_block() -> None:
    most = 0
    release = asyncio.Event()

    async with Tasks(limit=2) as tasks:

        async def work() -> None:
            nonlocal most
            most = max(most, tasks.count)
            await release.wait()

        await tasks.spawn(work())
        await tasks.spawn(work())
        third = asyncio.create_task(tasks.spawn(work()))
        await asyncio.sleep(0)
        assert tasks.count == 2 and not third.done()
        release.set()
        last = await third
        release.clear()
    assert most == 2
    assert last.done()
    assert tasks.count == 0


async def test_a_failing_background_task_ends_the_block() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ExceptionGroup) as caught:
        async with Tasks(limit=2) as tasks:
            await tasks.spawn(fail())
            await asyncio.Event().wait()
    assert isinstance(caught.value.exceptions[0], ValueError)


def test_a_log_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    log = Logger("router", clock=ManualClock(5)).bind(epoch=3)
    log.debug("not shown", action="x")
    log.info("two\nlines", action="y", odd=object)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found["at_ms"] == 5 and found["epoch"] == 3 and found["text"] == "two\nlines"
