"""Dead letters: what every receiver keeps of a message it refuses, within bounds."""

from __future__ import annotations

import base64
from typing import Final

from messages.envelope import brief
from messages.monitor import DeadLetter

DEAD_BYTES: Final = 1024
"""Of a refused message, kept in its dead letter."""
LONGEST_SUBJECT: Final = 256


def dead_letter(receiver: str, subject: str, data: bytes, reason: str, seq: int = 0) -> DeadLetter:
    """The letter about `data`, which came on `subject` (as number `seq` of its stream). Small, whatever the message was."""
    return DeadLetter(
        subject=brief(subject, LONGEST_SUBJECT),
        receiver=receiver,
        reason=brief(reason),
        size=len(data),
        data=base64.b64encode(data[:DEAD_BYTES]).decode(),
        seq=seq,
    )
