"""What nobody can mean: refused by the wire layer or by the core that it is for, without a trace in any state."""

from __future__ import annotations

import math

import msgspec
import pytest

from messages.agent import TokenChunk
from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, TrainingBegin
from messages.envelope import LONGEST_REASON, BadBody, Misplaced, NotAMessage, UnknownKind, decode, encode
from messages.ids import NodeId, Zone
from messages.node_agent import Kill, Launch
from messages.pipeline_scheduler import TrajectoryCompleted
from messages.rollout_worker import CancelRequest, Generate
from messages.subjects import ROUTES, decode_on, subject_of
from pearl_state.peers import MOST_NOTICE_MS, wrong_budget, wrong_capacity
from services.pipeline_scheduler.core import PipelineSchedulerCore
from services.rollout_worker.service import problem_of
from services.runtime.core import Input, Refuse
from services.runtime.dead_letters import DEAD_BYTES, dead_letter
from tests.contract.samples import sample
from tests.unit.test_node_agent import Agent, launch
from tests.unit.test_pipeline_scheduler import CONFIG as PIPELINE


def test_an_integer_that_no_checkpoint_can_hold_is_refused_at_the_door() -> None:
    """JSON knows no bound; MessagePack, in which states are written, does: a core that kept it could never write again."""
    for text in ("9" * 30, "-" + "9" * 30, str(1 << 63), str(-(1 << 63) - 1)):
        with pytest.raises(BadBody, match="beyond 64 bits"):
            decode(b'{"kind":"training.begin/1","batch":' + text.encode() + b"}", TrainingBegin)
    largest = TrainingBegin(batch=(1 << 63) - 1)
    assert decode(encode(largest), TrainingBegin) == largest
    digits = GpuAvailable(node=NodeId("n"), gpus=(0,), source="9" * 40)
    assert decode(encode(digits), GpuAvailable) == digits, "digits in a text are no number"


def test_control_messages_are_json() -> None:
    """MessagePack can say NaN, which JSON cannot and no formula bears."""
    end = msgspec.structs.replace(sample(TrajectoryCompleted), reward=math.nan)
    with pytest.raises(BadBody, match="JSON"):
        decode(msgspec.msgpack.encode(end), TrajectoryCompleted)


def test_a_reason_is_short_whatever_was_sent() -> None:
    with pytest.raises(UnknownKind) as refused:
        decode(msgspec.json.encode({"kind": "k" * 1_000_000}), TrainingBegin)
    assert len(refused.value.reason) <= LONGEST_REASON and "(1000" in refused.value.reason
    letter = dead_letter("somebody", "s" * 10_000, b"x" * 5_000_000, "r" * 1_000_000, seq=7)
    assert len(encode(letter)) < 4 * DEAD_BYTES and (letter.size, letter.seq) == (5_000_000, 7)


@pytest.mark.parametrize(
    "kind", [kind for kind, route in ROUTES.items() if route.family != "reply"], ids=lambda kind: kind.__name__
)
def test_a_message_counts_on_its_own_subject_only(kind: type) -> None:
    """Permissions are given by subject: a feed that may publish capacity events must not speak for the trainer there."""
    message = sample(kind)
    if kind is CancelRequest:
        return  # its worker is in the subject only
    assert decode_on("j", subject_of("j", message), encode(message), kind) == message
    for subject in (subject_of("k", message), "pearl.j.ev.gpu_available.elsewhere"):
        with pytest.raises(Misplaced, match="belongs on"):
            decode_on("j", subject, encode(message), kind)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[]", b"{", b'{"kind":3}', b'{"kind":"x/1","x":' + b"[" * 100_000])
def test_what_is_no_message(data: bytes) -> None:
    with pytest.raises(NotAMessage):
        decode(data, TrainingBegin, TokenChunk)


def test_elastic_scheduler_and_node_agents_judge_capacity_events_alike() -> None:
    """Else a reclaim that the one refuses would still kill, or for ever forbid, workers at the other."""
    node = NodeId("p0")
    for event, part in (
        (GpuReclaimed(node=node, gpus=(0,), notice_ms=MOST_NOTICE_MS + 1), "longer than a day"),
        (GpuReclaimed(node=node, gpus=(0,), notice_ms=-1), "negative"),
        (GpuReclaimed(node=node, gpus=(5,)), "no GPU 5"),
        (GpuReclaimed(node=node, gpus=()), "no GPU of"),
    ):
        assert part in wrong_capacity(event, Zone.PREEMPTIBLE, 2)
        agent = Agent("p0")
        assert agent.say(event, seq=1) == [] and agent.state.claims == ()
        assert agent.say(launch()), "the slot can still be launched"
    reserved = Agent("r0")
    reserved.say(launch("r0-w0"))
    assert reserved.say(GpuReclaimed(node=NodeId("r0"), gpus=(0,)), seq=1) == [], "a reserved worker is not killed"


def test_a_node_agent_starts_only_what_the_job_file_has() -> None:
    agent = Agent("p0")
    for message in (
        launch("p0-w99"),
        launch("p0-../../x"),
        launch("p0-w0", 10**9),
        launch("p0-w0", 0),
        launch("p0-w0", 1, 0, 0),
        Launch(worker="p0-w0", incarnation=1, gpus=(0,), service="trainer"),  # type: ignore[arg-type]
        Kill(worker="p0-w99", incarnation=1, grace_ms=0, reason=""),  # type: ignore[arg-type]
        Kill(worker="p0-w0", incarnation=10**9, grace_ms=0, reason=""),  # type: ignore[arg-type]
        Kill(worker="p0-w0", incarnation=1, grace_ms=10**15, reason=""),  # type: ignore[arg-type]
    ):
        before = agent.state
        assert agent.say(message) == [] and agent.state == before, message
    assert len(agent.refusals) == 9
    assert agent.say(launch()), "and the slot is not fenced for ever"


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": math.inf},
        {"reward": 1e300},
        {"status": "glorious"},
        {"turns": -1},
        {"turns": 10**9},
        {"batch": 10**9},
        {"retry": -1},
        {"min_version": 5, "max_version": 2},
        {"max_version": 10**9},
    ],
    ids=str,
)
def test_an_end_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    core = PipelineSchedulerCore(PIPELINE)
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
    state = core.initial()
    assert not any(isinstance(each, Refuse) for each in core.step(state, Input(0, end))[1])
    _, effects = core.step(state, Input(0, msgspec.structs.replace(end, **changes)))
    assert any(isinstance(each, Refuse) for each in effects)


@pytest.mark.parametrize(
    "changes",
    [
        {"reply": "pearl.j.tok.*"},
        {"reply": "pearl.j.tok.a.b"},
        {"reply": "pearl.j.tok.a\r\nPUB x 0\r\n"},
        {"reply": "$KV.j_roles.table"},
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"max_new_tokens": 0},
        {"attempt": 0},
        {"request": ""},
        {"request": "r" * 1000},
    ],
    ids=str,
)
def test_a_request_that_no_worker_can_mean_to_run(changes: dict[str, object]) -> None:
    good = msgspec.structs.replace(sample(Generate), reply="pearl.j.tok.agent0-1f")
    assert problem_of(good, "j") == ""
    assert problem_of(msgspec.structs.replace(good, **changes), "j")


def test_a_budget_far_ahead_would_make_all_later_ones_look_old() -> None:
    assert wrong_budget(10**9, 7) and not wrong_budget(8, 7) and not wrong_budget(10**9, None)
