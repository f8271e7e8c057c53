"""The files that the README's commands name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.__main__ import main

NODES = """[[nodes]]
name = "a"
zone = "reserved"
gpus = 2
[[nodes]]
name = "t"
zone = "training"
gpus = 1
"""
FOLDER = Path(__file__).parents[2] / "examples" / "decide"


def test_the_example_profile_is_decided_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decide", "--profile", str(FOLDER / "profile.toml"), "--workers", "8", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert chosen["prefill"] + chosen["decode"] + chosen["colocated"] == 8


def test_the_example_table_is_planned_on(capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--table", str(FOLDER / "table.json"), "--target", str(FOLDER / "target.json")]
    assert main(["plan", *files, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["add"], plan["remove"], plan["d_role"]) == ([{"worker": "spot-w1", "role": "decode"}], ["spot-w0"], 0)


def test_a_job_file_may_begin_with_a_byte_order_mark_and_its_folder_must_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for folder, says in (
        ("file", "is no folder"),
        ("loop", "cannot be a run's folder"),
        ("n" * 300, "too long"),
        ("\\u0000", "null"),
    ):
        job.write_text(f'\ufeff[job]\nname = "demo"\ndata_dir = "{tmp_path}/{folder}"\n{NODES}', encoding="utf-8")
        for command in ("up", "status", "doctor"):
            assert main([command, "-c", str(job)]) == 2, (command, folder)
            assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "up", "check"])
def test_a_loop_of_links_is_no_job_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert main([command, "-c", str(tmp_path / "loop")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--report"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(["simulate", "run", "--hours", "1000000", option, "/proc/no/file"]) == 2
    assert option in capsys.readouterr().err
    assert main(["bench", "table", "--report", "/proc/no"]) == 2
    assert "--report" in capsys.readouterr().err
