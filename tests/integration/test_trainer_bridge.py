"""A foreign trainer's loop at the desk where the protocol meets it: what it is asked, in which order, and what its failures change."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from messages.envelope import Message
from messages.ids import Epoch
from messages.pipeline_scheduler import StepFinished, WeightsPublished
from messages.toggle_manager import TrainerReady, TrainerReleased
from messages.trainer import TrainerRelease, TrainerResume
from services import jobfile
from services.jobfile import ConfigError
from services.models.files import initial_model
from services.snapshot import verify
from services.trainer import bridge, checkpoints
from services.trainer.bridge import Batch, BridgeClosedError, PearlTrainer
from services.trainer.config import Config
from services.trainer.desk import Desk
from services.trainer.launch import RanksFailedError, keep_command
from services.trainer.service import Trainer
from services.trainer.tokens import build
from tests.integration.test_trainer_service import SOON_S, Rig, names
from tests.integration.trainer_batches import job_toml, make_batch
from tests.waiting import until


class Foreign(Rig):
    """A trainer whose loop runs in a thread, and notes what it is asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "external")
        path = folder / "job.toml"
        path.write_text(job_toml(str(folder), 1, "job").replace("[training]", '[training]\nengine = "external"'))
        self.job = jobfile.load(path)
        self.asked: list[str] = []
        self.thread: list[threading.Thread] = []
        self.failing = ""
        self.desk = self.new_desk()
        self.service: Trainer | None = None

    def new_desk(self) -> Desk:
        return Desk(
            Config.of(self.job),
            initial_model(self.job),
            lambda folder: self.note("save", folder),
            lambda folder: self.note("checkpoint", folder),
            lambda: self.note("offload"),
            lambda: self.note("reload"),
        )

    def note(self, what: str, folder: Path | None = None) -> int:
        self.asked.append(what)
        self.thread.append(threading.current_thread())
        if what == self.failing:
            raise RuntimeError(f"no {what} today")
        if folder is not None:
            (folder / "weights.bin").write_text(f"{what} {self.desk.version}")
        return 7

    async def tell(self, message: Message) -> None:
        """Once it obeys no other command: what comes before that is dropped, for whoever gives commands repeats them."""
        assert self.service is not None
        service = self.service
        await until(lambda: not service.busy)
        await super().tell(message)

    @asynccontextmanager
    async def loop(self, work: Callable[[Desk], Any]) -> AsyncIterator[asyncio.Task[Any]]:
        """The protocol, and `work` in the caller's thread."""
        stop = asyncio.Event()
        self.service = Trainer(self.job, self.broker.connect(), parts=(self.desk, build))
        self.running = asyncio.create_task(self.service.run(stop))
        caller = asyncio.create_task(asyncio.to_thread(work, self.desk))
        try:
            yield caller
        finally:
            self.desk.stop()
            await asyncio.wait((caller,), timeout=SOON_S)
            self.desk.leave()
            stop.set()
            await asyncio.wait((self.running,), timeout=SOON_S)


@pytest.fixture
async def foreign(tmp_path: Path) -> Foreign:
    found = Foreign(tmp_path)
    await found.start()
    return found


def train(desk: Desk) -> list[Batch]:
    """A whole foreign loop."""
    batches: list[Batch] = []
    while (batch := desk.until_batch()) is not None:
        batches.append(batch)
        desk.publish(0.5, 0.25, {"entropy": 2.0})
    return batches


async def test_a_batch_comes_whole_and_a_version_goes_out_in_order(foreign: Foreign) -> None:
    async with foreign.loop(train) as caller:
        assert names(await foreign.until(TrainerReady)) == ["WeightsPublished 0", "TrainerReady 0"]
        await foreign.put_batch(0)
        await foreign.tell(TrainerResume(epoch=Epoch(4), batch=0))
        said = await foreign.until(StepFinished)
    assert names(said)[2:] == ["WeightsPublished 1", "StepFinished 1"]
    assert foreign.asked == ["reload", "checkpoint", "save"]
    assert len(set(foreign.thread)) == 1 and foreign.thread[0] is not threading.current_thread()
    turns, items = make_batch(0)
    (batch,) = caller.result()
    assert [each.id for each in batch.trajectories] == [item.trajectory for item in items]
    assert [each.reward for each in batch.trajectories] == [item.reward for item in items]
    for each in batch.trajectories:
        own = [turn for turn in turns if turn.trajectory == each.id]
        assert each.tokens == [token for turn in own for token in (*turn.prompt_new, *turn.reply)]
        assert sum(each.own) == sum(len(turn.reply) for turn in own)
        assert len(each.own) == len(each.logprobs) == len(each.versions) == len(each.tokens)
        for mine, logprob, version in zip(each.own, each.logprobs, each.versions, strict=True):
            assert (logprob, version) == ((-2.7, 0) if mine else (0.0, -1))
    published, step = said[2], said[3]
    assert isinstance(published, WeightsPublished) and isinstance(step, StepFinished)
    manifest = verify(published.uri, published.manifest_sha256)
    assert manifest.version == 1 and {"weights.bin", "config.json"} <= {entry.name for entry in manifest.files}
    assert (step.loss, step.grad_norm, step.metrics["entropy"]) == (0.5, 0.25, 2.0)
    assert step.trained_tokens == sum(len(turn.reply) for turn in turns)
    assert verify(said[0].uri, said[0].manifest_sha256).version == 0, "version 0 is the model that training starts from"


async def test_what_is_lent_was_given_up_and_comes_back_before_the_batch(foreign: Foreign) -> None:
    async with foreign.loop(train):
        await foreign.put_batch(0)
        await foreign.until(TrainerReady)
        await foreign.tell(TrainerRelease(epoch=Epoch(2)))
        released = (await foreign.until(TrainerReleased))[-1]
        assert (released.freed_bytes, foreign.asked) == (0, []), "it held nothing yet"
        await foreign.tell(TrainerResume(epoch=Epoch(4), batch=0))
        await foreign.until(StepFinished)
        await foreign.tell(TrainerRelease(epoch=Epoch(5)))
        said = await foreign.until(TrainerReleased, 2)
        assert said[-1].freed_bytes == 7
        await foreign.put_batch(1)
        await foreign.tell(TrainerResume(epoch=Epoch(6), batch=1))
        await foreign.until(StepFinished, 2)
    assert foreign.asked == ["reload", "checkpoint", "save", "offload", "reload", "checkpoint", "save"]
    assert [each.restored_bytes for each in await foreign.resumed()] == [7, 7]


@pytest.mark.parametrize("failing", ["reload", "checkpoint", "save"])
async def test_a_callers_failure_is_its_own_and_ends_the_bridge(foreign: Foreign, failing: str) -> None:
    foreign.failing = failing
    async with foreign.loop(train) as caller:
        await foreign.put_batch(0)
        await foreign.until(TrainerReady)
        await foreign.tell(TrainerResume(epoch=Epoch(4), batch=0))
        await asyncio.wait((caller, foreign.running), timeout=SOON_S, return_when=asyncio.ALL_COMPLETED)
    assert isinstance(caller.exception(), RuntimeError)
    assert isinstance(foreign.running.exception(), BridgeClosedError)
    assert "StepFinished" not in " ".join(names(await foreign.said()))
    # The next process goes on where the checkpoint stands: before it the batch is trained again, after it only told of.
    foreign.failing = ""
    foreign.desk = foreign.new_desk()
    kept = failing == "save"
    assert foreign.desk.version == int(kept)
    async with foreign.loop(train) as caller:
        await foreign.tell(TrainerResume(epoch=Epoch(5), batch=0)) if kept else None
        await foreign.until(TrainerReady, 2)
        if not kept:
            await foreign.tell(TrainerResume(epoch=Epoch(5), batch=0))
        said = await foreign.until(StepFinished)
    assert [each.version for each in said if isinstance(each, WeightsPublished)][-1] == 1
    assert [batch.number for batch in caller.result()] == ([] if kept else [0])


async def test_leaving_in_the_middle_of_a_batch_ends_both_sides_and_trains_nothing(foreign: Foreign) -> None:
    async with foreign.loop(lambda desk: desk.until_batch()) as caller:
        await foreign.put_batch(0)
        await foreign.until(TrainerReady)
        await foreign.tell(TrainerResume(epoch=Epoch(4), batch=0))
        await asyncio.wait((caller,), timeout=SOON_S)
        assert caller.result().number == 0
    assert isinstance(foreign.running.exception(), BridgeClosedError)
    assert checkpoints.newest(Config.of(foreign.job).checkpoints) is None


async def test_a_caller_that_waits_is_told_that_the_bridge_has_ended(foreign: Foreign) -> None:
    waiting = asyncio.create_task(asyncio.to_thread(foreign.desk.until_batch))
    foreign.desk.end("the broker is away")
    with pytest.raises(BridgeClosedError, match="the broker is away"):
        await waiting


def job(folder: Path, more: str) -> Path:
    path = folder / "job.toml"
    path.write_text(job_toml(str(folder), 1, "job").replace("[training]", more))
    return path


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("[training]", "training.engine = 'torch'; a trainer of your own is \"external\""),
        (
            '[decision]\nlending = true\n[training]\nengine = "external"\ncommand = ["python"]',
            "needs offload and reload",
        ),
        ('[decision]\nlending = true\n[training]\nengine = "external"', "give training.command"),
        ('[training]\ncommand = ["python"]', "training.command is for"),
        ('[rollout]\nengine = "emulated"\n[training]\nengine = "external"', "needs the tokens of a model"),
    ],
)
def test_wrong_configurations_are_named(tmp_path: Path, more: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        PearlTrainer(job(tmp_path, more), save=lambda folder: None)
    assert named in str(error.value)


def test_without_a_job_file_it_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bridge.JOB_FILE, raising=False)
    with pytest.raises(ConfigError, match="PEARL_JOB_FILE"):
        PearlTrainer(save=lambda folder: None)


async def test_a_command_that_ends_by_itself_is_the_node_agents_to_start_again(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="ended with status 3"):
        await keep_command(tmp_path / "job.toml", ("python", "-c", "raise SystemExit(3)"), asyncio.Event())
    with pytest.raises(RanksFailedError, match=r"training\.command"):
        await keep_command(tmp_path / "job.toml", ("no-such-program-of-anyones",), asyncio.Event())


async def test_a_command_is_ended_with_its_service(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = (
        "import os, pathlib, signal\n"
        f"signal.signal({int(signal.SIGTERM)}, lambda *_: exit(0))\n"
        f"pathlib.Path({str(told)!r}).write_text(os.environ['PEARL_JOB_FILE'])\n"
        "signal.pause()\n"
    )
    stop = asyncio.Event()
    keeping = asyncio.create_task(keep_command(tmp_path / "job.toml", ("python", "-c", code), stop))
    async with asyncio.timeout(SOON_S):
        while not told.exists() or not told.read_text():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
    assert told.read_text() == str(tmp_path / "job.toml")
    stop.set()
    await keeping
