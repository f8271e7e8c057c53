"""A server on a leash ends with its starter, and takes its own children with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.rollout_worker.engines.sglang import leash

FAMILY = (
    "import subprocess, sys, pathlib, os\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "pathlib.Path(sys.argv[1] + '.part').write_text(f'{os.getpid()} {child.pid}')\n"
    "os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
    "child.wait()\n"
)


def begin(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A leash with a server and its child, both running."""
    told = tmp_path / "pids"
    held = subprocess.Popen(
        [sys.executable, "-m", leash.__name__, sys.executable, "-c", FAMILY, str(told)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    while not told.exists():
        assert held.poll() is None
        os.sched_yield()
    return held, [psutil.Process(int(pid)) for pid in told.read_text().split()]


@pytest.mark.parametrize("how", ["let go", "server killed", "server ended"])
def test_nobody_is_left_behind(tmp_path: Path, how: str) -> None:
    held, family = begin(tmp_path)
    if how == "let go":
        assert held.stdin is not None
        held.stdin.close()
    else:
        family[0].send_signal(signal.SIGKILL if how == "server killed" else signal.SIGTERM)
    held.wait(30)
    gone, left = psutil.wait_procs(family, 30)
    assert len(gone) == 2 and not left
    assert held.returncode == {"let go": -9, "server killed": 137, "server ended": 143}[how]


def test_a_killed_starter_takes_all_along(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    code = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-m', {leash.__name__!r}, sys.executable, '-c', {FAMILY!r}, {str(told)!r}],"
        " stdin=subprocess.PIPE, start_new_session=True)\np.wait()\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code])
    while not told.exists():
        assert starter.poll() is None
        os.sched_yield()
    family = [psutil.Process(int(pid)) for pid in told.read_text().split()]
    starter.kill()
    starter.wait()
    _, left = psutil.wait_procs(family, 30)
    assert not left
