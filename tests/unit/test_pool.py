"""Worker processes end with whoever started them, and are never too many."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from services.runtime import pool
from services.runtime.pool import MOST_PROCESSES, cores, pool_size, worker_pool
from services.simulator.faults import run

PROGRAM = """
import signal, sys, threading
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the tests with `nohup` made their processes ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)  # and a shell's `&` this one
from services.runtime.pool import worker_pool

def never(number):
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
    threading.Event().wait()

with worker_pool(2) as pool:
    list(pool.map(never, range(200)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT], ids=lambda n: n.name)
def test_workers_end_with_their_parent(number: signal.Signals) -> None:
    """The parent alone is told, while both workers are busy; whoever of the three lived on would hold the output open."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    begun = {parent.stdout.readline(), parent.stdout.readline()}
    assert begun == {"0\n", "1\n"}
    parent.send_signal(number)
    out, error = parent.communicate(timeout=120)
    assert out == "", "no further task was begun"
    assert error.count("Traceback") <= (number is signal.SIGINT), error


def test_work_that_is_given_up_is_not_waited_for() -> None:
    program = PROGRAM.replace("list(pool.map(never, range(200)))", "pool.submit(never, 0); raise SystemExit(3)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr


def test_a_pool_does_its_work() -> None:
    given: list[int] = []
    with worker_pool(2, initializer=given.append, initargs=(1,)) as workers:
        assert list(workers.map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
    assert given == [], "the initializer ran elsewhere"


def test_a_block_that_ends_well_waits_for_what_it_submitted() -> None:
    with worker_pool(2) as workers:
        begun = [workers.submit(pow, 3, each) for each in range(40)]
    assert [each.result(timeout=0) for each in begun] == [3**each for each in range(40)]


def test_a_terminals_ctrl_c_leaves_the_decision_to_the_parent() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started with
    try:
        with worker_pool(1) as workers:
            assert workers.submit(signal.getsignal, signal.SIGINT).result(timeout=60) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_machine_with_many_cores_may_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "cores", lambda: 3 * MOST_PROCESSES)
    assert pool_size(None) == pool_size(2**30) == 3 * MOST_PROCESSES


def test_how_many() -> None:
    assert pool_size(None) == pool_size(0) == cores()
    assert pool_size(10**6) == max(MOST_PROCESSES, cores())
    assert pool_size(1000, 4) == 4
    assert pool_size(3, 4) == 3
    assert pool_size(3, 0) == 1


def test_many_seeds_never_start_more_processes_than_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(count: int) -> object:
        asked.append(count)
        return pool.worker_pool(1)

    monkeypatch.setattr(run, "worker_pool", counted)
    monkeypatch.setattr(run, "seeded", abs)
    assert len(list(run.many(range(4), jobs=1000))) == 4
    assert asked == [4]
