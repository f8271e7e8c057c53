"""The learner on one rank and on two, its checkpoints, and the return of its memory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services import jobfile
from services.jobfile import JobFile
from services.models.files import initial_model, read_weights
from services.snapshot import Snapshot
from services.trainer.checkpoints import META, complete_checkpoints
from services.trainer.config import Config
from services.trainer.data import build
from services.trainer.learner import Learner
from tests.integration.trainer_batches import BATCHES, BatchReady, job_toml, make_batch, train

RANK_SECONDS = 120


def job_of(folder: Path, ranks: int, name: str) -> tuple[Path, JobFile]:
    path = folder / f"{name}.toml"
    path.write_text(job_toml(str(folder), ranks, name))
    return path, jobfile.load(path)


def run_ranks(path: Path, ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.trainer_batches", str(path)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).parents[2],
        )
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(RANK_SECONDS) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()


def weights(job: JobFile, version: int) -> dict[str, torch.Tensor]:
    return read_weights(job.run_dir / "snapshots" / f"v{version:08d}")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=tolerance, atol=tolerance, msg=name)


def batch_of(number: int):
    turns, items = make_batch(number)
    return build(BatchReady(batch=number, items=tuple(items)), dict(enumerate(turns, 1)))


def test_two_ranks_learn_what_one_learns_and_either_resumes_the_others_checkpoint(tmp_path: Path) -> None:
    path, two = job_of(tmp_path, 2, "two")
    run_ranks(path, 2)
    _, one = job_of(tmp_path, 1, "one")
    train(one, range(BATCHES))
    for version in range(1, BATCHES + 1):
        same(weights(one, version), weights(two, version), 2e-5)
    assert not torch.equal(weights(one, 1)["lm_head.weight"], weights(one, 2)["lm_head.weight"])

    # One rank goes on from what two ranks wrote after the first batch: the same second step.
    _, resumed = job_of(tmp_path, 1, "resumed")
    first = complete_checkpoints(two.run_dir / "checkpoints")[0]
    shutil.copytree(first, resumed.run_dir / "checkpoints" / first.name)
    train(resumed, range(1, 2))
    same(weights(resumed, 2), weights(two, 2), 2e-5)


def test_a_resumed_learner_goes_on_exactly(tmp_path: Path) -> None:
    _, whole = job_of(tmp_path, 1, "whole")
    train(whole, range(2))
    _, parts = job_of(tmp_path, 1, "parts")
    train(parts, range(1))
    train(parts, range(1, 2))
    same(weights(whole, 2), weights(parts, 2))


def test_a_checkpoint_counts_only_when_complete(tmp_path: Path) -> None:
    _, job = job_of(tmp_path, 1, "torn")
    train(job, range(2))
    newest = complete_checkpoints(job.run_dir / "checkpoints")[-1]
    newest.rename(newest.with_suffix(".part"))  # killed before the rename
    learner = Learner(Config.of(job), initial_model(job))
    assert learner.restore()
    assert learner.version == 1 and learner.finished is not None and learner.finished.batch == 0
    before = weights(job, 2)
    learner.train(1, batch_of(1))
    learner.checkpoint()
    learner.snapshot()
    same(before, weights(job, 2))
    assert (newest / META).is_file()


def test_a_snapshot_written_again_is_the_same(tmp_path: Path) -> None:
    _, job = job_of(tmp_path, 1, "again")
    train(job, range(1))
    snapshots: list[Snapshot | None] = []
    for _ in range(2):  # as after a kill between checkpoint and snapshot, or between snapshot and news
        learner = Learner(Config.of(job), initial_model(job))
        assert learner.restore()
        snapshots.append(learner.snapshot())
    assert snapshots[0] is not None and snapshots[0] == snapshots[1]


def test_a_flat_batch_has_no_gradient(tmp_path: Path) -> None:
    _, job = job_of(tmp_path, 1, "flat")
    learner = Learner(Config.of(job), initial_model(job))
    turns, items = make_batch(0)
    ready = BatchReady(batch=0, items=tuple(items[:5]))  # one group, all rewards 0
    finished = learner.train(0, build(ready, dict(enumerate(turns, 1))))
    assert finished.zero_variance_groups == 1
    assert finished.grad_norm == 0.0
    learner.snapshot()
    same(weights(job, 1), read_weights(initial_model(job)))


def test_released_memory_is_free_and_comes_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.models import files

    # Wide enough for its 40 MB, with moments 120 MB, to show in the resident set.
    monkeypatch.setattr(files, "TINY", {**files.TINY, "hidden_size": 512, "intermediate_size": 4096})
    _, job = job_of(tmp_path, 1, "lent")
    learner = Learner(Config.of(job), initial_model(job))
    learner.train(0, batch_of(0))
    learner.checkpoint()
    learner.snapshot()
    before = weights(job, 1)
    freed = learner.release()
    assert freed > 80e6
    assert not learner.resident
    learner.acquire()
    learner.snapshot()
    same(before, weights(job, 1))
    learner.train(1, batch_of(1))
