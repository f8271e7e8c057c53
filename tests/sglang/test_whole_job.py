"""Whole jobs on real SGLang servers: every service, a trainer that learns, and servers that change weights and roles, and die.

They need an environment with SGLang (`make sglang-test`; docs/sglang.md). A server takes half a minute and more to start, so one job
goes through many things.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from messages.ids import Activity, Role
from services.checker.collect import check
from services.cli.demo_jobs import changed
from services.jobfile import WEIGHT_WAYS
from services.rollout_worker.engines.sglang.api import UPDATES
from services.rollout_worker.engines.sglang.cpu import as_toml
from tests.integration import running_job
from tests.integration.running_job import RunningJob, assert_zeros
from tests.sglang import real

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not real.PYTHON, reason=real.NO_PYTHON)]
needs_pd = pytest.mark.skipif(not real.PD, reason=real.NO_PD)

WORKERS = """
[[nodes]]
name = "reserved"
zone = "reserved"
gpus = {workers}
"""
SLOW = "prepare_ms = 600000\napply_ms = 300000\nlease_ms = 20000\n"
"""A server takes long to start, and two cores are shared by several of them and everything else."""
CHANGES = {
    "batch_trajectories": "16",
    "group_size": "4",
    "drain_ms": "20000",
    "silence_ms": "20000",
    "task_ack_wait_ms": "20000",
}
JOB = (
    changed(running_job.JOB.replace(running_job.NODES, WORKERS), CHANGES)
    .replace("[timeouts]\n", f"max_new_tokens = {{new_tokens}}\n[timeouts]\n{SLOW}")
    .replace("{more}", "")
    + """
[rollout]
engine = "sglang"
max_running = 16
kv_cache_tokens = 8192
[rollout.sglang]
{sglang}
[decision]
policy = "{policy}"
disaggregation = true
{more}
"""
)
UPDATED = '"POST {} HTTP/1.1" 200'
LEAKED = "memory leak detected"
SWITCHED = '"POST /pd_role_switch HTTP/1.1" 200'
START_S = 600.0
"""Servers side by side on a busy machine."""


def places(weights: str = "disk", **given: object) -> dict[str, Any]:
    """What the job file above leaves open."""
    section = real.with_weights(real.settings(real.PYTHON), weights)
    return {"template": JOB, "sglang": as_toml(section), "new_tokens": 2, **given}


def updates(run: RunningJob, worker: str, weights: str = "disk") -> int:
    """That its server has answered well."""
    (call,) = [each for each in UPDATES[weights] if each.startswith("/update_")]
    return log_of(run, worker).count(UPDATED.format(call))


def roles(run: RunningJob) -> dict[str, Role]:
    """Of the workers that serve."""
    table = run.board.table
    return {row.worker: row.role for row in table.rows if row.activity is Activity.ACTIVE} if table else {}


def with_role(run: RunningJob, role: Role) -> list[str]:
    return sorted(worker for worker, its in roles(run).items() if its is role)


def log_of(run: RunningJob, worker: str) -> str:
    """What the worker's server wrote."""
    return (run.job.run_dir / "logs" / f"{worker}.sglang.log").read_text(errors="replace")


def kill_server(run: RunningJob, worker: str) -> None:
    """Its SGLang server, not the worker: the process that listens, without a chance to say anything."""
    parent = psutil.Process(run.pid(worker))
    (server,) = (
        each for each in parent.children(recursive=True) if each.cmdline()[1:3] == ["-m", "sglang.launch_server"]
    )
    server.kill()


def groups() -> set[int]:
    """Process groups of the servers that live now."""
    found: set[int] = set()
    for each in psutil.process_iter(["cmdline"]):
        words = each.info["cmdline"] or []
        if "sglang.launch_server" in words or any(word.startswith("sglang::") for word in words):
            try:
                found.add(os.getpgid(each.pid))
            except ProcessLookupError:
                continue
    return found


async def ended(before: set[int]) -> None:
    """No server is left behind: a leash needs a moment to end its group."""
    async with asyncio.timeout(10):
        while not groups() <= before:  # noqa: ASYNC110 - what ends tells nobody
            await asyncio.sleep(0.1)


async def trained(run: RunningJob, more: int) -> None:
    """So many train steps from now on."""
    goal = len(run.board.steps) + more
    await run.until(lambda: len(run.board.steps) >= goal, f"train step {goal}", START_S)


@pytest.mark.parametrize("weights", WEIGHT_WAYS)
async def test_a_colocated_job_trains_and_its_server_changes_weights_under_load(tmp_path: Path, weights: str) -> None:
    before = groups()
    async with running_job.running_job(tmp_path, steps=3, **places(weights, workers=1, policy="colocated")) as run:
        await run.until(lambda: with_role(run, Role.COLOCATED) != [], "a colocated worker", START_S)
        assert_zeros(await run.finished(START_S), run.job)
        assert updates(run, "reserved-w0", weights) >= 3
        assert LEAKED not in log_of(run, "reserved-w0")
    await ended(before)


@needs_pd
async def test_a_disaggregated_job_outlives_its_servers(tmp_path: Path) -> None:
    """Two prefill servers and a decode server train on while one of each is killed, and one changes its role for it."""
    before = groups()
    async with running_job.running_job(
        tmp_path, steps=1000, **places(workers=3, policy="static-pd:2:1", new_tokens=8)
    ) as run:
        await run.until(lambda: len(with_role(run, Role.PREFILL)) == 2, "two prefill workers", START_S)
        await run.until(lambda: len(with_role(run, Role.DECODE)) == 1, "a decode worker", START_S)
        prefill, (decode,) = with_role(run, Role.PREFILL), with_role(run, Role.DECODE)
        switches = {worker: log_of(run, worker).count(SWITCHED) for worker in prefill}
        await trained(run, 2)

        kill_server(run, decode)  # no decode worker is left: a prefill worker becomes one, without a relaunch
        await run.until(lambda: with_role(run, Role.DECODE) in [[each] for each in prefill], "a switch", START_S)
        (switched,) = with_role(run, Role.DECODE)
        assert log_of(run, switched).count(SWITCHED) == switches[switched] + 1
        await trained(run, 2)
        others = sorted({*prefill, decode} - {switched})
        await run.until(lambda: with_role(run, Role.PREFILL) == others, "it is back, as a prefill worker", START_S)
        await trained(run, 2)

        kill_server(run, decode)  # which is a prefill worker now
        await run.until(lambda: decode not in roles(run), "its end is noticed", START_S)
        await trained(run, 2)
        await run.until(lambda: with_role(run, Role.PREFILL) == others, "it is back again", START_S)
        await trained(run, 2)
        report = await check(run.bus, run.job)
        assert report.violations == () and (report.lost, report.duplicated, report.regenerated) == (0, 0, 0)
        assert report.staleness_max <= 1 and report.trained >= 10
        assert report.interrupted > 0, "nothing was under way: the kills have shown nothing"
        assert updates(run, switched) >= 10
        leaking = [worker for worker in {*prefill, decode} if LEAKED in log_of(run, worker)]
        assert not leaking, "pages that nobody holds: see what docs/sglang.md says of them"
    await ended(before)
