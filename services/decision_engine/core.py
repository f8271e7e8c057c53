"""The decision engine's core: from a budget and a profile to a target configuration (paper 4.1.2 stage 2, 4.3, 4.6)."""

from __future__ import annotations

import msgspec

from messages.decision_engine import BatchProgress, BudgetChanged, WorkloadProfile
from messages.envelope import Message, brief, tag_of
from messages.ids import Activity, DecisionId, Mode, Role, Stage, WorkerId, Zone
from messages.monitor import DecisionRecord
from messages.orchestrator import TargetConfiguration
from pearl_state.model import RoleTable
from pearl_state.peers import wrong_batch
from services.decision_engine.choose import Choice, Running, choose
from services.decision_engine.config import Config
from services.decision_engine.makespan import borrowing_pays
from services.profile import KEYS, OPTIONAL, problem_of
from services.runtime.core import Effects, Input, Note, Refuse, Send, Tick

MOST_BUDGETS_AHEAD = 100_000
"""Budgets that may have left the stream unseen while this service was down; a number beyond would make all later
ones look old."""
MOST_SECONDS = 1e6
"""No operation takes eleven days."""


class Placed(msgspec.Struct, frozen=True):
    """A worker that serves, or is coming to serve, and its role in the table."""

    worker: WorkerId
    role: Role


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What the next decision follows from. `target` is the last one emitted: it defines what runs now."""

    decisions: int = 0
    budget: BudgetChanged | None = None
    profile: WorkloadProfile | None = None  # None: the cold start's
    progress: BatchProgress | None = None
    target: TargetConfiguration | None = None
    placed: tuple[Placed, ...] | None = None  # from the role table; None: no replica seen yet


class DecisionEngineCore:
    """Decides anew on every budget (and always answers it), and on profiles and progress (answering if it matters)."""

    name = "decision_engine"
    inputs: tuple[type[Message], ...] = (BudgetChanged, WorkloadProfile, BatchProgress)
    state_type = State

    def __init__(self, config: Config) -> None:
        self.config = config

    def initial(self) -> State:
        return State()

    def step(self, state: State, event: Input) -> tuple[State, Effects]:
        match event.message:
            case BudgetChanged() as budget:
                return self.on_budget(state, budget)
            case WorkloadProfile() as profile:
                return self.on_profile(state, profile)
            case BatchProgress() as progress:
                return self.on_progress(state, progress)
            case RoleTable() as table:
                return self.on_table(state, table), ()
            case Tick():
                return state, ()
            case other:
                return state, (Refuse(f"the decision engine does not handle {type(other).__name__}"),)

    def on_budget(self, state: State, budget: BudgetChanged) -> tuple[State, Effects]:
        """A newer budget replaces the older one whole and is always answered with a target."""
        if state.budget is not None and budget.budget_id <= state.budget.budget_id:
            return state, (
                Note("budget.stale", f"budget {budget.budget_id} is not newer than {state.budget.budget_id}"),
            )
        slots = (*budget.dedicated, *budget.overlap)
        if len(set(slots)) != len(slots):
            return state, (Refuse(f"budget {budget.budget_id} lists a worker twice"),)
        known = self.config.workers
        named = (*slots, *(leave.worker for leave in budget.leaving))
        strangers = [] if known is None else sorted(worker for worker in named if worker not in known)
        if strangers:
            return state, (
                Refuse(f"budget {budget.budget_id} names {brief(strangers[0], 80)}, no slot of the job file"),
            )
        if state.budget is not None and budget.budget_id > state.budget.budget_id + MOST_BUDGETS_AHEAD:
            return state, (Refuse(f"budget {budget.budget_id} after {state.budget.budget_id}: ids rise one by one"),)
        if wrong := wrong_batch(budget.training_batch or 0, self.config.train_steps):
            return state, (Refuse(f"budget {budget.budget_id}: {wrong}"),)
        return self._decide(msgspec.structs.replace(state, budget=budget), answer=True)

    def on_profile(self, state: State, profile: WorkloadProfile) -> tuple[State, Effects]:
        """Better knowledge of the workload; a decision only where it changes the choice."""
        problem = (
            problem_of(profile) or _wrong_costs(profile) or wrong_batch(profile.train_step, self.config.train_steps)
        )
        if problem:
            return state, (Refuse(f"{tag_of(WorkloadProfile)} of train step {profile.train_step}: {problem}"),)
        if state.profile is not None and profile.train_step <= state.profile.train_step:
            return state, ()
        return self._decide(msgspec.structs.replace(state, profile=profile), answer=False)

    def on_progress(self, state: State, progress: BatchProgress) -> tuple[State, Effects]:
        """How much of the batch is left, which is what borrowing depends on (eq. 7)."""
        if wrong := wrong_batch(progress.batch, self.config.train_steps):
            return state, (Refuse(wrong),)
        if progress.size < 1 or min(progress.done, progress.remaining) < 0 or progress.done > progress.size:
            return state, (Refuse(f"progress of batch {progress.batch} counts {progress.done} of {progress.size}"),)
        if state.progress is not None and (progress.batch, progress.done) <= (
            state.progress.batch,
            state.progress.done,
        ):
            return state, ()
        return self._decide(msgspec.structs.replace(state, progress=progress), answer=False)

    def on_table(self, state: State, table: RoleTable) -> State:
        """Who serves in which role: tells the incumbent after a shrink. Decides nothing."""
        placed = tuple(
            Placed(row.worker, row.role)
            for row in table.rows
            if row.zone is not Zone.TRAINING
            and row.activity in (Activity.ACTIVE, Activity.TRANSITIONING)
            and row.stage is not Stage.DRAINING
        )
        return state if placed == state.placed else msgspec.structs.replace(state, placed=placed)

    def _decide(self, state: State, answer: bool) -> tuple[State, Effects]:
        """Choose for the state's budget; emit a target and its record if `answer`, or if the choice is a new one."""
        budget = state.budget
        if budget is None:
            return state, ()
        profile = state.profile or self.config.cold_start
        choice = self._choose(state, budget.dedicated, profile)
        borrow, borrow_reason, full = self._gate(state, budget, profile, choice)
        usable = (*budget.dedicated, *budget.overlap) if borrow else budget.dedicated
        choice = full if borrow else choice
        chosen, last = choice.chosen, state.target
        changed = last is None or (last.prefill, last.decode, last.colocated, last.borrow) != (
            chosen.prefill,
            chosen.decode,
            chosen.colocated,
            borrow,
        )
        if not (answer or changed):
            return state, ()
        decision_id = DecisionId(f"d{state.decisions + 1}")
        reason = f"{budget.cause}: {choice.reason}" if answer and budget.cause else choice.reason
        target = TargetConfiguration(
            decision_id=decision_id,
            budget_id=budget.budget_id,
            mode=choice.mode,
            prefill=chosen.prefill,
            decode=chosen.decode,
            colocated=chosen.colocated,
            borrow=borrow,
            usable=usable,
            leaving=budget.leaving,
            training_batch=budget.training_batch,
            forced=choice.forced,
            reason=reason,
        )
        record = DecisionRecord(
            decision_id=decision_id,
            budget_id=budget.budget_id,
            train_step=profile.train_step,
            profile={key: float(getattr(profile, key)) for key in (*KEYS, *OPTIONAL)},
            workers=len(usable),
            borrow=borrow,
            borrow_reason=borrow_reason,
            candidates=choice.candidates,
            chosen=chosen,
            incumbent=choice.incumbent,
            mode=choice.mode,
            thresholds=self.config.policy.thresholds(),
            forced=choice.forced,
            changed=changed,
            reason=reason,
        )
        new = msgspec.structs.replace(state, decisions=state.decisions + 1, target=target)
        note = Note("decision", f"{decision_id}: {describe(target)} on {len(usable)} workers ({reason})")
        return new, (Send(target), Send(record), note)

    def _choose(self, state: State, usable: tuple[WorkerId, ...], profile: WorkloadProfile) -> Choice:
        return choose(profile, len(usable), _running(state, usable), self.config.policy)

    def _gate(
        self, state: State, budget: BudgetChanged, profile: WorkloadProfile, dedicated: Choice
    ) -> tuple[bool, str, Choice]:
        """Eq. 7 on the budget with and without the overlap slots: (borrow, why, the choice on the full budget)."""
        if not self.config.lending:
            return False, "lending is not enabled", dedicated
        if budget.training_batch is not None or not budget.overlap:
            return False, "no training GPU is idle", dedicated
        full = self._choose(state, (*budget.dedicated, *budget.overlap), profile)
        assert full.chosen.makespan_s is not None, "some overlap slot is usable"
        if dedicated.chosen.makespan_s is None:
            return True, "no dedicated worker", full
        remaining = profile.B if state.progress is None else min(state.progress.remaining, profile.B)
        toggle_s = self._toggle_s(profile)
        pays = borrowing_pays(remaining, profile.B, dedicated.chosen.makespan_s, full.chosen.makespan_s, toggle_s)
        saved = remaining / profile.B * (dedicated.chosen.makespan_s - full.chosen.makespan_s)
        return pays, f"saves {saved:.2f} s, toggling costs {toggle_s:.2f} s", full

    def _toggle_s(self, profile: WorkloadProfile) -> float:
        """T_toggle: learned activation plus deactivation, each of the guess where it was never measured."""
        if "activate" not in profile.costs or "deactivate" not in profile.costs:
            return self.config.toggle_guess_s
        return profile.costs["activate"] + profile.costs["deactivate"]


def _wrong_costs(profile: WorkloadProfile) -> str:
    wrong = next((name for name, cost in sorted(profile.costs.items()) if not 0 <= cost < MOST_SECONDS), None)
    return "" if wrong is None else f"{brief(wrong, 40)} costs {profile.costs[wrong]} s"


def describe(target: TargetConfiguration) -> str:
    """A target for people: "4 colocated", "2P3D", "paused"."""
    if target.mode is Mode.DISAGGREGATED:
        return f"{target.prefill}P{target.decode}D"
    return f"{target.colocated} colocated" if target.colocated else "paused"


def _running(state: State, usable: tuple[WorkerId, ...]) -> Running | None:
    """What runs now, seen from the slots that stay usable."""
    if state.target is None:
        return None
    survivors: tuple[int, int] | None = None
    if state.placed is not None:
        stay = frozenset(usable)
        roles = [placed.role for placed in state.placed if placed.worker in stay]
        survivors = (roles.count(Role.PREFILL), roles.count(Role.DECODE))
    return Running(
        mode=state.target.mode,
        prefill=state.target.prefill,
        decode=state.target.decode,
        colocated=state.target.colocated,
        survivors=survivors,
    )
