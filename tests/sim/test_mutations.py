"""Mutation tests: each rule that is deliberately broken (`mutations.py`) is found by the fault simulation within 200 seeds.

A process a mutation, two at a time. Each tries the plans first that are likely to meet the rule (`LIKELY`), then all others.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.sim.mutations import MUTATIONS, found_by

ROOT = Path(__file__).parents[2]
AT_ONCE = 2
LIMIT_S = 900
"""A mutation that is found takes seconds; 200 seeds take minutes."""


def _tried(name: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.sim.mutations", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, (done.stdout + done.stderr[-2_000:]).strip()


@pytest.fixture(scope="module")
def tried():
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found: dict[str, Future[tuple[int, str]]] = {name: pool.submit(_tried, name) for name in MUTATIONS}
        yield found
        for future in found.values():
            future.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_found(name: str, tried: dict[str, Future[tuple[int, str]]]) -> None:
    status, said = tried[name].result()
    assert status == 0, f"no seed finds it: the simulation or its checkers have a hole there\n{said}"


@pytest.mark.slow
def test_without_a_mutation_nothing_is_found() -> None:
    """The same seeds that find mutations find nothing in the program as it is."""
    for seed in range(4):
        assert found_by(seed) == []


def test_what_a_mutation_rewrites_is_there_once() -> None:
    """All of them, in a process of its own: a rule that has moved is told here, not only where the slow tests run."""
    code = "from tests.sim.mutations import MUTATIONS\nfor mutate in MUTATIONS.values(): mutate()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_there_are_enough_of_them() -> None:
    assert len(MUTATIONS) >= 15
