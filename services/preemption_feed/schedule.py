"""From a trace to events on a job's preemptible nodes. Pure: the same trace, nodes and seed give the same events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.ids import NodeId, Zone
from services.jobfile import FeedSection, JobFile, Slot, rollout_slots
from services.preemption_feed.traces import Trace


class Generator(Protocol):
    """The part of `random.Random` that is needed: seeded by the caller."""

    def sample(self, population: Sequence[Slot], k: int, /) -> list[Slot]: ...


class Scheduled(msgspec.Struct, frozen=True):
    """An event and when it is published, in milliseconds after the feed's start."""

    at_ms: int
    event: GpuAvailable | GpuReclaimed


class Schedule(msgspec.Struct, frozen=True):
    """Events in order of time. `uncounted_gpus`: the most that the trace has beyond the job's preemptible workers."""

    events: tuple[Scheduled, ...]
    uncounted_gpus: int


def preemptible_slots(job: JobFile) -> tuple[Slot, ...]:
    """The whole workers that a trace's GPUs can make."""
    return tuple(slot for slot in rollout_slots(job) if slot.zone is Zone.PREEMPTIBLE)


def schedule(trace: Trace, slots: tuple[Slot, ...], feed: FeedSection, generator: Generator) -> Schedule:
    """The events that make the slots follow the trace from `feed.start_s` on, in `feed.time_scale` trace seconds a second.

    A count of GPUs is as many whole workers as it makes, at most all. The lowest absent ones come; `generator` says
    which leave, as a scaled trace has no identities. A share `feed.no_notice_fraction` of the reclaims
    comes without notice, the others `feed.notice_ms` (not scaled) ahead. First come, at 0 ms, the GPUs available at `start_s`.
    """
    per_worker = len(slots[0].gpus) if slots else 1
    source = f"trace:{trace.name}"[:80]
    present: list[Slot] = []
    events: list[Scheduled] = []
    reclaims = 0
    uncounted = 0
    moments = [(feed.start_s, trace.at(feed.start_s))]
    moments += [(step.time_s, step.gpus) for step in trace.steps if step.time_s > feed.start_s]
    for time_s, gpus in moments:
        at_ms = round((time_s - feed.start_s) / feed.time_scale * 1000)
        wanted = min(gpus // per_worker, len(slots))
        uncounted = max(uncounted, gpus - len(slots) * per_worker)
        if wanted > len(present):
            there = frozenset(slot.worker for slot in present)
            joining = [slot for slot in slots if slot.worker not in there][: wanted - len(present)]
            present.extend(joining)
            events += [
                Scheduled(at_ms, GpuAvailable(node=node, gpus=indices, source=source))
                for node, indices in _by_node(joining)
            ]
        elif wanted < len(present):
            leaving = generator.sample(present, len(present) - wanted)
            gone = frozenset(slot.worker for slot in leaving)
            present = [slot for slot in present if slot.worker not in gone]
            for node, indices in _by_node(leaving):
                # Spread evenly, so that even a short replay has its share of each kind.
                share, reclaims = feed.no_notice_fraction, reclaims + 1
                without = int(reclaims * share) > int((reclaims - 1) * share)
                notice_ms = 0 if without else feed.notice_ms
                reclaim = GpuReclaimed(node=node, gpus=indices, notice_ms=notice_ms, source=source)
                events.append(Scheduled(at_ms, reclaim))
    return Schedule(tuple(events), max(uncounted, 0))


def _by_node(slots: list[Slot]) -> list[tuple[NodeId, tuple[int, ...]]]:
    """The slots' GPU indices by node, sorted: one event a node."""
    indices: dict[NodeId, list[int]] = {}
    for slot in slots:
        indices.setdefault(slot.node, []).extend(gpu.index for gpu in slot.gpus)
    return [(node, tuple(sorted(found))) for node, found in sorted(indices.items())]
