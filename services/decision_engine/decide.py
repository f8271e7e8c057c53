"""One decision as a function of everything it depends on: mode, counts and borrowing together (paper 4.3.2, 4.6). Pure.

A `Question` is what the core knows when it decides; a decision record holds all of it, so `question_of` gets it back and
`answer` decides again: a decision can be explained, and checked, from its record alone (DESIGN 11.9).
"""

from __future__ import annotations

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.monitor import Candidate, DecisionRecord, Incumbent
from services.decision_engine.choose import Choice, Policy, Running, choose
from services.decision_engine.makespan import borrowing_pays
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
    toggle_s: float
    return_s: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What to run and why."""

    choice: Choice
    borrow: bool
    borrow_reason: str
    dedicated: Candidate  # chosen on the dedicated workers alone
    full: Candidate | None  # chosen on all, where that was asked

    @property
    def chosen(self) -> Candidate:
        return self.choice.chosen


def answer(question: Question) -> Answer:
    """Solve for the dedicated budget and, where GPUs can be borrowed, for the full one; then the gate (eq. 7)."""
    q = question
    dedicated = choose(q.profile, q.dedicated, _running(q.running, full=False), q.policy)

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
    full = choose(q.profile, q.dedicated + q.overlap, _running(q.running, full=True), q.policy)
    if dedicated.chosen.makespan_s is None:
        return settled(full, True, "no dedicated worker", full)
    assert full.chosen.makespan_s is not None, "some overlap slot is usable"
    remaining = min(q.remaining, q.profile.B)
    saved = remaining / q.profile.B * (dedicated.chosen.makespan_s - full.chosen.makespan_s)
    # What is borrowed already has cost its activation: it stays as long as it wins more than the return takes, which
    # training need not wait for if it happens now. So a borrow that was barely worth it is not undone at once.
    held = q.running is not None and q.running.borrow
    cost_s = q.return_s if held else q.toggle_s
    pays = borrowing_pays(remaining, q.profile.B, dedicated.chosen.makespan_s, full.chosen.makespan_s, cost_s)
    cost = f"returning costs {cost_s:.2f} s" if held else f"toggling costs {cost_s:.2f} s"
    why = f"{remaining}/{q.profile.B} left: saves {saved:.2f} s, {cost}"
    return settled(full if pays else dedicated, pays, why, full)


def question_of(record: DecisionRecord) -> Question:
    """What the decision in a record was made from."""
    thresholds = record.thresholds
    return Question(
        profile=profile_of(record.profile),
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
        toggle_s=record.toggle_s,
        return_s=record.return_s,
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
