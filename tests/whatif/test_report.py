"""Reports of what-if runs: the numbers in them, and that the page stands alone, escapes, and can be used without a mouse."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from services.cli.outputs import report_folder
from services.jobfile import ConfigError
from services.simulator.whatif.report import html, plots, sensitivity
from services.simulator.whatif.report.summary import (
    gains,
    interval,
    priced,
    reference_of,
    summarise,
    use_shares,
)
from services.simulator.whatif.report.svg import Drawing, Scale, amount, from_zero, ticks
from services.simulator.whatif.report.terminal import print_results
from services.simulator.whatif.report.write import drawings as all_drawings
from services.simulator.whatif.report.write import inputs_line, verdict, whole_page, write_report
from services.simulator.whatif.result import Budget, Decided, PolicyResult, Result
from tests.whatif.made import DECIDED, result

SEEDS = [result(seed, shift) for seed, shift in enumerate((-20.0, -10.0, 0.0, 10.0, 20.0))]


class Reader(HTMLParser):
    """Tags, attributes and the text of a page; fails on tags that are not closed."""

    VOID = {"meta", "br", "line", "rect", "path"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_an_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0 and found.half == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert interval([7.0]).half == 0.0 and interval([7.0]).count == 1


def test_ratios_are_taken_seed_by_seed() -> None:
    pearl = {each.name: each for each in summarise(SEEDS, "roll")}["pearl"]
    expected = [(2500 + shift) / (1000 + shift) for shift in (-20, -10, 0, 10, 20)]
    assert pearl.ratio is not None and pearl.ratio.mean == pytest.approx(sum(expected) / 5)
    assert pearl.of_oracle is not None and pearl.of_oracle.mean == pytest.approx(2500 / 3000)
    assert pearl.wait_share == pytest.approx(0.9) and pearl.staleness_max == 1


def test_cost_counts_all_gpu_hours_over_the_tokens_of_the_throughput() -> None:
    found = priced(result(), spot=0.5, reserved=2.0).policies["roll"]
    assert found.cost_per_million_tokens == pytest.approx((40 * 2.0 + 20 * 0.5) / (1000 * 7200) * 1e6)
    assert priced(result(), None, None) == result()
    nothing = PolicyResult(
        throughput_tokens_per_s=0.0,
        train_steps=0,
        mean_train_step_s=0.0,
        staleness_max=0,
        trajectories_lost=0,
        gpu_busy_fraction=0.0,
        decisions=0,
    )
    empty = msgspec.structs.replace(result(), policies={"none": nothing})
    assert priced(empty, 1.0, None).policies["none"].cost_per_million_tokens is None


def test_gains_compare_changes_under_which_whole_batches_ran() -> None:
    def at(predicted: float | None, realised: float | None, colocated: int, borrow: bool = False) -> Decided:
        return msgspec.structs.replace(
            DECIDED[1], predicted_s=predicted, realised_s=realised, colocated=colocated, borrow=borrow
        )

    found = gains(
        [at(100.0, 110.0, 4), at(100.0, 90.0, 4), at(50.0, None, 8), at(60.0, 45.0, 8), at(30.0, 30.0, 8, True)]
    )
    assert found == [(3, pytest.approx(0.4), pytest.approx(0.5)), (4, pytest.approx(0.5), pytest.approx(1 / 3))]
    assert gains(DECIDED) == []


def test_uses_are_shares_of_the_gpu_hours() -> None:
    shares = dict(use_shares([result().policies["roll"]]))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["colocated"] == shares["idle"] == pytest.approx(0.25)


def test_the_verdict_says_when_seeds_do_not_tell() -> None:
    close = [
        msgspec.structs.replace(
            each, policies={"a": each.policies["pearl"], "b": result(0, -5.0 * (-1) ** each.seed).policies["pearl"]}
        )
        for each in SEEDS
    ]
    assert "overlap" in verdict(summarise(close, "a"), "a")[0]
    assert "overlap" not in verdict(summarise(SEEDS, "roll"), "roll")[0]
    none = [msgspec.structs.replace(policy, throughput_tokens_per_s=0.0) for policy in result().policies.values()]
    idle = msgspec.structs.replace(result(), policies={str(index): policy for index, policy in enumerate(none)})
    assert "No policy finished" in verdict(summarise([idle], "0"), "0")[0]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 12))
def test_ticks_are_round_and_within(low: float, width: float, most: int) -> None:
    high = low + width
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-3):
        return
    found = ticks(low, high, most)
    assert len(found) <= most + 1 and found == sorted(found)
    assert all(low - 1e-6 * width <= each <= high + 1e-6 * width for each in found)


def test_scales_and_amounts() -> None:
    assert Scale(0, 10, 100, 200)(5) == 150 and from_zero([], 0, 10).high == 1.0
    assert [amount(each) for each in (0, 0.0123, 4.5, 123, 12_345, 2.5e6)] == [
        "0",
        "0.0123",
        "4.5",
        "123",
        "12.3k",
        "2.5M",
    ]


def test_a_gpus_row_is_in_natural_order() -> None:
    drawing = plots.roles(result(), "pearl").svg()
    names = [each.text for each in ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
    assert [name for name in names if name and "/" in name] == [f"n{gpu // 2}/{gpu % 2}" for gpu in range(8)]
    assert plots._natural("n2/1") < plots._natural("n10/0")


def test_every_drawing_is_xml_and_stays_within_its_frame() -> None:
    for name, (drawing, caption) in all_drawings(SEEDS, "roll").items():
        root = ET.fromstring(drawing.svg())
        assert caption.count("Simulated") == 1, name
        for each in root.iter("{http://www.w3.org/2000/svg}rect"):
            if each.get("width") != "100%":
                assert float(each.get("x", 0)) >= 0, name
                assert float(each.get("x", 0)) + float(each.get("width", 0)) <= drawing.width + 1, name
                assert float(each.get("y", 0)) + float(each.get("height", 0)) <= drawing.height + 1, name


def test_a_trace_of_very_many_changes_stays_a_small_picture() -> None:
    many = tuple(Budget(0.1 * index, 4, index % 13, 16) for index in range(72_000))
    drawing = plots.throughput(msgspec.structs.replace(result(), budget=many)).svg()
    assert len(drawing) < 250_000
    thinned = plots._thinned(many, 3.6)
    assert thinned[0].at_s == 0.0 and all(b.at_s - a.at_s >= 3.6 for a, b in pairwise(thinned))
    assert plots._thinned(result().budget, 3.6) == list(result().budget)


def test_bars_are_as_long_as_their_values() -> None:
    drawing = plots.bars(summarise([result()], "roll"), [], "roll")
    rects = [
        each
        for each in ET.fromstring(drawing.svg(alone=False)).iter("{http://www.w3.org/2000/svg}rect")
        if each.get("width")
    ]
    widths = [float(each.get("width", 0)) for each in rects]
    assert widths[1] / widths[0] == pytest.approx(2.0, rel=0.01) and widths[2] / widths[0] == pytest.approx(
        2.5, rel=0.01
    )


def test_the_page_stands_alone(tmp_path: Path) -> None:
    written = write_report([priced(each, 1.0, 2.0) for each in SEEDS], tmp_path / "out", command="pearl simulate run")
    names = {path.name for path in written}
    assert {"index.html", "result.json", "throughput.svg", "policies.svg", "roles-pearl.svg", "decisions.svg"} <= names
    page = (tmp_path / "out" / "index.html").read_text()
    found = Reader(page)
    assert not found.open
    for tag, attributes in found.tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "href", "srcset", "onclick", "onload"} & set(attributes) or tag == "svg"
    assert "url(" not in page and "@import" not in page
    assert any(attributes.get("content", "").startswith("default-src 'none'") for _, attributes in found.tags)
    text = " ".join(found.texts)
    assert "a <system> & more" in text and "cost/M tokens" in text and "Nothing here was measured on GPUs" in text
    assert {"staleness", "reward"} <= {each.strip() for each in found.texts}
    again = msgspec.json.decode((tmp_path / "out" / "result.json").read_bytes(), type=list[Result])
    assert len(again) == 5 and again[0].policies["pearl"].decided == DECIDED


NASTY = "</script><script>alert(1)</script>\"'&<b>"


def test_names_from_files_are_text_everywhere(tmp_path: Path) -> None:
    nasty = msgspec.structs.replace(
        result(trace=f"{NASTY}.csv"), policies={NASTY: result().policies["pearl"], "roll": result().policies["roll"]}
    )
    write_report([nasty], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<script>alert" not in page and len([tag for tag, _ in Reader(page).tags if tag == "script"]) == 1
    for path in (tmp_path / "out").glob("*.svg"):
        ET.fromstring(path.read_text())
    out = StringIO()
    print_results([nasty], console=Console(file=out, width=200))
    assert NASTY in out.getvalue()


def test_files_called_as_a_built_in_input_are_told_from_it() -> None:
    mine = msgspec.structs.replace(
        result(),
        trace="/home/me/bamboo-segment1",
        workload="./swebench-mini",
        hardware="h800-qwen3-8b (changed: my.json)",
    )
    assert (
        "trace bamboo-segment1 (a file), workload swebench-mini (a file), hardware h800-qwen3-8b (changed: my.json)"
        in (inputs_line([mine]))
    )
    assert "trace bamboo-segment1, workload swebench-mini, hardware h800-qwen3-8b," in inputs_line([result()])
    assert "a file" not in inputs_line([msgspec.structs.replace(result(), trace="/home/me/spot.csv")])


def test_a_page_without_steps_spans_or_decisions() -> None:
    bare = {
        name: msgspec.structs.replace(policy, steps=(), spans=(), decided=(), throughput=((0.0, 5.0), (60.0, 6.0)))
        for name, policy in result().policies.items()
    }
    empty = msgspec.structs.replace(result(), policies=bare, budget=())
    page = whole_page([empty], "roll", all_drawings([empty], "roll"), None, "")
    assert not Reader(page).open and "no such decision" in page


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "none" / "deep"):
        with pytest.raises(ConfigError, match="--report"):
            report_folder(str(path))


def test_a_report_goes_to_what_a_link_names(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "out")
    assert report_folder(str(link)) == tmp_path / "out", "which is still to be made"
    nowhere = tmp_path / "nowhere"
    nowhere.symlink_to(tmp_path / "none" / "deep")
    with pytest.raises(ConfigError, match="none/deep"):
        report_folder(str(nowhere))
    assert report_folder(None) is None


def test_tables_sort_by_value_and_missing_numbers_go_last() -> None:
    text = html.table(["name", "x"], [["a", html.num(12_345.0)], ["b", html.num(None)]])
    assert 'data-v="12345"' in text and 'data-v="-1e+308"' in text and 'scope="col"' in text


def test_the_reference_is_roll_where_there_is_one() -> None:
    assert reference_of(result()) == "roll" and reference_of(result(), "rlboost") == "rlboost"
    assert reference_of(msgspec.structs.replace(result(), policies={"x": result().policies["roll"]})) == "x"


def test_sensitivity_changes_one_constant_at_a_time() -> None:
    asked: list[tuple[str, float]] = []

    def judge(changes: list[tuple[str, float]]) -> list[tuple[float, str]]:
        asked.extend(changes)
        overturned = (0.9, "roll")
        return [
            overturned if constant == "b" and factor > 1 else (2.0 * (factor if constant == "a" else 1.0), "pearl")
            for constant, factor in changes
        ]

    found = sensitivity.run(judge, [("a", "measured"), ("b", "guess")], "pearl", "roll")
    assert asked == [("", 1.0), ("a", 0.8), ("a", 1.2), ("b", 0.8), ("b", 1.2)]
    assert found.base == 2.0 and found.rows[0].low == pytest.approx(1.6) and found.rows[0].high == pytest.approx(2.4)
    assert found.overturned == ("b",) and "Measure these" in found.verdict()
    ET.fromstring(found.drawing().svg())
    assert "guess" in found.table()
    assert isinstance(plots.sensitivity([("x", 1.0, 1.0)], 1.0, "r"), Drawing)
