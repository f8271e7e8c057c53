"""One decision as a function of everything it depends on: mode, counts and borrowing together (paper 4.3.2, 4.6). Pure.

A `Question` is what the core knows when it decides; a decision record holds all of it, so `question_of` gets it back and
`answer` decides again: a decision can be explained, and checked, from its record alone (DESIGN 11.9).
"""

from __future__ import annotations

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.ids import Mode
from messages.monitor import Candidate, DecisionRecord, Incumbent
from services.decision_engine import predict
from services.decision_engine.choose import (
    Choice,
    ClosedForms,
    Forecast,
    Policy,
    Replays,
    Running,
    choose,
    counts_of,
    mode_of,
)
from services.decision_engine.correct import Counts
from services.decision_engine.makespan import borrowing_pays
from services.decision_engine.predict_evidence import Evidence, Limits
from services.decision_engine.stakes import BORROW_MARGIN, MARGIN, Stakes
from services.jobfile import parse_policy
from services.profile import profile_of


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision follows from. Workers are counted; seconds."""

    profile: WorkloadProfile
    policy: Policy
    running: Incumbent | None  # None: nothing yet
    dedicated: int
    overlap: int  # on training GPUs that are idle
    lending: bool
    remaining: int  # R
    left: int = -1  # of the current batch alone; -1: R
    toggle_s: float
    return_s: float
    evidence: Evidence | None = None  # None: the closed forms decide
    stakes: Stakes = Stakes()
    may_probe: bool = False
    probe_share: float = 0.0  # of a batch, that a trial may be predicted to cost
    holding: Counts | None = None  # the trial that runs


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What to run and why."""

    choice: Choice
    borrow: bool
    borrow_reason: str
    dedicated: Candidate  # chosen on the dedicated workers alone
    full: Candidate | None  # chosen on all, where that was asked
    probe: bool = False  # the choice is a trial

    @property
    def chosen(self) -> Candidate:
        return self.choice.chosen


def answer(question: Question) -> Answer:
    """Solve for the dedicated budget and, where GPUs can be borrowed, for the full one; then the gate (eq. 7), then the trial."""
    found = _gated(question)
    q = question
    if q.evidence is None or q.evidence.quick or q.policy.fixed is not None or found.choice.mode is Mode.PAUSED:
        return found
    options = found.choice.candidates
    if q.holding is not None:
        held = next((each for each in options if counts_of(each) == q.holding and each.feasible), None)
        if held is None and sum(q.holding) == sum(counts_of(found.chosen)):
            held = _forecast(q, sum(q.holding)).least([q.holding])
        if held is not None:
            return _trial(found, held, "the trial of a mode that was never measured goes on")
        return found
    if not q.may_probe or found.choice.forced:
        return found
    held = predict.probe(options, q.evidence.observed, q.probe_share)
    if held is None:
        return found
    costs = (held.makespan_s or 0.0) / (found.chosen.makespan_s or 1.0) - 1
    why = f"trial: {mode_of(held)} was never measured, and is predicted to cost {max(costs, 0.0):.1%} of a batch"
    return _trial(found, held, why)


def _trial(found: Answer, held: Candidate, reason: str) -> Answer:
    choice = msgspec.structs.replace(found.choice, mode=mode_of(held), chosen=held, reason=reason)
    return msgspec.structs.replace(found, choice=choice, probe=True)


def _forecast(q: Question, workers: int) -> Forecast:
    if q.evidence is None or not q.evidence.usable:
        return ClosedForms(q.profile, q.policy)
    return Replays(q.profile, q.policy, q.evidence, q.stakes)


def _gated(q: Question) -> Answer:
    def chosen_for(workers: int, full: bool) -> Choice:
        return choose(q.profile, workers, _running(q.running, full=full), q.policy, _forecast(q, workers))

    dedicated = chosen_for(q.dedicated, False)

    def settled(choice: Choice, borrow: bool, why: str, full: Choice | None) -> Answer:
        return Answer(
            choice=choice,
            borrow=borrow,
            borrow_reason=why,
            dedicated=dedicated.chosen,
            full=None if full is None else full.chosen,
        )

    if not q.lending:
        return settled(dedicated, False, "lending is not enabled", None)
    if q.overlap == 0:
        return settled(dedicated, False, "no training GPU is idle", None)
    full = chosen_for(q.dedicated + q.overlap, True)
    if dedicated.chosen.makespan_s is None:
        return settled(full, True, "no dedicated worker", full)
    assert full.chosen.makespan_s is not None, "some overlap slot is usable"
    remaining = min(q.remaining, q.profile.B)
    # What is borrowed already has cost its activation: it stays as long as it wins more than the return takes, which
    # training need not wait for if it happens now. So a borrow that was barely worth it is not undone at once.
    held = q.running is not None and q.running.borrow
    cost_s = q.return_s if held else q.toggle_s
    cost = f"returning costs {cost_s:.2f} s" if held else f"toggling costs {cost_s:.2f} s"
    if q.evidence is None or not q.evidence.usable or q.evidence.quick:
        saved = remaining / q.profile.B * (dedicated.chosen.makespan_s - full.chosen.makespan_s)
        pays = borrowing_pays(remaining, q.profile.B, dedicated.chosen.makespan_s, full.chosen.makespan_s, cost_s)
    else:
        # The rest of the batch is replayed; activation delays the borrowed workers, so that only the return is a cost.
        delay_s = 0.0 if held else max(0.0, q.toggle_s - q.return_s)
        alone, together = counts_of(dedicated.chosen), counts_of(full.chosen)
        overlaps = q.evidence.limits.in_flight_percent > 0
        if overlaps and q.left >= 0:
            remaining = min(q.left, q.profile.B)
        saved = predict.saved_s(q.profile, alone, together, remaining, delay_s, q.evidence)
        margin = MARGIN if overlaps else BORROW_MARGIN
        least_s = 0.0 if held else margin * dedicated.chosen.makespan_s  # two replays differ by so much by chance
        pays = saved > q.return_s + least_s
        cost = f"returning costs {q.return_s:.2f} s" + ("" if held else f", activating {delay_s:.2f} s")
    why = f"{remaining}/{q.profile.B} left: saves {saved:.2f} s, {cost}"
    return settled(full if pays else dedicated, pays, why, full)


def question_of(record: DecisionRecord) -> Question:
    """What the decision in a record was made from."""
    thresholds = record.thresholds
    return Question(
        profile=msgspec.structs.replace(profile_of(record.profile), train_step=record.train_step),
        policy=Policy(
            ratio_threshold=thresholds["ratio"],
            mode_threshold=thresholds["mode"],
            growth_threshold=thresholds["growth"],
            rho_max=thresholds["rho_max"],
            impossible=record.impossible,
            fixed=parse_policy(record.policy),
        ),
        running=record.running,
        dedicated=record.dedicated_workers,
        overlap=record.overlap_workers,
        lending=record.lending,
        remaining=record.remaining,
        left=record.left,
        toggle_s=record.toggle_s,
        return_s=record.return_s,
        evidence=_evidence_of(record),
        stakes=Stakes.of(record.stakes),
        may_probe=record.may_probe,
        probe_share=record.limits.get("probe_share", 0.0),
        holding=record.holding,
    )


def _evidence_of(record: DecisionRecord) -> Evidence | None:
    if record.policy != "planner" or not record.limits:
        return None
    limits = {name: int(record.limits[name]) for name in Limits.__struct_fields__ if name in record.limits}
    return Evidence(
        sample=record.sample,
        observed=record.observed,
        measured_on=record.measured_on,
        limits=Limits(**limits),
        quick=record.quick,
        train_s=record.limits.get("train_s", 0.0),
        averages=record.averages,
    )


def _running(incumbent: Incumbent | None, *, full: bool) -> Running | None:
    if incumbent is None:
        return None
    return Running(
        mode=incumbent.mode,
        prefill=incumbent.prefill,
        decode=incumbent.decode,
        colocated=incumbent.colocated,
        survivors=incumbent.survivors_full if full else incumbent.survivors,
    )
