"""What an agent reads of the job file."""

from __future__ import annotations

import msgspec

from services.jobfile import JobFile

PROGRESS_SHARE = 3
"""A task's acknowledgement is extended this often within its wait, so that one lost extension loses no task."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in tokens, times as named."""

    job: str
    concurrency: int  # episodes in flight in this process
    max_ack_pending: int  # tasks in flight in all processes
    silence_ms: int
    ack_wait_s: float
    max_turns: int
    max_new_tokens: int  # a turn
    max_context_tokens: int
    environment_timeout_s: float
    newest_version: int  # the policy after the last train step

    @staticmethod
    def of(job: JobFile) -> Config:
        """The configuration of a job."""
        return Config(
            job=job.job.name,
            concurrency=job.agent.concurrency,
            max_ack_pending=max(1000, job.agent.processes * job.agent.concurrency),
            silence_ms=job.agent.silence_ms,
            ack_wait_s=job.agent.task_ack_wait_ms / 1000,
            max_turns=job.pipeline.max_turns,
            max_new_tokens=job.pipeline.max_new_tokens,
            max_context_tokens=job.pipeline.max_context_tokens,
            environment_timeout_s=job.environment.timeout_s,
            newest_version=job.pipeline.train_steps,
        )
