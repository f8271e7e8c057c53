"""Which resource a report names."""

from __future__ import annotations

import msgspec
import pytest

from messages.ids import GroupId, Incarnation, PolicyVersion, TrajectoryId, WorkerId
from messages.pipeline_scheduler import StepFinished, TrajectoryCompleted
from messages.runtime_tracker import WorkerHeartbeat
from services.monitor.bottleneck import Serving, busy_of


def beat(decode_s: float, prefill_s: float, *, incarnation: int = 1, serving: bool = True) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker=WorkerId("a-w0"),
        incarnation=Incarnation(incarnation),
        running=1,
        queued=0,
        version=0,
        serving=serving,
        decode_iterations=0,
        decode_tokens=0,
        decode_s=decode_s,
        decode_batch_sum=0,
        prefill_tokens=0,
        prefill_s=prefill_s,
        refused=0,
        rss_bytes=0,
    )


def test_only_time_in_which_a_worker_served_counts():
    serving = Serving()
    for at_ms, one in (
        (0, beat(5.0, 1.0)),
        (1000, beat(5.5, 1.25)),
        (2000, beat(5.5, 1.25, serving=False)),
        (9000, beat(5.5, 1.25)),
        (9500, beat(6.0, 1.25)),
        (9900, beat(0.0, 0.0, incarnation=2)),
        (10000, beat(0.1, 0.0, incarnation=2)),
    ):
        serving.take(at_ms, one)
    assert (serving.serving_s, serving.decode_s, serving.prefill_s) == pytest.approx((2.6, 1.1, 0.25))


def test_the_busiest_is_named():
    serving = Serving()
    serving.take(0, beat(0.0, 0.0))
    serving.take(1000, beat(0.3, 0.1))
    step = StepFinished(
        batch=0,
        version=PolicyVersion(1),
        train_s=4.0,
        trained_tokens=1,
        reward_mean=0.0,
        reward_std=0.0,
        loss=0.0,
        grad_norm=0.0,
        zero_variance_groups=0,
    )
    end = TrajectoryCompleted(
        trajectory=TrajectoryId("t"),
        group=GroupId("g"),
        batch=0,
        retry=0,
        status="completed",
        reward=0.0,
        turns=1,
        generated_tokens=1,
        min_version=PolicyVersion(0),
        max_version=PolicyVersion(0),
        journal=(1,),
        env_s=2.0,
        wall_s=10.0,
    )
    failed = msgspec.structs.replace(end, status="failed", env_s=100.0)
    busy = busy_of(serving, [step], [end, failed], wall_s=10.0, cpu_s=3.0, processors=2)
    assert busy.bottleneck == "training"
    assert (busy.decode, busy.prefill, busy.environment, busy.host_cpu) == pytest.approx((0.3, 0.1, 0.2, 0.15))
    assert busy.text.startswith("training (rollout decode 30%")
    idle = busy_of(Serving(), [], [], wall_s=0.0, cpu_s=19.0, processors=2)
    assert idle.decode == idle.training == 0.0
