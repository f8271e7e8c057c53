"""`pearl simulate matrix`: resumed cell by cell; and what issue 6 asks of the comparison, on one segment and seed for an hour.

The figures with five seeds of two hours are in docs/what-if.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli import simulate_matrix
from services.cli.parser import build_parser
from services.jobfile import ConfigError
from services.simulator.whatif import matrix
from services.simulator.whatif.matrix import ANY, Cell, Outcome


def made(policy: str, segment: str, seed: int, rate: float) -> Outcome:
    cell = Cell("h800-qwen3-8b", segment, policy, seed, 1.0)
    return Outcome(cell=cell, code="", throughput_tokens_per_s=rate, steps=1, staleness=1, reward=0.5)


def test_each_policy_is_there_with_early_start_and_the_targets_come_first() -> None:
    every = matrix.every_policy()
    assert len(every) == len(set(every)) and every[: len(matrix.FIRST)] == matrix.FIRST
    assert {"rose+early", "static-pd+early", "roll+early", matrix.ORACLE, "areal", "laminar"} <= set(every)
    assert "pearl+early" not in every, "it starts early as it is"
    found = list(matrix.cells(("roll", "pearl"), range(2), 1.0))
    assert len(found) == len(set(found)) == 2 * 2 * (1 + 3), "roll does not see the trace"
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found)


def test_ratios_are_taken_seed_by_seed() -> None:
    """Both double from one seed to the other: their ratio is certain, their rates are not."""
    outcomes = [
        made("pearl", "bamboo-segment1", 0, 300.0),
        made("pearl", "bamboo-segment1", 1, 600.0),
        made("roll", ANY, 0, 100.0),
        made("roll", ANY, 1, 200.0),
    ]
    found = matrix.ratio(matrix.rates(outcomes), "h800-qwen3-8b", "bamboo-segment1", "pearl", "roll")
    assert found is not None and found.mean == pytest.approx(3.0) and found.half == pytest.approx(0.0)
    text = matrix.table(outcomes, ("pearl", "roll"))
    assert "| `pearl` | 450 ± 1906 | - | - |" in text and "+200.0 ± 0.0 %" in text


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Cell] = []

    def simulated(cell: Cell, code: str) -> Outcome:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(cell)
        return Outcome(cell=cell, code=code, throughput_tokens_per_s=1.0)

    monkeypatch.setattr(matrix, "simulated", simulated)
    with pytest.raises(KeyboardInterrupt):
        matrix.run(tmp_path, ("roll", "rlboost"), (0,), 1.0)
    assert "`roll`" in (tmp_path / "matrix.md").read_text(encoding="utf-8"), "what there is can be read"
    (tmp_path / "cells" / ran[0].name).write_text("{", encoding="utf-8")
    ran.clear()
    monkeypatch.setattr(matrix, "simulated", lambda cell, code: (ran.append(cell), simulated_now(cell, code))[1])
    outcomes = matrix.run(tmp_path, ("roll", "rlboost"), (0,), 1.0)
    assert len(outcomes) == 8 and len(ran) == 7, "one was kept whole, one broken"
    monkeypatch.setattr(matrix, "code_version", lambda: "another")
    ran.clear()
    matrix.run(tmp_path, ("roll", "rlboost"), (0,), 1.0)
    assert len(ran) == 8, "other code: nothing kept is of use"


def simulated_now(cell: Cell, code: str) -> Outcome:
    return Outcome(cell=cell, code=code, throughput_tokens_per_s=1.0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "simulate",
        "matrix",
        "--out",
        str(tmp_path / "m"),
        "--policy",
        "roll",
        "--seeds",
        "1",
        "--hours",
        "0.01",
        "--json",
    ]
    assert simulate_matrix.run(build_parser().parse_args(words)) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 2
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no folder"):
        simulate_matrix.run(build_parser().parse_args([*words[:3], str(tmp_path / "file")]))
    with pytest.raises(ConfigError, match="unknown"):
        simulate_matrix.run(build_parser().parse_args([*words[:5], "best"]))


def test_what_the_issue_asks_of_one_segment() -> None:
    """Segment 2, 8B, the first seed and hour. The mean over segments and seeds of two hours is 2.2 times `roll` and more."""
    rate = {
        policy: matrix.simulated(Cell("h800-qwen3-8b", segment, policy, 0, 1.0), "").throughput_tokens_per_s
        for policy, segment in (
            ("pearl", S2),
            ("rlboost", S2),
            ("rlboost+early", S2),
            ("pearl-paper", S2),
            ("roll", ANY),
        )
    }
    assert rate["pearl"] >= 2.1 * rate["roll"], rate
    assert rate["pearl"] >= 1.25 * rate["rlboost"], rate
    assert rate["pearl"] >= 1.10 * rate["pearl-paper"], rate
    assert rate["pearl"] > rate["rlboost+early"], rate


S2 = "bamboo-segment2"
