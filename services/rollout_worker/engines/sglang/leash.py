"""Runs a command as a process group that ends with whoever started it, however that ends.

    python -m services.rollout_worker.engines.sglang.leash COMMAND ...

The starter keeps the write end of this process's standard input. When that closes (it let go, or was killed), or when the command ends, the
whole group is killed: SGLang's scheduler and detokenizer are processes of their own and have been seen to outlive their server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import psutil


def main() -> None:
    command = sys.argv[1:]
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def ended() -> None:
        code = server.wait()
        sys.stdout.flush()
        _kill_others()
        os._exit(code if code >= 0 else 128 - code)

    threading.Thread(target=ended, daemon=True).start()
    while sys.stdin.buffer.read(4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _kill_others() -> None:
    """The rest of the group."""
    group, me = os.getpgrp(), os.getpid()
    for process in psutil.process_iter():
        try:
            if process.pid != me and os.getpgid(process.pid) == group:
                process.kill()
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            continue


if __name__ == "__main__":
    main()
