"""Log lines: one JSON object a line, with text for people and `action` for machines; on stderr, which is a service's log file.

In a command that a person started, `told` keeps them in a file and has warnings told in words.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Final, TextIO

import msgspec

from services.runtime.clock import Clock, now_ms

LEVELS: Final = ("debug", "info", "warning", "error")

Sink = Callable[[str, str, str, str], None]
"""Takes a line's actor, level, action and text."""
_sinks: list[Sink] = []


@contextlib.contextmanager
def diverted(sink: Sink) -> Generator[None]:
    """Within it, lines of every logger of this process go to `sink` instead of stderr (simulation: one process is many)."""
    _sinks.append(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)


Tell = Callable[[str], None]
"""Takes a warning or an error in words."""
_told: list[tuple[Tell, TextIO | None]] = []


@contextlib.contextmanager
def told(tell: Tell, file: TextIO | None = None) -> Generator[None]:
    """Within it, lines of every logger of this process go to `file` (None: nowhere), and what went wrong to `tell`: "warning: ...".

    Somebody who no longer reads (OSError, ValueError) stops nothing. Within another `told`, only the inner one hears.
    """
    entry = (tell, file)
    _told.append(entry)
    try:
        yield
    finally:
        _told.remove(entry)


class Logger:
    """Writes lines of at least `least` level. Fields are anything msgspec can encode; what it cannot becomes its repr."""

    def __init__(
        self, actor: str, *, least: str = "info", clock: Clock = now_ms, fields: dict[str, object] | None = None
    ) -> None:
        assert least in LEVELS, f"log level {least!r} is not one of {LEVELS}"
        self._actor = actor
        self._least = LEVELS.index(least)
        self._clock = clock
        self._fields = fields or {}
        self._encoder = msgspec.json.Encoder(enc_hook=repr)

    def bind(self, **fields: object) -> Logger:
        """A logger that adds `fields` to each line."""
        return Logger(self._actor, least=LEVELS[self._least], clock=self._clock, fields={**self._fields, **fields})

    def debug(self, text: str, *, action: str = "", **fields: object) -> None:
        self.log("debug", text, action=action, **fields)

    def info(self, text: str, *, action: str = "", **fields: object) -> None:
        self.log("info", text, action=action, **fields)

    def warning(self, text: str, *, action: str = "", **fields: object) -> None:
        self.log("warning", text, action=action, **fields)

    def error(self, text: str, *, action: str = "", **fields: object) -> None:
        self.log("error", text, action=action, **fields)

    def log(self, level: str, text: str, *, action: str = "", **fields: object) -> None:
        """Write one line. An unknown level counts as "info". Where it cannot be written (a full disk), nothing else suffers."""
        rank = LEVELS.index(level) if level in LEVELS else 1
        if rank < self._least:
            return
        if _sinks:
            _sinks[-1](self._actor, LEVELS[rank], action, text)
            return
        line = {
            "at_ms": self._clock(),
            "level": LEVELS[rank],
            "actor": self._actor,
            "action": action,
            "text": text,
            **self._fields,
            **fields,
        }
        tell, file = _told[-1] if _told else (None, sys.stderr)
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                file.write(self._encoder.encode(line).decode() + "\n")
                file.flush()
        if tell is not None and rank >= LEVELS.index("warning"):
            with contextlib.suppress(OSError, ValueError):
                tell(f"{LEVELS[rank]}: {text}")


def get_logger(actor: str, *, least: str = "info") -> Logger:
    """The logger of an actor."""
    return Logger(actor, least=least)
