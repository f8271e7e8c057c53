"""Ends a job's processes when their supervisor was killed. Run by path, with the standard library only, so that it stays small.

The supervisor tells it each process it starts, a JSON object a line, on standard input, and `{"stopped": true}` after it has
ended them itself. An end of the input without that means that it is dead: then this does what it would have done, in the
same order: services (node agents end their workers), what node agents launched, NATS last. It holds the lock of the run's folder
as well, so that the next supervisor does not begin in between.

    guard.py RUN_DIR LOCK_FD GRACE_S
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

POLL_S = 0.1
SAME_START_S = 2.0
"""Start times are derived from the boot time, which moves when the clock is set."""


def main() -> None:
    """Until the input ends; see above."""
    run_dir, lock, grace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # who is told to stop is the supervisor
    services: dict[str, dict[str, Any]] = {}
    for line in sys.stdin:
        with contextlib.suppress(ValueError):  # the last line of a supervisor that died in the middle of it
            said = json.loads(line)
            if said.get("stopped"):
                return
            services[said["name"]] = said
    os.pwrite(lock, str(os.getpid()).encode().ljust(16), 0)
    end(services.values(), run_dir, grace_s)


def end(services: Iterable[dict[str, Any]], run_dir: Path, grace_s: float) -> None:
    """Ask the services to stop, wait at most `grace_s`, kill what is left, workers and trainers too, then stop NATS."""
    left = [each for each in services if lives(each)]
    for each in left:
        send(each["pid"], signal.SIGTERM)
    left = wait(left, grace_s)
    for each in left:
        send(each["pid"], signal.SIGKILL)
    for path in sorted((run_dir / "pids").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            launched = json.loads(path.read_text(encoding="utf-8"))
            if lives(launched):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(launched["pid"], signal.SIGKILL)
    with contextlib.suppress(OSError, ValueError, KeyError):
        server = json.loads((run_dir / "nats.json").read_text(encoding="utf-8"))
        # Which process this is, only its command line tells.
        command = Path(f"/proc/{server['pid']}/cmdline")
        if not Path("/proc/self").exists() or str(run_dir / "nats" / "nats.conf").encode() in command.read_bytes():
            send(server["pid"], signal.SIGTERM)
            if wait([{"pid": server["pid"]}], grace_s):
                send(server["pid"], signal.SIGKILL)


def wait(processes: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Those that still live after so long."""
    give_up = time.monotonic() + seconds
    while (left := [each for each in processes if lives(each)]) and time.monotonic() < give_up:
        time.sleep(POLL_S)
    return left


def lives(process: dict[str, Any]) -> bool:
    """Whether it is there, no zombie, and the same as then (`start_time`, where it is given and the system tells)."""
    pid = process["pid"]
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        # After the name in parentheses, which may hold anything: state is the first field, start the twentieth.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        booted = next(line for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines() if "btime" in line)
    except OSError:
        return not Path("/proc/self").exists()
    started = int(booted.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] != "Z" and abs(started - process.get("start_time", started)) <= SAME_START_S


def send(pid: int, number: signal.Signals) -> None:
    """A signal; one that has ended is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
