"""Minimal-change plans of a table and a target that a user wrote (`pearl plan`): reading them, and what is wrong with them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from messages.ids import Activity, Gpu, NodeId, Role, Stage, WorkerId, Zone
from pearl_state.model import LEGAL_CONDITIONS, Row
from pearl_state.plan import Counts, minimal_change


class PlanInputError(ValueError):
    """The table or target of `pearl plan` is wrong: what, where, what to do."""


class _TargetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workers: tuple[str, ...]
    prefill: int = 0
    decode: int = 0
    colocated: int = 0


class _RowFile(msgspec.Struct, frozen=True):
    worker: str
    zone: Zone
    role: Role
    activity: Activity
    gpus: tuple[Any, ...] = ()  # Any: [node, index], or {"node": .., "index": ..} as in the bucket
    stage: Stage = Stage.NONE


class _TableFile(msgspec.Struct, frozen=True):
    rows: tuple[_RowFile, ...]
    epoch: int = 0


_STAGES: Final = (Stage.NONE, Stage.LAUNCHING, Stage.PREPARED, Stage.DRAINING, Stage.SWITCHING)


def plan_from_files(table: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON objects
    """The minimal-change plan as `pearl plan --json` prints it.

    `table`: `{epoch, rows: [{worker, gpus: [[node, index], ..], zone, role, activity}]}` (a dump of the bucket will
    do); `target`: `{workers: [ids], prefill, decode, colocated}`. Returns `{add: [{worker, role}], remove: [worker],
    reassign: {worker: role}, d_worker, d_role}`. Raises PlanInputError, a ValueError: exit status 2.
    """
    for name, given in (("table", table), ("target", target)):
        _refuse_half_characters(given, name)
    read_table, read_target = _convert(table, _TableFile, "table"), _convert(target, _TargetFile, "target")
    rows: dict[str, Row] = {}
    for position, entry in enumerate(read_table.rows):
        where = f"table: rows[{position}] ({entry.worker})"
        if entry.worker in rows:
            raise PlanInputError(f"{where}: worker {entry.worker} has a row already; each slot has one row")
        rows[entry.worker] = _row(entry, where)
    counts = Counts(read_target.prefill, read_target.decode, read_target.colocated)
    for name in ("prefill", "decode", "colocated"):
        if getattr(counts, name) < 0:
            raise PlanInputError(f"target: {name} is {getattr(counts, name)}; give a count of 0 or more")
    if len(set(read_target.workers)) != len(read_target.workers):
        raise PlanInputError("target: workers lists a worker twice; it is a set")
    for worker in read_target.workers:
        if worker not in rows:
            raise PlanInputError(f"target: worker {worker} is not in the table; add its row or leave it out")
        if rows[worker].zone is Zone.TRAINING or rows[worker].role is Role.TRAINING:
            raise PlanInputError(
                f"target: worker {worker} is a training worker; only rollout workers take part in plans"
            )
        if rows[worker].stage is Stage.DRAINING:
            raise PlanInputError(
                f"target: worker {worker} is draining: it leaves, and can join again when it is inactive; leave it out"
            )
    if counts.total != len(read_target.workers):
        raise PlanInputError(
            f"target: prefill + decode + colocated = {counts.total}, but workers lists {len(read_target.workers)}; "
            "give each worker of the active set exactly one role"
        )
    ordered = sorted(rows.values(), key=lambda row: row.worker)
    plan = minimal_change(ordered, frozenset(WorkerId(worker) for worker in read_target.workers), counts)
    return {
        "add": [{"worker": placement.worker, "role": placement.role.value} for placement in plan.add],
        "remove": list(plan.remove),
        "reassign": {placement.worker: placement.role.value for placement in plan.reassign},
        "d_worker": plan.d_worker,
        "d_role": plan.d_role,
    }


def _refuse_half_characters(value: object, name: str) -> None:
    """JSON can spell half of a surrogate pair, which is no character: no output can hold it. Raises PlanInputError."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        bad = ascii(error.object[error.start : error.end])
        raise PlanInputError(f"{name}: {bad} in it is half a character; write the whole one") from error


def _row(entry: _RowFile, where: str) -> Row:
    """A row of a table file as the planner takes it."""
    if Zone.UNKNOWN is entry.zone:
        raise PlanInputError(f"{where}: zone must be reserved, preemptible, overlap or training")
    if Role.UNKNOWN is entry.role:
        raise PlanInputError(f"{where}: role must be prefill, decode, colocated or training")
    if Activity.UNKNOWN is entry.activity:
        raise PlanInputError(f"{where}: activity must be active, inactive or transitioning")
    if entry.stage not in _STAGES:
        raise PlanInputError(f"{where}: stage must be one of {', '.join(_STAGES)}")
    if (entry.role is Role.TRAINING) is not (entry.zone is Zone.TRAINING):
        raise PlanInputError(f"{where}: role {entry.role} does not go with zone {entry.zone}")
    stage = entry.stage
    if entry.activity is Activity.TRANSITIONING and stage is Stage.NONE:
        stage = Stage.LAUNCHING  # a bare table does not say in which direction it goes; it does not serve
    if (entry.activity, stage) not in LEGAL_CONDITIONS:
        fitting = [each.value for activity, each in LEGAL_CONDITIONS if activity is entry.activity]
        raise PlanInputError(
            f"{where}: stage {stage} does not go with activity {entry.activity}; it must be {' or '.join(fitting)}"
        )
    return Row(
        worker=WorkerId(entry.worker),
        gpus=tuple(_gpu(gpu, where) for gpu in entry.gpus),
        zone=entry.zone,
        role=entry.role,
        activity=entry.activity,
        stage=stage,
    )


def _gpu(value: Any, where: str) -> Gpu:  # Any: a JSON value
    """[node, index] or {"node": .., "index": ..}."""
    try:
        if isinstance(value, Mapping):
            return msgspec.convert(value, Gpu)
        node, index = msgspec.convert(value, tuple[str, int])
    except msgspec.ValidationError as error:
        raise PlanInputError(f"{where}: gpus must be a list of [node, index]: {error}") from error
    return Gpu(NodeId(node), index)


def _convert(value: object, kind: type[Any], name: str) -> Any:  # Any: an instance of `kind`
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise PlanInputError(f"{name}: {error}; correct it, `pearl plan --help` shows its fields") from error
