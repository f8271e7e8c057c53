"""The planner's choices against an engine model that shares no code with it: small versions of `pearl simulate selection`, `gate`, `table2`.

The figures of whole runs are in docs/decisions.md; these bounds are loose, for few settings.
"""

from __future__ import annotations

import json
import math
from random import Random

import msgspec
import pytest

from services.cli import simulate_options, simulate_selection
from services.jobfile import ConfigError
from services.simulator.whatif import gate, selection, table2
from services.simulator.whatif.judge import Change, Judge, Noise, Site, Turn, Workers
from services.timing.hardware import Value, load

SEEDS = (9, 13, 20, 25, 30, 39, 57)
"""Settings of at most 12 workers whose modes differ by more than 2.5 % (not all of them); chosen by that, not by who does well."""


@pytest.fixture(scope="module")
def outcomes() -> list[selection.Outcome]:
    """Settings that are no ties: colocation is best in some, disaggregation in others."""
    return selection.run(SEEDS)


def test_the_planner_chooses_nearly_as_well_as_measuring_everything(outcomes: list[selection.Outcome]) -> None:
    regret = selection.report(outcomes)["all"]
    assert regret["planner"]["mean_percent"] <= 1.0
    assert regret["planner"]["max_percent"] <= 5.0
    for other in ("eq. 1-3", "always colocated", "static PD 2:3"):
        assert regret["planner"]["mean_percent"] < regret[other]["mean_percent"], other


def test_every_regret_is_of_a_measured_configuration(outcomes: list[selection.Outcome]) -> None:
    for outcome in outcomes:
        assert set(outcome.chosen.values()) <= set(outcome.measured_s)
        assert all(value >= 0 for value in outcome.regret.values())
        assert outcome.best in outcome.measured_s and len(outcome.measured_s) == outcome.workers


def test_the_gate_agrees_with_hindsight() -> None:
    report = gate.report(gate.run(range(14)))
    planner, always = report["gates"]["planner"], report["gates"]["always"]
    assert report["windows_that_differ"] >= 6
    assert planner["agree"] >= 0.85
    assert planner["loss_max_percent"] <= 2.0 < always["loss_max_percent"]


@pytest.mark.parametrize(
    "point",
    [pytest.param(table2.POINTS[0], id="10 GPUs"), pytest.param(table2.POINTS[4], id="16 GPUs")],
)
def test_ratios_of_table_2_are_within_a_hundredth_of_the_best(point: table2.Point) -> None:
    """Paper 6.5.1; all six points: `pearl simulate table2`."""
    row = table2.row(point, draws=8)
    assert row.regret <= 0.01, row
    assert row.selected in row.measured_s


# ---- the judge ----

SITE = Site(hardware=load("h800-qwen3-8b"), chunk_tokens=2048)
BATCH = [tuple(Turn(800 if turn == 0 else 100, 60, 0.2) for turn in range(4)) for _ in range(12)]


@pytest.mark.parametrize("workers", [Workers(0, 0, 2), Workers(1, 2, 0)])
def test_a_batch_is_all_its_trajectories(workers: Workers) -> None:
    found = Judge(SITE, workers, noise=Noise(), seed=1, most_in_flight=12).measure(BATCH)
    assert len(found.ends_s) == 12 and found.makespan_s == max(found.ends_s)
    again = Judge(SITE, workers, noise=Noise(), seed=2, most_in_flight=12).measure(BATCH)
    assert again == found  # without noise the seed says nothing
    noisy = Judge(SITE, workers, noise=Noise(speed=0.05), seed=2, most_in_flight=12).measure(BATCH)
    assert noisy.makespan_s != found.makespan_s


def test_rewritten_histories_are_computed_again() -> None:
    fresh = [tuple(Turn(turn.new, turn.reply, turn.env_s, True) for turn in each) for each in BATCH]
    kept = Judge(SITE, Workers(1, 1, 0), noise=Noise(), seed=1, most_in_flight=12).measure(BATCH)
    lost = Judge(SITE, Workers(1, 1, 0), noise=Noise(), seed=1, most_in_flight=12).measure(fresh)
    assert kept.prefilled == 12 * (800 + 3 * 160)  # the prefill worker computes what was replied as well
    assert lost.prefilled == 12 * sum(800 + 160 * turn for turn in range(4))


def test_workers_that_come_take_trajectories_that_start() -> None:
    def makespan_s(change: Change | None) -> float:
        judge = Judge(SITE, Workers(0, 0, 1), noise=Noise(), seed=1, most_in_flight=4)
        return judge.measure(BATCH * 4, change).makespan_s

    assert makespan_s(Change(40, 1.0, Workers(0, 0, 2))) < makespan_s(None)


# ---- the commands ----


def arguments(add: object, *words: str) -> object:
    import argparse

    parser = argparse.ArgumentParser()
    add(parser)  # type: ignore[operator]
    return parser.parse_args(words)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--settings", "2", "--seed", "4", "--json")
    assert simulate_selection.gate(arguments(simulate_options.add_selection, *words)) == 0  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert found["windows"] == 2 and set(found["gates"]) == {"planner", "eq. 7", "always", "never"}


@pytest.mark.parametrize("words", [("--settings", "0"), ("--jobs", "0"), ("--seed", "-1"), ("--settings", "10001")])
def test_senseless_numbers_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=words[0]):
        simulate_selection.selection(arguments(simulate_options.add_selection, *words))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [722, 733, *range(12)])
def test_every_trajectory_ends_where_memory_is_short_and_links_are_slow(seed: int) -> None:
    """A context that loses its room while it is under way, and has room again at the same moment, is computed anew.

    Of 1,500 seeds only the first two met this: the hand-over that was ended then was the new one, and the batch hung.
    """
    random = Random(seed)
    decode = random.randint(2, 3) - 1
    count = random.randint(6, 24)
    hardware = load("h800-qwen3-8b")
    slow = hardware.transfer_bytes_per_s.value * math.exp(random.uniform(-7, 0))
    hardware = msgspec.structs.replace(hardware, transfer_bytes_per_s=Value(slow, "varied"))

    def turn() -> Turn:
        return Turn(
            random.randint(1, 400),
            random.randint(1, 300),
            random.choice((0, 0, random.random())),
            random.random() < 0.3,
        )

    batch = [tuple(turn() for _ in range(random.randint(1, 8))) for _ in range(count)]
    longest = max(sum(each.new + each.reply for each in trajectory) for trajectory in batch)
    chunk = random.choice((64, 512))
    site = Site(
        hardware=hardware, max_running=64, chunk_tokens=chunk, kv_tokens=int(longest * random.uniform(1.02, 2)) + 8
    )
    judge = Judge(site, Workers(1, decode, 0), noise=Noise(speed=0.01, edge_s=0.02), seed=seed, most_in_flight=count)
    found = judge.measure(batch)
    assert len(found.ends_s) == count
    assert found.decoded > 0
