"""`pearl simulate run` and `report` from the command line: what scripts rely on, the report folder, and wrong inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.__main__ import main
from services.simulator.whatif import constants, sensitivity

SMALL = [
    "--hours",
    "0.25",
    "--set",
    "batch_trajectories=8",
    "--set",
    "group_size=4",
    "--set",
    "max_context_tokens=8192",
]


def last_json(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


def test_a_users_trace_becomes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_bytes(b"\xef\xbb\xbfTIME_S;available_gpus\r\n600;8.5\r\n0;20\r\n")
    report, out = tmp_path / "report", tmp_path / "result.json"
    given = ["simulate", "run", "--trace", str(trace), "--policy", "roll,rlboost", "--seeds", "2", "--processes", "1"]
    given += [
        "--spot-price",
        "1",
        "--reserved-price",
        "3",
        "--report",
        str(report),
        "--out",
        str(out),
        "--json",
        *SMALL,
    ]
    assert main(given) == 0
    captured = capsys.readouterr()
    found = last_json(captured.out)
    assert set(found["policies"]) == {"roll", "rlboost"} and "oracle" in found and "wall_s" in found
    for policy in found["policies"].values():
        assert policy["train_steps"] > 0 and policy["throughput_tokens_per_s"] > 0
        assert (
            policy["staleness_max"] <= 1 and policy["trajectories_lost"] == 0 and policy["cost_per_million_tokens"] > 0
        )
    assert found["summary"]["seeds"] == [0, 1] and found["summary"]["policies"]["rlboost"]["ratio"]["mean"] > 0
    assert "line 2: available_gpus 8.5 is rounded down" in captured.err
    assert "has up to 20 GPUs, of which at most 12 are used" in captured.err
    assert {"index.html", "result.json", "throughput.svg", "policies.svg", "decisions.svg", "roles-roll.svg"} <= {
        path.name for path in report.iterdir()
    }
    assert (
        "mine.csv" in (report / "index.html").read_text()
        and str(tmp_path) not in (report / "throughput.svg").read_text()
    )

    again = tmp_path / "again"
    assert (
        main(["simulate", "report", str(out), "--report", str(again), "--reference", "rlboost", "--spot-price", "9"])
        == 0
    )
    assert "x rlboost" in capsys.readouterr().out and (again / "index.html").is_file()


def test_the_sensitivity_is_run_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "constants", lambda *given: constants.constants(*given)[:1])
    report = tmp_path / "report"
    given = ["simulate", "run", "--trace", "bamboo-segment1", "--policy", "roll,rlboost", "--sensitivity"]
    assert main([*given, "--processes", "1", "--report", str(report), "--json", *SMALL]) == 0
    found = last_json(capsys.readouterr().out)["sensitivity"]
    assert (found["policy"], found["reference"]) == ("rlboost", "roll") and len(found["rows"]) == 1
    page = (report / "index.html").read_text()
    assert "source of the constant" in page and found["rows"][0]["source"][:20] in page
    assert (report / "sensitivity.svg").is_file()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--policy", "nonsense"], "nonsense"),
        (["--policy", "roll,roll"], "named twice"),
        (["--trace", "none.csv"], "none.csv"),
        (["--workload", "none.csv"], "none.csv"),
        (["--hardware", "none.json"], "none.json"),
        (["--policy", "roll", "--sensitivity"], "at least two"),
        (["--policy", "roll", "--reference", "pearl"], "--reference pearl"),
        (["--set", "batch=3"], "--set"),
        (["--report", "no/such/folder"], "--report"),
    ],
)
def test_a_wrong_input_is_one_message_and_exit_2(
    given: list[str], reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "run", *given]) == 2
    error = capsys.readouterr().err.strip()
    assert reason in error.splitlines()[-1] and "Traceback" not in error


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"policies": 3}', "[1]"])
def test_what_is_no_result_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    assert main(["simulate", "report", str(path)]) == 2
    assert "r.json" in capsys.readouterr().err


def test_a_trace_that_begins_after_the_simulated_time_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "late.csv"
    path.write_text("time_s,available_gpus\n90000,4\n")
    assert main(["simulate", "run", "--trace", str(path), "--hours", "2"]) == 2
    assert "begins at 90000 s" in capsys.readouterr().err
