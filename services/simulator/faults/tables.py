"""What a simulated cluster is asked about its role table. Pure."""

from __future__ import annotations

from messages.ids import Activity, Role
from pearl_state.model import RoleTable


def roles_of(table: RoleTable) -> dict[str, str]:
    """Who serves rollout, in which role."""
    return {
        row.worker: row.role.value
        for row in table.rows
        if row.activity is Activity.ACTIVE and row.role is not Role.TRAINING
    }


def is_settled(table: RoleTable) -> bool:
    """No plan, nothing on its way, and the roles are those of the newest target."""
    target = table.writer.target
    if table.plan is not None or target is None or target.training_batch != table.training_batch:
        return False
    if any(row.activity is Activity.TRANSITIONING for row in table.rows):
        return False
    held = list(roles_of(table).values())
    asked = (target.prefill, target.decode, target.colocated)
    return (held.count("prefill"), held.count("decode"), held.count("colocated")) == asked
