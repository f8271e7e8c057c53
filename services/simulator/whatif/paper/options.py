"""How much is simulated for the paper's figures. Pure."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`seeds`: of runs over time; single batches, which are cheap and vary more, get `batches` seeds."""

    seeds: int = 1
    batches: int = 3
    hours: float = 2.0  # of a trace's segment
    fixed_hours: float = 1.0  # of runs with a fixed number of GPUs

    @property
    def run_seeds(self) -> tuple[int, ...]:
        """Seeds of runs."""
        return tuple(range(self.seeds))

    @property
    def batch_seeds(self) -> tuple[int, ...]:
        """Seeds of single batches."""
        return tuple(range(self.batches))

    @property
    def told_batch_seeds(self) -> str:
        """For captions."""
        return _told(self.batches)

    @property
    def told_run_seeds(self) -> str:
        """For captions."""
        return _told(self.seeds)


def _told(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"
