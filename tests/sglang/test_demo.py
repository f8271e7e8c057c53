"""`pearl demo --engine sglang`, as a person types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.rollout_worker.engines.sglang.cpu import VARIABLE
from tests.sglang import real

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not real.PYTHON, reason=real.NO_PYTHON)]
STEPS = 3


def test_the_demo_on_real_servers_loses_nothing(tmp_path: Path) -> None:
    command = ["demo", "--engine", "sglang", "--steps", str(STEPS), "--json", "--data-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", *command],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, VARIABLE: real.PYTHON},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["train_steps"] >= STEPS and report["violations"] == []
    assert report["trajectories"]["lost"] == report["trajectories"]["duplicated"] == 0
    assert report["tokens"]["delivered"] > 0 and report["tokens"]["regenerated"] == 0
    assert report["staleness_max"] <= 1
