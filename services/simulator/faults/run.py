"""One run: a plan in, what was broken out. Also many runs at once, and the shrinking of a plan that fails.

The same plan gives the same run, on any machine and under any hash seed: `Outcome.digest` is of everything that was seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final

import msgspec

from messages.monitor import DecisionRecord
from services.decision_engine.decide import answer, question_of
from services.runtime.foreign import ForeignError, foreign_code
from services.runtime.pool import pool_size, worker_pool
from services.simulator.faults.checkers import Checkers
from services.simulator.faults.cluster import Cluster
from services.simulator.faults.inject import Injector
from services.simulator.faults.plan import Fault, Plan, Shape, draw
from services.simulator.faults.record import RunEnded, Seen, Stored, Violation

QUIET_MS: Final = 1_500
"""The run goes on for so long after all is done: what is told to nobody may still come."""
LIMIT_MS: Final = 180_000
"""After the last fault, a run ends at the latest then; a longer one as `limit_ms` says."""
STEP_LIMIT_MS: Final = 10_000
TRAJECTORY_LIMIT_MS: Final = 1_000
"""A train step with its evaluation takes about 2 s of its cluster's time, and a trajectory 0.2 s where one worker generates."""
MOST_SHRINKS: Final = 60
"""Runs that shrinking may take."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a plan. `events`: what was seen; `virtual_ms`: how long it took on its own clock."""

    plan: Plan
    violations: tuple[Violation, ...]
    events: int
    virtual_ms: int
    digest: str
    counts: dict[str, int]


def _not_again(at_ms: int, record: DecisionRecord) -> Iterator[Violation]:
    """A record is enough to make its decision again, to the last digit (11.9)."""
    found = answer(question_of(record))
    choice = found.choice
    again = (choice.chosen, choice.mode, choice.candidates, found.borrow, found.dedicated, found.full)
    if again != (record.chosen, record.mode, record.candidates, record.borrow, record.dedicated, record.full):
        told = f"decision {record.decision_id} comes out as {choice.mode} {choice.chosen}, borrow {found.borrow}, of its record"
        yield Violation("11.9 decisions come out again", at_ms, told)


def limit_ms(shape: Shape) -> int:
    """How long after its last fault a run of this shape may take, in ms of its own clock: several times what it needs."""
    return max(LIMIT_MS, shape.steps * (STEP_LIMIT_MS + shape.batch * TRAJECTORY_LIMIT_MS))


class Run:
    """A plan on a cluster, to be run to its end or to any event of it, and looked at."""

    def __init__(self, plan: Plan, *, keep: bool = True, digest: bool = False) -> None:
        self.plan = plan
        self.violations: list[Violation] = []
        job = plan.shape.job(plan.seed)
        self._checkers = Checkers(job)
        self._digest = hashlib.blake2b(digest_size=16) if digest else None
        self._known = 0  # problems told already
        self.cluster = Cluster(job, seed=plan.seed, watch=self._watch, keep=keep)
        self._start_ms = self.cluster.now_ms
        self._injector = Injector(self.cluster, plan)

    def to_event(self, number: int) -> None:
        """Until so many things were seen, if ever."""
        self._guarded(lambda: self.cluster.reaches(lambda: self.cluster.count >= number, limit_ms(self.plan.shape)))

    def to_end(self) -> Outcome:
        """Faults, then all work done or `limit_ms` passed, then a while of quiet."""
        self._guarded(self._whole)
        return Outcome(
            plan=self.plan,
            violations=tuple(self.violations),
            events=self.cluster.count,
            virtual_ms=self.cluster.now_ms - self._start_ms,
            digest="" if self._digest is None else self._digest.hexdigest(),
            counts=self._checkers.counts(),
        )

    def close(self) -> None:
        """Let the cluster go."""
        self.cluster.close()

    def _whole(self) -> None:
        cluster = self.cluster
        cluster.run(self._injector.over_ms + 1 - cluster.now_ms)
        done = cluster.reaches(lambda: cluster.finished and cluster.settled, limit_ms(self.plan.shape))
        cluster.run(QUIET_MS)
        cluster.see(RunEnded(cluster.now_ms, done))
        self.violations += self._checkers.finish()

    def _guarded(self, work: Callable[[], object]) -> None:
        """What a service raises where nobody catches it is a violation too."""
        try:
            with foreign_code():
                work()
        except ForeignError as error:
            self._violated("crash", str(error))
        self._problems()

    def _watch(self, seen: Seen) -> None:
        if self._digest is not None:
            self._digest.update(msgspec.msgpack.encode(seen))
        found = self._checkers.see(seen)
        if isinstance(seen, Stored) and isinstance(seen.message, DecisionRecord):
            found = [*found, *_not_again(seen.at_ms, seen.message)]
        if found:
            self.violations += found
        if len(self.cluster_problems) != self._known:
            self._problems()

    @property
    def cluster_problems(self) -> list[str]:
        """Services that failed of themselves."""
        cluster = getattr(self, "cluster", None)  # the first things are seen while it is made
        return [] if cluster is None else cluster.problems

    def _problems(self) -> None:
        found = self.cluster_problems
        for problem in found[self._known :]:
            self._violated("crash", problem)
        self._known = len(found)
        for problem in self.cluster.loop.problems:
            self._violated("crash", problem)
        self.cluster.loop.problems.clear()

    def _violated(self, invariant: str, detail: str) -> None:
        self.violations.append(Violation(invariant, self.cluster.now_ms, detail))


def outcome_of(plan: Plan, *, digest: bool = False) -> Outcome:
    """Run a plan to its end."""
    run = Run(plan, digest=digest)
    try:
        return run.to_end()
    finally:
        run.close()


def seeded(seed: int) -> Outcome:
    """Run the plan of a seed to its end."""
    return outcome_of(draw(seed))


def many(seeds: Sequence[int], *, jobs: int = 0) -> Generator[Outcome]:
    """Run them all, in order, on `jobs` processes (0: one a core), no more than `pool_size` allows."""
    jobs = pool_size(jobs, len(seeds))
    if jobs == 1 or len(seeds) < 4:
        yield from map(seeded, seeds)
        return
    with worker_pool(jobs) as pool:
        yield from pool.map(seeded, seeds, chunksize=max(1, min(8, len(seeds) // (4 * jobs))))


def shrunk(outcome: Outcome, *, most_runs: int = MOST_SHRINKS) -> Outcome:
    """A smaller plan that breaks the same promise: first the shortest prefix, then without whatever is not needed."""
    assert outcome.violations, "nothing to shrink: no promise was broken"
    invariant = outcome.violations[0].invariant
    best = outcome
    runs = 0

    def fails(faults: tuple[Fault, ...]) -> bool:
        nonlocal best, runs
        runs += 1
        found = outcome_of(msgspec.structs.replace(best.plan, faults=faults))
        if not any(violation.invariant == invariant for violation in found.violations):
            return False
        best = found
        return True

    low, high = 0, len(best.plan.faults)  # the shortest failing prefix, if failing is monotonous; else some failing one
    while low < high and runs < most_runs:
        middle = (low + high) // 2
        if fails(outcome.plan.faults[:middle]):
            high = middle
        else:
            low = middle + 1
    size = max(1, len(best.plan.faults) // 2)
    while runs < most_runs and best.plan.faults:
        faults, begin, removed = best.plan.faults, 0, False
        while begin < len(faults) and runs < most_runs:
            if fails(faults[:begin] + faults[begin + size :]):
                faults, removed = best.plan.faults, True
            else:
                begin += size
        if size == 1 and not removed:
            break
        size = max(1, size // 2)
    return best
