"""From tokens to text while they come: pieces that are final, stop strings, and nothing cut inside a character. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]

BROKEN: Final = "\ufffd"
"""What decoders give for bytes that are no whole character yet."""


class TextStream:
    """The text of one reply. With `stops`, `enough` says after how many tokens the first of them was complete.

    Tokens of `silent` (the end of a turn) have no text. Only the last tokens are decoded again for each new one, with those
    before as context, since tokenizers may put a space between two; so a reply costs time linear in its length.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), silent: frozenset[int] = frozenset()) -> None:
        self.enough: int | None = None
        self._decode = decode
        self.stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self.stops), default=0)
        self._silent = silent
        self._ids: list[int] = []  # those that have text
        self._fed = 0
        self._context = self._read = 0  # ids[context:read] is decoded with what follows, to see what that adds
        self._text = ""
        self._sent = 0

    @property
    def text(self) -> str:
        """All that was said so far, held back or not; without the stop string."""
        return self._text

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that became final with these tokens."""
        if not self.stops:
            self._add(tokens)
            return self._send(len(self._text))
        for token in tokens:
            if self.enough is not None:
                break
            self._add((token,))
            self._find()
        return self._send(len(self._text) if self.enough is not None else len(self._text) - self._held())

    def end(self) -> str:
        """What was held back, at the end of the reply."""
        if self.enough is None and self._read < len(self._ids):
            self._append(self._decode(self._ids[self._context :])[len(self._before()) :])
            self._read = len(self._ids)
            self._find()
        return self._send(len(self._text))

    def _add(self, tokens: Sequence[int]) -> None:
        self._fed += len(tokens)
        self._ids += [token for token in tokens if token not in self._silent] if self._silent else tokens
        if self._read == len(self._ids):
            return
        now = self._decode(self._ids[self._context :])
        before = self._before()
        if len(now) > len(before) and not now.endswith(BROKEN):
            self._append(now[len(before) :])
            self._context, self._read = self._read, len(self._ids)

    def _before(self) -> str:
        return self._decode(self._ids[self._context : self._read]) if self._read > self._context else ""

    def _append(self, piece: str) -> None:
        self._text += piece

    def _find(self) -> None:
        if not self.stops or self.enough is not None:
            return
        start = max(0, self._sent - self._longest)
        found = [at for at in (self._text.find(stop, start) for stop in self.stops) if at >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.enough = self._fed

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self._text) - self._sent), 0, -1):
            tail = self._text[-length:]
            if any(stop.startswith(tail) for stop in self.stops):
                return length
        return 0

    def _send(self, until: int) -> str:
        piece = self._text[self._sent : until]
        self._sent = max(self._sent, until)
        return piece
