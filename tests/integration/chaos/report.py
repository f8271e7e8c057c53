"""What a chaos run found: JSON for machines, a page for people. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

LATE_ALLOWED_MS = 1000
"""A return later than this is late: killing takes a moment, and its report travels through three servers' disks."""


class Injected(msgspec.Struct, kw_only=True):
    """A fault as it was injected. Seconds from the start of the run; `recovered_s` counts from the fault's end."""

    number: int
    kind: str
    target: str
    at_s: float
    lasted_s: float = 0.0
    recovered_s: float | None = None  # None: not within the time allowed
    skipped: str = ""  # why it was not injected
    detail: str = ""


class Late(msgspec.Struct, frozen=True):
    """A mandatory return and by how much it was late."""

    what: str
    late_ms: int | None  # None: never seen
    deducted_ms: int = 0


class ChaosReport(msgspec.Struct, kw_only=True):
    """Everything. `zeros`: lost, duplicated, regenerated, as services/checker counts them."""

    seed: int
    minutes: float
    seconds: float
    faults: list[Injected]
    impossible: dict[str, str]  # fault kinds that cannot be injected here, and why
    zeros: dict[str, int]
    violations: list[str]
    staleness_max: int
    staleness_allowed: int
    completed: int
    trained: int
    tokens: dict[str, int]
    returns: int
    late: list[Late]
    at_target: bool
    settled_s: float | None
    epochs: int
    epochs_back: int  # times a watcher's table went back
    restarts: dict[str, int]
    unasked: dict[str, int] = {}  # processes that ended without being killed, and how often
    load: dict[str, float] = {}
    began_ms: int = 0  # Unix ms from which the faults' seconds count

    @property
    def injected(self) -> list[Injected]:
        """Faults that were."""
        return [each for each in self.faults if not each.skipped]

    @property
    def problems(self) -> list[str]:
        """What fails the run; empty if nothing does."""
        found = [f"{name} = {count}" for name, count in self.zeros.items() if count]
        found += self.violations
        if self.staleness_max > self.staleness_allowed:
            found.append(f"staleness {self.staleness_max}, allowed {self.staleness_allowed}")
        found += [
            f"#{each.number} {each.kind} {each.target}: no recovery"
            for each in self.injected
            if each.recovered_s is None
        ]
        found += [f"late return: {each.what}: {each.late_ms} ms" for each in self.late]
        if self.epochs_back:
            found.append(f"a watcher's table went back {self.epochs_back} times")
        if not self.at_target:
            found.append("the cluster is not at its target at the end")
        return found


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the least value that at least `share` of all do not exceed."""
    assert values, "no values"
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def by_kind(faults: Sequence[Injected]) -> dict[str, dict[str, float]]:
    """Count, p50, p99 and most of the recoveries of each kind, seconds."""
    groups: dict[str, list[float]] = defaultdict(list)
    for each in faults:
        if not each.skipped and each.recovered_s is not None:
            groups[each.kind].append(each.recovered_s)
    return {
        kind: {
            "count": len(times),
            "p50_s": round(quantile(times, 0.5), 2),
            "p99_s": round(quantile(times, 0.99), 2),
            "most_s": round(max(times), 2),
        }
        for kind, times in sorted(groups.items())
    }


def to_json(report: ChaosReport) -> bytes:
    """The whole report, with the table of recoveries and the problems."""
    body = msgspec.to_builtins(report)
    body |= {"recovery": by_kind(report.faults), "problems": report.problems, "injected": len(report.injected)}
    return msgspec.json.format(msgspec.json.encode(body), indent=1)


def to_text(report: ChaosReport) -> str:
    """For people: the verdict first."""
    problems = report.problems
    times = [each.recovered_s for each in report.injected if each.recovered_s is not None]
    lines = [
        f"chaos run, seed {report.seed}: {len(report.injected)} faults in {report.seconds / 60:.1f} minutes: "
        + ("everything held" if not problems else f"{len(problems)} problem(s)"),
        *(f"  PROBLEM {each}" for each in problems[:40]),
        "  zeros: " + ", ".join(f"{name} {count}" for name, count in report.zeros.items()),
        f"  trajectories {report.completed}, train steps {report.trained}, staleness at most {report.staleness_max} "
        f"(allowed {report.staleness_allowed})",
        f"  mandatory returns {report.returns}, late {len(report.late)}; at target at the end: "
        + (f"yes, {report.settled_s:.1f} s after the last fault" if report.settled_s is not None else "no"),
        f"  table epochs {report.epochs}, a watcher's table went back {report.epochs_back} times",
    ]
    if times:
        lines.append(f"  recovery, all kinds: p50 {quantile(times, 0.5):.1f} s, p99 {quantile(times, 0.99):.1f} s")
    for kind, row in by_kind(report.faults).items():
        lines.append(
            f"    {kind:17} {row['count']:4.0f}  p50 {row['p50_s']:5.1f} s  p99 {row['p99_s']:5.1f} s  most {row['most_s']:5.1f} s"
        )
    lines += [f"  NOT INJECTED {kind}: {why}" for kind, why in report.impossible.items()]
    skipped = [each for each in report.faults if each.skipped]
    lines += [f"  skipped #{each.number} {each.kind} {each.target}: {each.skipped}" for each in skipped[:10]]
    lines += [f"  ended unasked: {name} x{count}" for name, count in report.unasked.items()]
    return "\n".join(lines)
