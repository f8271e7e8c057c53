"""From a batch's description and its journal to tensors."""

from __future__ import annotations

import msgspec
import pytest

from messages.agent import TurnFinished, VersionSpan
from messages.ids import GroupId, PolicyVersion, RequestId, TrajectoryId, WorkerId
from messages.pipeline_scheduler import BatchItem, BatchReady
from services.trainer.data import NO_VERSION, build
from services.trainer.turns import UnusableBatchError


def turn(trajectory: str, number: int, new: list[int], reply: list[int], spans: tuple[tuple[int, int, int], ...]):
    return TurnFinished(
        trajectory=TrajectoryId(trajectory),
        group=GroupId("g"),
        batch=3,
        retry=0,
        turn=number,
        request=RequestId(f"{trajectory}/{number}"),
        attempts=1,
        prompt_new=new,
        reply=reply,
        logprobs=[-0.5 * token for token in reply],
        spans=tuple(VersionSpan(PolicyVersion(version), start, end) for version, start, end in spans),
        finish="stop",
        action="",
        env_s=0.0,
        wall_s=0.0,
        worker=WorkerId("n0-w0"),
    )


def item(trajectory: str, reward: float, journal: tuple[int, ...]) -> BatchItem:
    return BatchItem(TrajectoryId(trajectory), GroupId("g"), reward, "completed", journal)


RECORDS = {
    5: turn("a", 0, [1, 2], [3, 4], ((2, 0, 1), (3, 1, 2))),
    6: turn("b", 0, [1], [7], ((3, 0, 1),)),
    9: turn("a", 1, [5], [6], ((3, 0, 1),)),
}
READY = BatchReady(batch=3, items=(item("a", 1.0, (5, 9)), item("b", 0.0, (6,))))


def test_turns_are_concatenated_and_replies_are_masked() -> None:
    batch = build(READY, RECORDS)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6], [1, 7, 0, 0, 0, 0]]
    assert batch.lengths.tolist() == [6, 2]
    assert batch.mask.tolist() == [[0, 1, 1, 0, 1], [1, 0, 0, 0, 0]]
    assert batch.behaviour.tolist() == [[0, -1.5, -2.0, 0, -3.0], [-3.5, 0, 0, 0, 0]]
    none = NO_VERSION
    assert batch.versions.tolist() == [[none, 2, 3, none, 3], [3, none, none, none, none]]
    assert batch.rewards == (1.0, 0.0)
    assert batch.groups == ("g", "g")
    assert batch.reply_tokens == 4
    assert batch.oldest_version == 2


def test_a_trajectory_without_turns_counts_in_its_group_only() -> None:
    batch = build(msgspec.structs.replace(READY, items=(*READY.items, item("c", 0.0, ()))), RECORDS)
    assert batch.lengths.tolist() == [6, 2, 1]
    assert batch.mask[2].sum() == 0
    assert len(batch.rewards) == 3


@pytest.mark.parametrize(
    ("records", "ready", "says"),
    [
        ({5: RECORDS[5], 6: RECORDS[6]}, READY, "batch 3, a, turn 1, journal sequence 9: missing"),
        ({**RECORDS, 9: RECORDS[6]}, READY, "sequence 9: holds turn 0 of b"),
        ({**RECORDS, 9: turn("a", 2, [5], [6], ((3, 0, 1),))}, READY, "holds turn 2 of a"),
        ({**RECORDS, 9: msgspec.structs.replace(RECORDS[9], logprobs=[])}, READY, "1 reply tokens but 0 log-prob"),
        ({**RECORDS, 5: turn("a", 0, [], [3], ((3, 0, 1),))}, READY, "the first turn has no prompt"),
        ({**RECORDS, 9: turn("a", 1, [5], [6, 7], ((3, 0, 1),))}, READY, "do not cover 2 tokens"),
        ({**RECORDS, 9: turn("a", 1, [5], [6], ((4, 0, 1),))}, READY, "version 4, newer than"),
        ({}, BatchReady(batch=3, items=(item("c", 0.0, ()),)), "none of its 1 trajectories has a reply token"),
    ],
)
def test_what_cannot_be_trained_on_is_named(records: dict[int, TurnFinished], ready: BatchReady, says: str) -> None:
    with pytest.raises(UnusableBatchError) as error:
        build(ready, records)
    assert says in str(error.value)
