"""Events that may have been refused, where the dead letters that would tell are gone: they are evidence, and not judged. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from messages.pipeline_scheduler import BatchItem, BatchReady, TrajectoryCompleted
from services.checker.core_report import Try


def without_doubtful(
    doubtful: Sequence[TrajectoryCompleted], sure: Sequence[TrajectoryCompleted], batches: Iterable[BatchReady]
) -> tuple[TrajectoryCompleted, ...]:
    """The ends to judge, in stream order: all that are sure, and of the doubtful, which are older, those that a batch counts.

    A batch is the pipeline scheduler's own record of the ends that it took: one that it counts was not refused.
    """
    counted = {item.trajectory: (batch.batch, item) for batch in batches for item in batch.items}
    taken: set[Try] = {(end.trajectory, end.retry) for end in sure}
    kept: list[TrajectoryCompleted] = []
    for end in doubtful:
        key = (end.trajectory, end.retry)
        if key not in taken and end.trajectory in counted and _is(end, *counted[end.trajectory]):
            taken.add(key)
            kept.append(end)
    return (*kept, *sure)


def _is(end: TrajectoryCompleted, batch: int, item: BatchItem) -> bool:
    said = (end.batch, end.group, end.status, end.reward, end.journal)
    return said == (batch, item.group, item.status, item.reward, item.journal)
