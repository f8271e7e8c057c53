"""The trainer's service: told to train by the toggle manager only, it trains a batch and says so, in an order that survives
its death at any point.

Owns: the optimiser state, checkpoints, snapshots. Never decides when to train, and never reads the role table: by the
time `trainer.resume/1` comes, the table says that the GPUs are its own.

Order of every step (DESIGN 8): checkpoint -> snapshot -> `weights.published/1` -> `train_step.finished/1`. A trainer that
dies before the checkpoint trains the batch again, after it says again what it would have said. Being told twice is harmless.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from messages.agent import TurnFinished
from messages.envelope import Message, UndecodableMessage, decode, encode
from messages.pipeline_scheduler import BatchReady, StepFinished, WeightsPublished
from messages.subjects import event_subject, message_id, stream, subject_of
from messages.toggle_manager import TrainerReady
from messages.trainer import TrainerResume
from services.connect import connect
from services.jobfile import JobFile
from services.runtime.bus import Bus, BusUnavailable
from services.runtime.log import get_logger
from services.trainer.config import Config

BATCH_WAIT_S = 0.2
BATCH_TRIES = 50
"""`batch.ready/1` is stored before training begins; a lagging replica may show it a little later."""


async def serve(job: JobFile, stop: asyncio.Event, job_path: Path) -> None:
    """Serve until `stop`, with all ranks."""
    if job.training.ranks == 1:
        await serve_ranks(job, stop)
        return
    from services.trainer.ranks import run_torchrun

    status = await run_torchrun(job_path, job.training.ranks, stop)
    assert status == 0 or stop.is_set(), f"torchrun ended with status {status}"


async def serve_ranks(job: JobFile, stop: asyncio.Event) -> None:
    """Rank 0: serve the bus until `stop`."""
    bus = await connect(job, "trainer")
    trainer = Trainer(job, bus)
    try:
        await trainer.run(stop)
    finally:
        await bus.close()


class Trainer:
    """Rank 0 and its command loop."""

    def __init__(self, job: JobFile, bus: Bus) -> None:
        from services.models.files import initial_model
        from services.trainer.ranks import Group

        self._job = job
        self._name = job.job.name
        self._config = Config.of(job)
        self._bus = bus
        self._log = get_logger("trainer")
        self._group = Group(self._config, initial_model(job))
        self._announced: WeightsPublished | None = None
        self._metrics = Metrics(self._config.metrics)

    async def run(self, stop: asyncio.Event) -> None:
        """Restore, announce where we are, then obey until `stop`."""
        commands = await self._bus.subscribe(f"pearl.{self._name}.cmd.trainer")
        try:
            restored = await self._group.call("restore")
            if not restored:
                await self._group.call("checkpoint")
            learner = self._group.learner
            self._log.info(f"at version {learner.version}", action="trainer.ready", restored=restored)
            await self._announce()
            ready = TrainerReady(start_id=secrets.token_hex(6), version=learner.version, ranks=self._config.ranks)
            await self._publish(ready)
            while not stop.is_set():
                delivery = await commands.next(0.5)
                if delivery is None:
                    continue
                try:
                    command = decode(delivery.data, TrainerResume)
                except UndecodableMessage as error:
                    self._log.warning(f"refused a command: {error.reason}", action="trainer.refused")
                    continue
                await self._resume(command)
        finally:
            await commands.stop()
            await self._group.close()
            self._metrics.close()

    async def _resume(self, command: TrainerResume) -> None:
        version = self._group.learner.version
        if command.batch < version:
            await self._announce(fresh=True)
            return
        if command.batch > version:
            self._log.error(
                f"told to train batch {command.batch}, but this is version {version}: not trained",
                action="trainer.refused",
            )
            return
        await self._train(command.batch)

    async def _train(self, number: int) -> None:
        from services.trainer.data import IncompleteBatch, build

        begun = time.monotonic()
        ready = await self._batch_ready(number)
        if ready is None:
            self._log.error(f"no batch.ready/1 of batch {number} in the stream", action="trainer.refused")
            return
        try:
            batch = build(ready, await self._journal(ready))
        except IncompleteBatch as error:
            self._log.error(f"batch {number}: {error}", action="trainer.refused")
            return
        read_s = time.monotonic() - begun
        finished: StepFinished = await self._group.call("train", number, batch)
        await self._group.call("checkpoint")
        await self._announce()
        self._metrics.write(finished)
        self._log.info(
            f"trained batch {number}: reward {finished.reward_mean:.3f} in {time.monotonic() - begun:.2f} s",
            action="train_step",
            read_s=round(read_s, 3),
            train_s=round(finished.train_s, 3),
        )

    async def _batch_ready(self, number: int) -> BatchReady | None:
        subject = event_subject(self._name, BatchReady, str(number))
        for _ in range(BATCH_TRIES):
            delivery = await self._bus.last(stream(self._name, "ev"), subject)
            if delivery is not None:
                return decode(delivery.data, BatchReady)
            await asyncio.sleep(BATCH_WAIT_S)
        return None

    async def _journal(self, ready: BatchReady) -> dict[int, TurnFinished]:
        """The records the batch refers to, by sequence; one ordered read over their range."""
        wanted = {seq for item in ready.items for seq in item.journal}
        records: dict[int, TurnFinished] = {}
        if not wanted:
            return records
        subject = f"pearl.{self._name}.journal.*"
        async for delivery in self._bus.read(
            stream(self._name, "journal"), subject, first_seq=min(wanted), last_seq=max(wanted)
        ):
            if delivery.seq in wanted:
                with contextlib.suppress(UndecodableMessage):
                    records[delivery.seq] = decode(delivery.data, TurnFinished)
        return records

    async def _announce(self, *, fresh: bool = False) -> None:
        """Snapshot this version and publish it, and the step that made it. `fresh` ids reach even those who missed it."""
        learner = self._group.learner
        if self._announced is None or self._announced.version != learner.version:
            snapshot = await self._group.call("snapshot")
            self._announced = WeightsPublished(
                version=snapshot.version,
                uri=snapshot.uri,
                manifest_sha256=snapshot.manifest_sha256,
                bytes=snapshot.bytes,
            )
        for message in (self._announced, learner.finished):
            if message is not None:
                await self._publish(message, fresh=fresh)

    async def _publish(self, message: Message, *, fresh: bool = False) -> None:
        """Until stored: a trainer that cannot say what it did must not go on."""
        identity = message_id(message)
        assert identity is not None, "the trainer's facts have ids of their own"
        if fresh:
            identity = f"{identity}:{secrets.token_hex(4)}"
        while True:
            try:
                await self._bus.publish_durable(subject_of(self._name, message), encode(message), msg_id=identity)
                return
            except BusUnavailable as error:
                self._log.warning(f"not stored yet: {error}", action="trainer.unavailable")


class Metrics:
    """Train metrics where people look: JSON lines, and TensorBoard if it is installed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "train.jsonl").open("a", encoding="utf-8")
        self._folder = folder
        self._board: Any = None  # SummaryWriter; made late, since importing it is slow

    def write(self, step: StepFinished) -> None:
        """Append one train step."""
        values: dict[str, Any] = msgspec.to_builtins(step)
        values |= values.pop("metrics")
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._board is None:
            with contextlib.suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self._folder / "tensorboard"))
        if self._board is not None:
            for name in (
                "reward_mean",
                "reward_std",
                "loss",
                "grad_norm",
                "train_s",
                "zero_variance_groups",
                "entropy",
            ):
                self._board.add_scalar(f"train/{name}", values[name], step.batch)
            self._board.flush()

    def close(self) -> None:
        """Flush what is open."""
        self._file.close()
        if self._board is not None:
            self._board.close()
