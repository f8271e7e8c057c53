"""What `pearl bench scale` says of a run: propagation, plans, processors, memory and its growth.

*Propagation* is from the orchestrator's clock reading before the step that makes a table (`written_ms`) to that table in a
replica, decoded and checked: on one machine the two clocks are one. Its reference is a small message stored and acknowledged
now and then in the same run: a table is stored before it is published. *Growth* of a service is judged after a warm-up of a third
of the time: the median of its memory in the last third less the median in the middle third, over all its processes. It counts as
growth above GROWTH_SHARE of the latter and above GROWTH_BYTES a process, if it is also above all of the middle third: allocators
keep pages, and a collected heap (that of the NATS server) goes up and down by a quarter. (It also fills for its first ten minutes,
with the blocks that streams write to: what it does after that, `--minutes 30` shows.)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import msgspec

from services.bench.figures import Figure, figure, percentile

GROWTH_SHARE: Final = 0.02
GROWTH_BYTES: Final = 1 << 20
MIB: Final = 1 << 20


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. Bytes are proportional set sizes, of all processes of a service together."""

    workers: int
    seconds: float
    ready_s: float  # from the first process to all workers serving
    events: int  # GPUs reclaimed or returned
    plans: int
    failed_plans: int
    epochs: int
    table_bytes: int
    heartbeats: int
    propagation_ms: tuple[float, ...]
    stored_ms: tuple[float, ...]  # a small message stored and acknowledged, at each memory sample
    cpu_s: dict[str, float]
    processes: dict[str, int]
    at_s: tuple[float, ...]  # of the memory samples
    memory: dict[str, tuple[int, ...]]
    restarts: dict[str, int]

    def growth(self, service: str) -> tuple[float, bool]:
        """Bytes gained after the warm-up, and whether they count as growth."""
        return growth(self.memory[service], self.processes[service])


def growth(samples: Sequence[int], processes: int = 1) -> tuple[float, bool]:
    """See the head of this file; of fewer than three samples nothing can be said, and (0, False) is."""
    third = len(samples) // 3
    if third == 0:
        return 0.0, False
    middle, last = median(samples[-2 * third : -third]), median(samples[-third:])
    gained = last - middle
    above = last > max(samples[-2 * third : -third])
    return gained, above and gained > max(GROWTH_SHARE * middle, GROWTH_BYTES * processes)


def figures(run: Run) -> list[Figure]:
    """The run as figures: propagation, plans, processor seconds a minute and memory of each service."""
    name, minutes = f"scale, {run.workers} workers", run.seconds / 60
    count = len(run.propagation_ms)
    found = [
        figure(
            name,
            f"all workers serve, after {run.processes.get('emulated_fleet', 0)} processes' start",
            run.ready_s,
            "s",
        ),
        figure(
            name,
            f"plans in {minutes:.1f} min, of {run.events} events ({run.failed_plans} failed)",
            float(run.plans),
            "plans",
        ),
        figure(name, "worker heartbeats", run.heartbeats / run.seconds, "1/s"),
    ]
    for share in (0.5, 0.99) if count else ():
        case = f"table of {run.table_bytes / 1024:.0f} KiB visible, p{share * 100:.0f} of {count}"
        stored = percentile(run.stored_ms, share) if run.stored_ms else None
        value = percentile(run.propagation_ms, share)
        found.append(figure(name, case, value, "ms", stored, "800 bytes stored and acknowledged"))
    for service, seconds in sorted(run.cpu_s.items(), key=lambda each: -each[1]):
        found.append(figure(name, f"CPU, {service} ({run.processes.get(service, 0)})", seconds / minutes, "s/min"))
    third = len(run.at_s) // 3
    for service, samples in sorted(run.memory.items()):
        _, grown = run.growth(service)
        before = median(samples[-2 * third : -third]) if third else samples[-1]
        found.append(
            Figure(
                benchmark=name,
                case=f"memory, {service} ({run.processes[service]})",
                value=(median(samples[-third:]) if third else samples[-1]) / MIB,
                unit="MiB",
                reference=before / MIB,
                reference_is="middle third of the run",
                target="no growth",
                met=not grown if third else None,
            )
        )
    return found


def as_json(run: Run) -> dict[str, Any]:  # Any: a JSON object
    """Everything measured, and each service's growth in bytes."""
    grown = {service: run.growth(service) for service in run.memory}
    return {
        **msgspec.structs.asdict(run),
        "growth_bytes": {service: gained for service, (gained, _) in grown.items()},
        "grown": sorted(service for service, (_, counts) in grown.items() if counts),
    }
