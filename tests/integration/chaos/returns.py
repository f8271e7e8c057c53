"""Were GPUs back by their deadline? Time in which their node agent was stopped or cut off does not count. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


class Outage(msgspec.Struct, frozen=True):
    """A node's agent was stopped, or could not reach the others. Unix ms."""

    node: str
    begin_ms: int
    end_ms: int
    until_up: bool = False  # the agent was killed: the outage ends when it has started again and said so


def ended(outages: Iterable[Outage], ups: Sequence[tuple[str, int]]) -> list[Outage]:
    """Outages with their ends. `ups`: when (Unix ms) each node's agent said that it is up."""
    found: list[Outage] = []
    for each in outages:
        back = [at_ms for node, at_ms in ups if node == each.node and at_ms >= each.begin_ms] if each.until_up else []
        found.append(msgspec.structs.replace(each, end_ms=max(each.end_ms, min(back, default=each.end_ms))))
    return found


class Return(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of a node that had to be free by a time, and when they were. `done_ms` None: never seen."""

    what: str
    node: str
    asked_ms: int
    deadline_ms: int
    done_ms: int | None

    def late_ms(self, outages: Iterable[Outage]) -> int | None:
        """How much too late, outages between asking and the return deducted; None if it never came."""
        if self.done_ms is None:
            return None
        return max(0, self.done_ms - self.deadline_ms - deducted_ms(self, outages))


def deducted_ms(each: Return, outages: Iterable[Outage]) -> int:
    """Time between asking and the return in which the node's agent was stopped or cut off; overlapping outages count once."""
    end = each.done_ms if each.done_ms is not None else each.deadline_ms
    spans = sorted(
        (max(each.asked_ms, outage.begin_ms), min(end, outage.end_ms))
        for outage in outages
        if outage.node == each.node and outage.begin_ms < end and outage.end_ms > each.asked_ms
    )
    total, reached = 0, 0
    for begin, finish in spans:
        total += max(0, finish - max(begin, reached))
        reached = max(reached, finish)
    return total


class Reclaim(msgspec.Struct, frozen=True):
    """A notice as the stream took it."""

    node: str
    gpus: tuple[int, ...]
    at_ms: int
    notice_ms: int


class Occupied(msgspec.Struct, frozen=True):
    """A process had GPUs from `begin_ms` (it was ready) until `end_ms` (its agent says that they are free); None: it has them."""

    node: str
    gpus: tuple[int, ...]
    worker: str
    begin_ms: int
    end_ms: int | None


def returns_of(reclaims: Sequence[Reclaim], occupied: Sequence[Occupied], arrivals: Sequence[Reclaim]) -> list[Return]:
    """One return for each process that held reclaimed GPUs when they were asked for. `arrivals`: GPUs given again.

    A reclaim that was taken back before its deadline asks nobody to leave.
    """
    found: list[Return] = []
    for reclaim in reclaims:
        deadline = reclaim.at_ms + reclaim.notice_ms
        again = [each.at_ms for each in arrivals if each.node == reclaim.node and each.at_ms > reclaim.at_ms]
        if again and min(again) < deadline:
            continue
        for process in occupied:
            ended = process.end_ms is not None and process.end_ms <= reclaim.at_ms
            if process.node != reclaim.node or process.begin_ms > reclaim.at_ms or ended:
                continue
            if set(process.gpus) & set(reclaim.gpus):
                found.append(
                    Return(
                        what=f"{process.worker} off {process.node} (reclaimed, {reclaim.notice_ms} ms notice)",
                        node=process.node,
                        asked_ms=reclaim.at_ms,
                        deadline_ms=deadline,
                        done_ms=process.end_ms,
                    )
                )
    return found
