"""What makes a readable rollout task senseless, and where one goes that is refused: the same for whoever takes one."""

from __future__ import annotations

import math

from messages.agent import RolloutTask
from messages.envelope import brief, encode
from messages.subjects import TOKEN, subject_of
from services.runtime.bus import Bus, BusError, Consumer, Delivery
from services.runtime.dead_letters import dead_letter
from services.runtime.log import get_logger


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


async def refuse(bus: Bus, consumer: Consumer, job: str, receiver: str, delivery: Delivery, reason: str) -> None:
    """Keep it as a dead letter, then have it delivered no more. Comes again by itself where the broker is away."""
    log = get_logger(receiver)
    letter = dead_letter(receiver, delivery.subject, delivery.data, reason, delivery.seq)
    log.warning(f"dead-lettered a message on {letter.subject}: {letter.reason}", action="dead_letter")
    try:
        await bus.publish_durable(
            subject_of(job, letter), encode(letter), msg_id=f"{receiver}:{delivery.subject}:{delivery.seq}"
        )
        await consumer.term(delivery)
    except BusError as error:
        log.warning(str(error), action="dead_letter_lost")
