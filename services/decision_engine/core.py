"""The decision engine's core: from a budget and a profile to a target configuration (paper 4.1.2 stage 2, 4.3, 4.6)."""

from __future__ import annotations

import msgspec

from messages.decision_engine import BatchProgress, BudgetChanged, WorkloadProfile
from messages.envelope import Message, brief, tag_of
from messages.ids import Activity, DecisionId, Mode, Role, Stage, WorkerId, Zone
from messages.monitor import DecisionRecord, Incumbent
from messages.orchestrator import TargetConfiguration
from pearl_state.model import RoleTable
from pearl_state.peers import wrong_batch, wrong_budget
from services.decision_engine.choose import counts_of
from services.decision_engine.config import RETURN_SHARE, Config
from services.decision_engine.correct import Counts
from services.decision_engine.decide import Question
from services.decision_engine.decide import answer as answer_to
from services.decision_engine.learn import Learned, Predicts
from services.decision_engine.predict import predicted_s
from services.decision_engine.predict_average import kept
from services.decision_engine.predict_evidence import Evidence
from services.decision_engine.stakes import FLOW_MARGIN, MARGIN, PRIOR_LIFE_S, PRIOR_WORKER_LIFE_S, Stakes
from services.profile import KEYS, OPTIONAL, problem_of
from services.runtime.core import Effects, Input, Note, Refuse, Send, Tick

MOST_SECONDS = 1e6
"""No operation takes eleven days."""

MOST_OF_A_TURN = 10**9
"""Tokens, or milliseconds, of a recorded turn."""

FILLING = 2
"""Where batches overlap, so many first ones measure how the pipeline fills."""


class Placed(msgspec.Struct, frozen=True):
    """A worker that serves, or is coming to serve, and its role in the table."""

    worker: WorkerId
    role: Role
    serves: bool = True
    switches: bool = False  # from one role to another


TRUSTED_STEPS = 2
"""Train steps without a borrow for which its last known cost is taken as it is."""
TRUST_A_STEP = 0.9
"""What is left of that trust with each further step: halved in seven, so that a wrong cost is tested again soon and rarely."""
LEAST_TRUST = 0.25
"""A borrow is never believed to cost less than this share of what is known."""
PREPARE_GUESS_S = 60.0
"""Until one was measured: the paper's Table 3, rounded."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What the next decision follows from. `target` is the last one emitted: it defines what runs now."""

    decisions: int = 0
    budget: BudgetChanged | None = None
    profile: WorkloadProfile | None = None  # None: the cold start's
    progress: BatchProgress | None = None
    target: TargetConfiguration | None = None
    placed: tuple[Placed, ...] | None = None  # from the role table; None: no replica seen yet
    learned: Learned = Learned()
    shrunk: bool = False  # the last decision was a quick one: to be made again
    borrowed_step: int = 0  # train step at the last decision to borrow


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
                return self.on_budget(state, budget, event.now_ms)
            case WorkloadProfile() as profile:
                return self.on_profile(state, profile)
            case BatchProgress() as progress:
                return self.on_progress(state, progress)
            case RoleTable() as table:
                return self.on_table(state, table, event.now_ms), ()
            case Tick():
                return self.on_tick(state)
            case other:
                return state, (Refuse(f"the decision engine does not handle {type(other).__name__}"),)

    def on_tick(self, state: State) -> tuple[State, Effects]:
        """After a shrink that could not wait: decide again, with replays."""
        if not state.shrunk:
            return state, ()
        return self._decide(msgspec.structs.replace(state, shrunk=False), answer=False)

    def on_budget(self, state: State, budget: BudgetChanged, now_ms: int) -> tuple[State, Effects]:
        """A newer budget replaces the older one whole and is always answered with a target: at once where workers leave."""
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
        if wrong := wrong_budget(budget.budget_id, None if state.budget is None else state.budget.budget_id):
            return state, (Refuse(wrong),)
        if wrong := wrong_batch(budget.training_batch or 0, self.config.train_steps):
            return state, (Refuse(f"budget {budget.budget_id}: {wrong}"),)
        learned = state.learned.on_budget(state.budget, budget, now_ms, self.config.preemptible)
        ended = state.budget is not None and budget.training_batch is not None and state.budget.training_batch is None
        if ended and self.config.planner is not None:
            if self._overlaps and (budget.training_batch or 0) < FILLING:
                learned = msgspec.structs.replace(learned, broken=True)
            together = max(1, self.config.planner.limits.ahead) if self._overlaps else 1
            learned = learned.on_batch_end(self._predictor(state), budget.training_batch or 0, now_ms, together)
        shrinks = state.target is not None and not set(state.target.usable) <= set(slots)
        new = msgspec.structs.replace(
            state, budget=budget, learned=learned, shrunk=shrinks and self.config.planner is not None
        )
        return self._decide(new, answer=True)

    def on_profile(self, state: State, profile: WorkloadProfile) -> tuple[State, Effects]:
        """Better knowledge of the workload; a decision only where it changes the choice."""
        problem = (
            problem_of(profile)
            or _wrong_costs(profile)
            or _wrong_sample(profile)
            or wrong_batch(profile.train_step, self.config.train_steps)
        )
        if problem:
            return state, (Refuse(f"{tag_of(WorkloadProfile)} of train step {profile.train_step}: {problem}"),)
        if state.profile is not None and profile.train_step <= state.profile.train_step:
            return state, ()
        return self._decide(msgspec.structs.replace(state, profile=profile), answer=False)

    def on_progress(self, state: State, progress: BatchProgress) -> tuple[State, Effects]:
        """How much of the batch is left, which is what borrowing depends on (eq. 7): also what is borrowed already."""
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

    def on_table(self, state: State, table: RoleTable, now_ms: int) -> State:
        """Who serves in which role: tells the incumbent after a shrink, and what served a batch. Decides nothing."""
        placed = tuple(
            Placed(row.worker, row.role, row.activity is Activity.ACTIVE, row.stage is Stage.SWITCHING)
            for row in table.rows
            if row.zone is not Zone.TRAINING
            and row.activity in (Activity.ACTIVE, Activity.TRANSITIONING)
            and row.stage is not Stage.DRAINING
        )
        serving = [row.role for row in table.rows if row.zone is not Zone.TRAINING and row.activity is Activity.ACTIVE]
        counts = (serving.count(Role.PREFILL), serving.count(Role.DECODE), serving.count(Role.COLOCATED))
        learned = state.learned if self.config.planner is None else state.learned.on_serving(counts, now_ms)
        if placed == state.placed and learned is state.learned:
            return state
        return msgspec.structs.replace(state, placed=placed, learned=learned)

    def _decide(self, state: State, answer: bool) -> tuple[State, Effects]:
        """Choose for the state's budget; emit a target and its record if `answer`, or if the choice is a new one."""
        budget = state.budget
        if budget is None:
            return state, ()
        question = self._question(state, budget)
        found = answer_to(question)
        choice, borrow = found.choice, found.borrow
        if question.evidence is not None and not question.evidence.quick:
            seen = kept(state.learned.averages, choice.candidates, question.profile.train_step)
            state = msgspec.structs.replace(state, learned=msgspec.structs.replace(state.learned, averages=seen))
        usable = (*budget.dedicated, *budget.overlap) if borrow else budget.dedicated
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
        profile = question.profile
        record = DecisionRecord(
            decision_id=decision_id,
            budget_id=budget.budget_id,
            train_step=profile.train_step,
            profile={key: float(getattr(profile, key)) for key in (*KEYS, *OPTIONAL)},
            workers=len(usable),
            borrow=borrow,
            borrow_reason=found.borrow_reason,
            candidates=choice.candidates,
            chosen=chosen,
            incumbent=choice.incumbent,
            mode=choice.mode,
            thresholds=self.config.policy.thresholds(),
            forced=choice.forced,
            changed=changed,
            reason=reason,
            policy=self.config.policy_name,
            impossible=self.config.policy.impossible,
            running=question.running,
            lending=question.lending,
            dedicated_workers=question.dedicated,
            overlap_workers=question.overlap,
            remaining=question.remaining,
            left=question.left,
            toggle_s=question.toggle_s,
            return_s=question.return_s,
            dedicated=found.dedicated,
            full=found.full,
            may_probe=question.may_probe,
            holding=question.holding,
            probe=found.probe,
        )
        if question.evidence is not None:
            record = msgspec.structs.replace(
                record,
                sample=question.evidence.sample,
                observed=question.evidence.observed,
                measured_on=question.evidence.measured_on,
                limits={
                    **question.evidence.limits.numbers(),
                    "probe_share": question.probe_share,
                    "train_s": question.evidence.train_s,
                },
                stakes=question.stakes.numbers(),
                quick=question.evidence.quick,
                averages=question.evidence.averages,
            )
        new = msgspec.structs.replace(
            state,
            decisions=state.decisions + 1,
            target=target,
            learned=state.learned.on_trial(counts_of(chosen) if found.probe else None),
            borrowed_step=profile.train_step if borrow else state.borrowed_step,
        )
        note = Note("decision", f"{decision_id}: {describe(target)} on {len(usable)} workers ({reason})")
        return new, (Send(target), Send(record), note)

    def _question(self, state: State, budget: BudgetChanged) -> Question:
        """Everything the next decision follows from."""
        profile = state.profile or self.config.cold_start
        toggle_s, return_s = self._toggle_s(profile, profile.train_step - state.borrowed_step)
        idle = budget.training_batch is None
        progress = state.progress
        return Question(
            profile=profile,
            policy=self.config.policy,
            running=_incumbent(state, budget),
            dedicated=len(budget.dedicated),
            overlap=len(budget.overlap) if idle else 0,
            lending=self.config.lending,
            remaining=profile.B if progress is None else progress.remaining,
            left=profile.B if progress is None else progress.size - progress.done,
            toggle_s=toggle_s,
            return_s=return_s,
            evidence=self._evidence(state, profile),
            stakes=self._stakes(state, profile, len(budget.dedicated) + len(budget.overlap)),
            may_probe=state.learned.may_probe and not self.config.policy.impossible and not self._overlaps,
            probe_share=0.0 if self.config.planner is None else self.config.planner.probe_share,
            holding=state.learned.holding,
        )

    @property
    def _overlaps(self) -> bool:
        """Whether batches do: one of them then measures too little (`correct.FLOW_NOISE`) to say which mode is faster (`correct.MODE`),
        so that a trial would be wasted."""
        return self.config.planner is not None and self.config.planner.limits.in_flight_percent > 0

    def _evidence(self, state: State, profile: WorkloadProfile) -> Evidence | None:
        if self.config.planner is None:
            return None
        return Evidence(
            sample=profile.sample,
            observed=state.learned.observed,
            limits=self.config.planner.limits,
            measured_on=None if state.profile is None else _serving(state.learned.measured_on()),
            quick=state.shrunk,
            train_s=_rounded(state.learned.train_s),
            averages=state.learned.averages,
        )

    def _predictor(self, state: State) -> Predicts:
        """Uncorrected makespans by the newest profile; 0 where nothing can be replayed yet."""
        profile = state.profile or self.config.cold_start
        evidence = self._evidence(state, profile)

        def predict_s(counts: Counts) -> float:
            usable = evidence is not None and evidence.usable and (counts[2] > 0 or min(counts[0], counts[1]) > 0)
            return predicted_s(profile, counts, evidence) if usable and evidence is not None else 0.0

        return predict_s

    def _stakes(self, state: State, profile: WorkloadProfile, workers: int) -> Stakes:
        """What a change costs by what was measured, and how long it is likely to pay."""
        learned, costs = state.learned, profile.costs
        steps_left = max(1, self.config.train_steps - profile.train_step - 1)
        horizon_s = learned.budgets.mean_s(PRIOR_LIFE_S)
        if learned.period_s > 0:
            horizon_s = min(horizon_s, steps_left * learned.period_s)
        tokens = profile.kv_bytes_per_trajectory / max(profile.kv_bytes_per_token, 1e-9)
        switch_s = costs.get("set_role", self.config.switch_guess_s)
        return Stakes(
            horizon_s=horizon_s,
            role_s=switch_s + costs.get("drain", 0.0),
            again_s=profile.B * tokens / 2 * profile.t_prefill_s / max(1, workers),
            worker_life_s=learned.workers.mean_s(PRIOR_WORKER_LIFE_S),
            prepare_s=costs.get("prepare", PREPARE_GUESS_S),
            pause_s=costs.get("finalize", 0.0) / 2,
            margin=FLOW_MARGIN if self._overlaps else MARGIN,
        )

    def _toggle_s(self, profile: WorkloadProfile, steps: int) -> tuple[float, float]:
        """T_toggle and the return's part of it: learned means, each of its share of the guess until it was measured.

        What a borrow costs is measured by borrowing only, so one slow hand-over, or a guess too high (paper 6.3), could shut the
        gate for good. After `TRUSTED_STEPS` train steps without a borrow both are believed a little less with each step.
        """
        guess_s = self.config.toggle_guess_s
        activate_s = profile.costs.get("activate", guess_s * (1 - RETURN_SHARE))
        return_s = profile.costs.get("deactivate", guess_s * RETURN_SHARE)
        trust = max(LEAST_TRUST, TRUST_A_STEP ** max(0, steps - TRUSTED_STEPS))
        return trust * (activate_s + return_s), trust * return_s


def _rounded(seconds: float) -> float:
    """To two digits: a mean that moves by less changes no decision, but all replays would have to be made again for it."""
    return float(f"{seconds:.2g}")


def _wrong_costs(profile: WorkloadProfile) -> str:
    wrong = next((name for name, cost in sorted(profile.costs.items()) if not 0 <= cost < MOST_SECONDS), None)
    return "" if wrong is None else f"{brief(wrong, 40)} costs {profile.costs[wrong]} s"


def _wrong_sample(profile: WorkloadProfile) -> str:
    for index, trajectory in enumerate(profile.sample):
        if not trajectory or len(trajectory) % 3:
            return f"trajectory {index} of its sample has {len(trajectory)} numbers: three a turn, at least one turn"
        if not 0 <= min(trajectory) <= max(trajectory) <= MOST_OF_A_TURN:
            return f"trajectory {index} of its sample has a number that is not from 0 to {MOST_OF_A_TURN}"
    return ""


def _serving(counts: Counts | None) -> Counts | None:
    """A configuration that can serve: a table in transit may show half of one."""
    if counts is None or not (counts[2] or (counts[0] and counts[1])):
        return None
    return (0, 0, counts[2]) if counts[2] else counts


def describe(target: TargetConfiguration) -> str:
    """A target for people: "4 colocated", "2P3D", "paused"."""
    if target.mode is Mode.DISAGGREGATED:
        return f"{target.prefill}P{target.decode}D"
    return f"{target.colocated} colocated" if target.colocated else "paused"


def _incumbent(state: State, budget: BudgetChanged) -> Incumbent | None:
    """What runs now, seen from the slots that stay usable: the last target, or what served before it where that can no longer come."""
    if state.target is None:
        return None
    target = state.target
    last = target.mode, (target.prefill, target.decode, target.colocated)
    mode, (prefill, decode, colocated) = _still(state, budget) or last
    return Incumbent(
        mode=mode,
        prefill=prefill,
        decode=decode,
        colocated=colocated,
        borrow=state.target.borrow,
        survivors=_survivors(state.placed, budget.dedicated),
        survivors_full=_survivors(state.placed, (*budget.dedicated, *budget.overlap)),
    )


def _still(state: State, budget: BudgetChanged) -> tuple[Mode, Counts] | None:
    """The mode and counts that serve now, where the last target lost a worker before it became: else the workers that stay would change
    their roles for the sake of some that never came. None: the last target is what runs."""
    slots = frozenset((*budget.dedicated, *budget.overlap))
    if state.target is None or state.placed is None or set(state.target.usable) <= slots:
        return None
    stay = [each for each in state.placed if each.worker in slots]
    roles = [each.role for each in stay if each.serves]
    split = Role.COLOCATED not in roles
    if not roles or (not split and set(roles) != {Role.COLOCATED}) or any(each.switches for each in stay):
        return None  # in the middle of a change of mode
    mode = Mode.DISAGGREGATED if split else Mode.COLOCATED
    if mode is state.target.mode:
        return None
    return mode, (roles.count(Role.PREFILL), roles.count(Role.DECODE), roles.count(Role.COLOCATED))


def _survivors(placed: tuple[Placed, ...] | None, usable: tuple[WorkerId, ...]) -> tuple[int, int] | None:
    if placed is None:
        return None
    stay = frozenset(usable)
    roles = [each.role for each in placed if each.worker in stay]
    return roles.count(Role.PREFILL), roles.count(Role.DECODE)
