"""Anything, in any order: GPUs come, go and flap, targets change, training asks, processes and actors die, old events are
delivered again. At the end what was wished for last is there, and the batch is trained.

What must hold at every moment is asserted by the orchestrator's core (each epoch), by the cluster (no GPU held twice), and
checked by the independent checkers (`services/simulator/faults/checkers.py`).
"""

from __future__ import annotations

import pytest

from messages.ids import Activity, Residency, Role, Stage
from messages.node_agent import Kill, Launch
from messages.orchestrator import WeightsApplied
from services.runtime.core import Input
from tests.sim.cluster import Cluster, lending_job
from tests.sim.onlooker import Onlooker

SEEDS = (*range(16), 129, 146, 182, 460, 520)
"""The last ones have once found something."""
ACTIONS = 40


def deliver_again(cluster: Cluster) -> None:
    """An acknowledgement was lost with a connection: the orchestrator gets events it had long ago."""
    events = [event for event in cluster.world.events if isinstance(event.message, cluster.orchestrator.inputs)]
    if not events or not cluster.orchestrator.alive:
        return
    for event in cluster.world.random.choices(events[-80:], k=3):
        cluster.orchestrator.take(Input(cluster.world.now_ms, event.message, event.seq, True))


def command_again(cluster: Cluster) -> None:
    """Commands that were on their way for long arrive now, whoever lives in the slot."""
    world = cluster.world
    for command in world.random.choices(world.commands[-60:], k=3) if world.commands else ():
        worker = getattr(command.message, "worker", "")
        if not worker or isinstance(command.message, (Launch, Kill)):
            continue
        receiver = world.receivers.get(f"worker/{worker}")
        if receiver is not None:
            receiver(command.message)


def something(cluster: Cluster) -> None:
    random, world = cluster.world.random, cluster.world
    match random.randint(0, 11):
        case 0 | 1:
            cluster.available("s0", *random.choice(((0,), (1,), (0, 1))))
        case 2 | 3:
            cluster.reclaimed("s0", *random.choice(((0,), (1,), (0, 1))), notice_ms=random.choice((0, 40, 900, 2_500)))
        case 4:
            cluster.reclaimed("s0", 0, notice_ms=random.choice((0, 1_000)))
            cluster.available("s0", 0)
            if random.random() < 0.5:
                cluster.reclaimed("s0", 0, notice_ms=1_500)
        case 5 | 6:
            prefill, decode = random.choice(((0, 0), (1, 1), (1, 2), (2, 1)))
            cluster.wish(borrow=random.random() < 0.7, prefill=prefill, decode=decode)
        case 7:
            if cluster.pipeline.begun is None:
                cluster.pipeline.begin()
        case 8:
            if cluster.processes:
                random.choice(cluster.processes).die()
        case 9:
            actor = world.actors[random.choice(sorted(world.actors))]
            if actor.alive and actor.name != "decision_engine":
                actor.restart(random.choice((50, 300, 900)))
        case 10:
            deliver_again(cluster)
        case _:
            command_again(cluster)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_wished_last_is_there_in_the_end(seed: int) -> None:
    cluster = Cluster(lending_job(training=2), seed=seed, loss=0.1 * (seed % 3))
    onlooker = Onlooker(cluster)
    for _ in range(ACTIONS):
        cluster.run(cluster.world.random.choice((0, 5, 30, 120, 600, 2_500)))
        something(cluster)
    cluster.run(3_000)
    cluster.wish()
    cluster.run_until(lambda: cluster.settled and cluster.pipeline.begun is None, 120_000, what="it settles")
    batch = cluster.pipeline.begin()
    cluster.run_until(lambda: cluster.pipeline.trained > batch, 60_000, what="a batch is trained")
    cluster.wish(borrow=True)
    cluster.run_until(lambda: cluster.settled and "t0-w0" in cluster.roles, 60_000, what="training's GPUs are lent")
    every_active_worker_serves_what_its_row_says(cluster)
    assert onlooker.violations == []


def every_active_worker_serves_what_its_row_says(cluster: Cluster) -> None:
    cluster.run(1_000)
    for row in cluster.table.rows:
        if row.activity is Activity.ACTIVE and row.role is not Role.TRAINING:
            state = cluster.worker(row.worker).state
            assert (state.serving, state.role, state.role_generation) == (True, row.role, row.role_generation)
            assert state.version >= row.version, f"{row.worker} has version {state.version}, its row says {row.version}"


def test_weights_of_an_earlier_borrow_that_are_reported_again_prepare_nobody() -> None:
    """An overlap process lives through many borrows: its incarnation does not tell one from the next."""
    cluster = Cluster(lending_job(training=1))
    for _ in range(2):
        cluster.wish(borrow=True)
        cluster.run_until(lambda: cluster.settled and "t0-w0" in cluster.roles, what="lent")
        cluster.wish()
        cluster.run_until(lambda: cluster.residencies == {Residency.FREE} and cluster.settled, what="given back")
    cluster.wish(borrow=True)
    cluster.run_until(lambda: cluster.row("t0-w0").stage is Stage.LAUNCHING)
    for event in list(cluster.world.events):
        if isinstance(event.message, WeightsApplied) and event.message.worker == "t0-w0":
            cluster.orchestrator.take(Input(cluster.world.now_ms, event.message, event.seq, True))
    cluster.run_until(lambda: cluster.settled and "t0-w0" in cluster.roles, what="lent once more")
