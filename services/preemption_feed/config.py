"""Settings of the preemption feed: the schedule it replays."""

from __future__ import annotations

import hashlib
import random

import msgspec

from services.jobfile import JobFile
from services.preemption_feed.schedule import Schedule, preemptible_slots, schedule
from services.preemption_feed.traces import Trace, load


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """`digest` tells one schedule from another: a feed resumes only what it began."""

    trace: Trace
    schedule: Schedule
    digest: str

    @staticmethod
    def of(job: JobFile) -> Config | None:
        """The schedule of the job's trace; None where the job has none. Raises TraceError."""
        if not job.feed.trace:
            return None
        trace = load(job.feed.trace)
        planned = schedule(trace, preemptible_slots(job), job.feed, random.Random(f"preemption_feed {job.job.seed}"))
        digest = hashlib.sha256(msgspec.json.encode(planned)).hexdigest()[:16]
        return Config(trace=trace, schedule=planned, digest=digest)
