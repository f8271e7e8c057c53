"""`kill -9` of each kind of process, in turn, in one run: it goes on and ends with the same zeros."""

from __future__ import annotations

from pathlib import Path

import pytest

from messages.elastic_scheduler import GpuAvailable
from messages.envelope import encode
from messages.ids import Activity, NodeId
from messages.subjects import subject_of
from services.connect import connect
from tests.integration.running_job import RunningJob, assert_zeros, running_job

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


@pytest.mark.slow
async def test_a_run_survives_the_death_of_each_kind_of_process(tmp_path: Path) -> None:
    async with running_job(tmp_path, steps=4 + 2 * len(VICTIMS)) as run:
        feed = await connect(run.job, "cli")
        spot = GpuAvailable(node=NodeId("spot1"), gpus=(0,))
        await feed.publish_durable(subject_of("test", spot), encode(spot), msg_id="spot")
        await feed.close()
        await run.until(lambda: {"reserved-w0", "reserved-w1", "spot1-w0"} <= active(run), "three active workers")
        epoch = run.board.table.epoch if run.board.table else 0
        for victim in VICTIMS:
            before = len(run.board.steps)
            await run.kill(victim)
            await run.until(lambda before=before: len(run.board.steps) > before, f"a train step after {victim} died")
        report = await run.finished()
        assert_zeros(report, run.job)
        assert run.board.table is not None and run.board.table.epoch > epoch
        await run.until(lambda: {"reserved-w0", "reserved-w1", "spot1-w0"} <= active(run), "all workers active again")
