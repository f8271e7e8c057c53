"""`pearl bench`: what it makes of runs, and which job files it writes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services import jobfile
from services.bench.policies import DEFAULT, Outcome, summary
from services.cli.__main__ import main
from services.cli.demo import new_run
from services.cli.parser import build_parser


def outcome(policy: str, tokens_per_s: float) -> Outcome:
    return Outcome(
        policy=policy, tokens_per_s=tokens_per_s, train_steps=3, seconds=60.0, violations=0, plans={}, borrows={}
    )


def test_the_summary_compares_with_the_first() -> None:
    result = summary((outcome("planner", 30.0), outcome("colocated", 20.0), outcome("static-pd:1:1", 0.0)))
    assert result["ratio"] == {"colocated": 1.5, "static-pd:1:1": None} and result["reference"] == "planner"
    assert result["policies"]["colocated"]["rollout_tokens_per_s"] == 20.0


def test_runs_differ_in_the_policy_only(tmp_path: Path) -> None:
    jobs = []
    for index, policy in enumerate(DEFAULT):
        path = new_run(tmp_path / str(index), seed=7, changes={"policy": f'"{policy}"', "train_steps": "100000"})
        jobs.append(jobfile.load(path))
    assert [job.decision.policy for job in jobs] == list(DEFAULT)
    same = {msgspec.json.encode((job.feed, job.rollout, job.job.seed, job.pipeline, job.nodes)) for job in jobs}
    assert len(same) == 1


@pytest.mark.parametrize(
    ("arguments", "names"), [(["--policies", "best"], "--policies"), (["--policies", "planner,planner"], "twice")]
)
def test_wrong_policies_are_named(arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "policies", *arguments]) == 2
    assert names in capsys.readouterr().err


def test_minutes_are_bounded() -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", "--minutes", "0"])
    assert build_parser().parse_args(["bench", "policies", "--minutes", "1.5"]).minutes == 1.5
