"""What this process did with each attempt, on disk, for the checker: frames of four bytes of length (big-endian) and an
`attempt.logged/1`. A frame is handed to the operating system at once, so it survives the process, not the machine."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from messages.agent import AttemptLogged
from messages.envelope import encode

LENGTH: Final = struct.Struct(">I")


class AttemptLog:
    """`<attempts_dir>/<worker>.<incarnation>.msgpack`, appended to."""

    def __init__(self, directory: str, worker: str, incarnation: int) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._file = (Path(directory) / f"{worker}.{incarnation}.msgpack").open("ab", buffering=0)

    def write(self, entry: AttemptLogged) -> None:
        """One entry, whole."""
        body = encode(entry)
        self._file.write(LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        self._file.close()
