"""The paper's Table 2 in simulation: which ratio is chosen at each number of GPUs, and which is best when all are measured. Pure but
for the built-in files.

Qwen3-8B, batches of 64, TP2: 10, 12 and 16 dedicated GPUs are 5, 6 and 8 workers, and 8 more with the 16 training GPUs
borrowed. The choice is the planner's after it observed batches, among ratios as in the table and among all configurations. The
paper's own choices are shown beside; where they differ from the best here, the workload does: its prompts are not published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Final

import msgspec

from messages.monitor import Averaged, Observed
from services.decision_engine import predict
from services.decision_engine.predict_average import kept
from services.decision_engine.predict_evidence import Evidence, Limits
from services.environments.workload import load as load_workload
from services.simulator.whatif import selection
from services.simulator.whatif.judge import Measured, Site, Trajectory, Workers
from services.simulator.whatif.selection import Setting, Table, counts_of, name_of
from services.timing.hardware import load

BATCH: Final = 64
MOST_CONTEXT: Final = 32 * 1024
CHUNK: Final = 8192
MAX_RUNNING: Final = 256
REWRITTEN: Final = 0.55
"""Share of turns before which the history is rendered anew, as `prefix_reuse` of the what-if settings (1 - this): with it, colocated
prefill computes 29 tokens for each generated one, as in the paper's Figure 2(b)."""
OBSERVED: Final = selection.OBSERVED_STEPS
DRAWS: Final = 32
"""Batches over which configurations are measured: over three, those half a per cent apart change places; over eight, those one per cent."""
DROP_AFTER: Final = {1: 1.06, 2: 1.03, 8: 1.015}
"""After so many batches a ratio that takes so many times the best one's is measured no more."""


class Point(msgspec.Struct, frozen=True):
    """A row of the table."""

    gpus: int
    overlap: bool
    paper_selected: str
    paper_best: str

    @property
    def workers(self) -> int:
        return self.gpus // 2 + (8 if self.overlap else 0)


POINTS: Final = (
    Point(10, False, "2P3D", "2P3D"),
    Point(10, True, "4P9D", "5P8D"),
    Point(12, False, "3P3D", "3P3D"),
    Point(12, True, "4P10D", "4P10D"),
    Point(16, False, "3P5D", "3P5D"),
    Point(16, True, "4P12D", "4P12D"),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A point in simulation; regrets are shares of the best makespan."""

    gpus: int
    overlap: bool
    paper_selected: str
    paper_best: str
    selected: str  # among ratios
    best: str
    regret: float
    selected_of_all: str  # colocation included
    best_of_all: str
    regret_of_all: float
    measured_s: dict[str, float]


def setting(workers: int, rewritten: float = REWRITTEN, most_turns: int = 200) -> Setting:
    """The table's workload on so many workers. `rewritten`: share of turns whose prefix no cache has."""
    hardware = load("h800-qwen3-8b")
    random = Random(f"rewritten/{rewritten}")
    pool: list[Trajectory] = []
    for trajectory in selection.trajectories(load_workload("swebench-mini")):
        kept = selection.cut(trajectory, MOST_CONTEXT, most_turns)
        pool.append(tuple(msgspec.structs.replace(turn, fresh=random.random() < rewritten) for turn in kept))
    return Setting(
        site=Site(hardware=hardware, chunk_tokens=CHUNK, max_running=MAX_RUNNING),
        pool=tuple(pool),
        batch=BATCH,
        workers=workers,
    )


def row(point: Point, rewritten: float = REWRITTEN, most_turns: int = 200, seed: int = 0, draws: int = DRAWS) -> Row:
    """Measure every configuration of a point, and let the planner choose after `OBSERVED` batches of its own choice."""
    at = setting(point.workers, rewritten, most_turns)
    table: Table = {}
    alive = selection.configurations(point.workers)
    for index in range(draws):
        means = {each: selection.mean_s(at, seed, table, each, index + 1) for each in alive}
        split_s = min(value for each, value in means.items() if each.prefill)
        limit = DROP_AFTER.get(index + 1, math.inf)
        alive = [each for each in alive if means[each] <= limit * split_s or not each.prefill]

    def chosen(ratios_only: bool) -> Workers:
        batches: list[tuple[Trajectory, ...]] = []
        observed: list[Observed] = []
        # As the paper's runs: disaggregated from the start.
        running = Workers(max(1, point.workers // 3), point.workers - max(1, point.workers // 3), 0)
        first: Measured | None = None
        averages: tuple[Averaged, ...] = ()
        limits = Limits(chunk_tokens=at.site.chunk_tokens, max_running=at.site.max_running)
        for step in range(OBSERVED):
            last: Measured = selection.measure(at, running, 1000 * seed + step)
            batches.append(selection.draw(at, 1000 * seed + step))
            first = last if running.colocated else first
            profile = msgspec.structs.replace(
                selection.profile_of(at, batches, (running, last), (1.0,) * 4, first), train_step=step
            )
            own = Evidence(
                sample=selection.sample_of(batches[-1:], BATCH, 1 << 30), limits=limits, measured_on=counts_of(running)
            )
            predicted_s = predict.predicted_s(profile, counts_of(running), own)
            observed.append(Observed(*counts_of(running), predicted_s, last.makespan_s, step))
            evidence = Evidence(
                sample=profile.sample,
                observed=tuple(observed),
                limits=limits,
                measured_on=counts_of(running),
                averages=averages,
            )
            options = predict.candidates(profile, point.workers, evidence, judged=[counts_of(running)])
            averages = kept(averages, options, step)
            if ratios_only:
                options = tuple(option for option in options if option.prefill)
            best = predict.best(options)
            assert best is not None
            running = Workers(best.prefill, best.decode, best.colocated)
        return running

    selected, of_all = chosen(True), chosen(False)
    selected_s, of_all_s = (selection.mean_s(at, seed, table, each, draws) for each in (selected, of_all))
    measured = {each: sum(values) / len(values) for each, values in table.items() if len(values) >= draws}
    split = {each: value for each, value in measured.items() if each.prefill}
    return Row(
        gpus=point.gpus,
        overlap=point.overlap,
        paper_selected=point.paper_selected,
        paper_best=point.paper_best,
        selected=name_of(selected),
        best=name_of(min(split, key=lambda each: split[each])),
        regret=selected_s / min(split.values()) - 1,
        selected_of_all=name_of(of_all),
        best_of_all=name_of(min(measured, key=lambda each: measured[each])),
        regret_of_all=of_all_s / min(measured.values()) - 1,
        measured_s={name_of(each): value for each, value in measured.items()},
    )


def rows(rewritten: float = REWRITTEN, points: Sequence[Point] = POINTS) -> list[Row]:
    """The whole table."""
    return [row(point, rewritten) for point in points]
