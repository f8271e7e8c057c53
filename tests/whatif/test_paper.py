"""The regenerated figures: how a claim is judged, that each module computes what it says, and that the page holds it all."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ET
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from services.cli import simulate_paper
from services.jobfile import ConfigError
from services.simulator.whatif import selection
from services.simulator.whatif.judge import Workers
from services.simulator.whatif.paper import figure2a, figure2c, figure5, figure6, figure7, figure8, table2, table3
from services.simulator.whatif.paper.base import AGREES, DISAGREES, NOT_SIMULATED, SAME_SIDE, Figure, claim, tally
from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.report import ALL, as_json, as_markdown, chosen, page, print_figures
from services.simulator.whatif.paper.runs import SMALL, Batch, Batched, Run, Runner, Select, Selected, drawn, slower
from services.simulator.whatif.result import PolicyResult, Span
from tests.whatif.made import policy
from tests.whatif.test_report import Reader

SPANS = (
    Span("s0/0", 0.0, 50.0, "preparing"),  # the job's start
    Span("s0/0", 50.0, 60.0, "decode"),
    Span("s0/0", 100.0, 160.0, "preparing"),
    Span("s0/0", 160.0, 170.0, "switching"),
    Span("s0/0", 170.0, 900.0, "decode"),
    Span("s0/1", 200.0, 220.0, "preparing"),  # goes before it served
    Span("t0/0", 300.0, 306.0, "preparing"),
    Span("t0/0", 306.0, 400.0, "colocated"),
)
OPTIONS = Options(seeds=2, batches=2)
FACTOR = {
    "roll": 1.0,
    "roll-large": 1.5,
    "rlboost": 1.6,
    "pearl-paper": 2.0,
    "pearl": 2.4,
    "+A": 1.1,
    "+A+B": 1.2,
    "+A+B+C": 1.3,
}


class Given(Runner):
    """Answers by rule instead of simulating: a run's rate is its policy's factor, a batch's time falls with its workers."""

    def __init__(self) -> None:
        super().__init__(processes=0)
        self.asked: list[Batch | Run | Select] = []

    def batches(self, tasks: list[Batch]) -> list[Batched]:  # type: ignore[override]
        self.asked += tasks
        found = []
        for task in tasks:
            time_s = 1000.0 / task.colocated if task.colocated else 100.0 + 10.0 * task.prefill
            found.append(
                Batched(time_s + task.seed, time_s / 2, 1000 * task.trajectories, 10 * task.trajectories, 0.98, 5.0)
            )
        return found

    def runs(self, tasks: list[Run]) -> list[PolicyResult]:  # type: ignore[override]
        self.asked += tasks
        found = []
        for task in tasks:
            size = task.settings.batch_trajectories / (1 + (task.settings.batch_trajectories - 64) ** 2 / 1000)
            rate = 1000.0 * FACTOR[task.policy.name] * size / 64 * (40000 / task.settings.max_context_tokens)
            one = policy(rate + task.seed)
            spans = (*one.spans, *SPANS)
            found.append(msgspec.structs.replace(one, spans=spans))
        return found

    def selections(self, tasks: list[Select]) -> list[Selected]:  # type: ignore[override]
        self.asked += tasks
        names = {5: "2P3D", 6: "3P3D", 8: "3P5D", 13: "4P9D", 14: "4P10D", 16: "4P12D"}
        return [
            Selected(
                selection.Outcome(
                    workers=task.workers,
                    batch=64,
                    measured_s={names[task.workers]: 100.0},
                    best=names[task.workers],
                    regret={"planner": 0.004, "eq. 1-3": 0.03},
                    chosen={"planner": names[task.workers]},
                    modes_differ=0.1,
                    probed=True,
                ),
                {names[task.workers]: 0.0, f"{task.workers}C": 5.0},
            )
            for task in tasks
        ]


def figures() -> dict[str, Figure]:
    run = Given()
    return {name: make(run, OPTIONS) for name, make in ALL.items()}


@pytest.mark.parametrize(
    ("unit", "paper", "ours", "verdict"),
    [
        ("%", 10.0, 12.0, AGREES),
        ("%", 10.0, 12.1, SAME_SIDE),
        ("%", 10.0, 0.1, SAME_SIDE),
        ("%", 10.0, -0.1, DISAGREES),
        ("%", -6.1, -20.0, SAME_SIDE),
        ("%", -6.1, 1.0, DISAGREES),
        ("x", (2.2, 2.4), 2.5, AGREES),
        ("x", (2.2, 2.4), 1.1, SAME_SIDE),
        ("x", (2.2, 2.4), 0.9, DISAGREES),
        ("s", 100.0, 103.0, DISAGREES),
        ("%", 10.0, None, NOT_SIMULATED),
    ],
)
def test_a_claim_is_judged_by_its_tolerance_then_by_its_side(
    unit: str, paper: object, ours: float | None, verdict: str
) -> None:
    assert claim("c", "6", paper, unit, ours, 0.2 if unit == "x" else 2.0).verdict == verdict  # type: ignore[arg-type]


def test_every_figure_and_table_that_the_issue_names_is_there() -> None:
    assert set(ALL) == {"figure2a", "figure2c", "figure5", "figure6", "figure7", "figure8", "table2", "table3"}


def test_figure_2a_takes_savings_seed_by_seed() -> None:
    found = figure2a.figure(Given(), OPTIONS)
    ours = [each.simulated for each in found.claims]
    times = {count: [1000 / count + seed for seed in (0, 1)] for count in (8, 12, 16)}
    saved = [100 * (times[12][seed] - times[8][seed]) / times[8][seed] for seed in (0, 1)]
    assert ours[0] is not None and ours[0].mean == pytest.approx(sum(saved) / 2)
    assert ours[4] is not None and ours[4].mean == pytest.approx(1000 / 64 / 2)


def test_figure_2c_finds_the_best_ratio_and_how_far_the_papers_is_behind() -> None:
    found = figure2c.figure(Given(), OPTIONS)
    assert {row[-1] for row in found.sheets[0].rows} == {"1P7D"}
    behind = found.claims[3].simulated
    assert behind is not None and behind.mean == pytest.approx(100 * (1 - (110 / 140 + 111 / 141) / 2), abs=0.1)
    assert found.claims[3].verdict == DISAGREES


def test_figure_5_compares_with_rlboost_on_the_same_seed() -> None:
    found = figure5.figure(Given(), OPTIONS)
    gain = next(each for each in found.claims if each.text.startswith("pearl over RLBoost+"))
    assert (
        gain.simulated is not None and gain.simulated.mean == pytest.approx(50.0, abs=0.2) and gain.simulated.count == 2
    )
    assert all("reward" in sheet.columns and "staleness at most" in sheet.columns for sheet in found.sheets)


def test_figure_6_dip_is_where_the_fewest_gpus_are() -> None:
    assert figure6.dip() == (3720.0, 4080.0)
    short = figure6.figure(Given(), Options(hours=1.0))
    assert {each.verdict for each in short.claims} == {NOT_SIMULATED}
    steady = policy(1000.0)
    assert figure6.fall(steady, 3720.0, 4080.0) == pytest.approx(0.0)
    slow = [
        msgspec.structs.replace(step, rollout_tokens=0, trained_tokens=step.trained_tokens // 2)
        if 3720.0 < step.end_s <= 4680.0
        else step
        for step in steady.steps
    ]
    fallen = figure6.fall(msgspec.structs.replace(steady, steps=tuple(slow)), 3720.0, 4080.0)
    assert fallen == pytest.approx(100 * (1 - 0.5 * 0.75), abs=0.1)


def test_figure_7_forces_the_best_ratio_and_adds_one_thing_at_a_time() -> None:
    run = Given()
    figure7.figure(run, OPTIONS)
    runs = {task.policy.name: task.policy for task in run.asked if isinstance(task, Run)}
    assert runs["+A"].decision == "static-pd:1:7" and not runs["+A"].lending
    assert runs["+A+B"].lending and not runs["+A+B"].gated and runs["+A+B+C"].lending and runs["+A+B+C"].gated
    assert {task.settings.most_preemptible_gpus for task in run.asked if isinstance(task, Run)} == {0}


def test_figure_8_varies_one_parameter_at_a_time() -> None:
    run = Given()
    found = figure8.figure(run, OPTIONS)
    points = {
        (task.settings.batch_trajectories, task.settings.max_context_tokens)
        for task in run.asked
        if isinstance(task, Run)
    }
    assert points == {(batch, 32768) for batch in (32, 64, 96, 128)} | {(64, length) for length in (8192, 16384, 24576)}
    assert found.claims[0].verdict == AGREES  # RLBoost+ peaks at 64 in the given rates, as in the paper
    assert found.claims[1].verdict == DISAGREES


def test_table_2_reports_the_largest_regret() -> None:
    found = table2.figure(Given(), OPTIONS)
    assert [each.simulated.mean for each in found.claims if each.simulated] == pytest.approx([0.4] * 6)
    assert all(each.verdict == AGREES for each in found.claims)


def test_table_3_measures_expansions_that_served() -> None:
    found = table3.figure(Given(), OPTIONS)
    assert found.claims[0].simulated is not None and found.claims[0].simulated.mean == pytest.approx(70.0)
    assert found.claims[0].verdict == AGREES and len(found.sheets[0].rows) == 8
    assert found.claims[1].simulated is not None and found.claims[1].simulated.mean == pytest.approx(6.0)


def test_configurations_measured_less_are_compared_on_the_same_batches() -> None:
    table = {Workers(1, 3, 0): [10.0, 20.0, 30.0], Workers(0, 0, 4): [11.0, 19.0, 36.0], Workers(3, 1, 0): [15.0]}
    assert slower(table) == pytest.approx({"1P3D": 0.0, "4C": 10.0, "3P1D": 50.0})


def test_the_page_and_the_json_hold_every_claim(tmp_path: Path) -> None:
    made = list(figures().values())
    text = page(made, "2 h")
    found = Reader(text)
    assert not found.open and "src=" not in text and "url(" not in text
    told = " ".join(found.texts)
    for figure in made:
        for each in figure.claims:
            assert each.text in told
        if any(each.verdict in (SAME_SIDE, DISAGREES) for each in figure.claims):
            assert figure.differences and all(line in told for line in figure.differences)
        for name, drawing, caption in figure.drawings:
            ET.fromstring(drawing.svg())
            assert caption.startswith("Simulated"), name
    plain = json.loads(json.dumps(as_json(made, 1.0)))
    assert sum(plain["verdicts"].values()) == sum(len(figure.claims) for figure in made) == sum(tally(made).values())
    markdown = as_markdown(made, "2 h")
    assert all(f"| {each.text} | {each.paper} | {each.ours} |" in markdown for figure in made for each in figure.claims)
    out = StringIO()
    print_figures(made, Console(file=out, width=200))
    assert "disagree" in out.getvalue()


def test_only_names_that_are_there() -> None:
    assert chosen("table3, figure5") == ["table3", "figure5"] and chosen("") == list(ALL)
    with pytest.raises(ConfigError, match="--only figure9"):
        chosen("figure9")


def test_a_runner_does_a_task_once_and_gives_answers_in_order() -> None:
    said: list[str] = []
    tasks = [Batch(hardware=SMALL, colocated=count, trajectories=4, context=8192) for count in (2, 1, 2)]
    with Runner(0, lambda done, of, told: said.append(told)) as run:
        found = run.batches(tasks)
        assert run.batches(tasks[:1]) == found[:1]
    assert len(said) == 2 and found[0] == found[2] and found[0].makespan_s <= found[1].makespan_s
    with Runner(2) as run:
        assert run.batches(tasks) == found


def test_a_larger_batch_has_the_smaller_ones_trajectories() -> None:
    assert drawn(8, 8192, 3)[:4] == drawn(4, 8192, 3) and drawn(4, 8192, 3) != drawn(4, 8192, 4)
    assert all(sum(turn.new + turn.reply for turn in each) <= 8192 for each in drawn(50, 8192, 0))


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    base = {"seeds": 1, "hours": 2.0, "processes": 1, "json": True}
    for report, only in ((str(tmp_path / "no" / "deep"), ""), (None, "figure1")):
        with pytest.raises(ConfigError):
            simulate_paper.run(argparse.Namespace(report=report, only=only, **base))
