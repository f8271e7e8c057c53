"""The check that no untouched worker receives a command can fail."""

from __future__ import annotations

from messages.decision_engine import Leave
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import DecisionId, Epoch, Incarnation, PlanId, Role, RoleGeneration, WorkerId
from messages.node_agent import Kill, Launch
from messages.rollout_worker import Drain, SetRole
from tests.integration.commands import needless_commands

ONE = Incarnation(1)
PLAN = ReconfigurationPlan(
    plan_id=PlanId("p1"),
    decision_id=DecisionId("d1"),
    stage="applying",
    epoch=Epoch(3),
    add=(Assign(WorkerId("a-w0"), Role.COLOCATED, ONE, RoleGeneration(2)),),
    remove=(Leave(WorkerId("b-w0"), 0),),
    reassign=(Assign(WorkerId("c-w0"), Role.DECODE, ONE, RoleGeneration(4)),),
    deadline_ms=0,
)


def needless(*commands: Launch | Kill | Drain | SetRole) -> list[str]:
    return [command.worker for command in needless_commands(commands, [PLAN], frozenset({"t-w0"}))]


def test_commands_of_the_plan_are_its_own() -> None:
    assert (
        needless(
            Launch(worker=WorkerId("a-w0"), incarnation=ONE, gpus=(0,), service="rollout_worker"),
            SetRole(worker=WorkerId("a-w0"), incarnation=ONE, role=Role.COLOCATED, role_generation=RoleGeneration(2)),
            Drain(worker=WorkerId("b-w0"), incarnation=ONE, role_generation=RoleGeneration(3)),
            Kill(worker=WorkerId("b-w0"), incarnation=ONE, grace_ms=0, reason="drained"),
            Drain(worker=WorkerId("c-w0"), incarnation=ONE, role_generation=RoleGeneration(3)),
            Launch(worker=WorkerId("t-w0"), incarnation=ONE, gpus=(0,), service="rollout_worker"),
        )
        == []
    )


def test_a_command_to_an_untouched_worker_is_found() -> None:
    assert needless(Drain(worker=WorkerId("d-w0"), incarnation=ONE, role_generation=RoleGeneration(3))) == ["d-w0"]
    assert needless(Kill(worker=WorkerId("d-w0"), incarnation=ONE, grace_ms=0, reason="")) == ["d-w0"]


def test_a_role_that_no_plan_gave_is_found() -> None:
    again = SetRole(worker=WorkerId("c-w0"), incarnation=ONE, role=Role.DECODE, role_generation=RoleGeneration(5))
    assert needless(again) == ["c-w0"]
    other = Launch(worker=WorkerId("a-w0"), incarnation=Incarnation(2), gpus=(0,), service="rollout_worker")
    assert needless(other) == ["a-w0"]
