"""Expansion with a reclaim, or a death, in each of its stages: a test for each cell (paper 4.5).

Whatever comes when: reclaimed GPUs are free by their deadline, the cluster ends at what its budget allows, and workers whom
nothing of it concerned heard nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from messages.ids import Stage
from messages.node_agent import Kill, Launch
from messages.rollout_worker import Activate, Deactivate, Drain, SetRole
from tests.sim.cluster import Cluster, lending_job

LIFECYCLE = (Launch, Kill, Drain, SetRole, Activate, Deactivate)
NOTICE_MS = 1_500

Setup = Callable[[Cluster], None]


def expanding(cluster: Cluster) -> None:
    cluster.available("s0", 0, 1)


def planned(cluster: Cluster) -> None:
    expanding(cluster)
    cluster.run_until(lambda: cluster.row("s0-w0").stage is Stage.LAUNCHING)


def starting(cluster: Cluster) -> None:
    expanding(cluster)
    cluster.run_until(lambda: any(process.worker == "s0-w0" for process in cluster.processes))


def ready(cluster: Cluster) -> None:
    expanding(cluster)
    cluster.run_until(
        lambda: any(process.worker == "s0-w0" and getattr(process, "up", False) for process in cluster.processes)
    )


def loading(cluster: Cluster) -> None:
    starting(cluster)
    cluster.run_until(lambda: cluster.worker("s0-w0").state.loading is not None)


def prepared(cluster: Cluster) -> None:
    expanding(cluster)
    cluster.run_until(lambda: cluster.row("s0-w0").stage is Stage.PREPARED)


def applying(cluster: Cluster) -> None:
    expanding(cluster)
    cluster.run_until(lambda: cluster.table.plan is not None and cluster.table.plan.stage == "applying")


def role_set(cluster: Cluster) -> None:
    starting(cluster)
    cluster.run_until(lambda: cluster.worker("s0-w0").state.serving)


def serving(cluster: Cluster) -> None:
    expanding(cluster)
    cluster.run_until(lambda: cluster.settled and len(cluster.roles) == 4)


STAGES: tuple[Setup, ...] = (planned, starting, ready, loading, prepared, applying, role_set, serving)


def reclaim_one_with_notice(cluster: Cluster) -> None:
    cluster.reclaimed("s0", 0, notice_ms=NOTICE_MS)


def reclaim_one_at_once(cluster: Cluster) -> None:
    cluster.reclaimed("s0", 0)


def reclaim_all_with_notice(cluster: Cluster) -> None:
    cluster.reclaimed("s0", 0, 1, notice_ms=NOTICE_MS)


def reclaim_all_at_once(cluster: Cluster) -> None:
    cluster.reclaimed("s0", 0, 1)


def reclaim_taken_back(cluster: Cluster) -> None:
    cluster.reclaimed("s0", 0, notice_ms=NOTICE_MS)
    cluster.run(NOTICE_MS // 3)
    cluster.available("s0", 0)


def worker_killed(cluster: Cluster) -> None:
    for process in cluster.processes:
        if process.worker == "s0-w0":
            process.die()


def worker_hangs(cluster: Cluster) -> None:
    """And is reclaimed: it will not drain, and ignores SIGTERM."""
    for process in cluster.processes:
        if process.worker == "s0-w0":
            process.stuck |= {"all", "start", "load", "drain", "role"}
            process.stubborn = True
    cluster.reclaimed("s0", 0, notice_ms=NOTICE_MS)


def restart_of(name: str, *, reclaim: bool) -> Setup:
    def restart(cluster: Cluster) -> None:
        cluster.world.actors[name].restart()
        if reclaim:
            cluster.reclaimed("s0", 0, notice_ms=NOTICE_MS)

    restart.__name__ = f"{name}_restarted" + ("_and_reclaim" if reclaim else "")
    return restart


WRONG: tuple[Setup, ...] = (
    reclaim_one_with_notice, reclaim_one_at_once, reclaim_all_with_notice, reclaim_all_at_once, reclaim_taken_back,
    worker_killed, worker_hangs,
    *(
        restart_of(name, reclaim=reclaim)
        for name in ("cluster_rebuilder", "orchestrator", "elastic_scheduler", "node_agent-s0", "toggle_manager")
        for reclaim in (False, True)
    ),
)  # fmt: skip


def name_of(value: Setup) -> str:
    return value.__name__


@pytest.mark.parametrize("wrong", WRONG, ids=name_of)
@pytest.mark.parametrize("stage", STAGES, ids=name_of)
def test_cell(stage: Setup, wrong: Setup) -> None:
    cluster = Cluster(lending_job(), seed=STAGES.index(stage) * 100 + WRONG.index(wrong))
    cluster.run_until(lambda: cluster.settled and len(cluster.roles) == 2, what="the reserved workers serve")
    before = len(cluster.world.commands)
    stage(cluster)
    wrong(cluster)
    cluster.run(NOTICE_MS)
    gone: set[int] = (
        {0, 1} if "all" in wrong.__name__ else {0} if "reclaim" in wrong.__name__ or wrong is worker_hangs else set()
    )
    if wrong is reclaim_taken_back:
        gone = set()
    cluster.run(300)  # a signal, and its process's end
    for process in cluster.processes:
        assert process.worker not in {f"s0-w{gpu}" for gpu in gone}, f"{process.worker} lives past its deadline"
    expected = {"r0-w0", "r0-w1", *(f"s0-w{gpu}" for gpu in {0, 1} - gone)}
    cluster.run_until(
        lambda: cluster.settled and set(cluster.roles) == expected, 20_000, what=f"it ends with {expected}"
    )
    for worker in ("r0-w0", "r0-w1"):
        assert not cluster.commands_to(worker, *LIFECYCLE, since=before)
    if gone:
        cluster.available("s0", *gone)
        cluster.run_until(lambda: cluster.settled and len(cluster.roles) == 4, 20_000, what="it grows again")
