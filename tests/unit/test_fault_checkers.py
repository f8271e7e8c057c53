"""Each checker of the fault simulation passes a sound run and finds what is planted in it.

`BREAKS` is the list of plants: the promise that must complain, and what is done to the record. A checker that cannot fail
would be worse than none, so every promise has at least one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from messages.agent import RequestInterrupted, RolloutTask, TurnFinished, VersionSpan
from messages.decision_engine import Leave
from messages.ids import Activity, Incarnation, PlanId, PolicyVersion, Role, RoleGeneration, Stage, WorkerId
from messages.monitor import DecisionRecord
from messages.node_agent import Kill, Launch
from messages.orchestrator import PlanProgress, RoleSet, TargetConfiguration, WeightsApplied, WorkerReady
from messages.pipeline_scheduler import BatchReady, StepFinished, TrajectoryCompleted, WeightsPublished
from messages.rollout_worker import Activate, Deactivate, Drain, Generate, SetRole
from pearl_state.model import RoleTable
from services.simulator.faults.check_plans import fewest_changes
from services.simulator.faults.checkers import PROMISES, Checkers
from services.simulator.faults.record import (
    ActorBegan,
    ActorEnded,
    Assigned,
    AttemptBegan,
    FaultBegan,
    FaultEnded,
    Generated,
    MemoryHeld,
    ProcessBegan,
    ProcessEnded,
    Received,
    RunEnded,
    Seen,
    Sent,
    Stored,
    TableSeen,
    TableWritten,
    Violation,
)
from tests.unit.fault_story import JOB, assign, sound_run

Record = list[Seen]
Edit = Callable[[Record], Record]


def judged(record: Record) -> list[Violation]:
    checkers = Checkers(JOB)
    found = [violation for seen in record for violation in checkers.see(seen)]
    return found + checkers.finish()


# --- ways to break a record


def _of(seen: Seen, kind: type[Any]) -> bool:
    return isinstance(seen, kind) or (isinstance(seen, (Stored, Sent)) and isinstance(seen.message, kind))


def places(record: Record, kind: type[Any]) -> list[int]:
    return [place for place, seen in enumerate(record) if _of(seen, kind)]


def change(kind: type[Any], number: int, **fields: Any) -> Edit:
    """Other fields in the record (or its message) number `number` of a kind."""

    def edit(record: Record) -> Record:
        place = places(record, kind)[number]
        seen = record[place]
        if isinstance(seen, (Stored, Sent)) and not isinstance(seen, kind):
            new: Seen = msgspec.structs.replace(seen, message=msgspec.structs.replace(seen.message, **fields))
        else:
            new = msgspec.structs.replace(seen, **fields)
        return [*record[:place], new, *record[place + 1 :]]

    return edit


def without(kind: type[Any], number: int) -> Edit:
    def edit(record: Record) -> Record:
        place = places(record, kind)[number]
        return [*record[:place], *record[place + 1 :]]

    return edit


def after(kind: type[Any], number: int, *seen: Any) -> Edit:
    """These records put in after one; a bare message is sent by "someone" if it is a command, else stored."""

    def edit(record: Record) -> Record:
        place = places(record, kind)[number]
        at_ms = record[place].at_ms
        return [*record[: place + 1], *(each(at_ms) for each in seen), *record[place + 1 :]]

    return edit


def sent(message: Any) -> Callable[[int], Seen]:
    return lambda at_ms: Sent(at_ms=at_ms, sender="someone", message=message)


def stored(message: Any, seq: int = 900) -> Callable[[int], Seen]:
    return lambda at_ms: Stored(at_ms=at_ms, sender="", seq=seq, message=message)


def seen(kind: type[Any], **fields: Any) -> Callable[[int], Seen]:
    return lambda at_ms: kind(at_ms=at_ms, **fields)


def again(kind: type[Any], number: int, **fields: Any) -> Edit:
    """A record once more, with other fields."""

    def edit(record: Record) -> Record:
        place = places(record, kind)[number]
        (changed,) = [each for number_, each in enumerate(change(kind, number, **fields)(record)) if number_ == place]
        return [*record[: place + 1], changed, *record[place + 1 :]]

    return edit


def tables(fix: Callable[[RoleTable], RoleTable], first: int, last: int | None = None) -> Edit:
    """The tables of these epochs (to the end) changed alike."""

    def edit(record: Record) -> Record:
        return [
            msgspec.structs.replace(each, table=fix(each.table))
            if isinstance(each, TableWritten) and first <= each.table.epoch <= (last or first)
            else each
            for each in record
        ]

    return edit


def rows(worker: str, **fields: Any) -> Callable[[RoleTable], RoleTable]:
    return lambda table: msgspec.structs.replace(
        table,
        rows=tuple(msgspec.structs.replace(row, **fields) if row.worker == worker else row for row in table.rows),
    )


def planned(**fields: Any) -> Callable[[RoleTable], RoleTable]:
    def fix(table: RoleTable) -> RoleTable:
        assert table.plan is not None
        return msgspec.structs.replace(table, plan=msgspec.structs.replace(table.plan, **fields))

    return fix


def both(*edits: Edit) -> Edit:
    def edit(record: Record) -> Record:
        for each in edits:
            record = each(record)
        return record

    return edit


def later(kind: type[Any], number: int, by_ms: int) -> Edit:
    """That record and all after it happen so much later."""

    def edit(record: Record) -> Record:
        place = places(record, kind)[number]
        return [*record[:place], *(msgspec.structs.replace(each, at_ms=each.at_ms + by_ms) for each in record[place:])]

    return edit


def epoch_of(condition: Callable[[RoleTable], bool]) -> int:
    return next(each.table.epoch for each in sound_run() if isinstance(each, TableWritten) and condition(each.table))


def _active(worker: str) -> Callable[[RoleTable], bool]:
    def is_active(table: RoleTable) -> bool:
        row = table.row(worker)
        return row is not None and row.activity is Activity.ACTIVE

    return is_active


GROWN = epoch_of(_active("r0-w0"))
LENT = epoch_of(_active("t0-w0"))
RETURNING = epoch_of(lambda table: table.plan is not None and table.plan.plan_id == "p3")
TRAINING = epoch_of(_active("t0-t0"))
FAILED = epoch_of(lambda table: table.writer.failed_plans == 1)
LAST = max(each.table.epoch for each in sound_run() if isinstance(each, TableWritten))
W0, ONE = WorkerId("r0-w0"), Incarnation(1)

BREAKS: dict[str, list[tuple[str, Edit]]] = {
    "11.1 single writer": [
        ("an epoch is written twice", again(TableWritten, 3)),
        ("an epoch falls", change(TableWritten, 4, table=RoleTable(job="story", epoch=1, rows=()))),  # type: ignore[arg-type]
        ("a second orchestrator writes on what it knew", both(
            change(TableWritten, 5, writer="other"), again(TableWritten, 4))),
        ("an epoch is lost", without(TableWritten, 5)),
        ("an input is forgotten", tables(
            lambda table: msgspec.structs.replace(
                table, writer=msgspec.structs.replace(table.writer, plans=-1)), LAST)),
        ("an incarnation falls", tables(rows("r0-w0", incarnation=0), LAST)),
        ("the policy version falls", tables(lambda table: msgspec.structs.replace(table, policy_version=0), LAST)),
    ],
    "11.1 watchers only go forward": [
        ("one goes back", change(TableSeen, 6, epoch=3)),
        ("one believes in a table that never was", change(TableSeen, -1, epoch=999)),
    ],
    "11.2 one phase per GPU": [
        ("the worker takes memory before the trainer let go", without(MemoryHeld, 4)),
        ("two rows use a GPU", tables(rows("t0-t0", activity=Activity.ACTIVE), LENT)),
        ("training is told while the worker holds", without(MemoryHeld, 6)),
        ("a slot's next process starts beside the old one", after(
            MemoryHeld, 2,
            seen(ProcessBegan, node="r0", worker=W0, incarnation=2, service="rollout_worker", gpus=(0,)))),
    ],
    "11.3 no half-ready worker is visible": [
        ("a worker that never said it is up", without(WorkerReady, 1)),
        ("without its role", without(RoleSet, 0)),
        ("without weights", without(WeightsApplied, 0)),
        ("one of a group alone", tables(
            rows("r0-w1", activity=Activity.TRANSITIONING, stage=Stage.PREPARED, role_generation=0), GROWN, LAST)),
        ("behind the current version", tables(
            lambda table: msgspec.structs.replace(table, policy_version=1), GROWN, LAST)),
        ("a lent one without device memory", without(MemoryHeld, 5)),
    ],
    "11.3 some topology serves": [
        ("all are cut though two waves would do", tables(
            lambda table: planned(remove=(), reassign=(assign("r0-w0", 3), assign("r0-w1", 3)))(
                rows("r0-w0", activity=Activity.TRANSITIONING, stage=Stage.SWITCHING, role_generation=2)(
                    rows("r0-w1", activity=Activity.TRANSITIONING, stage=Stage.SWITCHING, role_generation=2)(
                        table))), RETURNING)),
        ("two decode workers and no plan", tables(
            lambda table: rows("r0-w0", role=Role.DECODE)(rows("r0-w1", role=Role.DECODE)(table)), LAST)),
    ],
    "11.3 routed to active workers only": [
        ("a worker that is not active", change(Assigned, 0, worker="s0-w0")),
        ("another generation", change(Assigned, 0, role_generation=0)),
        ("a colocated one as decode worker", change(Assigned, 0, prefill="r0-w1")),
        ("below the least version", change(Assigned, 0, min_version=1)),
        ("by a table that never was", change(Assigned, 0, epoch=99)),
        ("by an older table than before", change(Assigned, 1, epoch=GROWN)),
        ("while admission is paused", change(Assigned, 0, epoch=LENT - 1)),
    ],
    "11.3 requests run under their fence only": [
        ("not where it was placed", change(AttemptBegan, 0, worker="r0-w1")),
        ("under another generation", change(AttemptBegan, 0, role_generation=2)),
        ("in a role it never had", change(AttemptBegan, 0, role=Role.DECODE)),
        ("with weights below the least", change(AttemptBegan, 0, version=-1)),
        ("twice", again(AttemptBegan, 0)),
        ("after it was drained", both(
            after(Assigned, 0, stored(RoleSet(worker=W0, incarnation=ONE, role=Role.DECODE,
                                              role_generation=RoleGeneration(2)))))),
        ("after its process ended", after(Assigned, 0, seen(ProcessEnded, node="r0", worker=W0, incarnation=1))),
    ],
    "11.4 no trajectory lost or twice": [
        ("a batch without one", change(BatchReady, 0, items=())),
        ("a trajectory that never ended", without(TrajectoryCompleted, 0)),
        ("a turn that is not in the journal", without(TurnFinished, 0)),
        ("it ended twice, differently", again(TrajectoryCompleted, 0, journal=(1,), turns=1)),
        ("two contents of a batch", again(BatchReady, 0, items=())),
        ("a batch trained that was never ready", change(StepFinished, 0, batch=1, version=2)),
        ("no batch trained", without(StepFinished, 0)),
        ("a member left behind", after(RolloutTask, 0, stored(
            RolloutTask(trajectory="b0-g0-m7", group="b0-g0", batch=0, retry=0, task_seed=1,  # type: ignore[arg-type]
                        sample_seed=7, min_version=PolicyVersion(0), temperature=1.0)))),
        ("a task never given", without(RolloutTask, 0)),
    ],
    "11.4 no delivered token is generated again": [
        ("an attempt begins from scratch", both(change(AttemptBegan, 1, start=0), change(Generated, 2, start=0))),
        ("an attempt skips tokens", both(change(AttemptBegan, 1, start=5), change(Generated, 2, start=5))),
        ("the client asks with less than it has", change(Generate, 1, prefix=[1])),
        ("a chunk is taken twice", again(Received, 0)),
        ("a chunk is missing", without(Received, 0)),
        ("tokens that no worker made", change(Generated, 0, count=2)),
        ("the journal says less than was received", change(RequestInterrupted, 0, received=2)),
        ("the reply is not what was received", change(TurnFinished, 0, reply=[0])),
        ("a dead agent receives", after(Received, 0, seen(ActorBegan, actor="agent-0", life=2))),
    ],
    "11.4 the journal comes first": [
        ("the next turn begins before", without(TurnFinished, 0)),
        ("two agents write one turn", again(TurnFinished, 0, request="b0-g0-m0/0/other")),
    ],
    "11.5 staleness bound": [
        ("a token of a later version", change(TurnFinished, 0, spans=(VersionSpan(PolicyVersion(1), 0, 6),))),
        ("a task admitted too early", change(RolloutTask, 0, batch=2, min_version=PolicyVersion(1))),
        ("a task that asks for less", change(RolloutTask, 0, min_version=-1)),
        ("tokens of no published version", change(Received, 0, version=7)),
        ("tokens whose version nobody knows", change(TurnFinished, 0, spans=(VersionSpan(PolicyVersion(0), 0, 3),))),
    ],
    "11.6 plans are minimal": [
        ("a survivor leaves and a role changes for nothing", tables(
            planned(reassign=(msgspec.structs.replace(assign("r0-w0", 3), role=Role.COLOCATED),)), RETURNING)),
        ("one that may stay is swapped for a newcomer", tables(planned(remove=(Leave(W0, 0),)), GROWN + 1)),
        ("for an older target", tables(planned(decision_id="d0"), RETURNING)),
    ],
    "11.6 untouched workers see no command": [
        ("drained without a cut", after(AttemptBegan, 0, sent(
            Drain(worker=W0, incarnation=ONE, role_generation=RoleGeneration(1))))),
        ("given a role that no plan gives", change(SetRole, 0, role=Role.PREFILL)),
        ("killed while every table wants it", after(AttemptBegan, 0, sent(
            Kill(worker=W0, incarnation=ONE, grace_ms=0, reason="")))),
        ("launched unasked", after(AttemptBegan, 0, sent(
            Launch(worker=W0, incarnation=Incarnation(2), gpus=(0,), service="rollout_worker")))),
        ("activated before it is lent", after(TableWritten, 0, sent(
            Activate(worker=WorkerId("t0-w0"), incarnation=ONE, role_generation=RoleGeneration(1))))),
        ("deactivated while it is lent", after(AttemptBegan, 0, sent(
            Deactivate(worker=WorkerId("t0-w0"), incarnation=ONE, role_generation=RoleGeneration(1))))),
        ("its generation moves", tables(rows("r0-w1", role_generation=5), LENT, LAST)),
        ("it is given up although it lives", tables(
            rows("r0-w1", activity=Activity.INACTIVE, stage=Stage.NONE), LAST)),
        ("it is cut by no plan", tables(
            rows("r0-w1", activity=Activity.TRANSITIONING, stage=Stage.DRAINING, role_generation=2), LAST)),
    ],
    "11.7 returns by their deadline": [
        ("reclaimed GPUs late", later(ProcessEnded, 0, 1_500)),
        ("lent GPUs late", later(MemoryHeld, 6, 6_000)),
        ("never", both(without(ProcessEnded, 0), later(RunEnded, 0, 5_000))),
    ],
    "11.8 a failed expansion leaves no trace": [
        ("it fails without a cause", without(PlanProgress, 0)),
        ("its joiner is visible", tables(
            rows("s0-w0", activity=Activity.ACTIVE, role_generation=1, version=1), FAILED, LAST)),
        ("another worker is touched", tables(
            rows("r0-w1", activity=Activity.TRANSITIONING, stage=Stage.SWITCHING, role_generation=2), FAILED, LAST)),
        ("admission stays paused", tables(
            lambda table: msgspec.structs.replace(table, admission_paused=PlanId("p4")), FAILED)),
    ],
    "11.9 decisions follow from their records": [
        ("the gate's sign", change(DecisionRecord, 0, borrow=False)),
        ("a cost that the gate ignores", change(DecisionRecord, 0, toggle_s=1e9)),
        ("another prediction", lambda record: change(
            DecisionRecord, 0, chosen=msgspec.structs.replace(_record(record).chosen, makespan_s=1.0))(record)),
        ("a candidate is missing", change(DecisionRecord, 0, candidates=())),
        ("something else was asked", change(TargetConfiguration, 0, colocated=1)),
        ("slots beyond the budget", change(TargetConfiguration, 1, usable=(W0, WorkerId("t0-w0")))),
        ("a decision without a record", without(DecisionRecord, 0)),
        ("a switch below its threshold", lambda record: change(
            DecisionRecord, 2, **_held_back(_record(record, 2)))(record)),
    ],
    "liveness": [
        ("work is left", change(RunEnded, 0, finished=False)),
        ("the target is never reached", both(
            tables(rows("r0-w1", activity=Activity.TRANSITIONING, stage=Stage.LAUNCHING), LAST),
            later(RunEnded, 0, 200_000))),
    ],
}  # fmt: skip


def _record(record: Record, number: int = 0) -> DecisionRecord:
    found = [each.message for each in record if isinstance(each, Stored) and isinstance(each.message, DecisionRecord)]
    return found[number]


def _held_back(record: DecisionRecord) -> dict[str, Any]:
    """A record changed so that it runs fewer workers than it may, with no threshold that would allow it."""
    small = next(option for option in record.candidates if option.feasible)
    return {"chosen": msgspec.structs.replace(small, colocated=1)}


PLANTS = [
    pytest.param(promise, edit, id=f"{promise}: {what}") for promise, plants in BREAKS.items() for what, edit in plants
]


def test_a_sound_run_passes() -> None:
    assert judged(sound_run()) == []


@pytest.mark.parametrize(("promise", "edit"), PLANTS)
def test_what_is_planted_is_found(promise: str, edit: Edit) -> None:
    found = judged(edit(sound_run()))
    assert promise in {violation.invariant for violation in found}, found


def test_every_promise_has_a_plant_and_a_name_of_its_own() -> None:
    names = [promise.name for promise in PROMISES]
    assert sorted(set(names)) == sorted(names)
    assert set(BREAKS) == set(names)


def test_what_is_counted_on_the_way() -> None:
    checkers = Checkers(JOB)
    for each in sound_run():
        checkers.see(each)
    checkers.finish()
    assert checkers.counts() == {
        "lost_with_edge": 0,
        "returns": 2,
        "latest_return_ms": 0,
        "staleness_most": 0,
        "decisions": 4,
    }


def test_what_a_killed_agent_had_not_journalled_is_counted_apart() -> None:
    killed = after(Received, 0, seen(ActorEnded, actor="agent-0"), seen(ActorBegan, actor="agent-0", life=2))(
        sound_run()
    )
    place = places(killed, ActorEnded)[-1]
    checkers = Checkers(JOB)
    for each in killed[: place + 2]:
        assert checkers.see(each) == []
    checkers.finish()
    assert checkers.counts()["lost_with_edge"] == 3


def test_time_in_which_the_node_agent_was_stopped_is_deducted() -> None:
    late = later(ProcessEnded, 0, 1_500)(sound_run())
    place = places(late, ProcessEnded)[0]
    at_ms = late[place - 1].at_ms
    frozen: Record = [
        *late[:place],
        FaultBegan(at_ms, 1, "freeze", "node_agent-s0", ""),
        FaultEnded(at_ms + 600, 1),
        *late[place:],
    ]
    assert judged(frozen) == []


def test_weights_published_late_are_no_excuse() -> None:
    """A token's version must have been published before it was made."""
    record = without(WeightsPublished, 0)(sound_run())
    assert "11.5 staleness bound" in {violation.invariant for violation in judged(record)}


def test_brute_force_counts_membership_and_roles() -> None:
    colocated, prefill, decode = (Role.COLOCATED, False), (Role.PREFILL, False), (Role.DECODE, False)
    joiner = (None, False)
    assert fewest_changes((colocated, colocated, joiner), (0, 0, 3)) == 1
    assert fewest_changes((decode, prefill, decode), (1, 1, 0)) == 1
    assert fewest_changes((decode, decode), (1, 1, 0)) == 1
    assert fewest_changes((decode, decode, prefill), (0, 0, 1)) == 3
    assert fewest_changes(((Role.DECODE, True),), (0, 1, 0)) == 1, "what was cut must be given its role anew"
