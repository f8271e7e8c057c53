"""A stopped job goes on where it was: `pearl up` on the same files continues at the next train step."""

from __future__ import annotations

from pathlib import Path

from tests.integration.running_job import assert_zeros, running_job


async def test_a_stopped_job_continues_from_its_checkpoint(tmp_path: Path) -> None:
    async with running_job(tmp_path, steps=10) as run:
        await run.until(lambda: len(run.board.steps) >= 3, "three train steps")
    async with running_job(tmp_path, steps=10) as run:
        before = len(run.board.steps)
        assert before >= 3, "the history is still there"
        report = await run.finished()
        assert_zeros(report, run.job)
        assert [step.batch for step in run.board.steps] == list(range(10)), "no step was trained twice or left out"
