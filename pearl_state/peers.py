"""Whether what a peer says can be meant, given the job file and the role table. Pure.

Several actors take the same events: they must agree on which ones to ignore. Each function returns what is wrong, or "".
A message that is merely late (an older incarnation, a plan that is over) is not wrong. One that is ahead of what can
have happened is: believed, it would stand in the way of everything true that follows.
"""

from __future__ import annotations

from typing import Final

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import brief
from messages.ids import PolicyVersion, Role, Zone
from messages.orchestrator import (
    RoleSet,
    WeightsApplied,
    WorkerActivated,
    WorkerDrained,
    WorkerGone,
    WorkerReady,
    WorkerReleased,
)
from messages.pipeline_scheduler import WeightsPublished
from pearl_state.model import RoleTable

MOST_NOTICE_MS: Final = 24 * 3600 * 1000
"""A longer notice is refused: no provider gives a day, so it is a unit mistake."""
LONGEST_URI: Final = 4096
"""Characters; the URI is kept in checkpoints and repeated in commands."""
GENERATIONS_AHEAD: Final = 16
"""A plan announces the next generations of a row, two of them; more than this beyond the table is nobody's plan."""

BUDGETS_AHEAD: Final = 100_000
"""Budgets that may have left the stream unseen while a reader was down."""

Fact = WorkerReady | WeightsApplied | RoleSet | WorkerDrained | WorkerReleased | WorkerActivated | WorkerGone


def wrong_capacity(event: GpuAvailable | GpuReclaimed, zone: Zone, gpus: int) -> str:
    """An event about a node of `zone` with `gpus` GPUs."""
    if not event.gpus:
        return f"no GPU of node {event.node} is named"
    stranger = next((index for index in event.gpus if not 0 <= index < gpus), None)
    if stranger is not None:
        return f"node {event.node} has no GPU {stranger}: its GPUs are 0 to {gpus - 1}"
    if isinstance(event, GpuAvailable):
        if zone is Zone.TRAINING:
            return f"node {event.node} is a training node: training notifications govern its GPUs"
        return ""
    if event.notice_ms < 0:
        return f"notice_ms = {event.notice_ms} is negative: use 0 for GPUs that are gone already"
    if event.notice_ms > MOST_NOTICE_MS:
        return f"notice_ms = {event.notice_ms} is longer than a day: it is in milliseconds"
    if zone is not Zone.PREEMPTIBLE:
        return f"node {event.node} is {zone}: only preemptible GPUs are reclaimed"
    return ""


def wrong_budget(budget_id: int, before: int | None) -> str:
    """A budget's id after the one before; they rise one by one, and a huge one would make all later ones look old."""
    if before is None or budget_id <= before + BUDGETS_AHEAD:
        return ""
    return f"budget {budget_id} after {before}: ids rise one by one"


def wrong_batch(batch: int, train_steps: int) -> str:
    """A batch of a job of `train_steps`."""
    return "" if 0 <= batch < train_steps else f"batch {batch}: the job has batches 0 to {train_steps - 1}"


def wrong_next_batch(batch: int, trained: int) -> str:
    """A batch that begins when `trained` is the newest finished one (-1: none), or, the same, the one before the serving version."""
    return "" if batch <= trained + 1 else f"batch {batch} begins, but batch {trained + 1} is next"


def wrong_version(version: int, train_steps: int) -> str:
    """A policy version of a job of `train_steps`."""
    return "" if 0 <= version <= train_steps else f"version {version}: the job has versions 0 to {train_steps}"


def wrong_weights(message: WeightsPublished, train_steps: int) -> str:
    """A published version."""
    if problem := wrong_version(message.version, train_steps):
        return problem
    if not message.uri or len(message.uri) > LONGEST_URI:
        return f"version {message.version}: no URI, or one longer than {LONGEST_URI} characters"
    if len(message.manifest_sha256) > 64 or message.bytes < 0:
        return f"version {message.version}: no checksum, or {message.bytes} bytes"
    return ""


def wrong_fact(table: RoleTable | None, published: PolicyVersion | None, fact: Fact) -> str:
    """What a worker, or its node agent, says; `published` is the newest version known (None: none yet).

    Executors see a table before they act on it, so what a worker answers is never ahead of it. A fact about no slot of
    `table` (which may be an executor's part of it) is not judged here.
    """
    row = None if table is None else table.row(fact.worker)
    if row is None:
        return ""
    if not 0 < fact.incarnation <= row.incarnation:
        return f"{fact.worker} incarnation {fact.incarnation}: the role table is at {row.incarnation}"
    if fact.incarnation < row.incarnation:
        return ""  # late, whatever it says
    if isinstance(fact, WeightsApplied) and not -1 <= fact.version <= (-1 if published is None else published):
        return f"{fact.worker} has version {fact.version}, the newest published is {published}"
    if isinstance(fact, RoleSet) and fact.role in (Role.UNKNOWN, Role.TRAINING):
        return f"{fact.worker} has no role {fact.role.value!r}"
    if isinstance(fact, RoleSet | WorkerDrained | WorkerActivated | WorkerReleased):
        newest = row.role_generation + GENERATIONS_AHEAD
        if not 0 <= fact.role_generation <= newest:
            return f"{fact.worker} role generation {fact.role_generation}: the role table is at {row.role_generation}"
    if isinstance(fact, WorkerGone) and len(fact.reason) > LONGEST_URI:
        return f"{fact.worker} is gone for a reason of {len(fact.reason)} characters: {brief(fact.reason, 40)}"
    return ""
