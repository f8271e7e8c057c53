"""Which nodes share a process. Pure."""

from __future__ import annotations

from services.jobfile import ConfigError, JobFile, rollout_slots


def fleets(job: JobFile) -> tuple[tuple[str, ...], ...]:
    """The job's nodes in order, as many together as make `rollout.workers_per_process` workers, at least one; () if none shares."""
    most = job.rollout.workers_per_process
    if most == 1:
        return ()
    workers: dict[str, int] = {node.name: 0 for node in job.nodes}
    for slot in rollout_slots(job):
        workers[slot.node] += 1
    found: list[list[str]] = []
    room = 0
    for node, count in workers.items():
        if not found or count > room:
            found.append([])
            room = most
        found[-1].append(node)
        room -= count
    return tuple(tuple(nodes) for nodes in found)


def nodes_of(job: JobFile, index: int) -> tuple[str, ...]:
    """The nodes of fleet `index`. Raises ConfigError."""
    if job.rollout.engine != "emulated":
        raise ConfigError(
            f"rollout.workers_per_process = {job.rollout.workers_per_process}: only emulated workers share a process; "
            f"rollout.engine is {job.rollout.engine!r}"
        )
    found = fleets(job)
    if not 0 <= index < len(found):
        raise ConfigError(f"--index {index}: rollout.workers_per_process makes {len(found)} fleets, from 0")
    return found[index]
