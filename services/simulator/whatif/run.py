"""`pearl simulate run`: policies on one trace, workload and hardware, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from messages.monitor import DecisionRecord
from services.environments.workload import Workload
from services.jobfile import ConfigError
from services.preemption_feed.traces import Trace
from services.simulator.whatif.jobs import cold_start
from services.simulator.whatif.oracle import Measure, oracle_policy, tables, worker_counts
from services.simulator.whatif.policies import Policy
from services.simulator.whatif.result import Budget, Decided, Oracle, PolicyResult, Result, Step
from services.simulator.whatif.settings import SOURCES, Settings, checked
from services.simulator.whatif.simulation import Simulation
from services.simulator.whatif.trajectories import Episodes
from services.timing.hardware import Hardware

BIN_S = 60.0
MOST_HOURS = 1000.0


def simulate(
    trace: Trace,
    workload: Workload,
    hardware: Hardware,
    policy: Policy,
    *,
    hours: float = 2.0,
    seed: int = 0,
    settings: Settings | None = None,
) -> PolicyResult:
    """One policy. Raises ConfigError where the settings contradict each other."""
    chosen = checked(Settings() if settings is None else settings, hardware)
    if not 0 < hours <= MOST_HOURS:
        raise ConfigError(f"hours = {hours:g}: give more than 0, at most {MOST_HOURS:g}")
    episodes = Episodes(workload, chosen.max_context_tokens, chosen.prefix_reuse)
    profile = cold_start(chosen, episodes, hardware)
    simulation = Simulation(trace, episodes, profile, hardware, policy, chosen, seconds=hours * 3600, seed=seed)
    simulation.finish()
    return result_of(simulation, trace)


def compare(
    trace: Trace,
    workload: Workload,
    hardware: Hardware,
    policies: Sequence[Policy],
    *,
    hours: float = 2.0,
    seed: int = 0,
    settings: Settings | None = None,
    oracle: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """Several policies on the same of everything. `progress` is told what runs; `oracle`: what could be reached, too."""
    began_s = time.perf_counter()
    chosen = Settings() if settings is None else settings
    found: dict[str, PolicyResult] = {}
    for policy in policies:
        progress(policy.name)
        found[policy.name] = simulate(trace, workload, hardware, policy, hours=hours, seed=seed, settings=chosen)
    oracles: tuple[Oracle, ...] = ()
    if oracle:
        oracles = reachable(trace, workload, hardware, hours=hours, seed=seed, settings=chosen, progress=progress)
    return Result(
        trace=trace.name,
        workload=workload.name,
        hardware=hardware.name,
        hours=hours,
        seed=seed,
        settings=described(chosen),
        budget=budget_of(trace, chosen, hours * 3600),
        policies=found,
        oracle=oracles[0] if oracles else Oracle(throughput_tokens_per_s=0.0),
        oracles=oracles,
        wall_s=time.perf_counter() - began_s,
    )


def reachable(
    trace: Trace,
    workload: Workload,
    hardware: Hardware,
    *,
    hours: float,
    seed: int,
    settings: Settings,
    measure: Measure | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Oracle, ...]:
    """The overlapped and the batch-synchronous oracle (see `oracle`). A `measure` may be used again for other traces."""
    measure = measure or Measure(workload, hardware, settings, seed=0)
    counts = worker_counts(trace, settings, hardware.gpus, hours * 3600)
    found: list[Oracle] = []
    for name, early in (("overlapped", True), ("batch-synchronous", False)):
        policy = oracle_policy(tables(measure, counts, early_start=early, progress=progress), early_start=early)
        own = msgspec.structs.replace(settings, early_start=None, spans=False)
        result = simulate(trace, workload, hardware, policy, hours=hours, seed=seed, settings=own)
        found.append(Oracle(throughput_tokens_per_s=result.throughput_tokens_per_s, name=name))
    return tuple(found)


def described(settings: Settings) -> dict[str, float | int | str]:
    """Settings for the result: values, and where each default comes from as `NAME.source`."""
    found: dict[str, float | int | str] = {}
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if name == "early_start":
            value = "as each policy does" if value is None else str(value)
        found[name] = int(value) if isinstance(value, bool) else value
        if name in SOURCES and value == getattr(Settings(), name):
            found[f"{name}.source"] = SOURCES[name]
    return found


def budget_of(trace: Trace, settings: Settings, seconds: float) -> tuple[Budget, ...]:
    """The GPUs that there are."""
    most = settings.most_preemptible_gpus
    steps = [Budget(0.0, settings.reserved_gpus, min(most, trace.at(0.0)), settings.training_gpus)]
    for step in trace.steps:
        if 0.0 < step.time_s < seconds:
            steps.append(Budget(step.time_s, settings.reserved_gpus, min(most, step.gpus), settings.training_gpus))
    return tuple(steps)


def result_of(simulation: Simulation, trace: Trace) -> PolicyResult:
    """What a finished simulation found."""
    seen, settings, policy = simulation.seen, simulation.settings, simulation.policy
    steps = _steps(simulation)
    elapsed_s = steps[-1].end_s if steps else 0.0
    tokens = sum(step.rollout_tokens + step.trained_tokens for step in steps)
    reserved = policy.reserved_gpus(trace, settings, simulation.hardware, simulation.seconds)
    hours = simulation.seconds / 3600
    spot_hours = 0.0
    if policy.elastic:
        entries = budget_of(trace, settings, simulation.seconds)
        ends = [*(entry.at_s for entry in entries[1:]), simulation.seconds]
        spot_hours = sum(e.preemptible_gpus * (end - e.at_s) for e, end in zip(entries, ends, strict=True)) / 3600
    training_hours = settings.training_gpus * hours
    busy = sum(worker.busy_s() for worker in (*simulation.workers.values(), *simulation.ended))
    busy *= simulation.hardware.gpus
    busy += settings.training_gpus * sum(
        min(end, simulation.seconds) - start for start, end in simulation.trainer.spans
    )
    gpu_hours = reserved * hours + spot_hours + training_hours
    throughput = tokens / elapsed_s if elapsed_s else 0.0
    cost = None
    if settings.spot_price or settings.reserved_price:
        price = settings.spot_price * spot_hours + settings.reserved_price * (reserved * hours + training_hours)
        cost = price / (throughput * simulation.seconds / 1e6) if throughput else None
    lent = [record for _, record, _ in seen.records if record.lending and record.overlap_workers]
    held = [record.borrow for _, record, _ in seen.records]
    borrows = sum(now and not before for before, now in zip([False, *held], held, strict=False))
    return PolicyResult(
        throughput_tokens_per_s=throughput,
        train_steps=len(steps),
        mean_train_step_s=elapsed_s / len(steps) if steps else 0.0,
        staleness_max=max((step.staleness for step in steps), default=0),
        trajectories_lost=0,
        gpu_busy_fraction=busy / (gpu_hours * 3600) if gpu_hours else 0.0,
        decisions=len(seen.records),
        reward_mean=fmean(step.reward for step in steps) if steps else 0.0,
        generated_tokens=simulation.rollout.generated,
        regenerated_tokens=simulation.rollout.regenerated,
        preemptions=seen.preemptions,
        borrows=borrows,
        borrows_denied=sum(not record.borrow for record in lent),
        late_returns=sum(back.at_ms > back.deadline_ms for back in seen.returns),
        reserved_gpu_hours=reserved * hours,
        preemptible_gpu_hours=spot_hours,
        training_gpu_hours=training_hours,
        cost_per_million_tokens=cost,
        models=policy.models,
        leaves_out=policy.leaves_out,
        steps=steps,
        decided=_decided(simulation),
        spans=() if simulation.uses is None else simulation.uses.spans(simulation.seconds),
        throughput=_throughput(steps, simulation.seconds),
    )


def _steps(simulation: Simulation) -> tuple[Step, ...]:
    seen = simulation.seen
    starts = dict(enumerate(start for start, _ in simulation.trainer.spans))
    lent = [at_s for at_s, record, _ in seen.records if record.borrow]
    steps: list[Step] = []
    begun_s = 0.0
    for end_s, finished in seen.steps:
        batch = finished.batch
        generated, trained = simulation.rollout.tokens_of.get(batch, (0, 0))
        trains_s = starts.get(batch, end_s)
        steps.append(
            Step(
                batch=batch,
                start_s=begun_s,
                end_s=end_s,
                rollout_tokens=generated,
                trained_tokens=trained,
                train_s=finished.train_s,
                wait_s=max(0.0, trains_s - begun_s),
                staleness=batch - seen.oldest.get(batch, batch),
                toggled=any(begun_s <= at_s < end_s for at_s in lent),
                reward=finished.reward_mean,
            )
        )
        begun_s = end_s
    return tuple(steps)


def _decided(simulation: Simulation) -> tuple[Decided, ...]:
    seen = simulation.seen
    found: list[Decided] = []
    changes = [at_s for at_s, record, _ in seen.records if record.changed]
    for at_s, record, cause in seen.records:
        until_s = next((later for later in changes if later > at_s), simulation.seconds)
        found.append(
            Decided(
                at_s=at_s,
                cause=cause,
                mode=record.mode.value,
                prefill=record.chosen.prefill,
                decode=record.chosen.decode,
                colocated=record.chosen.colocated,
                borrow=record.borrow,
                reason=record.reason,
                predicted_s=record.chosen.makespan_s,
                incumbent_s=_incumbent_s(record),
                realised_s=_realised_s(simulation, at_s, until_s),
            )
        )
    return tuple(found)


def _incumbent_s(record: DecisionRecord) -> float | None:
    return None if record.incumbent is None else record.incumbent.makespan_s


def _realised_s(simulation: Simulation, from_s: float, until_s: float) -> float | None:
    """From its first task to its last end: the first batch that ran between two changes of configuration."""
    seen = simulation.seen
    for batch, began_s in sorted(seen.admitted.items()):
        ready_s = seen.ready.get(batch)
        if began_s >= from_s and ready_s is not None:
            return ready_s - began_s if ready_s <= until_s else None
    return None


def _throughput(steps: tuple[Step, ...], seconds: float) -> tuple[tuple[float, float], ...]:
    """Tokens a second of the step that each moment lies in."""
    found: list[tuple[float, float]] = []
    index = 0
    at_s = 0.0
    while at_s < seconds and index < len(steps):
        while index < len(steps) and steps[index].end_s <= at_s:
            index += 1
        if index == len(steps):
            break
        step = steps[index]
        found.append((at_s, (step.rollout_tokens + step.trained_tokens) / max(1e-9, step.end_s - step.start_s)))
        at_s += BIN_S
    return tuple(found)
