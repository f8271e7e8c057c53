"""The real decision engine in the whole cluster: it lends by its own gate, and training comes first."""

from __future__ import annotations

import msgspec
import pytest

from messages.ids import Residency
from messages.monitor import DecisionRecord, GpusReturned
from services.decision_engine.config import Config as DecisionConfig
from services.jobfile import DecisionSection
from tests.sim.cluster import Cluster, lending_job
from tests.sim.onlooker import Onlooker


def cluster_of(seed: int, toggle_guess_s: float, *, disaggregation: bool = False) -> Cluster:
    job = lending_job(training=2)
    section = DecisionSection(lending=True, toggle_guess_s=toggle_guess_s, disaggregation=disaggregation)
    job = msgspec.structs.replace(job, decision=section)
    return Cluster(job, seed=seed, decision=DecisionConfig.of(job))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("disaggregation", [False, True])
def test_gpus_are_lent_between_updates_and_back_in_time(seed: int, disaggregation: bool) -> None:
    cluster = cluster_of(seed, toggle_guess_s=0.001, disaggregation=disaggregation)
    onlooker = Onlooker(cluster)
    for batch in range(4):
        cluster.run_until(lambda: cluster.residencies == {Residency.ROLLOUT} and cluster.settled, what="lent")
        assert cluster.pipeline.begin() == batch
        cluster.run_until(lambda: cluster.pipeline.begun is None, what="trained")
        if batch == 1:
            cluster.available("s0", 0, 1)
        if batch == 2:
            cluster.reclaimed("s0", 0, notice_ms=1_000)
    returned = cluster.world.of(GpusReturned)
    assert [each.batch for each in returned] == [0, 1, 2, 3]
    assert all(each.at_ms <= each.deadline_ms for each in returned)
    assert not cluster.world.refusals
    assert cluster.table.writer.failed_plans == 0
    assert onlooker.violations + onlooker.checkers.finish() == []


def test_the_gate_holds_back_what_does_not_pay() -> None:
    cluster = cluster_of(0, toggle_guess_s=1e6)
    cluster.run_until(lambda: cluster.settled and len(cluster.roles) == 2)
    cluster.run(3_000)
    assert cluster.residencies == {Residency.TRAINING}
    (*_, record) = cluster.world.of(DecisionRecord)
    assert not record.borrow and "saves" in record.borrow_reason
