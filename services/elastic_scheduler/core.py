"""The elastic scheduler's core: capacity events and training notifications in, budgets out. Pure.

Reserved slots are always usable. A preemptible slot is usable while all its GPUs are available. Overlap slots are
usable while training is idle; while it is not they are `leaving`, by a deadline that counts from its asking. Bursts of arrivals are gathered for `coalesce_ms`; whatever takes slots away, and
what training says, passes at once.
"""

from __future__ import annotations

import msgspec

from messages.decision_engine import BudgetChanged, Leave
from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, NodeUp, TrainingBegin, TrainingFinished
from messages.envelope import Message, brief
from messages.ids import Gpu, NodeId, Zone
from messages.pipeline_scheduler import WeightsPublished
from pearl_state.peers import wrong_batch, wrong_capacity, wrong_next_batch, wrong_weights
from services.elastic_scheduler.config import Config
from services.jobfile import Slot
from services.runtime.core import Effects, Input, Note, Refuse, Send, Tick

MOST_CAUSES = 8
"""Causes named in a budget; the others of a burst are counted."""


class LostGpu(msgspec.Struct, frozen=True):
    """A GPU taken from rollout. `deadline_ms` 0: it was gone when we heard; `heard_ms` is when that was."""

    gpu: Gpu
    deadline_ms: int
    heard_ms: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What is available, what was lost lately, and the last budget emitted."""

    budget_id: int = 0  # of the last budget emitted; 0: none yet
    available: tuple[Gpu, ...] = ()  # preemptible GPUs, sorted
    lost: tuple[LostGpu, ...] = ()  # sorted by GPU; each GPU at most once, and never one that is available
    training_batch: int | None = None
    return_by_ms: int = 0  # overlap slots are training's by then
    trained: int = -1  # newest batch finished
    version: int = 0  # newest policy version published: batches below it are trained
    gathering_since_ms: int | None = None  # first event of the burst being gathered
    causes: tuple[str, ...] = ()
    uncounted: int = 0  # causes beyond MOST_CAUSES
    last: BudgetChanged | None = None


class ElasticSchedulerCore:
    """Emits budget 1 at its start and a newer one whenever the usable slots or the training batch change."""

    name = "elastic_scheduler"
    inputs: tuple[type[Message], ...] = (
        GpuAvailable,
        GpuReclaimed,
        NodeUp,
        TrainingBegin,
        TrainingFinished,
        WeightsPublished,
    )
    state_type = State

    def __init__(self, config: Config) -> None:
        self.config = config

    def initial(self) -> State:
        return State()

    def step(self, state: State, event: Input) -> tuple[State, Effects]:
        match event.message:
            case GpuAvailable() as message:
                return self.on_available(state, message, event.now_ms)
            case GpuReclaimed() as message:
                return self.on_reclaimed(state, message, event.now_ms)
            case NodeUp() as message:
                return self.on_node_up(state, message)
            case TrainingBegin() as message:
                return self.on_training_begin(state, message, event.now_ms)
            case TrainingFinished() as message:
                return self.on_training_finished(state, message, event.now_ms)
            case WeightsPublished() as message:
                return self.on_weights_published(state, message)
            case Tick():
                return self.on_tick(state, event.now_ms)
            case other:
                return state, (Refuse(f"the elastic scheduler does not handle {type(other).__name__}"),)

    def on_available(self, state: State, message: GpuAvailable, now_ms: int) -> tuple[State, Effects]:
        """GPUs arrive, or a reclaim is taken back before its deadline. Those already available stay so."""
        wrong = self._wrong(message)
        if wrong:
            return state, (Refuse(wrong),)
        if self.config.nodes[message.node].zone is Zone.RESERVED:
            return state, ()
        gpus = {Gpu(message.node, index) for index in message.gpus}
        new = gpus.difference(state.available)
        if not new:
            return state, ()
        state = msgspec.structs.replace(
            state,
            available=tuple(sorted(new.union(state.available))),
            lost=tuple(lost for lost in state.lost if lost.gpu not in new),
            gathering_since_ms=now_ms if state.gathering_since_ms is None else state.gathering_since_ms,
        )
        state = _because(state, _cause("gpu.available", message.node, new))
        if self.config.coalesce_ms == 0:
            return self._emit(state, now_ms)
        return state, ()

    def on_reclaimed(self, state: State, message: GpuReclaimed, now_ms: int) -> tuple[State, Effects]:
        """GPUs are taken. A second reclaim of the same GPUs may only bring their deadline forward."""
        wrong = self._wrong(message)
        if wrong:
            return state, (Refuse(wrong),)
        gpus = {Gpu(message.node, index) for index in message.gpus}
        taken = gpus.intersection(state.available)
        remembered = self._remembered(state, now_ms)
        leaving = {lost.gpu: lost for lost in remembered if lost.gpu in gpus}
        if not taken and not leaving:
            return state, (Refuse(f"GPUs {_indices(gpus)} of node {message.node} are not available"),)
        deadline_ms = now_ms + message.notice_ms if message.notice_ms else 0
        sooner = {
            gpu: lost for gpu, lost in leaving.items() if lost.deadline_ms > now_ms and deadline_ms < lost.deadline_ms
        }
        if not taken and not sooner:
            return state, ()
        changed = taken.union(sooner)
        newly = tuple(LostGpu(gpu, deadline_ms, now_ms) for gpu in changed)
        kept = tuple(lost for lost in remembered if lost.gpu not in changed)
        state = msgspec.structs.replace(
            state,
            available=tuple(gpu for gpu in state.available if gpu not in taken),
            lost=tuple(sorted((*kept, *newly), key=_by_gpu)),
        )
        notes: Effects = ()
        if strangers := gpus - taken - leaving.keys():
            text = f"GPUs {_indices(strangers)} of node {message.node} were reclaimed, but were not available"
            notes = (Note("reclaim.partial", text, "warning"),)
        state, effects = self._emit(_because(state, _cause("gpu.reclaimed", message.node, changed)), now_ms)
        return state, (*effects, *notes)

    def on_node_up(self, state: State, message: NodeUp) -> tuple[State, Effects]:
        """A node reports; that it has other GPUs than the job file says is worth a line, not a change."""
        node = self.config.nodes.get(message.node)
        if node is None:
            return state, (Refuse(self._unknown_node(message.node)),)
        missing = set(range(node.gpus)).difference(message.gpus)
        if missing:
            text = (
                f"node {message.node} lacks GPUs {sorted(missing)} of the {node.gpus} in the job file: correct its gpus"
            )
            return state, (Note("node.short", text, "warning"),)
        return state, ()

    def on_training_begin(self, state: State, message: TrainingBegin, now_ms: int) -> tuple[State, Effects]:
        """Training wants its GPUs back: overlap slots are no longer usable.

        Batches are trained one after the other, each begun when the one before is finished. One that is further ahead is
        refused: believed, it would make the batch that is really next look old, and nothing would ever be trained again. Where the
        store went back, the version that the trainer publishes says how far training had come (batch k trains version k).
        """
        if wrong := wrong_batch(message.batch, self.config.train_steps) or wrong_next_batch(
            message.batch, max(state.trained, state.version - 1)
        ):
            return state, (Refuse(wrong),)
        if message.batch <= state.trained or state.training_batch is not None:
            return state, ()
        by_ms = now_ms + self.config.return_ms
        state = msgspec.structs.replace(state, training_batch=message.batch, return_by_ms=by_ms)
        return self._emit(_because(state, f"training.begin {message.batch}"), now_ms)

    def on_training_finished(self, state: State, message: TrainingFinished, now_ms: int) -> tuple[State, Effects]:
        """Training is idle again."""
        if wrong := wrong_batch(message.batch, self.config.train_steps):
            return state, (Refuse(wrong),)
        if message.batch <= state.trained:
            return state, ()
        if message.batch != state.training_batch:
            return state, (Refuse(f"training of batch {message.batch} is said to be finished and has not begun"),)
        state = msgspec.structs.replace(state, trained=message.batch, training_batch=None, return_by_ms=0)
        return self._emit(_because(state, f"training.finished {message.batch}"), now_ms)

    def on_weights_published(self, state: State, message: WeightsPublished) -> tuple[State, Effects]:
        """How far training has come, as the trainer says it."""
        if wrong := wrong_weights(message, self.config.train_steps):
            return state, (Refuse(wrong),)
        return (
            state if message.version <= state.version else msgspec.structs.replace(state, version=message.version)
        ), ()

    def on_tick(self, state: State, now_ms: int) -> tuple[State, Effects]:
        """The first budget, and the end of a gathering window."""
        if state.budget_id == 0:
            return self._emit(_because(state, "start"), now_ms)
        if state.gathering_since_ms is not None and now_ms >= state.gathering_since_ms + self.config.coalesce_ms:
            return self._emit(state, now_ms)
        return state, ()

    def _emit(self, state: State, now_ms: int) -> tuple[State, Effects]:
        """The next budget, unless nothing in it changed (half a worker's GPUs came, say)."""
        remembered = self._remembered(state, now_ms)
        available = frozenset(state.available)
        dedicated = tuple(slot.worker for slot in self.config.slots if _usable(slot, available))
        idle = state.training_batch is None
        overlap = tuple(slot.worker for slot in self.config.slots if idle and slot.zone is Zone.OVERLAP)
        leaving = _leaving(self.config.slots, available, remembered)
        if not idle:
            lent = (slot.worker for slot in self.config.slots if slot.zone is Zone.OVERLAP)
            leaving += tuple(Leave(worker, state.return_by_ms) for worker in lent)
        causes = (*state.causes, f"and {state.uncounted} more") if state.uncounted else state.causes
        state = msgspec.structs.replace(state, lost=remembered, gathering_since_ms=None, causes=(), uncounted=0)
        last = state.last
        if (
            last is not None
            and (dedicated, overlap, state.training_batch)
            == (
                last.dedicated,
                last.overlap,
                last.training_batch,
            )
            and set(leaving) <= set(last.leaving)
        ):
            return state, ()
        budget = BudgetChanged(
            budget_id=state.budget_id + 1,
            dedicated=dedicated,
            overlap=overlap,
            leaving=leaving,
            training_batch=state.training_batch,
            cause=", ".join(causes),
        )
        assert not {leave.worker for leave in leaving}.intersection(dedicated), "a usable slot is not leaving"
        return msgspec.structs.replace(state, budget_id=budget.budget_id, last=budget), (
            Send(budget),
            Note(
                "budget",
                f"budget {budget.budget_id}: {len(dedicated)} dedicated, {len(overlap)} overlap ({budget.cause})",
            ),
        )

    def _remembered(self, state: State, now_ms: int) -> tuple[LostGpu, ...]:
        """Lost GPUs whose deadline has not passed for long."""
        keep_ms = self.config.keep_leaving_ms
        return tuple(lost for lost in state.lost if max(lost.deadline_ms, lost.heard_ms) + keep_ms > now_ms)

    def _wrong(self, event: GpuAvailable | GpuReclaimed) -> str:
        node = self.config.nodes.get(event.node)
        return self._unknown_node(event.node) if node is None else wrong_capacity(event, node.zone, node.gpus)

    def _unknown_node(self, node_id: NodeId) -> str:
        return f"node {brief(node_id, 80)!r} is not in the job file, which has {', '.join(sorted(self.config.nodes)) or 'none'}"


def _usable(slot: Slot, available: frozenset[Gpu]) -> bool:
    return slot.zone is Zone.RESERVED or (slot.zone is Zone.PREEMPTIBLE and available.issuperset(slot.gpus))


def _leaving(slots: tuple[Slot, ...], available: frozenset[Gpu], lost: tuple[LostGpu, ...]) -> tuple[Leave, ...]:
    """The slots that lost GPUs and had them all until lately, each with its earliest deadline."""
    deadlines = {entry.gpu: entry.deadline_ms for entry in lost}
    found: list[Leave] = []
    for slot in slots:
        ends = [deadlines[gpu] for gpu in slot.gpus if gpu in deadlines]
        if ends and all(gpu in deadlines or gpu in available for gpu in slot.gpus):
            found.append(Leave(slot.worker, min(ends)))
    return tuple(found)


def _because(state: State, cause: str) -> State:
    if len(state.causes) >= MOST_CAUSES:
        return msgspec.structs.replace(state, uncounted=state.uncounted + 1)
    return msgspec.structs.replace(state, causes=(*state.causes, cause))


def _indices(gpus: set[Gpu]) -> str:
    return "[" + ",".join(str(gpu.index) for gpu in sorted(gpus)) + "]"


def _cause(kind: str, node: NodeId, gpus: set[Gpu]) -> str:
    return f"{kind} {node}{_indices(gpus)}"


def _by_gpu(lost: LostGpu) -> Gpu:
    return lost.gpu
