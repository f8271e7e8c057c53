"""The commands of an executor: how each is built, keyed, and repeated until it is answered.

Pure; shared by the cluster rebuilder and the toggle manager, which execute the two parts of one plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from messages.envelope import Message
from messages.executors import Assign
from messages.ids import Gpu, Incarnation, WorkerId
from messages.node_agent import Kill, Launch
from messages.orchestrator import RoleSet, WeightsApplied, WorkerDrained
from messages.pipeline_scheduler import WeightsPublished
from messages.rollout_worker import Drain, SetRole, UpdateWeights
from messages.subjects import node_of
from pearl_state.model import Row
from pearl_state.progress import Fact, Progress


class Order(NamedTuple):
    """A command that is wanted now. Equal keys are repetitions of one command."""

    key: str
    message: Message


class Repeat(msgspec.Struct, frozen=True):
    """A command that awaits its answer: when it was first and last given (Unix ms)."""

    key: str
    first_ms: int
    last_ms: int


def repeat(
    orders: Iterable[Order], pending: Sequence[Repeat], now_ms: int, retry_ms: int
) -> tuple[tuple[Repeat, ...], tuple[Order, ...]]:
    """The commands still pending, and those due now: new ones, and ones unanswered for `retry_ms`.

    A pending command that is wanted no longer is forgotten, so `pending` is bounded by what is wanted.
    """
    before = {entry.key: entry for entry in pending}
    after: dict[str, Repeat] = {}
    due: list[Order] = []
    for order in orders:
        if order.key in after:
            continue
        entry = before.get(order.key)
        if entry is None:
            entry = Repeat(order.key, now_ms, now_ms)
            due.append(order)
        elif now_ms - entry.last_ms >= retry_ms:
            entry = Repeat(order.key, entry.first_ms, now_ms)
            due.append(order)
        after[order.key] = entry
    return tuple(after[key] for key in sorted(after)), tuple(due)


def split_by_worker(pending: Sequence[Repeat], worker: WorkerId) -> tuple[tuple[Repeat, ...], tuple[Repeat, ...]]:
    """The commands pending for this worker, and all others."""
    infix = f"/{worker}/"
    mine = tuple(entry for entry in pending if infix in entry.key)
    return mine, tuple(entry for entry in pending if infix not in entry.key) if mine else tuple(pending)


_ANSWERS: dict[type[object], tuple[str, str]] = {
    WorkerDrained: ("drain", "drain"),
    RoleSet: ("role", "set_role"),
    WeightsApplied: ("weights", "update_weights"),
}
"""Which command's key a fact answers, and the operation's name in `operation.timed/1`."""


def asked_again(pending: Sequence[Repeat], node: str) -> tuple[Repeat, ...]:
    """`pending` with the commands to a node's agent due at once: one that just started missed those given before."""
    return tuple(
        Repeat(entry.key, entry.first_ms, 0)
        if entry.key.startswith(("launch/", "kill/")) and node_of(entry.key.split("/")[1]) == node
        else entry
        for entry in pending
    )


def answered(fact: Fact, pending: Sequence[Repeat]) -> tuple[str, int] | None:
    """The operation that `fact` ends and when its command was first given (Unix ms), if one is pending."""
    names = _ANSWERS.get(type(fact))
    if names is None:
        return None
    prefix = f"{names[0]}/{fact.worker}/{fact.incarnation}/"
    entry = next((entry for entry in pending if entry.key.startswith(prefix)), None)
    return None if entry is None else (names[1], entry.first_ms)


def kill_at_ms(drain_since_ms: int, drain_ms: int, deadline_ms: int, reserve_ms: int) -> int:
    """When a worker that is still draining is killed instead (Unix ms).

    By `drain_ms`, and early enough before a return deadline that SIGTERM, its grace and one repetition fit in
    (`reserve_ms`); but at least half of the notice is left to the drain, however short the notice is.
    """
    by_timeout = drain_since_ms + drain_ms
    if deadline_ms <= 0:
        return by_timeout
    remaining = max(0, deadline_ms - drain_since_ms)
    return min(by_timeout, deadline_ms - min(reserve_ms, remaining // 2))


def given_up(
    pending: Mapping[str, Repeat],
    key: str,
    killed_by: str,
    now_ms: int,
    patience_ms: int,
    deadline_ms: int,
    reserve_ms: int,
) -> bool:
    """Whether whom the order `key` is for is to be killed instead, by the order `killed_by`. Once begun it stays so. `pending`: by key."""
    if killed_by in pending:
        return True
    since = pending[key].first_ms if key in pending else now_ms
    return now_ms >= kill_at_ms(since, patience_ms, deadline_ms, reserve_ms)


def launch_order(assign: Assign, gpus: Sequence[Gpu]) -> Order:
    """Start the rollout worker of `assign` on its slot's GPUs."""
    message = Launch(
        worker=assign.worker,
        incarnation=assign.incarnation,
        gpus=tuple(gpu.index for gpu in gpus),
        service="rollout_worker",
    )
    return Order(f"launch/{assign.worker}/{assign.incarnation}", message)


def update_order(known: Progress, snapshot: WeightsPublished) -> Order:
    """Load the newest snapshot."""
    message = UpdateWeights(
        worker=known.worker,
        incarnation=known.incarnation,
        version=snapshot.version,
        uri=snapshot.uri,
        manifest_sha256=snapshot.manifest_sha256,
    )
    return Order(f"weights/{known.worker}/{known.incarnation}/{snapshot.version}", message)


def role_order(assign: Assign) -> Order:
    """Serve a role under the generation it is, or will be, admitted with."""
    message = SetRole(
        worker=assign.worker,
        incarnation=assign.incarnation,
        role=assign.role,
        role_generation=assign.role_generation,
    )
    return Order(f"role/{assign.worker}/{assign.incarnation}/{assign.role_generation}", message)


def join_order(known: Progress, snapshot: WeightsPublished | None, assign: Assign, *, applying: bool) -> Order | None:
    """What a ready worker needs next to join: the newest weights, then (once the cut epoch is written) the role. None: nothing now."""
    if snapshot is None:
        return None
    if known.version < snapshot.version:
        return update_order(known, snapshot)
    if applying and known.role_set < assign.role_generation:
        return role_order(assign)
    return None


def drain_order(row: Row) -> Order:
    """Interrupt what runs, under the generation that the cut epoch gave the row."""
    message = Drain(worker=row.worker, incarnation=row.incarnation, role_generation=row.role_generation)
    return Order(f"drain/{row.worker}/{row.incarnation}/{row.role_generation}", message)


def kill_order(worker: WorkerId, incarnation: Incarnation, grace_ms: int, reason: str) -> Order:
    """End the process of an incarnation."""
    message = Kill(worker=worker, incarnation=incarnation, grace_ms=grace_ms, reason=reason)
    return Order(kill_key(worker, incarnation), message)


def kill_key(worker: WorkerId, incarnation: Incarnation) -> str:
    """Key of the order that kills an incarnation, whatever the reason."""
    return f"kill/{worker}/{incarnation}"
