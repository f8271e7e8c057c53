"""One policy on one trace: the production control cores, modelled processes and episodes on one virtual clock.

Nothing here decides anything: the elastic scheduler, the decision engine, the orchestrator, the cluster rebuilder, the toggle
manager, the pipeline scheduler, the runtime tracker, the router and each worker's lifecycle are the cores that the services
run. Messages take no time; a core's clock ticks only while something is pending in it. The same seed gives the same run.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from messages.agent import RolloutTask
from messages.decision_engine import WorkloadProfile
from messages.elastic_scheduler import GpuReclaimed, NodeUp, TrainingBegin
from messages.envelope import Message
from messages.ids import Incarnation, WorkerId, Zone
from messages.monitor import DecisionRecord, GpusReturned
from messages.node_agent import Kill, Launch
from messages.pipeline_scheduler import BatchReady, StepFinished, TrajectoryCompleted, WeightsPublished
from messages.runtime_tracker import OperationTimed, RequestFinished, WorkerHeartbeat
from messages.subjects import ROUTES, message_id
from messages.trainer import TrainerRelease, TrainerResume
from pearl_state.model import RoleTable
from services.cluster_rebuilder.config import Config as RebuilderConfig
from services.cluster_rebuilder.core import ClusterRebuilderCore
from services.elastic_scheduler.config import Config as ElasticConfig
from services.elastic_scheduler.core import ElasticSchedulerCore
from services.jobfile import JobFile, rollout_slots
from services.orchestrator.config import Config as OrchestratorConfig
from services.orchestrator.core import OrchestratorCore
from services.orchestrator.core_facts import RECLAIMED
from services.pipeline_scheduler.config import Config as PipelineConfig
from services.pipeline_scheduler.core import PipelineSchedulerCore
from services.preemption_feed.schedule import schedule
from services.preemption_feed.traces import Trace
from services.rollout_worker.core import COMMANDS
from services.router.config import Config as RouterConfig
from services.runtime.core import Input, Note, Refuse, Send, Tick
from services.runtime_tracker.core import RuntimeTrackerCore
from services.simulator.whatif.engine import NEVER, Costs
from services.simulator.whatif.jobs import decision_config, job_of, tracker_config
from services.simulator.whatif.policies import Policy
from services.simulator.whatif.processes import Trainer, Worker
from services.simulator.whatif.rollout import Rollout
from services.simulator.whatif.settings import Settings
from services.simulator.whatif.trajectories import Episodes
from services.simulator.whatif.uses import Uses
from services.timing.hardware import Hardware
from services.toggle_manager.config import Config as ToggleConfig
from services.toggle_manager.core import ToggleManagerCore

START_MS = 1_000_000
TICK_S = 0.5
"""Cores tick so often while something is pending in them: commands to repeat, deadlines to keep."""
IDLE_TICK_S = 5.0
BEAT_S = 5.0
"""The tracker hears of each worker so often; of very many workers less often."""

Core = Any  # the cores share no base class; each has `inputs`, `initial` and `step`


class Seen:
    """What the run's result is made of, as it happens."""

    def __init__(self) -> None:
        self.records: list[tuple[float, DecisionRecord, str]] = []
        self.returns: list[GpusReturned] = []
        self.steps: list[tuple[float, StepFinished]] = []
        self.begun: dict[int, float] = {}  # batch -> training asked for its GPUs
        self.admitted: dict[int, float] = {}  # batch -> its first task
        self.ready: dict[int, float] = {}  # batch -> its last trajectory ended
        self.oldest: dict[int, int] = {}  # batch -> oldest version among its tokens
        self.rewards: dict[int, list[float]] = {}
        self.preemptions = 0
        self.refusals: list[tuple[str, str]] = []
        self.warnings: list[tuple[float, str, str]] = []
        self.messages = 0


class Simulation:
    """See the module. `finish` runs it."""

    def __init__(
        self,
        trace: Trace,
        episodes: Episodes,
        profile: WorkloadProfile,
        hardware: Hardware,
        policy: Policy,
        settings: Settings,
        *,
        seconds: float,
        seed: int,
        train_steps: int = 1_000_000,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.seconds = seconds
        self.seed = seed
        self.hardware = policy.hardware(hardware)
        self.job: JobFile = job_of(
            policy, settings, trace, self.hardware, seconds=seconds, seed=seed, train_steps=train_steps
        )
        self.slots = rollout_slots(self.job)
        self.now_s = 0.0
        self.seen = Seen()
        self.workers: dict[str, Worker] = {}
        self.ended: list[Worker] = []
        self._heap: list[tuple[float, int, Callable[[], None] | None, Any, int]] = []
        self._numbers = 0
        self._queue: deque[Message] = deque()
        self._ids: set[str] = set()
        self._seq = 0
        self._tick_at = NEVER
        self._costs = Costs(self.hardware, settings.max_running, settings.chunk_tokens)
        self.train_s = settings.train_s or self.hardware.train_step_s(
            settings.batch_trajectories, max(1, settings.training_gpus)
        )
        self.trainer = Trainer(self, self.train_s)
        self.rollout = Rollout(
            self, RouterConfig.of(self.job), episodes, self.hardware, settings.placement, settings.chunk_tokens
        )
        self.orchestrator = OrchestratorCore(OrchestratorConfig.of(self.job))
        self.table: RoleTable = self.orchestrator.initial()
        self.uses = Uses(self.slots, self.table) if settings.spans else None
        self.elastic = ElasticSchedulerCore(ElasticConfig.of(self.job))
        self.decisions = policy.engine(decision_config(self.job, profile))
        self.rebuilder = ClusterRebuilderCore(RebuilderConfig.of(self.job))
        self.toggle = ToggleManagerCore(ToggleConfig.of(self.job))
        self.pipeline = PipelineSchedulerCore(PipelineConfig.of(self.job))
        self.tracker = RuntimeTrackerCore(tracker_config(self.job, profile))
        watching: list[Core] = [self.rebuilder, self.decisions, self.pipeline]
        if settings.training_gpus:
            watching.insert(1, self.toggle)
        self._watching: list[Core] = watching
        self._cores: list[Core] = [self.elastic, self.tracker, *watching]
        self._states: dict[str, Any] = {core.name: core.initial() for core in self._cores}
        self._listeners: dict[type, list[Core]] = {}
        for core in self._cores:
            for kind in core.inputs:
                self._listeners.setdefault(kind, []).append(core)
        self._for_orchestrator = frozenset(self.orchestrator.inputs)
        self._overlap = frozenset(slot.worker for slot in self.slots if slot.zone is Zone.OVERLAP)
        self._beat_s = max(BEAT_S, len(self.slots) / 16)
        self._plan_feed(trace)

    # ---- the clock ----

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """`action` happens then."""
        self._numbers += 1
        heapq.heappush(self._heap, (at_s, self._numbers, action, None, 0))

    def due(self, worker: Worker) -> None:
        """The worker's engine is to be looked at when it says so."""
        engine = worker.engine
        next_s = engine.next_s
        if engine.ended or engine.reserved or engine.dropped:
            next_s = self.now_s
        if next_s < NEVER:
            self._numbers += 1
            worker.due_s, worker.number = next_s, self._numbers
            if next_s < worker.queued_s:
                worker.stamp += 1
                worker.queued_s = next_s
                heapq.heappush(self._heap, (next_s, self._numbers, None, worker, worker.stamp))
        elif worker.queued_s < NEVER:
            worker.stamp += 1
            worker.queued_s = NEVER

    def now_ms(self) -> int:
        """For the cores."""
        return START_MS + int(self.now_s * 1000)

    def worker(self, name: str) -> Worker | None:
        """The living process of a slot."""
        worker = self.workers.get(name)
        return worker if worker is not None and worker.alive else None

    def finish(self, until: Callable[[], bool] | None = None) -> None:
        """Run to the end, or until it holds."""
        self._begin()
        heap, seconds = self._heap, self.seconds
        while heap and heap[0][0] <= seconds:
            at_s, number, action, worker, stamp = heapq.heappop(heap)
            if at_s > self.now_s:
                self.now_s = at_s
            if action is not None:
                action()
            elif worker.stamp == stamp:
                if worker.number == number:
                    worker.queued_s = NEVER
                    engine = worker.engine
                    engine.advance(self.now_s)
                    if engine.ended or engine.reserved or engine.dropped:
                        self.rollout.take(worker)
                    self.due(worker)
                else:  # put off since
                    worker.queued_s = worker.due_s
                    heapq.heappush(heap, (worker.due_s, worker.number, None, worker, stamp))
            # What happens at one moment reaches the cores together: one epoch for a group of workers, not one each.
            if self._queue and not (heap and heap[0][0] <= self.now_s):
                self._settle()
                if until is not None and until():
                    return
        self.now_s = seconds

    def _begin(self) -> None:
        self.trainer.start()
        for node in self.job.nodes:
            self.publish(NodeUp(node=node.name, gpus=tuple(range(node.gpus)), agent_incarnation=1, host="sim"))  # type: ignore[arg-type]
        self._tell_table()
        for core in self._cores:
            self._step(core, Input(self.now_ms(), Tick()))
        self._settle()
        self.at(self._beat_s, self._beat)

    # ---- the bus ----

    def publish(self, message: Message, msg_id: str | None = None) -> None:
        """An event, a command or telemetry; it arrives before anything else happens."""
        route = ROUTES[type(message)]
        if route.family == "ev":
            identity = msg_id or message_id(message)
            if identity is not None:
                if identity in self._ids:
                    return
                self._ids.add(identity)
        elif route.family == "tel" and not isinstance(message, OperationTimed):
            return
        self._queue.append(message)

    def finished(self, message: RequestFinished) -> None:
        """A turn's telemetry, straight to the tracker."""
        state, _ = self.tracker.step(self._states["runtime_tracker"], Input(self.now_ms(), message))
        self._states["runtime_tracker"] = state

    def _settle(self) -> None:
        """Deliver until nothing is on its way."""
        queue = self._queue
        while True:
            inputs: list[Input] = []
            while queue:
                self._deliver(queue.popleft(), inputs)
            if not inputs:
                break
            self._step_orchestrator(inputs)
        if self._pending():
            self._tick_in(TICK_S)

    def _deliver(self, message: Message, inputs: list[Input]) -> None:
        self.seen.messages += 1
        self._seq += 1
        now_ms = self.now_ms()
        self._look(message)
        for core in self._listeners.get(type(message), ()):
            self._step(core, Input(now_ms, message, self._seq))
        if type(message) in self._for_orchestrator:
            inputs.append(Input(now_ms, message, self._seq))

    def _look(self, message: Message) -> None:
        """What is not for a core: commands, tasks, and what the result needs."""
        seen = self.seen
        match message:
            case RolloutTask():
                seen.admitted.setdefault(message.batch, self.now_s)
                self.rollout.start(message)
            case TrajectoryCompleted():
                batch = message.batch
                seen.oldest[batch] = min(seen.oldest.get(batch, message.min_version), message.min_version)
                seen.rewards.setdefault(batch, []).append(message.reward)
            case Launch():
                self._launch(message)
            case Kill():
                self._kill(message)
            case TrainerRelease() | TrainerResume():
                self.trainer.receive(message)
            case TrainingBegin(batch=batch):
                seen.begun.setdefault(batch, self.now_s)
                seen.ready.setdefault(batch, self.now_s)
            case BatchReady(batch=batch):
                rewards = seen.rewards.pop(batch, [])
                self.trainer.rewards[batch] = sum(rewards) / max(1, len(rewards))
                self.trainer.tokens[batch] = self.rollout.tokens_of.get(batch, (0, 0))[1]
            case StepFinished(batch=batch):
                if batch == len(seen.steps):  # it may be told twice
                    seen.steps.append((self.now_s, message))
            case DecisionRecord():
                seen.records.append((self.now_s, message, self._cause()))
            case GpusReturned():
                seen.returns.append(message)
            case OperationTimed():
                self._step(self.tracker, Input(self.now_ms(), message))
            case WeightsPublished():
                pass
            case _:
                if isinstance(message, COMMANDS):
                    worker = self.workers.get(message.worker)
                    if worker is not None:
                        worker.receive(message)

    def _cause(self) -> str:
        budget = self._states["decision_engine"].budget
        return "" if budget is None else budget.cause

    def _step(self, core: Core, event: Input) -> None:
        self._states[core.name], effects = core.step(self._states[core.name], event)
        self._perform(core.name, effects)

    def _perform(self, name: str, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            match effect:
                case Send(message, msg_id):
                    self.publish(message, msg_id)
                case Refuse(reason):
                    self.seen.refusals.append((name, reason))
                case Note(action, text, "warning"):
                    self.seen.warnings.append((self.now_s, f"{name}.{action}", text))
                case _:
                    pass

    def _step_orchestrator(self, inputs: list[Input]) -> None:
        table, each, after = self.orchestrator.step_all(self.table, inputs)
        changed = table is not self.table
        self.table = table
        for effects in (*each, after):
            self._perform("orchestrator", effects)
        if changed:
            self._tell_table()

    def _tell_table(self) -> None:
        event = Input(self.now_ms(), self.table)
        if self.uses is not None:
            self.uses.on_table(self.now_s, self.table)
        for core in self._watching:
            self._step(core, event)
        self.rollout.on_table(self.table)

    # ---- ticks ----

    def _pending(self) -> bool:
        """Whether some core waits for time to pass."""
        states, writer = self._states, self.table.writer
        toggle = states.get("toggle_manager")
        pipeline = states["pipeline_scheduler"]
        return (
            bool(states["cluster_rebuilder"].pending)
            or (toggle is not None and bool(toggle.pending))
            or states["elastic_scheduler"].gathering_since_ms is not None
            or self.table.plan is not None
            or writer.hold_until_ms > 0
            or any(entry.until_ms > 0 for entry in writer.backoffs)
            or (pipeline.published is not None and pipeline.serving < pipeline.published.version)
        )

    def _tick_in(self, seconds: float) -> None:
        at_s = self.now_s + seconds
        if at_s < self._tick_at:
            self._tick_at = at_s
            self.at(at_s, self._tick)

    def _tick(self) -> None:
        if self.now_s < self._tick_at:
            return  # an earlier one was asked for since
        self._tick_at = NEVER
        event = Input(self.now_ms(), Tick())
        for core in self._cores:
            self._step(core, event)
        self._step_orchestrator([event])
        self._settle()

    # ---- processes ----

    def _launch(self, command: Launch) -> None:
        worker = self.workers.get(command.worker)
        if worker is not None and (worker.incarnation >= command.incarnation or worker.alive):
            if worker.alive and worker.incarnation < command.incarnation:
                worker.die("replaced")
            return
        if worker is not None:
            self.ended.append(worker)
        self.workers[command.worker] = Worker(
            self,
            command.worker,
            Incarnation(command.incarnation),
            self.hardware,
            self._costs,
            self.settings.max_running,
            self.settings.chunk_tokens,
            self.policy.update_pause,
            released=command.worker in self._overlap,
        )

    def _kill(self, command: Kill) -> None:
        worker = self.workers.get(command.worker)
        if worker is not None and worker.alive and worker.incarnation <= command.incarnation:
            worker.die(f"killed:{command.reason}")

    def break_off(self, worker: Worker) -> int:
        """Everything on it is interrupted."""
        before = self.rollout.interrupted
        self.rollout.break_off(worker)
        return self.rollout.interrupted - before

    def new_version(self, worker: Worker) -> None:
        """Its weights change."""
        self.rollout.break_handovers(worker)

    def _beat(self) -> None:
        """Heartbeats, to the tracker; the router has its own."""
        now_ms = self.now_ms()
        for name in sorted(self.workers):
            worker = self.workers[name]
            if not worker.alive or not worker.up:
                continue
            sums = worker.engine.sums
            told = (sums.iterations, sums.prefilled)
            if told == worker.told:
                continue
            worker.told = told
            beat = WorkerHeartbeat(
                worker=WorkerId(name),
                incarnation=worker.incarnation,
                running=worker.engine.running,
                queued=worker.engine.requests - worker.engine.running,
                version=worker.version,
                serving=worker.state.serving,
                decode_iterations=sums.iterations,
                decode_tokens=sums.decoded,
                decode_s=sums.decode_s,
                decode_batch_sum=sums.batch_sum,
                prefill_tokens=sums.prefilled,
                prefill_s=sums.prefill_s,
                refused=0,
                rss_bytes=0,
            )
            self._step(self.tracker, Input(now_ms, beat))
        self.at(self.now_s + self._beat_s, self._beat)

    # ---- the trace ----

    def _plan_feed(self, trace: Trace) -> None:
        slots = tuple(slot for slot in self.slots if slot.zone is Zone.PREEMPTIBLE)
        if not slots:
            return
        planned = schedule(trace, slots, self.job.feed, random.Random(f"feed/{self.seed}"))
        for each in planned.events:
            at_s = each.at_ms / 1000
            if at_s <= self.seconds:
                self.at(at_s, lambda event=each.event: self._feed(event))

    def _feed(self, event: Message) -> None:
        if self.uses is not None:
            self.uses.on_capacity(self.now_s, event)
        self.publish(event)
        if isinstance(event, GpuReclaimed):
            self.seen.preemptions += len(event.gpus) // self.hardware.gpus
            self.at(self.now_s + event.notice_ms / 1000, lambda: self._taken(event))

    def _taken(self, event: GpuReclaimed) -> None:
        """The notice is over: what still runs there is killed."""
        gone = set(event.gpus)
        state = self._states["elastic_scheduler"]
        back = {gpu.index for gpu in state.available if gpu.node == event.node}
        for slot in self.slots:
            if slot.node == event.node and any(gpu.index in gone - back for gpu in slot.gpus):
                worker = self.workers.get(slot.worker)
                if worker is not None and worker.alive:
                    worker.die(RECLAIMED)
