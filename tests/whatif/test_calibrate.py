"""Calibration's arithmetic: curves never fall, and the same clients take what the description says."""

from __future__ import annotations

import msgspec
import pytest

from services.bench.calibrate import _curve, predict  # pyright: ignore[reportPrivateUsage]
from services.bench.pace import Play
from services.jobfile import JobFile, PipelineSection, RolloutSection
from services.timing import hardware as descriptions
from services.timing.hardware import Curve, Value

NONE = Value(0.0, "test")
HARDWARE = msgspec.structs.replace(
    descriptions.load("h800-qwen3-8b"),
    linear=Curve((1.0, 100.0), (0.4, 0.4), "test"),
    head=Curve((1.0,), (1e-12,), "test"),
    host_s=NONE,
    attention_floor_s=NONE,
    attention_fixed_s=NONE,
    attention_s_per_token=NONE,
    prefill_attention_s_per_pair=NONE,
    transfer_fixed_s=NONE,
    prefill=Curve((10.0, 1000.0), (0.01, 1.0), "test"),
)
JOB = JobFile(
    rollout=RolloutSection(max_running=64, prefill_chunk_tokens=1024),
    pipeline=PipelineSection(batch_trajectories=16, group_size=16, max_new_tokens=2, early_start=True),
)


def turn_s(prefill: int, decode: int, colocated: int) -> float:
    play = Play(prefill=prefill, decode=decode, colocated=colocated, prompt=10, turns=3)
    return predict(JOB, HARDWARE, play)


def test_colocated_clients_in_step_wait_for_their_prefill_and_one_decode() -> None:
    assert turn_s(0, 0, 2) == pytest.approx(8 * 10 * 1e-3 + 0.4, rel=1e-3)
    assert turn_s(0, 0, 4) == pytest.approx(4 * 10 * 1e-3 + 0.4, rel=1e-3)


def test_disaggregated_ones_are_prefilled_elsewhere() -> None:
    few, many = turn_s(1, 1, 0), turn_s(4, 1, 0)
    assert many <= few
    assert many >= 0.4, "no turn is shorter than its decode iteration"


def test_a_decoder_that_runs_out_of_room_has_contexts_computed_anew() -> None:
    """128 replies of 512 tokens where 16,384 fit: some lose their room, a few before their context has come."""
    slow = msgspec.structs.replace(
        HARDWARE,
        linear=Curve((1.0, 128.0), (0.001, 0.05), "test"),
        transfer_fixed_s=Value(0.003, "test"),
        transfer_bytes_per_s=Value(1e9, "test"),
        prefill=Curve((4.0, 256.0), (0.002, 0.5), "test"),
    )
    job = JobFile(
        rollout=RolloutSection(max_running=128, prefill_chunk_tokens=64, kv_cache_tokens=16384),
        pipeline=PipelineSection(batch_trajectories=128, group_size=1, max_new_tokens=512),
    )
    short = predict(job, slow, Play(prefill=2, decode=1, colocated=0, prompt=8, turns=8, most_env_s=2.0))
    roomy = msgspec.structs.replace(job, rollout=msgspec.structs.replace(job.rollout, kv_cache_tokens=1 << 20))
    assert short > predict(roomy, slow, Play(prefill=2, decode=1, colocated=0, prompt=8, turns=8, most_env_s=2.0)) > 0


def test_a_curve_of_noisy_measurements_never_falls() -> None:
    curve = _curve((1, 2, 4), (0.3, 0.2, 0.5), "test")
    assert curve.seconds == (0.3, 0.3, 0.5)
    assert curve.at(3) == pytest.approx(0.4)
