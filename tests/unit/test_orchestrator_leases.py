"""Missed heartbeats: who is lost, and when it is our own ears that were shut."""

from __future__ import annotations

from messages.ids import WorkerId
from messages.runtime_tracker import NodeHeartbeat
from services.orchestrator.leases import NodeLeases
from tests.unit.fake_cluster import FakeCluster

R = ["r0-w0", "r0-w1"]
LEASE = 3000


def beat(node: str, *workers: tuple[str, int]) -> NodeHeartbeat:
    return NodeHeartbeat(node=node, workers=tuple((WorkerId(worker), number) for worker, number in workers))


def test_silent_node_loses_its_workers():
    table = FakeCluster().grown(*R, "s0-w0").table
    leases = NodeLeases(LEASE, 0)
    lost: list[str] = []
    for now in range(0, 5001, 500):
        leases.heard(beat("r0", (R[0], 1), (R[1], 1)), now)
        lost = [each.worker for each in leases.lost(table, now)]
        assert (lost == []) is (now <= LEASE)
    assert lost == ["s0-w0"]


def test_launching_worker_needs_only_its_node():
    cluster = FakeCluster()
    cluster.target(usable=R, colocated=2)
    leases = NodeLeases(LEASE, 0)
    for now in range(0, 9001, 500):
        leases.heard(beat("r0"), now)
        assert leases.lost(cluster.table, now) == ()


def test_serving_worker_that_its_node_forgot_is_lost():
    table = FakeCluster().grown(*R).table
    leases = NodeLeases(LEASE, 0)
    for now in range(0, 4001, 500):
        leases.heard(beat("r0", (R[0], 1), (R[1], 0 if now else 1)), now)  # an older incarnation does not count
        lost = leases.lost(table, now)
    assert [(each.worker, each.incarnation) for each in lost] == [(R[1], 1)] and "not named" in lost[0].reason


def test_own_pause_is_no_silence_of_others():
    table = FakeCluster().grown(*R).table
    leases = NodeLeases(LEASE, 0)
    assert leases.lost(table, 500) == ()
    assert leases.lost(table, 60_000) == ()  # this process stood still
    for now in range(60_500, 63_001, 500):
        assert leases.lost(table, now) == ()
    assert len(leases.lost(table, 63_500)) == 2
    leases.renew_all(63_500)  # the bus came back
    assert leases.lost(table, 64_000) == ()


def test_training_rows_are_not_judged():
    cluster = FakeCluster()
    cluster.target(usable=[], training_batch=0)
    leases = NodeLeases(LEASE, 0)
    for now in range(0, 9001, 500):
        assert leases.lost(cluster.table, now) == ()
