"""Messages to people: decision records, dead letters, notices."""

from __future__ import annotations

import msgspec

from messages.envelope import Message
from messages.ids import DecisionId, Epoch, Mode, WorkerId


class Candidate(msgspec.Struct, frozen=True):
    """One configuration and what it is predicted to do."""

    prefill: int
    decode: int
    colocated: int
    makespan_s: float | None  # None where infeasible
    feasible: bool
    reason: str = ""
    method: str = ""  # "replay", "queueing"; "": the closed forms
    base_s: float | None = None  # the prediction before what was measured corrected it
    spread: float = 0.0  # uncertainty of that correction: its standard deviation as a share


class Observed(msgspec.Struct, frozen=True):
    """A batch that one configuration served from its beginning to its end: predicted, before any correction, and realised."""

    prefill: int
    decode: int
    colocated: int
    predicted_s: float
    realised_s: float
    batch: int = -1


class Averaged(msgspec.Struct, frozen=True):
    """How ratios of `workers` workers compare with colocation by the samples of several profiles, the newest of `train_step`."""

    workers: int
    train_step: int
    weight: float  # samples in it: older ones count less
    shift: float  # by how much, on average, the newest sample's logarithms were moved
    logs: tuple[tuple[int, float], ...]  # (prefill workers, log of the predicted makespan over colocation's), ascending
    before: tuple[tuple[int, float], ...] = ()  # the same without the newest sample, which is one of `weight`


class Incumbent(msgspec.Struct, frozen=True):
    """What ran when a decision was made.

    `survivors`: (prefill, decode) workers among the dedicated ones that keep their role, as the role table shows them;
    `survivors_full`: the same with the overlap workers. None: no table was known.
    """

    mode: Mode
    prefill: int
    decode: int
    colocated: int
    borrow: bool
    survivors: tuple[int, int] | None = None
    survivors_full: tuple[int, int] | None = None


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
    policy: str = "planner"  # `decision.policy`
    impossible: str = ""  # why no disaggregated configuration can run; "": they can
    running: Incumbent | None = None
    lending: bool = False  # whether borrowing was considered at all
    dedicated_workers: int = 0
    overlap_workers: int = 0  # idle ones, that might be borrowed
    remaining: int = 0  # R of eq. 7
    toggle_s: float = 0.0  # T_toggle of eq. 7
    return_s: float = 0.0  # the part of it that is the return
    dedicated: Candidate | None = None  # chosen for the dedicated workers alone: T_ded of eq. 7
    full: Candidate | None = None  # chosen for all: T_full; None where it was not asked for
    # What the policy "planner" predicts from, beside `profile`; empty: the closed forms decided (docs/decisions.md).
    sample: tuple[tuple[int, ...], ...] = ()  # as in workload.profile/1
    observed: tuple[Observed, ...] = ()
    measured_on: tuple[int, int, int] | None = None  # (prefill, decode, colocated) that served while `dL` was measured
    limits: dict[str, float] = {}  # of a worker's engine, and of how much is replayed
    stakes: dict[str, float] = {}  # what a change costs and how long it is likely to pay
    quick: bool = False  # a shrink that could not wait for a replay: ranked by the queueing network alone
    may_probe: bool = False  # some mode was never measured, and no trial was spent yet
    holding: tuple[int, int, int] | None = None  # (prefill, decode, colocated) of the trial that runs
    probe: bool = False  # what was chosen is a trial of a mode that was never measured
    averages: tuple[Averaged, ...] = ()  # what earlier samples predicted
    left: int = -1  # trajectories of the current batch alone, that the gate counts where batches overlap; -1: not told


# toggle_manager -> monitor. Durable (EV). Key: batch.
class GpusReturned(Message, frozen=True, kw_only=True, tag="gpus.returned/1"):
    """Training got its GPUs back for `batch` at `at_ms` (the epoch's time), having asked for them by `deadline_ms`.

    Said only where GPUs were lent, or about to be, when training asked. Times are Unix ms.
    """

    batch: int
    workers: tuple[WorkerId, ...]  # the overlap workers that had to let go
    deadline_ms: int
    at_ms: int


# orchestrator -> monitor, checker. Durable (EV). Key: epoch.
class StoreRewound(Message, frozen=True, kw_only=True, tag="store.rewound/1"):
    """The broker came back without its last moments: from `epoch` on, the role table is what workers reported.

    What was stored between the two and lost is done again: events, journals of trajectories, batches.
    """

    epoch: Epoch
    stored_epoch: Epoch  # what the bucket had
    seen_epoch: Epoch  # the newest that anyone had seen; 0: not known
    reason: str
    adopted: tuple[WorkerId, ...]  # workers that went on serving


# any service -> monitor. Durable (DEAD).
class DeadLetter(Message, frozen=True, kw_only=True, tag="letter.dead/1"):
    """A message that was refused: where it came in, why, and its first bytes (base64)."""

    subject: str
    receiver: str
    reason: str
    size: int
    data: str
    seq: int = 0  # its sequence in the stream; 0: it was a core message
