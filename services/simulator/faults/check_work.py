"""Promises about trajectories and batches (DESIGN 7, 11.4, 11.5): none lost, none twice, none too stale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from messages.agent import RolloutTask, TurnFinished
from messages.pipeline_scheduler import BatchItem, BatchReady, StepFinished, TrajectoryCompleted, WeightsPublished
from services.simulator.faults.history import History, Promise
from services.simulator.faults.record import Received, RunEnded, Seen, Stored

Try = tuple[str, int]
"""A trajectory and the number of a try at it."""
EVALUATION = "eval-"


class NoTrajectoryLost(Promise):
    """Every task of a group that a batch is made of ended once and is in that batch; batches are whole, in order, once."""

    name = "11.4 no trajectory lost or twice"
    kinds = (Stored, RunEnded)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._tasks: dict[Try, RolloutTask] = {}
        self._members: dict[str, set[str]] = defaultdict(set)  # group -> trajectories given as tasks
        self._turns: dict[int, TurnFinished] = {}  # by journal sequence
        self._ends: dict[Try, TrajectoryCompleted] = {}
        self._batches: dict[int, BatchReady] = {}
        self._counted: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._used: dict[int, str] = {}  # journal sequence -> the trajectory that was trained with it
        self._trained = 0
        self._finished = False

    def see(self, seen: Seen) -> Iterator[str]:
        match seen:
            case RunEnded():
                self._finished = seen.finished
            case Stored(message=RolloutTask() as task):
                yield from self._task(task)
            case Stored(message=TurnFinished() as turn):
                self._turns[seen.seq] = turn
            case Stored(message=TrajectoryCompleted() as end):
                yield from self._end(end)
            case Stored(message=BatchReady() as batch):
                yield from self._batch(batch)
            case Stored(message=StepFinished() as step):
                yield from self._step(step)
            case _:
                pass

    def finish(self) -> Iterator[str]:
        if self._finished and self._trained < self.job.pipeline.train_steps:
            yield f"{self._trained} of {self.job.pipeline.train_steps} batches were trained"

    def _task(self, task: RolloutTask) -> Iterator[str]:
        if task.evaluation:
            return
        known = self._tasks.setdefault((task.trajectory, task.retry), task)
        if known != task:
            yield f"task {task.trajectory} try {task.retry} was given twice, differently"
        self._members[task.group].add(task.trajectory)

    def _end(self, end: TrajectoryCompleted) -> Iterator[str]:
        if end.trajectory.startswith(EVALUATION):
            return
        key = (end.trajectory, end.retry)
        where = f"end of {end.trajectory} try {end.retry}"
        if key not in self._tasks:
            yield f"{where}: no such task was given"
        known = self._ends.setdefault(key, end)
        if (known.status, known.journal) != (end.status, end.journal):
            yield f"{where}: it ended twice, differently"
        yield from self._holds(where, end)

    def _holds(self, where: str, end: TrajectoryCompleted) -> Iterator[str]:
        turns = [self._turns.get(seq) for seq in end.journal]
        held = [turn for turn in turns if turn is not None]
        if len(held) != len(turns):
            yield f"{where}: {len(turns) - len(held)} of its turns are not in the journal"
        elif [(turn.trajectory, turn.retry, turn.turn) for turn in held] != [
            (end.trajectory, end.retry, number) for number in range(len(held))
        ]:
            yield f"{where}: its journal entries are not its turns, in order"
        elif sum(len(turn.reply) for turn in held) != end.generated_tokens:
            yield f"{where}: {end.generated_tokens} tokens, its turns have {sum(len(turn.reply) for turn in held)}"

    def _batch(self, batch: BatchReady) -> Iterator[str]:
        known = self._batches.get(batch.batch)
        if known is not None:
            if known.items != batch.items:
                yield f"batch {batch.batch} was made ready twice, differently"
            return
        self._batches[batch.batch] = batch
        where, pipeline = f"batch {batch.batch}", self.job.pipeline
        if len(batch.items) != pipeline.batch_trajectories:
            yield f"{where}: {len(batch.items)} trajectories, not {pipeline.batch_trajectories}"
        groups: dict[str, set[str]] = defaultdict(set)
        for item in batch.items:
            groups[item.group].add(item.trajectory)
            other = self._counted.setdefault(item.trajectory, batch.batch)
            if other != batch.batch:
                yield f"{where}: {item.trajectory} was counted in batch {other}"
            yield from self._item(where, batch.batch, item)
        if sum(map(len, groups.values())) != len(batch.items):
            yield f"{where}: a trajectory is in it twice"
        for group, members in groups.items():
            if len(members) != pipeline.group_size:
                yield f"{where}: group {group} has {len(members)} of {pipeline.group_size} trajectories"
            if self._members[group] != members:
                yield f"{where}: group {group} was given out as {sorted(self._members[group])}"
            if self._groups.setdefault(group, batch.batch) != batch.batch:
                yield f"{where}: group {group} was in batch {self._groups[group]}"

    def _item(self, where: str, batch: int, item: BatchItem) -> Iterator[str]:
        tries = [end for (trajectory, _), end in self._ends.items() if trajectory == item.trajectory]
        match = [end for end in tries if (end.journal, end.status) == (item.journal, item.status)]
        if not match:
            yield f"{where}: {item.trajectory} never ended so"
        elif match[0].batch != batch or match[0].group != item.group or item.status == "failed":
            yield f"{where}: {item.trajectory} is of batch {match[0].batch}, group {match[0].group}, {item.status}"
        for seq in item.journal:
            other = self._used.setdefault(seq, item.trajectory)
            if other != item.trajectory:
                yield f"{where}: turn {seq} is counted for {item.trajectory} and for {other}"

    def _step(self, step: StepFinished) -> Iterator[str]:
        if step.batch < self._trained:
            return  # said again by a trainer that was restarted
        if step.batch != self._trained or step.version != step.batch + 1:
            yield f"batch {step.batch} made version {step.version} when batch {self._trained} was due"
        if step.batch not in self._batches:
            yield f"batch {step.batch} was trained and never ready"
        self._trained = step.batch + 1


class Staleness(Promise):
    """Every token of batch k is of a version from k - eta to k, and exists; restarts change nothing in that."""

    name = "11.5 staleness bound"
    kinds = (Stored, Received)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._turns: dict[int, TurnFinished] = {}
        self._batch_of: dict[str, int] = {}
        self._least: dict[str, int] = {}
        self._published = -1
        self.most = 0  # the largest distance that was seen in a batch

    def see(self, seen: Seen) -> Iterator[str]:
        match seen:
            case Stored(message=WeightsPublished(version=version)):
                self._published = max(self._published, version)
            case Stored(message=RolloutTask() as task):
                self._batch_of[task.trajectory] = task.batch
                self._least[task.trajectory] = task.min_version
                lowest = max(0, task.batch - self.job.pipeline.staleness)
                if not task.evaluation and task.min_version != lowest:
                    yield f"{task.trajectory} of batch {task.batch} asks for version {task.min_version}, not {lowest}"
                if not task.evaluation and self._published < lowest:
                    yield f"{task.trajectory} of batch {task.batch} is admitted before version {lowest} exists"
            case Stored(message=TurnFinished() as turn):
                self._turns[seen.seq] = turn
            case Stored(message=BatchReady() as batch):
                for item in batch.items:
                    yield from self._item(batch.batch, item)
            case Received():
                trajectory = seen.request.split("/", 1)[0]
                least = self._least.get(trajectory, 0)
                if seen.version < least:
                    yield f"{seen.request}: tokens of version {seen.version} are kept, {least} is the least"
                if seen.version > self._published:
                    yield f"{seen.request}: tokens of version {seen.version}, which was not published"
            case _:
                pass

    def _item(self, batch: int, item: BatchItem) -> Iterator[str]:
        spans = [span for seq in item.journal if seq in self._turns for span in self._turns[seq].spans]
        for version in sorted({int(span.version) for span in spans}):
            self.most = max(self.most, batch - version)
            if not batch - self.job.pipeline.staleness <= version <= batch:
                yield f"batch {batch}: {item.trajectory} has tokens of version {version}"
        for seq in item.journal:
            turn = self._turns.get(seq)
            reached = 0
            for span in turn.spans if turn is not None else ():
                if span.start != reached or span.end <= span.start:
                    break
                reached = span.end
            if turn is not None and reached != len(turn.reply):
                yield f"batch {batch}: of {item.trajectory} turn {turn.turn} versions are known up to {reached} only"
