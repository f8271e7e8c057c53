"""A whole cluster: every control core, a node agent a node, modelled workers and a trainer, wired as the bus wires them.

What is not here: agents, routers, the runtime tracker. `Pipeline` stands for the pipeline scheduler's training step only, and
`Decisions` for the decision engine where a test wants to say what is decided.

After everything that happens: no GPU is held by a worker and by the trainer at once. The orchestrator's core asserts the
invariants of each epoch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from messages.decision_engine import BudgetChanged
from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, TrainingBegin, TrainingFinished
from messages.envelope import Message
from messages.ids import (
    Activity,
    NodeId,
    PolicyVersion,
    Residency,
    WorkerId,
    Zone,
)
from messages.pipeline_scheduler import StepFinished, WeightsPublished
from messages.rollout_worker import UpdateWeights
from messages.runtime_tracker import NodeHeartbeat
from pearl_state.model import Pair, RoleTable, Row
from services.cluster_rebuilder.config import Config as RebuilderConfig
from services.cluster_rebuilder.core import ClusterRebuilderCore
from services.decision_engine.config import Config as DecisionConfig
from services.decision_engine.core import DecisionEngineCore
from services.elastic_scheduler.config import Config as ElasticConfig
from services.elastic_scheduler.core import ElasticSchedulerCore
from services.jobfile import DecisionSection, JobFile, JobSection, NodeSection, TimeoutSection, rollout_slots
from services.node_agent.config import Config as NodeConfig
from services.orchestrator.config import Config as OrchestratorConfig
from services.orchestrator.core import OrchestratorCore
from services.orchestrator.leases import NodeLeases
from services.runtime.core import Input, Tick
from services.simulator.faults.tables import is_settled, roles_of
from services.simulator.faults.wish import Wish, WishCore
from services.toggle_manager.config import Config as ToggleConfig
from services.toggle_manager.core import ToggleManagerCore
from tests.sim.processes import NodeAgent, Process, Trainer, TrainerDisk, Worker
from tests.sim.world import Actor, CoreActor, World


def lending_job(reserved: int = 2, spot: int = 2, training: int = 1) -> JobFile:
    """r0 (reserved), s0 (preemptible), t0 (training), one GPU a worker; short times, so that tests are short."""
    nodes = [
        NodeSection(name=name, zone=zone, gpus=gpus)
        for name, zone, gpus in (
            ("r0", Zone.RESERVED, reserved),
            ("s0", Zone.PREEMPTIBLE, spot),
            ("t0", Zone.TRAINING, training),
        )
        if gpus
    ]
    timeouts = TimeoutSection(
        coalesce_ms=50,
        command_retry_ms=200,
        prepare_ms=3_000,
        apply_ms=4_000,
        drain_ms=1_500,
        return_ms=3_000,
        kill_grace_ms=400,
        lease_ms=1_500,
        admission_pause_ms=5_000,
    )
    return JobFile(
        job=JobSection(name="sim"), nodes=tuple(nodes), timeouts=timeouts, decision=DecisionSection(lending=True)
    )


class Orchestrator(Actor):
    """The orchestrator's core under its shell: the table is written before anything is said."""

    def __init__(self, world: World, config: OrchestratorConfig, lease_ms: int, nodes: list[NodeAgent]) -> None:
        super().__init__(world, "orchestrator")
        self.core = OrchestratorCore(config)
        self.inputs = tuple(self.core.inputs)
        self._nodes = nodes
        self._lease_ms = lease_ms
        self._leases = NodeLeases(lease_ms, world.now_ms)

    def restore(self) -> None:
        if not self.world.tables:
            self.world.tables.append(self.core.initial())
        self.cursor = self.world.table.writer.cursor
        self._leases = NodeLeases(self._lease_ms, self.world.now_ms)

    def take(self, event: Input) -> None:
        events = [event]
        if isinstance(event.message, Tick):
            for node in self._nodes:
                if node.alive:
                    beat = NodeHeartbeat(node=node.core.config.node, workers=node.state.workers)
                    self._leases.heard(beat, self.world.now_ms)
            lost = self._leases.lost(self.world.table, self.world.now_ms)
            events = [*(Input(event.now_ms, each) for each in lost), event]
        elif event.seq:
            events = [msgspec.structs.replace(event, now_ms=self.world.now_ms)]
        before = self.world.table
        table, each, after = self.core.step_all(before, events)
        if table is not before:
            self.world.write_table(table)
        for effects in (*each, after):
            self.perform(effects)


class Decisions(CoreActor):
    """The scripted decision engine: `decide` says what, on every budget and from now on."""

    def __init__(self, world: World) -> None:
        self._wish = Wish()
        super().__init__(world, WishCore(), watches=False)

    @property
    def budget(self) -> BudgetChanged | None:
        return self.state.budget

    def decide(self, wish: Wish) -> None:
        """A new choice on the same budget; one that is dead takes it up when it lives again."""
        self._wish = wish
        if self.alive:
            self.take(Input(self.world.now_ms, wish))

    def restore(self) -> None:
        super().restore()
        if self.state.wish != self._wish:
            self.take(Input(self.world.now_ms, self._wish))


class Pipeline(Actor):
    """The training step as the pipeline scheduler runs it: begin, update the active workers, finish."""

    inputs = (WeightsPublished, StepFinished)
    watches = True

    def __init__(self, world: World, retry_ms: int) -> None:
        super().__init__(world, "pipeline_scheduler")
        self.trained = 0
        self.begun: int | None = None
        self.published: WeightsPublished | None = None
        self._retry_ms = retry_ms
        self._asked_ms = 0
        self._table: RoleTable | None = None

    def begin(self) -> int:
        """The next batch is complete: training wants its GPUs. Returns the batch."""
        assert self.begun is None, f"batch {self.begun} is being trained"
        self.begun = self.trained
        self.world.publish(self.name, TrainingBegin(batch=self.begun))
        return self.begun

    def take(self, event: Input) -> None:
        match event.message:
            case WeightsPublished() as published:
                if self.published is None or published.version > self.published.version:
                    self.published, self._asked_ms = published, 0
            case StepFinished(batch=batch):
                self.trained = max(self.trained, batch + 1)
            case RoleTable() as table:
                self._table = table
            case _:
                pass
        self._converge()

    def _converge(self) -> None:
        published, table = self.published, self._table
        if published is None or table is None:
            return
        active = [row for row in table.rows if row.activity is Activity.ACTIVE and row.zone is not Zone.TRAINING]
        behind = [row for row in active if row.version < published.version]
        if behind and self.world.now_ms - self._asked_ms >= self._retry_ms:
            self._asked_ms = self.world.now_ms
            for row in behind:
                update = UpdateWeights(
                    worker=row.worker,
                    incarnation=row.incarnation,
                    version=published.version,
                    uri=published.uri,
                    manifest_sha256="",
                )
                self.world.publish(self.name, update)
        if self.begun is not None and self.trained > self.begun and not behind and published.version >= self.trained:
            version = PolicyVersion(self.trained)
            self.world.publish(self.name, TrainingFinished(batch=self.begun, version=version))
            self.begun = None


class Cluster:
    """See the module. `decisions` is None where the real decision engine decides."""

    def __init__(
        self, job: JobFile | None = None, *, seed: int = 0, loss: float = 0.0, decision: DecisionConfig | None = None
    ) -> None:
        self.job = job = job or lending_job()
        self.world = world = World(seed, loss=loss)
        overlap = frozenset(slot.worker for slot in rollout_slots(job) if slot.zone is Zone.OVERLAP)
        self.disk = TrainerDisk()
        self.nodes = {
            node.name: NodeAgent(world, NodeConfig.of(job, node.name, Path("sim.toml")), overlap, self.disk)
            for node in job.nodes
        }
        self.orchestrator = Orchestrator(
            world, OrchestratorConfig.of(job), job.timeouts.lease_ms, list(self.nodes.values())
        )
        self.rebuilder = CoreActor(world, ClusterRebuilderCore(RebuilderConfig.of(job)), watches=True)
        self.toggle = CoreActor(world, ToggleManagerCore(ToggleConfig.of(job)), watches=True)
        self.elastic = CoreActor(world, ElasticSchedulerCore(ElasticConfig.of(job)), watches=False)
        self.decisions: Decisions | None = None
        if decision is None:
            self.decisions = Decisions(world)
        else:
            CoreActor(world, DecisionEngineCore(decision), watches=True)
        self.pipeline = Pipeline(world, job.timeouts.command_retry_ms)
        world.after_each.append(self.check_gpus)
        self.orchestrator.start()  # first: the others watch its table
        for name in sorted(world.actors):
            if name != "orchestrator":
                world.actors[name].start()

    # -- what one does to it

    def run(self, ms: int) -> None:
        self.world.run(ms)

    def run_until(self, reached: Callable[[], bool], within_ms: int = 10_000, what: str = "") -> None:
        self.world.run_until(reached, within_ms, what)

    def wish(self, *, borrow: bool = False, prefill: int = 0, decode: int = 0) -> None:
        """What is decided from now on."""
        assert self.decisions is not None
        self.decisions.decide(Wish(borrow, prefill, decode))

    def available(self, node: str, *gpus: int) -> None:
        self.world.publish("feed", GpuAvailable(node=NodeId(node), gpus=gpus))

    def reclaimed(self, node: str, *gpus: int, notice_ms: int = 0) -> None:
        self.world.publish("feed", GpuReclaimed(node=NodeId(node), gpus=gpus, notice_ms=notice_ms))

    # -- what one sees

    @property
    def table(self) -> RoleTable:
        return self.world.table

    def row(self, worker: str) -> Row:
        row = self.table.row(worker)
        assert row is not None
        return row

    def pair(self, overlap: str) -> Pair:
        return next(pair for pair in self.table.pairs if pair.overlap == overlap)

    @property
    def residencies(self) -> set[Residency]:
        return {pair.residency for pair in self.table.pairs}

    @property
    def processes(self) -> list[Process]:
        return [process for node in self.nodes.values() for process in node.pids.values() if process.alive]

    def worker(self, name: str) -> Worker:
        """The living process of a slot."""
        found = next(process for process in self.processes if process.worker == name)
        assert isinstance(found, Worker)
        return found

    @property
    def trainer(self) -> Trainer:
        return next(process for process in self.processes if isinstance(process, Trainer))

    @property
    def roles(self) -> dict[str, str]:
        """Who serves, in which role."""
        return roles_of(self.table)

    @property
    def settled(self) -> bool:
        """No plan, nothing on its way, and the roles are those of the newest target."""
        return is_settled(self.table)

    def commands_to(self, worker: str, *kinds: type[Message], since: int = 0) -> list[Message]:
        """Commands sent to a worker (or about it, to its node agent), from the given number of commands on."""
        return [
            command.message
            for command in self.world.commands[since:]
            if getattr(command.message, "worker", "") == worker and (not kinds or isinstance(command.message, kinds))
        ]

    def check_gpus(self) -> None:
        """DESIGN 11.2: no GPU is used by two phases at once, by what the processes hold."""
        trainers = [process for process in self.processes if isinstance(process, Trainer) and process.resident]
        for process in self.processes:
            if isinstance(process, Worker) and process.resident and trainers:
                zone = self.row(process.worker).zone
                assert zone is not Zone.OVERLAP, f"{process.worker} and the trainer both hold GPUs; {self.table.pairs}"


def overlap_of(job: JobFile) -> tuple[WorkerId, ...]:
    """The job's overlap slots."""
    return tuple(slot.worker for slot in rollout_slots(job) if slot.zone is Zone.OVERLAP)
