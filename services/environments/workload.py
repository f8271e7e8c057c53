"""Recorded workloads: trajectories as turns with their lengths and delays. Pure but for `load`.

The file is a CSV with one row a turn: `traj, turn, prompt_tokens` (the whole context that was sent), `completion_tokens,
env_time_s` (from the reply until the next request could be sent; empty: none), and if there is one, `reward` (of the trajectory, on any of
its rows). Rows may be in any order; forgiven is what `services.csvtable` forgives. What cannot be understood is a
`WorkloadError` naming file, line and reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from services import csvtable
from services.jobfile import ConfigError

BUILT_IN: Final = ("swebench-mini",)
"""500 runs of mini-swe-agent on SWE-bench Verified; source and licence in `workloads/LICENSE.md`."""
DELAY_SHARES: Final = {"swebench-mini": 0.15}
"""How much of a recorded delay was the environment's. The built-in one recorded the time between two calls, in which the recorded
model replied too: 6.7 s a turn, while tools took 1.0 s a turn where that was recorded (the same agent and benchmark)."""
COLUMNS: Final = ("traj", "turn", "prompt_tokens", "completion_tokens", "env_time_s")
MOST_TOKENS: Final = 100_000_000
MOST_SECONDS: Final = 1e7
MOST_REWARD: Final = 1e9


class WorkloadError(ConfigError):
    """The workload cannot be used: the message names the file, the line and the reason."""


class Turn(msgspec.Struct, frozen=True):
    """One request and what came after it."""

    prompt_tokens: int  # the context that was sent
    completion_tokens: int
    env_time_s: float


class Trajectory(msgspec.Struct, frozen=True):
    """Its turns in order, at least one."""

    name: str
    turns: tuple[Turn, ...]
    reward: float = 0.0


class Workload(msgspec.Struct, frozen=True):
    """Trajectories in order of their names' first rows. `delay_share`: how much of `env_time_s` is the environment's."""

    name: str
    trajectories: tuple[Trajectory, ...]
    delay_share: float = 1.0


@lru_cache(maxsize=4)
def load(name: str) -> Workload:
    """A built-in workload by its name, or a CSV file by its path; read once. Raises WorkloadError."""
    path = Path(__file__).parent / "workloads" / f"{name}.csv" if name in BUILT_IN else Path(name)
    return parse(csvtable.read(path, BUILT_IN, WorkloadError), name)


def parse(text: str, name: str = "workload") -> Workload:
    """Raises WorkloadError."""
    rows = csvtable.records(text, name, WorkloadError)
    nothing: list[str] = []
    line, first = next(rows, (1, nothing))
    columns = csvtable.header(first, line, name, WorkloadError) if first else nothing
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        raise WorkloadError(
            f"{name}: line {line}: no column {', '.join(missing)}; one row a turn with {','.join(COLUMNS)} is expected"
        )
    csvtable.once(columns, (*COLUMNS, "reward"), line, name, WorkloadError)
    turns: dict[str, dict[int, Turn]] = {}
    rewards: dict[str, float] = {}
    lines: dict[tuple[str, int], int] = {}
    for line, cells in rows:
        named = {column: cell.strip() for column, cell in zip(columns, cells, strict=False)}
        trajectory = named.get("traj", "")
        if not trajectory:
            raise WorkloadError(f"{name}: line {line}: no traj")
        number = _whole(named, "turn", line, name, 0, MOST_TOKENS)
        own = turns.setdefault(trajectory, {})
        if number in own:
            raise WorkloadError(
                f"{name}: line {line}: turn {number} of {trajectory[:40]!r} is there twice (line {lines[trajectory, number]}, too)"
            )
        lines[trajectory, number] = line
        own[number] = Turn(
            _whole(named, "prompt_tokens", line, name, 1, MOST_TOKENS),
            _whole(named, "completion_tokens", line, name, 0, MOST_TOKENS),
            _between(named, "env_time_s", line, name, 0.0, MOST_SECONDS) if named.get("env_time_s") else 0.0,
        )
        if named.get("reward"):
            reward = _between(named, "reward", line, name, -MOST_REWARD, MOST_REWARD)
            if rewards.setdefault(trajectory, reward) != reward:
                raise WorkloadError(
                    f"{name}: line {line}: reward {reward:g} of {trajectory[:40]!r}, which has {rewards[trajectory]:g} on another row"
                )
    if not turns:
        raise WorkloadError(f"{name}: line {line + 1}: no data below the header")
    for trajectory, own in turns.items():
        numbers = sorted(own)
        hole = next((before + 1 for before, after in pairwise(numbers) if after != before + 1), None)
        if hole is not None:
            raise WorkloadError(
                f"{name}: line {lines[trajectory, numbers[-1]]}: turn {hole} of {trajectory[:40]!r} is missing"
            )
    trajectories = tuple(
        Trajectory(trajectory, tuple(own[number] for number in sorted(own)), rewards.get(trajectory, 0.0))
        for trajectory, own in turns.items()
    )
    return Workload(name, trajectories, DELAY_SHARES.get(name, 1.0))


def as_csv(trajectories: Iterable[Trajectory]) -> str:
    """The file that `parse` reads as these trajectories: a row a turn, the reward on the last."""
    lines = [",".join((*COLUMNS, "reward"))]
    for trajectory in trajectories:
        name = trajectory.name
        if any(each in name for each in ',"\r\n') or name.startswith("#"):
            name = '"' + name.replace('"', '""') + '"'
        last = len(trajectory.turns) - 1
        lines += [
            f"{name},{index},{turn.prompt_tokens},{turn.completion_tokens},{turn.env_time_s!r},"
            + (f"{trajectory.reward!r}" if index == last else "")
            for index, turn in enumerate(trajectory.turns)
        ]
    return "\n".join(lines) + "\n"


def _whole(cells: dict[str, str], column: str, line: int, name: str, least: int, most: int) -> int:
    value = _between(cells, column, line, name, float(least), float(most))
    if value != int(value):
        raise WorkloadError(f"{name}: line {line}: {column} {value:g} is not a whole number")
    return int(value)


def _between(cells: dict[str, str], column: str, line: int, name: str, least: float, most: float) -> float:
    value = csvtable.number(cells.get(column, ""), column, line, name, WorkloadError)
    if not least <= value <= most:
        raise WorkloadError(f"{name}: line {line}: {column} {value:g} is not between {least:g} and {most:g}")
    return value
