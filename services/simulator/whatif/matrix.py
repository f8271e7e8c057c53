"""Every policy on every segment with every model, several seeds: the comparison of issue "does it pay", with intervals.

A cell is one simulated run. What was simulated is kept in a folder, a file a cell, so that an interrupted run goes on where it was; a
cell that other code made is simulated again. Policies without preemptible GPUs do not see the trace: they are run once for all
segments. The most important cells come first, seed by seed, so that what there is can be read at any time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

import messages
import pearl_state
import services
from services.environments.workload import load as load_workload
from services.preemption_feed.traces import load as load_trace
from services.simulator.whatif.paper.runs import MODELS, SEGMENTS, WORKLOAD
from services.simulator.whatif.policies import ALL, EARLY, find
from services.simulator.whatif.report.summary import Interval, interval
from services.simulator.whatif.run import reachable, simulate
from services.simulator.whatif.settings import Settings
from services.timing.hardware import load as load_hardware

FIRST: Final = ("pearl", "pearl-paper+early", "rlboost", "rlboost+early", "pearl-paper", "roll")
"""Simulated before the others: what the targets are about."""
ORACLE: Final = "oracle"
"""In a policy's place: what could be reached, overlapped; it has no `+early`."""
ANY: Final = "any"
"""In a segment's place, for policies that do not see the trace."""
REFERENCE: Final = "roll"


def every_policy() -> tuple[str, ...]:
    """All, and with early start of the next batch those that have it not; the most important first."""
    named = [*ALL, *(name + EARLY for name, policy in ALL.items() if not policy.early_start)]
    return (*FIRST, ORACLE, *(name for name in named if name not in FIRST))


class Cell(msgspec.Struct, frozen=True, order=True):
    """One run."""

    hardware: str
    segment: str  # `ANY`: of the policy's own GPUs alone
    policy: str
    seed: int
    hours: float

    @property
    def name(self) -> str:
        """A file's."""
        return f"{self.hardware}_{self.segment}_{self.policy}_{self.hours:g}h_{self.seed}.json"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell's run found."""

    cell: Cell
    code: str  # of the code that ran
    throughput_tokens_per_s: float
    steps: int = 0
    staleness: int = 0
    reward: float = 0.0
    late_returns: int = 0
    cpu_s: float = 0.0


def code_version() -> str:
    """A digest of all code that a run can depend on."""
    digest = hashlib.sha256()
    for package in (messages, pearl_state, services):
        for root in package.__path__:
            for path in sorted(Path(root).rglob("*.py")):
                if "cli" not in path.parts and "report" not in path.parts and path.name != Path(__file__).name:
                    digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def sees_trace(policy: str) -> bool:
    """Whether a run depends on the segment."""
    return policy == ORACLE or find(policy).elastic or find(policy).large


def cells(policies: Sequence[str], seeds: Sequence[int], hours: float) -> Iterator[Cell]:
    """All, the most important first: the policies that the targets are about with each seed, then the others."""
    for group in ([each for each in policies if each in FIRST], [each for each in policies if each not in FIRST]):
        for seed in seeds:
            for hardware in MODELS:
                for policy in group:
                    for segment in SEGMENTS if sees_trace(policy) else (ANY,):
                        yield Cell(hardware, segment, policy, seed, hours)


def simulated(cell: Cell, code: str) -> Outcome:
    """Run a cell."""
    began_s = time.process_time()
    trace = load_trace(SEGMENTS[0] if cell.segment == ANY else cell.segment)
    workload, hardware, settings = load_workload(WORKLOAD), load_hardware(cell.hardware), Settings(spans=False)
    if cell.policy == ORACLE:
        found = reachable(trace, workload, hardware, hours=cell.hours, seed=cell.seed, settings=settings)[0]
        return Outcome(
            cell=cell,
            code=code,
            throughput_tokens_per_s=found.throughput_tokens_per_s,
            cpu_s=time.process_time() - began_s,
        )
    result = simulate(trace, workload, hardware, find(cell.policy), hours=cell.hours, seed=cell.seed, settings=settings)
    return Outcome(
        cell=cell,
        code=code,
        throughput_tokens_per_s=result.throughput_tokens_per_s,
        steps=result.train_steps,
        staleness=result.staleness_max,
        reward=result.reward_mean,
        late_returns=result.late_returns,
        cpu_s=time.process_time() - began_s,
    )


def run(
    folder: Path,
    policies: Sequence[str],
    seeds: Sequence[int],
    hours: float,
    progress: Callable[[int, int, str], None] = lambda done, of, told: None,
) -> list[Outcome]:
    """All cells, from the folder where it has them. After each new one `matrix.md` there is written again."""
    kept = folder / "cells"
    kept.mkdir(parents=True, exist_ok=True)
    code = code_version()
    wanted = list(cells(policies, seeds, hours))
    outcomes = [found for cell in wanted if (found := _kept(kept / cell.name, code)) is not None]
    have = {outcome.cell for outcome in outcomes}
    for index, cell in enumerate(wanted):
        if cell in have:
            continue
        progress(index, len(wanted), f"{cell.policy} on {cell.segment}, {MODELS[cell.hardware]}, seed {cell.seed}")
        outcome = simulated(cell, code)
        temporary = kept / f"{cell.name}.part"
        temporary.write_bytes(msgspec.json.encode(outcome))
        temporary.replace(kept / cell.name)
        outcomes.append(outcome)
        (folder / "matrix.md").write_text(table(outcomes, policies), encoding="utf-8")
    (folder / "matrix.md").write_text(table(outcomes, policies), encoding="utf-8")
    return outcomes


def _kept(path: Path, code: str) -> Outcome | None:
    try:
        outcome = msgspec.json.decode(path.read_bytes(), type=Outcome)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return outcome if outcome.code == code else None


Rates = dict[tuple[str, str, str], dict[int, float]]
"""(hardware, segment, policy) -> seed -> tokens a second."""


def rates(outcomes: Sequence[Outcome]) -> Rates:
    """By segment: a policy that does not see the trace has the same rate on each."""
    found: Rates = {}
    for outcome in outcomes:
        cell = outcome.cell
        for segment in SEGMENTS if cell.segment == ANY else (cell.segment,):
            by_seed = found.setdefault((cell.hardware, segment, cell.policy), {})
            by_seed[cell.seed] = outcome.throughput_tokens_per_s
    return found


def ratio(found: Rates, hardware: str, segment: str, policy: str, over: str) -> Interval | None:
    """Of two policies' throughputs, seed by seed; None: no seed has both."""
    mine, other = (found.get((hardware, segment, name), {}) for name in (policy, over))
    each = [mine[seed] / other[seed] for seed in sorted(mine.keys() & other.keys()) if other[seed] > 0]
    return interval(each) if each else None


def table(outcomes: Sequence[Outcome], policies: Sequence[str]) -> str:
    """Markdown: throughput of each policy, and how much more `pearl` makes, with 95 % intervals over the seeds."""
    found = rates(outcomes)
    lines: list[str] = []
    for hardware, model in MODELS.items():
        seeds = sorted({outcome.cell.seed for outcome in outcomes if outcome.cell.hardware == hardware})
        if not seeds:
            continue
        lines += [
            f"### {model}",
            "",
            f"Tokens/s, mean ± half of the 95 % interval (seeds {', '.join(map(str, seeds))}); `pearl` over each, seed by seed.",
            "",
            "| policy | segment 1 | 2 | 3 | `pearl` over it: 1 | 2 | 3 | staleness | reward |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for policy in policies:
            made = [
                outcome for outcome in outcomes if (outcome.cell.hardware, outcome.cell.policy) == (hardware, policy)
            ]
            if not made:
                continue
            columns = [_rate(found.get((hardware, segment, policy), {})) for segment in SEGMENTS]
            columns += [_gain(ratio(found, hardware, segment, "pearl", policy)) for segment in SEGMENTS]
            if policy == ORACLE:
                columns += ["-", "-"]
            else:
                rewards = interval([outcome.reward for outcome in made])
                columns += [str(max(outcome.staleness for outcome in made)), f"{rewards.mean:.3f}"]
            lines.append(f"| `{policy}` | {' | '.join(columns)} |")
        lines.append("")
        over = [ratio(found, hardware, segment, "pearl", REFERENCE) for segment in SEGMENTS]
        if all(each is not None for each in over):
            means = ", ".join(_times(each) for each in over if each is not None)
            mean = sum(each.mean for each in over if each is not None) / len(over)
            lines += [f"`pearl` over `{REFERENCE}`: {means}; mean {mean:.2f}.", ""]
    return "\n".join(lines)


def _rate(by_seed: dict[int, float]) -> str:
    if not by_seed:
        return "-"
    found = interval(list(by_seed.values()))
    return f"{found.mean:.0f}" + (f" ± {found.half:.0f}" if found.count > 1 else "")


def _gain(found: Interval | None) -> str:
    if found is None:
        return "-"
    return f"{100 * (found.mean - 1):+.1f}" + (f" ± {100 * found.half:.1f}" if found.count > 1 else "") + " %"


def _times(found: Interval) -> str:
    return f"{found.mean:.2f}" + (f" ± {found.half:.2f}" if found.count > 1 else "") + "x"
