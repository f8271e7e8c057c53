"""Turns a job's journal into a workload: what `pearl simulate record` writes and `pearl simulate run` replays. Pure.

A trajectory counts once it has ended as completed or truncated: then its end names the journal's records that are its turns,
and retries and interrupted attempts are out of the way. What the environment took is what the agent measured, so all of the
recorded delay is the environment's. Of a turn only its lengths and times are kept.
"""

from __future__ import annotations

import msgspec

from messages.agent import TurnFinished
from messages.pipeline_scheduler import TrajectoryCompleted
from services.environments.workload import Trajectory, Turn

MOST_TURNS = 2_000_000
"""Turns kept of trajectories that did not end yet; the oldest are dropped beyond."""


class _Kept(msgspec.Struct, frozen=True, gc=False):
    new: int
    reply: int
    env_s: float


class Recorder:
    """Feed it ends and turns as they are read, turns at least up to the ends' own; `trajectories` is what came of it."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self.incomplete = 0  # ended, but some of their turns were gone from the journal
        self.failed = 0
        self._turns: dict[int, _Kept] = {}
        self._seen: set[str] = set()

    def turn(self, seq: int, record: TurnFinished) -> None:
        """A record of the journal."""
        self._turns[seq] = _Kept(len(record.prompt_new), len(record.reply), record.env_s)
        if len(self._turns) > MOST_TURNS:
            del self._turns[next(iter(self._turns))]

    def end(self, end: TrajectoryCompleted) -> bool:
        """The end of a trajectory, all of whose turns have been fed. True if it is recorded now; harmless if repeated."""
        if end.trajectory in self._seen:
            return False
        turns = [self._turns.pop(seq, None) for seq in end.journal]
        if end.status == "failed":
            self.failed += 1
            return False
        self._seen.add(end.trajectory)
        if not turns or None in turns:
            self.incomplete += 1
            return False
        context = 0
        found: list[Turn] = []
        for kept in turns:
            assert kept is not None
            context += kept.new
            found.append(Turn(max(1, context), kept.reply, round(kept.env_s, 4)))
            context += kept.reply
        self.trajectories.append(Trajectory(str(end.trajectory), tuple(found), end.reward))
        return True
