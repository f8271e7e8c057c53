"""`--sensitivity`: the runs of a comparison again with each constant lower and higher, in parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import msgspec

from services.environments.workload import Workload
from services.preemption_feed.traces import Trace
from services.runtime.pool import pool_size, worker_pool
from services.simulator.whatif.constants import changed, constants
from services.simulator.whatif.policies import Policy, find
from services.simulator.whatif.report.sensitivity import Change, Sensitivity
from services.simulator.whatif.report.sensitivity import run as judge_each
from services.simulator.whatif.run import simulate
from services.simulator.whatif.settings import Settings
from services.timing.hardware import Hardware

Progress = Callable[[int, int, str], None]


class _Inputs(msgspec.Struct, frozen=True):
    """Of every run; goes to each process once."""

    trace: Trace
    workload: Workload
    hardware: Hardware
    settings: Settings
    hours: float
    seed: int


_given: _Inputs | None = None
"""In a worker process."""


def examine(
    trace: Trace,
    workload: Workload,
    hardware: Hardware,
    policies: Sequence[str],
    *,
    reference: str,
    hours: float = 2.0,
    seed: int = 0,
    settings: Settings | None = None,
    processes: int | None = None,
    progress: Progress = lambda done, of, told: None,
) -> Sensitivity:
    """The ratio of the first of `policies` to `reference`, and which policy is best, with each constant 20 % lower and higher.

    `policies` include the reference: give the two or three between which the decision is. Raises ConfigError.
    """
    assert reference in policies
    inputs = _Inputs(
        trace, workload, hardware, msgspec.structs.replace(settings or Settings(), spans=False), hours, seed
    )
    named = [find(policy) for policy in policies]

    def judge(changes: Sequence[Change]) -> list[tuple[float, str]]:
        tasks = [(change, policy) for change in changes for policy in named]
        rates = _all(inputs, tasks, processes, progress)
        found: list[tuple[float, str]] = []
        for index in range(len(changes)):
            mine = dict(zip(policies, rates[index * len(named) : (index + 1) * len(named)], strict=True))
            found.append((mine[policies[0]] / max(mine[reference], 1e-9), max(mine, key=lambda name: mine[name])))
        return found

    return judge_each(judge, constants(hardware, inputs.settings), policies[0], reference)


def _all(
    inputs: _Inputs, tasks: Sequence[tuple[Change, Policy]], processes: int | None, progress: Progress
) -> list[float]:
    count = pool_size(processes, len(tasks))
    rates = [0.0] * len(tasks)
    if count <= 1:
        for index, (change, policy) in enumerate(tasks):
            progress(index, len(tasks), _told(change, policy))
            rates[index] = _rate(inputs, change, policy)
        return rates
    with worker_pool(count, initializer=_give, initargs=(inputs,)) as pool:
        waiting: dict[Future[float], int] = {
            pool.submit(_rate_given, change, policy): index for index, (change, policy) in enumerate(tasks)
        }
        while waiting:
            ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                index = waiting.pop(future)
                rates[index] = future.result()
                progress(len(tasks) - len(waiting), len(tasks), _told(*tasks[index]))
    return rates


def _told(change: Change, policy: Policy) -> str:
    constant, factor = change
    return f"{policy.name}, {constant} x {factor:g}" if constant else f"{policy.name}, as it is"


def _give(inputs: _Inputs) -> None:
    global _given
    _given = inputs


def _rate_given(change: Change, policy: Policy) -> float:
    assert _given is not None
    return _rate(_given, change, policy)


def _rate(inputs: _Inputs, change: Change, policy: Policy) -> float:
    hardware, workload, settings = changed((inputs.hardware, inputs.workload, inputs.settings), *change)
    result = simulate(inputs.trace, workload, hardware, policy, hours=inputs.hours, seed=inputs.seed, settings=settings)
    return result.throughput_tokens_per_s
