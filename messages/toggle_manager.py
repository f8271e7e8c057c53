"""Messages to the toggle manager, beside the facts in `orchestrator.py` that it reads too."""

from __future__ import annotations

from messages.envelope import Message
from messages.ids import Epoch


# trainer -> toggle_manager. Durable (EV). Key: epoch.
class TrainerReleased(Message, frozen=True, kw_only=True, tag="trainer.released/1"):
    """The trainer's device memory is free, measured."""

    epoch: Epoch
    freed_bytes: int
    took_ms: int


# trainer -> toggle_manager, monitor. Durable (EV). Key: (epoch, batch), anew by each process that obeys.
class TrainerResumed(Message, frozen=True, kw_only=True, tag="trainer.resumed/1"):
    """The trainer has its device state back (`restored_bytes` as measured; 0: it never gave it up) and trains `batch`."""

    epoch: Epoch
    batch: int
    restored_bytes: int
    took_ms: int


# trainer -> toggle_manager, pipeline_scheduler, monitor. Durable (EV). Key: start_id.
class TrainerReady(Message, frozen=True, kw_only=True, tag="trainer.ready/1"):
    """The trainer's processes are up, at `version` (from the checkpoint, or the initial model)."""

    start_id: str
    version: int
    ranks: int
