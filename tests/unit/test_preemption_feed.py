"""The preemption feed: reading traces, scheduling their events, resuming a replay."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import decode
from messages.ids import Zone
from messages.subjects import state_bucket, stream
from services.jobfile import FeedSection, JobFile, JobSection, NodeSection, RolloutSection
from services.preemption_feed.config import Config
from services.preemption_feed.schedule import preemptible_slots, schedule
from services.preemption_feed.service import STATE_KEY, Feed, Position, SecondFeedError
from services.preemption_feed.traces import BUILT_IN, Step, Trace, TraceError, load, parse
from services.runtime.bus import BucketSpec, StreamSpec
from services.runtime.bus_memory import MemoryBroker

JOB = JobFile(
    job=JobSection(name="t"),
    nodes=(
        NodeSection(name="r0", zone=Zone.RESERVED, gpus=4),
        NodeSection(name="p0", zone=Zone.PREEMPTIBLE, gpus=4),
        NodeSection(name="p1", zone=Zone.PREEMPTIBLE, gpus=4),
    ),
    rollout=RolloutSection(gpus_per_worker=2),
)
SLOTS = preemptible_slots(JOB)


def steps(trace: Trace) -> list[tuple[float, int]]:
    return [(step.time_s, step.gpus) for step in trace.steps]


def test_built_in_traces_are_the_papers_segments() -> None:
    means = []
    for name in BUILT_IN:
        trace = load(name)
        assert trace.most <= 12 and not trace.warnings
        ends = [*[step.time_s for step in trace.steps[1:]], 7200.0]
        means.append(sum(s.gpus * (end - s.time_s) for s, end in zip(trace.steps, ends, strict=True)) / 7200 + 4)
    assert means == pytest.approx([13.6, 9.05, 11.78], abs=0.02)


def test_a_licence_lies_beside_them() -> None:
    text = (Path(__file__).parents[2] / "services/preemption_feed/traces/LICENSE.md").read_text()
    assert "uclasystem/bamboo" in text and "MIT License" in text


def test_counts_unsorted_fractional_bom_crlf_gaps_comments() -> None:
    text = "\ufeff# made by hand\r\n available_gpus , TIME_S,zone\r\n4,0,a\r\n\r\n6.9,20.5,a\r\n,15,a\r\n2,10,a\r\n2,12,a\r\n"
    trace = parse(text)
    assert steps(trace) == [(0.0, 4), (10.0, 2), (20.5, 6)]
    assert trace.warnings == ("line 6: a gap, the value before it holds", "line 5: available_gpus 6.9 is rounded down")
    assert [trace.at(time_s) for time_s in (0, 9.9, 10, 20.4, 1e6)] == [4, 4, 2, 2, 6]


def test_events_with_identities() -> None:
    text = "time_s,event,instance_id,gpus\n5,remove,a,1\n0,add,a,1\n0,ADD,b,4\n5,add,b,4\n9,remove,c,1\n9,remove,b,\n"
    trace = parse(text)
    assert steps(trace) == [(0.0, 5), (5.0, 4), (9.0, 0)]
    assert len(trace.warnings) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1: empty"),
        ("\n\n", "line 1: empty"),
        ("time_s,available_gpus\n", "line 2: no data"),
        ("a,b\n1,2\n", "line 1: columns"),
        ("time_s,available_gpus\n0,1\nx,2\n", "line 3: time_s 'x' is not a number"),
        ("time_s,available_gpus\n0,1\n1,two\n", "line 3: available_gpus 'two'"),
        ("time_s,available_gpus\n0,-1\n", "line 2: available_gpus -1"),
        ("time_s,available_gpus\n-1,1\n", "line 2: time_s -1"),
        ("time_s,available_gpus\nnan,1\n", "line 2: time_s 'nan' is not finite"),
        ("time_s,available_gpus\n0,inf\n", "line 2"),
        ("time_s,available_gpus\n0,\n", "line 2: every available_gpus is empty"),
        ("time_s,event,instance_id,gpus\n0,grow,a,1\n", "line 2: event 'grow'"),
        ("time_s,event,instance_id,gpus\n0,add,,1\n", "line 2: no instance_id"),
        ("time_s,event,instance_id,gpus\n0,add,a\n", "line 2: gpus ''"),
        ('time_s,available_gpus\n0,"' + "9" * 200_000 + '"\n', "line"),
    ],
)
def test_a_trace_that_cannot_be_read_says_where_and_why(text: str, reason: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse(text, "file.csv")
    assert str(caught.value).startswith("file.csv: ") and reason in str(caught.value)


def test_load_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="bamboo-segment1"):
        load(str(tmp_path / "none.csv"))
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="UTF-8"):
        load(str(binary))


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='time_s,available_gpus\n\r01.9-e#"x', max_size=80))
def test_any_text_is_read_or_refused(tail: str) -> None:
    for head in ("", "time_s,available_gpus\n", "time_s,event,instance_id,gpus\n0,add,a,1\n"):
        try:
            trace = parse(head + tail)
        except TraceError:
            continue
        times = [step.time_s for step in trace.steps]
        assert times == sorted(set(times)) and all(step.gpus >= 0 for step in trace.steps)


def replay(events: list, time_ms: float = float("inf")) -> set[tuple[str, int]]:
    """GPUs available after all events up to a time, checking that each changes something and makes whole workers."""
    present: set[tuple[str, int]] = set()
    for scheduled in events:
        if scheduled.at_ms > time_ms:
            break
        gpus = {(scheduled.event.node, index) for index in scheduled.event.gpus}
        assert scheduled.event.gpus and len(gpus) % 2 == 0 and len({index // 2 for _, index in gpus}) == len(gpus) // 2
        if isinstance(scheduled.event, GpuAvailable):
            assert not gpus & present
            present |= gpus
        else:
            assert gpus <= present
            present -= gpus
    return present


traces = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 20)), min_size=1, max_size=15).map(
    lambda rows: parse("time_s,available_gpus\n" + "\n".join(f"{time_s},{gpus}" for time_s, gpus in rows))
)


@settings(max_examples=60, deadline=None)
@given(traces, st.integers(0, 9), st.floats(0, 120), st.floats(0.1, 100), st.floats(0, 1))
def test_a_schedule_follows_its_trace(trace: Trace, seed: int, start_s: float, scale: float, share: float) -> None:
    feed = FeedSection(start_s=start_s, time_scale=scale, no_notice_fraction=share, notice_ms=700)
    planned = schedule(trace, SLOTS, feed, random.Random(seed))
    assert planned == schedule(trace, SLOTS, feed, random.Random(seed))
    at = [scheduled.at_ms for scheduled in planned.events]
    assert at == sorted(at) and (not at or at[0] >= 0)
    assert (
        len(replay(list(planned.events)))
        == min(trace.steps[-1].gpus if trace.steps[-1].time_s > start_s else trace.at(start_s), 8) // 2 * 2
    )
    for scheduled in planned.events:
        if isinstance(scheduled.event, GpuReclaimed):
            assert scheduled.event.notice_ms in (0, 700)


def test_the_start_counts_what_is_there_and_the_cap_is_told() -> None:
    trace = parse("time_s,available_gpus\n0,12\n10,4\n30,7\n")
    planned = schedule(trace, SLOTS, FeedSection(start_s=20.0, time_scale=10.0), random.Random(0))
    assert [(each.at_ms, each.event.node, each.event.gpus) for each in planned.events] == [
        (0, "p0", (0, 1, 2, 3)),
        (1000, "p1", (0, 1)),
    ]
    assert planned.uncounted_gpus == 0
    capped = schedule(trace, SLOTS, FeedSection(), random.Random(0))
    assert capped.uncounted_gpus == 4 and len(replay(list(capped.events), 0)) == 8


def test_the_seed_says_who_leaves_and_the_fraction_who_is_warned() -> None:
    trace = Trace("t", (Step(0.0, 8), Step(10.0, 4)))
    leavers = set()
    for seed in range(12):
        planned = schedule(trace, SLOTS, FeedSection(no_notice_fraction=0.0, notice_ms=99), random.Random(seed))
        reclaims = [each.event for each in planned.events if isinstance(each.event, GpuReclaimed)]
        assert all(reclaim.notice_ms == 99 for reclaim in reclaims)
        leavers.add(tuple((reclaim.node, reclaim.gpus) for reclaim in reclaims))
    assert len(leavers) > 2
    assert not schedule(trace, (), FeedSection(), random.Random(0)).events


def feed_config(events: str = "time_s,available_gpus\n0,4\n1,8\n2,2\n") -> Config:
    planned = schedule(parse(events), SLOTS, FeedSection(time_scale=1000.0), random.Random(1))
    return Config(trace=parse(events), schedule=planned, digest=f"digest{len(events)}")


async def published(broker: MemoryBroker) -> list[GpuAvailable | GpuReclaimed]:
    bus = broker.connect()
    return [
        decode(delivery.data, GpuAvailable, GpuReclaimed)
        async for delivery in bus.read(stream("t", "ev"), "pearl.t.ev.>")
    ]


async def broker_with_state() -> MemoryBroker:
    broker = MemoryBroker()
    bus = broker.connect()
    await bus.ensure_stream(StreamSpec(name=stream("t", "ev"), subjects=("pearl.t.ev.>",)))
    await bus.ensure_bucket(BucketSpec(name=state_bucket("t")))
    return broker


async def test_a_feed_publishes_its_schedule_and_ends() -> None:
    broker, config = await broker_with_state(), feed_config()
    await Feed(config, broker.connect(), "t", clock=lambda: 10**12).run(asyncio.Event())
    assert await published(broker) == [each.event for each in config.schedule.events]
    # Started again at the end, it publishes nothing more.
    await Feed(config, broker.connect(), "t", clock=lambda: 10**12).run(asyncio.Event())
    assert len(await published(broker)) == len(config.schedule.events)


async def test_a_killed_feed_goes_on_where_it_was() -> None:
    broker, config = await broker_with_state(), feed_config()
    bus = broker.connect()
    await Feed(config, bus, "t", clock=lambda: 10**12).run(asyncio.Event())
    entry = await bus.get(state_bucket("t"), STATE_KEY)
    assert entry is not None
    at = msgspec.json.decode(entry.data, type=Position)
    assert at.position == len(config.schedule.events) and at.started_ms == 10**12
    # As if killed between publishing the last event and saving: it says it again, under the same id.
    back = msgspec.json.encode(msgspec.structs.replace(at, position=at.position - 1))
    await bus.put(state_bucket("t"), STATE_KEY, back, last_revision=entry.revision)
    await Feed(config, broker.connect(), "t", clock=lambda: 10**12 + 5000).run(asyncio.Event())
    assert len(await published(broker)) == len(config.schedule.events)


async def test_another_schedule_starts_anew_and_stop_ends_the_wait() -> None:
    broker = await broker_with_state()
    bus = broker.connect()
    foreign = msgspec.json.encode(Position("other", 5, 1))
    await bus.put(state_bucket("t"), STATE_KEY, foreign, last_revision=0)
    stop = asyncio.Event()
    far = feed_config("time_s,available_gpus\n0,2\n900000,4\n")
    running = asyncio.create_task(Feed(far, bus, "t", clock=lambda: 0).run(stop))
    for _ in range(100):
        if await published(broker):
            break
        await asyncio.sleep(0)
    stop.set()
    await running
    assert len(await published(broker)) == 1


async def test_two_feeds_of_one_job_do_not_contradict_each_other() -> None:
    broker, config = await broker_with_state(), feed_config()
    first, second = Feed(config, broker.connect(), "t"), Feed(config, broker.connect(), "t")
    at = await first._restore()
    await second._restore()
    await second._save(msgspec.structs.replace(at, position=1))
    with pytest.raises(SecondFeedError, match="stop one"):
        await first._save(at)


def test_config_of_a_job() -> None:
    assert Config.of(JOB) is None
    job = msgspec.structs.replace(JOB, feed=FeedSection(trace="bamboo-segment2"))
    config = Config.of(job)
    assert config is not None and config == Config.of(job) and config.schedule.events
    other = Config.of(msgspec.structs.replace(job, job=JobSection(name="t", seed=1)))
    assert other is not None and other.digest != config.digest
