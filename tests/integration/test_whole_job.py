"""A whole job of real processes: runs, learns nothing wrong, is preempted, and stops cleanly."""

from __future__ import annotations

from pathlib import Path

import psutil

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import encode
from messages.ids import Activity, NodeId
from messages.subjects import subject_of
from services.connect import connect
from tests.integration.running_job import RunningJob, assert_zeros, running_job


def active(run: RunningJob) -> set[str]:
    table = run.board.table
    return {row.worker for row in table.rows if row.activity is Activity.ACTIVE} if table else set()


async def test_spot_workers_come_and_go_with_and_without_notice(tmp_path: Path) -> None:
    async with running_job(tmp_path, steps=12) as run:
        cli = await connect(run.job, "cli")

        async def say(message: GpuAvailable | GpuReclaimed, name: str) -> None:
            await cli.publish_durable(subject_of("test", message), encode(message), msg_id=name)

        node = NodeId("spot1")
        await run.until(lambda: "reserved-w0" in active(run), "reserved workers")
        for round_, notice_ms in enumerate((2000, 0)):
            await say(GpuAvailable(node=node, gpus=(0,)), f"up{round_}")
            await run.until(lambda: "spot1-w0" in active(run), "the spot worker is admitted")
            await say(GpuReclaimed(node=node, gpus=(0,), notice_ms=notice_ms), f"down{round_}")
            await run.until(lambda: "spot1-w0" not in active(run), "the spot worker left")
        report = await run.finished()
        assert_zeros(report, run.job)
        await cli.close()
        pids = [each.pid for each in run.supervisor.processes()]
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
