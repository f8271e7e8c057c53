"""Settings of a router."""

from __future__ import annotations

import msgspec

from services.jobfile import JobFile


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Loads are counted in requests."""

    max_running: int  # requests a worker decodes together
    admission_pause_ms: int  # a pause older than this is ignored
    most_sessions: int = 100_000  # trajectories whose last worker is remembered
    most_compared: int = 64  # workers compared for one request; of more, a moving window
    # Prefilling so many tokens costs about what one more request in a worker costs its batch for a turn or two; a session
    # that moves stays there for many. `simulate run` tells placements apart (docs/what-if.md).
    tokens_per_request: int = 4096
    paused_retry_ms: int = 100
    full_retry_ms: int = 50
    nobody_retry_ms: int = 250

    @property
    def most_in_flight(self) -> int:
        """Requests in one worker: those it runs, and as many waiting, so that it never idles between two."""
        return 2 * self.max_running

    @staticmethod
    def of(job: JobFile) -> Config:
        return Config(max_running=job.rollout.max_running, admission_pause_ms=job.timeouts.admission_pause_ms)
