"""The router: where requests go, when they are told to wait, and the shell on the in-memory bus."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import msgspec
import pytest

from messages.agent import Assignment, NotNow
from messages.envelope import decode, encode
from messages.ids import (
    Activity,
    Epoch,
    Gpu,
    Incarnation,
    NodeId,
    PlanId,
    PolicyVersion,
    RequestId,
    Role,
    RoleGeneration,
    TrajectoryId,
    WorkerId,
    Zone,
)
from messages.monitor import DeadLetter
from messages.router import AssignRequest
from messages.runtime_tracker import WorkerHeartbeat
from messages.subjects import stream, subject_of
from pearl_state.model import RoleTable, Row
from services.jobfile import JobFile
from services.router.config import Config
from services.router.core import MOST_RANGES, ROOMS, RouterCore, Unplaceable
from services.router.service import MOST_DEAD_WAITING, Router
from services.runtime.bus import StreamSpec
from services.runtime.bus_memory import MemoryBroker

CONFIG = Config(max_running=8, admission_pause_ms=10_000, tokens_per_request=256)


def row(worker: str, **fields: object) -> Row:
    given = {
        "gpus": (Gpu(NodeId("n"), 0),),
        "zone": Zone.RESERVED,
        "role": Role.COLOCATED,
        "activity": Activity.ACTIVE,
        "incarnation": Incarnation(1),
        "role_generation": RoleGeneration(5),
        "version": PolicyVersion(3),
        **fields,
    }
    return Row(worker=WorkerId(worker), **given)


def table(*rows: Row, epoch: int = 1, paused: str | None = None) -> RoleTable:
    return RoleTable(
        job="t", epoch=Epoch(epoch), rows=rows, admission_paused=None if paused is None else PlanId(paused)
    )


def request(trajectory: str = "t0", **fields: object) -> AssignRequest:
    given = {"attempt": 1, "min_version": PolicyVersion(3), "context_tokens": 0, **fields}
    return AssignRequest(request=RequestId(f"{trajectory}/0"), trajectory=TrajectoryId(trajectory), **given)


def heartbeat(worker: str, running: int, incarnation: int = 1) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker=WorkerId(worker),
        incarnation=Incarnation(incarnation),
        running=running,
        queued=0,
        version=3,
        serving=True,
        decode_iterations=0,
        decode_tokens=0,
        decode_s=0.0,
        decode_batch_sum=0,
        prefill_tokens=0,
        prefill_s=0.0,
        refused=0,
        rss_bytes=0,
    )


def router(*rows: Row, config: Config = CONFIG) -> RouterCore:
    core = RouterCore(config, router_id=7)
    core.on_table(table(*rows), 0)
    return core


def placed(core: RouterCore, asked: AssignRequest, now_ms: int = 0) -> Assignment:
    reply = core.assign(asked, now_ms)
    assert isinstance(reply, Assignment), reply
    return reply


def waits(core: RouterCore, asked: AssignRequest, now_ms: int = 0) -> str:
    reply = core.assign(asked, now_ms)
    assert isinstance(reply, NotNow) and reply.retry_after_ms > 0, reply
    return reply.reason


def test_an_assignment_carries_the_fence_of_the_row() -> None:
    assignment = placed(router(row("a")), request(attempt=4))
    assert (assignment.worker, assignment.incarnation, assignment.role_generation) == ("a", 1, 5)
    assert (assignment.request, assignment.attempt, assignment.prefill_worker, assignment.room) == ("t0/0", 4, "", -1)


def test_without_table_or_worker_or_version_it_is_not_now() -> None:
    assert waits(RouterCore(CONFIG), request()) == "no role table yet"
    assert waits(router(row("a", activity=Activity.TRANSITIONING)), request()) == "no worker"
    assert waits(router(row("a", zone=Zone.TRAINING, role=Role.TRAINING)), request()) == "no worker"
    assert waits(router(row("a", version=PolicyVersion(2))), request()) == "no worker at version 3"
    mixed = router(row("a", version=PolicyVersion(2)), row("b"))
    assert {placed(mixed, request(f"t{index}")).worker for index in range(6)} == {"b"}


def test_new_requests_spread_over_equal_workers() -> None:
    core = router(*[row(name) for name in "abcd"])
    counts = Counter(placed(core, request(f"t{index}")).worker for index in range(32))
    assert set(counts.values()) == {8}


def test_the_least_loaded_by_heartbeat_and_own_assignments() -> None:
    core = router(row("a"), row("b"))
    core.on_heartbeat(heartbeat("a", 3))
    counts = Counter(placed(core, request(f"t{index}")).worker for index in range(5))
    assert counts == {"b": 4, "a": 1}
    core.on_heartbeat(heartbeat("b", 0))  # what it was given since is in its own count now
    assert placed(core, request("t9")).worker == "b"


def test_heartbeats_of_other_incarnations_and_strangers_are_ignored() -> None:
    core = router(row("a", incarnation=Incarnation(2)), row("b"))
    core.on_heartbeat(heartbeat("a", 7, incarnation=1))
    core.on_heartbeat(heartbeat("zz", 7))
    core.on_heartbeat(heartbeat("b", 1))
    assert placed(core, request()).worker == "a"


def test_a_session_stays_with_its_prefix_unless_clearly_more_loaded() -> None:
    core = router(row("a"), row("b"))
    core.on_heartbeat(heartbeat("a", 3))
    long = {"context_tokens": 2000, "last_worker": "a"}
    assert placed(core, request(**long)).worker == "a"
    assert placed(core, request("t1", context_tokens=0, last_worker="a")).worker == "b"  # nothing to lose
    core.on_heartbeat(heartbeat("a", 8))
    core.on_heartbeat(heartbeat("b", 0))
    assert placed(core, request(**long)).worker == "b"


def test_affinity_is_remembered_without_the_clients_hint_and_bounded() -> None:
    core = router(row("a"), row("b"), config=msgspec.structs.replace(CONFIG, most_sessions=3))
    first = placed(core, request("s", context_tokens=2000)).worker
    for _ in range(3):
        assert placed(core, request("s", context_tokens=2000)).worker == first
    for index in range(10):
        placed(core, request(f"t{index}"))
    assert len(core._sessions) == 3


def test_any_range_of_versions_is_served_and_few_are_remembered() -> None:
    core = router(*(row(f"w{version}", version=PolicyVersion(version)) for version in range(20)))
    for oldest in range(20):
        for newest in range(oldest, 20):
            asked = request(f"{oldest}-{newest}", min_version=PolicyVersion(oldest), max_version=PolicyVersion(newest))
            held = placed(core, asked)
            assert oldest <= int(held.worker[1:]) <= newest
            core.on_end(held)
    assert len(core._able_of) <= MOST_RANGES
    assert placed(core, request(min_version=PolicyVersion(19))).worker == "w19"
    core.on_table(table(row("w20", version=PolicyVersion(20))), 0)
    assert placed(core, request(min_version=PolicyVersion(19))).worker == "w20"


def test_avoided_workers_are_avoided_unless_there_is_no_other() -> None:
    core = router(row("a"), row("b"))
    for _ in range(4):
        assert placed(core, request(avoid=("a",), last_worker="a", context_tokens=9999)).worker == "b"
    assert placed(core, request(avoid=("a", "b"))).worker == "a"


def test_in_flight_is_bounded_a_worker() -> None:
    core = router(row("a"))
    for index in range(16):
        placed(core, request(f"t{index}"))
    assert waits(core, request("late")) == "all workers full"
    core.on_heartbeat(heartbeat("a", 15))
    placed(core, request("late"))
    assert waits(core, request("later")) == "all workers full"


def test_requests_known_to_have_ended_make_room_before_the_next_heartbeat() -> None:
    core = router(row("a"))
    for index in range(100):
        core.on_end(placed(core, request(f"t{index}")))
    held = [placed(core, request(f"u{index}")) for index in range(16)]
    assert waits(core, request("late")) == "all workers full"
    core.on_heartbeat(heartbeat("a", 16))
    core.on_end(held.pop())  # one that the heartbeat counted
    held.append(placed(core, request("late")))
    assert waits(core, request("later")) == "all workers full"
    core.on_heartbeat(heartbeat("a", 0))
    for each in held:  # the worker told of these ends sooner than their edges did
        core.on_end(each)
    core.on_table(table(row("a", incarnation=Incarnation(2)), epoch=2), 0)
    core.on_end(held[0])  # of the incarnation before
    for index in range(16):
        placed(core, request(f"v{index}"))
    assert waits(core, request("late")) == "all workers full"


def test_a_new_incarnation_starts_empty_and_a_worker_gone_is_dropped() -> None:
    core = router(row("a"), row("b"))
    core.on_heartbeat(heartbeat("a", 16))
    core.on_table(table(row("a", incarnation=Incarnation(2)), epoch=2), 0)
    assignment = placed(core, request(last_worker="b"))
    assert (assignment.worker, assignment.incarnation) == ("a", 2)


def test_admission_pause_holds_requests_for_a_bounded_time() -> None:
    core = router(row("a"))
    core.on_table(table(row("a"), epoch=2, paused="p1"), 1000)
    core.on_table(table(row("a"), epoch=3, paused="p1"), 5000)  # the same pause goes on
    assert waits(core, request(), 10_999) == "admission paused"
    placed(core, request(), 11_000)
    core.on_table(table(row("a"), epoch=4, paused="p2"), 20_000)
    assert waits(core, request(), 20_001) == "admission paused"
    core.on_table(table(row("a"), epoch=5), 21_000)
    placed(core, request(), 21_001)


def test_disaggregated_requests_get_a_prefill_worker_of_the_same_version_and_a_room() -> None:
    core = router(
        row("d0", role=Role.DECODE, version=PolicyVersion(4)),
        row("p0", role=Role.PREFILL, version=PolicyVersion(3), endpoint="old:1"),
        row("p1", role=Role.PREFILL, version=PolicyVersion(4), endpoint="h:1", role_generation=RoleGeneration(9)),
        row("p2", role=Role.PREFILL, version=PolicyVersion(4), endpoint="h:2"),
    )
    core.on_heartbeat(heartbeat("p1", 1))
    first, second = placed(core, request("a")), placed(core, request("b"))
    assert (first.worker, first.prefill_worker, first.prefill_endpoint) == ("d0", "p2", "h:2")
    assert first.room != second.room and first.room // ROOMS == 7
    core.on_heartbeat(heartbeat("p2", 9))
    third = placed(core, request("c"))
    assert (third.prefill_worker, third.prefill_role_generation) == ("p1", 9)


def test_prefill_workers_are_chosen_by_prefix_then_load() -> None:
    core = router(
        row("d0", role=Role.DECODE),
        row("d1", role=Role.DECODE),
        row("p0", role=Role.PREFILL, endpoint="h:0"),
        row("p1", role=Role.PREFILL, endpoint="h:1"),
    )
    first = {name: placed(core, request(name, context_tokens=2000)) for name in "abcd"}
    assert Counter(each.prefill_worker for each in first.values()) == {"p0": 2, "p1": 2}
    for name, before in first.items():  # the next turn goes to both workers that know the session
        again = placed(core, request(name, context_tokens=2000, last_worker=before.worker))
        assert (again.worker, again.prefill_worker) == (before.worker, before.prefill_worker)
    a = first["a"]
    core.on_heartbeat(heartbeat(a.prefill_worker, 12))
    clear = placed(core, request("a", context_tokens=2000, last_worker=a.worker))
    assert clear.worker == a.worker and clear.prefill_worker != a.prefill_worker
    avoided = placed(core, request("b", avoid=(clear.prefill_worker,), context_tokens=2000))
    assert avoided.prefill_worker == a.prefill_worker


def test_decode_workers_without_a_matching_prefill_worker_take_nothing() -> None:
    lonely = row("d0", role=Role.DECODE, version=PolicyVersion(4))
    assert waits(router(lonely, row("p0", role=Role.PREFILL)), request()) == "no worker at version 3"
    core = router(lonely, row("p0", role=Role.PREFILL), row("c0"))  # in transit: mixed tables are served
    assert {placed(core, request(f"t{index}")).worker for index in range(4)} == {"c0"}


def test_a_full_prefill_worker_is_back_pressure() -> None:
    core = router(row("d0", role=Role.DECODE), row("d1", role=Role.DECODE), row("p0", role=Role.PREFILL))
    for index in range(16):
        placed(core, request(f"t{index}"))
    assert waits(core, request("late")) == "all prefill workers full"


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": 0},
        {"min_version": -1},
        {"context_tokens": -1},
        {"last_worker": "x" * 300},
        {"avoid": tuple(str(index) for index in range(2000))},
    ],
)
def test_senseless_requests_are_unplaceable(change: dict) -> None:
    with pytest.raises(Unplaceable):
        router(row("a")).assign(request(**change), 0)
    with pytest.raises(Unplaceable):
        router(row("a")).assign(AssignRequest(
            request=RequestId(""), trajectory=TrajectoryId("t"), attempt=1, min_version=PolicyVersion(0), context_tokens=0
        ), 0)  # fmt: skip


def test_thousands_a_second() -> None:
    core = router(
        *[row(f"w{index}") for index in range(32)], config=msgspec.structs.replace(CONFIG, max_running=10_000)
    )
    asked = [request(f"t{index % 500}", context_tokens=1000) for index in range(2000)]
    began = time.process_time()
    for each in asked:
        core.assign(each, 0)
    assert time.process_time() - began < 1.0  # 0.03 s where this was written


async def test_the_shell_answers_dead_letters_and_stops() -> None:
    broker = MemoryBroker()
    bus = broker.connect()
    await bus.ensure_stream(StreamSpec(name=stream("t", "dead"), subjects=("pearl.t.dead.>",)))
    shell = Router(Config.of(JobFile()), broker.connect(), "t", clock=lambda: 5)
    shell.on_table(table(row("a"), row("b")))
    stop = asyncio.Event()
    running = asyncio.create_task(shell.run(stop))
    await asyncio.sleep(0)
    subject = subject_of("t", request())
    await bus.publish(subject_of("t", heartbeat("a", 50)), encode(heartbeat("a", 50)))
    await bus.publish(subject_of("t", heartbeat("a", 50)), b"not a heartbeat")
    reply = await bus.request(subject, encode(request()), 2.0)
    assert isinstance(decode(reply.data, Assignment, NotNow), Assignment)
    await bus.publish(subject, b"{nonsense", reply="nowhere")
    await bus.publish(subject, encode(request(attempt=-1)), reply="nowhere")
    await bus.publish(subject, encode(request()))  # no reply subject
    assert isinstance(
        decode((await bus.request(subject, encode(request("t2")), 2.0)).data, Assignment, NotNow), Assignment
    )
    letters: list[DeadLetter] = []
    for _ in range(200):
        letters = [decode(each.data, DeadLetter) async for each in bus.read(stream("t", "dead"), "pearl.t.dead.>")]
        if len(letters) == 3:
            break
        await asyncio.sleep(0)
    assert [letter.receiver for letter in letters] == ["router"] * 3 and letters[0].size == 9
    assert shell.refused == 4 and shell.assigned == 2
    for _ in range(2 * MOST_DEAD_WAITING):
        await bus.publish(subject, b"[", reply="nowhere")
    reply = await bus.request(subject, encode(request("t3")), 2.0)
    assert isinstance(decode(reply.data, Assignment, NotNow), Assignment)
    stop.set()
    await asyncio.wait_for(running, 5.0)
