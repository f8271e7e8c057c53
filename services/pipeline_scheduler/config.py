"""What the pipeline scheduler reads of the job file."""

from __future__ import annotations

import msgspec

from services.jobfile import JobFile


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in trajectories, times in milliseconds."""

    seed: int
    batch_trajectories: int
    group_size: int
    staleness: int
    train_steps: int
    early_start: bool
    in_flight: float = 1.0  # with early start, so many batches' trajectories may be in flight
    max_retries: int
    temperature: float
    evaluate_every: int
    evaluate_episodes: int
    command_retry_ms: int
    update_patience_ms: int  # an update that some worker has not applied by then no longer holds the others up

    @property
    def groups(self) -> int:
        """Groups a batch."""
        return self.batch_trajectories // self.group_size

    @property
    def most_in_flight(self) -> int:
        """Trajectories, of all batches together: never less than one batch, or it could not be completed."""
        return int(self.batch_trajectories * (max(1.0, self.in_flight) if self.early_start else 1.0))

    @staticmethod
    def of(job: JobFile) -> Config:
        """The configuration of a job."""
        pipeline = job.pipeline
        return Config(
            seed=job.job.seed,
            batch_trajectories=pipeline.batch_trajectories,
            group_size=pipeline.group_size,
            staleness=pipeline.staleness,
            train_steps=pipeline.train_steps,
            early_start=pipeline.early_start,
            in_flight=pipeline.in_flight,
            max_retries=pipeline.max_retries,
            temperature=pipeline.temperature,
            evaluate_every=pipeline.evaluate_every,
            evaluate_episodes=pipeline.evaluate_episodes,
            command_retry_ms=job.timeouts.command_retry_ms,
            update_patience_ms=job.timeouts.apply_ms,
        )
