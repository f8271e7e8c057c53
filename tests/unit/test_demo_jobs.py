"""The job files of the emulated demo, in every size."""

from __future__ import annotations

from pathlib import Path

import pytest

from messages.ids import Zone
from services import jobfile
from services.cli.demo import new_run
from services.emulated_fleet.config import fleets
from services.jobfile import ConfigError, JobFile, rollout_slots
from services.profile import cold_start


def job_of(folder: Path, **options: int | None) -> JobFile:
    return jobfile.load(new_run(folder, seed=3, changes={}, engine="emulated", **options))  # type: ignore[arg-type]


def test_sixteen_workers_half_of_them_overlap(tmp_path: Path):
    job = job_of(tmp_path)
    slots = rollout_slots(job)
    assert (len(slots), sum(slot.zone is Zone.OVERLAP for slot in slots)) == (16, 8)
    scales = {job.emulation.time_scale, job.environment.time_scale, job.feed.time_scale}
    assert len(scales) == 1 and scales.pop() > 1, "all parts of an emulated job run on one clock, faster than real time"
    assert fleets(job) == () and job.training.engine == "emulated"


def test_the_cold_start_is_of_the_workload_and_the_hardware(tmp_path: Path):
    job = job_of(tmp_path)
    profile, scale = cold_start(job), job.emulation.time_scale
    assert profile.A_s * scale == pytest.approx(8.4e-3)
    assert 200 < profile.r < 350 and 200 < profile.dL < 400 and 60 < profile.S < 100
    assert 0.1e-3 < profile.b_s * scale < 1e-3 and 0 < profile.theta < 1


def test_more_workers_make_a_larger_job_on_a_slower_clock(tmp_path: Path):
    small, big = job_of(tmp_path), job_of(tmp_path / "big", workers=64)
    slots = rollout_slots(big)
    zones = [sum(slot.zone is zone for slot in slots) for zone in (Zone.RESERVED, Zone.PREEMPTIBLE, Zone.OVERLAP)]
    assert zones == [26, 6, 32]
    assert big.emulation.time_scale == small.emulation.time_scale / 2
    assert big.pipeline.batch_trajectories == 256
    assert sum(len(nodes) for nodes in fleets(big)) == len(big.nodes)


@pytest.mark.parametrize("workers", [1, 14, 17])
def test_sizes_that_make_no_sense_are_refused(tmp_path: Path, workers: int):
    with pytest.raises(ConfigError, match="--workers"):
        job_of(tmp_path, workers=workers)


def test_only_old_runs_are_deleted_and_nothing_that_is_named_alike(tmp_path: Path):
    mine = [tmp_path / f"demo-my-thesis-{number}" for number in range(9)]
    old = [tmp_path / f"demo-2026010{number}-000000-99999999" for number in range(1, 9)]
    for folder in (*mine, *old):
        folder.mkdir()
        (folder / "job.toml").write_text("")
    (tmp_path / "demo-loop").symlink_to("demo-loop")
    new = new_run(tmp_path, seed=3, changes={})
    assert all(folder.is_dir() for folder in mine)
    assert [folder.is_dir() for folder in old] == [False] * 3 + [True] * 5 and new.is_file()


@pytest.mark.parametrize("workers", [2, 17, 100_000])
def test_a_refused_demo_leaves_no_folder_and_deletes_none(tmp_path: Path, workers: int):
    old = [tmp_path / f"demo-2026010{number}-000000-99999999" for number in range(1, 9)]
    for folder in old:
        folder.mkdir()
        (folder / "job.toml").write_text("")
    with pytest.raises(ConfigError):
        new_run(tmp_path, seed=3, changes={}, engine="emulated", workers=workers)
    assert sorted(tmp_path.iterdir()) == old


def test_a_data_dir_that_is_a_loop_of_links_is_refused(tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="--data-dir"):
        new_run(tmp_path / "loop", seed=3, changes={})
