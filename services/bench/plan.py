"""`pearl bench plan`: a decision and the plan that follows from it, as the two services compute them.

The decision engine chooses for N workers while half of them run; the orchestrator steps on that target: members, roles,
waves, the epoch's invariants, and the bytes that it would write. The reference is reading one such table: what each of
its many readers spends on every epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from messages.ids import Activity, DecisionId, Mode, WorkerId
from messages.orchestrator import TargetConfiguration
from pearl_state.codec import decode_table, encode_table
from services.bench.cell import job_in, serving_table
from services.bench.figures import Figure, figure, percentile
from services.decision_engine.choose import Policy, Running, choose
from services.orchestrator.config import Config
from services.orchestrator.core import OrchestratorCore
from services.profile import built_in
from services.runtime.core import Input

TARGET_MS = 100.0
TARGET_WORKERS = 1000


def measure(folder: Path, *, sizes: Sequence[int] = (16, 100, 1000), repeats: int = 7) -> list[Figure]:
    """Milliseconds, medians."""
    return [_measure(folder, workers, repeats) for workers in sizes]


def _measure(folder: Path, workers: int, repeats: int) -> Figure:
    job, _ = job_in(folder, workers)
    core = OrchestratorCore(Config.of(job))
    full = serving_table(job)
    names = [row.worker for row in full.rows if row.activity is Activity.ACTIVE]
    half = frozenset(names[: workers // 2])
    idle = core.initial().by_worker
    rows = tuple(row if row.worker in half else idle[row.worker] for row in full.rows)
    table = msgspec.structs.replace(full, rows=rows)
    profile = built_in(job)
    running = Running(mode=Mode.COLOCATED, prefill=0, decode=0, colocated=len(half))

    def decide_and_plan() -> bytes:
        choice = choose(profile, workers, running, Policy())
        target = _target(choice.chosen.prefill, choice.chosen.decode, choice.chosen.colocated, choice.mode, names)
        after, _, effects = core.step_all(table, (Input(1, target, 1),))
        assert after.plan is not None and effects, "half of the workers are to be added"
        return encode_table(after)

    data = decide_and_plan()

    def read() -> None:
        decode_table.cache_clear()  # replicas of one process share what was read; here each time counts
        decode_table(data, job.job.name)

    return figure(
        "plan",
        f"{workers} workers",
        _median_ms(decide_and_plan, repeats),
        "ms",
        _median_ms(read, repeats),
        "reading one table",
        below=TARGET_MS if workers == TARGET_WORKERS else None,
    )


def _target(prefill: int, decode: int, colocated: int, mode: Mode, names: Sequence[WorkerId]) -> TargetConfiguration:
    return TargetConfiguration(
        decision_id=DecisionId("d1"),
        budget_id=1,
        mode=mode,
        prefill=prefill,
        decode=decode,
        colocated=colocated,
        borrow=False,
        usable=tuple(names),
        leaving=(),
        training_batch=None,
    )


def _median_ms(work: Callable[[], object], repeats: int) -> float:
    took: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        took.append((time.perf_counter() - begun) * 1000)
    return percentile(took, 0.5)
