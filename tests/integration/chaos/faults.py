"""Which faults, when, for how long: drawn from a seed before anything runs. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import msgspec

KILLS: Final = ("kill_service", "kill_worker", "kill_trainer")
BROKER: Final = ("nats_kill", "nats_pause", "nats_restart_all", "partition")
"""What takes a server from the cluster: never two at once, since two of three servers are no cluster that must survive."""
GPUS: Final = ("preempt_notice", "preempt_sudden")
WEIGHTS: Final[dict[str, int]] = {
    "kill_service": 22,
    "kill_worker": 12,
    "kill_trainer": 4,
    "pause": 14,
    "agent_stopped": 8,
    "nats_kill": 9,
    "nats_pause": 4,
    "nats_restart_all": 3,
    "partition": 10,
    "preempt_notice": 8,
    "preempt_sudden": 6,
}
BROKER_REST_S: Final = 16.0
"""After a server is back: a fail-over takes 5-9 s, and a restarted server must catch up before the next may go."""
GPUS_REST_S: Final = 4.0
NOTICE_MS: Final = 15000


class Fault(msgspec.Struct, frozen=True):
    """One fault: `at_s` seconds after the start, for `lasts_s` (0: it mends itself, or is mended at once)."""

    number: int
    kind: str
    target: str
    at_s: float
    lasts_s: float


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to break."""

    services: tuple[str, ...]
    agents: tuple[str, ...]  # node agents, which are services too
    workers: tuple[str, ...]
    trainers: tuple[str, ...]
    hosts: tuple[str, ...]
    preemptible: tuple[str, ...]  # nodes
    partitions: bool = True


def draw(seed: int, seconds: float, count: int, inventory: Inventory) -> tuple[Fault, ...]:
    """`count` faults spread over `seconds`, in order. The same seed and inventory give the same faults."""
    rng = random.Random(seed)
    weights = {kind: weight for kind, weight in WEIGHTS.items() if kind != "partition" or inventory.partitions}
    mean_s = seconds / max(1, count)
    busy: dict[str, float] = {}
    faults: list[Fault] = []
    at_s = 0.0
    for number in range(1, count + 1):
        at_s += mean_s * rng.uniform(0.5, 1.5) if number > 1 else mean_s / 2
        for _ in range(64):
            kind = rng.choices(list(weights), list(weights.values()))[0]
            target = rng.choice(_targets(kind, inventory))
            lasts_s = _lasts_s(kind, rng)
            keys = _keys(kind, target)
            if all(busy.get(key, 0.0) <= at_s for key in keys):
                break
        else:
            kind, target, lasts_s = "kill_service", rng.choice(inventory.services), 0.0
            keys = (target,)
        rest_s = BROKER_REST_S if kind in BROKER else GPUS_REST_S if kind in GPUS else 1.0
        busy.update(dict.fromkeys(keys, at_s + lasts_s + rest_s))
        faults.append(Fault(number, kind, target, round(at_s, 2), round(lasts_s, 2)))
    return tuple(faults)


def _targets(kind: str, inventory: Inventory) -> Sequence[str]:
    match kind:
        case "kill_service":
            return inventory.services
        case "kill_worker":
            return inventory.workers
        case "kill_trainer":
            return inventory.trainers
        case "pause":
            return (*inventory.services, *inventory.workers, *inventory.trainers)
        case "agent_stopped":
            return inventory.agents
        case "preempt_notice" | "preempt_sudden":
            return inventory.preemptible
        case "nats_restart_all":
            return ("all",)
        case _:
            return inventory.hosts


def _lasts_s(kind: str, rng: random.Random) -> float:
    match kind:
        case "pause":
            return rng.uniform(1.0, 8.0)
        case "agent_stopped":
            return rng.uniform(2.0, 20.0)
        case "nats_kill":
            return rng.uniform(0.0, 8.0)
        case "nats_pause":
            return rng.uniform(2.0, 8.0)
        case "partition":
            return rng.uniform(3.0, 15.0)
        case "preempt_notice":
            return NOTICE_MS / 1000 + rng.uniform(2.0, 10.0)
        case "preempt_sudden":
            return rng.uniform(3.0, 15.0)
        case _:
            return 0.0


def _keys(kind: str, target: str) -> tuple[str, ...]:
    """What must be whole before, and is broken meanwhile."""
    return (target, "broker") if kind in BROKER else (target,)
