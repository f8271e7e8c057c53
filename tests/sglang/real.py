"""Real SGLang servers on CPUs (docs/sglang.md), for whatever tests need one."""

from __future__ import annotations

import asyncio
import ctypes.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

import msgspec

from messages.ids import Role
from services.jobfile import RolloutSection, SglangSection
from services.rollout_worker.engines.sglang import leash
from services.rollout_worker.engines.sglang.cpu import ENV, VARIABLE, settings
from services.rollout_worker.engines.sglang.server import command, free_port

PYTHON: Final = os.environ.get(VARIABLE, "")
"""Interpreter of an environment with SGLang (services/rollout_worker/engines/sglang/cpu/setup.sh); "": tests that need one are left out."""
NO_PYTHON: Final = "needs real SGLang: run `make sglang-test`, or set PEARL_SGLANG_PYTHON (docs/sglang.md)"
PD: Final = ctypes.util.find_library("ibverbs") is not None
NO_PD: Final = "Mooncake's library needs libibverbs.so.1: apt-get install libibverbs1"
CACHE_TOKENS: Final = 8192
READY_S: Final = 600.0
"""Of a server on a busy machine; twenty seconds on an idle one."""
IDLE_S: Final = 60.0


def with_weights(section: SglangSection, way: str) -> SglangSection:
    """Weights come to these servers that way."""
    return msgspec.structs.replace(section, weights=way)


class RealServer:
    """One server with the worker's own command line, of no event loop, so that it may outlive a test. `running`: 0 for the default."""

    def __init__(self, python: str, model: str, role: Role, log: Path, running: int = 0) -> None:
        rollout = RolloutSection(engine="sglang", sglang=settings(python), kv_cache_tokens=CACHE_TOKENS)
        if running:
            rollout = msgspec.structs.replace(rollout, max_running=running)
        self.role = role
        self.running = running
        self._rollout = rollout
        self._model = model
        self._log = log
        self._port, self._bootstrap_port = free_port("127.0.0.1"), free_port("127.0.0.1")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"
        self.start_s = 0.0

    def start(self, role: Role) -> None:
        """Launch it in a role, ending what runs; returns when it takes requests."""
        self.kill()
        self.role = role
        began = time.monotonic()
        variables = [f"{name}={value}" for name, value in ENV.items()]
        place = ("127.0.0.1", self._port, self._bootstrap_port)
        line = command(self._rollout, role, self._model, "cpu", *place)
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", leash.__name__, "env", *variables, *line],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        while not self._ready():
            said = f"see {self._log}"
            assert self._process.poll() is None, f"SGLang ended while it started: {said}"
            assert time.monotonic() - began < READY_S, f"SGLang was not ready within {READY_S:g} s: {said}"
            time.sleep(0.25)
        self.start_s = time.monotonic() - began

    async def relaunch(self, role: Role) -> None:
        """In place of a worker's own, which ends what the worker launched."""
        await asyncio.to_thread(self.start, role)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def pace(self, step_s: float | None) -> None:
        """Every step of its model takes so much longer; None: no longer than it takes."""
        body = json.dumps({"forward_sleep_time": step_s}).encode()
        asked = urllib.request.Request(f"{self.url}/slow_down", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=30):
            pass

    def busy(self) -> int:
        """Requests that the server has."""
        with urllib.request.urlopen(f"{self.url}/v1/loads", timeout=30) as answer:
            loads: list[dict[str, Any]] = json.load(answer)["loads"]
        moving = sum(each["disaggregation"]["prefill_inflight_queue_reqs"] for each in loads)
        return moving + sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in loads)

    def until_idle(self) -> None:
        """Nothing of an ended test runs in it, or waits."""
        began = time.monotonic()
        while left := self.busy():
            assert time.monotonic() - began < IDLE_S, f"{left} requests are left in {self.url}: see {self._log}"
            time.sleep(0.1)

    def kill(self) -> None:
        """All its processes."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)
