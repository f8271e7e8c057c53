"""What makes a readable rollout task senseless: the same for whoever takes one. Pure."""

from __future__ import annotations

import math

from messages.agent import RolloutTask
from messages.envelope import brief
from messages.subjects import TOKEN


def problem_of_task(task: RolloutTask, newest_version: int) -> str:
    """What is wrong, or "". `newest_version`: the policy after the job's last train step."""
    if not TOKEN.fullmatch(task.trajectory) or not TOKEN.fullmatch(task.group):
        return f"trajectory {brief(task.trajectory, 64)!r} or group {brief(task.group, 64)!r} is no name"
    if not 0 <= task.batch <= newest_version or task.retry < 0:
        return f"batch {task.batch}, retry {task.retry}: the job has batches 0 to {newest_version - 1}"
    if not 0 <= task.min_version <= task.batch:
        return f"min_version {task.min_version} of batch {task.batch}: no such version can serve it"
    if not (math.isfinite(task.temperature) and task.temperature >= 0):
        return f"temperature {task.temperature} is not a finite number from 0"
    return ""
