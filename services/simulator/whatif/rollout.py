"""Episodes on a virtual clock: who asks the production router for what, when, and what becomes of it. Numbers only.

A request is placed by `services.router.core` and runs in a `FastEngine`; disaggregated, its context is computed by a prefill
worker and crosses both workers' links, one context at a time. What a worker that leaves had made is kept, and asked on from
there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from messages.agent import Assignment, RolloutTask
from messages.envelope import Message
from messages.ids import PolicyVersion, RequestId, TrajectoryId, WorkerId
from messages.pipeline_scheduler import TrajectoryCompleted
from messages.router import AssignRequest
from messages.runtime_tracker import RequestFinished, WorkerHeartbeat
from pearl_state.model import RoleTable
from services.router.config import Config as RouterConfig
from services.router.core import RouterCore, Seat
from services.simulator.whatif.engine import NEVER, Work
from services.simulator.whatif.processes import Worker
from services.simulator.whatif.trajectories import Episodes, Plan
from services.timing.hardware import Hardware

BEAT_S = 0.25
"""A router hears of a worker's load so often, as `rollout.heartbeat_ms` is by default."""
RETRY_S = {"all workers full": 0.25}
"""An unplaced request also asks again after this; else after a second, and whenever the role table changes."""
AGAIN_S = 0.02
"""An interrupted request asks again after so long."""


class Host(Protocol):
    """What the simulation offers."""

    now_s: float

    def at(self, at_s: float, action: Callable[[], None]) -> None: ...

    def now_ms(self) -> int: ...

    def worker(self, name: str) -> Worker | None: ...

    def due(self, worker: Worker) -> None: ...

    def publish(self, message: Message) -> None: ...

    def finished(self, message: RequestFinished) -> None: ...


class LeastLoaded(RouterCore):
    """Naive placement: whoever has least to do, wherever the session's prefix is."""

    def _affine(self, request: AssignRequest) -> Seat | None:
        return None

    def _choose(self, seats: list[Seat], affine: Seat | None, context_tokens: int) -> Seat | None:
        return super()._choose(seats, None, context_tokens)


class Episode:
    """A trajectory that runs."""

    __slots__ = (
        "asked_s", "attempt", "began_s", "context", "env_s", "first_s", "generated", "handover", "last_worker", "made",
        "max_version", "min_version", "plan", "task", "turn", "work", "worker",
    )  # fmt: skip

    def __init__(self, task: RolloutTask, plan: Plan, now_s: float) -> None:
        self.task = task
        self.plan = plan
        self.began_s = now_s
        self.turn = 0
        self.made = 0  # of this turn's reply
        self.attempt = 0
        self.asked_s = now_s
        self.first_s = -1.0
        self.env_s = 0.0
        self.generated = 0
        self.min_version = 1 << 60
        self.max_version = -1
        self.last_worker = ""
        self.work: Work | None = None
        self.worker: Worker | None = None
        self.handover: Handover | None = None


class Handover:
    """A context that a prefill worker computes for a decode worker."""

    __slots__ = ("began_s", "decoder", "episode", "prefiller", "work")

    def __init__(self, episode: Episode, prefiller: Worker, decoder: Worker) -> None:
        self.episode = episode
        self.prefiller = prefiller
        self.decoder = decoder
        self.work: Work | None = None
        self.began_s = 0.0


class Rollout:
    """See the module."""

    def __init__(
        self,
        host: Host,
        router: RouterConfig,
        episodes: Episodes,
        hardware: Hardware,
        placement: str,
        chunk_tokens: int,
    ) -> None:
        self.host = host
        self.router = RouterCore(router) if placement == "affinity" else LeastLoaded(router)
        self.episodes = episodes
        self.hardware = hardware
        self.chunk_tokens = chunk_tokens
        self.generated = 0
        self.regenerated = 0
        self.interrupted = 0
        self.refused = 0
        self.running = 0
        self.tokens_of: dict[int, tuple[int, int]] = {}  # batch -> (generated, trained)
        self._held: deque[Episode] = deque()
        self._timer = False
        self._dirty: dict[WorkerId, Worker] = {}  # the router is to be told of their load
        self._beat_s = NEVER  # of one of them then, not earlier

    # ---- what is asked ----

    def waiting(self) -> list[Episode]:
        """Those that wait for a worker."""
        return list(self._held)

    def start(self, task: RolloutTask) -> None:
        self.running += 1
        self._ask(Episode(task, self.episodes.of(task), self.host.now_s))

    def on_table(self, table: RoleTable) -> None:
        """A new epoch: those that wait ask again."""
        self.router.on_table(table, self.host.now_ms())
        for worker in self._dirty.values():
            worker.beat_s = -1.0
        self._beat_s = -1.0
        self._again()

    def break_off(self, worker: Worker) -> None:
        """All that runs on a worker ends with what it has, and asks again."""
        self._drop(worker, worker.engine.works())

    def break_handovers(self, worker: Worker) -> None:
        """Contexts on their way to or from it: KV of two versions does not mix."""
        works = worker.engine.works()
        self._drop(worker, [work for work in works if work.remote or isinstance(work.of, Handover)])

    def _drop(self, worker: Worker, works: list[Work]) -> None:
        for work in works:
            of = work.of
            if isinstance(of, Handover):
                worker.engine.end(work)
                of.work = None
                self._interrupt(of.episode)
            else:
                assert isinstance(of, Episode)
                self._interrupt(of)

    def _interrupt(self, episode: Episode) -> None:
        """Its attempt ends, with what it has."""
        work, worker = episode.work, episode.worker
        if work is None or worker is None:
            return
        worker.engine.advance(self.host.now_s)
        self._cancel(episode)
        if work.engine is None:  # it ended just now: its end is about to be taken
            return
        if work.first_s <= self.host.now_s and episode.first_s < 0:
            episode.first_s = work.first_s
        episode.made += worker.engine.end(work)
        episode.work = episode.worker = None
        self._changed(worker)
        self.interrupted += 1
        self.host.due(worker)
        self.host.at(self.host.now_s + AGAIN_S, lambda: self._ask(episode))

    def _cancel(self, episode: Episode) -> None:
        """Whatever a prefill worker does for it."""
        handover = episode.handover
        if handover is None:
            return
        episode.handover = None
        work, engine = handover.work, handover.prefiller.engine
        if work is not None and work in engine:
            engine.advance(self.host.now_s)
            if work in engine:
                engine.end(work)
            self.host.due(handover.prefiller)
        handover.work = None

    # ---- placing ----

    def _again(self) -> None:
        held, self._held = self._held, deque()
        for episode in held:
            self._ask(episode)

    def _wake(self) -> None:
        self._timer = False
        self._again()

    def _changed(self, worker: Worker) -> None:
        """Its load."""
        self._dirty[worker.name] = worker
        if worker.beat_s + BEAT_S < self._beat_s:
            self._beat_s = worker.beat_s + BEAT_S

    def _beat(self) -> None:
        """Load reports that are due: of those whose load has changed."""
        now_s = self.host.now_s
        told: list[WorkerId] = []
        self._beat_s = NEVER
        for worker in self._dirty.values():
            due_s = worker.beat_s + BEAT_S
            if now_s < due_s:
                self._beat_s = min(self._beat_s, due_s)
                continue
            worker.beat_s = now_s
            told.append(worker.name)
            engine = worker.engine
            running = engine.running
            beat = WorkerHeartbeat(
                worker=worker.name,
                incarnation=worker.incarnation,
                running=running,
                queued=engine.requests - running,
                version=worker.version,
                serving=True,
                decode_iterations=0,
                decode_tokens=0,
                decode_s=0.0,
                decode_batch_sum=0,
                prefill_tokens=0,
                prefill_s=0.0,
                refused=0,
                rss_bytes=0,
            )
            self.router.on_heartbeat(beat)
        for name in told:
            del self._dirty[name]

    def _ask(self, episode: Episode) -> None:
        task = episode.task
        turn = episode.plan.turns[episode.turn]
        if self._beat_s <= self.host.now_s:
            self._beat()
        episode.attempt += 1
        request = AssignRequest(
            request=RequestId(task.trajectory),
            trajectory=TrajectoryId(task.trajectory),
            attempt=episode.attempt,
            min_version=task.min_version,
            context_tokens=turn.context + episode.made,
            last_worker=episode.last_worker,
        )
        answer = self.router.assign(request, self.host.now_ms())
        if isinstance(answer, Assignment) and self._submit(episode, answer):
            return
        reason = "" if isinstance(answer, Assignment) else answer.reason
        self._held.append(episode)
        if not self._timer:
            self._timer = True
            self.host.at(self.host.now_s + RETRY_S.get(reason, 1.0), self._wake)

    def _submit(self, episode: Episode, answer: Assignment) -> bool:
        worker = self.host.worker(answer.worker)
        if worker is None or not worker.admits(answer.role_generation):
            self.refused += 1
            return False
        prefiller = None
        if answer.room >= 0:
            prefiller = self.host.worker(answer.prefill_worker)
            if prefiller is None or not prefiller.admits(answer.prefill_role_generation):
                self.refused += 1
                return False
        turn = episode.plan.turns[episode.turn]
        start = turn.context + episode.made
        session = f"{episode.task.trajectory}/{turn.rewritten}" if turn.rewritten else episode.task.trajectory
        work = Work(session, start, turn.context + turn.reply, episode, remote=prefiller is not None)
        episode.work, episode.worker = work, worker
        episode.last_worker = worker.name
        episode.min_version = min(episode.min_version, worker.version)
        episode.handover = None if prefiller is None else Handover(episode, prefiller, worker)
        self._run(worker, work)
        return True

    def _run(self, worker: Worker, work: Work) -> None:
        now_s = self.host.now_s
        engine = worker.engine
        engine.advance(now_s)
        engine.submit(work)
        if engine.next_s <= now_s:
            engine.advance(now_s)
        self._changed(worker)
        self.host.due(worker)

    # ---- what engines did ----

    def take(self, worker: Worker) -> None:
        """What has happened in a worker's engine."""
        engine = worker.engine
        while engine.ended or engine.reserved or engine.dropped:
            ended, engine.ended = engine.ended, []
            reserved, engine.reserved = engine.reserved, []
            dropped, engine.dropped = engine.dropped, []
            self._changed(worker)
            for work in dropped:
                assert isinstance(work.of, Episode)
                handover = work.of.handover
                self._cancel(work.of)
                if handover is not None:
                    work.of.handover = Handover(work.of, handover.prefiller, worker)
            for work in reserved:
                if work in engine and work.remote:
                    self._reserved(work)
            for at_s, work in ended:
                if isinstance(work.of, Handover):
                    self._computed(at_s, work.of)
                else:
                    assert isinstance(work.of, Episode)
                    self._turn_ended(at_s, work.of, work, worker)

    def _reserved(self, work: Work) -> None:
        """There is room for a context: ask the prefill worker for it."""
        episode = work.of
        assert isinstance(episode, Episode)
        handover = episode.handover
        if handover is None or handover.work is not None:
            return
        prefiller = handover.prefiller
        if prefiller.version != handover.decoder.version:
            self._interrupt(episode)
            return
        handover.began_s = self.host.now_s
        handover.work = Work(work.session, work.start, work.start + 1, handover)
        self._run(prefiller, handover.work)

    def _computed(self, at_s: float, handover: Handover) -> None:
        """The context goes over both links: what of it is new to the decode worker, the last chunk after it was computed."""
        episode = handover.episode
        if episode.handover is not handover or episode.work is None:
            return
        prefiller, decoder = handover.prefiller, handover.decoder
        tokens = episode.work.start - episode.work.cached
        free_s = max(prefiller.link_free_s, decoder.link_free_s, handover.began_s)
        there_s = max(
            free_s + self.hardware.transfer_s(tokens), at_s + self.hardware.transfer_s(min(tokens, self.chunk_tokens))
        )
        prefiller.link_free_s = decoder.link_free_s = there_s
        self.host.at(there_s, lambda: self._arrived(handover))

    def _arrived(self, handover: Handover) -> None:
        episode = handover.episode
        work = episode.work
        if episode.handover is not handover or work is None or work.engine is None:
            return
        decoder = handover.decoder
        engine = decoder.engine
        engine.advance(self.host.now_s)
        self.take(decoder)
        if episode.handover is not handover:  # it has lost its room just now, and is computed anew
            self.host.due(decoder)
            return
        episode.handover = None
        if work in engine and work.remote:
            if engine.arrived(work):
                self._turn_ended(self.host.now_s, episode, work, decoder)
            engine.advance(self.host.now_s)
        self.host.due(decoder)

    def _turn_ended(self, at_s: float, episode: Episode, work: Work, worker: Worker) -> None:
        if episode.work is not work:
            return
        self._cancel(episode)
        turn = episode.plan.turns[episode.turn]
        first_s = work.first_s if episode.first_s < 0 else episode.first_s
        episode.max_version = max(episode.max_version, worker.version)
        episode.work = episode.worker = None
        episode.generated += turn.reply
        episode.env_s += turn.env_s
        self.generated += turn.reply
        self.host.finished(
            RequestFinished(
                request=RequestId(episode.task.trajectory),
                worker=worker.name,
                turn=episode.turn,
                new_prompt_tokens=turn.new,
                generated_tokens=turn.reply,
                retained_tokens=turn.reply,
                cached_tokens=max(0, work.seen),
                attempts=episode.attempt,
                queue_s=max(0.0, first_s - episode.asked_s),
                decode_s=max(0.0, at_s - first_s),
                env_s=turn.env_s,
            )
        )
        self.host.at(at_s + turn.env_s, lambda: self._next(episode))

    def _next(self, episode: Episode) -> None:
        """The environment has answered."""
        episode.turn += 1
        episode.made = 0
        episode.attempt = 0
        episode.asked_s = self.host.now_s
        episode.first_s = -1.0
        if episode.turn < len(episode.plan.turns):
            self._ask(episode)
            return
        self.running -= 1
        task, plan = episode.task, episode.plan
        generated, trained = self.tokens_of.get(task.batch, (0, 0))
        self.tokens_of[task.batch] = (generated + episode.generated, trained + plan.tokens)
        self.host.publish(
            TrajectoryCompleted(
                trajectory=task.trajectory,
                group=task.group,
                batch=task.batch,
                retry=task.retry,
                status="truncated" if plan.truncated else "completed",
                reward=plan.reward,
                turns=len(plan.turns),
                generated_tokens=episode.generated,
                min_version=PolicyVersion(episode.min_version),
                max_version=PolicyVersion(episode.max_version),
                journal=(0,) * len(plan.turns),
                env_s=episode.env_s,
                wall_s=self.host.now_s - episode.began_s,
            )
        )
