"""What becomes of an episode whose program has ended: a reward for its session, or another try of its task. Pure."""

from __future__ import annotations

import math
from typing import Final

import msgspec

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
"""Between episodes that fail one after another: tasks are not to be used up by what fails them all."""


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a command. `ended_by`: "", or the limit that ended it: "time" or "output"."""

    returncode: int  # negative: the signal
    output: str  # standard output and error together
    ended_by: str = ""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a program wrote to PEARL_RESULT: JSON with these fields, all of them optional.

    `status`: "completed", or "truncated" where a limit of its own ended it. `reward`: heard with harness.reward = "program".
    """

    status: str = "completed"
    reward: float | None = None


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """The session ends with a reward."""

    reward: float
    status: str


class GiveUp(msgspec.Struct, frozen=True, kw_only=True):
    """The session is abandoned: its task is tried again, and nothing of it is trained on."""

    reason: str


def parse_said(data: bytes | None) -> Said | None:
    """What a result file says; None for none, or for what is no such file."""
    if data is None:
        return Said()
    try:
        said = msgspec.json.decode(data, type=Said)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if said.status not in ("completed", "truncated") or (said.reward is not None and not math.isfinite(said.reward)):
        return None
    return said


def is_graded(ran: Ran) -> bool:
    """Whether what a program left is to be judged: it ended well, or at a limit. One that failed has not tried the task."""
    return bool(ran.ended_by) or ran.returncode == 0


def outcome(ran: Ran, result: bytes | None, passed: bool | None) -> Post | GiveUp:
    """What to do with the session. `passed`: what the hidden tests say; None where the program says the reward."""
    if not is_graded(ran):
        return GiveUp(reason=f"the harness ended with status {ran.returncode}")
    said = parse_said(result)
    if said is None:
        return GiveUp(reason="the harness wrote no valid PEARL_RESULT")
    status = "truncated" if ran.ended_by else said.status
    if passed is not None:
        return Post(reward=float(passed), status=status)
    if said.reward is None:
        if ran.ended_by:
            return Post(reward=0.0, status=status)
        return GiveUp(reason='the harness wrote no reward to PEARL_RESULT (harness.reward = "program")')
    return Post(reward=said.reward, status=status)


def pause_after(done: bool, pause_s: float) -> float:
    """Seconds to wait before the next episode, after one that was `done` or failed, which had waited `pause_s`."""
    return 0.0 if done else min(max(FIRST_PAUSE_S, 2 * pause_s), LONGEST_PAUSE_S)
