"""What a hostile or broken peer may send, by the user it logs in as: a catalogue for `test_hostile_events.py`.

Two kinds: *garbage* on every subject that a user may publish to, derived from the permissions themselves so that no
subject is forgotten; and well-formed *nonsense*, written by hand, about a job like that of `running_job.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from messages.agent import RolloutTask, TokenChunk, TurnFinished
from messages.decision_engine import BatchProgress, BudgetChanged, Leave, WorkloadProfile
from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, NodeUp, TrainingBegin, TrainingFinished
from messages.envelope import Message, encode, tag_of
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import Mode, Role
from messages.node_agent import Kill, Launch
from messages.orchestrator import (
    PlanProgress,
    RoleSet,
    TargetConfiguration,
    WeightsApplied,
    WorkerActivated,
    WorkerDrained,
    WorkerGone,
    WorkerReady,
    WorkerReleased,
)
from messages.pipeline_scheduler import StepFinished, TrajectoryCompleted, WeightsPublished
from messages.rollout_worker import Activate, Deactivate, Drain, Generate, SetRole, UpdateWeights
from messages.router import AssignRequest
from messages.runtime_tracker import NodeHeartbeat, OperationTimed, RequestFinished, WorkerHeartbeat
from messages.subjects import ROUTES, event_subject, noun_verb, subject_of
from messages.toggle_manager import TrainerReady, TrainerReleased
from messages.trainer import TrainerRelease, TrainerResume
from services.nats_server.permissions import SENDS
from tests.contract.samples import sample

JOB = "test"
HUGE = 10**6
ENDLESS = 10**30

LETTER = "letter"  # somebody keeps a dead letter of exactly this message
STRAY = "stray"  # in the journal, which nobody consumes: the checker counts it
LOGGED = "logged"  # an event for people only: the monitor's log names it
LATE = "late"  # about what is over, or harmless: ignored
REFUSED = "refused"  # the client or the server does not take it


class Attack(NamedTuple):
    """One message, who sends it, and what must come of it (besides nothing)."""

    user: str
    subject: str
    data: bytes
    outcome: str
    what: str


def subject_for(kind: type[Message]) -> str:
    """A subject of this kind that somebody listens on in the job of `running_job.py`."""
    route = ROUTES[kind]
    key = {"node": "reserved", "worker": "reserved-w0", "trajectory": "nobody", "batch": "0"}.get(route.key or "", "-")
    match route.family:
        case "ev" | "tel":
            return f"pearl.{JOB}.{route.family}.{noun_verb(kind)}.{key}"
        case "cmd.trainer" | "assign":
            return f"pearl.{JOB}.{route.family}"
        case "cmd.node":
            return f"pearl.{JOB}.cmd.node.reserved"
        case "gen":
            return f"pearl.{JOB}.gen.reserved-w0"
        case family:
            return f"pearl.{JOB}.{family}.{key}"


def garbage_for(kind: type[Message]) -> Iterator[tuple[str, bytes]]:
    """Bytes that are no message of this kind."""
    good = sample(kind)
    body = msgspec.to_builtins(good)
    tag = tag_of(kind)
    numbers = [name for name, value in body.items() if isinstance(value, int) and not isinstance(value, bool)]
    yield "nothing", b""
    yield "cut off", encode(good)[:-1]
    yield "not UTF-8", b'{"kind":"' + tag.encode() + b'","x":"\xff\xfe"'
    yield "an unknown kind", b'{"kind":"bomb.drop/1"}'
    yield "another kind", encode(sample(TrainingFinished if kind is not TrainingFinished else TrainingBegin))
    yield "no fields", msgspec.json.encode({"kind": tag})
    yield "wrong types", msgspec.json.encode({**{name: {"a": [1]} for name in body}, "kind": tag})
    yield "deep nesting", b'{"kind":"' + tag.encode() + b'","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    yield "a huge kind", msgspec.json.encode({"kind": "k" * 100_000})
    if numbers:
        # JSON knows no bound: written out, it would be stored in no checkpoint.
        yield (
            "an endless number",
            msgspec.json.encode({**body, numbers[0]: 0}).replace(
                f'"{numbers[0]}":0'.encode(), f'"{numbers[0]}":{ENDLESS}'.encode()
            ),
        )
    if not kind.bulk:
        yield "MessagePack", msgspec.msgpack.encode(good)


def garbage() -> Iterator[Attack]:
    """On every subject of every user, each kind of garbage."""
    for user, kinds in SENDS.items():
        for kind in kinds:
            route = ROUTES[kind]
            subject = subject_for(kind)
            outcome = LETTER
            if route.family == "journal":
                outcome = STRAY
            elif route.family == "ev" and noun_verb(kind) in (
                "decision_recorded",
                "policy_evaluated",
                "gpu_free",
                "batch_ready",
                "gpus_returned",
                "store_rewound",
            ):
                outcome = LOGGED
            for what, data in garbage_for(kind):
                yield Attack(user, subject, data, outcome, f"{what} for {tag_of(kind)}")


def _capacity() -> Iterator[tuple[Message, str]]:
    yield GpuAvailable(node="nowhere", gpus=(0,)), LETTER  # type: ignore[arg-type]
    yield GpuAvailable(node="spot1", gpus=(1,)), LETTER  # type: ignore[arg-type]
    yield GpuAvailable(node="spot1", gpus=(-1,)), LETTER  # type: ignore[arg-type]
    yield GpuAvailable(node="spot1", gpus=()), LETTER  # type: ignore[arg-type]
    yield GpuAvailable(node="spot1", gpus=tuple(range(200_000))), LETTER  # type: ignore[arg-type]
    yield GpuAvailable(node="spot1", gpus=(7, 7, 7)), LETTER  # type: ignore[arg-type]
    yield GpuAvailable(node="train", gpus=(0,)), LETTER  # type: ignore[arg-type]
    yield GpuAvailable(node="reserved", gpus=(0, 0, 1, 1)), LATE  # type: ignore[arg-type]
    yield GpuReclaimed(node="nowhere", gpus=(0,)), LETTER  # type: ignore[arg-type]
    yield GpuReclaimed(node="spot1", gpus=(0,)), LETTER  # type: ignore[arg-type]  # not there
    yield GpuReclaimed(node="spot1", gpus=(0, 0)), LETTER  # type: ignore[arg-type]
    yield GpuReclaimed(node="spot1", gpus=(0,), notice_ms=-1), LETTER  # type: ignore[arg-type]
    yield GpuReclaimed(node="spot1", gpus=(0,), notice_ms=10**15), LETTER  # type: ignore[arg-type]
    yield GpuReclaimed(node="spot1", gpus=(99,)), LETTER  # type: ignore[arg-type]
    yield GpuReclaimed(node="spot1", gpus=tuple(range(200_000))), LETTER  # type: ignore[arg-type]
    yield GpuReclaimed(node="reserved", gpus=(0,)), LETTER  # type: ignore[arg-type]
    yield GpuReclaimed(node="reserved", gpus=(0, 1), notice_ms=3_600_000), LETTER  # type: ignore[arg-type]
    yield GpuReclaimed(node="train", gpus=(0,)), LETTER  # type: ignore[arg-type]


def _facts() -> Iterator[tuple[Message, str]]:
    """What a worker says: of slots and processes that are not, of roles and versions that cannot be."""
    yield WorkerReady(worker="nowhere-w0", incarnation=1, endpoint="", pid=1, init_ms=1), LETTER  # type: ignore[arg-type]
    yield WorkerReady(worker="reserved-w9", incarnation=1, endpoint="", pid=1, init_ms=1), LETTER  # type: ignore[arg-type]
    yield WorkerReady(worker="spot1-w0", incarnation=HUGE, endpoint="", pid=1, init_ms=1), LETTER  # type: ignore[arg-type]
    yield WorkerReady(worker="reserved-w0", incarnation=-1, endpoint="", pid=1, init_ms=1), LETTER  # type: ignore[arg-type]
    yield WorkerReady(worker="reserved-w0", incarnation=1, endpoint="x" * 5000, pid=1, init_ms=1), LETTER  # type: ignore[arg-type]
    yield WeightsApplied(worker="reserved-w0", incarnation=1, version=HUGE), LETTER  # type: ignore[arg-type]
    yield WeightsApplied(worker="reserved-w0", incarnation=2, version=0), LETTER  # type: ignore[arg-type]
    yield RoleSet(worker="nowhere-w0", incarnation=1, role=Role.COLOCATED, role_generation=1), LETTER  # type: ignore[arg-type]
    yield RoleSet(worker="reserved-w0", incarnation=1, role=Role.TRAINING, role_generation=1), LETTER  # type: ignore[arg-type]
    yield RoleSet(worker="reserved-w0", incarnation=1, role=Role.COLOCATED, role_generation=HUGE), LETTER  # type: ignore[arg-type]
    yield RoleSet(worker="reserved-w0", incarnation=1, role=Role.DECODE, role_generation=1), LATE  # type: ignore[arg-type]
    yield WorkerDrained(worker="nowhere-w0", incarnation=1, role_generation=1, interrupted=0), LETTER  # type: ignore[arg-type]
    yield WorkerDrained(worker="reserved-w0", incarnation=1, role_generation=HUGE, interrupted=0), LETTER  # type: ignore[arg-type]
    released = WorkerReleased(worker="train-w0", incarnation=5, role_generation=1, freed_bytes=1, took_ms=1)  # type: ignore[arg-type]
    yield released, LETTER
    yield WorkerActivated(worker="train-w0", incarnation=5, role_generation=1, took_ms=1), LETTER  # type: ignore[arg-type]


def _ends() -> Iterator[tuple[Message, str]]:
    """What agents say of trajectories."""
    end = TrajectoryCompleted(
        trajectory="b0-g0-m0",  # type: ignore[arg-type]
        group="b0-g0",  # type: ignore[arg-type]
        batch=0,
        retry=0,
        status="completed",
        reward=1.0,
        turns=1,
        generated_tokens=1,
        min_version=0,  # type: ignore[arg-type]
        max_version=0,  # type: ignore[arg-type]
        journal=(1,),
        env_s=0.0,
        wall_s=0.0,
    )
    ghost = {"trajectory": "ghost", "group": "ghosts"}
    yield msgspec.structs.replace(end, **ghost, status="glorious"), LETTER
    yield msgspec.structs.replace(end, **ghost, reward=1e300), LETTER
    yield msgspec.structs.replace(end, **ghost, turns=HUGE), LETTER
    yield msgspec.structs.replace(end, **ghost, turns=-1, journal=()), LETTER
    yield msgspec.structs.replace(end, **ghost, batch=HUGE), LETTER
    yield msgspec.structs.replace(end, **ghost, retry=-1), LETTER
    yield msgspec.structs.replace(end, **ghost, min_version=9, max_version=3), LETTER


def _heartbeat(worker: str, **changed: object) -> WorkerHeartbeat:
    beat = WorkerHeartbeat(
        worker=worker,  # type: ignore[arg-type]
        incarnation=1,  # type: ignore[arg-type]
        running=0,
        queued=0,
        version=0,
        serving=True,
        decode_iterations=1,
        decode_tokens=1,
        decode_s=1.0,
        decode_batch_sum=1,
        prefill_tokens=1,
        prefill_s=1.0,
        refused=0,
        rss_bytes=1,
    )
    return msgspec.structs.replace(beat, **changed)


def _generate(**changed: object) -> Generate:
    request = Generate(
        request="ghost/0/x",  # type: ignore[arg-type]
        trajectory="ghost",  # type: ignore[arg-type]
        attempt=1,
        worker="reserved-w0",  # type: ignore[arg-type]
        incarnation=1,  # type: ignore[arg-type]
        role_generation=1,  # type: ignore[arg-type]
        min_version=0,  # type: ignore[arg-type]
        prompt=[1],
        prefix=[],
        max_new_tokens=1,
        temperature=1.0,
        seed=0,
        stop_ids=[2],
        reply=f"pearl.{JOB}.tok.ghost",
    )
    return msgspec.structs.replace(request, **changed)


def _task(**changed: object) -> RolloutTask:
    task = RolloutTask(
        trajectory="ghost",  # type: ignore[arg-type]
        group="ghosts",  # type: ignore[arg-type]
        batch=0,
        retry=0,
        task_seed=1,
        sample_seed=1,
        min_version=0,  # type: ignore[arg-type]
        temperature=1.0,
    )
    return msgspec.structs.replace(task, **changed)


def _profile(**changed: object) -> WorkloadProfile:
    return msgspec.structs.replace(sample(WorkloadProfile), **{"train_step": 0, "costs": {}, **changed})


def _target(**changed: object) -> TargetConfiguration:
    target = TargetConfiguration(
        decision_id="d1000",  # type: ignore[arg-type]
        budget_id=HUGE,
        mode=Mode.COLOCATED,
        prefill=0,
        decode=0,
        colocated=1,
        borrow=False,
        usable=("reserved-w0",),  # type: ignore[arg-type]
        leaving=(),
        training_batch=None,
    )
    return msgspec.structs.replace(target, **changed)


def _budget(**changed: object) -> BudgetChanged:
    budget = BudgetChanged(
        budget_id=HUGE,
        dedicated=("reserved-w0",),
        overlap=(),
        leaving=(),
        training_batch=None,
        cause="malice",  # type: ignore[arg-type]
    )
    return msgspec.structs.replace(budget, **changed)


def _weights(**changed: object) -> WeightsPublished:
    weights = WeightsPublished(version=HUGE, uri="/nowhere", manifest_sha256="0" * 64, bytes=1)  # type: ignore[arg-type]
    return msgspec.structs.replace(weights, **changed)


def _launch(worker: str, incarnation: int = 1, gpus: tuple[int, ...] = (0,), service: str = "rollout_worker") -> Launch:
    return Launch(worker=worker, incarnation=incarnation, gpus=gpus, service=service)  # type: ignore[arg-type]


def _kill(worker: str, incarnation: int = 1, grace_ms: int = 0) -> Kill:
    return Kill(worker=worker, incarnation=incarnation, grace_ms=grace_ms, reason="malice")  # type: ignore[arg-type]


def _plan(worker: str) -> ReconfigurationPlan:
    add = (Assign(worker, Role.COLOCATED, 1, 1),)  # type: ignore[arg-type]
    return ReconfigurationPlan(
        plan_id="p999",
        decision_id="d999",
        stage="preparing",
        epoch=HUGE,
        add=add,
        remove=(),
        reassign=(),
        deadline_ms=1,  # type: ignore[arg-type]
    )


def _progress(plan: str, part: str, report: str) -> PlanProgress:
    return PlanProgress(plan_id=plan, part=part, report=report)  # type: ignore[arg-type]


def _executors() -> Iterator[tuple[Message, str]]:
    """What both executors may say: to the orchestrator, node agents and workers."""
    yield _progress("p999", "rebuilder", "failed"), LATE
    yield _progress("p1", "rebuilder", "glorious"), LETTER
    yield _progress("p1", "nobody", "failed"), LETTER
    yield _launch("reserved-w9"), LETTER
    yield _launch("reserved-w0", incarnation=HUGE), LETTER
    yield _launch("reserved-w0", incarnation=5, gpus=(1,)), LETTER
    yield _launch("reserved-w0", incarnation=5, gpus=tuple(range(100_000))), LETTER
    yield _launch("reserved-w0", incarnation=5, service="trainer"), LETTER
    yield _launch("reserved-w0", incarnation=5, service="/bin/sh"), LETTER
    yield _launch("reserved-w0", incarnation=1), LATE
    yield _kill("reserved-w9"), LETTER
    yield _kill("reserved-w0", incarnation=HUGE), LETTER
    yield _kill("reserved-w0", incarnation=0), LETTER
    yield _kill("reserved-w0", incarnation=1, grace_ms=10**15), LETTER
    yield UpdateWeights(worker="reserved-w0", incarnation=7, version=3, uri="/x", manifest_sha256=""), LATE  # type: ignore[arg-type]
    yield UpdateWeights(worker="reserved-w0", incarnation=1, version=-3, uri="/x", manifest_sha256=""), LETTER  # type: ignore[arg-type]
    yield UpdateWeights(worker="reserved-w0", incarnation=1, version=HUGE, uri="/nowhere", manifest_sha256=""), LATE  # type: ignore[arg-type]
    yield UpdateWeights(worker="reserved-w0", incarnation=1, version=HUGE, uri="s4://[", manifest_sha256=""), LATE  # type: ignore[arg-type]
    yield SetRole(worker="reserved-w0", incarnation=1, role=Role.UNKNOWN, role_generation=9), LETTER  # type: ignore[arg-type]
    yield SetRole(worker="reserved-w0", incarnation=1, role=Role.TRAINING, role_generation=9), LETTER  # type: ignore[arg-type]
    yield SetRole(worker="reserved-w0", incarnation=3, role=Role.COLOCATED, role_generation=9), LATE  # type: ignore[arg-type]
    yield Drain(worker="reserved-w0", incarnation=3, role_generation=9), LATE  # type: ignore[arg-type]
    yield Drain(worker="reserved-w0", incarnation=1, role_generation=-1), LATE  # type: ignore[arg-type]
    yield OperationTimed(operation="world domination", worker="", took_s=1.0), LETTER
    yield OperationTimed(operation="drain", worker="", took_s=-1.0), LETTER
    yield OperationTimed(operation="drain", worker="", took_s=1e300), LETTER


def _steps() -> Iterator[tuple[Message, str]]:
    """What a trainer says of batches that are not being trained."""
    good = sample(StepFinished)
    for batch in (HUGE, -1):
        yield msgspec.structs.replace(good, batch=batch, version=batch + 1), LETTER


NONSENSE: dict[str, tuple[tuple[Message, str], ...]] = {
    "feed": tuple(_capacity()),
    "cli": tuple(_capacity()),
    "rollout_worker": (
        *_facts(),
        (_heartbeat("nowhere-w0"), LETTER),
        (_heartbeat("reserved-w0", decode_s=-1.0, incarnation=2), LETTER),
    ),
    "node_agent": (
        (NodeUp(node="nowhere", gpus=(0,), agent_incarnation=1, host="h"), LETTER),  # type: ignore[arg-type]
        (WorkerGone(worker="nowhere-w0", incarnation=1, reason="x"), LETTER),  # type: ignore[arg-type]
        (WorkerGone(worker="reserved-w0", incarnation=HUGE, reason="x"), LETTER),  # type: ignore[arg-type]
        (WorkerGone(worker="reserved-w0", incarnation=0, reason="x"), LETTER),  # type: ignore[arg-type]
        (NodeHeartbeat(node="nowhere", workers=()), LETTER),
    ),
    "orchestrator": ((_plan("nowhere-w0"), LETTER), (_plan("reserved-w0"), LATE)),
    "decision_engine": (
        (_target(usable=("nowhere-w0",)), LETTER),
        (_target(decision_id="d1001", colocated=-1), LETTER),
        (_target(decision_id="d1002", colocated=100), LETTER),
        (_target(decision_id="d1003", usable=("reserved-w0", "reserved-w0")), LETTER),
        (_target(decision_id="d1004", mode=Mode.UNKNOWN), LETTER),
        (_target(decision_id="d1005", training_batch=-1), LETTER),
        (_target(decision_id="d1006", leaving=(Leave("nowhere-w0", 0),)), LETTER),  # type: ignore[arg-type]
        (_target(decision_id="d1007"), LETTER),
        (_target(decision_id="d1008", budget_id=1, training_batch=HUGE), LATE),
    ),
    "elastic_scheduler": (
        (_budget(dedicated=("nowhere-w0",), budget_id=900), LETTER),
        (_budget(leaving=(Leave("nowhere-w0", 0),), budget_id=901), LETTER),  # type: ignore[arg-type]
        (_budget(dedicated=("reserved-w0", "reserved-w0"), budget_id=902), LETTER),
        (_budget(training_batch=HUGE, budget_id=903), LETTER),
        (_budget(), LETTER),
    ),
    "cluster_rebuilder": tuple(_executors()),
    "toggle_manager": (
        *_executors(),
        (Deactivate(worker="reserved-w0", incarnation=3, role_generation=9), LATE),  # type: ignore[arg-type]
        (Activate(worker="reserved-w0", incarnation=3, role_generation=9), LATE),  # type: ignore[arg-type]
        (TrainerResume(epoch=HUGE, batch=HUGE), LATE),  # type: ignore[arg-type]
        (TrainerResume(epoch=-1, batch=-1), LATE),  # type: ignore[arg-type]
    ),
    "runtime_tracker": (
        (_profile(train_step=HUGE), LETTER),
        (_profile(train_step=1, theta=-1.0), LETTER),
        (_profile(train_step=2, S=1e300), LETTER),
        (_profile(train_step=3, costs={"activate": -5.0}), LETTER),
    ),
    "pipeline_scheduler": (
        (TrainingBegin(batch=HUGE), LETTER),
        (TrainingBegin(batch=39), LETTER),  # the job has it, as its last
        (TrainingFinished(batch=HUGE, version=HUGE), LETTER),  # type: ignore[arg-type]
        (TrainingBegin(batch=-1), LETTER),
        (BatchProgress(batch=HUGE, size=1, done=1, remaining=0), LETTER),
        (BatchProgress(batch=0, size=0, done=-1, remaining=-1), LETTER),
        (_task(trajectory="a.b > *"), LETTER),
        (_task(trajectory="", retry=1), LETTER),
        (_task(batch=HUGE), LETTER),
        (_task(min_version=9, retry=2), LETTER),
        (_task(temperature=-1.0, retry=3), LETTER),
    ),
    "gateway": (
        (_generate(reply="pearl.test.tok.*"), LETTER),
        (_generate(reply="pearl.test.tok.a b"), LETTER),
        (_generate(reply="$KV.test_roles.table"), LETTER),
        (_generate(reply="pearl.test.tok.a\r\nPUB x 0\r\n"), LETTER),
        (_generate(temperature=float("nan")), LETTER),
        (_generate(temperature=-1.0), LETTER),
        (_generate(max_new_tokens=-5), LETTER),
        (_generate(attempt=0), LETTER),
        (_generate(incarnation=9), LATE),
        (_generate(role_generation=HUGE), LATE),
        (_generate(prompt=[HUGE]), LATE),
        (_generate(prompt=[1] * 100_000), LATE),
        (_generate(seed=1 << 63, request="ghost/1/x"), LATE),
    ),
    "trainer": (
        *_steps(),
        (_weights(), LETTER),
        (_weights(version=-1), LETTER),
        (_weights(version=3, uri=""), LETTER),
        (_weights(version=3, uri="x" * 10_000), LETTER),
        (TrainerReady(start_id="x", version=HUGE, ranks=1), LETTER),
        (TrainerReleased(epoch=HUGE, freed_bytes=1, took_ms=1), LATE),  # type: ignore[arg-type]
    ),
    "agent": (
        *_ends(),
        (AssignRequest(request="", trajectory="t", attempt=1, min_version=0, context_tokens=0), LETTER),  # type: ignore[arg-type]
        (AssignRequest(request="r", trajectory="t", attempt=0, min_version=-1, context_tokens=-1), LETTER),  # type: ignore[arg-type]
        (AssignRequest(request="r" * 5000, trajectory="t", attempt=1, min_version=0, context_tokens=0), LETTER),  # type: ignore[arg-type]
        (msgspec.structs.replace(sample(RequestFinished), worker="nowhere-w0"), LETTER),
        (msgspec.structs.replace(sample(RequestFinished), worker="reserved-w0", generated_tokens=10**9), LETTER),
        (msgspec.structs.replace(sample(RequestFinished), worker="reserved-w0", queue_s=-1.0), LETTER),
    ),
}
"""Well-formed messages that nobody can mean, by the user who may send them, and what becomes of each."""

NOT_SENT = (TrainerRelease, TurnFinished)
"""A release is an order its sender may give at any time; a whole turn is a record its agent may write."""


def nonsense() -> Iterator[Attack]:
    """`NONSENSE` on its subjects."""
    for user, messages in NONSENSE.items():
        for message, outcome in messages:
            fields = str(msgspec.to_builtins(message))
            yield Attack(user, subject_of(JOB, message), encode(message), outcome, f"{fields[:120]}")


def misplaced() -> Iterator[Attack]:
    """A good message on another one's subject: permissions are given by subject, so it must count for nothing."""
    trainer_done = sample(StepFinished)
    yield Attack(
        "feed",
        event_subject(JOB, GpuAvailable, "spot1"),
        encode(TrainingFinished(batch=0, version=1)),  # type: ignore[arg-type]
        LETTER,
        "a feed that speaks for the pipeline",
    )
    yield Attack(
        "feed",
        event_subject(JOB, GpuAvailable, "reserved"),
        encode(GpuAvailable(node="spot1", gpus=(0,))),  # type: ignore[arg-type]
        LETTER,
        "an event about another node than its subject's",
    )
    yield Attack(
        "rollout_worker",
        event_subject(JOB, WorkerReady, "spot1-w0"),
        encode(WorkerGone(worker="reserved-w0", incarnation=1, reason="malice")),  # type: ignore[arg-type]
        LETTER,
        "a worker that declares another one dead",
    )
    yield Attack(
        "agent",
        event_subject(JOB, TrajectoryCompleted, "nobody"),
        encode(trainer_done),
        LETTER,
        "an agent that speaks for the trainer",
    )


def too_large() -> Iterator[Attack]:
    """More than the server's limit."""
    body = b'{"kind":"gpu.available/1","node":"' + b"x" * (9 << 20) + b'","gpus":[0]}'
    for user in ("feed", "cli", "agent"):
        kind = SENDS[user][0]
        yield Attack(user, subject_for(kind), body, REFUSED, "9 MB")


def chunks(edge: str) -> Iterator[Attack]:
    """Tokens for an edge that asked for none of them."""
    chunk = TokenChunk(
        request="ghost/0/x",  # type: ignore[arg-type]
        attempt=1,
        worker="reserved-w0",  # type: ignore[arg-type]
        incarnation=1,  # type: ignore[arg-type]
        offset=0,
        tokens=[1],
        logprobs=[-1.0],
        version=0,  # type: ignore[arg-type]
    )
    for what, data in (*garbage_for(TokenChunk), ("nobody's tokens", encode(chunk))):
        yield Attack("rollout_worker", f"pearl.{JOB}.tok.{edge}", data, LATE, what)
