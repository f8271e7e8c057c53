"""Messages to people: decision records, dead letters, notices."""

from __future__ import annotations

import msgspec

from messages.envelope import Message
from messages.ids import DecisionId, Mode


class Candidate(msgspec.Struct, frozen=True):
    """One configuration and what it is predicted to do."""

    prefill: int
    decode: int
    colocated: int
    makespan_s: float | None  # None where infeasible
    feasible: bool
    reason: str = ""


# decision_engine -> monitor. Durable (EV). Key: decision_id.
class DecisionRecord(Message, frozen=True, kw_only=True, tag="decision.recorded/1"):
    """Everything a decision was made from: it can be explained, and made again, from this alone."""

    decision_id: DecisionId
    budget_id: int
    train_step: int  # of the profile used
    profile: dict[str, float]
    workers: int
    borrow: bool
    borrow_reason: str
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    incumbent: Candidate | None
    mode: Mode
    thresholds: dict[str, float]
    forced: bool
    changed: bool
    reason: str


# any service -> monitor. Durable (DEAD).
class DeadLetter(Message, frozen=True, kw_only=True, tag="letter.dead/1"):
    """A message that was refused: where it came in, why, and its first bytes (base64)."""

    subject: str
    receiver: str
    reason: str
    size: int
    data: str
    seq: int = 0  # its sequence in the stream; 0: it was a core message
