"""How good the choice of a configuration is: regret of each predictor against the best one measured (issue 6, paper 6.5.1).

A setting is a random workload, hardware and number of workers. The planner's predictor sees what it would see in a job: the
trajectories of past batches, constants that are each wrong by 10 %, and the makespan that each observed batch really took. After
four observed batches it chooses; the regret is how much longer its choice takes than the best configuration, each measured by
the judge (`judge.py`) over the same fresh batches with the same noise. Pure but for the built-in files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.ids import Mode
from messages.monitor import Averaged, Observed
from services.decision_engine import makespan, predict
from services.decision_engine.choose import Policy, Replays, Running, choose, scaled
from services.decision_engine.predict_average import kept
from services.decision_engine.predict_evidence import Evidence, Limits, decode_context
from services.decision_engine.stakes import Stakes
from services.environments.workload import Workload
from services.environments.workload import load as load_workload
from services.simulator.whatif.judge import Judge, Measured, Noise, Site, Trajectory, Turn, Workers
from services.timing.hardware import BUILT_IN, Hardware, Value, load

OBSERVED_STEPS: Final = 4
CONSTANT_ERROR: Final = 0.10
"""Each constant that the predictor knows is wrong by a factor exp(N(0, this))."""
NOISE: Final = Noise(speed=0.01, edge_s=0.02)
REALISED_NOISE: Final = 0.01
"""Standard deviation of what a realised makespan is measured wrong by."""
DRAWS: Final = 8
"""Fresh batches over which configurations are measured: which of near ties is best is luck with few, and luck counts as regret."""
DROP_AFTER: Final = (1.08, 1.04, 1.03, 1.02, 1.02, 1.015, 1.015)
"""After so many draws a configuration this much slower than the best is measured no further: it cannot be the best."""
MODES_DIFFER: Final = 0.05
LEAST_PROBE_COST: Final = 0.05
"""Share of a batch that the one probe may be predicted to cost (`decision.probe_share`)."""
MOST_REPLY: Final = 2048
"""Tokens that a turn may generate: jobs bound it."""
MOST_NEW: Final = 8192
STATIC: Final = (2, 3)
"""P:D of the static baseline: the paper's choice at the fewest GPUs of its Table 2."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A workload on some workers."""

    site: Site
    pool: tuple[Trajectory, ...]  # where trajectories are drawn from
    batch: int
    workers: int
    noise: Noise = NOISE


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one setting: seconds of every configuration measured, and what each predictor chose."""

    workers: int
    batch: int
    measured_s: dict[str, float]
    best: str
    regret: dict[str, float]  # by predictor
    chosen: dict[str, str]
    modes_differ: float  # best colocated against best disaggregated, as a share of the better
    probed: bool


def trajectories(workload: Workload) -> tuple[Trajectory, ...]:
    """A recorded workload as the judge takes it."""
    found: list[Trajectory] = []
    for each in workload.trajectories:
        context = 0
        turns: list[Turn] = []
        for turn in each.turns:
            new = max(1, turn.prompt_tokens - context)
            reply = max(1, turn.completion_tokens)
            turns.append(Turn(new, reply, turn.env_time_s * workload.delay_share))
            context += new + reply
        found.append(tuple(turns))
    return tuple(found)


def cut(trajectory: Trajectory, most_tokens: int, most_turns: int) -> Trajectory:
    """Its first turns, as far as the context limit goes."""
    kept: list[Turn] = []
    context = 0
    for turn in trajectory[:most_turns]:
        context += turn.new + turn.reply
        if context >= most_tokens:
            break
        kept.append(turn)
    return tuple(kept) or (Turn(1, 1, 0.0),)


def random_setting(seed: int, least: int = 2, most: int = 32) -> Setting:
    """A workload, hardware and budget; the same seed gives the same one."""
    random = Random(seed)

    def log_uniform(low: float, high: float) -> float:
        return math.exp(random.uniform(math.log(low), math.log(high)))

    hardware = load(random.choice(BUILT_IN))
    hardware = msgspec.structs.replace(
        hardware,
        host_s=Value(hardware.host_s.value * log_uniform(0.5, 2), "varied"),
        transfer_bytes_per_s=Value(hardware.transfer_bytes_per_s.value * log_uniform(0.03, 1), "varied"),
        prefill_attention_s_per_pair=Value(hardware.prefill_attention_s_per_pair.value * log_uniform(0.5, 2), "varied"),
        linear=msgspec.structs.replace(
            hardware.linear,
            seconds=tuple(
                s * f
                for s, f in zip(
                    hardware.linear.seconds, _ramp(log_uniform(0.5, 3), len(hardware.linear.seconds)), strict=True
                )
            ),
        ),
    )
    workers = round(log_uniform(least, most))
    batch = max(8, min(64, round(workers * log_uniform(1.5, 10))))
    turns = max(8, min(round(log_uniform(10, 30)), 500 // batch))
    new, reply, env = log_uniform(0.5, 6), log_uniform(0.3, 2), log_uniform(0.05, 3)
    rewritten = random.choice((0.0, random.random(), 1.0))
    pool: list[Trajectory] = []
    for each in random.sample(trajectories(load_workload("swebench-mini")), 200):
        longer = tuple(
            Turn(
                max(1, min(MOST_NEW, round(t.new * new))),
                max(1, min(MOST_REPLY, round(t.reply * reply))),
                t.env_s * env,
                random.random() < rewritten,
            )
            for t in each
        )
        pool.append(cut(longer, hardware.max_context_tokens - 1, max(1, round(turns * random.uniform(0.6, 1.4)))))
    longest = sum(sum(t.new + t.reply for t in each) for each in pool) / len(pool)
    kv_tokens = max(hardware.max_context_tokens * 2, round(log_uniform(1, 10) * longest * batch / workers))
    site = Site(hardware=hardware, max_running=64, chunk_tokens=random.choice((512, 2048, 8192)), kv_tokens=kv_tokens)
    return Setting(site=site, pool=tuple(pool), batch=batch, workers=workers)


def _ramp(most: float, count: int) -> list[float]:
    """Factors from 1, for few tokens, to `most`, for many: computation gets dearer, reading weights does not."""
    return [most ** (index / (count - 1)) for index in range(count)]


def configurations(workers: int) -> list[Workers]:
    """Colocation, then every ratio."""
    return [Workers(0, 0, workers), *(Workers(p, workers - p, 0) for p in range(1, workers))]


def draw(setting: Setting, seed: int) -> tuple[Trajectory, ...]:
    """A batch."""
    random = Random(f"batch/{seed}")
    return tuple(random.choice(setting.pool) for _ in range(setting.batch))


def measure(setting: Setting, workers: Workers, seed: int) -> Measured:
    """One batch on one configuration: batch and noise follow from the seed."""
    judge = Judge(setting.site, workers, noise=setting.noise, seed=seed, most_in_flight=setting.batch)
    return judge.measure(draw(setting, seed))


def sample_of(
    batches: Sequence[Sequence[Trajectory]], most: int = 64, most_turns: int = 2560
) -> tuple[tuple[int, ...], ...]:
    """The newest trajectories as `workload.profile/1` has them."""
    found: list[tuple[int, ...]] = []
    turns = 0
    for batch in reversed(batches):
        for trajectory in batch:
            if len(found) == most or turns + len(trajectory) > most_turns:
                return tuple(found)
            turns += len(trajectory)
            found.append(tuple(int(v) for t in trajectory for v in (t.new, t.reply, round(t.env_s * 1000))))
    return tuple(found)


def profile_of(
    setting: Setting,
    batches: Sequence[Sequence[Trajectory]],
    last: tuple[Workers, Measured],
    errors: Sequence[float],
    colocated: Measured | None = None,
) -> WorkloadProfile:
    """What the runtime tracker would say after these batches, the last of which ran like that; constants are off by `errors`.

    `colocated`: the last batch that ran so, from which t_prefill is taken; else it is what prefill workers took, without an
    iteration's fixed part, as the runtime tracker has it.
    """
    hardware: Hardware = setting.site.hardware
    newest = batches[-1]
    turns = [turn for trajectory in newest for turn in trajectory]
    replies = sum(turn.reply for turn in turns)
    unpacked = [tuple((t.new, t.reply, t.env_s, 1) for t in trajectory) for trajectory in newest]
    context = decode_context(unpacked)
    slowest = max(newest, key=lambda trajectory: (len(trajectory), sum(turn.env_s for turn in trajectory)))
    _, measured = last
    fixed_s = hardware.fixed_decode_s()
    if colocated is not None:
        prefill_s = colocated.prefill_s / max(1, colocated.prefilled)
    else:
        prefill_s = measured.prefill_s / max(1, measured.prefilled) - fixed_s * len(turns) / max(1, measured.prefilled)
    decode_share_s = measured.decode_s * replies / max(1, measured.iterations)
    return WorkloadProfile(
        train_step=0,
        B=setting.batch,
        S=float(len(slowest)),
        r=replies / len(turns),
        dL=measured.prefilled / len(turns),
        theta=sum(turn.env_s for turn in turns) / max(decode_share_s, 1e-9),
        A_s=fixed_s * errors[0],
        b_s=hardware.decode_s_per_sequence(context, 8) * errors[1],
        t_prefill_s=max(prefill_s, 1e-7) * errors[2],
        T_over_s=0.02,
        T_env_s=sum(turn.env_s for turn in slowest),
        kv_bytes_per_token=hardware.kv_bytes_per_token,
        bandwidth_bytes_per_s=hardware.transfer_bytes_per_s.value * errors[3],
        kv_bytes_per_trajectory=hardware.kv_bytes_per_token
        * sum(turn.new + turn.reply for turn in turns)
        / len(newest),
        kv_capacity_bytes_per_worker=hardware.kv_bytes_per_token * setting.site.capacity,
        sample=sample_of(batches),
    )


def counts_of(workers: Workers) -> tuple[int, int, int]:
    """(prefill, decode, colocated)."""
    return (workers.prefill, workers.decode, workers.colocated)


def name_of(workers: Workers) -> str:
    """ "8C", "3P5D"."""
    return f"{workers.colocated}C" if workers.colocated else f"{workers.prefill}P{workers.decode}D"


Table = dict[Workers, list[float]]


def measured_table(setting: Setting, seed: int, table: Table | None = None) -> Table:
    """Makespans of every configuration over the same fresh batches; of those that cannot be the best, of the first ones only."""
    table = {} if table is None else table
    alive = configurations(setting.workers)
    for index in range(DRAWS):
        means = {each: mean_s(setting, seed, table, each, index + 1) for each in alive}
        limit = min(means.values()) * (DROP_AFTER[index] if index < len(DROP_AFTER) else math.inf)
        alive = [each for each in alive if means[each] <= limit]
    return table


def mean_s(setting: Setting, seed: int, table: Table, workers: Workers, draws: int = DRAWS) -> float:
    """Over the first `draws` batches, measured where the table does not have them yet."""
    values = table.setdefault(workers, [])
    while len(values) < draws:
        values.append(measure(setting, workers, seed * 1000 + 500 + len(values)).makespan_s)
    return sum(values[:draws]) / draws


def evaluate(setting: Setting, seed: int, table: Table | None = None) -> Outcome:
    """Four observed batches, a choice by each predictor, their regrets. `table`: what was measured before."""
    random = Random(f"evaluate/{seed}")
    errors = [math.exp(random.gauss(0, CONSTANT_ERROR)) for _ in range(4)]
    every = configurations(setting.workers)
    table = measured_table(setting, seed, table)
    alive = [each for each in every if len(table.get(each, ())) >= DRAWS]

    def true_s(workers: Workers) -> float:
        return mean_s(setting, seed, table, workers)

    winner = min(alive, key=true_s)
    best_s = true_s(winner)

    batches: list[tuple[Trajectory, ...]] = []
    observed: list[Observed] = []
    probed = False
    running = Workers(0, 0, setting.workers)
    last: tuple[Workers, Measured] | None = None
    first: Measured | None = None  # the last colocated batch
    averages: tuple[Averaged, ...] = ()
    limits = Limits(chunk_tokens=setting.site.chunk_tokens, max_running=setting.site.max_running)
    for step in range(OBSERVED_STEPS + 1):
        if last is not None:
            profile = msgspec.structs.replace(profile_of(setting, batches, last, errors, first), train_step=step)
            evidence = Evidence(
                sample=profile.sample,
                observed=tuple(observed),
                limits=limits,
                measured_on=counts_of(last[0]),
                averages=averages,
            )
            # As the decision engine weighs it, but for what a change costs: the incumbent stays unless another wins a margin.
            by = Replays(profile, Policy(), evidence, Stakes(role_s=0.0))
            now = Running(
                mode=Mode.COLOCATED if running.colocated else Mode.DISAGGREGATED,
                prefill=running.prefill,
                decode=running.decode,
                colocated=running.colocated,
            )
            choice = choose(profile, setting.workers, now, Policy(), by)
            averages = kept(averages, choice.candidates, step)
            running = Workers(choice.chosen.prefill, choice.chosen.decode, choice.chosen.colocated)
            if not probed and step < OBSERVED_STEPS:
                probe = predict.probe(choice.candidates, observed, LEAST_PROBE_COST)
                if probe is not None:
                    probed = True
                    running = Workers(probe.prefill, probe.decode, probe.colocated)
            if step == OBSERVED_STEPS:
                break
        number = seed * 1000 + step
        measured = measure(setting, running, number)
        batches.append(draw(setting, number))
        last = (running, measured)
        first = measured if running.colocated else first
        profile = profile_of(setting, batches, last, errors, first)
        # Predicted for the very batch that ran: its luck is not an error of the model.
        own = Evidence(
            sample=sample_of(batches[-1:], setting.batch, 1 << 30), limits=limits, measured_on=counts_of(running)
        )
        predicted = predict.predicted_s(profile, counts_of(running), own)
        realised_s = measured.makespan_s * math.exp(random.gauss(0, REALISED_NOISE))
        observed.append(Observed(*counts_of(running), predicted, realised_s, step))
    assert last is not None
    profile = profile_of(setting, batches, last, errors, first)
    closed = makespan.best(makespan.candidates(profile, setting.workers, 0.95))
    assert closed is not None
    prefill, decode = scaled(STATIC, setting.workers)
    choices = {
        "planner": running,
        "eq. 1-3": Workers(closed.prefill, closed.decode, closed.colocated),
        "always colocated": Workers(0, 0, setting.workers),
        "static PD 2:3": Workers(prefill, decode, 0),
    }
    regret = {name: true_s(workers) / best_s - 1 for name, workers in choices.items()}
    # Where all of a mode were dropped, as far as its best was measured, over the same batches.
    depth = max(len(values) for each, values in table.items() if each.prefill)
    split = [each for each, values in table.items() if each.prefill and len(values) == depth]
    depth = min(depth, len(table[every[0]]))
    split_s = min(mean_s(setting, seed, table, each, depth) for each in split)
    alone_s = mean_s(setting, seed, table, every[0], depth)
    return Outcome(
        workers=setting.workers,
        batch=setting.batch,
        measured_s={name_of(each): sum(v) / len(v) for each, v in table.items()},
        best=name_of(winner),
        regret={name: max(0.0, value) for name, value in regret.items()},
        chosen={name: name_of(workers) for name, workers in choices.items()},
        modes_differ=abs(alone_s - split_s) / min(alone_s, split_s),
        probed=probed,
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """By predictor: settings, mean, p95 and largest regret in per cent, share within 1 %, share of the settings where it chose the mode of the best."""
    found: dict[str, dict[str, float]] = {}
    for name in outcomes[0].regret if outcomes else ():
        values = sorted(outcome.regret[name] * 100 for outcome in outcomes)
        found[name] = {
            "settings": len(values),
            "mean_percent": sum(values) / len(values),
            "p95_percent": values[min(len(values) - 1, int(0.95 * len(values)))],
            "max_percent": values[-1],
            "within_1_percent": sum(value <= 1 for value in values) / len(values),
        }
    return found


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:  # Any: a JSON object
    """All settings, and those whose modes differ by more than 5 %."""
    apart = [outcome for outcome in outcomes if outcome.modes_differ > MODES_DIFFER]
    return {
        "settings": len(outcomes),
        "all": summary(outcomes),
        "modes_differ_by_5_percent": summary(apart),
        "best_is_colocated": sum(outcome.best.endswith("C") for outcome in outcomes) / max(1, len(outcomes)),
        "probed": sum(outcome.probed for outcome in outcomes) / max(1, len(outcomes)),
        "observed_steps": OBSERVED_STEPS,
        "constant_error": CONSTANT_ERROR,
    }


def run(seeds: Sequence[int], progress: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """One setting a seed."""
    outcomes: list[Outcome] = []
    for seed in seeds:
        outcomes.append(evaluate(random_setting(seed), seed))
        if progress is not None:
            progress(outcomes[-1])
    return outcomes
