"""What sections 4.1.2 to 4.6 of the paper narrate, one scenario a claim, on every service's real code (simulated cluster).

Each scenario asserts its claim, has the independent checkers watch, and compares the story of its transcript with the file beside
this one: who is moved, planned and told what. Times, epochs and which requests run where may differ; they move with every change of
how long something takes. The files are there to be read. After a change that is meant: `python -m tests.scenarios.test_scenarios`,
then read the diff.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from messages.agent import RequestInterrupted
from messages.envelope import Message
from messages.ids import Activity, Residency, Stage
from messages.monitor import DecisionRecord, GpusReturned
from messages.node_agent import Kill, Launch
from messages.orchestrator import PlanProgress, TargetConfiguration, WeightsApplied, WorkerDrained, WorkerGone
from messages.pipeline_scheduler import BatchReady, StepFinished
from messages.rollout_worker import Drain
from messages.trainer import TrainerResume
from pearl_state.model import RoleTable
from services.jobfile import JobFile
from services.simulator.faults.check_decisions import Explained
from services.simulator.faults.checkers import PROMISES, Checkers
from services.simulator.faults.cluster import Cluster, small_job
from services.simulator.faults.record import AttemptBegan, Received, Seen, Sent, Stored, TableWritten, Violation
from tests.scenarios.transcript import story, transcript

HERE = Path(__file__).parent
SEED = 1


class Scene:
    """A cluster with everyone watching. `begin` marks where the transcript starts."""

    def __init__(self, job: JobFile, *, scripted: bool = True) -> None:
        # A scripted decision engine follows no models, so there is nothing to explain.
        promises = [promise for promise in PROMISES if not (scripted and promise is Explained)]
        self.checkers = Checkers(job, promises)
        self.violations: list[Violation] = []
        self.since_ms = self._since = 0
        self.cluster = Cluster(job, seed=SEED, scripted=scripted, watch=self._watch)

    def _watch(self, seen: Seen) -> None:
        self.violations += self.checkers.see(seen)

    def begin(self) -> None:
        self.since_ms, self._since = self.cluster.now_ms, len(self.cluster.record)

    # --- what one asserts on, from the mark on

    @property
    def record(self) -> list[Seen]:
        return self.cluster.record[self._since :]

    @property
    def text(self) -> str:
        """The transcript."""
        return transcript(self.cluster.record, self._since, self.since_ms)

    @property
    def tables(self) -> list[RoleTable]:
        return [seen.table for seen in self.record if isinstance(seen, TableWritten)]

    def sent(self, *kinds: type[Message]) -> list[Any]:
        return [seen.message for seen in self.record if isinstance(seen, Sent) and isinstance(seen.message, kinds)]

    def stored(self, *kinds: type[Message]) -> list[Any]:
        return [seen.message for seen in self.record if isinstance(seen, Stored) and isinstance(seen.message, kinds)]

    def place(self, found: Callable[[Seen], bool]) -> int:
        """Where in the record something is first seen."""
        return next(place for place, seen in enumerate(self.record) if found(seen))


def grown(scene: Scene) -> Cluster:
    """The reserved workers serve, and episodes run."""
    cluster = scene.cluster
    cluster.run_until(lambda: cluster.settled and len(cluster.roles) >= 2, what="the reserved workers serve")
    return cluster


def a_training_step(scene: Scene) -> None:
    """4.1.2, 4.6: idle training GPUs are borrowed; Training Begin takes them back at once, the update runs, weights are
    synchronised, and the grown budget lets them be borrowed again."""
    cluster = grown(scene)
    scene.begin()
    cluster.wish(borrow=True)
    cluster.run_until(lambda: "t0-w0" in cluster.roles, what="lent")
    cluster.run_until(lambda: cluster.trained >= 0, 60_000, what="batch 0 is trained")

    (returned, *_) = scene.stored(GpusReturned)
    assert returned.at_ms <= returned.deadline_ms, "returning is bounded"
    free = scene.place(lambda seen: isinstance(seen, TableWritten) and seen.table.training_batch == 0)
    told = scene.place(lambda seen: isinstance(seen, Sent) and isinstance(seen.message, TrainerResume))
    assert free < told, "training is told after its GPUs are its own"
    drained = [fact.worker for fact in scene.stored(WorkerDrained)]
    assert drained[0] == "t0-w0" and "r0-w0" not in drained, "only the borrowed worker was asked to go"
    assert not scene.sent(Launch, Kill), "processes are retained across the hand-overs"


def an_arrival(scene: Scene) -> None:
    """4.5: newcomers initialise in the background while everyone else serves, then the whole group is admitted at once."""
    cluster = grown(scene)
    scene.begin()
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: {"s0-w0", "s0-w1"} <= set(cluster.roles), what="both serve")
    cluster.run_until(lambda: cluster.settled)

    admitted = [table for table in scene.tables if "s0-w0" in _serving(table) or "s0-w1" in _serving(table)]
    assert {"s0-w0", "s0-w1"} <= _serving(admitted[0]), "the group is admitted in one epoch"
    assert all({"r0-w0", "r0-w1"} <= _serving(table) for table in scene.tables), "the others never stop serving"
    began = [seen for seen in scene.record if isinstance(seen, AttemptBegan)]
    first = scene.place(lambda seen: isinstance(seen, TableWritten) and "s0-w0" in _serving(seen.table))
    assert any(scene.record.index(seen) < first for seen in began), "requests run meanwhile"
    assert not any(seen.worker.startswith("s0") for seen in began if scene.record.index(seen) < first)


def a_reclaim(scene: Scene) -> None:
    """4.5, shrinking: dispatch stops, unfinished requests are interrupted and keep what they have, the GPUs go back within
    the notice, and the requests go on elsewhere from their partial trajectories."""
    cluster = grown(scene)
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: cluster.settled and "s0-w1" in cluster.roles)
    cluster.run_until(lambda: _runs_on(cluster, "s0-w0", 2), what="a reply is under way on s0-w0")
    scene.begin()
    cluster.reclaimed("s0", 0, notice_ms=2_000)
    cluster.run_until(lambda: "s0-w0" not in {started.worker for started in cluster.processes}, what="it is gone")
    cluster.run_until(lambda: cluster.settled)
    cluster.run(1_500)

    cut = [cut for cut in scene.stored(RequestInterrupted) if cut.worker == "s0-w0"]
    kept = [each for each in cut if each.received]
    assert kept, "something was interrupted half-way"
    resumed = {(seen.request, seen.start) for seen in scene.record if isinstance(seen, AttemptBegan)}
    assert any((each.request, each.prefix_len + each.received) in resumed for each in kept), (
        "it went on from its prefix"
    )
    (gone,) = [fact for fact in scene.stored(WorkerGone) if fact.worker == "s0-w0"]
    assert "reclaimed" not in gone.reason, "it had gone before the deadline took it"
    assert {command.worker for command in scene.sent(Drain)} == {"s0-w0"}, "nobody else hears of it"


def a_reclaim_without_notice(scene: Scene) -> None:
    """4.5, 4.4: GPUs that vanish: the node agent ends what runs, the table follows, requests go on elsewhere."""
    cluster = grown(scene)
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: cluster.settled and "s0-w1" in cluster.roles)
    cluster.run_until(lambda: _runs_on(cluster, "s0-w0", 2), what="a reply is under way on s0-w0")
    scene.begin()
    cluster.reclaimed("s0", 0)
    cluster.run_until(lambda: "s0-w0" not in cluster.roles)
    cluster.run_until(lambda: cluster.settled)
    cluster.run(1_500)

    (gone,) = [fact for fact in scene.stored(WorkerGone) if fact.worker == "s0-w0"]
    assert gone.reason == "killed:reclaimed"
    assert any(seen.start > 0 for seen in scene.record if isinstance(seen, AttemptBegan)), "prefixes live at the edge"


def a_reclaim_during_expansion(scene: Scene) -> None:
    """4.4.1 and DESIGN 4: a newcomer is reclaimed while it prepares; the group is planned again without it and joins."""
    cluster = grown(scene)
    scene.begin()
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: cluster.row("s0-w1").stage is Stage.LAUNCHING)
    cluster.run(100)
    cluster.reclaimed("s0", 1, notice_ms=1_000)
    cluster.run_until(lambda: cluster.settled and "s0-w0" in cluster.roles)

    assert not any("s0-w1" in _serving(table) for table in scene.tables), "it was never visible"
    launches = {(command.worker, command.incarnation) for command in scene.sent(Launch)}
    assert launches == {("s0-w0", 1), ("s0-w1", 1)}, "the other one's process was adopted, not started again"
    assert scene.tables[-1].writer.failed_plans == 0, "a newer target is no failure"


def the_last_prefill_worker_leaves(scene: Scene) -> None:
    """4.2, 4.3.2: a shrink that takes the last prefill worker re-roles the survivors in the same plan, without hysteresis."""
    cluster = scene.cluster
    cluster.available("s0", 0, 1)
    cluster.available("s1", 0)
    cluster.run(300)
    cluster.wish(prefill=1, decode=2)
    cluster.run_until(lambda: cluster.settled and len(cluster.roles) == 3, what="disaggregated")
    assert [worker for worker, role in cluster.roles.items() if role == "prefill"] == ["s0-w0"]
    cluster.run_until(lambda: _runs_on(cluster, "s0-w1", 4), what="a reply is under way on a decode worker")
    scene.begin()
    cluster.reclaimed("s0", 0, notice_ms=1_500)
    cluster.run_until(lambda: "s0-w0" not in cluster.roles, what="the prefill worker has left")
    cluster.run_until(lambda: _serves(set(cluster.roles.values())), what="some topology serves again")
    cluster.run(1_000)

    plan = next(table.plan for table in scene.tables if table.plan is not None)
    assert [leave.worker for leave in plan.remove] == ["s0-w0"]
    assert {entry.worker for entry in plan.reassign} == {"s0-w1", "s1-w0"}, "in the same plan"
    assert set(cluster.roles.values()) == {"colocated"}
    assert any(seen.start > 0 for seen in scene.record if isinstance(seen, AttemptBegan)), "replies went on"


def a_superseded_plan(scene: Scene) -> None:
    """4.4.1 and DESIGN 4: while newcomers prepare, a newer target takes over what it still wants and drops the rest."""
    cluster = grown(scene)
    scene.begin()
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: cluster.row("s0-w0").stage is Stage.LAUNCHING)
    cluster.available("s1", 0)
    cluster.run_until(lambda: cluster.settled and len(cluster.roles) == 5)

    first = next(table.plan for table in scene.tables if table.plan is not None)
    assert {entry.worker for entry in first.add} == {"s0-w0", "s0-w1"}
    assert all(row.incarnation == 1 for row in cluster.table.rows if row.worker.startswith("s")), "nobody started twice"
    assert cluster.table.writer.plans > 2 and cluster.table.writer.failed_plans == 0


def the_gate_refuses(scene: Scene) -> None:
    """4.6, eq. 7: borrowing that would cost more than it saves does not happen, and its record says by how much."""
    cluster = grown(scene)
    scene.begin()
    cluster.run_until(lambda: cluster.trained >= 0, 60_000, what="batch 0 is trained")

    assert all(pair.residency is Residency.TRAINING for table in scene.tables for pair in table.pairs)
    records = [record for record in cluster.events(DecisionRecord) if record.overlap_workers]
    assert records and not any(record.borrow for record in records)
    assert "toggling costs" in records[-1].borrow_reason


def a_failed_expansion(scene: Scene) -> None:
    """4.5: one newcomer that cannot initialise cancels the whole expansion; nobody of the group was ever visible."""
    cluster = grown(scene)
    before = dict(cluster.roles)
    scene.begin()
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: any(started.worker == "s0-w1" for started in cluster.processes))
    cluster.worker("s0-w1").engine.stuck.add("start")
    cluster.run_until(lambda: cluster.table.writer.failed_plans == 1, 30_000, what="the expansion fails")

    assert cluster.roles == before, "the table is as it was"
    assert not any(_serving(table) & {"s0-w0", "s0-w1"} for table in scene.tables)
    (failed,) = [report for report in scene.stored(PlanProgress) if report.report == "failed"]
    assert failed.failed_workers == ("s0-w1",)


def weights_move_during_an_expansion(scene: Scene) -> None:
    """4.5, lazy propagation: of the versions published while a newcomer starts it fetches the last one, once."""
    cluster = grown(scene)
    cluster.run_until(lambda: bool(cluster.events(BatchReady)), 60_000, what="training begins")
    scene.begin()
    cluster.available("s0", 0)
    cluster.run_until(lambda: any(started.worker == "s0-w0" for started in cluster.processes))
    cluster.worker("s0-w0").engine.slow = 5.0  # it starts while version 1 is made
    published = len(cluster.events(StepFinished))
    cluster.run_until(lambda: len(cluster.events(StepFinished)) > published, 60_000, what="a version is published")
    cluster.run_until(lambda: "s0-w0" in cluster.roles, 60_000, what="it serves")

    versions = [fact.version for fact in scene.stored(WeightsApplied) if fact.worker == "s0-w0"]
    admitted = next(table for table in scene.tables if "s0-w0" in _serving(table))
    row = admitted.row("s0-w0")
    assert row is not None and row.version == admitted.policy_version, "admitted at the current version"
    assert versions == [row.version] and row.version > 0, "what was current meanwhile was never fetched"


def a_mode_switch_in_waves(scene: Scene) -> None:
    """4.3.2, 4.4.2 and DESIGN 4: colocated workers become prefill and decode workers, and some topology serves throughout."""
    cluster = grown(scene)
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: cluster.settled and len(cluster.roles) == 4)
    scene.begin()
    cluster.wish(prefill=1, decode=3)
    cluster.run_until(lambda: cluster.settled and sorted(cluster.roles.values())[-1] == "prefill", 30_000)

    assert all(
        _serves({row.role.value for row in table.rows if row.worker in _serving(table)}) for table in scene.tables
    )
    waves = {table.plan.plan_id for table in scene.tables if table.plan is not None}
    assert len(waves) == 2, "two plans"
    assert not scene.sent(Launch, Kill), "roles change, processes do not"


def training_interrupts_a_borrow(scene: Scene) -> None:
    """4.6: training wants its GPUs while a worker that hangs is still taking them: it is ended in time, and nobody else is
    touched for a borrow that does not come."""
    cluster = grown(scene)
    cluster.worker("t0-w0").engine.stuck.add("restore")
    scene.begin()
    cluster.wish(borrow=True)
    cluster.run_until(lambda: cluster.pair("t0-w0").residency is Residency.ACTIVATING, what="a borrow begins")
    cluster.run_until(lambda: cluster.trained >= 0, 60_000, what="a batch is trained")

    (returned, *_) = scene.stored(GpusReturned)
    assert returned.at_ms <= returned.deadline_ms, "whatever the worker does"
    assert not any("t0-w0" in _serving(table) for table in scene.tables)
    generations = {row.role_generation for table in scene.tables for row in table.rows if row.worker == "r0-w0"}
    assert len(generations) == 1


def no_gpu_is_left(scene: Scene) -> None:
    """DESIGN 3, 4.2: a zero budget is a defined state: rollout pauses, requests wait at their edge and go on later."""
    cluster = scene.cluster
    cluster.available("s0", 0)
    cluster.run_until(lambda: cluster.settled and "s0-w0" in cluster.roles)
    cluster.run_until(lambda: _runs_on(cluster, "s0-w0", 2), what="a reply is under way")
    scene.begin()
    cluster.reclaimed("s0", 0, notice_ms=1_000)
    cluster.run_until(lambda: cluster.settled and not cluster.roles, what="paused")
    cluster.run(1_000)
    cluster.available("s0", 1)
    cluster.run_until(lambda: cluster.settled and "s0-w1" in cluster.roles, what="it goes on")
    cluster.run_until(
        lambda: any(
            isinstance(seen, AttemptBegan) and seen.worker == "s0-w1" and seen.start > 0 for seen in scene.record
        ),
        20_000,
        "a reply goes on from its prefix on the new worker",
    )

    targets = scene.stored(TargetConfiguration)
    assert targets[0].mode.value == "paused"


def _serving(table: RoleTable) -> set[str]:
    return {row.worker for row in table.rows if row.activity is Activity.ACTIVE and row.role.value != "training"}


def _serves(roles: set[str]) -> bool:
    return "colocated" in roles or {"prefill", "decode"} <= roles


def _runs_on(cluster: Cluster, worker: str, tokens: int) -> bool:
    """A reply of at least so many tokens has just grown on that worker, and goes on."""
    last = cluster.record[-1]
    if not isinstance(last, Received) or last.start + last.count < tokens or worker not in cluster.roles:
        return False
    return cluster.engine(worker).runs(last.request, last.attempt)


SCENARIOS: dict[str, tuple[Callable[[Scene], None], dict[str, Any], bool]] = {
    "training_step": (a_training_step, {"steps": 6}, True),
    "arrival": (an_arrival, {"steps": 9, "batch": 16}, True),
    "reclaim": (a_reclaim, {"steps": 9, "batch": 16}, True),
    "reclaim_without_notice": (a_reclaim_without_notice, {"steps": 9, "batch": 16}, True),
    "reclaim_during_expansion": (a_reclaim_during_expansion, {"steps": 9, "batch": 16}, True),
    "last_prefill_worker_leaves": (the_last_prefill_worker_leaves, {"reserved": 0, "steps": 9, "batch": 16}, True),
    "superseded_plan": (a_superseded_plan, {"steps": 9, "batch": 16}, True),
    "gate_refusal": (the_gate_refuses, {"steps": 3, "toggle_guess_s": 1e6, "policy": "colocated"}, False),
    "failed_expansion": (a_failed_expansion, {"steps": 9, "batch": 64}, True),
    "weights_during_expansion": (weights_move_during_an_expansion, {"steps": 9}, True),
    "mode_switch": (a_mode_switch_in_waves, {"steps": 9, "batch": 16}, True),
    "borrow_interrupted": (training_interrupts_a_borrow, {"steps": 9, "batch": 4}, True),
    "zero_budget": (no_gpu_is_left, {"reserved": 0, "steps": 9, "batch": 16}, True),
}


def run(name: str) -> tuple[Scene, str]:
    """A scenario, with its transcript."""
    play, options, scripted = SCENARIOS[name]
    scene = Scene(small_job(**options), scripted=scripted)
    with scene.cluster:
        play(scene)
        title = " ".join((play.__doc__ or "").split())
        return scene, f"# {title}\n\n{scene.text}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    scene, text = run(name)
    assert not scene.violations
    assert not scene.cluster.problems
    kept = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    assert text.splitlines()[0] == kept.splitlines()[0]
    assert story(text) == story(kept), "another story than the file's: see the module"


def test_every_transcript_belongs_to_a_scenario() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(SCENARIOS)


if __name__ == "__main__":
    for each in SCENARIOS:
        (HERE / f"{each}.txt").write_text(run(each)[1], encoding="utf-8")
