"""Fuzzing: whatever arrives on a subject, it is read, or refused with the documented error; and no core falls over what is read.

Deterministic by seed. `make check` runs `PEARL_FUZZ_ROUNDS` rounds of a few hundred mutants; `make soak` many more. To repeat one:
`PEARL_FUZZ_SEED=<seed> PEARL_FUZZ_ROUNDS=1 pytest tests/unit/test_fuzz.py`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import messages
from messages.agent import RolloutTask
from messages.envelope import Message, UndecodableMessage, decode, encode, kind_of, tag_of
from messages.ids import Incarnation, Role, RoleGeneration, WorkerId
from messages.rollout_worker import Generate, SetRole, UpdateWeights
from messages.router import AssignRequest
from messages.runtime_tracker import WorkerHeartbeat
from messages.subjects import ROUTES, decode_on, message_id, subject_of
from pearl_state.codec import UnreadableTableError, decode_table, encode_table
from services.agent.config import Config as AgentConfig
from services.cluster_rebuilder.config import Config as RebuilderConfig
from services.cluster_rebuilder.core import ClusterRebuilderCore
from services.decision_engine.config import Config as DecisionConfig
from services.decision_engine.core import DecisionEngineCore
from services.edge.tasks import problem_of_task
from services.elastic_scheduler.config import Config as ElasticConfig
from services.elastic_scheduler.core import ElasticSchedulerCore
from services.node_agent.config import Config as NodeConfig
from services.node_agent.core import NodeAgentCore, Restored
from services.orchestrator.config import Config as OrchestratorConfig
from services.orchestrator.core import OrchestratorCore
from services.pipeline_scheduler.config import Config as PipelineConfig
from services.pipeline_scheduler.core import PipelineSchedulerCore
from services.rollout_worker.core import COMMANDS, Loaded, RoleTaken, RolloutWorkerCore
from services.router.config import Config as RouterConfig
from services.router.core import RouterCore, Unplaceable
from services.runtime.core import Input, Refuse, Send, Tick
from services.runtime_tracker.config import Config as TrackerConfig
from services.runtime_tracker.core import RuntimeTrackerCore
from services.simulator.faults.record import Stored, TableWritten
from services.toggle_manager.config import Config as ToggleConfig
from services.toggle_manager.core import ToggleManagerCore
from tests.contract.test_golden_bytes import golden
from tests.unit.fault_story import JOB, sound_run
from tests.unit.mutants import mutant

KINDS = messages.envelope.registry()
TAGS = tuple(sorted(KINDS))
GOLDEN = {tag: bytes.fromhex(data) for tag, data in golden().items() if tag in KINDS}
ROUNDS = int(os.environ.get("PEARL_FUZZ_ROUNDS", "2"))
SEED = int(os.environ.get("PEARL_FUZZ_SEED", "0"))
SEEDS = range(SEED, SEED + ROUNDS)
A_KIND = 25
"""Mutants of each kind's bytes a round."""
NAME = JOB.job.name


def mutants(seed: int, tag: str) -> Iterator[bytes]:
    rng = random.Random(f"{seed}/{tag}")
    for _ in range(A_KIND):
        yield mutant(GOLDEN[tag], rng, TAGS)


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_are_read_or_refused_with_the_documented_error(seed: int) -> None:
    read = 0
    for tag in TAGS:
        for data in mutants(seed, tag):
            try:
                message = decode(data, *KINDS.values())
            except UndecodableMessage as error:
                assert 0 < len(error.reason) <= 300
                continue
            read += 1
            assert kind_of(data) == tag_of(type(message))
            again = decode(encode(message), type(message))
            assert again == message
    assert read > len(TAGS), "some mutants are to be readable, else only the first check is ever reached"


@pytest.mark.parametrize("seed", SEEDS)
def test_every_subject_takes_only_what_belongs_on_it(seed: int) -> None:
    """Each kind's own subject, with all that its receivers accept there."""
    rng = random.Random(f"subjects/{seed}")
    taken = 0
    for tag in (tag for tag in TAGS if KINDS[tag] in ROUTES):  # attempt logs are files
        own = decode(GOLDEN[tag], KINDS[tag])
        route = ROUTES[KINDS[tag]]
        subject = "_INBOX.x" if route.family == "reply" else subject_of(NAME, own)
        accepted = tuple(kind for kind, other in ROUTES.items() if other.family == route.family)
        for data in (*mutants(seed, tag), *mutants(seed, rng.choice(TAGS))):
            try:
                message = decode_on(NAME, subject, data, *accepted)
            except UndecodableMessage:
                continue
            taken += 1
            assert type(message) in accepted
            message_id(message)
            if route.family not in ("reply", "gen"):
                assert subject_of(NAME, message) == subject
    assert taken > len(TAGS)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_role_table_is_read_or_refused(seed: int) -> None:
    rng = random.Random(f"tables/{seed}")
    tables = [encode_table(seen.table) for seen in sound_run() if isinstance(seen, TableWritten)]
    for data in tables:
        for _ in range(A_KIND):
            try:
                decode_table(mutant(data, rng, TAGS), NAME)
            except UnreadableTableError:
                continue


# --- cores: what can be read must not break them


def _cores() -> dict[str, Callable[[], Any]]:
    return {
        "elastic_scheduler": lambda: ElasticSchedulerCore(ElasticConfig.of(JOB)),
        "decision_engine": lambda: DecisionEngineCore(DecisionConfig.of(JOB)),
        "orchestrator": lambda: OrchestratorCore(OrchestratorConfig.of(JOB)),
        "cluster_rebuilder": lambda: ClusterRebuilderCore(RebuilderConfig.of(JOB)),
        "toggle_manager": lambda: ToggleManagerCore(ToggleConfig.of(JOB)),
        "pipeline_scheduler": lambda: PipelineSchedulerCore(PipelineConfig.of(JOB)),
        "runtime_tracker": lambda: RuntimeTrackerCore(TrackerConfig.of(JOB)),
    }


def sensible() -> list[Message]:
    """The sound run's events: what the mutants are made of, so that many of them are nearly right."""
    return [seen.message for seen in sound_run() if isinstance(seen, Stored)]


def inputs_of(core: Any) -> tuple[type[Message], ...]:
    return (*core.inputs, *getattr(core, "telemetry", ()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", _cores())
def test_no_core_falls_over_what_can_be_read(name: str, seed: int) -> None:
    """Sensible events, with mutants of them and of the golden bytes between. A refusal changes nothing."""
    core = _cores()[name]()
    rng = random.Random(f"{name}/{seed}")
    kinds = inputs_of(core)
    state, seq, refused, stepped = core.initial(), 0, 0, 0
    tables = [seen.table for seen in sound_run() if isinstance(seen, TableWritten)]
    sources = [encode(message) for message in sensible() if isinstance(message, kinds)]
    sources += [GOLDEN[tag_of(kind)] for kind in kinds]
    events = [message for message in sensible() if isinstance(message, kinds)]
    for number in range(A_KIND * 6):
        seq += 1
        message: object
        if number % 6 == 0:
            message = events[(number // 6) % len(events)] if events else Tick()
        elif number % 6 == 1 and name != "orchestrator":
            message = tables[(number // 6) % len(tables)]
        else:
            try:
                message = decode(mutant(rng.choice(sources), rng, TAGS), *kinds)
            except UndecodableMessage:
                message = Tick()
        before = msgspec.msgpack.encode(state)
        after, effects = core.step(state, Input(1_000_000 + 10 * number, message, seq))
        stepped += 1
        if any(isinstance(effect, Refuse) for effect in effects):
            refused += 1
            assert all(effect.reason for effect in effects if isinstance(effect, Refuse))
            assert msgspec.msgpack.encode(state) == before, "what is refused changes nothing"
            continue  # the host keeps the state that it had
        for effect in effects:
            if isinstance(effect, Send):
                decode(encode(effect.message), type(effect.message))
        state = msgspec.msgpack.decode(
            msgspec.msgpack.encode(after), type=core.state_type
        )  # every checkpoint can be read
    assert refused < stepped


@pytest.mark.parametrize("seed", SEEDS)
def test_no_node_agent_falls_over_what_can_be_read(seed: int) -> None:
    core = NodeAgentCore(NodeConfig.of(JOB, "r0", Path("story.toml")))
    rng = random.Random(f"node/{seed}")
    state, _ = core.step(core.initial(), Input(1_000_000, Restored()))
    kinds = tuple(KINDS[tag] for tag in ("worker.launch/1", "worker.kill/1", "gpu.reclaimed/1", "gpu.available/1"))
    for number in range(A_KIND * 10):
        try:
            message: object = decode(mutant(GOLDEN[tag_of(rng.choice(kinds))], rng, TAGS), *kinds)
        except UndecodableMessage:
            continue
        if rng.random() < 0.5 and hasattr(message, "worker"):
            message = msgspec.structs.replace(message, worker=WorkerId("r0-w0"))  # type: ignore[type-var]
        state, _ = core.step(state, Input(1_000_000 + number, message, number + 1))
        assert len({process.worker for process in state.processes}) == len(state.processes)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_worker_and_no_router_falls_over_what_can_be_read(seed: int) -> None:
    rng = random.Random(f"edge/{seed}")
    worker = RolloutWorkerCore(WorkerId("r0-w0"), Incarnation(1), released=False)
    state = worker.initial()
    load = UpdateWeights(
        worker=WorkerId("r0-w0"),
        incarnation=Incarnation(1),
        version=0,
        uri="",
        manifest_sha256="",  # type: ignore[arg-type]
    )
    role = SetRole(
        worker=WorkerId("r0-w0"), incarnation=Incarnation(1), role=Role.COLOCATED, role_generation=RoleGeneration(1)
    )
    for event in (load, Loaded(load.version, 1), role, RoleTaken(role.role, role.role_generation)):
        state, _ = worker.step(state, Input(1, event))
    router = RouterCore(RouterConfig.of(JOB))
    for table in [seen.table for seen in sound_run() if isinstance(seen, TableWritten)][:9]:
        router.on_table(table, 0)
    for number in range(A_KIND * 10):
        try:
            data = mutant(
                GOLDEN[rng.choice(("request.assign/1", "worker.heartbeat/1", "request.generate/1"))], rng, TAGS
            )
            message = decode(data, AssignRequest, WorkerHeartbeat, Generate)
        except UndecodableMessage:
            continue
        if isinstance(message, AssignRequest):
            try:
                router.assign(message, number)
            except Unplaceable as error:
                assert str(error)
        elif isinstance(message, WorkerHeartbeat):
            router.on_heartbeat(message)
        else:
            worker.refusal(state, message)
    for number in range(A_KIND * 10):
        kind = rng.choice(COMMANDS)
        try:
            message = decode(mutant(GOLDEN[tag_of(kind)], rng, TAGS), *COMMANDS)
        except UndecodableMessage:
            continue
        state, _ = worker.step(state, Input(number, message))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_agent_takes_a_senseless_task(seed: int) -> None:
    config, rng = AgentConfig.of(JOB), random.Random(f"task/{seed}")
    for _ in range(A_KIND * 10):
        try:
            task = decode(mutant(GOLDEN[tag_of(RolloutTask)], rng, TAGS), RolloutTask)
        except UndecodableMessage:
            continue
        problem = problem_of_task(task, config.newest_version)
        assert problem or (0 <= task.min_version <= task.batch and task.retry >= 0)
