"""Fault plans: what goes wrong in a run, and when, as data. Drawn from a seed, read from a file, shrunk, printed.

A plan names its job's shape too, so that it is all that a run needs beside its seed (which then only decides how long each
message takes). Events of the outside world (`available`, `reclaim`) are in it as well: they are what the product is for.
"""

from __future__ import annotations

import codecs
import random
from pathlib import Path
from typing import Final

import msgspec

from messages.subjects import node_of
from services.jobfile import ConfigError, JobFile, parse_policy, rollout_slots
from services.simulator.faults.cluster import AGENTS, ORCHESTRATORS, ROUTERS, small_job

SERVICES: Final = (
    "elastic_scheduler",
    "decision_engine",
    "cluster_rebuilder",
    "toggle_manager",
    "pipeline_scheduler",
    "runtime_tracker",
)
KINDS: Final = {
    "available": "the outside world lends `gpus` of node `target`",
    "reclaim": "and takes them back, `for_ms` after it says so",
    "crash": "`target` is killed; a service is started again after `for_ms`",
    "crash_at_call": "`target` is killed at its `amount`-th contact with the broker from now on",
    "freeze": "`target` stands still for `for_ms`",
    "cut": "`target` cannot reach the broker for `for_ms`",
    "deafen": "`target` hears nothing of the role table's feed for `for_ms`",
    "broker_down": "nobody can reach the broker for `for_ms`",
    "loss": "a share `amount` of core messages is lost for `for_ms`",
    "duplicate": "a share `amount` of core messages comes twice for `for_ms`",
    "reorder": "a share `amount` of core messages overtakes others for `for_ms`",
    "ack_loss": "a share `amount` of acknowledgements is lost for `for_ms`",
    "slow_network": "messages take up to `amount` ms longer for `for_ms`",
    "redeliver": "the broker delivers the last `amount` messages of consumer `target` again",
    "power_off": "machine `target` has no power for `for_ms`; with `amount` 1 it comes back with an empty disk",
    "broken_start": "the next `amount` processes of machine `target` cannot be started",
    "device_lost": "the engine of worker `target` fails, and its process ends itself",
    "stuck": "operation `detail` of `target` does not end for `for_ms`",
    "slow": "whatever `target` does takes `amount` times as long for `for_ms`",
    "stubborn": "`target` ignores SIGTERM for `for_ms`",
    "torn": "snapshots that `target` fetches are torn for `for_ms`",
    "stale": "the last `amount` facts of worker `target` are published again, under new ids",
    "old_commands": "the last `amount` commands to `target` arrive once more",
    "twin": "a second instance of service `target` starts",
}
"""Every kind of fault, and what it is."""
TARGETS: Final = {
    "available": "node", "reclaim": "node", "power_off": "node", "broken_start": "node",
    "crash": "process", "crash_at_call": "process", "freeze": "process", "cut": "process", "deafen": "process",
    "redeliver": "consumer", "device_lost": "worker", "stuck": "process", "slow": "process", "stubborn": "process",
    "torn": "worker", "stale": "worker", "old_commands": "process", "twin": "service",
}  # fmt: skip
"""What the target of each kind names; the others have none."""
OPERATIONS: Final = (
    "start",
    "load",
    "role",
    "release",
    "restore",
    "drain",
    "acquire",
    "train",
    "snapshot",
    "checkpoint",
)
FAULTS_MS: Final = 5_500
"""A drawn plan's faults begin within this time, and end within twice this time."""
LONGEST_MS: Final = 600_000
MOST: Final = {
    "reserved": 16,
    "training": 8,
    "steps": 100,
    "batch": 256,
    "group": 256,
    "staleness": 100,
    "gpus_per_worker": 8,
}
"""Of a shape, so that its run ends within minutes; what is drawn is far below. All of them but `reserved` and `staleness` are at least 1."""
MOST_SPOT_NODES: Final = 8
MOST_ON_A_NODE: Final = 16
"""Spot workers of one node."""
MOST_TRAJECTORIES: Final = 1_000
"""Trained in a run: one worker needs about a minute of this machine for so many."""
MOST_GUESS_S: Final = 3_600.0
MOST_FAULTS: Final = 1_000
MOST_AMOUNT: Final = {"loss": 1.0, "duplicate": 1.0, "reorder": 1.0, "ack_loss": 1.0, "slow_network": 10_000.0, "slow": 100.0,
                      "broken_start": 100.0}  # fmt: skip
"""Of each kind of fault where more would mean nothing, or outlast the fault by so much that work in time is called late."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One thing that goes wrong, `at_ms` after the start. What the other fields mean is in `KINDS`."""

    at_ms: int
    kind: str
    target: str = ""
    for_ms: int = 0
    amount: float = 0.0
    gpus: tuple[int, ...] = ()
    detail: str = ""

    @property
    def lasts(self) -> bool:
        """Whether it is mended by itself, after `for_ms`; the others happen at one moment."""
        return self.kind not in ("available", "reclaim", "crash_at_call", "redeliver", "broken_start", "device_lost",
                                 "stale", "old_commands", "twin")  # fmt: skip


class Shape(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The cluster and its job: arguments of `cluster.small_job`. `reserved`, `spot` and `training` count workers."""

    reserved: int = 2
    spot: tuple[int, ...] = (2, 1)
    training: int = 1
    steps: int = 3
    lending: bool = True
    disaggregation: bool = True
    batch: int = 8
    group: int = 2
    staleness: int = 1
    policy: str = "planner"
    toggle_guess_s: float = 0.01
    gpus_per_worker: int = 1
    evaluate: bool = False
    early_start: bool = True

    def job(self, seed: int) -> JobFile:
        """The job file."""
        return small_job(seed=seed, **msgspec.structs.asdict(self))


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """All that a run follows from. Faults are in order of time."""

    seed: int = 0
    shape: Shape = Shape()
    faults: tuple[Fault, ...] = ()


def load(path: str) -> Plan:
    """A user's plan, a JSON file. Raises ConfigError."""
    try:
        plan = msgspec.json.decode(Path(path).read_bytes().removeprefix(codecs.BOM_UTF8), type=Plan)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); give the path of a fault plan (docs/fault-simulation.md)"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a fault plan: {error}; the format is in docs/fault-simulation.md") from error
    problem = problem_of(plan)
    if problem:
        raise ConfigError(f"{path}: {problem}")
    return msgspec.structs.replace(plan, faults=tuple(sorted(plan.faults, key=lambda fault: fault.at_ms)))


def problem_of(plan: Plan) -> str:
    """What is wrong with a well-typed plan, or ""."""
    shape = plan.shape
    problem = _problem_of_shape(shape)
    if problem:
        return f"shape: {problem}"
    if not 0 <= plan.seed < 2**32:
        return f"seed {plan.seed} is not from 0 to {2**32 - 1}"
    if len(plan.faults) > MOST_FAULTS:
        return f"{len(plan.faults)} faults: at most {MOST_FAULTS} in one plan"
    names = names_of(shape)
    for number, fault in enumerate(plan.faults):
        where = f"faults[{number}] ({fault.kind})"
        if fault.kind not in KINDS:
            return f"{where}: there is no such kind; there are {', '.join(KINDS)}"
        known = names.get(TARGETS.get(fault.kind, ""), ("",))
        if fault.target not in known:
            return f"{where}: target {fault.target!r} is none of {', '.join(map(repr, known))}"
        if not (0 <= fault.at_ms <= LONGEST_MS and 0 <= fault.for_ms <= LONGEST_MS and fault.amount >= 0):
            return f"{where}: at_ms and for_ms are from 0 to {LONGEST_MS}, amount is not negative"
        if fault.amount > MOST_AMOUNT.get(fault.kind, float("inf")):
            return f"{where}: amount {fault.amount:g} is above {MOST_AMOUNT[fault.kind]:g}"
        if fault.kind == "stuck" and fault.detail not in OPERATIONS:
            return f"{where}: detail {fault.detail!r} is none of {', '.join(OPERATIONS)}"
        if fault.kind in ("available", "reclaim"):
            gpus = gpus_of(shape)[fault.target]
            if not fault.gpus or not set(fault.gpus) <= set(gpus):
                return f"{where}: gpus are some of {list(gpus)}"
    return ""


def _problem_of_shape(shape: Shape) -> str:
    for name, most in MOST.items():
        least = 0 if name in ("reserved", "staleness") else 1
        value = getattr(shape, name)
        if not least <= value <= most:
            return f"{name} {value} is not from {least} to {most}"
    if len(shape.spot) > MOST_SPOT_NODES or not all(0 <= count <= MOST_ON_A_NODE for count in shape.spot):
        return f"spot counts the workers of at most {MOST_SPOT_NODES} nodes, each from 0 to {MOST_ON_A_NODE}"
    if shape.reserved + sum(shape.spot) < 1:
        return "reserved and spot count workers: some of them are needed"
    if shape.batch % shape.group:
        return f"batch {shape.batch} is no multiple of group {shape.group}"
    if shape.steps * shape.batch > MOST_TRAJECTORIES:
        return f"steps x batch = {shape.steps * shape.batch} trajectories: at most {MOST_TRAJECTORIES}"
    if not 0 <= shape.toggle_guess_s <= MOST_GUESS_S:
        return f"toggle_guess_s {shape.toggle_guess_s:g} is not from 0 to {MOST_GUESS_S:g}"
    try:
        parse_policy(shape.policy)
    except ValueError as error:
        return f"policy {error}"
    return ""


def gpus_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Each node's GPUs."""
    return {node.name: tuple(range(node.gpus)) for node in shape.job(0).nodes}


def names_of(shape: Shape) -> dict[str, tuple[str, ...]]:
    """What faults may name, by what they name."""
    nodes = tuple(gpus_of(shape))
    workers = tuple(str(slot.worker) for slot in rollout_slots(shape.job(0)))
    agents = tuple(f"agent-{index}" for index in range(AGENTS))
    routers = tuple(f"router-{index}" for index in range(ROUTERS))
    node_agents = tuple(f"node_agent-{node}" for node in nodes)
    services = (*SERVICES, *ORCHESTRATORS)
    return {
        "node": nodes,
        "worker": workers,
        "service": SERVICES,
        "process": (*services, *agents, *routers, *node_agents, *workers, "trainer"),
        "consumer": (*SERVICES, "orchestrator", "agents", *node_agents),
    }


# -- drawing


def draw(seed: int) -> Plan:
    """The plan of a seed: the same on any machine."""
    rng = random.Random(f"plan/{seed}")
    shape = _shape(rng)
    faults = [*_capacity(rng, shape), *_trouble(rng, shape)]
    if rng.random() < 0.15:
        faults += _burst(rng, shape)
    if rng.random() < 0.15:
        faults += _storm(rng, shape)
    if shape.reserved == 0:  # without workers the work is never done
        faults += [Fault(FAULTS_MS + 1_000, "available", node, gpus=gpus) for node, gpus in _spot(shape)]
    return Plan(seed=seed, shape=shape, faults=tuple(sorted(faults, key=lambda fault: fault.at_ms)))


def _shape(rng: random.Random) -> Shape:
    disaggregation = rng.random() < 0.6
    policy = "planner"
    if rng.random() < 0.3:
        policy = rng.choice(("static-pd:1:1", "static-pd:1:2")) if disaggregation else "colocated"
    elif rng.random() < 0.5:
        policy = "paper"
    return Shape(
        reserved=rng.choice((0, 1, 1, 2, 2, 2, 2)),
        spot=rng.choice(((2, 1), (2,), (1, 1), (2, 2))),
        training=rng.choice((1, 2)),
        steps=rng.choice((2, 3)),
        lending=rng.random() < 0.75,
        disaggregation=disaggregation,
        batch=rng.choice((4, 6, 8)),
        group=2,
        staleness=rng.choice((0, 1, 1, 2)),
        policy=policy,
        toggle_guess_s=rng.choice((0.001, 0.001, 0.05, 10.0)),
        gpus_per_worker=rng.choice((1, 1, 1, 2)),
        evaluate=rng.random() < 0.15,
        early_start=rng.random() < 0.85,
    )


def _spot(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    return [(node, gpus) for node, gpus in gpus_of(shape).items() if node.startswith("s")]


def _capacity(rng: random.Random, shape: Shape) -> list[Fault]:
    """GPUs come and go: most come early, each may go again, with notice, too little or none; some flap."""
    faults: list[Fault] = []
    for node, gpus in _spot(shape):
        at_ms = rng.choice((0, 300, 300, rng.randrange(FAULTS_MS)))
        faults.append(Fault(at_ms, "available", node, gpus=gpus))
        while rng.random() < 0.6:
            at_ms += rng.randrange(50, 3_000)
            if at_ms > FAULTS_MS:
                break
            some = tuple(gpu for gpu in gpus if rng.random() < 0.7) or gpus
            faults.append(Fault(at_ms, "reclaim", node, rng.choice((0, 0, 30, 200, 800, 2_000)), gpus=some))
            at_ms += rng.randrange(10, 2_500)
            if rng.random() < 0.8:
                faults.append(Fault(at_ms, "available", node, gpus=some))
    if rng.random() < 0.2:  # flapping
        node, gpus = rng.choice(_spot(shape))
        at_ms = rng.randrange(500, FAULTS_MS - 2_000)
        for turn in range(rng.randrange(4, 10)):
            kind = "reclaim" if turn % 2 == 0 else "available"
            faults.append(Fault(at_ms, kind, node, rng.choice((0, 100)) if turn % 2 == 0 else 0, gpus=gpus[:1]))
            at_ms += rng.randrange(20, 250)
    return faults


_WEIGHTS: Final = {
    "crash": 5, "crash_at_call": 8, "freeze": 3, "cut": 3, "deafen": 2, "broker_down": 1, "loss": 2, "duplicate": 2,
    "reorder": 2, "ack_loss": 1, "slow_network": 1, "redeliver": 2, "power_off": 2, "broken_start": 1, "device_lost": 1,
    "stuck": 4, "slow": 2, "stubborn": 1, "torn": 2, "stale": 2, "old_commands": 2, "twin": 1,
}  # fmt: skip


def _trouble(rng: random.Random, shape: Shape) -> list[Fault]:
    count = rng.choice((0, 1, 3, 6, 10, 14, 20))
    return [_fault(rng, shape, rng.randrange(100, FAULTS_MS)) for _ in range(count)]


def _burst(rng: random.Random, shape: Shape) -> list[Fault]:
    """Twenty events within a second."""
    begin_ms = rng.randrange(500, FAULTS_MS)
    faults: list[Fault] = []
    for _ in range(20):
        node, gpus = rng.choice(_spot(shape))
        kind = rng.choice(("available", "reclaim"))
        some = (rng.choice(gpus),)
        for_ms = rng.choice((0, 50, 500)) if kind == "reclaim" else 0
        faults.append(Fault(begin_ms + rng.randrange(1_000), kind, node, for_ms, gpus=some))
    return faults


def _storm(rng: random.Random, shape: Shape) -> list[Fault]:
    """Everything that controls the cluster dies within half a second."""
    begin_ms = rng.randrange(500, FAULTS_MS)
    return [
        Fault(begin_ms + rng.randrange(500), "crash", name, rng.randrange(50, 1_500))
        for name in (*SERVICES, *ORCHESTRATORS)
        if rng.random() < 0.8
    ]


def _fault(rng: random.Random, shape: Shape, at_ms: int) -> Fault:
    kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    names = names_of(shape)
    known = list(names.get(TARGETS.get(kind, ""), ()))
    target = rng.choice(known) if known else ""
    luck = rng.random()
    if kind in ("crash", "crash_at_call", "freeze", "cut") and luck < 0.3:
        target = rng.choice((*names["worker"], "trainer"))
    elif kind in ("crash", "crash_at_call", "freeze", "cut") and luck < 0.75:  # what carries changes out
        target = rng.choice(
            (*ORCHESTRATORS, "cluster_rebuilder", "toggle_manager", "elastic_scheduler", "decision_engine")
        )
    for_ms = rng.choice((50, 300, 1_000, 2_500, 4_000))
    match kind:
        case "crash":
            return Fault(at_ms, kind, target, rng.randrange(20, 1_500))
        case "crash_at_call":
            return Fault(at_ms, kind, target, amount=rng.randrange(1, 40))
        case "loss" | "duplicate" | "reorder" | "ack_loss":
            return Fault(at_ms, kind, "", for_ms, amount=rng.choice((0.05, 0.2, 0.5)))
        case "slow_network":
            return Fault(at_ms, kind, "", for_ms, amount=rng.choice((20, 100, 400)))
        case "broker_down":
            return Fault(at_ms, kind, "", rng.choice((100, 800, 2_500)))
        case "redeliver" | "stale" | "old_commands":
            return Fault(at_ms, kind, target, amount=rng.choice((1, 3, 10, 40)))
        case "power_off":
            return Fault(at_ms, kind, target, for_ms, amount=rng.choice((0, 1)))
        case "broken_start":
            return Fault(at_ms, kind, target, amount=rng.choice((1, 1, 2, 4)))
        case "stuck":
            operation = rng.choice(
                ("acquire", "release", "train", "snapshot", "checkpoint") if target == "trainer" else OPERATIONS[:6]
            )
            if target not in names["worker"] and target != "trainer":
                target = rng.choice(names["worker"])
            return Fault(at_ms, kind, target, rng.choice((500, 2_000, 5_000)), detail=operation)
        case "slow" | "stubborn":
            target = rng.choice((*names["worker"], "trainer"))
            return Fault(at_ms, kind, target, for_ms, amount=rng.choice((3, 10, 30)) if kind == "slow" else 0)
        case "torn":
            return Fault(at_ms, kind, target, for_ms)
        case _:
            return Fault(at_ms, kind, target, for_ms if kind in ("freeze", "cut", "deafen") else 0)


def told(fault: Fault) -> str:
    """A fault in a line."""
    parts = [fault.kind, fault.target]
    if fault.gpus:
        parts.append(f"gpus {','.join(map(str, fault.gpus))}")
    if fault.amount:
        parts.append(f"{fault.amount:g}")
    parts.append(fault.detail)
    if fault.for_ms:
        parts.append(f"with {fault.for_ms} ms notice" if fault.kind == "reclaim" else f"for {fault.for_ms} ms")
    return " ".join(part for part in parts if part)


def node_named(worker: str) -> str:
    """The node of a worker, or of the trainer."""
    return "t0" if worker == "trainer" else node_of(worker)
