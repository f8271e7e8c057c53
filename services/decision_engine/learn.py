"""What the decision engine learns from what happened: realised makespans, and how long budgets and workers last. Pure.

A batch's makespan is measured from the end of one batch to the end of the next, if training waited for it: then rollout was what took
the time. What served meanwhile is read from the role table, not from targets, for new workers come a minute after they were
wanted. Where several configurations served one after the other, each is taken to have done the share of the batch that its time
is of its predicted makespan; what the whole batch took more or less is put down to the one that served most.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from messages.decision_engine import BudgetChanged
from messages.monitor import Averaged, Observed
from services.decision_engine.correct import Counts
from services.decision_engine.stakes import Life

Predicts = Callable[[Counts], float]
"""Seconds of a batch on a configuration, uncorrected; 0: not known."""

MOST_OBSERVED = 24
MOST_SERVED = 12
"""Configurations in one batch beyond which it says nothing about any."""
LEAST_SHARE = 0.6
"""Of a batch, that one configuration must have done for it to count."""
MOST_ERROR = 5.0
"""A realised makespan this many times away from the predicted one measured something else."""
SMOOTHING = 0.3
"""Weight of the newest in moving averages."""
TRIAL_BATCHES = 2
"""A trial ends with so many batches, measured or not."""


class Served(msgspec.Struct, frozen=True):
    """A configuration that served from this moment on (Unix ms)."""

    counts: Counts
    since_ms: int


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """Bounded. `holding`: the trial that runs; `trial_batches`: batches that ended since it began."""

    observed: tuple[Observed, ...] = ()
    served: tuple[Served, ...] = ()  # since the last batch ended; the last one serves now
    broken: bool = False  # too many configurations since then
    most: Counts | None = None  # what served most of the last batch
    ended_ms: int = 0  # the last batch ended; 0: none has
    period_s: float = 0.0  # between two ends of batches, moving average; 0: not known
    seen_ms: int = 0  # the last budget
    budgets: Life = Life()
    workers: Life = Life()
    probed: bool = False  # the one trial was spent
    holding: Counts | None = None
    trial_batches: int = 0
    train_s: float = 0.0  # from asking for training's GPUs to the end of a train step, moving average; 0: not known
    train_since_ms: int = 0
    averages: tuple[Averaged, ...] = ()  # what earlier samples predicted
    batches: int = 0  # that ended since what served is counted, where more than one is measured together

    @property
    def may_probe(self) -> bool:
        """Whether a trial may begin: something was measured, of one mode only."""
        return not self.probed and len({each.prefill > 0 for each in self.observed}) == 1

    def on_budget(
        self, before: BudgetChanged | None, budget: BudgetChanged, now_ms: int, preemptible: frozenset[str]
    ) -> Learned:
        """How long the last one lasted, and who left."""
        if before is None:
            return msgspec.structs.replace(self, seen_ms=now_ms)
        waited_s = max(0, now_ms - self.seen_ms) / 1000
        changed = _usable(before) != _usable(budget)
        spot = preemptible & frozenset(before.dedicated)
        gone = len(spot - frozenset(budget.dedicated))
        return msgspec.structs.replace(
            self,
            seen_ms=now_ms,
            budgets=self.budgets.waited(waited_s).ended(int(changed)),
            workers=self.workers.waited(waited_s * len(spot)).ended(gone),
        )._on_training(before, budget, now_ms)

    def _on_training(self, before: BudgetChanged, budget: BudgetChanged, now_ms: int) -> Learned:
        new = self
        if before.training_batch == budget.training_batch:
            return new
        if before.training_batch is not None and self.train_since_ms:
            took_s = max(0, now_ms - self.train_since_ms) / 1000
            smooth_s = took_s if not self.train_s else self.train_s + SMOOTHING * (took_s - self.train_s)
            new = msgspec.structs.replace(new, train_s=smooth_s)
        return msgspec.structs.replace(new, train_since_ms=0 if budget.training_batch is None else now_ms)

    def on_serving(self, counts: Counts, now_ms: int) -> Learned:
        """The role table shows who serves."""
        if self.served and self.served[-1].counts == counts:
            return self
        if len(self.served) >= MOST_SERVED:
            last = Served(counts, now_ms)
            return msgspec.structs.replace(self, served=(*self.served[: MOST_SERVED - 1], last), broken=True)
        return msgspec.structs.replace(self, served=(*self.served, Served(counts, now_ms)))

    def on_batch_end(self, predicts: Predicts, batch: int, now_ms: int, together: int = 1) -> Learned:
        """A batch is complete, and training had waited for it. `together`: so many are measured as one: where batches overlap, chance
        decides which of those that are open at once ends first."""
        trial_batches = self.trial_batches + 1 if self.holding is not None else 0
        if self.ended_ms and self.batches + 1 < together:
            return msgspec.structs.replace(self, batches=self.batches + 1, trial_batches=trial_batches)._trial_over()
        new = msgspec.structs.replace(
            self,
            served=(Served(self.served[-1].counts, now_ms),) if self.served else (),
            broken=False,
            most=self.measured_on(now_ms),
            ended_ms=now_ms,
            batches=0,
            trial_batches=trial_batches,
        )
        if self.ended_ms and now_ms > self.ended_ms:
            took_s = (now_ms - self.ended_ms) / 1000 / together
            new = msgspec.structs.replace(
                new, period_s=took_s if not self.period_s else self.period_s + SMOOTHING * (took_s - self.period_s)
            )
            found = None if self.broken else self._measured(predicts, batch, now_ms, together)
            if found is not None:
                new = msgspec.structs.replace(new, observed=(*self.observed, found)[-MOST_OBSERVED:])
        return new._trial_over()

    def _trial_over(self) -> Learned:
        both = len({each.prefill > 0 for each in self.observed}) > 1
        if self.holding is not None and (self.trial_batches >= TRIAL_BATCHES or both):
            return msgspec.structs.replace(self, holding=None, trial_batches=0)
        return self

    def measured_on(self, now_ms: int = 0) -> Counts | None:
        """What served longest since the last batch ended; without a time, what served most of the last one."""
        if not now_ms and self.most is not None:
            return self.most
        lasted: dict[Counts, int] = {}
        ends = [
            *(each.since_ms for each in self.served[1:]),
            max(now_ms, self.served[-1].since_ms) if self.served else 0,
        ]
        for each, end_ms in zip(self.served, ends, strict=False):
            if sum(each.counts):
                lasted[each.counts] = lasted.get(each.counts, 0) + end_ms - each.since_ms
        return max(lasted, key=lambda counts: lasted[counts], default=None)

    def on_trial(self, counts: Counts | None) -> Learned:
        """A decision was made: of a trial, or (None) of none, which ends one."""
        if counts is None:
            return self if self.holding is None else msgspec.structs.replace(self, holding=None, trial_batches=0)
        if self.holding == counts:
            return self
        return msgspec.structs.replace(self, holding=counts, probed=True, trial_batches=0)

    def _measured(self, predicts: Predicts, batch: int, now_ms: int, together: int) -> Observed | None:
        if not self.served:
            return None
        done: dict[Counts, float] = {}
        longest: dict[Counts, float] = {}
        ends = [*(each.since_ms for each in self.served[1:]), now_ms]
        for each, end_ms in zip(self.served, ends, strict=True):
            seconds = max(0, end_ms - max(each.since_ms, self.ended_ms)) / 1000
            if not seconds:
                continue
            predicted_s = predicts(each.counts)
            if predicted_s <= 0:
                return None
            longest[each.counts] = predicted_s
            done[each.counts] = done.get(each.counts, 0.0) + seconds / predicted_s
        total = sum(done.values()) / together
        if not done or not 1 / MOST_ERROR < total < MOST_ERROR:
            return None
        most = max(done, key=lambda counts: done[counts])
        if done[most] < LEAST_SHARE * total * together:
            return None
        return Observed(*most, longest[most], longest[most] * total, batch)


def _usable(budget: BudgetChanged) -> frozenset[str]:
    idle = budget.overlap if budget.training_batch is None else ()
    return frozenset((*budget.dedicated, *idle))
