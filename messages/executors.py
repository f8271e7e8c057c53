"""Messages to both executors, the cluster rebuilder and the toggle manager: the plan (paper 4.4.2)."""

from __future__ import annotations

import msgspec

from messages.decision_engine import Leave
from messages.envelope import Message
from messages.ids import DecisionId, Epoch, Incarnation, PlanId, Role, RoleGeneration, WorkerId


class Assign(msgspec.Struct, frozen=True):
    """One worker and the role it is to have; `role_generation` is the one it will be admitted with."""

    worker: WorkerId
    role: Role
    incarnation: Incarnation
    role_generation: RoleGeneration


# orchestrator -> cluster_rebuilder, toggle_manager, monitor. Durable (EV). Key: (plan_id, stage).
class ReconfigurationPlan(Message, frozen=True, kw_only=True, tag="plan.reconfiguration/1"):
    """(W_add, W_remove, rho) of paper 4.4.2 with one id. Executors obey it only while the table carries `plan_id`.

    Sent at `stage` "preparing" (launch and load joiners in the background; nothing else changes), then at
    "applying" (the cut epoch is written: drain leavers and role-changers, bring joiners to the current
    version, set roles). A plan without joiners starts at "applying".
    """

    plan_id: PlanId
    decision_id: DecisionId
    stage: str
    epoch: Epoch  # the table epoch that carries this stage
    add: tuple[Assign, ...]
    remove: tuple[Leave, ...]
    reassign: tuple[Assign, ...]
    deadline_ms: int  # Unix time at which the orchestrator rolls the plan back
