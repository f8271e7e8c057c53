"""A batch's turns from the journal, checked: what training may rely on. Pure, without torch."""

from __future__ import annotations

from collections.abc import Mapping

from messages.agent import TurnFinished
from messages.pipeline_scheduler import BatchItem, BatchReady


class UnusableBatchError(Exception):
    """The journal does not hold what the batch's description refers to; the message names trajectory and sequence."""


def checked(ready: BatchReady, records: Mapping[int, TurnFinished]) -> list[list[TurnFinished]]:
    """The turns of each item; `records` maps journal sequences to turns. Raises UnusableBatchError.

    Every reference must be there, in turn order, of the right trajectory; every reply token must have a log-probability
    and a version, none newer than the version that the batch trains; some trajectory must have a reply token.
    """
    found = [_turns(item, records, ready.batch) for item in ready.items]
    if not any(turn.reply for turns in found for turn in turns):
        raise UnusableBatchError(f"batch {ready.batch}: none of its {len(found)} trajectories has a reply token")
    return found


def _turns(item: BatchItem, records: Mapping[int, TurnFinished], batch: int) -> list[TurnFinished]:
    turns: list[TurnFinished] = []
    for turn, seq in enumerate(item.journal):
        where = f"batch {batch}, {item.trajectory}, turn {turn}, journal sequence {seq}"
        record = records.get(seq)
        if record is None:
            raise UnusableBatchError(f"{where}: missing from the journal (purged, or never written)")
        if record.trajectory != item.trajectory or record.turn != turn:
            raise UnusableBatchError(f"{where}: holds turn {record.turn} of {record.trajectory}")
        if len(record.reply) != len(record.logprobs):
            raise UnusableBatchError(
                f"{where}: {len(record.reply)} reply tokens but {len(record.logprobs)} log-probabilities"
            )
        if turn == 0 and not record.prompt_new:
            raise UnusableBatchError(f"{where}: the first turn has no prompt")
        _check_versions(record, batch, where)
        turns.append(record)
    return turns


def _check_versions(record: TurnFinished, batch: int, where: str) -> None:
    """The spans must tile the reply."""
    end = 0
    for span in record.spans:
        if span.start != end or span.end < span.start:
            break
        end = span.end
    if end != len(record.reply):
        raise UnusableBatchError(f"{where}: its version spans {record.spans} do not cover {len(record.reply)} tokens")
    newest = max((int(span.version) for span in record.spans if span.end > span.start), default=batch)
    if newest > batch:
        raise UnusableBatchError(f"{where}: has tokens of version {newest}, newer than the batch may have")
