"""What a node agent reports: in order, each until it is stored.

A process's pid file is forgotten when the last word about it is stored: from then on its end survives this agent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from messages.envelope import Message, encode
from messages.orchestrator import GpuFree
from messages.subjects import message_id, subject_of
from services.node_agent.processes import Pids
from services.runtime.bus import Bus, BusError
from services.runtime.clock import Clock
from services.runtime.dead_letters import dead_letter
from services.runtime.log import get_logger

RETRY_FIRST_S: Final = 0.1
RETRY_MOST_S: Final = 5.0
LAST_REPORTS_S: Final = 3.0
"""How long a stopping agent waits for its last reports to be stored."""
MOST_REPORTS_WAITING: Final = 1024
"""Beyond it dead letters are only logged."""


class Reports:
    """Reports that wait for the broker. `name` is the agent's."""

    def __init__(self, bus: Bus, job: str, name: str, clock: Clock, pids: Pids) -> None:
        self._bus = bus
        self._job = job
        self._name = name
        self._clock = clock
        self._pids = pids
        self._waiting: deque[tuple[Message, str]] = deque()
        self._wake = asyncio.Event()
        self._letters = 0
        self._log = get_logger(name)

    def add(self, message: Message, msg_id: str | None = None) -> None:
        """Report this after all that waits already. Its id is the message's own unless given."""
        known_id = msg_id or message_id(message)
        assert known_id is not None, f"{type(message).__name__} needs a message id"
        self._waiting.append((message, known_id))
        self._wake.set()

    def dead_letter(self, subject: str, data: bytes, reason: str) -> None:
        """Report that these bytes could not be taken; only logged while too much waits."""
        self._letters += 1
        letter = dead_letter(self._name, subject, data, reason)
        self._log.warning(f"dead-lettered a message on {letter.subject}: {letter.reason}", action="dead_letter")
        if len(self._waiting) >= MOST_REPORTS_WAITING:
            return  # a flood of nonsense must not grow without bound while the broker is away
        self.add(letter, f"dead:{self._name}:{self._clock()}:{self._letters}")

    async def publish(self) -> None:
        """Store one after the other, until cancelled."""
        pause_s = RETRY_FIRST_S
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            message, msg_id = self._waiting[0]
            try:
                await self._bus.publish_durable(subject_of(self._job, message), encode(message), msg_id=msg_id)
            except BusError as error:
                self._log.warning(f"cannot report {msg_id} yet: {error}", action="report_retry")
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_MOST_S, 2 * pause_s)
                continue
            pause_s = RETRY_FIRST_S
            if isinstance(message, GpuFree):  # the last word about a process: now its end survives this agent
                self._pids.forget(message.worker, message.incarnation)
            self._waiting.popleft()
            self._wake.set()

    async def last(self) -> None:
        """Wait until all are stored, LAST_REPORTS_S at most."""
        try:
            async with asyncio.timeout(LAST_REPORTS_S):
                while self._waiting:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            text = f"{len(self._waiting)} reports not stored; the next agent reports the ends from the pid files"
            self._log.warning(text, action="reports_left")
