"""Figures of `pearl bench`: ratios, targets, report; and the benchmarks that need no server, on tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pearl_state.codec import decode_table
from services.bench import plan, processes, snapshot
from services.bench.figures import as_json, as_svg, figure, percentile, write_report
from services.bench.processes import Usage, idle_pss, memory_figures, service_of
from services.cli.__main__ import main
from services.cli.parser import FIGURES, build_parser

FEW = [
    figure("one", "below", 10.0, "ms", 5.0, "half", below=25.0),
    figure("one", "above", 30.0, "ms", 5.0, "half", below=25.0),
    figure("two", "fast <&>", 50.0, "1/s", 100.0, "plain", ratio_from=0.6),
    figure("two", "no reference", 50.0, "1/s", ratio_from=0.6),
    figure("two", "free", 7.0, "MiB"),
]


def test_ratios_and_targets() -> None:
    assert [each.ratio for each in FEW] == [2.0, 6.0, 0.5, None, None]
    assert [each.met for each in FEW] == [True, False, False, None, None]
    assert FEW[0].target == "< 25 ms" and FEW[2].target == ">= 0.6 x" and FEW[4].target == ""


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_percentiles_are_of_the_nearest_rank(share: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_a_report_is_json_and_a_plot(tmp_path: Path) -> None:
    write_report(FEW, tmp_path / "report")
    read = json.loads((tmp_path / "report" / "bench.json").read_text())
    assert read == as_json(FEW) and read["figures"][0]["ratio"] == 2.0 and read["figures"][3]["ratio"] is None
    root = ElementTree.fromstring((tmp_path / "report" / "bench.svg").read_text())
    bars = [each for each in root.iter() if each.tag.endswith("rect")]
    assert len(bars) == 1 + 3  # the background, and those that have a reference
    ElementTree.fromstring(as_svg([]))


def test_plan_figures(tmp_path: Path) -> None:
    found = plan.measure(tmp_path, sizes=(2, 6), repeats=2)
    assert decode_table.cache_info().hits == 0, "the reference reads a table each time"
    assert [each.case for each in found] == ["2 workers", "6 workers"]
    assert all(each.value > 0 and each.reference and each.unit == "ms" and each.met is None for each in found)


def test_snapshot_figures(tmp_path: Path) -> None:
    found = snapshot.measure(tmp_path, mebibytes=1, repeats=1)
    assert all(each.value > 0 and each.ratio for each in found)
    assert found[0].target == ">= 0.6 x"


def test_memory_figures() -> None:
    found = memory_figures(Usage(turns=0, seconds=1.0, cpu_s={}, pss_bytes={"agent": (3 << 20, 5 << 20)}))
    assert [(each.case, each.value, each.unit) for each in found] == [("agent (2)", 5.0, "MiB")]
    assert idle_pss() > 1 << 20


@pytest.mark.parametrize(
    ("process", "service"),
    [
        ("agent-0", "agent"),
        ("node_agent-train1", "node_agent"),
        ("orchestrator-standby0", "orchestrator"),
        ("n1-w2.3", "rollout_worker"),
        ("t-t0.1", "trainer"),
        ("nats-server", "nats-server"),
        ("toggle_manager", "toggle_manager"),
    ],
)
def test_processes_are_counted_by_service(process: str, service: str) -> None:
    assert service_of(process) == service


def test_every_name_is_a_benchmark() -> None:
    assert {name for name in FIGURES if name not in ("turn", "memory")} == {
        "table", "plan", "router", "stream", "engine", "snapshot", "gateway",
    }  # fmt: skip
    assert processes.COUNTED
    assert build_parser().parse_args(["bench"]).name == "all"


def test_the_command_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--json", "--report", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["figures"][0]["benchmark"] == "plan"
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["bench.json", "bench.svg"]
    (tmp_path / "file").touch()
    assert main(["bench", "plan", "--report", str(tmp_path / "file")]) == 2
    assert "--report" in capsys.readouterr().err


def test_a_ratio_has_a_most() -> None:
    within = figure("b", "c", 1.4, "ms", 1.0, "r", ratio_to=1.5)
    assert (within.target, within.met) == ("<= 1.5 x", True)
    assert figure("b", "c", 1.6, "ms", 1.0, "r", ratio_to=1.5).met is False
    assert figure("b", "c", 1.6, "ms", None, "r", ratio_to=1.5).met is None
