"""A plan changes only what it must: every command on the bus is held against the plans in the stream.

Weight updates go to every worker and are no part of a plan. All other commands must be a plan's: a worker that is in no
plan gets none, and one that was in an earlier plan gets none that does not carry that plan's incarnation and generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from messages.envelope import Message, UndecodableMessage, decode
from messages.executors import ReconfigurationPlan
from messages.node_agent import Kill, Launch
from messages.rollout_worker import Activate, Deactivate, Drain, SetRole
from messages.subjects import event_subject, stream
from services.runtime.bus import Bus

KINDS: tuple[type[Message], ...] = (Launch, Kill, SetRole, Drain, Activate, Deactivate)


class CommandWatch:
    """Listens to all commands of a job from its start."""

    def __init__(self, bus: Bus, job: str) -> None:
        self.bus = bus
        self.job = job
        self.seen: list[Message] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen."""
        subscription = await self.bus.subscribe(f"pearl.{self.job}.cmd.>")

        async def listen() -> None:
            async for delivery in subscription:
                try:
                    message = decode(delivery.data, *KINDS)
                except UndecodableMessage:
                    continue
                if message not in self.seen[-64:]:  # commands are repeated until they are answered
                    self.seen.append(message)

        self._task = asyncio.create_task(listen())

    async def stop(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def needless(self, always: frozenset[str] = frozenset()) -> list[Message]:
        """Commands that no plan asked for. `always`: overlap workers, whose processes are launched once, before any plan."""
        plans = [
            decode(delivery.data, ReconfigurationPlan)
            async for delivery in self.bus.read(stream(self.job, "ev"), event_subject(self.job, ReconfigurationPlan))
        ]
        return needless_commands(self.seen, plans, always)


def needless_commands(
    commands: Sequence[Message], plans: Sequence[ReconfigurationPlan], always: frozenset[str]
) -> list[Message]:
    """The commands that are of no plan. Pure."""
    joining = {(each.worker, each.incarnation) for plan in plans for each in plan.add}
    given = {
        (each.worker, each.incarnation, each.role_generation) for plan in plans for each in (*plan.add, *plan.reassign)
    }
    leaving = {each.worker for plan in plans for each in plan.remove}
    changing = {each.worker for plan in plans for each in plan.reassign}
    added = {each.worker for plan in plans for each in plan.add}
    found: list[Message] = []
    for command in commands:
        match command:
            case Launch(worker=worker, incarnation=incarnation):
                wanted = (worker, incarnation) in joining or worker in always
            case SetRole(worker=worker, incarnation=incarnation, role_generation=generation):
                wanted = (worker, incarnation, generation) in given
            case Drain(worker=worker) | Deactivate(worker=worker):
                wanted = worker in leaving | changing | added
            case Activate(worker=worker):
                wanted = worker in added
            case Kill(worker=worker):
                wanted = worker in leaving | added | changing or worker in always
            case _:
                raise AssertionError(f"{command} is not watched")
        if not wanted:
            found.append(command)
    return found
