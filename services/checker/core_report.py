"""What is known of a run, and what is said of it: expectations, violations, the report. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec

from messages.agent import RequestInterrupted, TurnFinished

EVALUATION: Final = "eval-"
"""Trajectories of this prefix are held-out episodes: they belong to no batch and are not counted."""

Try = tuple[str, int]
"""One try at a trajectory: its id and retry number."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What the job was configured to do, and which records are still there."""

    batch_trajectories: int
    group_size: int
    staleness: int
    journal_from: int = 1
    """Lowest journal sequence that was not purged; what is said about older ones is not held against the journal."""
    whole_from: int = 0
    """First batch all of whose events are still in the stream. What only trimmed events could show of earlier ones is unseen."""
    unjudged: int = 0
    """Ends and train steps left out because they may have been refused: the first train step that is judged may be any."""
    events_gone: int = 0
    """Events that were trimmed: no more ends than that can be unseen."""
    events_from_ms: int = 0
    """Unix ms at which the oldest event that is left was stored. An end is stored after its last turn."""
    rewound: int = 0
    """How often the broker came back without its last moments (`store.rewound/1`): what it lost was done again, which is counted."""
    attempts_logged: bool = True
    """False where no attempt logs are to be had: what a worker did is then not judged."""


class Journalled(msgspec.Struct, frozen=True):
    """A record of the journal and its stream sequence."""

    seq: int
    record: TurnFinished | RequestInterrupted
    at_ms: int = 0  # Unix ms at which it was stored; 0: not known


class Violation(msgspec.Struct, frozen=True):
    """One broken rule. `rule` is one word for machines."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


class Trimmed(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that does not begin with its first message any more: limits, or a purge, took the oldest."""

    stream: str
    gone: int  # messages before the oldest that is left
    from_ms: int = 0  # Unix ms of that one; 0: none is left

    def __str__(self) -> str:
        if not self.from_ms:
            return f"{self.stream}: nothing is left; {self.gone} messages were not seen"
        moment = datetime.fromtimestamp(self.from_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"{self.stream}: checked from {moment} on; {self.gone} earlier messages were trimmed, and not seen"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the records show. Held-out episodes are checked and not counted; tokens are reply tokens."""

    completed: int  # trajectories that ended, completed or truncated
    failed: int  # tries that ended as failed
    lost: int  # trajectories that a batch counts on, or that were begun in a trained batch, without an end
    duplicated: int  # ends, journal records or batch items that are there more than once
    delivered: int  # tokens of finished turns
    regenerated: int  # tokens made again although the client had them
    undelivered: int  # tokens that workers made and that reached no client (they died, or it had gone on)
    lost_with_edge: int  # tokens that reached a client which ended before it journalled them
    interrupted: int  # attempts that ended early
    redone: int = 0  # tokens of turns whose journal the broker lost: they were made again
    forgotten: int = 0  # train steps whose batch, or whose end, the broker lost
    staleness_max: int  # of any token in a batch; 0 if there is none
    batches: int
    trained: int
    strays: int = 0  # messages in the run's streams that cannot be read or were refused: no record of anything
    stray: tuple[str, ...] = ()  # the first of them
    unseen: int = 0  # trajectories of batches whose end was trimmed: neither lost nor checked
    unjudged: int = 0  # ends and train steps that may have been refused, their dead letters being gone
    trimmed: tuple[Trimmed, ...] = ()  # streams of which only the newest messages could be checked
    violations: tuple[Violation, ...] = ()

    @property
    def ok(self) -> bool:
        """No rule is broken."""
        return not self.violations


class Found:
    """Violations and counts while they are gathered."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.lost: set[str] = set()
        self.duplicated = self.regenerated = self.undelivered = self.lost_with_edge = self.staleness_max = 0
        self.redone = self.forgotten = self.unseen = 0

    def add(self, rule: str, text: str) -> None:
        self.violations.append(Violation(rule, text))

    def again(self, rule: str, text: str) -> None:
        self.duplicated += 1
        self.add(rule, text)
