"""Tokens of one attempt on their way to its client: rarer chunks where nobody reads along. Pure.

A chunk costs worker, broker and client about the same whatever is in it. An edge that streams to nobody says in
`request.generate` how long a token may wait for others; the end of the attempt waits for nothing.
"""

from __future__ import annotations

from services.rollout_worker.engines.base import Tokens


class Held:
    """What of an attempt is not sent yet. `add` and `rest` return what to send now, in order; times are in seconds."""

    def __init__(self, hold_ms: int) -> None:
        self._hold_s = hold_ms / 1000
        self._since_s = 0.0  # when the first of what waits came
        self._waiting: Tokens | None = None

    def add(self, chunk: Tokens, now_s: float) -> tuple[Tokens, ...]:
        """Take the engine's next chunk. One chunk is of one version."""
        waiting, self._waiting = self._waiting, None
        before: tuple[Tokens, ...] = ()
        if waiting is None:
            self._since_s = now_s
        elif waiting.version != chunk.version:
            before, self._since_s = (waiting,), now_s
        else:
            chunk = Tokens(
                offset=waiting.offset,
                tokens=waiting.tokens + chunk.tokens,
                logprobs=waiting.logprobs + chunk.logprobs,
                version=chunk.version,
                finish=chunk.finish,
                reason=chunk.reason,
                cached_tokens=waiting.cached_tokens,
            )
        if chunk.finish or now_s - self._since_s >= self._hold_s:
            return (*before, chunk)
        self._waiting = chunk
        return before

    def rest(self) -> Tokens | None:
        """What waits, if anything does: for an attempt that gets no more tokens for a while."""
        waiting, self._waiting = self._waiting, None
        return waiting
