"""`pearl bench scale`: how growth is judged, which job it makes, what it prints. The run itself: tests/integration."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from messages.ids import Zone
from services import jobfile
from services.bench.figures import lines_svg
from services.bench.scale import job_of
from services.bench.scale_figures import MIB, Run, as_json, figures, growth
from services.emulated_fleet.config import fleets
from services.jobfile import ConfigError


def run_of(memory: dict[str, tuple[int, ...]]) -> Run:
    return Run(
        workers=10,
        seconds=120.0,
        ready_s=3.0,
        events=2,
        plans=2,
        failed_plans=0,
        epochs=4,
        table_bytes=2048,
        heartbeats=240,
        propagation_ms=(1.0, 2.0, 30.0),
        stored_ms=(1.0, 2.0),
        cpu_s={"router": 1.0, "agent": 4.0},
        processes={service: 1 for service in memory},
        at_s=tuple(float(index) for index in range(len(next(iter(memory.values()))))),
        memory=memory,
        restarts={},
    )


def test_growth_is_from_the_middle_third_to_the_last() -> None:
    warm_up = [10 * MIB, 20 * MIB, 30 * MIB]
    assert growth([*warm_up, *[40 * MIB] * 6]) == (0.0, False)
    assert growth([*warm_up, *[40 * MIB] * 3, *[50 * MIB] * 3]) == (10 * MIB, True)
    assert growth([*warm_up, *[50 * MIB] * 3, *[40 * MIB] * 3]) == (-10 * MIB, False)


def test_growth_counts_above_its_share_and_above_a_mebibyte_a_process() -> None:
    flat = [40 * MIB] * 6
    assert not growth([*flat, *[41 * MIB] * 3])[1] and growth([*flat, *[41 * MIB + 1] * 3])[1]
    assert not growth([*flat, *[42 * MIB] * 3], processes=2)[1]
    large = [1000 * MIB] * 6
    assert not growth([*large, *[1019 * MIB] * 3])[1] and growth([*large, *[1021 * MIB] * 3])[1]
    assert growth([MIB, 100 * MIB]) == (0.0, False), "two samples say nothing"


@pytest.mark.parametrize("workers", [4, 10, 1000, jobfile.MOST_WORKERS - 1])
def test_its_job_has_so_many_dedicated_workers(workers: int, tmp_path: Path) -> None:
    job = jobfile.load(job_of(tmp_path, workers))
    zones: Counter[Zone] = Counter()
    for node in job.nodes:
        zones[node.zone] += node.gpus
    assert zones[Zone.RESERVED] + zones[Zone.PREEMPTIBLE] == workers and zones[Zone.PREEMPTIBLE] >= 1
    assert fleets(job), "workers share processes"


@pytest.mark.parametrize("workers", [3, jobfile.MOST_WORKERS])
def test_other_numbers_are_refused(workers: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--workers {workers}: from 4 to {jobfile.MOST_WORKERS - 1}"):
        job_of(tmp_path, workers)


def test_what_goes_up_and_down_is_no_growth() -> None:
    up_and_down = [40 * MIB, 40 * MIB, 60 * MIB] * 2 + [60 * MIB, 60 * MIB, 40 * MIB]
    assert growth(up_and_down) == (20 * MIB, False)


def test_figures_name_the_service_that_grew() -> None:
    run = run_of({"router": (1 * MIB,) * 6 + (9 * MIB,) * 3, "agent": (5 * MIB,) * 9})
    found = {each.case: each for each in figures(run)}
    assert found["memory, router (1)"].met is False and found["memory, agent (1)"].met is True
    assert found["CPU, agent (1)"].value == 2.0  # seconds a minute
    assert found["table of 2 KiB visible, p99 of 3"].value == 30.0
    assert as_json(run)["grown"] == ["router"]


def test_the_plot_is_a_picture_with_a_line_each() -> None:
    svg = lines_svg("memory <MiB>", [0.0, 1.0, 2.0], {"a": [1.0, 2.0, 3.0], "b": [100.0] * 3, "gone": [1.0, 0.0, 0.0]})
    root = ElementTree.fromstring(svg)
    lines = [each for each in root if each.tag.endswith("polyline")]
    assert len(lines) == 2, "a service that was not there all the time has no line"
