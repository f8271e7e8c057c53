"""The chaos run's own arithmetic: what is drawn, which returns are late, what the report says."""

from __future__ import annotations

import itertools

import msgspec

from services import jobfile
from tests.integration.chaos.faults import BROKER, BROKER_REST_S, WEIGHTS, Inventory, draw
from tests.integration.chaos.hosts import Host
from tests.integration.chaos.job import job_text, outage_nodes, specs
from tests.integration.chaos.report import ChaosReport, Injected, Late, by_kind, quantile, to_json, to_text
from tests.integration.chaos.returns import Occupied, Outage, Reclaim, Return, deducted_ms, ended, returns_of

INVENTORY = Inventory(
    services=("orchestrator", "router", "node_agent-a"),
    agents=("node_agent-a",),
    workers=("a-w0", "b-w0"),
    trainers=("t-t0",),
    hosts=("0", "1", "2"),
    preemptible=("b",),
)


def test_the_same_seed_draws_the_same_faults_and_another_seed_others():
    assert draw(7, 600, 100, INVENTORY) == draw(7, 600, 100, INVENTORY)
    assert draw(7, 600, 100, INVENTORY) != draw(8, 600, 100, INVENTORY)


def test_faults_fill_the_time_and_every_kind_is_drawn():
    faults = draw(1, 3600, 700, INVENTORY)
    assert len(faults) == 700
    assert {fault.kind for fault in faults} == set(WEIGHTS)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert 3300 < faults[-1].at_s < 3900


def test_never_two_servers_at_once_and_never_a_target_that_is_broken_already():
    for seed in range(20):
        faults = draw(seed, 600, 105, INVENTORY)
        broker = [fault for fault in faults if fault.kind in BROKER]
        for one, following in itertools.pairwise(broker):
            assert following.at_s + 0.01 >= one.at_s + one.lasts_s + BROKER_REST_S
        for index, one in enumerate(faults):
            for other in faults[index + 1 :]:
                if other.target == one.target and other.kind != "kill_service":
                    assert other.at_s + 0.02 >= one.at_s + one.lasts_s


def test_no_partitions_where_hosts_are_not_separate():
    inventory = msgspec.structs.replace(INVENTORY, partitions=False)
    assert "partition" not in {fault.kind for fault in draw(1, 3600, 700, inventory)}


def test_a_return_is_late_by_what_its_agent_is_to_blame_for():
    late = Return(what="x", node="b", asked_ms=1000, deadline_ms=6000, done_ms=9000)
    assert late.late_ms([]) == 3000
    outages = [Outage("b", 2000, 4000), Outage("b", 3000, 5000), Outage("c", 0, 99_000), Outage("b", 8500, 99_000)]
    assert deducted_ms(late, outages) == 3500, "overlapping outages count once, and only within the return"
    assert late.late_ms(outages) == 0
    assert msgspec.structs.replace(late, done_ms=None).late_ms(outages) is None


def test_an_agent_that_was_killed_is_out_until_it_says_that_it_is_up():
    killed, paused = Outage("b", 1000, 1001, until_up=True), Outage("b", 5000, 6000)
    ups = [("b", 500), ("c", 1500), ("b", 4000), ("b", 9000)]
    assert [(each.begin_ms, each.end_ms) for each in ended([killed, paused], ups)] == [(1000, 4000), (5000, 6000)]
    assert ended([killed], []) == [killed]


def test_only_processes_that_held_reclaimed_gpus_must_leave_and_not_if_the_notice_is_taken_back():
    held = Occupied("b", (0,), "b-w0", 500, 7000)
    strangers = [
        Occupied("c", (0,), "c-w0", 500, None),
        Occupied("b", (1,), "b-w1", 500, None),
        Occupied("b", (0,), "b-w0", 10, 900),
        Occupied("b", (0,), "b-w0", 1500, None),
    ]
    reclaim = Reclaim("b", (0,), 1000, 5000)
    (found,) = returns_of([reclaim], [held, *strangers], [])
    assert (found.deadline_ms, found.done_ms) == (6000, 7000)
    assert returns_of([reclaim], [held], [Reclaim("b", (0,), 3000, 0)]) == []
    assert len(returns_of([reclaim], [held], [Reclaim("b", (0,), 8000, 0)])) == 1


def report(**changes: object) -> ChaosReport:
    return msgspec.structs.replace(
        ChaosReport(
            seed=1,
            minutes=1,
            seconds=61.0,
            faults=[
                Injected(number=1, kind="pause", target="router", at_s=1, lasted_s=2, recovered_s=0.5),
                Injected(number=2, kind="pause", target="agent", at_s=5, lasted_s=2, recovered_s=2.5),
                Injected(number=3, kind="kill_worker", target="a-w0", at_s=9, skipped="does not run now"),
            ],
            impossible={},
            zeros={"lost": 0, "duplicated": 0, "regenerated": 0},
            violations=[],
            staleness_max=1,
            staleness_allowed=1,
            completed=10,
            trained=2,
            tokens={},
            returns=3,
            late=[],
            at_target=True,
            settled_s=3.0,
            epochs=9,
            epochs_back=0,
            restarts={},
        ),
        **changes,
    )


def test_a_run_fails_for_each_thing_that_was_promised():
    assert report().problems == []
    for change in (
        {"zeros": {"lost": 1}},
        {"violations": ["turn_twice: ..."]},
        {"staleness_max": 2},
        {"late": [Late("x", 2000)]},
        {"at_target": False},
        {"faults": [Injected(number=1, kind="pause", target="router", at_s=1)]},
        {"epochs_back": 1},
    ):
        assert len(report(**change).problems) == 1, change


def test_the_report_counts_recoveries_by_kind_and_says_what_was_not_injected():
    made = report(impossible={"partition": "network namespaces need root"})
    assert by_kind(made.faults) == {"pause": {"count": 2, "p50_s": 0.5, "p99_s": 2.5, "most_s": 2.5}}
    said = msgspec.json.decode(to_json(made))
    assert (said["injected"], said["problems"], said["recovery"]["pause"]["count"]) == (2, [], 2)
    text = to_text(made)
    assert "everything held" in text and "NOT INJECTED partition: network namespaces need root" in text
    assert "does not run now" in text


def test_quantiles_are_nearest_rank():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile([1.0], 0.01) == 1.0


def test_the_job_is_valid_and_every_node_has_an_agent_on_its_host(tmp_path):
    hosts = tuple(Host(index, f"10.0.0.{index}", 4222) for index in range(3))
    path = tmp_path / "job.toml"
    path.write_text(job_text(tmp_path, hosts, 3, 4.0))
    job = jobfile.load(path)
    assert (job.nats.replicas, len(job.nats.cluster)) == (3, 3)
    names = [spec.name for spec in specs()]
    assert len(set(names)) == len(names)
    for host in range(3):
        for node in outage_nodes(job, host):
            assert next(spec for spec in specs() if spec.name == f"node_agent-{node}").host == host
