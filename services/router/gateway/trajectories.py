"""What makes trajectories of sessions: their tasks, the journal, ends of trajectories, telemetry.

Owns: what is written of each session. Never decides what is rolled out. Driven by HTTP (`open`, `reward`, `abandon`) and by time
(`keep`).

Invariants:
- A task is acknowledged only when its trajectory's end is in the stream; then always, also if another process wrote that end
  and died before it could. Where an end could not be written, or another process writes the trajectory, the task is left
  to come again.
- Turns are journalled when the reward is posted, all at once, in order, guarded by the last sequence on the trajectory's
  subject: until then a harness may rewrite its history, and a gateway that dies loses its sessions anyway, since no one can
  make their clients repeat themselves. Their tasks then go to others. Interruptions are journalled as they happen.
- A write whose answer did not come, or was not waited for, is repeated before the next one: the guard then tells what a
  process wrote from what another did.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import weakref
from collections.abc import Callable
from typing import Final

from messages.agent import PLAIN, RequestInterrupted, RolloutTask, TurnFinished
from messages.envelope import UndecodableMessage, encode
from messages.ids import TrajectoryId
from messages.pipeline_scheduler import TrajectoryCompleted
from messages.runtime_tracker import RequestFinished
from messages.subjects import decode_on, event_subject, message_id, stream_of, subject_of
from services.edge.request import Interruption, Reply
from services.edge.tasks import problem_of_task
from services.router.gateway.config import Config, digest_of
from services.router.gateway.errors import ApiError
from services.router.gateway.sessions import KEY_PREFIX, Result, Session, SessionBook, Turn, end_of, ended
from services.router.gateway.task_queue import TaskQueue
from services.runtime.bus import Bus, BusError, BusUnavailable, WrongLastSequence
from services.runtime.clock import Clock, now_ms
from services.runtime.log import get_logger

KEEP_S: Final = 0.5
"""How often sessions and tasks are looked after."""
RETRY_S: Final = 1.0
LOOKS: Final = 3
"""At what became of a task, where another process may be ending it."""

log = get_logger("gateway")


class Trajectories:
    """Sessions of one gateway and what they become. `start`, then `keep` in a task, `stop` at the end."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        instance: str,
        clock: Clock = now_ms,
        end_turns: Callable[[Session], object] = lambda _: None,
    ) -> None:
        """`end_turns` ends what still runs for a session that is over."""
        self.book = SessionBook(config.max_sessions)
        self.lost_records = 0  # interruptions of plain requests that could not be journalled
        self._config = config
        self._bus = bus
        self._instance = instance
        self._clock = clock
        self._end_turns = end_turns
        self._tasks = TaskQueue(config, bus)
        # By session, as long as somebody writes of it, or waits to.
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._opened = 0

    # --- opening

    async def open(self, *, train: bool, wait_s: float, task: RolloutTask | None) -> Session:
        """A new session. Raises ApiError."""
        self.book.check_room()
        if task is not None:
            problem = problem_of_task(task, self._config.newest_version)
            if problem:
                raise ApiError(400, f"task: {problem}", code="invalid_value", param="task")
            known = self.book.of_task(task.trajectory, task.retry)
            if known is not None:
                await self._supersede(known)
            session = await self._take_up(task)
            if session is None:
                raise ApiError(409, f"try {task.retry} of {task.trajectory} has ended", code="task_ended", param="task")
            return session
        if not train:
            return self._begin(None, 0)
        return await self._take(wait_s)

    async def _take(self, wait_s: float) -> Session:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            try:
                taken = await self._tasks.next(max(0.05, min(1.0, deadline - loop.time())))
            except BusError as error:
                raise ApiError(503, f"the task queue is away: {error}", code="no_bus", retry_after_s=1) from error
            if taken is None:
                if loop.time() < deadline:
                    continue
                raise ApiError(
                    429,
                    f"no rollout task within {wait_s:g} s: all that may run are taken",
                    code="no_task",
                    retry_after_s=2,
                )
            delivery, task = taken
            known = self.book.of_task(task.trajectory, task.retry)
            if known is not None:  # delivered again although it is held here: a progress report came too late
                self._tasks.hold(known.id, delivery)
                continue
            try:
                session = await self._take_up(task)
            except ApiError:
                await self._tasks.give_back(delivery, RETRY_S)
                raise
            if session is not None:
                self._tasks.hold(session.id, delivery)
                return session
            await self._tasks.give_back(delivery, None)

    async def _take_up(self, task: RolloutTask) -> Session | None:
        """A session of a task; None if this try of it has ended, or had to be ended here. Raises ApiError."""
        for _ in range(LOOKS):
            try:
                return await self._take_up_once(task)
            except WrongLastSequence:  # its gateway had not died, or an earlier try's end came late
                continue
            except BusError as error:
                raise _journal_away(error) from error
        raise ApiError(503, f"another process is ending {task.trajectory}: ask again", code="no_bus", retry_after_s=1)

    async def _take_up_once(self, task: RolloutTask) -> Session | None:
        """The same. Raises WrongLastSequence where the end that it wrote met another, BusError, ApiError."""
        stream = stream_of(self._config.job, TurnFinished)
        assert stream is not None
        seq, written = 0, 0
        _, known = await self._last_end(task)
        if known is not None and known.retry >= task.retry:
            return None
        async for delivery in self._bus.read(stream, f"pearl.{self._config.job}.journal.{task.trajectory}"):
            seq = delivery.seq
            with contextlib.suppress(UndecodableMessage):
                record = decode_on(self._config.job, delivery.subject, delivery.data, TurnFinished, RequestInterrupted)
                written += isinstance(record, TurnFinished) and record.retry == task.retry
        if written:  # by a gateway that died before it wrote the end: nobody can go on with it
            await self._end_failed(task, "its gateway or agent died, and a session cannot be replayed")
            return None
        return self._begin(task, seq)

    def _begin(self, task: RolloutTask | None, journal_seq: int) -> Session:
        self._opened += 1
        now = self._clock()
        session = Session(
            id=f"{self._instance}-{self._opened}-{secrets.token_hex(4)}",
            secret=b"",
            holding=f"{task.retry if task is not None else 0}-{self._instance}-{self._opened}",
            task=task,
            opened_ms=now,
            touched_ms=now,
            journal_seq=journal_seq,
        )
        self.book.open(session)
        return session

    def key_of(self, session: Session) -> str:
        """A key that stands for the session. Made once; only its digest is kept."""
        secret = secrets.token_urlsafe(24)
        key = f"{KEY_PREFIX}{session.id}.{secret}"
        session.secret = digest_of(key)
        return key

    def owner_key_of(self, session: Session) -> str:
        """A key that is needed from now on to end the session. Made once; only its digest is kept."""
        key = secrets.token_urlsafe(24)
        session.owner = digest_of(key)
        return key

    def now_ms(self) -> int:
        """By the clock that sessions go by."""
        return self._clock()

    # --- turns

    async def interrupted(self, session: Session, interruption: Interruption) -> None:
        """Journal it before the request goes on."""
        task = session.task
        async with self._lock(session):
            if session.ending or session.superseded:  # what still ran for it is no part of any try
                raise ended(session.id)
            if task is None:
                await self.interrupted_plain(interruption)
                return
            try:
                await self._write(session, _interrupted(task.trajectory, task.retry, interruption))
            except WrongLastSequence as error:
                session.superseded = True
                raise _superseded(session) from error
            except BusError as error:
                raise _journal_away(error) from error

    async def interrupted_plain(self, interruption: Interruption) -> None:
        """The same for a request outside of any trajectory, so that a run can be checked. Losing it costs no client anything."""
        if interruption.cause in ("stop_string", "abort"):
            return
        record = _interrupted(TrajectoryId(f"{PLAIN}{self._instance}"), 0, interruption)
        try:
            await self._bus.publish_durable(
                subject_of(self._config.job, record), encode(record), msg_id=message_id(record) or ""
            )
        except BusError as error:
            self.lost_records += 1
            log.warning(f"an interruption was not journalled: {error}", action="interruption_lost")

    async def tell(self, session: Session, turn: Turn, reply: Reply) -> None:
        """Telemetry of a turn; losing it costs accuracy only."""
        previous = session.turns[turn.asked.parent].ended_ms if turn.asked.parent >= 0 else turn.asked.began_ms
        message = RequestFinished(
            request=turn.request,
            worker=turn.worker,
            turn=turn.asked.depth,
            new_prompt_tokens=len(turn.asked.prompt_new),
            generated_tokens=len(turn.reply),
            retained_tokens=len(turn.reply),
            cached_tokens=turn.cached_tokens,
            attempts=turn.attempts,
            queue_s=reply.queue_s,
            decode_s=reply.decode_s,
            env_s=max(0, turn.asked.began_ms - previous) / 1000,
        )
        with contextlib.suppress(BusUnavailable):
            await self._bus.publish(subject_of(self._config.job, message), encode(message))

    # --- ends

    async def reward(self, session: Session, reward: float, status: str) -> Result:
        """End a session with its reward: its trajectory is in the stream on return. Raises ApiError."""
        if session.running:
            raise ApiError(
                409,
                f"{session.running} requests of session {session.id} are running",
                code="session_busy",
                retry_after_s=1,
            )
        if not session.turns:
            raise ApiError(
                409, f"session {session.id} has no finished turn: DELETE it to give its task back", code="session_empty"
            )
        async with self._lock(session):
            known = self.book.result(session.id)
            if known is not None:  # the same was posted twice at once
                return known
            session.ending = True
            result = session.result(status, reward)
            try:
                if session.task is not None:
                    result = await self._write_end(session, session.task, result)
            except WrongLastSequence as error:
                session.superseded = True
                self.book.close(session, session.result("abandoned", None, "superseded"))
                await self._tasks.done(session.id, self._config.ack_wait_s)
                raise _superseded(session) from error
            except BusError as error:
                # Some records may be stored: no turn can be added any more, the reward can be posted again.
                raise _journal_away(error) from error
            self.book.close(session, result)
        await self._tasks.done(session.id, None)
        return result

    async def abandon(self, session: Session, reason: str) -> Result:
        """End a session without a reward: its task is tried again, by whoever takes it. Raises ApiError."""
        async with self._lock(session):
            known = self.book.result(session.id)
            if known is not None:
                return known
            session.ending = True
            self._end_turns(session)
            result = session.result("abandoned", None, reason)
            again_s = self._config.ack_wait_s if session.superseded else None
            try:
                if session.task is not None and not session.superseded:
                    result = await self._end(session, session.task, end_of(session.task, result, (), ()), result)
            except BusError as error:
                if session.journal and not isinstance(error, WrongLastSequence):
                    raise _journal_away(error) from error  # its reward may be stored: it can be asked again
                log.warning(f"{session.trajectory}: {error}", action="abandon_lost")
                again_s = RETRY_S
            self.book.close(session, result)
        log.info(f"session {session.id} {result.status}: {reason}", action="session_abandoned")
        await self._tasks.done(session.id, again_s)
        return result

    async def _supersede(self, session: Session) -> None:
        """Its task is taken up anew, by a caller who holds it: as if another process had taken it."""
        own = None
        async with self._lock(session):
            if self.book.result(session.id) is None:
                try:
                    own = await self._own_end(session)
                except BusError as error:
                    raise _journal_away(error) from error
                session.superseded = own is None
                session.ending = True
                self._end_turns(session)
                self.book.close(session, own or session.result("abandoned", None, "its task was given again"))
        await self._tasks.done(session.id, self._config.ack_wait_s if own is None else None)

    async def _write_end(self, session: Session, task: RolloutTask, result: Result) -> Result:
        """The records, then the end; returns as `_end` does."""
        if not session.written:  # posted again, it goes on where it stopped
            session.written = session.records(self._clock())
        for record in session.written[len(session.journal) :]:
            await self._write(session, record)
            session.journal.append(session.journal_seq)
        return await self._end(session, task, end_of(task, result, session.written, session.journal), result)

    async def _end(self, session: Session, task: RolloutTask, end: TrajectoryCompleted, result: Result) -> Result:
        """Publish it. `result`, unless the session had been rewarded otherwise and only the answer was lost."""
        try:
            await self._publish_end(task, end)
        except WrongLastSequence:
            own = await self._own_end(session)
            if own is None:
                raise
            return own
        return result

    async def _own_end(self, session: Session) -> Result | None:
        """How its trajectory has ended, if it was this session that ended it."""
        task = session.task
        if task is None or not session.journal:
            return None
        _, known = await self._last_end(task)
        if known is None or known.retry != task.retry or known.journal != tuple(session.journal):
            return None
        return session.result(known.status, known.reward)

    async def _end_failed(self, task: RolloutTask, reason: str) -> None:
        result = Session(id="", secret=b"", holding="", task=task, opened_ms=0, touched_ms=0).result(
            "abandoned", None, reason
        )
        await self._publish_end(task, end_of(task, result, (), ()))

    async def _publish_end(self, task: RolloutTask, end: TrajectoryCompleted) -> None:
        """Once a try: an end of this try, or of a later one, that is there already is left alone."""
        last_seq, known = await self._last_end(task)
        if known is not None:
            if (known.retry, known.status, known.reward, known.journal) == (
                task.retry,
                end.status,
                end.reward,
                end.journal,
            ):
                return
            if known.retry >= task.retry:
                raise WrongLastSequence(f"{task.trajectory} try {task.retry} has ended")
        await self._bus.publish_durable(
            subject_of(self._config.job, end),
            encode(end),
            msg_id=f"{message_id(end)}:{end.status}:{end.reward!r}:{self._instance}",
            expected_last_on_subject=last_seq,
        )

    async def _last_end(self, task: RolloutTask) -> tuple[int, TrajectoryCompleted | None]:
        """Sequence, or 0, of the newest end of any try of the task; and what it says, unless that cannot be read."""
        stream = stream_of(self._config.job, TrajectoryCompleted)
        assert stream is not None
        last = await self._bus.last(stream, event_subject(self._config.job, TrajectoryCompleted, task.trajectory))
        if last is None:
            return 0, None
        try:
            return last.seq, decode_on(self._config.job, last.subject, last.data, TrajectoryCompleted)
        except UndecodableMessage:
            return last.seq, None

    async def _write(self, session: Session, record: TurnFinished | RequestInterrupted) -> None:
        """The next record; before it, one of which nobody knows whether it is there."""
        before = () if session.unsure is None or session.unsure == record else (session.unsure,)
        for each in (*before, record):
            session.unsure = each
            # The holding is in the id: another holder's record of the same turn must meet the guard.
            session.journal_seq = await self._bus.publish_durable(
                subject_of(self._config.job, each),
                encode(each),
                msg_id=f"{message_id(each)}:{session.holding}",
                expected_last_on_subject=session.journal_seq,
            )
            session.unsure = None

    # --- time

    async def keep(self) -> None:
        """Until cancelled: keep tasks, end sessions that nobody talks to."""
        while True:
            await asyncio.sleep(KEEP_S)
            await self.look_after()

    async def look_after(self) -> None:
        """What `keep` does, once."""
        now = self._clock()
        for session in self.book.idle(now, self._config.session_idle_ms):
            try:
                await self.abandon(session, f"nobody talked to its session for {(now - session.touched_ms) / 1000:g} s")
            except ApiError as error:
                log.warning(f"{session.trajectory}: {error}", action="abandon_later")
        await self._tasks.keep(now)

    async def stop(self) -> None:
        """Give every task back: another process begins them anew."""
        await self._tasks.stop()

    def _lock(self, session: Session) -> asyncio.Lock:
        return self._locks.setdefault(session.id, asyncio.Lock())


def _interrupted(trajectory: TrajectoryId, retry: int, interruption: Interruption) -> RequestInterrupted:
    return RequestInterrupted(
        trajectory=trajectory,
        request=interruption.request,
        attempt=interruption.attempt,
        retry=retry,
        worker=interruption.worker,
        prefix_len=interruption.prefix_len,
        received=interruption.received,
        cause=interruption.cause,
    )


def _journal_away(error: BusError) -> ApiError:
    return ApiError(503, f"the journal is away: {error}", code="no_bus", retry_after_s=1)


def _superseded(session: Session) -> ApiError:
    return ApiError(409, f"another process writes trajectory {session.trajectory} now", code="session_superseded")
