"""A scripted decision engine, for tests that say themselves what is decided."""

from __future__ import annotations

import msgspec

from messages.decision_engine import BudgetChanged
from messages.envelope import Message
from messages.ids import DecisionId, Mode
from messages.orchestrator import TargetConfiguration
from services.runtime.core import Effects, Input, Send


class Wish(msgspec.Struct, frozen=True):
    """What a scripted decision engine decides on a budget. Counts are cut to the workers there are, colocated ones last."""

    borrow: bool = False
    prefill: int = 0
    decode: int = 0


class WishState(msgspec.Struct, frozen=True, kw_only=True):
    """The newest budget and wish, and how many decisions were made."""

    budget: BudgetChanged | None = None
    wish: Wish = Wish()
    decisions: int = 0


class WishCore:
    """A decision engine that does as it is told: decides on every newer budget, and on every Wish."""

    name = "decision_engine"
    inputs: tuple[type[Message], ...] = (BudgetChanged,)
    state_type = WishState

    def initial(self) -> WishState:
        return WishState()

    def step(self, state: WishState, event: Input) -> tuple[WishState, Effects]:
        match event.message:
            case BudgetChanged() as budget if state.budget is None or budget.budget_id > state.budget.budget_id:
                state = msgspec.structs.replace(state, budget=budget)
            case Wish() as wish:
                state = msgspec.structs.replace(state, wish=wish)
            case _:
                return state, ()
        budget, wish = state.budget, state.wish
        if budget is None:
            return state, ()
        borrow = wish.borrow and bool(budget.overlap)
        usable = (*budget.dedicated, *(budget.overlap if borrow else ()))
        disaggregated = wish.prefill > 0 and wish.decode > 0 and wish.prefill + wish.decode <= len(usable)
        prefill = wish.prefill if disaggregated else 0
        colocated = 0 if disaggregated else len(usable)
        state = msgspec.structs.replace(state, decisions=state.decisions + 1)
        target = TargetConfiguration(
            decision_id=DecisionId(f"d{state.decisions}"),
            budget_id=budget.budget_id,
            mode=Mode.DISAGGREGATED if disaggregated else Mode.COLOCATED if colocated else Mode.PAUSED,
            prefill=prefill,
            decode=len(usable) - prefill if disaggregated else 0,
            colocated=colocated,
            borrow=borrow,
            usable=usable,
            leaving=budget.leaving,
            training_batch=budget.training_batch,
        )
        return state, (Send(target),)
