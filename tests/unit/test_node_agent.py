"""The node agent's core: fencing, ends, kills, reclaims, the trainer."""

from __future__ import annotations

from pathlib import Path

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.ids import Incarnation, NodeId, WorkerId
from messages.node_agent import Kill, Launch
from messages.orchestrator import GpuFree, WorkerGone
from services.node_agent.config import RESTART_FIRST_MS, RESTART_MOST_MS, STEADY_MS, Config, command_line, environment
from services.node_agent.core import (
    Adopted,
    Ended,
    Exited,
    NodeAgentCore,
    Restored,
    Signal,
    Spawn,
    Started,
    StartFailed,
    Stop,
    StreamWentBack,
)
from services.runtime.core import Input, Note, Refuse, Send, Tick
from tests.unit.executing import JOB, START_MS

GRACE_MS = JOB.timeouts.kill_grace_ms


class Agent:
    """The core of one node, restored; spawned processes start at once."""

    def __init__(self, node: str = "p0", *before: object) -> None:
        self.core = NodeAgentCore(Config.of(JOB, node, "job.toml"))
        self.state = self.core.initial()
        self.now_ms = START_MS
        self.refusals: list[str] = []
        self.first = self.say(*before, Restored())

    def say(self, *messages: object, seq: int = 0) -> list[object]:
        found: list[object] = []
        for message in messages:
            self.state, effects = self.core.step(self.state, Input(self.now_ms, message, seq))
            for effect in effects:
                if isinstance(effect, Refuse):
                    self.refusals.append(effect.reason)
                elif isinstance(effect, Send):
                    found.append(effect.message)
                elif not isinstance(effect, Note):
                    found.append(effect)
                if isinstance(effect, Spawn):
                    found += self.say(Started(effect.worker, effect.incarnation))
        return found

    def wait(self, ms: int) -> list[object]:
        self.now_ms += ms
        return self.say(Tick())


def launch(worker: str = "p0-w0", incarnation: int = 1, *gpus: int) -> Launch:
    return Launch(
        worker=WorkerId(worker), incarnation=Incarnation(incarnation), gpus=gpus or (0,), service="rollout_worker"
    )


def kill(worker: str = "p0-w0", incarnation: int = 1, grace_ms: int = GRACE_MS) -> Kill:
    return Kill(worker=WorkerId(worker), incarnation=Incarnation(incarnation), grace_ms=grace_ms, reason="plan")


def exited(worker: str = "p0-w0", incarnation: int = 1, how: str = "exit:1") -> Exited:
    return Exited(WorkerId(worker), Incarnation(incarnation), how)


def spawn(worker: str = "p0-w0", incarnation: int = 1, *gpus: int, service: str = "rollout_worker") -> Spawn:
    return Spawn(WorkerId(worker), Incarnation(incarnation), gpus or (0,), service)


def signal(hard: bool, worker: str = "p0-w0", incarnation: int = 1) -> Signal:
    return Signal(WorkerId(worker), Incarnation(incarnation), hard)


def reclaimed(notice_ms: int = 0, *gpus: int) -> GpuReclaimed:
    return GpuReclaimed(node=NodeId("p0"), gpus=gpus or (0,), notice_ms=notice_ms)


def available(*gpus: int) -> GpuAvailable:
    return GpuAvailable(node=NodeId("p0"), gpus=gpus or (0,))


def gone(reason: str, worker: str = "p0-w0", incarnation: int = 1) -> WorkerGone:
    return WorkerGone(worker=WorkerId(worker), incarnation=Incarnation(incarnation), reason=reason)


def free(worker: str = "p0-w0", incarnation: int = 1, *gpus: int) -> GpuFree:
    return GpuFree(
        node=NodeId(worker[:2]), gpus=gpus or (0,), worker=WorkerId(worker), incarnation=Incarnation(incarnation)
    )


def test_a_launch_starts_once_and_its_end_is_reported_once() -> None:
    agent = Agent()
    assert agent.say(launch(), launch(), launch()) == [spawn()]
    assert agent.state.workers == (("p0-w0", 1),)
    assert agent.say(exited()) == [gone("exit:1"), free()]
    assert agent.say(exited()) == []
    assert agent.say(launch()) == [gone("exit:1")], (
        "an incarnation that ended is not started again: its end is told again"
    )
    assert agent.say(launch(incarnation=2)) == [spawn(incarnation=2)]


def test_a_newer_incarnation_waits_for_the_older_one_to_end() -> None:
    agent = Agent()
    agent.say(launch(incarnation=1))
    assert agent.say(launch(incarnation=2)) == [signal(False)]
    assert agent.say(launch(incarnation=2)) == []
    assert agent.wait(GRACE_MS) == [signal(True)]
    assert agent.say(exited(how="signal:9")) == [gone("killed:superseded"), free()]
    late = [gone("killed:superseded"), spawn(incarnation=2)]
    assert agent.say(launch(incarnation=1), launch(incarnation=2)) == late
    assert agent.say(launch(incarnation=1)) == []


def test_kill_terminates_then_kills_after_the_grace() -> None:
    agent = Agent()
    agent.say(launch())
    assert agent.say(kill(), kill()) == [signal(False)]
    assert agent.core.next_due_ms(agent.state) == START_MS + GRACE_MS
    assert agent.wait(GRACE_MS - 1) == []
    assert agent.wait(1) == [signal(True)]
    assert agent.wait(GRACE_MS) == []
    assert agent.say(exited(how="signal:9")) == [gone("killed:plan"), free()]


def test_a_hurried_kill_brings_sigkill_forward() -> None:
    agent = Agent()
    agent.say(launch(), kill())
    assert agent.say(kill(grace_ms=0)) == [signal(True)]


def test_a_kill_of_what_is_gone_is_answered_again_under_another_id() -> None:
    agent = Agent()
    agent.say(launch(), exited())
    ids = set()
    for _ in range(2):
        agent.state, effects = agent.core.step(agent.state, Input(agent.now_ms, kill()))
        (answer,) = effects
        assert isinstance(answer, Send) and answer.message == gone("exit:1")
        ids.add(answer.msg_id)
    assert len(ids) == 2 and None not in ids


def test_a_launch_that_comes_after_its_kill_is_not_started() -> None:
    agent = Agent()
    assert agent.say(kill(incarnation=3)) == [gone("not running", incarnation=3)]
    assert agent.say(launch(incarnation=3)) == [gone("not running", incarnation=3)]
    assert agent.say(launch(incarnation=4)) == [spawn(incarnation=4)]


def test_a_kill_of_an_older_incarnation_does_not_touch_the_newer() -> None:
    agent = Agent()
    agent.say(launch(incarnation=2))
    assert agent.say(kill(incarnation=1)) == [gone("not running")]
    assert agent.state.workers == (("p0-w0", 2),)


def test_a_kill_of_an_incarnation_before_the_last_does_not_tell_the_lasts_end() -> None:
    agent = Agent()
    agent.say(launch(incarnation=2), exited(incarnation=2))
    assert agent.say(kill(incarnation=1)) == [gone("not running", incarnation=1)]
    assert agent.say(kill(incarnation=2)) == [gone("exit:1", incarnation=2)]


def test_a_process_that_is_still_being_started_is_signalled_once_it_is_there() -> None:
    agent = Agent()
    agent.state, _ = agent.core.step(agent.state, Input(agent.now_ms, launch()))
    assert agent.say(kill(grace_ms=0)) == [], "there is nothing to signal yet"
    assert agent.say(Started(WorkerId("p0-w0"), Incarnation(1))) == [signal(True)]
    assert agent.say(exited(how="signal:9")) == [gone("killed:plan"), free()]


def test_a_reclaim_without_notice_kills_at_once_without_sigterm() -> None:
    agent = Agent()
    agent.say(launch(), launch("p0-w1", 1, 1))
    assert agent.say(reclaimed(), seq=5) == [signal(True)]
    assert agent.say(exited(how="signal:9")) == [gone("killed:reclaimed"), free()]


def test_a_reclaim_with_notice_kills_what_remains_at_the_deadline() -> None:
    agent = Agent()
    agent.say(launch(), launch("p0-w1", 1, 1))
    assert agent.say(reclaimed(5_000, 0, 1), seq=5) == []
    agent.say(kill())
    agent.say(exited(how="exit:0"))
    assert agent.say(launch("p0-w0", 2)) == [], "nothing starts on GPUs under notice"
    assert agent.wait(4_999) == []
    assert agent.wait(1) == [signal(True, "p0-w1")]


def test_the_notice_runs_from_when_the_stream_took_the_event() -> None:
    agent = Agent()
    agent.say(launch())
    agent.now_ms += 10_000
    agent.state, effects = agent.core.step(agent.state, Input(agent.now_ms - 4_000, reclaimed(5_000), 5))
    assert effects == ()
    assert agent.core.next_due_ms(agent.state) == agent.now_ms + 1_000
    assert agent.wait(1_000) == [signal(True)]


def test_a_reclaim_taken_back_is_not_enforced_and_a_later_process_is_not_its_victim() -> None:
    agent = Agent()
    agent.say(launch())
    agent.say(reclaimed(5_000), seq=5)
    agent.say(available(), seq=6)
    agent.say(reclaimed(5_000), seq=5)  # delivered again
    assert agent.wait(6_000) == []
    agent.say(reclaimed(), seq=7)
    agent.say(exited(how="signal:9"))
    agent.now_ms += 1
    assert agent.say(launch(incarnation=2)) == [spawn(incarnation=2)]
    assert agent.wait(60_000) == []


def test_a_reclaim_that_was_enforced_and_is_delivered_again_is_no_second_one() -> None:
    agent = Agent()
    agent.say(launch())
    assert agent.say(reclaimed(), seq=7) == [signal(True)]
    agent.say(exited(how="signal:9"))
    assert agent.say(launch(incarnation=2)) == [spawn(incarnation=2)]
    assert agent.say(reclaimed(), seq=7) == []


def test_a_restarted_agent_adopts_reports_and_enforces_what_it_missed() -> None:
    adopted = Adopted(WorkerId("p0-w0"), Incarnation(3), (0,), "rollout_worker", START_MS - 9_000)
    late = Adopted(WorkerId("p0-w1"), Incarnation(2), (1,), "rollout_worker", START_MS - 9_000)
    agent = Agent("p0", Ended(WorkerId("p0-w1"), Incarnation(1), "exit:1"), adopted, late)
    assert agent.first == []
    assert agent.state.workers == (("p0-w0", 3), ("p0-w1", 2))
    assert agent.say(launch("p0-w0", 3), launch("p0-w1", 1, 1)) == []
    assert agent.say(exited("p0-w1", 2, "exit:unknown")) == [
        gone("exit:unknown", "p0-w1", 2),
        free("p0-w1", 2, 1),
    ]
    history = Input(START_MS - 5_000, reclaimed(1_000), 9)
    core = agent.core
    state = core.initial()
    for event in (Input(START_MS, adopted), history, Input(START_MS, Restored())):
        state, effects = core.step(state, event)
    assert Signal(WorkerId("p0-w0"), Incarnation(3), True) in effects


def test_what_cannot_start_is_reported() -> None:
    agent = Agent()
    agent.state, _ = agent.core.step(agent.state, Input(agent.now_ms, launch()))
    failed = StartFailed(WorkerId("p0-w0"), Incarnation(1), "no such file")
    assert agent.say(failed) == [gone("launch_failed: no such file"), free()]


def test_the_trainer_runs_from_the_start_and_comes_back_later_each_time() -> None:
    agent = Agent("t0")
    assert agent.first == [spawn("t0-t0", 1, 0, 1, service="trainer")]
    pauses = []
    for incarnation in range(1, 9):
        assert agent.say(exited("t0-t0", incarnation))[0] == gone("exit:1", "t0-t0", incarnation)
        due_ms = agent.core.next_due_ms(agent.state)
        assert due_ms is not None
        pauses.append(due_ms - agent.now_ms)
        assert agent.wait(pauses[-1] - 1) == []
        assert agent.wait(1) == [spawn("t0-t0", incarnation + 1, 0, 1, service="trainer")]
    assert pauses[:3] == [RESTART_FIRST_MS, 2 * RESTART_FIRST_MS, 4 * RESTART_FIRST_MS]
    assert pauses[-1] == RESTART_MOST_MS
    agent.wait(STEADY_MS)
    agent.say(exited("t0-t0", 9))
    assert agent.core.next_due_ms(agent.state) == agent.now_ms + RESTART_FIRST_MS


def test_the_trainer_goes_on_after_the_incarnations_in_the_stream() -> None:
    agent = Agent("t0", Ended(WorkerId("t0-t0"), Incarnation(4), "exit:1"))
    assert agent.first == [spawn("t0-t0", 5, 0, 1, service="trainer")]


def test_stop_ends_everything_and_starts_nothing() -> None:
    agent = Agent("t0")
    agent.say(launch("t0-w0"))
    assert agent.say(Stop()) == [signal(False, "t0-t0"), signal(False, "t0-w0")]
    assert agent.say(exited("t0-t0", how="exit:0"))[0] == gone("killed:shutdown", "t0-t0")
    assert agent.wait(GRACE_MS) == [signal(True, "t0-w0")]
    agent.say(exited("t0-w0", how="signal:9"))
    assert agent.say(launch("t0-w1", 1, 1)) == []
    assert agent.wait(60_000) == []
    assert agent.state.processes == ()


def test_nonsense_is_refused() -> None:
    agent = Agent()
    agent.say(launch("r0-w0"), launch("p0-w0", 1, 7), kill("r0-w0"), "?")
    trainer = Launch(worker=WorkerId("p0-w0"), incarnation=Incarnation(1), gpus=(0,), service="shell")
    agent.say(trainer, GpuReclaimed(node=NodeId("r0"), gpus=(0,)))
    assert len(agent.refusals) == 5, "the elastic scheduler refuses the event: here it is only ignored"
    assert agent.state.claims == ()
    assert agent.state.processes == ()


def test_command_line_and_environment() -> None:
    config = Config.of(JOB, "p0", Path("/jobs/job.toml"))
    command = command_line(config, "rollout_worker", "p0-w1", Incarnation(2))
    assert command[1:] == (
        *("-m", "services.cli", "service", "rollout_worker", "-c", "/jobs/job.toml"),
        *("--worker", "p0-w1", "--incarnation", "2"),
    )
    surroundings = environment(config, "rollout_worker", (1,))
    assert (surroundings["CUDA_VISIBLE_DEVICES"], surroundings["OMP_NUM_THREADS"]) == ("1", "1")


def test_a_stream_that_went_back_says_newer_things_under_older_numbers() -> None:
    agent = Agent()
    agent.say(launch())
    agent.say(available(), seq=90)
    agent.say(reclaimed(5_000), seq=7)
    assert agent.wait(5_000) == [], "an older reclaim, delivered late"
    agent.say(StreamWentBack())
    agent.say(reclaimed(5_000), seq=8)
    assert agent.wait(5_000) == [signal(True)]


def test_what_has_ended_is_named_in_heartbeats_so_that_no_incarnation_is_given_out_twice() -> None:
    agent = Agent()
    agent.say(launch(), launch("p0-w1", 4, 1), exited())
    assert (agent.state.workers, agent.state.ended) == ((("p0-w1", 4),), (("p0-w0", 1),))
    agent.say(launch(incarnation=2))
    assert agent.state.ended == ()
