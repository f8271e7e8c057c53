"""The supervisor's guard: which processes it takes for the job's, and when it does anything at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.supervisor import guard
from services.supervisor.guard import end, lives

STUBBORN = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); sys.stdin.read()"
)
ORDERLY = "import sys; print('up', flush=True); sys.stdin.read()"


class Child:
    """A process in a session of its own that waits; as the supervisor describes one."""

    def __init__(self, program: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.said = {
            "name": "x",
            "pid": self.process.pid,
            "start_time": psutil.Process(self.process.pid).create_time(),
        }


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made = [Child(ORDERLY), Child(STUBBORN), Child(STUBBORN)]
    yield made
    for each in made:
        each.process.kill()
        each.process.communicate()


def test_a_process_is_told_from_another_with_its_number() -> None:
    me = {"pid": os.getpid(), "start_time": psutil.Process().create_time()}
    assert lives(me) and lives({"pid": os.getpid()})
    if Path("/proc/self/stat").exists():
        assert not lives({**me, "start_time": me["start_time"] - 100})


def test_it_asks_then_kills_and_leaves_strangers_alone(children: list[Child], tmp_path: Path) -> None:
    orderly, stubborn, worker = children
    stranger = {**worker.said, "start_time": worker.said["start_time"] - 1000}
    (tmp_path / "pids").mkdir()
    (tmp_path / "pids" / "torn.json").write_text("{")
    end([orderly.said, stubborn.said, stranger], tmp_path, grace_s=0.2)
    assert (orderly.process.wait(10), stubborn.process.wait(10)) == (-15, -9)
    assert worker.process.poll() is None
    (tmp_path / "pids" / "w.json").write_text(json.dumps(worker.said))
    end([], tmp_path, grace_s=0.2)
    assert worker.process.wait(10) == -9


def run(tmp_path: Path, said: str) -> tuple[int, str]:
    """The guard as a process that hears this; its status, and what it left in the lock's file."""
    lock = tmp_path / "lock"
    with lock.open("w+b") as held:
        command = [sys.executable, "-I", "-S", guard.__file__, str(tmp_path), str(held.fileno()), "1"]
        begun = time.monotonic()
        status = subprocess.run(command, input=said.encode(), pass_fds=(held.fileno(),), timeout=60).returncode
        assert time.monotonic() - begun < 60
    return status, lock.read_text()


def test_after_a_stop_there_is_nothing_to_do(children: list[Child], tmp_path: Path) -> None:
    said = json.dumps(children[0].said)
    assert run(tmp_path, f'{said}\n{{"stopped": true}}\n') == (0, "")
    assert children[0].process.poll() is None


def test_without_one_it_ends_what_it_was_told_of(children: list[Child], tmp_path: Path) -> None:
    status, holder = run(tmp_path, f'{json.dumps(children[0].said)}\n{{"name": "torn')
    assert status == 0 and holder.strip().isdigit(), "who holds the folder now"
    assert children[0].process.wait(10) == -15
