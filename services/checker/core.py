"""What a run must satisfy, judged from its records alone (docs/protocol.md, last section; DESIGN 7 and 11). Pure.

Written apart from what it checks: it shares the wire types with it and nothing else. Each rule looks for one way in
which a trajectory can be lost or counted twice, a token be made twice, or a batch be too stale.
"""

from __future__ import annotations

from collections.abc import Iterable

from messages.agent import AttemptLogged, RequestInterrupted, TurnFinished
from messages.pipeline_scheduler import BatchReady, StepFinished, TrajectoryCompleted
from services.checker.core_batches import check_batches, check_left_behind, check_staleness, check_steps, unique_batches
from services.checker.core_report import EVALUATION, Expected, Found, Journalled, Report
from services.checker.core_requests import check_requests
from services.checker.core_trajectories import check_ends, check_turns, unique_ends


def check(
    expected: Expected,
    *,
    journal: Iterable[Journalled],
    attempts: Iterable[AttemptLogged],
    ends: Iterable[TrajectoryCompleted],
    batches: Iterable[BatchReady],
    steps: Iterable[StepFinished],
) -> Report:
    """Judge a run, finished or not. Every record as it is in its stream, in stream order, repetitions included."""
    found = Found()
    records, logged, steps = tuple(journal), tuple(attempts), tuple(steps)
    turns = [(entry.seq, entry.record) for entry in records if isinstance(entry.record, TurnFinished)]
    interruptions = [entry.record for entry in records if isinstance(entry.record, RequestInterrupted)]
    by_try = unique_ends(found, ends)
    by_batch = unique_batches(found, batches)
    check_steps(found, expected, steps, by_batch)
    check_turns(found, turns)
    check_ends(found, expected, by_try, dict(turns))
    check_batches(found, expected, by_batch, by_try, {entry.seq: entry.at_ms for entry in records})
    check_requests(found, expected, [record for _, record in turns], interruptions, logged, by_try)
    check_staleness(found, expected, by_batch, by_try, [record for _, record in turns])
    check_left_behind(found, by_batch, by_try, [record for _, record in turns])
    counted = [end for end in by_try.values() if not end.trajectory.startswith(EVALUATION)]
    return Report(
        completed=len({end.trajectory for end in counted if end.status != "failed"}),
        failed=sum(end.status == "failed" for end in counted),
        lost=len(found.lost),
        duplicated=found.duplicated,
        delivered=sum(len(record.reply) for _, record in turns),
        regenerated=found.regenerated,
        undelivered=found.undelivered,
        lost_with_edge=found.lost_with_edge,
        interrupted=len(interruptions),
        redone=found.redone,
        forgotten=found.forgotten,
        unseen=found.unseen,
        unjudged=expected.unjudged,
        staleness_max=found.staleness_max,
        batches=len(by_batch),
        trained=len({step.batch for step in steps}),
        violations=tuple(found.violations),
    )
