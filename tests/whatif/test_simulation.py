"""The what-if simulator: what holds in every run, that policies differ only in what they say, and what refuses to run."""

from __future__ import annotations

import random

import msgspec
import pytest

from messages.ids import Activity, Zone
from services.environments.workload import Trajectory, Turn, Workload
from services.jobfile import ConfigError
from services.preemption_feed.traces import Step, Trace
from services.simulator.whatif.jobs import cold_start
from services.simulator.whatif.oracle import COLOCATED, Measure, oracle_policy, worker_counts
from services.simulator.whatif.policies import ALL, find
from services.simulator.whatif.rollout import Episode
from services.simulator.whatif.run import compare, simulate
from services.simulator.whatif.settings import Settings
from services.simulator.whatif.simulation import Simulation
from services.simulator.whatif.trajectories import Episodes
from services.timing import hardware as descriptions

HARDWARE = descriptions.load("h800-qwen3-8b")
SMALL = Settings(
    reserved_gpus=4,
    most_preemptible_gpus=4,
    training_gpus=4,
    batch_trajectories=8,
    group_size=4,
    train_s=15.0,
    max_context_tokens=6000,
)
TRACE = Trace("made", (Step(0.0, 4), Step(130.0, 2), Step(200.0, 4), Step(260.0, 0), Step(400.0, 4)))
SECONDS = 600.0
PLANNED = "pearl-paper+early"
"""Every mechanism at once, decided by the closed forms, which are quick."""


def workload(seed: int = 0) -> Workload:
    """Twelve short trajectories."""
    generator = random.Random(seed)
    found: list[Trajectory] = []
    for number in range(12):
        context, turns = 300, list[Turn]()
        for _ in range(generator.randint(3, 12)):
            reply = generator.randint(5, 300)
            turns.append(Turn(context, reply, generator.random() * 2))
            context += reply + generator.randint(10, 400)
        found.append(Trajectory(f"t{number}", tuple(turns), float(generator.random() < 0.5)))
    return Workload("made", tuple(found))


class Watched(Simulation):
    """Checks, at every epoch of the role table and at every end of a simulation, what must always hold."""

    epochs = 0

    def _tell_table(self) -> None:
        super()._tell_table()
        self.epochs += 1
        training = self.trainer.busy
        for name, worker in self.workers.items():
            row = self.table.row(name)
            assert row is not None
            if worker.alive and training and row.zone is Zone.OVERLAP:
                assert not worker.state.resident, f"{name} holds memory while training computes"
            if row.activity is Activity.ACTIVE and row.incarnation == worker.incarnation and worker.alive:
                assert worker.state.serving or worker.state.busy == "drain", f"{name} is active and does not serve"


def run(name: str, seed: int = 0, settings: Settings = SMALL, seconds: float = SECONDS) -> Watched:
    episodes = Episodes(workload(), settings.max_context_tokens, settings.prefix_reuse)
    profile = cold_start(settings, episodes, HARDWARE)
    simulation = Watched(TRACE, episodes, profile, HARDWARE, find(name), settings, seconds=seconds, seed=seed)
    simulation.finish()
    return simulation


@pytest.mark.parametrize("name", [*ALL, "roll+early", "rlboost+early", "static-pd+early"])
def test_every_policy_trains_within_the_bound_and_loses_nothing(name: str) -> None:
    simulation = run(name)
    assert not simulation.seen.refusals, "production cores refused a message"
    assert len(simulation.seen.steps) >= 3
    batches = [finished.batch for _, finished in simulation.seen.steps]
    assert batches == list(range(len(batches))), "every batch once, in order"
    for batch in batches:
        assert batch - simulation.seen.oldest[batch] <= simulation.settings.staleness
        assert len(simulation.trainer.rewards) > batch
    # Every trajectory that began has ended or runs: none is lost.
    state = simulation._states["pipeline_scheduler"]  # pyright: ignore[reportPrivateUsage]
    assert simulation.rollout.running == sum(batch.running for batch in state.batches)
    assert state.retried == 0
    most = simulation.settings.in_flight if "early" in name or name == "pearl" else 1.0
    assert simulation.rollout.running <= most * simulation.settings.batch_trajectories


@pytest.mark.parametrize("name", ["rlboost+early", "seamlessflow"])
def test_interrupted_work_goes_on_where_it_was(name: str) -> None:
    """Interrupted replies are not generated again: engines made exactly the tokens that episodes received."""
    busy = msgspec.structs.replace(SMALL, batch_trajectories=32)
    simulation = run(name, settings=busy)
    assert simulation.seen.preemptions > 0 or name == "seamlessflow"
    assert simulation.rollout.interrupted > 0
    engines = [worker.engine for worker in (*simulation.workers.values(), *simulation.ended)]
    made = sum(engine.sums.decoded + engine.firsts for engine in engines)
    works = [(engine, work) for engine in engines for work in engine.works()]
    received = simulation.rollout.generated + sum(episode.made for episode in simulation.rollout.waiting())
    for engine, work in works:
        assert isinstance(work.of, Episode)
        received += work.of.made + engine.length(work) - work.start
    assert made == received


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    first, again, other = (run(PLANNED, seed) for seed in (3, 3, 4))
    steps = [[(at_s, each.batch) for at_s, each in sim.seen.steps] for sim in (first, again, other)]
    assert steps[0] == steps[1] != steps[2]


def test_policies_see_the_same_trajectories() -> None:
    tokens = [run(name).rollout.tokens_of for name in ("roll", PLANNED)]
    assert tokens[0][0] == tokens[1][0] and tokens[0][1] == tokens[1][1]


def test_borrowed_gpus_are_back_in_time_and_training_waits_for_them() -> None:
    simulation = run("seamlessflow")
    returns = simulation.seen.returns
    assert returns and all(back.at_ms <= back.deadline_ms for back in returns)
    for batch, (start_s, _) in enumerate(simulation.trainer.spans[1:], start=1):
        assert start_s >= simulation.seen.begun[batch] + HARDWARE.deactivate_s.value - 0.01


def test_early_start_is_not_slower_and_keeps_the_bound() -> None:
    plain, early = (simulate_small(name) for name in ("rlboost", "rlboost+early"))
    assert early.throughput_tokens_per_s > plain.throughput_tokens_per_s
    assert max(plain.staleness_max, early.staleness_max) <= 1


def simulate_small(name: str, **changes: object):
    settings = msgspec.structs.replace(SMALL, **changes)
    return simulate(TRACE, workload(), HARDWARE, find(name), hours=SECONDS / 3600, settings=settings)


def test_a_result_accounts_for_every_gpu_and_second() -> None:
    found = compare(TRACE, workload(), HARDWARE, [find("roll"), find(PLANNED)], hours=SECONDS / 3600, settings=SMALL)
    roll, pearl = found.policies["roll"], found.policies[PLANNED]
    assert roll.preemptible_gpu_hours == 0 and pearl.preemptible_gpu_hours > 0
    assert pearl.steps[0].start_s == 0 and pearl.steps[-1].end_s <= SECONDS
    for before, after in zip(pearl.steps, pearl.steps[1:], strict=False):
        assert before.end_s == after.start_s
    tokens = sum(step.rollout_tokens + step.trained_tokens for step in pearl.steps)
    assert pearl.throughput_tokens_per_s == pytest.approx(tokens / pearl.steps[-1].end_s)
    by_gpu: dict[str, float] = {}
    for span in sorted(pearl.spans, key=lambda span: (span.gpu, span.start_s)):
        assert span.start_s >= by_gpu.get(span.gpu, 0.0), "a GPU has one use at a time"
        by_gpu[span.gpu] = span.end_s
    reserved = [span for span in pearl.spans if span.gpu.startswith(("r0", "t0"))]
    assert sum(span.end_s - span.start_s for span in reserved) == pytest.approx(8 * SECONDS)
    assert 0 < pearl.gpu_busy_fraction < 1 and 0 < roll.gpu_busy_fraction < 1
    assert pearl.models and pearl.leaves_out
    assert found.settings["train_s"] == 15.0 and "staleness.source" in found.settings


def test_prices_become_a_cost_per_million_tokens() -> None:
    result = simulate_small("rlboost", spot_price=1.0, reserved_price=3.0)
    hours = SECONDS / 3600
    price = result.preemptible_gpu_hours * 1.0 + (result.reserved_gpu_hours + result.training_gpu_hours) * 3.0
    tokens = result.throughput_tokens_per_s * hours * 3600 / 1e6
    assert result.cost_per_million_tokens == pytest.approx(price / tokens)
    assert simulate_small("rlboost").cost_per_million_tokens is None


def test_a_rewritten_history_is_computed_again() -> None:
    def prefilled(reuse: float) -> int:
        simulation = run("roll", settings=msgspec.structs.replace(SMALL, prefix_reuse=reuse))
        steps = len(simulation.seen.steps)
        return sum(worker.engine.sums.prefilled for worker in simulation.workers.values()) // max(1, steps)

    assert prefilled(0.2) > 1.5 * prefilled(1.0)


def test_trajectories_end_at_the_context_limit_without_their_reward() -> None:
    episodes = Episodes(workload(), 1000)
    assert any(plan.truncated for plan in episodes.plans)
    for plan in episodes.plans:
        assert plan.tokens <= 1000
        assert plan.reward == 0.0 or not plan.truncated
        for before, after in zip(plan.turns, plan.turns[1:], strict=False):
            assert after.context == before.context + before.reply + after.new


def test_the_oracle_takes_the_best_measured_configuration_at_no_cost() -> None:
    counts = worker_counts(TRACE, SMALL, HARDWARE.gpus, SECONDS)
    assert counts == (2, 3, 4, 5, 6)
    measure = Measure(workload(), HARDWARE, SMALL, seed=0)
    best = measure.best(3, early_start=True)
    rates = {each: measure.rate(3, each, early_start=True) for each in (COLOCATED, (1, 2), (2, 1))}
    assert rates[best] == max(rates.values())
    oracle = oracle_policy({count: COLOCATED for count in counts}, early_start=True)
    free = simulate(TRACE, workload(), HARDWARE, oracle, hours=SECONDS / 3600, settings=SMALL)
    costly = simulate_small("elastic-lending+early")
    assert free.throughput_tokens_per_s > costly.throughput_tokens_per_s


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch_trajectories": 10}, "not a multiple of group_size"),
        ({"placement": "random"}, "use one of affinity, least-loaded"),
        ({"reserved_gpus": 1}, "a worker of this hardware takes 2"),
        ({"max_context_tokens": 10**8}, "use --set max_context_tokens="),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        simulate_small("roll", **changes)


def test_unknown_policies_and_hours_are_refused() -> None:
    with pytest.raises(ConfigError, match="policy 'rol' is unknown: use roll"):
        find("rol")
    with pytest.raises(ConfigError, match="hours = 0"):
        simulate(TRACE, workload(), HARDWARE, find("roll"), hours=0.0, settings=SMALL)


def test_a_thousand_workers_run() -> None:
    settings = msgspec.structs.replace(
        SMALL, reserved_gpus=2000, most_preemptible_gpus=0, batch_trajectories=512, spans=False
    )
    simulation = run("roll", settings=settings, seconds=80.0)
    assert len(simulation.workers) >= 1000
    assert simulation.rollout.generated > 0 and not simulation.seen.refusals
