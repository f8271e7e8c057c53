"""Preemption feed process: replays an availability trace as capacity events.

Owns how far the replay is, in the state bucket. Never looks at what comes of its events. Driven by the clock. Killed
and started again it goes on where it was; what fell due in between is published at once, in order. An event published
just before a kill is published again under the same id, and is idempotent besides.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from messages.envelope import encode
from messages.subjects import state_bucket, subject_of
from services.connect import connect
from services.jobfile import JobFile
from services.preemption_feed.config import Config
from services.runtime.bus import Bus, BusUnavailable, WrongLastSequence
from services.runtime.clock import Clock, now_ms
from services.runtime.log import get_logger

STATE_KEY = "feed"
"""Key of the feed's position in the state bucket."""
RETRY_S = 1.0
"""Pause while the broker is away, on top of the bus's own retries."""

log = get_logger("preemption_feed")


class SecondFeedError(Exception):
    """Two feeds replay for one job: their events would contradict each other."""


class Position(msgspec.Struct, frozen=True):
    """The first `position` events of the schedule `digest` are published; its time 0 is `started_ms` (Unix)."""

    digest: str
    started_ms: int
    position: int


async def serve(job: JobFile, stop: asyncio.Event) -> None:
    """Publish every event at its time; returns at the end of the trace, or when `stop` is set. Raises TraceError, SecondFeedError."""
    config = Config.of(job)
    if config is None:
        log.info("feed.trace is empty: nothing to replay", action="feed.idle")
        return
    bus = await connect(job, "preemption_feed")
    try:
        await Feed(config, bus, job.job.name).run(stop)
    finally:
        await bus.close()


class Feed:
    """One replay on one bus."""

    def __init__(self, config: Config, bus: Bus, job_name: str, clock: Clock = now_ms) -> None:
        self.config = config
        self.bus = bus
        self.job_name = job_name
        self.clock = clock
        self._revision = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Resume or begin, then publish to the end or to `stop`."""
        for warning in self.config.trace.warnings:
            log.warning(f"trace {self.config.trace.name}: {warning}", action="feed.trace")
        if uncounted := self.config.schedule.uncounted_gpus:
            text = f"trace {self.config.trace.name} has up to {uncounted} GPUs more than the job's preemptible workers: capped"
            log.warning(text, action="feed.capped")
        while not stop.is_set():
            try:
                at = await self._restore()
                return await self._publish_from(at, stop)
            except BusUnavailable as error:
                log.warning(f"the bus is away, trying again: {error}", action="feed.retry")
                await _wait(stop, RETRY_S)

    async def _restore(self) -> Position:
        entry = await self.bus.get(state_bucket(self.job_name), STATE_KEY)
        self._revision = 0 if entry is None else entry.revision
        if entry is not None:
            with contextlib.suppress(msgspec.MsgspecError):
                at = msgspec.json.decode(entry.data, type=Position)
                if at.digest == self.config.digest and 0 <= at.position <= len(self.config.schedule.events):
                    log.info(f"resuming at event {at.position}", action="feed.resumed")
                    return at
            log.warning("the trace, nodes or seed changed since the last run: starting it anew", action="feed.anew")
        return Position(self.config.digest, self.clock(), 0)

    async def _publish_from(self, at: Position, stop: asyncio.Event) -> None:
        events = self.config.schedule.events
        await self._save(at)
        while at.position < len(events):
            scheduled = events[at.position]
            await _wait(stop, (at.started_ms + scheduled.at_ms - self.clock()) / 1000)
            if stop.is_set():
                return
            msg_id = f"feed:{at.digest}:{at.started_ms}:{at.position}"
            subject = subject_of(self.job_name, scheduled.event)
            await self.bus.publish_durable(subject, encode(scheduled.event), msg_id=msg_id)
            at = msgspec.structs.replace(at, position=at.position + 1)
            await self._save(at)
            log.info(
                f"{type(scheduled.event).__name__} {scheduled.event.node}{list(scheduled.event.gpus)}",
                action="feed.published",
                position=at.position,
                scheduled_ms=scheduled.at_ms,
            )
        log.info(f"the trace is over after {len(events)} events; its last count holds", action="feed.over")

    async def _save(self, at: Position) -> None:
        bucket, data = state_bucket(self.job_name), msgspec.json.encode(at)
        try:
            self._revision = await self.bus.put(bucket, STATE_KEY, data, last_revision=self._revision)
        except WrongLastSequence as error:
            entry = await self.bus.get(bucket, STATE_KEY)
            if entry is None or entry.data != data:
                raise SecondFeedError(
                    f"another preemption feed of job {self.job_name} runs (key {STATE_KEY} of bucket {bucket}): stop one"
                ) from error
            self._revision = entry.revision  # our own write, whose answer was lost


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    """Until `stop`, at most so long."""
    if seconds > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), seconds)
