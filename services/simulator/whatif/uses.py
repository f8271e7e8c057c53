"""What each GPU was used for, when: from the role table and the capacity events, as spans. Pure."""

from __future__ import annotations

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import Message
from messages.ids import Activity, Stage, Zone
from pearl_state.model import RoleTable, Row
from services.jobfile import Slot
from services.simulator.whatif.result import Span


class Uses:
    """Follows the slots of a run. `""` is a GPU that is not there."""

    def __init__(self, slots: tuple[Slot, ...], table: RoleTable) -> None:
        self._slots = slots
        self._table = table
        self._there: set[tuple[str, int]] = set()
        self._now: dict[str, tuple[str, float]] = {}  # worker -> use, since
        self._spans: list[tuple[Slot, float, float, str]] = []

    def on_table(self, now_s: float, table: RoleTable) -> None:
        self._table = table
        self._look(now_s)

    def on_capacity(self, now_s: float, event: Message) -> None:
        """A preemptible GPU comes, or is taken."""
        if isinstance(event, GpuAvailable):
            self._there.update((event.node, index) for index in event.gpus)
        elif isinstance(event, GpuReclaimed):
            self._there.difference_update((event.node, index) for index in event.gpus)
        self._look(now_s)

    def _look(self, now_s: float) -> None:
        rows = self._table.by_worker
        trains = any(row.zone is Zone.TRAINING and row.activity is Activity.ACTIVE for row in self._table.rows)
        for slot in self._slots:
            use = self._use(slot, rows.get(slot.worker), trains)
            before = self._now.get(slot.worker)
            if before is None or before[0] != use:
                self._close(slot, before, now_s)
                self._now[slot.worker] = (use, now_s)

    def _close(self, slot: Slot, before: tuple[str, float] | None, now_s: float) -> None:
        if before is not None and before[0] and now_s > before[1]:
            self._spans.append((slot, before[1], now_s, before[0]))

    def _use(self, slot: Slot, row: Row | None, trains: bool) -> str:
        if row is not None and row.activity is Activity.ACTIVE:
            return row.role.value
        if row is not None and row.activity is Activity.TRANSITIONING:
            return "preparing" if row.stage in (Stage.LAUNCHING, Stage.PREPARED) else "switching"
        if slot.zone is Zone.OVERLAP:
            return "training" if trains else "idle"
        there = slot.zone is Zone.RESERVED or all((gpu.node, gpu.index) in self._there for gpu in slot.gpus)
        return "idle" if there else ""

    def spans(self, end_s: float) -> tuple[Span, ...]:
        """A span a GPU and use, up to `end_s`."""
        found = list(self._spans)
        for slot in self._slots:
            use, since_s = self._now.get(slot.worker, ("", end_s))
            if use and end_s > since_s:
                found.append((slot, since_s, end_s, use))
        return tuple(
            Span(f"{gpu.node}/{gpu.index}", start_s, stop_s, use)
            for slot, start_s, stop_s, use in found
            for gpu in slot.gpus
        )
