"""Messages to the trainer. It is told to train only by the toggle manager, after the table says its GPUs are its own."""

from __future__ import annotations

from messages.envelope import Message
from messages.ids import Epoch


# toggle_manager -> trainer. Core NATS, repeated until StepFinished of the batch. Key: batch.
class TrainerResume(Message, frozen=True, kw_only=True, tag="trainer.resume/1"):
    """The GPUs are the trainer's as of `epoch`: restore device state if it was released, train `batch`.

    The batch's content is in its `batch.ready/1`. A batch trained before is answered again, not trained again.
    """

    epoch: Epoch
    batch: int


# toggle_manager -> trainer. Core NATS, repeated until TrainerReleased. Key: epoch.
class TrainerRelease(Message, frozen=True, kw_only=True, tag="trainer.release/1"):
    """Give the device memory back (parameters, optimiser, gradients, caches); the processes live on."""

    epoch: Epoch
