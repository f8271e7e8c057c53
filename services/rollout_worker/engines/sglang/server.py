"""One SGLang server: launched here and never left behind, or adopted where it runs already.

A launched server is a process group of its own, on a leash that ends with this process (`leash`). Its output goes to a file. `failed` tells of its end: by the process for a launched one, by `/ready` for an adopted one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from pathlib import Path
from typing import Final

import psutil

from messages.ids import Role
from services.jobfile import RolloutSection, SglangSection
from services.rollout_worker.engines.base import EngineError
from services.rollout_worker.engines.sglang import leash
from services.rollout_worker.engines.sglang.api import Api

POLL_S: Final = 0.25
ADOPTED_POLL_S: Final = 1.0
ADOPTED_MISSES: Final = 5
END_S: Final = 5.0
LAST_LINES: Final = 3
ENVIRONMENT: Final = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0"}
"""Unless `rollout.sglang.env` says otherwise: a page leaked by an aborted transfer is told in the log, and does not end the server."""
MODES: Final = {Role.COLOCATED: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}
"""`disaggregation_mode`, by role."""


def free_port(address: str) -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _assignments(variables: dict[str, str]) -> list[str]:
    """For `env`, so that they are the server's and not the leash's."""
    return [f"{name}={value}" for name, value in variables.items()]


def command(
    rollout: RolloutSection, role: Role, model: str, device: str, address: str, port: int, bootstrap_port: int
) -> list[str]:
    """The command line of a worker's server. The bootstrap port is used by prefill and decode servers."""
    settings = rollout.sglang
    line = [settings.python or sys.executable, "-m", "sglang.launch_server"]
    line += ["--model-path", model, "--host", address, "--port", str(port)]
    line += ["--tp-size", str(rollout.gpus_per_worker)]
    if device != "auto":
        line += ["--device", device]
    line += ["--max-running-requests", str(rollout.max_running), "--max-total-tokens", str(rollout.kv_cache_tokens)]
    line += ["--chunked-prefill-size", str(rollout.prefill_chunk_tokens)]
    line += ["--incremental-streaming-output", "--skip-server-warmup", "--skip-tokenizer-init"]
    if settings.memory_saver:
        line += ["--enable-memory-saver"]
    if role is not Role.COLOCATED:
        line += ["--disaggregation-mode", MODES[role]]
        line += ["--disaggregation-transfer-backend", settings.transfer_backend]
        line += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
        if settings.role_switch:
            line += ["--enable-pd-role-switch"]
    decodes = role is Role.DECODE or (role is Role.PREFILL and settings.role_switch)
    return [*line, *settings.args, *(settings.decode_args if decodes else ())]


class Server:
    """See the module. `adopt`: the URL of a server that somebody else runs, "" to launch one."""

    def __init__(
        self, rollout: RolloutSection, model: str, device: str, address: str, log_file: Path, adopt: str = ""
    ) -> None:
        self._rollout = rollout
        self._settings: SglangSection = rollout.sglang
        self._model = model
        self._device = device
        self.address = address
        self._log_file = log_file
        self._adopted = bool(adopt)
        self._process: asyncio.subprocess.Process | None = None
        self._relaunched = asyncio.Event()
        self.bootstrap_port = 0 if adopt else free_port(address)  # the same through relaunches: peers know it
        self.api = Api(adopt or f"http://{address}:{free_port(address)}")

    @property
    def adopted(self) -> bool:
        return self._adopted

    @property
    def switches(self) -> bool:
        """Whether prefill and decode change places without a relaunch."""
        return self._settings.role_switch

    def command(self, role: Role) -> list[str]:
        """The command line for a role."""
        port = int(self.api.url.rpartition(":")[2])
        return command(self._rollout, role, self._model, self._device, self.address, port, self.bootstrap_port)

    async def start(self, role: Role = Role.COLOCATED) -> None:
        """Launch it in a role and wait until it takes requests. Raises EngineError with the last lines of its output."""
        if not self._adopted:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            with self._log_file.open("ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *(
                        sys.executable,
                        "-m",
                        leash.__name__,
                        "env",
                        *_assignments({**ENVIRONMENT, **self._settings.env}),
                    ),
                    *self.command(role),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self._relaunched.set()
        try:
            async with asyncio.timeout(self._settings.ready_s):
                while not await self.api.ready():
                    if self._process is not None and self._process.returncode is not None:
                        raise EngineError(f"SGLang ended while it started ({self._how()}): {self.last_words()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            await self.stop()
            raise EngineError(
                f"SGLang at {self.api.url} was not ready within rollout.sglang.ready_s = {self._settings.ready_s:g} s: "
                f"{self.last_words()}"
            ) from None

    async def relaunch(self, role: Role) -> None:
        """End it and launch it in another role. Raises EngineError."""
        if self._adopted:
            raise EngineError(
                f"the adopted server at {self.api.url} cannot be relaunched as {role}: restart it yourself"
            )
        await self._end()
        await self.start(role)

    async def failed(self) -> str:
        """Waits until it has ended by itself; returns how."""
        misses = 0
        while True:
            process = self._process
            if process is not None:
                self._relaunched.clear()
                await process.wait()
                if process is not self._process:  # it was relaunched
                    await self._relaunched.wait()
                    continue
                return f"SGLang ended ({self._how()}): {self.last_words()}"
            await asyncio.sleep(ADOPTED_POLL_S)
            misses = 0 if not self._adopted or await self.api.ready() else misses + 1
            if misses >= ADOPTED_MISSES:
                return f"the adopted server at {self.api.url} has not been ready for {misses} s"

    def memory(self) -> int:
        """Bytes resident in its processes, as the operating system sees them; 0 for an adopted one."""
        return sum(process.memory_info().rss for process in self._family())

    def last_words(self) -> str:
        """The end of its output."""
        try:
            lines = self._log_file.read_text(errors="replace").strip().splitlines()
        except OSError:
            return "it wrote nothing"
        return " | ".join(line.strip() for line in lines[-LAST_LINES:]) + f" (all of it: {self._log_file})"

    async def stop(self) -> None:
        """End a launched one with all its processes; let go of an adopted one."""
        await self._end()
        await self.api.close()

    def kill(self) -> None:
        """End a launched one at once, outside an event loop."""
        for member in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        family = _tree(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await asyncio.to_thread(psutil.wait_procs, family, END_S)

    def _family(self) -> list[psutil.Process]:
        return [] if self._process is None else _tree(self._process.pid)

    def _how(self) -> str:
        code = None if self._process is None else self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
