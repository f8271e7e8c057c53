"""Reading on in a stream, for onlookers: from where one was, or, where the broker lost its newest messages, from where it parted.

An onlooker has no checkpoint and acknowledges nothing; all it must not do is wait for sequences that were given out again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from services.runtime.bus import Bus, Delivery


class Follower:
    """A place in one filter of a stream."""

    def __init__(self, bus: Bus, stream: str, subject: str) -> None:
        self._bus = bus
        self._stream = stream
        self._subject = subject
        self._seq = 0
        self._at_ms = 0

    async def more(self) -> AsyncIterator[Delivery]:
        """What was stored since the last call, in order. Raises BusUnavailable; what was yielded until then counts as read.

        After a loss, what is later than all that was read; events of the very millisecond in which the streams part are left out.
        """
        first, stands = True, self._seq == 0
        async for delivery in self._bus.read(self._stream, self._subject, first_seq=max(1, self._seq)):
            if first and not stands:
                first = False
                stands = (delivery.seq, delivery.at_ms) == (self._seq, self._at_ms)
                if stands:
                    continue
                break
            self._seq, self._at_ms = delivery.seq, delivery.at_ms
            yield delivery
        if stands:
            return
        last = 0
        async for delivery in self._bus.read(self._stream, self._subject):
            last = delivery.seq
            if delivery.at_ms > self._at_ms:
                self._seq, self._at_ms = delivery.seq, delivery.at_ms
                yield delivery
        if last < self._seq:  # nothing new yet
            self._seq = 0 if last == 0 else self._seq
