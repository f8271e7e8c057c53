"""A whole job whose trainer is not ours (examples/foreign_trainer): it trains, lends its GPU, and is killed."""

from __future__ import annotations

from pathlib import Path

from tests.integration.running_job import assert_zeros, running_job
from tests.integration.test_lending_job import LENDING, lending_of, lent

PROGRAM = Path(__file__).parents[2] / "examples/foreign_trainer/train.py"
TRAINER = f'[training]\nengine = "external"\ncommand = ["python", "{PROGRAM}"]\n'


async def test_a_foreign_trainer_trains_lends_and_goes_on_after_its_death(tmp_path: Path) -> None:
    async with running_job(tmp_path, steps=6, more=TRAINER + LENDING) as run:
        await run.until(lambda: len(run.board.steps) >= 2, "two train steps", 150)
        await run.until(lambda: lent(run), "its GPU is lent")
        await run.kill("train-t0")
        report = await run.finished(240)
        assert_zeros(report, run.job)
        found = await lending_of(run)
        assert found.count >= 1 and found.late_returns == 0
        assert found.memory["trainer"].freed_bytes > 0
        steps = [step.batch for step in run.board.steps]
        assert steps == sorted(set(steps)), "each batch was trained once"
        newest = max((run.job.run_dir / "snapshots").glob("v[0-9]*"))
        assert (newest / "model.safetensors").is_file() and (newest / "config.json").is_file()
