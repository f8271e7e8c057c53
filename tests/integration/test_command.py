"""`pearl demo` as a person meets it: in any folder, looked at while it runs, interrupted at any moment, twice at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "services.cli")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
ODD = 'data with "quotes", \\ and ü'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory of somebody else's, with names of ours in it."""
    for name in ("services", "messages"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "signal.py").write_text("raise SystemExit('not this one')")
    return tmp_path


def pearl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )


def _heeds_hangups() -> None:
    """Whoever started the tests with `nohup` made their processes ignore it, and a demo keeps to that."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextlib.contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A demo in a process group of its own, as a shell starts it; at the end nothing of it may be left."""
    process = subprocess.Popen(
        [*COMMAND, "demo", *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heeds_hangups,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        left = running(folder)
        for each in left:
            each.kill()
        assert not left, f"left behind: {[' '.join(each.cmdline()) for each in left]}"


def running(folder: Path) -> list[psutil.Process]:
    """Processes that have to do with a folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and any(str(folder) in part for part in process.cmdline()):
                found.append(process)
    return found


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ctrl-C: the terminal tells the whole group. Returns what was said."""
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=180)
    assert process.returncode == 130, said
    assert "Traceback" not in said[1] and '"level":"error"' not in said[1], said[1]
    return said


def test_a_running_demo_is_looked_at_and_interrupted(folder: Path) -> None:
    for command in (("status",), ("tap",), ("check",), ("events", "available", "--node", "spot1", "--gpus", "0")):
        said = pearl(folder, *command)
        assert said.returncode == 2 and "no run found" in said.stderr and "-c FILE" in said.stderr
    with demo(folder, "--steps", "200", "--data-dir", ".pearl") as process:
        begun = time.monotonic()
        while (status := pearl(folder, "status", "--json")).returncode or json.loads(status.stdout)["table"] is None:
            assert time.monotonic() - begun < 60 and process.poll() is None, status
        assert {row["worker"] for row in json.loads(status.stdout)["table"]["rows"]} >= {"reserved-w0", "train-t0"}
        assert "policy version" in pearl(folder, "status").stdout
        tapped = pearl(folder, "tap", "tel.>", "--count", "3", "--json")
        assert tapped.returncode == 0 and len([json.loads(line) for line in tapped.stdout.splitlines()]) == 3
        told = pearl(folder, "events", "available", "--node", "reserved", "--gpus", "0,1", "--json")
        assert told.returncode == 0 and json.loads(told.stdout)["subject"] == "pearl.demo.ev.gpu_available.reserved"
        wrong = pearl(folder, "events", "reclaim", "--node", "reserved", "--gpus", "0")
        assert wrong.returncode == 2 and "only preemptible GPUs" in wrong.stderr
        checked = pearl(folder, "check", "--json")
        assert checked.returncode == 0 and json.loads(checked.stdout)["violations"] == []
        output, _ = interrupt(process)
        assert "interrupted" in output
    for command in (("status",), ("tap",), ("check",)):
        said = pearl(folder, *command)
        assert said.returncode == 2 and "is not running" in said.stderr and "Traceback" not in said.stderr


@pytest.mark.parametrize("moment_s", [0.0, 0.2, 1.0, 3.0])
def test_an_interruption_at_any_moment_leaves_nothing_behind(folder: Path, moment_s: float) -> None:
    with demo(folder, "--data-dir", str(folder / ODD)) as process:
        assert process.stdout is not None and "starting" in process.stdout.readline()
        time.sleep(moment_s)
        interrupt(process)


def test_the_end_of_its_terminal_ends_a_demo(folder: Path) -> None:
    with demo(folder, "--data-dir", str(folder / ODD)) as process:
        assert process.stdout is not None and "starting" in process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=60)
        assert process.returncode == 130


def test_a_killed_supervisor_takes_its_processes_with_it(folder: Path) -> None:
    """Else they would run on without one, in the way of the next run."""
    with demo(folder, "--data-dir", str(folder / ODD)) as process:
        assert process.stdout is not None and "starting" in process.stdout.readline()
        job = next((folder / ODD).glob("demo-*/job.toml"))
        begun = time.monotonic()
        while not list((job.parent / "demo" / "pids").glob("*-w*.json")):  # a node agent has launched a worker
            assert time.monotonic() - begun < 60
            time.sleep(0.1)
        process.kill()
        process.wait()
        begun = time.monotonic()
        while left := running(job.parent):
            assert time.monotonic() - begun < 60, left
            time.sleep(0.1)


def test_a_job_that_runs_is_not_started_a_second_time(folder: Path) -> None:
    with demo(folder, "--data-dir", str(folder / ODD)) as process:
        assert process.stdout is not None and "starting" in process.stdout.readline()
        job = next((folder / ODD).glob("demo-*/job.toml"))
        begun = time.monotonic()
        while not (job.parent / "demo" / "nats.json").exists():
            assert time.monotonic() - begun < 30
            time.sleep(0.1)
        said = pearl(folder, "up", "-c", str(job))
        assert (said.returncode, said.stdout, said.stderr.count("\n")) == (2, "", 1), said
        assert f"runs already in {job.parent}" in said.stderr and str(process.pid) in said.stderr
        assert pearl(folder, "status", "-c", str(job)).returncode == 0, "the first one is as it was"
        interrupt(process)


@pytest.mark.slow
def test_two_demos_at_once_do_not_meet(folder: Path) -> None:
    arguments = ("--json", "--steps", "2", "--data-dir", str(folder / ODD))
    with demo(folder, *arguments) as first, demo(folder, *arguments) as second:
        for process in (first, second):
            output, errors = process.communicate(timeout=250)
            assert process.returncode == 0, errors
            report = json.loads(output.splitlines()[-1])
            assert report["train_steps"] == 2 and report["violations"] == []
    assert len(list((folder / ODD).iterdir())) == 2


@pytest.mark.slow
def test_the_emulated_demo_ends_long_before_its_engines_would(folder: Path) -> None:
    with demo(folder, "--engine", "emulated", "--json", "--steps", "1", "--data-dir", ".pearl") as process:
        output, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
        report = json.loads(output.splitlines()[-1])
        assert report["train_steps"] == 1 and report["violations"] == []
        assert report["trajectories"] == {"completed": 64, "lost": 0, "duplicated": 0}
        assert report["tokens"]["regenerated"] == 0
        assert report["emulated_s"] > 5 * report["wall_s"]
        assert report["bottleneck"] in report["busy"]
