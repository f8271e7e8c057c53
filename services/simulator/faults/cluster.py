"""A whole cluster on a virtual clock: every service's real code, on a network and on machines that can be broken.

Real, shells and cores: pipeline scheduler, elastic scheduler, decision engine, two orchestrators, cluster rebuilder, toggle
manager, runtime tracker, routers, agents, node agents, rollout workers, the trainer's service. Modelled: the engine
(`engine.py`), what trains (`trainer.py`), the environment (`workload.py`), machines (`machines.py`), broker and network
(`network.py`). Everything happens in one thread, in an order that follows from the seed.

For tests:

    cluster = Cluster(small_job(), seed=1)                    # every service is started
    cluster = Cluster(small_job(), seed=1, scripted=True)     # decisions are what `wish` says, not the decision engine's
    cluster.run(500)                                          # let 500 ms pass
    cluster.run_until(lambda: cluster.settled)                # to the very moment; AssertionError after `within_ms`
    cluster.wish(prefill=1, decode=1, borrow=True)            # what is decided from now on (scripted only)
    cluster.available("s0", 0, 1); cluster.reclaimed("s0", 0, notice_ms=500)
    cluster.crash("toggle_manager"); cluster.freeze("agent-0", 800); cluster.cut("router-1", 2_000)
    cluster.table, cluster.roles, cluster.row("s0-w0"), cluster.pair("t0-w0"), cluster.worker("s0-w0").engine.stuck.add("load")
    cluster.events(TrajectoryCompleted)                       # what the event stream holds of a kind
    cluster.record                                            # everything that was seen (record.py), for checkers and transcripts
    cluster.close()                                           # or use it as a context manager

Names of processes: "orchestrator-a", "orchestrator-b", "elastic_scheduler", "decision_engine", "cluster_rebuilder",
"toggle_manager", "pipeline_scheduler", "runtime_tracker", "router-0", "agent-0", "node_agent-<node>", a worker's id, "trainer".
The process that runs a service again after its death is the simulation itself; it does so after `RESTART_MS`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, Final, cast

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, TrainingFinished
from messages.envelope import Message, encode
from messages.ids import Incarnation, NodeId, RoleGeneration, WorkerId, Zone
from messages.rollout_worker import Generate
from messages.subjects import stream, subject_of, telemetry_subject
from pearl_state.model import Pair, RoleTable, Row
from pearl_state.watch import Replica
from services.agent.service import Agent
from services.cluster_rebuilder.config import Config as RebuilderConfig
from services.cluster_rebuilder.core import ClusterRebuilderCore
from services.decision_engine.config import Config as DecisionConfig
from services.decision_engine.core import DecisionEngineCore
from services.edge.request import RequestEdge
from services.edge.request_state import Effect as RequestEffect
from services.edge.request_state import Event as RequestEvent
from services.edge.request_state import RequestState
from services.elastic_scheduler.config import Config as ElasticConfig
from services.elastic_scheduler.core import ElasticSchedulerCore
from services.jobfile import (
    AgentSection,
    DecisionSection,
    EnvironmentSection,
    JobFile,
    JobSection,
    NodeSection,
    PipelineSection,
    RolloutSection,
    TimeoutSection,
    TrainingSection,
    rollout_slots,
)
from services.node_agent.config import Config as NodeConfig
from services.node_agent.service import NodeAgent
from services.orchestrator.config import Config as OrchestratorConfig
from services.orchestrator.core import OrchestratorCore
from services.orchestrator.service import Orchestrator
from services.pipeline_scheduler.config import Config as PipelineConfig
from services.pipeline_scheduler.core import PipelineSchedulerCore
from services.rollout_worker.config import Config as WorkerConfig
from services.rollout_worker.core import RolloutWorkerCore, WorkerState
from services.rollout_worker.engines.base import GenerateSpec
from services.rollout_worker.service import EngineFailedError, OrphanedError, RolloutWorker
from services.router.config import Config as RouterConfig
from services.router.core import RouterCore
from services.router.service import Router
from services.runtime.bus import BusError
from services.runtime.host import CoreHost, TakenOver
from services.runtime.log import diverted
from services.runtime_tracker.config import Config as TrackerConfig
from services.runtime_tracker.core import RuntimeTrackerCore
from services.simulator.faults.engine import Engine, Silence
from services.simulator.faults.loop import Process, VirtualLoop
from services.simulator.faults.machines import Files, Machine, Started
from services.simulator.faults.network import NetBus, Network
from services.simulator.faults.record import (
    ActorBegan,
    ActorEnded,
    AttemptBegan,
    Generated,
    MemoryHeld,
    ProcessBegan,
    ProcessEnded,
    Received,
    Seen,
    Stored,
    TableSeen,
    TableWritten,
)
from services.simulator.faults.tables import is_settled, roles_of
from services.simulator.faults.trainer import Disk, Group, NoMetrics, build
from services.simulator.faults.wish import Wish, WishCore
from services.snapshot import SnapshotError
from services.toggle_manager.config import Config as ToggleConfig
from services.toggle_manager.core import ToggleManagerCore
from services.trainer.service import Trainer
from services.trainer.turns import UnusableBatchError

RESTART_MS: Final = 200
TICK_MS: Final = 200
PURGE_MS: Final = 5000
"""How often the pipeline scheduler's shell lets the journal go."""
ROUTERS: Final = 2
AGENTS: Final = 2
ORCHESTRATORS: Final = ("orchestrator-a", "orchestrator-b")
FORGIVEN: Final = (BusError, TakenOver, OrphanedError, EngineFailedError)
"""What a service may end with; it is started again. Anything else is a fault of its own."""

Main = Callable[[Process, NetBus], Coroutine[Any, Any, None]]


def small_job(
    *,
    reserved: int = 2,
    spot: tuple[int, ...] = (2, 1),
    training: int = 1,
    steps: int = 3,
    lending: bool = True,
    disaggregation: bool = True,
    seed: int = 0,
    batch: int = 8,
    group: int = 2,
    staleness: int = 1,
    policy: str = "planner",
    toggle_guess_s: float = 0.05,
    silence_ms: int = 2_500,
    gpus_per_worker: int = 1,
    evaluate: bool = False,
    early_start: bool = True,
) -> JobFile:
    """r0 (reserved), s0, s1 ... (preemptible), t0 (training); sizes count workers; short times, so that runs are short."""
    nodes = [("r0", Zone.RESERVED, reserved)]
    nodes += [(f"s{index}", Zone.PREEMPTIBLE, gpus) for index, gpus in enumerate(spot)]
    nodes += [("t0", Zone.TRAINING, training)]
    return JobFile(
        job=JobSection(name="sim", seed=seed),
        nodes=tuple(
            NodeSection(name=name, zone=zone, gpus=count * gpus_per_worker) for name, zone, count in nodes if count
        ),
        rollout=RolloutSection(engine="emulated", max_running=4, heartbeat_ms=500, gpus_per_worker=gpus_per_worker),
        pipeline=PipelineSection(
            batch_trajectories=batch,
            group_size=group,
            staleness=staleness,
            train_steps=steps,
            max_turns=4,
            max_new_tokens=64,
            evaluate_every=1 if evaluate else 0,
            evaluate_episodes=2,
            early_start=early_start,
        ),
        training=TrainingSection(engine="emulated"),
        environment=EnvironmentSection(
            entry="services.simulator.faults.workload:Errand", tokenizer="services.simulator.faults.workload:Numerals"
        ),
        agent=AgentSection(processes=AGENTS, concurrency=batch, silence_ms=silence_ms, task_ack_wait_ms=4_000),
        decision=DecisionSection(
            lending=lending, disaggregation=disaggregation, toggle_guess_s=toggle_guess_s, policy=policy
        ),
        timeouts=TimeoutSection(
            coalesce_ms=50,
            command_retry_ms=200,
            prepare_ms=3_000,
            apply_ms=4_000,
            drain_ms=1_500,
            return_ms=3_000,
            kill_grace_ms=400,
            lease_ms=2_000,
            admission_pause_ms=5_000,
        ),
    )


class Actor:
    """A service: what it runs, and the process in which it does so now."""

    def __init__(self, name: str, main: Main) -> None:
        self.name = name
        self.main = main
        self.life = 0
        self.process: Process | None = None
        self.wanted = True  # it is started again when it ends
        self.shell: Any = None  # what runs within, for onlookers


class WatchedWorkerCore(RolloutWorkerCore):
    """Remembers under which generation of the worker's role each attempt was let in."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation, *, released: bool = False) -> None:
        super().__init__(worker, incarnation, released=released)
        self.let_in: dict[tuple[str, int], RoleGeneration] = {}

    def refusal(self, state: WorkerState, request: Generate) -> str:
        reason = super().refusal(state, request)
        if not reason:
            self.let_in[request.request, request.attempt] = state.role_generation
        return reason


class Cluster:
    """See the module. `watch` is told of everything that is added to the record, at once."""

    def __init__(
        self,
        job: JobFile | None = None,
        *,
        seed: int = 0,
        scripted: bool = False,
        watch: Callable[[Seen], None] | None = None,
        keep: bool = True,
    ) -> None:
        """`keep` False: the record is not kept, only watched."""
        self.job = job = job or small_job()
        self.record: list[Seen] = []
        self.problems: list[str] = []  # services that failed of themselves
        self.lines: list[tuple[int, str, str, str]] = []  # log lines: at, actor, action, text
        self.count = 0  # of what was seen
        self.table_now: RoleTable | None = None
        self.trained = -1  # newest batch whose training was finished
        self.random = random.Random(f"cluster/{seed}")
        self.loop = VirtualLoop()
        self.loop.raised_in_threads = (SnapshotError, UnusableBatchError)
        self.network = Network(self.loop, job.job.name, random.Random(f"network/{seed}"), self.see)
        self.network.on_doom = self._doomed
        self.network.lives = lambda process: self._of_process[process].life
        self.engines: dict[str, Engine] = {}
        self.disk = Disk()
        self.machines: dict[str, Machine] = {}
        self.actors: dict[str, Actor] = {}
        self._watch = watch
        self._keep = keep
        self._of_process: dict[Process, Actor] = {}
        self._overlap = frozenset(slot.worker for slot in rollout_slots(job) if slot.zone is Zone.OVERLAP)
        self._feed = self.network.connect(Process("preemption_feed"))
        self._tokens = 0
        self._twins: list[Actor] = []  # older instances of services
        with self._inside():
            for node in job.nodes:
                self.machines[node.name] = Machine(self.loop, node.name, self._launch, self._process_ended)
            self._add_actors(scripted)
            for name in self.actors:
                self.start(name)

    # -- time

    @property
    def now_ms(self) -> int:
        return self.network.clock()

    @contextmanager
    def _inside(self) -> Generator[None]:
        """The loop runs, and loggers write here."""
        before = asyncio._get_running_loop()  # pyright: ignore[reportPrivateUsage] - its public form raises
        asyncio._set_running_loop(self.loop)  # pyright: ignore[reportPrivateUsage]
        try:
            with diverted(self._log):
                yield
        finally:
            asyncio._set_running_loop(before)  # pyright: ignore[reportPrivateUsage]

    def run(self, ms: float) -> None:
        """Let so much time pass."""
        end_s = self.loop.now_s + ms / 1000
        with self._inside():
            self.loop.run_to(end_s)

    def run_until(self, reached: Callable[[], bool], within_ms: float = 15_000, what: str = "") -> None:
        """Until it holds, looked at whenever something was seen. AssertionError if that takes longer."""
        assert self.reaches(reached, within_ms), f"not within {within_ms} ms: {what or reached}"

    def reaches(self, reached: Callable[[], bool], within_ms: float) -> bool:
        """Whether it comes to hold within that time; the clock stands where it does."""
        end_s = self.loop.now_s + within_ms / 1000
        seen = self.count

        def changed() -> bool:
            nonlocal seen
            if self.count == seen:
                return False
            seen = self.count
            return reached()

        with self._inside():
            return reached() or self.loop.run_to(end_s, changed) or reached()

    def later(self, at_ms: float, action: Callable[[], object]) -> None:
        """`action` happens then (Unix ms), whatever else does."""
        self.loop.at(at_ms / 1000, action)

    def close(self) -> None:
        """Let everything end."""
        with self._inside():
            for actor in self.actors.values():
                actor.wanted = False
            for actor in (*self.actors.values(), *self._twins):
                self._end(actor, None)
            for machine in self.machines.values():
                machine.power_off(files=True)
        self.loop.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is seen

    def see(self, seen: Seen) -> None:
        """Something happened."""
        self.count += 1
        if isinstance(seen, TableWritten):
            self.table_now = seen.table
        elif isinstance(seen, Stored) and isinstance(seen.message, TrainingFinished):
            self.trained = max(self.trained, seen.message.batch)
        if self._keep:
            self.record.append(seen)
        if self._watch is not None:
            self._watch(seen)

    def _log(self, actor: str, level: str, action: str, text: str) -> None:
        if self._keep:
            self.lines.append((self.now_ms, actor, action, text))

    def events(self, *kinds: type[Message]) -> list[Any]:
        """What the event stream holds of these kinds, in order."""
        return self.network.events(kinds)

    @property
    def table(self) -> RoleTable:
        """The newest epoch."""
        assert self.table_now is not None, "no role table was written yet"
        return self.table_now

    def row(self, worker: str) -> Row:
        row = self.table.row(worker)
        assert row is not None, f"{worker} has no row"
        return row

    def pair(self, overlap: str) -> Pair:
        return next(pair for pair in self.table.pairs if pair.overlap == overlap)

    @property
    def roles(self) -> dict[str, str]:
        """Who serves, in which role."""
        return roles_of(self.table)

    @property
    def settled(self) -> bool:
        """No plan, nothing on its way, and the roles are those of the newest target."""
        return self.table_now is not None and is_settled(self.table_now)

    @property
    def finished(self) -> bool:
        """All train steps are done."""
        return self.trained >= self.job.pipeline.train_steps - 1

    @property
    def processes(self) -> list[Started]:
        """Living workers and trainers."""
        return [started for machine in self.machines.values() for started in machine.living]

    def engine(self, name: str) -> Engine:
        """The engine of a slot's living worker."""
        found = self.worker(name).engine
        assert found is not None, f"{name} has no engine yet"
        return found

    def worker(self, name: str) -> Started:
        """The living process of a slot."""
        return next(started for started in self.processes if started.worker == name)

    @property
    def trainer(self) -> Started:
        return next(started for started in self.processes if started.group is not None)

    # -- what one does to it

    def wish(self, *, borrow: bool = False, prefill: int = 0, decode: int = 0) -> None:
        """What a scripted decision engine decides from now on."""
        host = self.actors["decision_engine"].shell
        with self._inside():
            host.feed(Wish(borrow, prefill, decode))

    def available(self, node: str, *gpus: int) -> None:
        """The outside world lends GPUs."""
        self._publish(GpuAvailable(node=NodeId(node), gpus=gpus))

    def reclaimed(self, node: str, *gpus: int, notice_ms: int = 0) -> None:
        """And takes them back."""
        self._publish(GpuReclaimed(node=NodeId(node), gpus=gpus, notice_ms=notice_ms))

    def _publish(self, message: Message) -> None:
        with self._inside():
            self._tokens += 1
            subject = subject_of(self.job.job.name, message)
            self.network.store("preemption_feed", subject, encode(message), f"feed:{self._tokens}", None)

    def start(self, name: str) -> None:
        """Begin, or begin again, from what is durable."""
        actor = self.actors[name]
        if actor.process is not None:
            return
        actor.life += 1
        process = actor.process = Process(name)
        self._of_process[process] = actor
        self.see(ActorBegan(self.now_ms, name, actor.life))
        bus = self.network.connect(process)
        task = self.loop.start(process, lambda: actor.main(process, bus))
        task.add_done_callback(lambda done: self._actor_over(actor, process, done), context=self.loop.world)

    def _actor_over(self, actor: Actor, process: Process, task: asyncio.Task[None]) -> None:
        actor = self._of_process.get(process, actor)  # it may have become somebody's twin
        if actor.process is not process:
            return
        error = None if task.cancelled() else task.exception()
        self._end(actor, error)
        if actor.wanted:
            self.loop.at(self.loop.now_s + RESTART_MS / 1000, lambda: self.start(actor.name))

    def _end(self, actor: Actor, error: BaseException | None) -> None:
        process = actor.process
        if process is None:
            return
        process.mute = True
        actor.process = None
        self.loop.kill(process)
        self.network.drop(process)
        del self._of_process[process]
        self.see(ActorEnded(self.now_ms, actor.name))
        self._blame(actor.name, error)

    def _blame(self, name: str, error: BaseException | None) -> None:
        if isinstance(error, BaseExceptionGroup):
            for each in cast("BaseExceptionGroup[BaseException]", error).exceptions:
                self._blame(name, each)
        elif error is not None and not isinstance(error, FORGIVEN):
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            line = (
                "" if where is None else f" ({where.tb_frame.f_code.co_filename.rpartition('/')[2]}:{where.tb_lineno})"
            )
            self.problems.append(f"{self.now_ms} {name}: {type(error).__name__}: {error}{line}")

    def crash(self, name: str, down_ms: float = RESTART_MS) -> None:
        """SIGKILL; a service lives again after `down_ms`, a worker when its node agent sees to it."""
        with self._inside():
            actor = self.actors.get(name)
            if actor is None:
                self._crash_process(name)
            elif actor.process is not None:
                self._end(actor, None)
                self.loop.at(self.loop.now_s + down_ms / 1000, lambda: self.start(name))

    def _crash_process(self, name: str) -> None:
        for machine in self.machines.values():
            for started in machine.living:
                if started.process.name == name:
                    machine.kill(started)

    def crash_at_call(self, name: str, calls: int) -> None:
        """SIGKILL at the `calls`-th moment from now at which something leaves the process, or an answer comes back."""
        process = self.process(name)
        if process is not None:
            process.doom = process.calls + max(1, calls)

    def _doomed(self, process: Process) -> None:
        def die() -> None:
            actor = self._of_process.get(process)
            if actor is not None:
                self._end(actor, None)
                if actor.wanted:
                    self.loop.at(self.loop.now_s + RESTART_MS / 1000, lambda: self.start(actor.name))
                return
            for machine in self.machines.values():
                for started in machine.living:
                    if started.process is process:
                        machine.kill(started)

        self.loop.at(self.loop.now_s, die)

    def process(self, name: str) -> Process | None:
        """The living process of that name."""
        actor = self.actors.get(name)
        if actor is not None:
            return actor.process
        return next((started.process for started in self.processes if started.process.name == name), None)

    def freeze(self, name: str, ms: float) -> None:
        """SIGSTOP, and SIGCONT after `ms`."""
        process = self.process(name)
        if process is None or process.frozen:
            return
        self.loop.freeze(process)
        self.loop.at(self.loop.now_s + ms / 1000, lambda: self.loop.thaw(process))

    def twin(self, name: str) -> None:
        """A second instance of a service starts: one of the two must end."""
        actor = self.actors[name]
        old = actor.process
        if old is None:
            return
        actor.process = None
        second = Actor(name, actor.main)
        second.process, second.wanted, second.life = old, False, actor.life
        self._of_process[old] = second
        self._twins.append(second)
        self.start(name)

    def cut(self, name: str, ms: float) -> None:
        """The process cannot reach the broker for `ms`; what it says is lost."""
        network = self.network
        network.cut[name] = network.cut.get(name, 0) + 1

        def mend() -> None:
            network.cut[name] -= 1
            if not network.cut[name]:
                del network.cut[name]
                network.mended((name,))

        self.loop.at(self.loop.now_s + ms / 1000, mend)

    def deafen(self, name: str, ms: float) -> None:
        """Its watch of the role table is silent for `ms`."""
        deaf = self.network.deaf
        deaf[name] = deaf.get(name, 0) + 1

        def mend() -> None:
            deaf[name] -= 1
            if not deaf[name]:
                del deaf[name]

        self.loop.at(self.loop.now_s + ms / 1000, mend)

    def broker_down(self, ms: float) -> None:
        """The broker is away for `ms`; what it stored stays."""
        if self.network.down:
            return
        self.network.down = True

        def up() -> None:
            self.network.down = False
            self.network.mended()

        self.loop.at(self.loop.now_s + ms / 1000, up)

    def power_off(self, node: str, ms: float, *, disk: bool = False) -> None:
        """A machine loses its power, and gets it back after `ms`; `disk`: as another machine, with an empty disk."""
        with self._inside():
            self.machines[node].power_off(files=disk)
            self.crash(f"node_agent-{node}", ms)

    # -- what runs where

    def _add_actors(self, scripted: bool) -> None:
        job, clock = self.job, self.network.clock
        for name in ORCHESTRATORS:
            self._add(name, self._orchestrator)
        decision = WishCore() if scripted else DecisionEngineCore(DecisionConfig.of(job))
        self._host(ElasticSchedulerCore(ElasticConfig.of(job)), watches=False)
        self._host(decision)
        self._host(ClusterRebuilderCore(RebuilderConfig.of(job)))
        self._host(ToggleManagerCore(ToggleConfig.of(job)))
        self._host(lambda: PipelineSchedulerCore(PipelineConfig.of(job)))
        telemetry = tuple(telemetry_subject(job.job.name, kind) for kind in RuntimeTrackerCore.telemetry)
        self._host(RuntimeTrackerCore(TrackerConfig.of(job)), watches=False, telemetry=telemetry)
        for index in range(ROUTERS):
            self._add(f"router-{index}", self._router)
        for index in range(AGENTS):
            self._add(f"agent-{index}", self._agent)
        for node in job.nodes:
            self._add(f"node_agent-{node.name}", self._node_agent)
        assert clock() > 0

    def _add(self, name: str, main: Callable[[Actor, Process, NetBus], Coroutine[Any, Any, None]]) -> None:
        actor = Actor(name, lambda process, bus: main(actor, process, bus))
        self.actors[name] = actor

    def _host(self, core: Any, *, watches: bool = True, telemetry: tuple[str, ...] = ()) -> None:
        made = core if hasattr(core, "name") else None
        name = (made or core()).name

        async def main(actor: Actor, process: Process, bus: NetBus) -> None:
            replica = self._replica(actor) if watches else None
            if replica is not None:
                await replica.start(bus, self.job.job.name)
            host: CoreHost[Any] = CoreHost(
                made or core(),
                bus,
                job_name=self.job.job.name,
                replica=replica,
                telemetry=telemetry,
                tick_ms=TICK_MS,
                clock=self.network.clock,
            )
            actor.shell = host
            if name == "pipeline_scheduler":
                self.loop.create_task(self._purge(bus, host))
            await host.run(asyncio.Event())

        self._add(name, main)

    def _replica(self, actor: Actor) -> Replica:
        """A replica of the role table that says which epochs its actor goes by."""
        replica, life = Replica(), actor.life
        replica.on_change(lambda table: self.see(TableSeen(self.now_ms, actor.name, life, table.epoch)))
        return replica

    async def _purge(self, bus: NetBus, host: CoreHost[Any]) -> None:
        """As the pipeline scheduler's shell does."""
        done = 0
        while True:
            await asyncio.sleep(PURGE_MS / 1000)
            floor = host.state.journal_floor
            if floor > done:
                try:
                    await bus.purge(stream(self.job.job.name, "journal"), below_seq=floor + 1)
                except BusError:
                    continue
                done = floor

    async def _orchestrator(self, actor: Actor, process: Process, bus: NetBus) -> None:
        core = OrchestratorCore(OrchestratorConfig.of(self.job))
        shell = Orchestrator(
            core,
            bus,
            self.network.connect(process),
            tick_ms=TICK_MS,
            clock=self.network.clock,
            holder=f"{actor.name}/{actor.life}",
        )
        actor.shell = shell
        await shell.run(asyncio.Event())

    async def _router(self, actor: Actor, process: Process, bus: NetBus) -> None:
        config = RouterConfig.of(self.job)
        router = actor.shell = Router(config, bus, self.job.job.name, self.network.clock)
        router.core = RouterCore(config, self.random.randrange(1 << 20))
        replica = self._replica(actor)
        replica.on_change(router.on_table)

        def noted(table: RoleTable) -> None:
            self.network.epochs[actor.name] = table.epoch

        replica.on_change(noted)
        await replica.start(bus, self.job.job.name)
        await router.run(asyncio.Event())

    async def _agent(self, actor: Actor, process: Process, bus: NetBus) -> None:
        replica = self._replica(actor)
        await replica.start(bus, self.job.job.name)
        edge_name = f"{actor.name}-{actor.life}"
        agent = actor.shell = Agent(self.job, bus, replica, edge_name=edge_name)
        agent.edge = RequestEdge(
            bus,
            self.job.job.name,
            edge_name,
            silence_ms=agent.config.silence_ms,
            replica=replica,
            make_state=self._watched_requests(actor),
        )
        await agent.run(asyncio.Event())

    def _watched_requests(self, actor: Actor) -> type[RequestState]:
        cluster, life = self, actor.life

        class WatchedRequest(RequestState):
            """Says which tokens were taken in."""

            def step(self, event: RequestEvent, now_ms: float) -> tuple[RequestEffect, ...]:
                before, attempt = len(self.tokens), self.attempt
                effects = super().step(event, now_ms)
                count = len(self.tokens) - before
                if count > 0:
                    version = getattr(event, "version", 0)
                    cluster.see(
                        Received(cluster.now_ms, actor.name, life, self.spec.request, attempt, before, count, version)
                    )
                return effects

        return WatchedRequest

    async def _node_agent(self, actor: Actor, process: Process, bus: NetBus) -> None:
        node = actor.name.removeprefix("node_agent-")
        config = NodeConfig.of(self.job, node, "sim.toml")
        files = Files(self.machines[node], process)
        shell = NodeAgent(config, bus, self.job.job.name, _no_command, self.network.clock, pids=files, host="simulated")
        actor.shell = shell
        await shell.run(asyncio.Event())

    def _launch(self, machine: Machine, started: Started) -> Callable[[], Coroutine[Any, Any, None]]:
        """What runs in a worker's, or the trainer's, process."""
        record, process = started.record, started.process
        bus = self.network.connect(process)
        self.see(
            ProcessBegan(self.now_ms, machine.name, record.worker, record.incarnation, record.service, record.gpus)
        )
        if record.service == "trainer":
            return lambda: self._run_trainer(machine, started, bus)
        engine = started.engine = Engine(
            self, record.worker, record.incarnation, record.gpus, released=record.worker in self._overlap
        )
        config = WorkerConfig.of(self.job, machine.name)

        async def run() -> None:
            shell = started.state = RolloutWorker(
                config,
                bus,
                engine,
                record.worker,
                record.incarnation,
                began=self.loop.time(),
                attempts=Silence(),
                fetch=engine.fetch,
                pid=record.pid,
            )
            core = shell.core = WatchedWorkerCore(record.worker, record.incarnation, released=shell.core.released)
            started.let_in = core.let_in
            await shell.run(started.stop)

        return run

    async def _run_trainer(self, machine: Machine, started: Started, bus: NetBus) -> None:
        record = started.record
        group = started.group = Group(
            self.disk,
            self.took_s,
            lambda held: self._held(machine.name, record.worker, record.incarnation, record.gpus, held),
        )
        self._held(machine.name, record.worker, record.incarnation, record.gpus, False)
        shell = started.state = Trainer(self.job, bus, parts=(group, build), metrics=NoMetrics(), token=self._token)
        await shell.run(started.stop)

    def _token(self, count: int) -> str:
        self._tokens += 1
        return f"{self._tokens:0{2 * count}x}"

    def _process_ended(self, machine: Machine, started: Started, error: BaseException | None) -> None:
        self.network.drop(started.process)
        if started.engine is not None:
            self.engines.pop(started.engine.endpoint, None)
        record = started.record
        self.see(ProcessEnded(self.now_ms, machine.name, record.worker, record.incarnation))
        self._blame(f"{record.worker}#{record.incarnation}", error)

    # -- what engines know of the world (`engine.Surroundings`)

    def took_s(self, shortest: float, longest: float) -> float:
        return shortest + (longest - shortest) * self.random.random()

    def memory(self, engine: Engine, held: bool) -> None:
        node = engine.worker.rpartition("-")[0]
        self._held(node, engine.worker, engine.incarnation, engine.gpus, held)

    def _held(self, node: str, worker: WorkerId, incarnation: Incarnation, gpus: tuple[int, ...], held: bool) -> None:
        self.see(MemoryHeld(self.now_ms, node, worker, incarnation, gpus, held))

    def began(self, engine: Engine, spec: GenerateSpec) -> None:
        request = self.network.generates.get((engine.worker, spec.request, spec.attempt))
        started = self.worker(engine.worker)
        state: WorkerState = started.state.state
        generation = started.let_in.get((spec.request, spec.attempt), state.role_generation)
        self.see(
            AttemptBegan(
                at_ms=self.now_ms,
                worker=engine.worker,
                incarnation=engine.incarnation,
                role=state.role,
                role_generation=generation,
                request=spec.request,
                attempt=spec.attempt,
                start=len(spec.prefix),
                version=int(engine.version),
                min_version=0 if request is None else int(request.min_version),
            )
        )

    def generated(self, engine: Engine, spec: GenerateSpec, start: int, count: int) -> None:
        version = int(engine.version)
        self.see(
            Generated(self.now_ms, engine.worker, engine.incarnation, spec.request, spec.attempt, start, count, version)
        )


def _no_command(config: NodeConfig, service: str, worker: str, incarnation: Incarnation) -> tuple[str, ...]:
    """A simulated process has no command line."""
    return (service, worker)
