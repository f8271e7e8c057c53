"""Everything under everything that can go wrong: 200 seeds of the fault simulation, and what makes a failing one useful."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.cli.__main__ import main
from services.rollout_worker.service import RolloutWorker
from services.simulator.faults.plan import KINDS, Fault, Plan, Shape, draw
from services.simulator.faults.record import FaultBegan
from services.simulator.faults.run import Run, outcome_of, seeded, shrunk
from services.simulator.faults.transcript import transcript

SEEDS = 200
CHUNK = 10


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_nothing_breaks_a_promise(first: int) -> None:
    broken = [
        f"seed {seed}: {violation.invariant}: {violation.detail}"
        for seed in range(first, first + CHUNK)
        for violation in seeded(seed).violations
    ]
    assert not broken, "\n".join(
        (*broken, f"to see it: pearl simulate faults --start {broken[0].split()[1][:-1]} --seeds 1")
    )


DIGEST = """
from services.simulator.faults.plan import draw
from services.simulator.faults.run import outcome_of
for seed in (3, 12, 40):
    print(outcome_of(draw(seed), digest=True).digest)
"""


def test_a_seed_is_one_run_under_any_hash_seed() -> None:
    """Not of sets' order, nor of addresses, nor of this machine's clock, name or speed."""

    def digests(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], capture_output=True, text=True, env=environment, check=True
        )
        return done.stdout

    first = digests("1")
    assert len(set(first.split())) == 3
    assert digests("77") == first


def test_faults_happen_as_planned() -> None:
    plan = draw(40)
    run = Run(plan)
    run.to_end()
    run.close()
    began = [seen for seen in run.cluster.record if isinstance(seen, FaultBegan)]
    start_ms = run.cluster.record[0].at_ms
    assert [(seen.at_ms - start_ms, seen.kind, seen.target) for seen in began] == [
        (fault.at_ms, fault.kind, fault.target) for fault in plan.faults
    ]


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {fault.kind for seed in range(SEEDS) for fault in draw(seed).faults}
    assert drawn == KINDS.keys()


NOISE = (
    *(Fault(at_ms, "available", "s0", gpus=(0,)) for at_ms in (100, 200, 900)),
    *(Fault(at_ms, "crash", "router-0", 100) for at_ms in (300, 700)),
    Fault(400, "crash", "agent-1", 50),
)
TWICE = Fault(250, "duplicate", "", 20_000, amount=0.5)


def test_a_failing_plan_is_shrunk_to_what_makes_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that forget what they ran, run it again where the network brings a request twice, and only there."""
    monkeypatch.setattr(RolloutWorker, "_remember", lambda self, request: None)
    faults = tuple(sorted((*NOISE, TWICE), key=lambda fault: fault.at_ms))
    plan = Plan(seed=3, shape=Shape(steps=1, batch=4), faults=faults)
    assert not outcome_of(msgspec.structs.replace(plan, faults=NOISE)).violations
    outcome = outcome_of(plan)
    assert outcome.violations
    smallest = shrunk(outcome)
    assert TWICE in smallest.plan.faults
    for fault in smallest.plan.faults:  # each of them is needed
        rest = tuple(each for each in smallest.plan.faults if each != fault)
        assert not outcome_of(msgspec.structs.replace(smallest.plan, faults=rest)).violations
    assert smallest.violations[0].invariant == outcome.violations[0].invariant


def test_a_run_goes_to_an_event_and_no_further() -> None:
    run = Run(draw(4))
    run.to_event(300)
    assert len(run.cluster.record) == run.cluster.count == 300
    lines = list(transcript(run.cluster.record, run.cluster.lines))
    run.close()
    whole = Run(draw(4))
    whole.to_end()
    whole.close()
    assert whole.cluster.record[:300] == run.cluster.record[:300]
    assert any("writes epoch" in line for line in lines)


def test_the_command_replays_a_plan_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode(Plan(seed=2, shape=Shape(steps=1, batch=2), faults=NOISE)))
    assert main(["simulate", "faults", "--plan", str(file), "--transcript", "--json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    report = msgspec.json.decode(printed[-1])
    assert report["seeds"] == 1 and report["violations"] == [] and report["events"] > 100
    assert sum("** fault" in line and "available s0 gpus 0" in line for line in printed) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no plan", "not a fault plan"),
        ('{"faults": [{"at_ms": 0, "kind": "earthquake"}]}', "there is no such kind"),
        ('{"faults": [{"at_ms": 0, "kind": "crash", "target": "router-9"}]}', "is none of"),
        ('{"faults": [{"at_ms": 0, "kind": "loss", "amount": 7}]}', "above 1"),
        ('{"faults": [{"at_ms": 0, "kind": "reclaim", "target": "s0", "gpus": [9]}]}', "gpus are some of"),
        ('{"faults": [{"at_ms": 0, "kind": "stuck", "target": "s0-w0", "detail": "nap"}]}', "'nap' is none of"),
        ('{"faults": [{"at_ms": -5, "kind": "broker_down"}]}', "at_ms and for_ms"),
        ('{"shape": {"batch": 5}}', "multiple of group"),
    ],
)
def test_a_wrong_plan_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert main(["simulate", "faults", "--plan", str(file)]) == 2
    assert said in capsys.readouterr().err


FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))
"""Shrunken plans of seeds that once broke a promise."""


@pytest.mark.parametrize("path", FOUND, ids=[path.stem for path in FOUND])
def test_what_was_found_stays_mended(path: Path) -> None:
    run = Run(msgspec.json.decode(path.read_bytes(), type=Plan))
    try:
        assert run.to_end().violations == ()
    finally:
        run.close()
