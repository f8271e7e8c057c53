"""The simulations that the figures ask for, run in parallel, each once. Pure but for its processes and the built-in files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from functools import lru_cache
from random import Random
from types import TracebackType
from typing import Final, TypeVar, cast

import msgspec

from services.environments.workload import load as load_workload
from services.preemption_feed.traces import Step as TraceStep
from services.preemption_feed.traces import Trace
from services.preemption_feed.traces import load as load_trace
from services.runtime.pool import pool_size, worker_pool
from services.simulator.whatif import selection
from services.simulator.whatif.judge import Judge, Noise, Site, Trajectory, Turn, Workers
from services.simulator.whatif.policies import Policy
from services.simulator.whatif.result import PolicyResult
from services.simulator.whatif.run import simulate
from services.simulator.whatif.settings import Settings
from services.simulator.whatif.trajectories import Episodes, Plan
from services.timing.hardware import load as load_hardware

WORKLOAD: Final = "swebench-mini"
MODELS: Final = {"h800-qwen3-8b": "Qwen3-8B", "h800-qwen3-30b-a3b": "Qwen3-30B-A3B"}
SMALL, LARGE = tuple(MODELS)
SEGMENTS: Final = ("bamboo-segment1", "bamboo-segment2", "bamboo-segment3")
POOL: Final = 500
"""Trajectories that a selection's batches are drawn from."""
NO_TRACE: Final = ""
"""No preemptible GPU at any time."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch of resampled trajectories on fixed workers, nothing else in the cluster. No training, no switching, no noise."""

    hardware: str
    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    trajectories: int = 64
    context: int = 32768
    seed: int = 0

    @property
    def told(self) -> str:
        """For progress."""
        return (
            f"batch of {self.trajectories} on {self.prefill}P{self.decode}D{self.colocated}C, {MODELS[self.hardware]}"
        )


class Batched(msgspec.Struct, frozen=True):
    """What a batch took, and what it consisted of."""

    makespan_s: float
    mean_s: float  # of a trajectory
    generated: int
    turns: int
    decode_share: float  # of the engines' busy time
    env_mean_s: float  # of a trajectory's time: in its environment


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A policy on a trace for some hours."""

    hardware: str
    policy: Policy
    trace: str = NO_TRACE
    settings: Settings = Settings()
    hours: float = 2.0
    seed: int = 0

    @property
    def told(self) -> str:
        """For progress."""
        where = self.trace or f"{self.settings.reserved_gpus} GPUs"
        return f"{self.policy.name} on {where}, {MODELS[self.hardware]}, {self.hours:g} h"


class Select(msgspec.Struct, frozen=True, kw_only=True):
    """Choose a configuration for so many workers after four observed batches, and measure every one (`selection.evaluate`)."""

    hardware: str
    workers: int
    seed: int = 0

    @property
    def told(self) -> str:
        """For progress."""
        return f"every configuration of {self.workers} workers, {MODELS[self.hardware]}"


class Selected(msgspec.Struct, frozen=True):
    """What was chosen, and by how many per cent each configuration is slower than the best, over the same batches."""

    outcome: selection.Outcome
    slower: dict[str, float]


Task = Batch | Run | Select
Done = Batched | PolicyResult | Selected
Progress = Callable[[int, int, str], None]
T = TypeVar("T")


class Runner:
    """Does tasks, in so many processes (0: in this one), and remembers them. Use it as a context."""

    def __init__(self, processes: int | None = None, progress: Progress = lambda done, of, told: None) -> None:
        count = 0 if processes == 0 else pool_size(processes)
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(worker_pool(count)) if count > 1 else None
        self._progress = progress
        self._done: dict[Task, Done] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def batches(self, tasks: Sequence[Batch]) -> list[Batched]:
        """In the order of the tasks."""
        self._do(tasks)
        return [cast(Batched, self._done[task]) for task in tasks]

    def runs(self, tasks: Sequence[Run]) -> list[PolicyResult]:
        """In the order of the tasks."""
        self._do(tasks)
        return [cast(PolicyResult, self._done[task]) for task in tasks]

    def selections(self, tasks: Sequence[Select]) -> list[Selected]:
        """In the order of the tasks."""
        self._do(tasks)
        return [cast(Selected, self._done[task]) for task in tasks]

    def _do(self, tasks: Sequence[Task]) -> None:
        new = [task for task in dict.fromkeys(tasks) if task not in self._done]
        if self._pool is None:
            for index, task in enumerate(new):
                self._progress(index, len(new), task.told)
                self._done[task] = execute(task)
            return
        waiting: dict[Future[Done], Task] = {self._pool.submit(execute, task): task for task in new}
        while waiting:
            ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                task = waiting.pop(future)
                self._done[task] = future.result()
                self._progress(len(new) - len(waiting), len(new), task.told)


def execute(task: Task) -> Done:
    """One task. The same task gives the same answer."""
    if isinstance(task, Run):
        return simulate(
            no_trace() if task.trace == NO_TRACE else load_trace(task.trace),
            load_workload(WORKLOAD),
            load_hardware(task.hardware),
            task.policy,
            hours=task.hours,
            seed=task.seed,
            settings=task.settings,
        )
    settings = Settings()
    hardware = load_hardware(task.hardware)
    site = Site(hardware=hardware, max_running=settings.max_running, chunk_tokens=settings.chunk_tokens)
    if isinstance(task, Select):
        pool = drawn(POOL, settings.max_context_tokens, task.seed)
        setting = selection.Setting(
            site=site, pool=tuple(pool), batch=settings.batch_trajectories, workers=task.workers
        )
        table: selection.Table = {}
        outcome = selection.evaluate(setting, task.seed, table)
        return Selected(outcome, slower(table))
    workers = Workers(task.prefill, task.decode, task.colocated)
    batch = drawn(task.trajectories, task.context, task.seed)
    judge = Judge(site, workers, noise=Noise(), seed=task.seed, most_in_flight=len(batch))
    measured = judge.measure(batch)
    busy_s = measured.decode_s + measured.prefill_s
    return Batched(
        measured.makespan_s,
        sum(measured.ends_s) / len(batch),
        measured.decoded,
        sum(len(each) for each in batch),
        measured.decode_s / busy_s if busy_s else 0.0,
        sum(turn.env_s for each in batch for turn in each) / len(batch),
    )


def slower(table: selection.Table) -> dict[str, float]:
    """Per cent behind the best; the hopeless ones were measured on fewer batches, and are compared on these."""
    full = max(len(values) for values in table.values())
    best = min((values for values in table.values() if len(values) == full), key=sum)
    return {
        f"{each.colocated}C" if each.colocated else f"{each.prefill}P{each.decode}D": 100
        * (sum(values) / sum(best[: len(values)]) - 1)
        for each, values in table.items()
    }


def drawn(count: int, context: int, seed: int) -> list[Trajectory]:
    """So many recorded trajectories, whole but for the context limit, with the settings' share of rewritten histories.

    The same seed gives the same ones, a larger batch more.
    """
    plans = _plans(context)
    draw = Random(f"paper/{seed}")
    found: list[Trajectory] = []
    for _ in range(count):
        turns = draw.choice(plans).turns
        before = (turns[0], *turns)
        found.append(
            tuple(
                Turn(turn.new, turn.reply, turn.env_s, turn.rewritten > earlier.rewritten)
                for earlier, turn in zip(before, turns, strict=False)
            )
        )
    return found


@lru_cache(maxsize=8)
def _plans(context: int) -> list[Plan]:
    return Episodes(load_workload(WORKLOAD), context, Settings().prefix_reuse).plans


def no_trace() -> Trace:
    """A trace without GPUs."""
    return Trace("none", (TraceStep(0.0, 0),))


def ratios(workers: int) -> list[tuple[int, int]]:
    """Every (P, D) of so many workers."""
    return [(prefill, workers - prefill) for prefill in range(1, workers)]
