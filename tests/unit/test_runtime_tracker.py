"""The runtime tracker's core: what it makes of telemetry."""

from __future__ import annotations

import msgspec
import pytest

from messages.decision_engine import WorkloadProfile
from messages.envelope import Message
from messages.ids import GroupId, Incarnation, PolicyVersion, RequestId, Role, RoleGeneration, TrajectoryId, WorkerId
from messages.orchestrator import RoleSet
from messages.pipeline_scheduler import StepFinished, TrajectoryCompleted
from messages.runtime_tracker import OperationTimed, RequestFinished, WorkerHeartbeat
from services.jobfile import JobFile, PipelineSection
from services.profile import problem_of
from services.runtime.core import Input, Refuse, Send
from services.runtime_tracker.config import Config
from services.runtime_tracker.core import OPERATIONS, RuntimeTrackerCore, State
from services.runtime_tracker.fit import Line
from services.runtime_tracker.sample import Sample

CORE = RuntimeTrackerCore(msgspec.structs.replace(Config.of(JobFile()), least_share=0.0))


def heartbeat(worker: str, iterations: int, a: float, b: float, batch: int, **more: int) -> WorkerHeartbeat:
    """Sums of a worker that ran so many iterations of that batch size, each a + b * batch seconds."""
    tokens = more.pop("prefill_tokens", 0)
    fields = {"incarnation": 1, "serving": True, **more}
    return WorkerHeartbeat(
        worker=WorkerId(worker),
        running=0,
        queued=0,
        version=0,
        decode_iterations=iterations,
        decode_tokens=iterations * batch,
        decode_s=iterations * (a + b * batch),
        decode_batch_sum=iterations * batch,
        prefill_tokens=tokens,
        prefill_s=tokens * 1e-4,
        refused=0,
        rss_bytes=0,
        **fields,
    )


def request(
    generated: int = 10, new: int = 20, decode_s: float = 1.0, queue_s: float = 0.5, env_s: float = 1.5
) -> RequestFinished:
    return RequestFinished(
        request=RequestId("t/0"),
        worker=WorkerId("n-w0"),
        turn=0,
        new_prompt_tokens=new,
        generated_tokens=generated,
        retained_tokens=generated - 1,
        cached_tokens=0,
        attempts=1,
        queue_s=queue_s,
        decode_s=decode_s,
        env_s=env_s,
    )


def trajectory(turns: int, env_s: float, status: str = "completed") -> TrajectoryCompleted:
    return TrajectoryCompleted(
        trajectory=TrajectoryId(f"t{turns}"),
        group=GroupId("g"),
        batch=0,
        retry=0,
        status=status,
        reward=0.0,
        turns=turns,
        generated_tokens=turns * 10,
        min_version=PolicyVersion(0),
        max_version=PolicyVersion(0),
        journal=(),
        env_s=env_s,
        wall_s=1.0,
    )


def finished(batch: int) -> StepFinished:
    return StepFinished(
        batch=batch,
        version=PolicyVersion(batch + 1),
        train_s=1.0,
        trained_tokens=1,
        reward_mean=0.0,
        reward_std=0.0,
        loss=0.0,
        grad_norm=0.0,
        zero_variance_groups=0,
    )


def run(*steps: tuple[int, Message], state: State | None = None) -> tuple[State, list[WorkloadProfile]]:
    state = CORE.initial() if state is None else state
    profiles: list[WorkloadProfile] = []
    for now_ms, message in steps:
        state, effects = CORE.step(state, Input(now_ms, message))
        profiles += [each.message for each in effects if isinstance(each, Send)]  # type: ignore[misc]
    return state, profiles


def test_a_step_without_telemetry_gives_the_cold_start_again() -> None:
    _, (profile,) = run((0, finished(0)))
    assert msgspec.structs.replace(profile, train_step=-1) == CORE.config.cold_start and profile.train_step == 0


def test_turns_and_trajectories_make_r_dl_theta_s_and_t_env() -> None:
    _, (profile,) = run(
        (0, request(generated=10, new=20)),
        (1, request(generated=30, new=40)),
        (2, trajectory(4, 2.0)),
        (3, trajectory(9, 7.0)),
        (4, trajectory(50, 99.0, status="failed")),
        (5, finished(0)),
    )
    assert (profile.r, profile.dL, profile.retained, profile.S, profile.T_env_s) == (20.0, 30.0, 19.0, 9.0, 7.0)
    assert profile.theta == pytest.approx(1.5)  # 1 s decoding, 1.5 s in neither queue: f = 1/2.5
    tokens = 6.5 * (20 + 30)
    assert profile.kv_bytes_per_trajectory == pytest.approx(tokens * profile.kv_bytes_per_token)
    assert profile.samples == 2 and problem_of(profile) is None


def test_moving_averages_across_steps() -> None:
    share = CORE.config.new_share
    _, profiles = run((0, request(generated=10)), (1, finished(0)), (2, request(generated=20)), (3, finished(1)))
    assert profiles[1].r == pytest.approx(10 + share * 10)
    _, profiles = run((0, finished(0)), (1, request(generated=20)), (2, finished(1)))
    assert profiles[1].r == 20.0  # the cold start is no measurement


def test_a_step_of_few_trajectories_goes_into_the_next_one() -> None:
    core = RuntimeTrackerCore(Config.of(JobFile(pipeline=PipelineSection(batch_trajectories=16))))
    state, profiles = core.initial(), []
    for generated, ended, batch in ((10, 8, 0), (90, 7, 1), (30, 8, 2)):
        turns = [request(generated=generated), *(trajectory(4, 1.0) for _ in range(ended)), finished(batch)]
        for message in turns:
            state, effects = core.step(state, Input(batch, message))
            profiles += [each.message for each in effects if isinstance(each, Send)]
    assert [each.samples for each in profiles] == [1, 0, 2]
    assert [each.r for each in profiles] == [10, 10, pytest.approx(10 + core.config.new_share * (60 - 10))]


def heartbeats_at_two_batch_sizes(worker: str = "n-w0") -> list[tuple[int, Message]]:
    """A worker that runs 10 iterations a second at batch 4, then at batch 12; A = 8 ms, b = 0.5 ms."""
    steps: list[tuple[int, Message]] = []
    iterations, batch_sum, seconds = 0, 0, 0.0
    for second in range(12):
        batch = 4 if second < 6 else 12
        sums = msgspec.structs.replace(
            heartbeat(worker, 0, 0, 0, 0, prefill_tokens=1000 * second),
            decode_iterations=iterations,
            decode_batch_sum=batch_sum,
            decode_s=seconds,
        )
        steps.append((1000 * second, sums))
        iterations, batch_sum, seconds = (
            iterations + 10,
            batch_sum + 10 * batch,
            seconds + 10 * (0.008 + 0.0005 * batch),
        )
    return steps


def test_least_squares_of_decode_and_the_prefill_quotient() -> None:
    _, (profile,) = run(*heartbeats_at_two_batch_sizes(), (12_000, finished(0)))
    assert profile.A_s == pytest.approx(0.008) and profile.b_s == pytest.approx(0.0005)
    assert profile.t_prefill_s == pytest.approx(1e-4)


def test_one_batch_size_cannot_tell_the_slope() -> None:
    steps = [(1000 * n, heartbeat("n-w0", 10 * n, 0.008, 0.0005, 8)) for n in range(6)]
    _, (profile,) = run(*steps, (6000, finished(0)))
    base = CORE.config.cold_start
    assert profile.b_s == base.b_s and profile.A_s == pytest.approx(0.012 - 8 * base.b_s)


def test_warm_up_and_new_incarnations_are_left_out() -> None:
    slow = [(1000 * n, heartbeat("n-w0", n, 5.0, 0.0, 4)) for n in range(2)]  # the first difference is warm-up
    state, _ = run(*slow)
    assert state.decode == Line()
    restarted = [(10_000 + 1000 * n, heartbeat("n-w0", 10 * n, 0.01, 0.0, 4, incarnation=2)) for n in range(3)]
    state, _ = run(*restarted, (14_000, heartbeat("n-w0", 999, 9.0, 0.0, 4)), state=state)
    assert state.decode.weight == 10 and state.workers["n-w0"].incarnation == 2


def test_samples_are_bounded_in_rate_and_number() -> None:
    state, _ = run((0, heartbeat("n-w0", 0, 0.01, 0, 4)))
    same, _ = run((999, heartbeat("n-w0", 50, 0.01, 0, 4)), state=state)
    assert same.workers["n-w0"].sampled == state.workers["n-w0"].sampled and same.step.decoded == 50 * 4
    small = RuntimeTrackerCore(msgspec.structs.replace(CORE.config, most_workers=2, most_operations=2))
    state = small.initial()
    for index in range(5):
        state, _ = small.step(state, Input(0, heartbeat(f"n-w{index}", 1, 0.01, 0, 1)))
        state, _ = small.step(state, Input(0, OperationTimed(operation=OPERATIONS[index], worker="", took_s=1.0)))
    refused, effects = small.step(state, Input(0, OperationTimed(operation="anything", worker="", took_s=1.0)))
    assert refused == state and isinstance(effects[0], Refuse)
    assert len(state.workers) == 2 and len(state.costs) == 2


def test_costs_of_operations_are_moving_averages() -> None:
    timed = [OperationTimed(operation="activate", worker="w", took_s=took_s) for took_s in (6.0, 8.0)]
    _, (profile,) = run((0, timed[0]), (1, timed[1]), (2, finished(0)))
    assert profile.costs == {"activate": pytest.approx(6.0 + CORE.config.new_share * 2.0)}


def switch(worker: str, role: Role, incarnation: int = 1) -> RoleSet:
    return RoleSet(
        worker=WorkerId(worker),
        incarnation=Incarnation(incarnation),
        role=role,
        role_generation=RoleGeneration(1),
    )


def test_speeds_right_after_a_role_change_are_left_out_but_the_work_counts() -> None:
    slow = heartbeat("n-w0", 10, 5.0, 0.0, 4)
    state, _ = run(
        (0, heartbeat("n-w0", 0, 5.0, 0.0, 4)),
        (1000, heartbeat("n-w0", 5, 5.0, 0.0, 4)),
        (1500, switch("n-w0", Role.COLOCATED)),
        (2500, slow),
        (3500, heartbeat("n-w0", 12, 5.0, 0.0, 4)),
    )
    assert state.decode == Line() and state.step.decoded == 48
    steady = [
        (4500 + 1000 * n, msgspec.structs.replace(slow, decode_iterations=12 + n, decode_s=60 + 0.01 * n))
        for n in range(3)
    ]
    state, _ = run(*steady, state=state)
    assert state.decode.weight == 2  # from 4500 on; the sample that began at 3500 did in the warm-up's last moment


def test_disaggregated_workers_report_what_is_theirs() -> None:
    """Prefill workers only prefill, decode workers only decode: together they give the same profile as colocated ones."""
    steps: list[tuple[int, Message]] = [(0, switch("n-w0", Role.PREFILL)), (0, switch("n-w1", Role.DECODE))]
    for second in range(6):
        prefill = heartbeat("n-w0", 0, 0.0, 0.0, 0, prefill_tokens=100 * second)
        steps += [(1000 * second, prefill), (1000 * second, heartbeat("n-w1", 5 * second, 0.2, 0.0, 8))]
    turn = request(generated=9, new=5, queue_s=0.2, decode_s=3.0, env_s=0.8)
    _, (profile,) = run(*steps, *((5000, turn) for _ in range(50)), (5000, finished(0)))
    assert (profile.r, profile.dL) == (25 * 8 / 50, 500 / 50)
    assert profile.t_prefill_s == pytest.approx(1e-4) and profile.A_s + 8 * profile.b_s == pytest.approx(0.2)
    assert profile.theta == pytest.approx(
        50 * 0.8 / (25 * 8 * 0.2)
    )  # 40 s at environments, 40 s times sequences decoding
    assert profile.T_over_s == CORE.config.cold_start.T_over_s  # colocated turns alone can tell it


def test_overhead_is_what_colocated_turns_take_beyond_the_model() -> None:
    steps: list[tuple[int, Message]] = [
        (1000 * second, heartbeat(worker, 5 * second, 0.1, 0.0, 5, prefill_tokens=1000 * second))
        for second in range(11)
        for worker in ("n-w0", "n-w1")
    ]
    # 500 turns in 10 s on two workers, each turn 1.0 s with them: 25 at a worker. Prefill 25 * 40 * 1e-4, decode 1 * 0.1.
    turn = request(generated=2, new=4, queue_s=0.6, decode_s=0.4)
    _, (profile,) = run(*steps, *((10_000, turn) for _ in range(500)), (10_000, finished(0)))
    assert profile.dL == 40 and profile.r == 1
    assert profile.T_over_s == pytest.approx(1.0 - 0.1 - (profile.A_s + 25 * profile.b_s), abs=1e-6)


def test_repeated_and_older_steps_emit_nothing() -> None:
    state, _ = run((0, finished(3)))
    for batch in (3, 2):
        again, profiles = run((1, finished(batch)), state=state)
        assert again == state and profiles == []


@pytest.mark.parametrize(
    "message",
    [
        msgspec.structs.replace(request(), decode_s=float("nan")),
        msgspec.structs.replace(request(), generated_tokens=-1),
        msgspec.structs.replace(heartbeat("n-w0", 1, 0, 0, 1), decode_s=float("inf")),
        msgspec.structs.replace(heartbeat("n-w0", 1, 0, 0, 1), decode_iterations=-5),
        OperationTimed(operation="x", worker="", took_s=-1.0),
        msgspec.structs.replace(trajectory(3, 1.0), turns=-3),
        finished(-1),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(message: Message) -> None:
    state, effects = CORE.step(CORE.initial(), Input(0, message))
    assert state == CORE.initial() and [type(each) for each in effects] == [Refuse]


def test_state_survives_a_checkpoint() -> None:
    state, _ = run(*heartbeats_at_two_batch_sizes(), (1, request()), (2, finished(0)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State) == state


# ---- the sample of trajectories that the planner replays ----


def turns(trajectory: str, *numbers: tuple[int, int, float]) -> Sample:
    return played(Sample(), trajectory, *numbers)


def played(sample: Sample, trajectory: str, *numbers: tuple[int, int, float]) -> Sample:
    for turn, (new, reply, env_s) in enumerate(numbers):
        sample = sample.with_turn(trajectory, turn, new, reply, env_s)
    return sample


def test_a_trajectory_whose_every_turn_was_heard_enters_the_sample() -> None:
    sample = turns("a", (100, 10, 0.5), (20, 11, 1.25)).with_end("a", 2)
    assert sample.complete == ((100, 10, 500, 20, 11, 1250),) and sample.following == {}
    late = turns("a", (100, 10, 0.5)).with_end("a", 2).with_turn("a", 1, 20, 11, 1.25)
    assert late.complete == sample.complete  # the last turn's telemetry came after the end


def test_a_trajectory_with_a_hole_or_a_failure_does_not() -> None:
    assert turns("a", (100, 10, 0.5)).with_turn("a", 2, 1, 1, 0.0).with_end("a", 3).complete == ()
    assert turns("a", (100, 10, 0.5)).with_end("a", 3).following == {}
    assert turns("a", (100, 10, 0.5)).without("a").with_end("a", 1).complete == ()
    assert Sample().with_turn("a", 3, 1, 1, 0.0) == Sample() and Sample().with_end("a", 3) == Sample()
    again = turns("a", (100, 10, 0.5)).with_turn("a", 0, 100, 12, 0.5).with_end("a", 1)
    assert again.complete == ((100, 12, 500),)  # tried again from the beginning


def test_the_sample_is_bounded_and_keeps_the_newest() -> None:
    sample = Sample()
    for index in range(200):
        sample = played(sample, f"t{index}", *[(index, 1, 0.0)] * 100).with_end(f"t{index}", 100)
    assert len(sample.complete) == 2560 // 100 and sample.complete[-1][0] == 199
    for index in range(200):
        sample = sample.with_turn(f"u{index}", 0, 1, 1, 0.0)
    assert len(sample.following) == 96
    assert sample.aged().aged().following == {}


def test_the_profile_carries_the_sample() -> None:
    steps: list[tuple[int, Message]] = [(0, request(generated=9, new=5, env_s=0.25)), (1, trajectory(1, 0.25))]
    steps[1] = (1, msgspec.structs.replace(steps[1][1], trajectory=TrajectoryId("t")))
    _, (profile,) = run(*steps, (2, finished(0)))
    assert profile.sample == ((5, 9, 250),)


def test_an_engine_of_one_pass_pays_its_fixed_part_for_prompts_alone() -> None:
    """t_prefill is what a token adds; on prefill workers A comes on top of every turn's iteration."""
    fused = RuntimeTrackerCore(msgspec.structs.replace(CORE.config, fused=True))
    state = fused.initial()
    steps: list[tuple[int, Message]] = [(0, switch("n-w0", Role.PREFILL)), (0, switch("n-w1", Role.DECODE))]
    for second in range(6):
        told = heartbeat("n-w0", 0, 0.0, 0.0, 0, prefill_tokens=1000 * second)
        told = msgspec.structs.replace(told, prefill_s=second * (1000 * 2e-5 + 10 * 0.008))  # ten turns of 100 tokens
        steps += [(1000 * second, told), (1000 * second, heartbeat("n-w1", 100 * second, 0.008, 0.0, 8))]
    steps += [(5000, request(new=100)) for _ in range(50)]
    profiles: list[WorkloadProfile] = []
    for now_ms, message in [*steps, (5000, finished(0))]:
        state, effects = fused.step(state, Input(now_ms, message))
        profiles += [each.message for each in effects if isinstance(each, Send)]  # type: ignore[misc]
    (profile,) = profiles
    assert profile.t_prefill_s + profile.A_s / 100 == pytest.approx(2e-5 + 0.008 / 100)
