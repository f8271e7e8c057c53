"""The trainer on the in-memory bus: what it says, in which order, and what dying at any point changes about that."""

# ruff: noqa: ASYNC110 - these loops yield to the trainer under test; there is nothing else to wait for

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from messages.envelope import Message, decode, encode
from messages.ids import Epoch
from messages.monitor import DeadLetter
from messages.pipeline_scheduler import BatchItem, BatchReady, StepFinished, WeightsPublished
from messages.subjects import event_subject, message_id, stream, subject_of
from messages.toggle_manager import TrainerReady, TrainerReleased, TrainerResumed
from messages.trainer import TrainerRelease, TrainerResume
from services import jobfile
from services.jobfile import JobFile
from services.runtime.bus import StreamSpec
from services.runtime.bus_memory import MemoryBroker, MemoryBus
from services.snapshot import verify
from services.trainer.service import Trainer
from tests.integration.trainer_batches import job_toml, make_batch

SOON_S = 20.0


class Rig:
    """A job's streams, and someone who tells its trainer what to do."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.engine = engine
        path = folder / "job.toml"
        text = job_toml(str(folder), 1, "job")
        if engine == "emulated":
            text = text.replace("[training]", '[training]\nengine = "emulated"')
            text += '[rollout]\nengine = "emulated"\n[emulation]\ntime_scale = 100000.0\n'
        path.write_text(text)
        self.job: JobFile = jobfile.load(path)
        self.broker = MemoryBroker()
        self.bus: MemoryBus = self.broker.connect()
        self.running: asyncio.Task[None]

    async def start(self) -> None:
        for family in ("ev", "journal", "dead"):
            await self.bus.ensure_stream(StreamSpec(name=stream("job", family), subjects=(f"pearl.job.{family}.>",)))

    async def put_batch(self, number: int) -> None:
        turns, items = make_batch(number)
        sequences = [await self.store(turn) for turn in turns]
        moved = tuple(
            BatchItem(i.trajectory, i.group, i.reward, i.status, tuple(sequences[seq - 1] for seq in i.journal))
            for i in items
        )
        await self.store(BatchReady(batch=number, items=moved))

    async def store(self, message: Message) -> int:
        identity = message_id(message)
        assert identity is not None
        return await self.bus.publish_durable(subject_of("job", message), encode(message), msg_id=identity)

    async def tell(self, message: Message) -> None:
        await self.bus.publish(subject_of("job", message), encode(message))

    async def said(self) -> list[Any]:
        kinds = (WeightsPublished, StepFinished, TrainerReady, TrainerReleased)
        subjects = [delivery async for delivery in self.bus.read(stream("job", "ev"), "pearl.job.ev.>")]
        others = ("batch_ready", "trainer_resumed")
        return [decode(d.data, *kinds) for d in subjects if not any(other in d.subject for other in others)]

    async def resumed(self) -> list[TrainerResumed]:
        subject = event_subject("job", TrainerResumed)
        return [decode(d.data, TrainerResumed) async for d in self.bus.read(stream("job", "ev"), subject)]

    async def until(self, kind: type[Message], count: int = 1) -> list[Any]:
        """Everything said, once `kind` was said `count` times."""
        async with asyncio.timeout(SOON_S):
            while True:
                said = await self.said()
                if sum(isinstance(m, kind) for m in said) >= count:
                    return said
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def trainer(self) -> AsyncIterator[Trainer]:
        stop = asyncio.Event()
        trainer = Trainer(self.job, self.broker.connect())
        self.running = asyncio.create_task(trainer.run(stop))
        try:
            yield trainer
        finally:
            stop.set()
            await asyncio.wait((self.running,), timeout=SOON_S)
        self.running.result()


@pytest.fixture(params=["torch", "emulated"])
async def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Rig:
    found = Rig(tmp_path, request.param)
    await found.start()
    return found


async def idle(trainer: Trainer) -> None:
    async with asyncio.timeout(SOON_S):
        while trainer.busy:
            await asyncio.sleep(0.01)


def names(said: list[Any]) -> list[str]:
    return [f"{type(m).__name__} {getattr(m, 'version', '')}".strip() for m in said]


async def test_a_step_is_checkpointed_then_announced(rig: Rig) -> None:
    async with rig.trainer():
        said = await rig.until(TrainerReady)
        assert names(said) == ["WeightsPublished 0", "TrainerReady 0"]
        await rig.put_batch(0)
        await rig.tell(TrainerResume(epoch=Epoch(4), batch=0))
        said = await rig.until(StepFinished)
    assert names(said)[2:] == ["WeightsPublished 1", "StepFinished 1"]
    for published in (said[0], said[2]):
        assert verify(published.uri, published.manifest_sha256).version == published.version
    step: StepFinished = said[3]
    assert step.batch == 0
    assert step.trained_tokens == sum(len(turn.reply) for turn in make_batch(0)[0])
    assert step.zero_variance_groups >= 1
    lines = (rig.job.run_dir / "metrics" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in lines] == [0]
    if rig.engine == "torch":
        assert list((rig.job.run_dir / "metrics" / "tb").iterdir())


async def test_a_batch_trained_before_is_answered_again_not_trained(rig: Rig) -> None:
    async with rig.trainer() as trainer:
        await rig.put_batch(0)
        await rig.until(TrainerReady)
        await rig.tell(TrainerResume(epoch=Epoch(4), batch=0))
        first = await rig.until(StepFinished)
        await idle(trainer)
        await rig.tell(TrainerResume(epoch=Epoch(4), batch=0))
        again = await rig.until(StepFinished, 2)
    assert again[-2:] == first[-2:]


@pytest.mark.parametrize("dies_in", ["train", "checkpoint", "snapshot", "publish weights", "publish step"])
async def test_dying_anywhere_in_a_step_changes_nothing(rig: Rig, dies_in: str, tmp_path: Path) -> None:
    class Died(Exception):
        pass

    await rig.put_batch(0)
    with pytest.raises(Died):
        async with rig.trainer() as trainer:
            await rig.until(TrainerReady)
            call, publish = trainer._group.call, trainer._publish

            async def dying_call(method: str, *arguments: object) -> Any:
                if method == dies_in:
                    raise Died
                return await call(method, *arguments)

            async def dying_publish(message: Message, **options: bool) -> None:
                kind = {"publish weights": WeightsPublished, "publish step": StepFinished}.get(dies_in)
                if kind is not None and isinstance(message, kind):
                    raise Died
                await publish(message, **options)

            trainer._group.call, trainer._publish = dying_call, dying_publish
            await rig.tell(TrainerResume(epoch=Epoch(4), batch=0))
            await asyncio.wait((rig.running,), timeout=SOON_S)
    async with rig.trainer():
        await rig.until(TrainerReady, 2)
        await rig.tell(TrainerResume(epoch=Epoch(5), batch=0))
        said = await rig.until(StepFinished)
    found = [m for m in said if isinstance(m, WeightsPublished)]
    assert {m.version: m.manifest_sha256 for m in found}.keys() == {0, 1}
    assert len({(m.version, m.manifest_sha256) for m in found}) == 2, "a version was published with two contents"

    (tmp_path / "clean").mkdir()
    clean = Rig(tmp_path / "clean", rig.engine)
    await clean.start()
    await clean.put_batch(0)
    async with clean.trainer():
        await clean.until(TrainerReady)
        await clean.tell(TrainerResume(epoch=Epoch(4), batch=0))
        expected = [m for m in await clean.until(StepFinished) if isinstance(m, WeightsPublished)]
    assert found[-1].manifest_sha256 == expected[-1].manifest_sha256


async def test_what_it_cannot_do_is_refused(rig: Rig) -> None:
    async with rig.trainer():
        await rig.until(TrainerReady)
        await rig.put_batch(0)
        for message in (TrainerResume(epoch=Epoch(4), batch=7), TrainerReady(start_id="x", version=0, ranks=1)):
            await rig.bus.publish("pearl.job.cmd.trainer", encode(message))
            await asyncio.sleep(0.02)
        await rig.tell(TrainerResume(epoch=Epoch(4), batch=0))
        said = await rig.until(StepFinished)
    assert names(said)[2:] == ["WeightsPublished 1", "StepFinished 1"]
    letters = [decode(d.data, DeadLetter) async for d in rig.bus.read(stream("job", "dead"), "pearl.job.dead.>")]
    assert [letter.receiver for letter in letters] == ["trainer"]
    assert "trainer.ready/1" in letters[0].reason


async def test_a_batch_on_anothers_subject_is_refused_and_hides_nothing(rig: Rig) -> None:
    async with rig.trainer():
        await rig.until(TrainerReady)
        await rig.put_batch(0)
        other = encode(BatchReady(batch=1, items=()))
        await rig.bus.publish_durable(event_subject("job", BatchReady, "0"), other, msg_id="misplaced")
        await rig.tell(TrainerResume(epoch=Epoch(4), batch=0))
        said = await rig.until(StepFinished)
    assert names(said)[2:] == ["WeightsPublished 1", "StepFinished 1"]
    letters = [decode(d.data, DeadLetter) async for d in rig.bus.read(stream("job", "dead"), "pearl.job.dead.>")]
    assert ["belongs on" in letter.reason for letter in letters] == [True]


async def test_memory_is_released_on_demand_and_back_for_the_next_batch(rig: Rig) -> None:
    async with rig.trainer() as trainer:
        await rig.put_batch(0)
        await rig.put_batch(1)
        await rig.until(TrainerReady)
        await rig.tell(TrainerResume(epoch=Epoch(4), batch=0))
        await rig.until(StepFinished)
        for count in (1, 2):  # asked again: answered again
            await idle(trainer)
            await rig.tell(TrainerRelease(epoch=Epoch(6)))
            said = await rig.until(TrainerReleased, count)
        assert said[-1].epoch == 6
        assert not trainer._group.learner.resident
        await idle(trainer)
        await rig.tell(TrainerResume(epoch=Epoch(9), batch=1))
        said = await rig.until(StepFinished, 2)
    assert names(said)[-2:] == ["WeightsPublished 2", "StepFinished 2"]
    first, second = await rig.resumed()
    assert (first.epoch, first.batch, first.restored_bytes) == (4, 0, 0), "it held its memory from the start"
    assert (second.epoch, second.batch) == (9, 1) and second.restored_bytes > 0


async def test_a_restarted_trainer_takes_no_memory_until_it_is_told_to_train(rig: Rig) -> None:
    await rig.put_batch(0)
    await rig.put_batch(1)
    async with rig.trainer():
        await rig.until(TrainerReady)
        await rig.tell(TrainerResume(epoch=Epoch(4), batch=0))
        await rig.until(StepFinished)
    async with rig.trainer() as trainer:
        said = await rig.until(TrainerReady, 2)
        await idle(trainer)
        assert said[-1].version == 1 and not trainer._group.learner.resident, "its GPUs may be lent"
        await rig.tell(TrainerRelease(epoch=Epoch(6)))
        await rig.until(TrainerReleased)
        await idle(trainer)
        await rig.tell(TrainerResume(epoch=Epoch(9), batch=1))
        said = await rig.until(StepFinished, 2)
    assert names(said)[-2:] == ["WeightsPublished 2", "StepFinished 2"]
    assert (await rig.resumed())[-1].epoch == 9


async def test_what_the_broker_lost_of_a_step_is_said_again(rig: Rig) -> None:
    await rig.put_batch(0)
    async with rig.trainer() as trainer:
        await rig.until(TrainerReady)
        snapshot = rig.broker.snapshot()
        await rig.tell(TrainerResume(epoch=Epoch(2), batch=0))
        await rig.until(StepFinished)
        await idle(trainer)
        rig.broker.go_down()
        rig.broker.go_back(snapshot)
        await rig.broker.come_up()
        said = await rig.until(StepFinished)
        assert [message.version for message in said if isinstance(message, WeightsPublished)] == [0, 1]


async def test_a_broker_that_lost_nothing_hears_nothing_twice(rig: Rig) -> None:
    await rig.put_batch(0)
    async with rig.trainer() as trainer:
        await rig.until(TrainerReady)
        await rig.tell(TrainerResume(epoch=Epoch(2), batch=0))
        before = await rig.until(StepFinished)
        await idle(trainer)
        rig.broker.go_down()
        await rig.broker.come_up()
        assert await rig.said() == before
