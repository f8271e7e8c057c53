"""What a server's replies have cost so far, as its worker's heartbeats tell it."""

from __future__ import annotations

import math
import time

import msgspec

from services.rollout_worker.engines.base import Load


class Accounts:
    """Sums since the engine started. The server does not tell its iterations: a token of a batch of n counts as one n-th of one."""

    def __init__(self) -> None:
        self._sums = Load()
        self._at = 0.0  # until when busy time was summed
        self._iterations = 0.0

    def look(self, *, decodes: bool, waits: bool) -> None:
        """Time until now: of decoding where any reply decodes, of prefill where any waits for its first token."""
        now = time.monotonic()
        span, self._at = now - self._at, now
        self._sums = msgspec.structs.replace(
            self._sums,
            decode_s=self._sums.decode_s + (span if decodes else 0.0),
            prefill_s=self._sums.prefill_s + (span if waits else 0.0),
        )

    def count(self, batch: int, decoded: int, prefilled: int) -> None:
        """Tokens; `batch`: replies that decode together."""
        self._iterations += decoded / max(1, batch)
        self._sums = msgspec.structs.replace(
            self._sums,
            decode_tokens=self._sums.decode_tokens + decoded,
            decode_batch_sum=self._sums.decode_batch_sum + decoded,
            prefill_tokens=self._sums.prefill_tokens + prefilled,
        )

    def load(self, running: int, queued: int) -> Load:
        """With what there is now."""
        return msgspec.structs.replace(
            self._sums, running=running, queued=queued, decode_iterations=math.ceil(self._iterations)
        )
