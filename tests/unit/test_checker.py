"""The checker: a sound run passes, and each way of breaking one is found. A checker that cannot fail is a defect."""

from __future__ import annotations

import argparse
import json

import pytest
from msgspec.structs import replace

from messages.agent import AttemptLogged, RequestInterrupted, TurnFinished, VersionSpan
from messages.envelope import encode
from messages.pipeline_scheduler import BatchItem, BatchReady, StepFinished, TrajectoryCompleted
from messages.subjects import message_id, subject_of
from services.checker import collect
from services.checker.core import check
from services.checker.core_report import Expected, Journalled, Report, Trimmed, Violation
from services.cli import check as command
from services.jobfile import JobFile, JobSection, PipelineSection
from services.runtime.bus import StreamSpec
from services.runtime.bus_memory import MemoryBroker
from services.runtime.dead_letters import dead_letter

GROUPS, SIZE, BATCHES, TURNS = 2, 2, 2, 2
EXPECTED = Expected(batch_trajectories=GROUPS * SIZE, group_size=SIZE, staleness=1)


class Run:
    """The records of a sound run: two batches of two groups of two; every first turn was interrupted once at 2 tokens."""

    def __init__(self) -> None:
        self.journal: list[Journalled] = []
        self.attempts: list[AttemptLogged] = []
        self.ends: list[TrajectoryCompleted] = []
        self.batches: list[BatchReady] = []
        self.steps: list[StepFinished] = []
        for batch in range(BATCHES):
            for group in range(GROUPS):
                for member in range(SIZE):
                    self._trajectory(batch, f"b{batch}-g{group}", f"b{batch}-g{group}-m{member}")
            items = tuple(
                BatchItem(end.trajectory, end.group, end.reward, end.status, end.journal)
                for end in self.ends
                if end.batch == batch
            )
            self.batches.append(BatchReady(batch=batch, items=items))
            self.steps.append(
                StepFinished(
                    batch=batch,
                    version=batch + 1,
                    train_s=1.0,
                    trained_tokens=1,
                    reward_mean=1.0,
                    reward_std=0.0,
                    loss=0.0,
                    grad_norm=0.0,
                    zero_variance_groups=0,
                )
            )

    def _trajectory(self, batch: int, group: str, trajectory: str) -> None:
        seqs = []
        for turn in range(TURNS):
            request = f"{trajectory}/{turn}/0-e-1"
            if turn == 0:
                self._log(request, 1, 0, 3, "interrupted")  # three made, two arrived
                self._write(
                    RequestInterrupted(
                        trajectory=trajectory, request=request, attempt=1, retry=0, worker="a-w0", prefix_len=0, received=2,
                        cause="worker_gone",
                    )
                )  # fmt: skip
                self._log(request, 2, 2, 3, "stop")
            else:
                self._log(request, 1, 0, 5, "stop")
            seqs.append(
                self._write(
                    TurnFinished(
                        trajectory=trajectory,
                        group=group,
                        batch=batch,
                        retry=0,
                        turn=turn,
                        request=request,
                        attempts=2 - turn,
                        prompt_new=[1],
                        reply=[5, 6, 7, 8, 9],
                        logprobs=[0.0] * 5,
                        spans=(VersionSpan(max(0, batch - 1), 0, 2), VersionSpan(batch, 2, 5)),
                        finish="stop",
                        action="x",
                        env_s=0.0,
                        wall_s=0.0,
                        worker="a-w0",
                    )
                )
            )
        self.ends.append(
            TrajectoryCompleted(
                trajectory=trajectory, group=group, batch=batch, retry=0, status="completed", reward=1.0, turns=TURNS,
                generated_tokens=5 * TURNS, min_version=max(0, batch - 1), max_version=batch, journal=tuple(seqs),
                env_s=0.0, wall_s=0.0,
            )
        )  # fmt: skip

    def _write(self, record: TurnFinished | RequestInterrupted) -> int:
        self.journal.append(Journalled(len(self.journal) + 1, record))
        return len(self.journal)

    def _log(self, request: str, attempt: int, start: int, generated: int, finish: str) -> None:
        entry = AttemptLogged(
            worker="a-w0", incarnation=1, request=request, attempt=attempt, start_offset=start, generated=0, version=0,
            finish="", at_ms=0,
        )  # fmt: skip
        self.attempts += [entry, replace(entry, generated=generated, finish=finish)]

    def check(self, expected: Expected = EXPECTED) -> Report:
        return check(
            expected,
            journal=self.journal,
            attempts=self.attempts,
            ends=self.ends,
            batches=self.batches,
            steps=self.steps,
        )

    # what a test plants

    def turn(self, index: int, **changes: object) -> None:
        turns = [at for at, entry in enumerate(self.journal) if isinstance(entry.record, TurnFinished)]
        at = turns[index]
        self.journal[at] = Journalled(self.journal[at].seq, replace(self.journal[at].record, **changes))

    def cut(self, index: int, **changes: object) -> None:
        cuts = [at for at, entry in enumerate(self.journal) if isinstance(entry.record, RequestInterrupted)]
        at = cuts[index]
        self.journal[at] = Journalled(self.journal[at].seq, replace(self.journal[at].record, **changes))

    def end(self, index: int, **changes: object) -> None:
        self.ends[index] = replace(self.ends[index], **changes)

    def log(self, index: int, **changes: object) -> None:
        self.attempts[index] = replace(self.attempts[index], **changes)

    def item(self, batch: int, index: int, **changes: object) -> None:
        items = list(self.batches[batch].items)
        items[index] = replace(items[index], **changes)
        self.batches[batch] = replace(self.batches[batch], items=tuple(items))

    def again(self, record: TurnFinished | RequestInterrupted) -> None:
        self._write(record)


def first_turn(run: Run) -> TurnFinished:
    return next(entry.record for entry in run.journal if isinstance(entry.record, TurnFinished))


def first_cut(run: Run) -> RequestInterrupted:
    return next(entry.record for entry in run.journal if isinstance(entry.record, RequestInterrupted))


def test_a_sound_run_passes():
    report = Run().check()
    assert report.violations == () and report.ok
    assert (report.completed, report.failed, report.lost, report.duplicated) == (8, 0, 0, 0)
    assert (report.delivered, report.regenerated, report.lost_with_edge) == (80, 0, 0)
    assert (report.undelivered, report.interrupted) == (8, 8)  # each dead worker had made one token more
    assert (report.staleness_max, report.batches, report.trained) == (1, 2, 2)


def test_a_run_that_goes_on_passes():
    run = Run()
    run.batches.pop()
    run.steps.pop()
    run.ends.pop()
    assert run.check().violations == ()


PLANTED = {
    # trajectories
    "ended_twice": lambda run: run.ends.append(run.ends[0]),
    "turn_twice": lambda run: run.again(replace(first_turn(run), request="b0-g0-m0/0/1-f-1")),
    "reply_twice": lambda run: run.again(replace(first_turn(run), turn=9)),
    "turn_unfinished": lambda run: run.turn(0, finish="interrupted"),
    "turn_torn": lambda run: run.turn(0, logprobs=[0.0]),
    "spans_torn": lambda run: run.turn(0, spans=(VersionSpan(0, 0, 2), VersionSpan(0, 3, 5))),
    "end_wrong": lambda run: run.end(0, generated_tokens=9),
    "journal_missing": lambda run: run.journal.remove(run.journal[1]),
    "journal_wrong": lambda run: run.turn(0, trajectory="b9-g9-m9"),
    "turns_unordered": lambda run: (run.turn(0, turn=1), run.turn(1, turn=0)),
    "turn_stray": lambda run: run.again(replace(first_turn(run), turn=2, request="b0-g0-m0/2/0-e-1")),
    "turn_shared": lambda run: run.end(1, journal=run.ends[0].journal),
    # batches
    "end_missing": lambda run: run.ends.remove(run.ends[0]),
    "batch_twice": lambda run: run.batches.append(replace(run.batches[0], items=())),
    "counted_twice": lambda run: run.item(1, 0, trajectory="b0-g0-m0"),
    "group_size": lambda run: run.item(0, 0, group="b0-g1"),
    "group_twice": lambda run: run.item(1, 0, group="b0-g1"),
    "batch_size": lambda run: run.batches.append(replace(run.batches.pop(), items=())),
    "item_wrong": lambda run: run.item(0, 0, reward=0.5),
    "item_failed": lambda run: (run.item(0, 0, status="failed"), run.end(0, status="failed")),
    "left_behind": lambda run: run.again(replace(first_turn(run), trajectory="b0-g0-m7", request="b0-g0-m7/0/0-e-1")),
    "trained_twice": lambda run: run.steps.append(replace(run.steps[0], loss=2.0)),
    "trained_unordered": lambda run: run.steps.pop(0),
    "trained_unready": lambda run: run.batches.pop(),
    "version_wrong": lambda run: run.steps.append(replace(run.steps.pop(), version=9)),
    # staleness
    "too_stale": lambda run: [replace_version(run, 7, -1)],
    "too_new": lambda run: [replace_version(run, 0, 2)],
    # requests
    "regenerated": lambda run: run.log(2, start_offset=1) or run.log(3, start_offset=1),
    "start_gap": lambda run: run.log(2, start_offset=3) or run.log(3, start_offset=3),
    "prefix_gap": lambda run: run.cut(0, prefix_len=1),
    "prefix_lost": lambda run: run.turn(0, reply=[5], logprobs=[0.0], spans=(VersionSpan(0, 0, 1),)),
    "interrupted_twice": lambda run: run.again(first_cut(run)),
    "log_torn": lambda run: run.log(0, start_offset=1),
    "attempt_twice": lambda run: run.attempts.append(replace(run.attempts[0], worker="b-w0")),
    "unlogged": lambda run: [run.attempts.pop(0), run.attempts.pop(0)],
    "invented": lambda run: run.log(1, generated=1),
    "reply_short": lambda run: run.log(3, generated=4),
}


def replace_version(run: Run, trajectory: int, version: int) -> None:
    """All of a trajectory's last turn is of one version, and its end says so."""
    run.turn(trajectory * TURNS + 1, spans=(VersionSpan(version, 0, 5),))
    end = run.ends[trajectory]
    run.end(trajectory, min_version=min(version, end.min_version), max_version=max(version, end.max_version))


@pytest.mark.parametrize("rule", sorted(PLANTED))
def test_what_is_planted_is_found(rule):
    run = Run()
    PLANTED[rule](run)
    report = run.check()
    assert rule in {violation.rule for violation in report.violations}, report.violations
    assert not report.ok


def test_every_rule_has_a_test():
    import re
    from pathlib import Path

    import services.checker.core as core

    sources = "".join(path.read_text() for path in Path(core.__file__).parent.glob("core*.py"))
    rules = set(re.findall(r"found\.(?:add|again)\(\s*\"(\w+)\"", sources))
    assert rules == set(PLANTED)


@pytest.mark.parametrize(("rule", "count"), [("end_missing", 1), ("journal_missing", 1), ("left_behind", 1)])
def test_the_lost_are_counted(rule, count):
    run = Run()
    PLANTED[rule](run)
    assert run.check().lost == count


@pytest.mark.parametrize("rule", ["ended_twice", "turn_twice", "reply_twice", "counted_twice", "interrupted_twice"])
def test_duplicates_are_counted(rule):
    run = Run()
    PLANTED[rule](run)
    assert run.check().duplicated >= 1


def test_regenerated_tokens_are_counted_from_the_log_and_from_the_journal():
    run = Run()
    PLANTED["regenerated"](run)
    assert run.check().regenerated == 1
    run = Run()
    run.cut(0, received=2)
    run.again(replace(first_cut(run), attempt=2, prefix_len=0, received=1))
    assert run.check().regenerated >= 2


def test_what_an_agent_that_died_had_received_is_counted_apart():
    """A second agent runs the turn again under a request of its own; the first one's partial reply went with it."""
    run = Run()
    old = "b0-g0-m0/1/0-dead-1"
    run._log(old, 1, 0, 4, "")
    run.attempts[-1] = replace(run.attempts[-1], finish="interrupted")
    report = run.check()
    assert report.violations == () and report.lost_with_edge == 4
    run.again(replace(first_cut(run), request=old, received=3))
    run._log(old, 2, 3, 2, "interrupted")
    report = run.check()
    assert report.violations == () and report.lost_with_edge == 5


def test_a_retry_and_a_replaced_group_are_no_violation():
    run = Run()
    failed = replace(run.ends[0], status="failed", journal=(), turns=0, generated_tokens=0)
    run.end(0, retry=1)
    run.ends.insert(0, failed)
    for index in (0, 1):  # the turns belong to the retry
        run.turn(index, retry=1)
    run.cut(0, retry=1)
    run.ends.append(replace(run.ends[1], trajectory="b0-g5-m0", group="b0-g5", journal=(), turns=0, generated_tokens=0))
    report = run.check()
    assert report.violations == () and report.failed == 1


def test_held_out_episodes_belong_to_no_batch():
    run = Run()
    run._trajectory(7, "eval-v1", "eval-v1-m0")
    report = run.check()
    assert report.violations == () and report.completed == 8


def test_a_message_repeated_after_a_restart_is_harmless_where_that_is_allowed():
    run = Run()
    run.batches.append(run.batches[0])
    run.steps.append(run.steps[0])
    assert run.check().violations == ()


def test_a_purged_journal_is_not_held_against_a_run_and_a_hole_is():
    run = Run()
    del run.journal[:12]  # batch 0
    assert run.check(replace(EXPECTED, journal_from=13)).violations == ()
    del run.journal[1]
    assert "journal_missing" in {v.rule for v in run.check(replace(EXPECTED, journal_from=13)).violations}
    assert "journal_missing" in {v.rule for v in run.check().violations}


# --- reading


def test_a_torn_last_frame_is_left_out_and_a_broken_one_is_not():
    run = Run()
    frames = [collect.LENGTH.pack(len(encode(entry))) + encode(entry) for entry in run.attempts[:3]]
    data = b"".join(frames)
    assert list(collect.frames(data)) == run.attempts[:3]
    for cut in range(1, len(frames[-1])):
        assert list(collect.frames(data[:-cut])) == run.attempts[:2]
    with pytest.raises(collect.TornLogError):
        list(collect.frames(frames[0] + b"\xff\xff\xff\xff" + frames[1]))
    with pytest.raises(collect.TornLogError):
        list(collect.frames(collect.LENGTH.pack(3) + b"abc" + frames[1]))


def attempt_log(run: Run) -> bytes:
    """As a worker writes it."""
    return b"".join(collect.LENGTH.pack(len(encode(each))) + encode(each) for each in run.attempts)


async def _published(tmp_path, run: Run, **pipeline: object):
    broker = MemoryBroker()
    bus = broker.connect()
    await bus.ensure_stream(StreamSpec(name="demo_EV", subjects=("pearl.demo.ev.>",)))
    await bus.ensure_stream(StreamSpec(name="demo_JOURNAL", subjects=("pearl.demo.journal.>",)))
    await bus.ensure_stream(StreamSpec(name="demo_DEAD", subjects=("pearl.demo.dead.>",)))
    for index, message in enumerate([entry.record for entry in run.journal] + run.ends + run.batches + run.steps):
        await bus.publish_durable(subject_of("demo", message), encode(message), msg_id=f"{message_id(message)}:{index}")
    folder = tmp_path / "demo" / "attempts"
    folder.mkdir(parents=True)
    data = attempt_log(run)
    (folder / "a-w0.1.msgpack").write_bytes(data)
    job = JobFile(
        job=JobSection(data_dir=str(tmp_path)),
        pipeline=PipelineSection(batch_trajectories=GROUPS * SIZE, group_size=SIZE, **pipeline),
    )
    return bus, job


async def test_a_run_is_read_from_its_streams_and_files(tmp_path):
    bus, job = await _published(tmp_path, Run(), keep_journal=True)
    report = await collect.check(bus, job)
    assert report.violations == () and report.delivered == 80 and report.undelivered == 8


async def test_planted_faults_are_found_there_too(tmp_path):
    run = Run()
    PLANTED["regenerated"](run)
    PLANTED["ended_twice"](run)
    bus, job = await _published(tmp_path, run, keep_journal=True)
    await bus.publish_durable("pearl.demo.journal.x", b"nonsense", msg_id="n")
    (tmp_path / "demo" / "attempts" / "b-w0.1.msgpack").write_bytes(b"\x00\x00\x00\x01x")
    report = await collect.check(bus, job)
    assert {violation.rule for violation in report.violations} == {"regenerated", "ended_twice", "log_unreadable"}
    assert report.strays == 1 and "demo_JOURNAL" in report.stray[0]


async def test_what_was_refused_is_no_record_of_the_run(tmp_path):
    bus, job = await _published(tmp_path, Run(), keep_journal=True)
    forged = replace(Run().steps[0], batch=7)
    seq = await bus.publish_durable(subject_of("demo", forged), encode(forged), msg_id="forged")
    assert (await collect.check(bus, job)).violations
    letter = dead_letter("pipeline_scheduler", subject_of("demo", forged), encode(forged), "batch 7", seq)
    await bus.publish_durable(subject_of("demo", letter), encode(letter), msg_id="letter")
    report = await collect.check(bus, job)
    assert report.violations == () and report.strays == 1


async def test_a_journal_purged_on_the_way_passes_unless_it_was_to_be_kept(tmp_path):
    bus, job = await _published(tmp_path, Run(), keep_journal=False)
    await bus.purge("demo_JOURNAL", below_seq=13)
    assert (await collect.check(bus, job)).violations == ()
    await bus.purge("demo_JOURNAL", below_seq=1000)
    assert (await collect.check(bus, job)).violations == ()
    kept = replace(job, pipeline=replace(job.pipeline, keep_journal=True))
    assert "journal_missing" in {violation.rule for violation in (await collect.check(bus, kept)).violations}


# -- a broker that lost its last moments


def lose_the_last_trajectory(run: Run) -> None:
    """Its end and the record of its last turn are gone, its worker's log is not; the batch was trained all the same."""
    run.ends.pop()
    run.batches.pop()
    run.journal.pop()


def test_what_the_broker_lost_is_counted_where_it_is_known_to_have_and_a_violation_elsewhere():
    run = Run()
    lose_the_last_trajectory(run)
    assert not run.check().ok
    report = run.check(replace(EXPECTED, rewound=1))
    assert report.violations == ()
    assert (report.redone, report.forgotten, report.lost) == (5, 1, 0)


def test_a_train_step_that_the_broker_lost_leaves_a_gap_but_none_is_trained_twice():
    run = Run()
    del run.steps[0]
    assert not run.check().ok
    report = run.check(replace(EXPECTED, rewound=1))
    assert (report.violations, report.forgotten, report.trained) == ((), 1, 1)
    run.steps.append(replace(run.steps[0], reward_mean=9.0))
    assert [each.rule for each in run.check(replace(EXPECTED, rewound=1)).violations] == ["trained_twice"]


@pytest.mark.parametrize(
    "rule", ["regenerated", "ended_twice", "turn_twice", "counted_twice", "too_stale", "end_missing"]
)
def test_a_loss_excuses_nothing_else(rule: str):
    run = Run()
    PLANTED[rule](run)
    assert rule in {each.rule for each in run.check(replace(EXPECTED, rewound=1)).violations}


# -- streams of which the oldest messages were trimmed


async def _in_time(tmp_path, run: Run, **broker_options: object):
    """The run in the order in which it happens: turns, ends, batch, train step; batch 1 ends its episodes after batch 0's step."""
    broker = MemoryBroker(**broker_options)
    bus = broker.connect()
    for family in ("EV", "JOURNAL", "DEAD"):
        await bus.ensure_stream(StreamSpec(name=f"demo_{family}", subjects=(f"pearl.demo.{STREAMS[family]}.>",)))
    for entry in run.journal:
        await bus.publish_durable(subject_of("demo", entry.record), encode(entry.record), msg_id=f"j{entry.seq}")
    for batch in range(len(run.batches)):
        events = [*(end for end in run.ends if end.batch == batch), run.batches[batch], run.steps[batch]]
        for event in events:
            await bus.publish_durable(subject_of("demo", event), encode(event), msg_id=message_id(event))
    job = JobFile(
        job=JobSection(data_dir=str(tmp_path)),
        pipeline=PipelineSection(batch_trajectories=GROUPS * SIZE, group_size=SIZE, staleness=0, keep_journal=True),
    )
    return bus, job


STREAMS = {"EV": "ev", "JOURNAL": "journal", "DEAD": "dead"}


def own_versions(run: Run) -> Run:
    """As with staleness 0: every token of batch k is of version k."""
    for index, entry in enumerate(run.journal):
        if isinstance(entry.record, TurnFinished):
            run.journal[index] = Journalled(
                entry.seq, replace(entry.record, spans=(VersionSpan(entry.record.batch, 0, 5),))
            )
    for index, end in enumerate(run.ends):
        run.end(index, min_version=end.batch)
    return run


@pytest.mark.parametrize("gone", range(12))
async def test_trimmed_events_are_said_and_not_held_against_a_run(tmp_path, gone: int):
    """Whatever their number: of six events a batch, four ends, the batch and its train step."""
    bus, job = await _in_time(tmp_path, own_versions(Run()))
    await bus.purge("demo_EV", below_seq=gone + 1)
    report = await collect.check(bus, job)
    assert report.violations == () and report.lost == 0
    assert [each.gone for each in report.trimmed] == ([gone] if gone else [])
    assert report.unseen == (
        gone if gone < 4 else 4 if gone == 4 else 0 if gone < 7 else min(gone - 6, 4) if gone < 11 else 0
    )
    assert all(each.from_ms > 0 and each.stream == "demo_EV" for each in report.trimmed)


async def test_what_is_left_of_trimmed_events_is_checked_all_the_same(tmp_path):
    run = own_versions(Run())
    del run.ends[-1]  # of batch 1, which began after the train step of batch 0
    bus, job = await _in_time(tmp_path, run)
    await bus.purge("demo_EV", below_seq=3)
    report = await collect.check(bus, job)
    assert {violation.rule for violation in report.violations} == {"end_missing"} and report.lost == 1
    assert report.unseen == 2, "the two ends of batch 0 that were trimmed"


async def test_no_more_ends_are_unseen_than_events_were_trimmed(tmp_path):
    """Batch 1 may have begun before the oldest event that is left; but one event is gone, and it misses four ends."""
    run = own_versions(Run())
    del run.ends[4:]
    bus, job = await _in_time(tmp_path, run)
    job = replace(job, pipeline=replace(job.pipeline, staleness=1))
    await bus.purge("demo_EV", below_seq=2)  # an end of batch 0
    report = await collect.check(bus, job)
    assert {violation.rule for violation in report.violations} == {"end_missing"}
    assert (report.unseen, report.lost) == (1, 4)


@pytest.mark.parametrize(("turn_ms", "lost"), [(160_000, 0), (160_001, 1), (0, 0)])
def test_an_end_is_not_trimmed_whose_last_turn_was_stored_after_the_oldest_event_left(turn_ms, lost):
    run = Run()
    late = {max(end.journal) for end in run.ends if end.batch == 1}
    run.journal = [replace(each, at_ms=turn_ms if each.seq in late else 5) for each in run.journal]
    run.ends.pop()
    expected = replace(EXPECTED, whole_from=2, events_gone=50, events_from_ms=100_000)
    report = run.check(expected)
    assert (report.lost, report.unseen, len(report.violations)) == (lost, 1 - lost, lost)


def test_train_steps_are_held_against_one_another_after_a_trim():
    run = Run()
    run.batches, run.steps = run.batches[1:], run.steps[1:]
    run.ends = run.ends[4:]
    late = replace(EXPECTED, whole_from=1)
    assert run.check(late).violations == ()
    run.steps.append(replace(run.steps[0], batch=3, version=4))
    assert {"trained_unordered", "trained_unready"} == {violation.rule for violation in run.check(late).violations}


async def _refused(bus, event) -> None:
    """An event that the pipeline scheduler refused, and its letter about it."""
    seq = await bus.publish_durable(subject_of("demo", event), encode(event), msg_id=f"again {event}")
    letter = dead_letter("pipeline_scheduler", subject_of("demo", event), encode(event), "refused", seq)
    await bus.publish_durable(subject_of("demo", letter), encode(letter), msg_id=f"letter {seq}")


@pytest.mark.parametrize("emptied", [True, False])
async def test_what_may_have_been_refused_is_not_judged_where_its_letter_is_gone(tmp_path, emptied):
    run = own_versions(Run())
    bus, job = await _in_time(tmp_path, run)
    await _refused(bus, replace(run.steps[0], batch=7, version=8))
    await _refused(bus, replace(run.ends[0], reward=0.5, generated_tokens=1))
    assert (await collect.check(bus, job)).violations == ()
    if not emptied:
        await bus.publish_durable("pearl.demo.dead.agent", b"about something else", msg_id="other")
    await bus.purge("demo_DEAD", below_seq=3)  # days later
    report = await collect.check(bus, job)
    assert report.violations == ()
    assert [(each.stream, each.gone, each.from_ms > 0) for each in report.trimmed] == [("demo_DEAD", 2, not emptied)]
    assert (report.unjudged, report.completed, report.trained) == (4, 8, 2), "the train steps, and the other end"


async def test_what_is_younger_than_the_letters_left_is_judged_as_ever(tmp_path):
    now = [1_000_000]
    run = own_versions(Run())
    bus, job = await _in_time(tmp_path, run, clock=lambda: now[0])
    await _refused(bus, replace(run.steps[0], batch=7, version=8))
    await bus.purge("demo_DEAD", below_seq=2)
    now[0] += 60_001
    late = replace(run.steps[0], batch=9, version=10)
    await bus.publish_durable(subject_of("demo", late), encode(late), msg_id="late")
    twice = replace(run.ends[0], reward=0.25)
    await bus.publish_durable(subject_of("demo", twice), encode(twice), msg_id="twice")
    report = await collect.check(bus, job)
    rules = {violation.rule for violation in report.violations}
    assert {"trained_unready", "item_wrong"} <= rules


async def test_a_lost_end_is_found_though_letters_are_gone(tmp_path):
    run = own_versions(Run())
    lost = run.ends.pop(5)
    bus, job = await _in_time(tmp_path, run)
    await _refused(bus, replace(lost, reward=0.5))
    await bus.purge("demo_DEAD", below_seq=2)
    report = await collect.check(bus, job)
    assert ({violation.rule for violation in report.violations}, report.lost) == ({"end_missing"}, 1)


async def test_an_event_stream_with_nothing_left_is_not_one_never_used(tmp_path):
    bus, job = await _in_time(tmp_path, own_versions(Run()))
    await bus.purge("demo_EV", below_seq=1000)
    (said,) = (await collect.check(bus, job)).trimmed
    assert said == Trimmed(stream="demo_EV", gone=12)


async def test_a_journal_purged_to_its_end_passes_also_where_the_ends_are_gone(tmp_path):
    run = own_versions(Run())
    bus, job = await _in_time(tmp_path, run)
    job = replace(job, pipeline=replace(job.pipeline, keep_journal=False))
    folder = tmp_path / "demo" / "attempts"
    folder.mkdir(parents=True)
    (folder / "a-w0.1.msgpack").write_bytes(attempt_log(run))
    await bus.purge("demo_JOURNAL", below_seq=1000)
    assert (await collect.check(bus, job)).violations == ()
    await bus.purge("demo_EV", below_seq=11)
    assert (await collect.check(bus, job)).violations == ()


def test_a_request_of_whose_interruptions_the_first_are_purged_passes():
    run = Run()

    def cut(attempt: int, prefix: int, received: int) -> RequestInterrupted:
        return RequestInterrupted(
            trajectory="http-g",
            request="http-g/1",
            attempt=attempt,
            retry=0,
            worker="a-w0",
            prefix_len=prefix,
            received=received,
            cause="worker_gone",
        )

    for attempt, start, made, finish in ((1, 0, 2, "interrupted"), (2, 2, 3, "interrupted"), (3, 5, 9, "stop")):
        run._log("http-g/1", attempt, start, made, finish)
    last = run.journal[-1].seq
    first, second = Journalled(last + 1, cut(1, 0, 2)), Journalled(last + 2, cut(2, 2, 3))
    run.journal = [*run.journal, first, second]
    assert run.check().violations == ()
    run.journal = [second]
    assert run.check(replace(EXPECTED, journal_from=second.seq)).violations == ()
    assert "prefix_gap" in {each.rule for each in run.check().violations}, "of a journal that is whole it is a fault"
    run.journal = [Journalled(second.seq, replace(second.record, request="t-0/0"))]
    found = run.check(replace(EXPECTED, journal_from=second.seq)).violations
    assert "prefix_gap" in {each.rule for each in found}, "and of an agent's request"


async def test_a_kept_journal_that_was_trimmed_is_said_too(tmp_path):
    bus, job = await _in_time(tmp_path, own_versions(Run()))
    await bus.purge("demo_JOURNAL", below_seq=5)
    report = await collect.check(bus, job)
    assert "journal_missing" in {violation.rule for violation in report.violations}, "it was to be kept"
    assert [(each.stream, each.gone) for each in report.trimmed] == [("demo_JOURNAL", 4)]
    dropped = replace(job, pipeline=replace(job.pipeline, keep_journal=False))
    assert (await collect.check(bus, dropped)).violations == ()
    await bus.purge("demo_JOURNAL", below_seq=1000)
    (said,) = (await collect.check(bus, dropped)).trimmed
    assert (said.stream, said.from_ms) == ("demo_JOURNAL", 0) and said.gone > 4


def test_a_trimmed_stream_is_told_in_words():
    told = str(Trimmed(stream="demo_EV", gone=17, from_ms=1_700_000_000_000))
    assert told == "demo_EV: checked from 2023-11-14 22:13:20 UTC on; 17 earlier messages were trimmed, and not seen"
    assert str(Trimmed(stream="demo_EV", gone=3)) == "demo_EV: nothing is left; 3 messages were not seen"


@pytest.mark.parametrize("violations", [(), (Violation("x", "y"),)])
def test_the_command_says_what_it_could_not_see(violations, monkeypatch, capsys):
    trimmed = (Trimmed(stream="demo_EV", gone=17, from_ms=1_700_000_000_000),)
    report = replace(Run().check(), trimmed=trimmed, unseen=2, violations=violations)

    async def checked(_: object) -> Report:
        return report

    monkeypatch.setattr(command, "_check", checked)
    monkeypatch.setattr(command, "job_of", lambda _: None)
    assert command.run(argparse.Namespace(json=False)) == bool(violations)
    said = capsys.readouterr().out
    assert "not all seen: demo_EV: checked from 2023-11-14 22:13:20 UTC on; 17 earlier messages" in said
    assert "2 trajectories of batches ended before that" in said
    assert command.run(argparse.Namespace(json=True)) == bool(violations)
    found = json.loads(capsys.readouterr().out)
    assert (found["unseen"], found["trimmed"]) == (2, [{"stream": "demo_EV", "gone": 17, "from_ms": 1_700_000_000_000}])
    report = Run().check()
    assert command.run(argparse.Namespace(json=False)) == 0 and "not all seen" not in capsys.readouterr().out
