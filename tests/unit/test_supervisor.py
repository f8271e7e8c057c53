"""The supervisor keeps processes running, whatever befalls its own output or the server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from services.jobfile import JobFile, JobSection, NatsSection
from services.nats_server.process import EmbeddedServer, ServerError
from services.runtime.log import told
from services.supervisor import service
from services.supervisor.roster import ServiceProcess
from services.supervisor.service import Supervisor
from tests.waiting import until


@pytest.fixture
def job(tmp_path: Path) -> JobFile:
    return JobFile(job=JobSection(name="demo", data_dir=str(tmp_path)), nats=NatsSection(url="nats://127.0.0.1:1"))


class Failing(Supervisor):
    """Of one process, which ends at once with status 1; the first `refused` times it cannot even be started."""

    refused = 0

    async def _spawn(self, process: ServiceProcess) -> asyncio.subprocess.Process:
        if self.refused:
            self.refused -= 1
            raise OSError(12, "no memory")
        return await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(1)")


def nobody_reads(_: str) -> None:
    raise BrokenPipeError


@pytest.mark.parametrize("refused", [0, 2])
async def test_processes_are_restarted_though_nobody_reads_of_it(
    job: JobFile, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    monkeypatch.setattr(service, "BACKOFF_S", (0.0,))
    monkeypatch.setattr(service, "roster", lambda _: (ServiceProcess("router", "router"),))
    supervisor = Failing(job, Path("job.toml"))
    supervisor.refused = refused
    with told(nobody_reads):
        await supervisor.start()
        try:
            await until(lambda: supervisor.restarts.get("router", 0) >= 3)
        finally:
            await supervisor.stop()


class StubbornServer:
    """Ended at first; does not start twice, then does and runs on."""

    def __init__(self) -> None:
        self.starts = 0
        self.runs = asyncio.Event()

    async def wait_ended(self) -> None:
        if self.starts > 2:
            self.runs.set()
            await asyncio.Event().wait()

    async def start(self) -> None:
        self.starts += 1
        if self.starts < 3:
            raise ServerError("no answer within 20 s")


async def test_a_server_that_does_not_start_is_tried_again(job: JobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BACKOFF_S", (0.0,))
    said: list[str] = []
    supervisor: Any = Supervisor(job, Path("job.toml"))
    server = StubbornServer()
    supervisor.server = cast("EmbeddedServer", server)
    with told(said.append):
        watching = asyncio.create_task(supervisor._watch_server())
        async with asyncio.timeout(60):
            await server.runs.wait()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert server.starts == 3 and sum("no answer within 20 s" in each for each in said) == 2
