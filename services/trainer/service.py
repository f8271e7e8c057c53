"""The trainer's service: told to train by the toggle manager only, it trains a batch and says so, in an order that survives
its death at any point.

Owns: the optimiser state, checkpoints, snapshots. Never decides when to train, and never reads the role table: by the
time `trainer.resume/1` comes, the table says that the GPUs are its own.

Order of every step (DESIGN 8): checkpoint -> snapshot -> `weights.published/1` -> `train_step.finished/1`. A trainer that
dies before the checkpoint is complete trains the batch again when told again; one that dies after it says, at its next
start, what was left to say. Commands are repeated by their sender until the fact that answers them: one that comes while
another is obeyed is dropped, and obeying one twice is harmless.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from messages.agent import TurnFinished
from messages.envelope import Message, UndecodableMessage, encode
from messages.monitor import DeadLetter
from messages.pipeline_scheduler import BatchReady, StepFinished, WeightsPublished
from messages.subjects import decode_on, event_subject, message_id, stream, subject_of
from messages.toggle_manager import TrainerReady, TrainerReleased, TrainerResumed
from messages.trainer import TrainerRelease, TrainerResume
from services.connect import connect
from services.jobfile import JobFile
from services.runtime.bus import Bus, BusError, BusUnavailable, Delivery, Subscription
from services.runtime.log import get_logger
from services.trainer.config import Config
from services.trainer.launch import keep_command, keep_ranks
from services.trainer.metrics import Metrics
from services.trainer.turns import UnusableBatchError

PUBLISH_RETRY_S: Final = 0.5
LOOKS: Final = 8  # at an event that seems to be missing: one of several replicas may lag behind
LOOK_AGAIN_S: Final = 0.25
DEAD_BYTES: Final = 1024

Command = TrainerResume | TrainerRelease

log = get_logger("trainer")


async def serve(job: JobFile, stop: asyncio.Event, job_path: Path) -> None:
    """Serve until `stop`, with all ranks. Raises RanksFailedError, ConfigError, BusUnavailable."""
    if job.training.engine == "external":
        Config.of(job)
        await keep_command(job_path, job.training.command, stop)
        return
    if job.training.ranks == 1 or job.training.engine == "emulated":
        await serve_ranks(job, stop)
        return
    await keep_ranks(job_path, job.training.ranks, stop)


async def serve_ranks(job: JobFile, stop: asyncio.Event) -> None:
    """Rank 0: serve the bus until `stop`."""
    bus = await connect(job, "trainer")
    try:
        await Trainer(job, bus).run(stop)
    finally:
        await bus.close()


class Group(Protocol):
    """All ranks as the service sees them."""

    @property
    def learner(self) -> Any:
        """Rank 0's `Learner`, or what stands in for one."""
        ...

    async def call(self, method: str, *arguments: Any) -> Any:
        """Run one of its methods on all ranks; rank 0's result."""
        ...

    async def close(self) -> None: ...


class Writes(Protocol):
    """Where train steps are written for people (`Metrics`)."""

    def write(self, step: StepFinished) -> None: ...

    def close(self) -> None: ...


Build = Callable[[BatchReady, Mapping[int, TurnFinished]], Any]
"""From a batch's description and its turns to what `train` takes. Raises UnusableBatchError."""


def _parts(job: JobFile, config: Config) -> tuple[Group, Build]:
    if config.engine == "emulated":
        from services.trainer import emulated

        return emulated.EmulatedGroup(job), emulated.build
    from services.models.files import initial_model  # torch: this module must import without it
    from services.trainer import data, ranks

    return ranks.Group(config, initial_model(job)), data.build


class Trainer:
    """Rank 0 and its command loop."""

    def __init__(
        self,
        job: JobFile,
        bus: Bus,
        *,
        parts: tuple[Group, Build] | None = None,
        metrics: Writes | None = None,
        token: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        """`parts`, `metrics`: what trains and what writes metrics, those that the job file names unless given; `token`:
        hexadecimal of so many bytes, new at every call."""
        self._name = job.job.name
        self._config = Config.of(job)
        self._bus = bus
        self._token = token
        self._group, self._build = parts or _parts(job, self._config)
        self._metrics: Writes = metrics or Metrics(self._config.metrics, board=self._config.engine == "torch")
        self._announced: WeightsPublished | None = None
        self._released: TrainerReleased | None = None  # the answer to the newest release, while it holds
        self._command: Command | None = None  # the one being obeyed, or next
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether it starts, or obeys a command; others are dropped meanwhile."""
        return not self._idle.is_set()

    async def run(self, stop: asyncio.Event) -> None:
        """Restore, announce where we are, then obey until `stop`."""
        commands = await self._bus.subscribe(f"pearl.{self._name}.cmd.trainer")
        self._bus.on_reconnect(self._look_back)
        try:
            async with asyncio.TaskGroup() as group:
                listening, working = group.create_task(self._listen(commands)), group.create_task(self._work())
                await stop.wait()
                listening.cancel()
                await (
                    self._idle.wait()
                )  # a step under way is worth finishing; the process is ended if it takes too long
                working.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await commands.stop()
            await self._group.close()
            self._metrics.close()

    async def _look_back(self) -> None:
        """After a reconnection: is the newest version still in the stream? If not, the broker lost it: say it again."""
        announced = self._announced
        if announced is None:
            return
        subject = event_subject(self._name, WeightsPublished, "-")
        for _ in range(LOOKS):
            last = await self._bus.last(stream(self._name, "ev"), subject)
            with contextlib.suppress(UndecodableMessage):
                if (
                    last is not None
                    and decode_on(self._name, last.subject, last.data, WeightsPublished).version >= announced.version
                ):
                    return
            await asyncio.sleep(LOOK_AGAIN_S)
        log.warning(f"version {announced.version} is gone from the stream: said again", action="trainer.went_back")
        await self._publish(announced, fresh=True)
        finished = self._group.learner.finished
        if finished is not None and finished.batch == announced.version - 1:
            await self._publish(finished, fresh=True)

    # ---- commands ----

    async def _listen(self, commands: Subscription) -> None:
        async for delivery in commands:
            try:
                command = decode_on(self._name, delivery.subject, delivery.data, TrainerResume, TrainerRelease)
            except UndecodableMessage as error:
                await self._dead_letter(delivery, error.reason)
                continue
            if self._command is None:
                self._command = command
                self._idle.clear()
                self._arrived.set()

    async def _work(self) -> None:
        restored = await self._group.call("restore")
        learner = self._group.learner
        log.info(f"at version {learner.version}", action="trainer.ready", restored=restored, ranks=self._config.ranks)
        await self._announce()
        await self._publish(TrainerReady(start_id=self._token(6), version=learner.version, ranks=self._config.ranks))
        while True:
            if self._command is None:
                self._idle.set()
            await self._arrived.wait()
            self._arrived.clear()
            try:
                match self._command:
                    case TrainerResume() as resume:
                        await self._resume(resume)
                    case TrainerRelease() as release:
                        await self._release(release)
                    case None:
                        raise AssertionError("woken without a command")
            except BusError as error:
                log.warning(f"not obeyed, it will be repeated: {error}", action="trainer.unavailable")
            self._command = None

    async def _resume(self, command: TrainerResume) -> None:
        version = self._group.learner.version
        if command.batch > version:
            log.error(
                f"told to train batch {command.batch}, but this is version {version}: not trained; "
                f"are the checkpoints in {self._config.checkpoints} those of this run?",
                action="trainer.refused",
                epoch=command.epoch,
            )
        elif command.batch < version:
            await self._announce(fresh=True)
        else:
            await self._train(command)

    async def _release(self, command: TrainerRelease) -> None:
        released = self._released
        if released is not None:
            again = msgspec.structs.replace(released, epoch=command.epoch)
            await self._publish(again, fresh=True)
            return
        begun = _now_s()
        freed = await self._group.call("release")
        took_ms = int((_now_s() - begun) * 1000)
        self._released = TrainerReleased(epoch=command.epoch, freed_bytes=freed, took_ms=took_ms)
        log.info(f"released {freed} bytes in {took_ms} ms", action="trainer.released", epoch=command.epoch)
        await self._publish(self._released)

    # ---- a train step ----

    async def _train(self, command: TrainerResume) -> None:
        number = command.batch
        begun = _now_s()
        ready = await self._batch_ready(number)
        if ready is None:
            log.warning(f"no batch.ready/1 of batch {number} in the stream yet", action="trainer.refused")
            return
        records = await self._journal(ready)
        try:
            batch = await asyncio.to_thread(self._build, ready, records)
        except UnusableBatchError as error:
            log.error(str(error), action="trainer.refused")
            return
        await self._take_back(command)
        read_s = _now_s() - begun
        finished: StepFinished = await self._group.call("train", number, batch)
        await self._group.call("checkpoint")
        checkpoint_s = _now_s() - begun - read_s - finished.train_s
        await self._announce()
        log.info(
            f"trained batch {number}: reward {finished.reward_mean:.3f} in {_now_s() - begun:.2f} s",
            action="train_step",
            read_s=round(read_s, 3),
            train_s=round(finished.train_s, 3),
            checkpoint_s=round(checkpoint_s, 3),
        )

    async def _take_back(self, command: TrainerResume) -> None:
        """The device state, if it was given up or this process is new; said each time, since it is waited for."""
        begun = _now_s()
        self._released = None
        restored = await self._group.call("acquire")
        took_ms = int((_now_s() - begun) * 1000)
        if restored:
            log.info(f"restored {restored} bytes in {took_ms} ms", action="trainer.resumed", epoch=command.epoch)
        resumed = TrainerResumed(
            epoch=command.epoch, batch=command.batch, restored_bytes=restored, took_ms=took_ms if restored else 0
        )
        await self._publish(resumed, fresh=True)

    async def _batch_ready(self, number: int) -> BatchReady | None:
        """The newest on the batch's subject; one that cannot be read does not hide those before it."""
        newest: BatchReady | None = None
        subject = event_subject(self._name, BatchReady, str(number))
        async for delivery in self._bus.read(stream(self._name, "ev"), subject):
            try:
                newest = decode_on(self._name, delivery.subject, delivery.data, BatchReady)
            except UndecodableMessage as error:
                await self._dead_letter(delivery, error.reason)
        return newest

    async def _journal(self, ready: BatchReady) -> dict[int, TurnFinished]:
        """The records the batch refers to, by sequence; one ordered read over their range."""
        wanted = {seq for item in ready.items for seq in item.journal}
        records: dict[int, TurnFinished] = {}
        if not wanted:
            return records
        turns = self._bus.read(
            stream(self._name, "journal"),
            f"pearl.{self._name}.journal.*",
            first_seq=min(wanted),
            last_seq=max(wanted),
        )
        async for delivery in turns:
            if delivery.seq in wanted:
                with contextlib.suppress(UndecodableMessage):  # counted as missing, with its sequence
                    records[delivery.seq] = decode_on(self._name, delivery.subject, delivery.data, TurnFinished)
        return records

    # ---- news ----

    async def _announce(self, *, fresh: bool = False) -> None:
        """Snapshot this version and publish it, and the step that made it. `fresh`: as new facts, for who missed them."""
        learner = self._group.learner
        if self._announced is None or self._announced.version != learner.version:
            written = await self._group.call("snapshot")
            self._announced = WeightsPublished(
                version=written.version, uri=written.uri, manifest_sha256=written.manifest_sha256, bytes=written.bytes
            )
        await self._publish(self._announced, fresh=fresh)
        if learner.finished is not None:
            await self._publish(learner.finished, fresh=fresh)
            await asyncio.to_thread(self._metrics.write, learner.finished)

    async def _publish(self, message: Message, *, fresh: bool = False) -> None:
        """Until stored: a trainer that cannot say what it did must not go on."""
        identity = message_id(message)
        assert identity is not None, "the trainer's facts have ids of their own"
        if fresh:
            identity = f"{identity}:{self._token(4)}"
        while True:
            try:
                await self._bus.publish_durable(subject_of(self._name, message), encode(message), msg_id=identity)
                return
            except BusUnavailable as error:
                log.warning(f"not stored yet: {error}", action="trainer.unavailable", msg_id=identity)
                await asyncio.sleep(PUBLISH_RETRY_S)

    async def _dead_letter(self, delivery: Delivery, reason: str) -> None:
        log.warning(f"refused a message on {delivery.subject}: {reason}", action="trainer.refused")
        letter = DeadLetter(
            subject=delivery.subject,
            receiver="trainer",
            reason=reason,
            size=len(delivery.data),
            data=base64.b64encode(delivery.data[:DEAD_BYTES]).decode(),
        )
        with contextlib.suppress(BusError):
            await self._bus.publish_durable(
                subject_of(self._name, letter), encode(letter), msg_id=f"trainer:{self._token(8)}"
            )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
