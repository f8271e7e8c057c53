"""`kill -9` of each kind of process, in turn, in one run: it goes on and ends with the same zeros."""

from __future__ import annotations

from pathlib import Path

import pytest

from messages.elastic_scheduler import GpuAvailable
from messages.envelope import encode
from messages.ids import Activity, NodeId
from messages.subjects import subject_of
from services.connect import connect
from tests.integration.running_job import EMULATED, RunningJob, assert_zeros, running_job, write_workload

VICTIMS = (
    "reserved-w0",
    "agent-0",
    "router",
    "orchestrator",
    "pipeline_scheduler",
    "train-t0",
    "nats-server",
    "spot1-w0",
    "elastic_scheduler",
    "decision_engine",
    "cluster_rebuilder",
    "toggle_manager",
    "runtime_tracker",
    "node_agent-reserved",
    "orchestrator-standby0",
)


def active(run: RunningJob) -> set[str]:
    table = run.board.table
    return {row.worker for row in table.rows if row.activity is Activity.ACTIVE} if table else set()


SHARED = (*(name for name in VICTIMS if "-w" not in name and "node_agent" not in name), "emulated_fleet-0")
"""Where workers and node agents are in one process."""


@pytest.mark.slow
async def test_a_run_survives_the_death_of_each_kind_of_process(tmp_path: Path) -> None:
    async with running_job(tmp_path, steps=4 + 2 * len(VICTIMS)) as run:
        await survives(run, VICTIMS)


@pytest.mark.slow
@pytest.mark.parametrize(("per_process", "victims"), [(1, VICTIMS), (8, SHARED)], ids=["processes", "fleet"])
async def test_an_emulated_run_survives_it_too(tmp_path: Path, per_process: int, victims: tuple[str, ...]) -> None:
    write_workload(tmp_path)
    template = EMULATED.replace(
        "[pipeline]", "[pipeline]\nmax_turns = 10\nmax_new_tokens = 500\nmax_context_tokens = 8192"
    )
    steps = 4 + 2 * len(victims)
    async with running_job(tmp_path, steps=steps, template=template, per_process=per_process) as run:
        await survives(run, victims)


async def survives(run: RunningJob, victims: tuple[str, ...]) -> None:
    """Kill them in turn; the job ends with all zeros, and with all its workers."""
    feed = await connect(run.job, "cli")
    spot = GpuAvailable(node=NodeId("spot1"), gpus=(0,))
    await feed.publish_durable(subject_of("test", spot), encode(spot), msg_id="spot")
    await feed.close()
    await run.until(lambda: {"reserved-w0", "reserved-w1", "spot1-w0"} <= active(run), "three active workers")
    epoch = run.board.table.epoch if run.board.table else 0
    for victim in victims:
        before = len(run.board.steps)
        await run.kill(victim)
        await run.until(lambda before=before: len(run.board.steps) > before, f"a train step after {victim} died")
    report = await run.finished()
    assert_zeros(report, run.job)
    assert run.board.table is not None and run.board.table.epoch > epoch
    await run.until(lambda: {"reserved-w0", "reserved-w1", "spot1-w0"} <= active(run), "all workers active again")
