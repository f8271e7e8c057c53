"""One episode: an environment and a policy taking turns, each turn journalled before the next (paper 2.1, DESIGN 7).

Owns: one trajectory, while its task is held. Never decides whether it is tried again (the pipeline scheduler does).

Invariants:
- One writer: every record is guarded by the last sequence on the trajectory's subject. Of two agents with one task, the
  one that writes second is `SupersededError` and stops.
- An episode resumed from its journal has the context, and the environment the condition, that they had.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

import msgspec

from messages.agent import RequestInterrupted, RolloutTask, TurnFinished
from messages.envelope import UndecodableMessage, encode
from messages.ids import PolicyVersion, RequestId
from messages.pipeline_scheduler import TrajectoryCompleted
from messages.runtime_tracker import RequestFinished
from messages.subjects import decode_on, message_id, stream_of, subject_of
from services.agent.config import Config
from services.edge.request import Interruption, OnInterruption, Reply, RequestFailedError, RequestSpec
from services.environments.base import Environment, StepResult, Tokenizer
from services.environments.loading import stop_ids_of
from services.runtime.bus import Bus, BusUnavailable, WrongLastSequence
from services.runtime.foreign import ForeignError, foreign_code

REASON_LIMIT: Final = 300
"""Characters kept of an environment's error."""

T = TypeVar("T")


class SupersededError(Exception):
    """Another agent writes this trajectory now."""


class Generator(Protocol):
    """What brings a request to its reply (`RequestEdge`)."""

    async def generate(self, spec: RequestSpec, on_interruption: OnInterruption) -> Reply: ...


class _EpisodeFailedError(Exception):
    """The episode cannot go on; the message becomes the reason of its end."""


class _Totals(msgspec.Struct):
    """What the end of a trajectory reports, summed over its turns."""

    turns: int = 0
    reward: float = 0.0
    tokens: int = 0
    oldest: int | None = None
    newest: int | None = None
    journal: tuple[int, ...] = ()
    env_s: float = 0.0
    wall_s: float = 0.0

    def add(self, record: TurnFinished, seq: int, reward: float) -> None:
        self.turns += 1
        self.reward += reward
        self.tokens += len(record.reply)
        self.journal = (*self.journal, seq)
        self.env_s += record.env_s
        self.wall_s += record.wall_s
        for span in record.spans:
            self.oldest = span.version if self.oldest is None else min(self.oldest, span.version)
            self.newest = span.version if self.newest is None else max(self.newest, span.version)


class Episode:
    """One try at one task. `run` once.

    `holding` must be new for every time a task is taken up. `resumed`: the task may have been held before.
    """

    def __init__(
        self,
        task: RolloutTask,
        *,
        bus: Bus,
        edge: Generator,
        make_environment: Callable[[], Environment],
        tokenizer: Tokenizer,
        config: Config,
        holding: str,
        resumed: bool,
    ) -> None:
        self._task = task
        self._bus = bus
        self._edge = edge
        self._make_environment = make_environment
        self._tokenizer = tokenizer
        self._config = config
        self._holding = holding
        self._resumed = resumed
        self._stop_ids = stop_ids_of(tokenizer)
        self._journal_seq = 0  # last sequence on the trajectory's subject
        self._end_seq = 0  # the same of its ends, which are those of earlier retries
        self._totals = _Totals()
        self._context: list[int] = []
        self._last_worker = ""

    async def run(self) -> None:
        """To the end, which is in the stream on return. Raises SupersededError, BusError."""
        records: list[tuple[int, TurnFinished]] = []
        if self._resumed or self._task.retry > 0:
            if await self._ended():
                return
            records = await self._read_journal()
        try:
            status, reason = await self._play(records)
        except (_EpisodeFailedError, RequestFailedError) as error:
            status, reason = "failed", str(error)[:REASON_LIMIT]
        await self._end(status, reason)

    # --- where the trajectory stands

    async def _ended(self) -> bool:
        """Whether this try, or a later one, has ended."""
        end = self._completed("failed", "")
        stream = stream_of(self._config.job, TrajectoryCompleted)
        assert stream is not None
        last = await self._bus.last(stream, subject_of(self._config.job, end))
        if last is None:
            return False
        self._end_seq = last.seq
        try:
            return decode_on(self._config.job, last.subject, last.data, TrajectoryCompleted).retry >= self._task.retry
        except UndecodableMessage:
            return False  # not for an agent to judge; the guard still holds

    async def _read_journal(self) -> list[tuple[int, TurnFinished]]:
        """The turns of this try that are journalled, in order."""
        stream = stream_of(self._config.job, TurnFinished)
        assert stream is not None
        records: list[tuple[int, TurnFinished]] = []
        async for delivery in self._bus.read(stream, f"pearl.{self._config.job}.journal.{self._task.trajectory}"):
            self._journal_seq = delivery.seq
            try:
                record = decode_on(self._config.job, delivery.subject, delivery.data, TurnFinished, RequestInterrupted)
            except UndecodableMessage:
                continue
            if isinstance(record, TurnFinished) and record.retry == self._task.retry:
                records.append((delivery.seq, record))
        return records

    # --- turns

    async def _play(self, records: list[tuple[int, TurnFinished]]) -> tuple[str, str]:
        """All turns, those in the journal first. Returns status and reason."""
        environment = await self._call("be made", _made(self._make_environment))
        try:
            if records and not environment.replayable:
                raise _EpisodeFailedError("its agent died, and the environment cannot be replayed")
            if hasattr(environment, "sample_seed"):
                await self._call(
                    "take a sample seed", _made(lambda: setattr(environment, "sample_seed", self._task.sample_seed))
                )
            observation = await self._call("reset", environment.reset(self._task.task_seed))
            for turn in range(self._config.max_turns):
                prompt_new = await self._call("be tokenized", _made(lambda: self._tokenizer.encode(observation)))  # noqa: B023
                self._context += prompt_new
                if turn < len(records):
                    result = await self._replay(environment, turn, prompt_new, *records[turn])
                else:
                    room = self._config.max_context_tokens - len(self._context)
                    if room < 1 and turn > 0:
                        return "truncated", "context"
                    if room < 1 or not self._context:
                        raise _EpisodeFailedError(
                            f"first prompt of {len(self._context)} tokens, pipeline.max_context_tokens = "
                            f"{self._config.max_context_tokens}"
                        )
                    most = min(room, self._config.max_new_tokens, await self._longest(environment))
                    result = await self._turn(environment, turn, prompt_new, most)
                if result.done:
                    return ("truncated", "environment") if result.truncated else ("completed", "")
                observation = result.observation
            return "truncated", "turns"
        finally:
            with contextlib.suppress(_EpisodeFailedError):  # the episode's result stands
                await self._call("close", environment.close())

    async def _longest(self, environment: Environment) -> int:
        """What the environment lets the coming reply have."""
        longest = await self._call(
            "limit the reply", _made(lambda: getattr(environment, "max_new_tokens", sys.maxsize))
        )
        if not isinstance(longest, int) or longest < 1:
            raise _EpisodeFailedError(f"environment has max_new_tokens = {longest!r}; a reply has at least one token")
        return longest

    async def _replay(
        self, environment: Environment, turn: int, prompt_new: list[int], seq: int, record: TurnFinished
    ) -> StepResult:
        """Take a turn from the journal: the environment acts again, the policy does not."""
        if record.turn != turn or record.prompt_new != prompt_new:
            raise _EpisodeFailedError(
                f"turn {turn} cannot be replayed: the environment answered otherwise; set replayable = False"
            )
        result = await self._call("step", environment.step(record.action))
        self._context += record.reply
        self._last_worker = record.worker
        self._totals.add(record, seq, result.reward)
        return result

    async def _turn(self, environment: Environment, turn: int, prompt_new: list[int], most: int) -> StepResult:
        """Generate, act, journal."""
        task = self._task
        began = _now_s()
        request = RequestId(f"{task.trajectory}/{turn}/{self._holding}")
        reply = await self._edge.generate(
            RequestSpec(
                request=request,
                session=task.trajectory,
                prompt=self._context.copy(),
                max_new_tokens=most,
                temperature=task.temperature,
                seed=_turn_seed(task.sample_seed, turn),
                stop_ids=self._stop_ids,
                min_version=task.min_version,
                last_worker=self._last_worker,
            ),
            self._on_interruption,
        )
        action = await self._call(
            "be detokenized", _made(lambda: self._tokenizer.decode(self._without_eos(reply.tokens)))
        )
        asked = _now_s()
        result = await self._call("step", environment.step(action))
        done = _now_s()
        record = TurnFinished(
            trajectory=task.trajectory,
            group=task.group,
            batch=task.batch,
            retry=task.retry,
            turn=turn,
            request=request,
            attempts=reply.attempts,
            prompt_new=prompt_new,
            reply=reply.tokens,
            logprobs=reply.logprobs,
            spans=reply.spans,
            finish=reply.finish,
            action=action,
            env_s=done - asked,
            wall_s=done - began,
            worker=reply.worker,
            cached_tokens=reply.cached_tokens,
        )
        self._totals.add(record, await self._write(record), result.reward)
        self._context += reply.tokens
        self._last_worker = reply.worker
        # Until the next question: to the workers, journalling is as much a pause as the environment's own time.
        await self._tell(record, reply, away_s=_now_s() - asked)
        return result

    def _without_eos(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] == self._tokenizer.eos_id else tokens

    async def _call(self, verb: str, awaitable: Awaitable[T]) -> T:
        """Let the user's code work for a bounded time; what it raises fails the episode, not the agent."""
        limit_s = self._config.environment_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                with foreign_code():
                    return await awaitable
        except TimeoutError as error:
            raise _EpisodeFailedError(
                f"environment took more than environment.timeout_s = {limit_s:g} to {verb}"
            ) from error
        except ForeignError as error:
            raise _EpisodeFailedError(f"environment failed to {verb}: {error}") from error

    # --- what is told

    async def _on_interruption(self, interruption: Interruption) -> None:
        await self._write(
            RequestInterrupted(
                trajectory=self._task.trajectory,
                request=interruption.request,
                attempt=interruption.attempt,
                retry=self._task.retry,
                worker=interruption.worker,
                prefix_len=interruption.prefix_len,
                received=interruption.received,
                cause=interruption.cause,
            )
        )

    async def _write(self, record: TurnFinished | RequestInterrupted) -> int:
        """Append to the journal as its only writer."""
        # The holding is in the id: another agent's record of the same turn must meet the guard, not be taken for a
        # repetition of ours.
        self._journal_seq = await self._publish(record, f"{message_id(record)}:{self._holding}", self._journal_seq)
        return self._journal_seq

    async def _end(self, status: str, reason: str) -> None:
        end = self._completed(status, reason)
        await self._publish(end, f"{message_id(end)}:{self._holding}", self._end_seq)

    async def _publish(
        self, message: TurnFinished | RequestInterrupted | TrajectoryCompleted, msg_id: str, last: int
    ) -> int:
        try:
            return await self._bus.publish_durable(
                subject_of(self._config.job, message), encode(message), msg_id=msg_id, expected_last_on_subject=last
            )
        except WrongLastSequence as error:
            raise SupersededError(f"{self._task.trajectory}: {error}") from error

    def _completed(self, status: str, reason: str) -> TrajectoryCompleted:
        task, totals = self._task, self._totals
        return TrajectoryCompleted(
            trajectory=task.trajectory,
            group=task.group,
            batch=task.batch,
            retry=task.retry,
            status=status,
            reward=totals.reward,
            turns=totals.turns,
            generated_tokens=totals.tokens,
            min_version=task.min_version if totals.oldest is None else PolicyVersion(totals.oldest),
            max_version=task.min_version if totals.newest is None else PolicyVersion(totals.newest),
            journal=totals.journal,
            env_s=totals.env_s,
            wall_s=totals.wall_s,
            reason=reason,
        )

    async def _tell(self, record: TurnFinished, reply: Reply, *, away_s: float) -> None:
        """Telemetry; losing it costs accuracy only."""
        message = RequestFinished(
            request=record.request,
            worker=record.worker,
            turn=record.turn,
            new_prompt_tokens=len(record.prompt_new),
            generated_tokens=len(record.reply),
            retained_tokens=len(record.reply),
            cached_tokens=record.cached_tokens,
            attempts=record.attempts,
            queue_s=reply.queue_s,
            decode_s=reply.decode_s,
            env_s=away_s,
        )
        with contextlib.suppress(BusUnavailable):
            await self._bus.publish(subject_of(self._config.job, message), encode(message))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _made(make: Callable[[], T]) -> T:
    return make()


def _turn_seed(sample_seed: int, turn: int) -> int:
    """A 53-bit seed, the same whoever runs the turn."""
    digest = hashlib.blake2b(f"{sample_seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11
