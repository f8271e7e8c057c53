"""Node agent core (paper 5): what should run on the node against what does.

Fencing: of one worker slot at most one process lives, incarnations only rise, and one that ended or was told to end
never starts again. Every end is reported once as `worker.gone` and `gpu.free`; a kill of what is gone already is
answered again. The trainer, on the first training node, is kept running by this core itself.

Processes are touched through effects only (`Spawn`, `Signal`); the shell answers with `Started`, `StartFailed`, `Exited`.
"""

from __future__ import annotations

import msgspec

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import brief, tag_of
from messages.ids import Incarnation, WorkerId
from messages.node_agent import Kill, Launch
from messages.orchestrator import GpuFree, WorkerGone
from pearl_state.peers import wrong_capacity
from services.node_agent.config import RESTART_FIRST_MS, RESTART_MOST_MS, STEADY_MS, Config
from services.runtime.core import Input, Note, Refuse, Send, Tick

MOST_GRACE_MS = 600_000
"""A longer grace is no grace: the process would keep its GPUs."""
MOST_UNSEEN = 10_000
"""Incarnations that may have gone by without this agent (it was down); a number beyond fences the slot for ever."""

# What the shell tells the core, beside messages and ticks.


class Ended(msgspec.Struct, frozen=True):
    """At start: the newest incarnation of a worker whose end is in the stream."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


class Adopted(msgspec.Struct, frozen=True):
    """At start: a process of an earlier agent's, still alive."""

    worker: WorkerId
    incarnation: Incarnation
    gpus: tuple[int, ...]
    service: str
    started_ms: int


class Restored(msgspec.Struct, frozen=True):
    """At start: every `Ended`, `Adopted` and past capacity event has been given. Nothing is done before."""


class Started(msgspec.Struct, frozen=True):
    """A `Spawn` succeeded."""

    worker: WorkerId
    incarnation: Incarnation


class StartFailed(msgspec.Struct, frozen=True):
    """A `Spawn` failed: no process."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


class Exited(msgspec.Struct, frozen=True):
    """A process and its whole group have ended. `how`: "exit:1", "signal:9", or "exit:unknown" for an adopted one."""

    worker: WorkerId
    incarnation: Incarnation
    how: str


class StreamWentBack(msgspec.Struct, frozen=True):
    """The stream lost its newest events: sequences up to those known here are given out again."""


class Stop(msgspec.Struct, frozen=True):
    """The agent is to end, and everything it runs with it."""


# What the core asks the shell for, beside Send, Note and Refuse.


class Spawn(msgspec.Struct, frozen=True):
    """Start a process."""

    worker: WorkerId
    incarnation: Incarnation
    gpus: tuple[int, ...]
    service: str


class Signal(msgspec.Struct, frozen=True):
    """Signal a process's group: SIGKILL if `hard`, else SIGTERM."""

    worker: WorkerId
    incarnation: Incarnation
    hard: bool


NodeEffect = Spawn | Signal | Send | Note | Refuse
NodeEffects = tuple[NodeEffect, ...]


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that lives, or is being started. Times are Unix ms."""

    worker: WorkerId
    incarnation: Incarnation
    gpus: tuple[int, ...]
    service: str
    since_ms: int
    up: bool = False
    ending: str = ""  # why it was told to end
    termed: bool = False  # SIGTERM was sent
    kill_at_ms: int = 0  # SIGKILL then; 0: not told to end, or killed already


class Fence(msgspec.Struct, frozen=True):
    """The newest incarnation of a worker that must not be started (again), and how it ended."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


class Claim(msgspec.Struct, frozen=True):
    """The newest capacity event of a GPU, by stream sequence. `deadline_ms`: it is taken then; 0: it is not."""

    gpu: int
    seq: int
    deadline_ms: int
    done: bool = False  # the deadline has passed and been enforced


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """All a node agent knows. It survives in the processes' pid files and in the stream, not in a checkpoint."""

    clock_ms: int = 0
    processes: tuple[Process, ...] = ()
    fences: tuple[Fence, ...] = ()
    claims: tuple[Claim, ...] = ()
    trainer_failures: int = 0
    trainer_at_ms: int = 0  # not before
    restored: bool = False
    stopping: bool = False
    answers: int = 0  # numbers repeated answers

    @property
    def ended(self) -> tuple[tuple[WorkerId, int], ...]:
        """The newest incarnation of each slot that has ended, where none runs."""
        running = {process.worker for process in self.processes}
        return tuple((fence.worker, int(fence.incarnation)) for fence in self.fences if fence.worker not in running)

    @property
    def workers(self) -> tuple[tuple[WorkerId, int], ...]:
        """What a heartbeat says."""
        return tuple((process.worker, int(process.incarnation)) for process in self.processes)


class NodeAgentCore:
    """`step` of a node agent."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.name = f"node_agent-{config.node}"

    def initial(self) -> NodeState:
        return NodeState()

    def step(self, state: NodeState, event: Input) -> tuple[NodeState, NodeEffects]:
        """Pure. A durable input's `now_ms` is when the stream took it: a notice runs from there."""
        before = state
        state = msgspec.structs.replace(state, clock_ms=max(state.clock_ms, event.now_ms))
        match event.message:
            case Tick():
                effects: NodeEffects = ()
            case Launch() as launch:
                state, effects = self.on_launch(state, launch)
            case Kill() as kill:
                state, effects = self.on_kill(state, kill)
            case GpuReclaimed() as reclaimed:
                deadline_ms = max(1, event.now_ms + max(0, reclaimed.notice_ms))
                state, effects = self._on_capacity(state, reclaimed, event.seq, deadline_ms)
            case GpuAvailable() as available:
                state, effects = self._on_capacity(state, available, event.seq, 0)
            case Started() as started:
                state, effects = self.on_started(state, started)
            case StartFailed() as failed:
                state, effects = self._ended(
                    state, failed.worker, failed.incarnation, f"launch_failed: {failed.reason}"
                )
            case Exited() as exited:
                state, effects = self._ended(state, exited.worker, exited.incarnation, exited.how)
            case Ended() as ended:
                state, effects = self._fence(state, ended.worker, ended.incarnation, ended.reason), ()
            case Adopted() as adopted:
                state, effects = self.on_adopted(state, adopted)
            case Restored():
                state, effects = msgspec.structs.replace(state, restored=True), ()
            case StreamWentBack():
                # What is known of the GPUs stays true; whatever the stream says from now on is newer.
                claims = tuple(msgspec.structs.replace(claim, seq=0) for claim in state.claims)
                state, effects = msgspec.structs.replace(state, claims=claims), ()
            case Stop():
                state, effects = msgspec.structs.replace(state, stopping=True), ()
            case other:
                return before, (Refuse(f"{type(other).__name__} is no input of a node agent"),)
        if any(isinstance(effect, Refuse) for effect in effects):
            return before, effects
        state, more = self._converge(state)
        return state, effects + more

    def next_due_ms(self, state: NodeState) -> int | None:
        """When a Tick is needed next (Unix ms), or None."""
        due = [process.kill_at_ms for process in state.processes if process.kill_at_ms]
        due += [claim.deadline_ms for claim in state.claims if claim.deadline_ms and not claim.done]
        if self.config.trainer is not None and not state.stopping and _of(state, self.config.trainer) is None:
            due.append(state.trainer_at_ms)
        return min(due, default=None)

    # Events

    def on_launch(self, state: NodeState, launch: Launch) -> tuple[NodeState, NodeEffects]:
        """Start an incarnation, once, after the one before it has ended. Repeated by its sender until it is ready."""
        if wrong := self._wrong_slot(state, launch.worker, launch.incarnation):
            return state, (Refuse(f"launch of {wrong}"),)
        expected = "trainer" if launch.worker == self.config.trainer else "rollout_worker"
        if launch.service != expected:
            return state, (
                Refuse(f"launch of {launch.worker}: it is a {expected}, not a {brief(launch.service, 40)!r}"),
            )
        gpus = self.config.gpus_of[launch.worker]
        if launch.gpus != gpus:
            return state, (Refuse(f"launch of {launch.worker} on other GPUs than its {list(gpus)}"),)
        fence = _fence_of(state, launch.worker)
        if state.stopping:
            return state, ()
        if fence is not None and launch.incarnation <= fence.incarnation:
            if _of(state, launch.worker) is not None:
                return state, ()
            # Its end was told; whoever still asks for it has not heard (the broker may have lost it).
            return self._gone_again(state, launch.worker, launch.incarnation, fence.reason)
        running = _of(state, launch.worker)
        if running is not None and running.incarnation >= launch.incarnation:
            return state, ()
        if running is not None:
            return self._end(state, running, "killed:superseded", self.config.kill_grace_ms), ()
        if any(claim.gpu in launch.gpus and claim.deadline_ms and not claim.done for claim in state.claims):
            return state, ()  # under notice; if it is taken back, the command comes again
        return self._spawn(state, launch.worker, launch.incarnation, launch.gpus, launch.service)

    def on_kill(self, state: NodeState, kill: Kill) -> tuple[NodeState, NodeEffects]:
        """End the incarnation or an older one. What is gone is reported again, under an id of its own."""
        if wrong := self._wrong_slot(state, kill.worker, kill.incarnation):
            return state, (Refuse(f"kill of {wrong}"),)
        if not 0 <= kill.grace_ms <= MOST_GRACE_MS:
            return state, (Refuse(f"kill of {kill.worker} with a grace of {kill.grace_ms} ms"),)
        running = _of(state, kill.worker)
        if running is not None and running.incarnation <= kill.incarnation:
            return self._end(state, running, f"killed:{brief(kill.reason, 100)}", kill.grace_ms), ()
        fence = _fence_of(state, kill.worker)
        reason = fence.reason if fence is not None and fence.incarnation == kill.incarnation else "not running"
        # A launch of it may still be on its way: it must not start after its end has been reported.
        state = self._fence(state, kill.worker, kill.incarnation, reason)
        return self._gone_again(state, kill.worker, kill.incarnation, reason)

    def _gone_again(
        self, state: NodeState, worker: WorkerId, incarnation: Incarnation, reason: str
    ) -> tuple[NodeState, NodeEffects]:
        """Say that an incarnation is gone, under an id of its own."""
        state = msgspec.structs.replace(state, answers=state.answers + 1)
        gone = WorkerGone(worker=worker, incarnation=incarnation, reason=reason)
        msg_id = f"{tag_of(WorkerGone)}:{worker}:{incarnation}:{state.clock_ms}:{state.answers}"
        return state, (Send(gone, msg_id),)

    def _wrong_slot(self, state: NodeState, worker: WorkerId, incarnation: Incarnation) -> str:
        """What is wrong with a command to a slot, or ""; begins with the slot it names."""
        named = brief(worker, 80)
        if worker not in self.config.gpus_of:
            return f"{named!r}: node {self.config.node} has no such slot"
        running, fence = _of(state, worker), _fence_of(state, worker)
        newest = max(running.incarnation if running else 0, fence.incarnation if fence else 0)
        if not 0 < incarnation <= newest + MOST_UNSEEN:
            return f"{named} incarnation {incarnation}: the newest seen here is {newest}"
        return ""

    def on_started(self, state: NodeState, started: Started) -> tuple[NodeState, NodeEffects]:
        running = _of(state, started.worker)
        if running is None or running.incarnation != started.incarnation:
            return state, ()
        return _put(state, msgspec.structs.replace(running, up=True)), ()

    def on_adopted(self, state: NodeState, adopted: Adopted) -> tuple[NodeState, NodeEffects]:
        process = Process(
            worker=adopted.worker,
            incarnation=adopted.incarnation,
            gpus=adopted.gpus,
            service=adopted.service,
            since_ms=adopted.started_ms,
            up=True,
        )
        note = Note("process_adopted", f"adopted {adopted.worker} incarnation {adopted.incarnation}")
        return _put(state, process), (note,)

    def _on_capacity(
        self, state: NodeState, event: GpuReclaimed | GpuAvailable, seq: int, deadline_ms: int
    ) -> tuple[NodeState, NodeEffects]:
        """The newest event of each GPU counts, whatever the order of arrival (a restarted agent reads them again)."""
        wrong = wrong_capacity(event, self.config.zone, self.config.gpus)
        if wrong or event.node != self.config.node:
            # The elastic scheduler, whose input it is first, writes the dead letter.
            return state, (Note("capacity_ignored", wrong or f"an event of node {brief(event.node, 80)!r}", "warning"),)
        claims = {claim.gpu: claim for claim in state.claims}
        for gpu in event.gpus:
            old = claims.get(gpu)
            if old is None or seq > old.seq:
                claims[gpu] = Claim(gpu, seq, deadline_ms)
        return msgspec.structs.replace(state, claims=tuple(claims[gpu] for gpu in sorted(claims))), ()

    # Convergence

    def _converge(self, state: NodeState) -> tuple[NodeState, NodeEffects]:
        """Enforce deadlines, signal what is to end, keep the trainer running."""
        if not state.restored:
            return state, ()
        state = self._enforce(state)
        if state.stopping:
            for process in state.processes:
                state = self._end(state, process, "killed:shutdown", self.config.kill_grace_ms)
        effects: list[NodeEffect] = []
        for process in state.processes:
            if process.kill_at_ms and process.up:
                state, signals = self._signal(state, process)
                effects.extend(signals)
        if self._trainer_due(state):
            assert self.config.trainer is not None
            fence = _fence_of(state, self.config.trainer)
            following = Incarnation(1 if fence is None else fence.incarnation + 1)
            gpus = tuple(range(self.config.gpus))
            state, spawn = self._spawn(state, self.config.trainer, following, gpus, "trainer")
            effects.extend(spawn)
        return state, tuple(effects)

    def _enforce(self, state: NodeState) -> NodeState:
        """At a reclaim's deadline whatever was started on the GPUs before it ends, without a grace.

        Enforced once: what is launched later is there because the GPUs came back.
        """
        due = [claim for claim in state.claims if claim.deadline_ms and not claim.done]
        due = [claim for claim in due if claim.deadline_ms <= state.clock_ms]
        if not due:
            return state
        deadlines = {claim.gpu: claim.deadline_ms for claim in due}
        for process in state.processes:
            if any(process.since_ms <= deadlines[gpu] for gpu in process.gpus if gpu in deadlines):
                state = self._end(state, process, "killed:reclaimed", 0)
        claims = tuple(msgspec.structs.replace(claim, done=True) if claim in due else claim for claim in state.claims)
        return msgspec.structs.replace(state, claims=claims)

    def _end(self, state: NodeState, process: Process, reason: str, grace_ms: int) -> NodeState:
        """Want a process to end. A second demand may only bring its SIGKILL forward."""
        at_ms = max(1, state.clock_ms + grace_ms)
        if process.ending and (not process.kill_at_ms or process.kill_at_ms <= at_ms):
            return state
        return _put(state, msgspec.structs.replace(process, ending=process.ending or reason, kill_at_ms=at_ms))

    def _signal(self, state: NodeState, process: Process) -> tuple[NodeState, NodeEffects]:
        """SIGTERM once, SIGKILL once the grace is over (or at once, without SIGTERM, if there is none)."""
        if process.kill_at_ms <= state.clock_ms:
            state = _put(state, msgspec.structs.replace(process, kill_at_ms=0))
            return state, (Signal(process.worker, process.incarnation, hard=True),)
        if process.termed:
            return state, ()
        state = _put(state, msgspec.structs.replace(process, termed=True))
        return state, (Signal(process.worker, process.incarnation, hard=False),)

    def _trainer_due(self, state: NodeState) -> bool:
        return (
            self.config.trainer is not None
            and not state.stopping
            and _of(state, self.config.trainer) is None
            and state.clock_ms >= state.trainer_at_ms
        )

    def _spawn(
        self, state: NodeState, worker: WorkerId, incarnation: Incarnation, gpus: tuple[int, ...], service: str
    ) -> tuple[NodeState, NodeEffects]:
        process = Process(worker=worker, incarnation=incarnation, gpus=gpus, service=service, since_ms=state.clock_ms)
        note = Note("process_start", f"start {worker} incarnation {incarnation} on GPUs {list(gpus)}")
        return _put(state, process), (note, Spawn(worker, incarnation, gpus, service))

    def _ended(
        self, state: NodeState, worker: WorkerId, incarnation: Incarnation, how: str
    ) -> tuple[NodeState, NodeEffects]:
        process = _of(state, worker)
        if process is None or process.incarnation != incarnation:
            return state, ()
        reason = process.ending or how
        state = msgspec.structs.replace(
            state, processes=tuple(entry for entry in state.processes if entry.worker != worker)
        )
        state = self._fence(state, worker, incarnation, reason)
        if worker == self.config.trainer:
            state = self._plan_restart(state, process)
        note = Note("process_ended", f"{worker} incarnation {incarnation} ended: {reason}")
        gone = WorkerGone(worker=worker, incarnation=incarnation, reason=reason)
        free = GpuFree(node=self.config.node, gpus=process.gpus, worker=worker, incarnation=incarnation)
        return state, (note, Send(gone), Send(free))

    def _plan_restart(self, state: NodeState, process: Process) -> NodeState:
        lived_ms = state.clock_ms - process.since_ms
        failures = 1 if lived_ms >= STEADY_MS else state.trainer_failures + 1
        pause_ms = min(RESTART_MOST_MS, RESTART_FIRST_MS * 2 ** min(failures - 1, 16))
        return msgspec.structs.replace(state, trainer_failures=failures, trainer_at_ms=state.clock_ms + pause_ms)

    def _fence(self, state: NodeState, worker: WorkerId, incarnation: Incarnation, reason: str) -> NodeState:
        old = _fence_of(state, worker)
        if old is not None and old.incarnation >= incarnation:
            return state
        others = [fence for fence in state.fences if fence.worker != worker]
        fences = sorted([*others, Fence(worker, incarnation, reason)], key=lambda fence: fence.worker)
        return msgspec.structs.replace(state, fences=tuple(fences))


def _of(state: NodeState, worker: WorkerId) -> Process | None:
    return next((process for process in state.processes if process.worker == worker), None)


def _fence_of(state: NodeState, worker: WorkerId) -> Fence | None:
    return next((fence for fence in state.fences if fence.worker == worker), None)


def _put(state: NodeState, process: Process) -> NodeState:
    others = [entry for entry in state.processes if entry.worker != process.worker]
    return msgspec.structs.replace(state, processes=tuple(sorted([*others, process], key=lambda entry: entry.worker)))
