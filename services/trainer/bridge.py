"""For a trainer that is not ours: a library that makes a blocking training loop the trainer of a PEARL job.

    with PearlTrainer(save=save, checkpoint=keep, offload=to_cpu, reload=to_gpu) as pearl:
        for batch in pearl.batches():          # complete batches; the GPUs are lent while there is none
            loss = train_on(batch.trajectories)
            pearl.publish(loss=loss)           # the new version, on its way to the workers

The protocol itself is `service.Trainer`, the one that PEARL's own trainer has; it runs in a thread here. Every function that
the caller gave is called in the caller's own thread, within `batches`, `next_batch` and `publish`, one at a time.

Invariants: between `publish` and the next batch the caller computes nothing on the device, so what is lent then is free;
a batch is given out again after a restart unless its checkpoint was complete; a version is announced only when every byte
of its snapshot is on disk under a checksum.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from services import jobfile
from services.connect import connect
from services.jobfile import ConfigError
from services.runtime.bus import BusError
from services.trainer import checkpoints
from services.trainer.config import Config
from services.trainer.desk import BridgeClosedError, Desk, MoveDevice, Save
from services.trainer.metrics import Metrics
from services.trainer.service import Trainer
from services.trainer.tokens import Batch, Trajectory, build

__all__ = ["Batch", "BridgeClosedError", "PearlTrainer", "Trajectory"]

JOB_FILE: Final = "PEARL_JOB_FILE"
"""Environment variable that names the job file, for a trainer that a node agent started (`training.command`)."""
END_S: Final = 10.0
"""How long `close` waits for the bus to take what was said."""


class PearlTrainer:
    """A job's trainer, for the block of its `with` statement. Not to be shared by threads; of several ranks, one has it."""

    def __init__(
        self,
        job_file: str | Path | None = None,
        *,
        save: Save,
        checkpoint: Save | None = None,
        offload: MoveDevice | None = None,
        reload: MoveDevice | None = None,
    ) -> None:
        """Reads the job file (that in PEARL_JOB_FILE unless given) and looks for a checkpoint; connects to nothing yet.

        `save` writes the weights as workers read them (Hugging Face safetensors; config.json and tokenizer files are added if
        it leaves them out); `checkpoint` whatever the caller needs to go on from here; `offload` and `reload` give the device
        memory up and take it again, and are needed where `decision.lending` is set: until the first `reload` the caller holds
        none. Raises ConfigError.
        """
        path = job_file or os.environ.get(JOB_FILE)
        if not path:
            raise ConfigError(f"no job file: give its path, or set {JOB_FILE} (a node agent does)")
        self.job = jobfile.load(path)
        self.config = Config.of(self.job)
        if self.config.engine != "external":
            raise ConfigError(f'{path}: training.engine = {self.config.engine!r}; a trainer of your own is "external"')
        if self.job.decision.lending and (offload is None or reload is None):
            raise ConfigError(
                f"{path}: decision.lending = true needs offload and reload: GPUs that are lent must be free"
            )
        self._desk = Desk(self.config, _initial_folder(self.job), save, checkpoint, offload, reload)
        found = checkpoints.newest(self.config.checkpoints)
        self.restored = found[0] if found is not None else None
        """The newest checkpoint's folder, to be loaded by the caller; None at version 0."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._handlers: dict[int, Any] = {}  # those that were there; Any: what signal.signal returns

    @property
    def version(self) -> int:
        """The version of the policy that the caller has, or has to load."""
        return self._desk.version

    @property
    def model(self) -> Path:
        """Folder of the model that training starts from (version 0)."""
        return self._desk.model

    def __enter__(self) -> PearlTrainer:
        """Connect and say where we are. SIGTERM and SIGINT end `batches` from now on, if this is the main thread."""
        self._thread = threading.Thread(target=self._serve, name="pearl-trainer", daemon=True)
        self._thread.start()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End. A batch that was not published is given out again, to whoever is the trainer next."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        self._desk.leave()
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join(END_S)
            self._thread = None

    def batches(self) -> Iterator[Batch]:
        """Complete batches, one after another, until the job stops. Each must be published before the next."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def next_batch(self) -> Batch | None:
        """Wait for the next batch; None when the job stops.

        While it waits the GPUs may be lent: `offload` is called when they are asked for, `reload` before the batch is
        returned. Raises BridgeClosedError, and whatever the caller's functions raise.
        """
        assert self._thread is not None, "enter the bridge first: with PearlTrainer(...) as pearl"
        assert self._desk.training is None, "publish the batch before asking for the next"
        return self._desk.until_batch()

    def publish(self, *, loss: float = 0.0, grad_norm: float = 0.0, metrics: Mapping[str, float] | None = None) -> int:
        """The batch is trained: checkpoint, snapshot, and both announced in this order. Returns the new version.

        Workers get it in the background. `metrics`: anything else, for monitor and TensorBoard. Raises BridgeClosedError, and
        whatever the caller's functions raise.
        """
        return self._desk.publish(loss, grad_norm, dict(metrics or {}))

    # ---- the thread that talks to the bus

    def _serve(self) -> None:
        reason = "its thread failed; the traceback is above"
        try:
            asyncio.run(self._talk())
            reason = "it was closed"
        except (BusError, ConfigError, OSError, BridgeClosedError) as error:
            reason = str(error)
        finally:
            self._desk.end(reason)

    async def _talk(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._desk.left:
            return
        bus = await connect(self.job, "trainer")
        try:
            metrics = Metrics(self.config.metrics)
            await Trainer(self.job, bus, parts=(self._desk, build), metrics=metrics).run(self._stop)
        finally:
            await bus.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._desk.stop()


def _initial_folder(job: jobfile.JobFile) -> Path:
    from services.models.files import initial_model  # torch: heavy

    return initial_model(job)
