"""The recent trajectories that the planner replays, put together from telemetry. Pure.

A trajectory is followed from its first turn; so many at once, taken as they start, so that long ones are as likely as short ones. It
enters the sample when its end is known and none of its turns is missing: telemetry may be lost.
"""

from __future__ import annotations

from typing import Final

import msgspec

MOST_TRAJECTORIES: Final = 64
MOST_TURNS: Final = 2560
"""Of the whole sample: about 35 kB of JSON in each profile and decision record."""
MOST_OPEN: Final = 96
MOST_TURNS_EACH: Final = 512
"""A trajectory of more turns is not followed."""
IDLE_STEPS: Final = 2
"""One of which so many train steps heard nothing is given up."""
FIELDS: Final = 3
"""Numbers a turn: new prompt tokens, reply tokens, environment milliseconds."""


class Following(msgspec.Struct, frozen=True):
    """A trajectory's turns so far. `turns`: how many it had in the end; -1: it has not ended."""

    numbers: tuple[int, ...]
    turns: int = -1
    idle: int = 0


class Sample(msgspec.Struct, frozen=True):
    """`complete`: the newest last, as `workload.profile/1` has them."""

    complete: tuple[tuple[int, ...], ...] = ()
    following: dict[str, Following] = {}  # never changed in place

    def with_turn(self, trajectory: str, turn: int, new: int, reply: int, env_s: float) -> Sample:
        """One turn was played. A repeated or missing one ends the following."""
        known = self.following.get(trajectory)
        if turn == 0:
            if known is None and len(self.following) >= MOST_OPEN:
                return self
            known = Following(())
        elif known is None:
            return self
        if len(known.numbers) != FIELDS * turn or turn >= MOST_TURNS_EACH:
            return self._without(trajectory)
        numbers = (*known.numbers, new, reply, round(min(env_s, 1e6) * 1000))
        return self._kept(trajectory, Following(numbers, known.turns))

    def with_end(self, trajectory: str, turns: int) -> Sample:
        """It ended after so many turns. The last turn's telemetry may come later."""
        known = self.following.get(trajectory)
        if known is None:
            return self
        return self._kept(trajectory, Following(known.numbers, turns))

    def without(self, trajectory: str) -> Sample:
        """It failed."""
        return self._without(trajectory) if trajectory in self.following else self

    def aged(self) -> Sample:
        """A train step ended."""
        following = {
            name: Following(each.numbers, each.turns, each.idle + 1)
            for name, each in self.following.items()
            if each.idle + 1 < IDLE_STEPS
        }
        return Sample(self.complete, following)

    def _kept(self, trajectory: str, known: Following) -> Sample:
        have = len(known.numbers) // FIELDS
        if 0 <= known.turns < have or known.turns > have + 1 or known.turns == 0:
            return self._without(trajectory)
        if known.turns != have:
            return Sample(self.complete, {**self.following, trajectory: known})
        complete = (*self.complete, known.numbers)[-MOST_TRAJECTORIES:]
        turns = sum(len(each) for each in complete) // FIELDS
        while turns > MOST_TURNS and len(complete) > 1:
            turns -= len(complete[0]) // FIELDS
            complete = complete[1:]
        return msgspec.structs.replace(self._without(trajectory), complete=complete)

    def _without(self, trajectory: str) -> Sample:
        return Sample(self.complete, {name: each for name, each in self.following.items() if name != trajectory})
