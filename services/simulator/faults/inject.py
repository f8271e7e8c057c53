"""Makes a plan's faults happen to a cluster, and mends what they broke."""

from __future__ import annotations

from collections.abc import Callable

from messages.envelope import Message, encode
from messages.subjects import ROUTES, subject_of
from services.simulator.faults.cluster import Cluster
from services.simulator.faults.machines import Started
from services.simulator.faults.plan import Fault, Plan, told
from services.simulator.faults.record import Arrived, FaultBegan, FaultEnded, FaultsStopped

RATES = ("loss", "duplicate", "reorder", "ack_loss", "slow_ms")


class Injector:
    """Schedules every fault of the plan when it is made. `over_ms`: when the last one is mended (Unix ms)."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self._cluster = cluster
        self._rates: dict[str, list[float]] = {name: [] for name in RATES}
        self._numbers = 0
        start_ms = cluster.now_ms
        self.over_ms = start_ms
        for fault in plan.faults:
            begin_ms = start_ms + fault.at_ms
            self.over_ms = max(self.over_ms, begin_ms + fault.for_ms + 1)
            cluster.later(begin_ms, self._happening(fault))
        cluster.later(self.over_ms, self._stopped)

    def _stopped(self) -> None:
        for machine in self._cluster.machines.values():
            machine.broken_starts = 0  # those that nothing was started for yet
        self._cluster.see(FaultsStopped(self._cluster.now_ms))

    def _happening(self, fault: Fault) -> Callable[[], None]:
        def happen() -> None:
            cluster = self._cluster
            self._numbers += 1
            number = self._numbers
            cluster.see(FaultBegan(cluster.now_ms, number, fault.kind, fault.target, told(fault)))
            mend = self._do(fault)

            def mended() -> None:
                if mend is not None:
                    mend()
                cluster.see(FaultEnded(cluster.now_ms, number))

            if fault.lasts and fault.for_ms:
                cluster.later(cluster.now_ms + fault.for_ms, mended)
            else:
                cluster.see(FaultEnded(cluster.now_ms, number))

        return happen

    def _do(self, fault: Fault) -> Callable[[], None] | None:
        """Break it; returns what mends it, where the cluster does not by itself."""
        cluster, target, for_ms, amount = self._cluster, fault.target, fault.for_ms, fault.amount
        match fault.kind:
            case "available":
                cluster.available(target, *fault.gpus)
            case "reclaim":
                cluster.reclaimed(target, *fault.gpus, notice_ms=for_ms)
            case "crash":
                cluster.crash(target, for_ms)
            case "crash_at_call":
                cluster.crash_at_call(target, int(amount))
            case "freeze":
                cluster.freeze(target, for_ms)
            case "cut":
                cluster.cut(target, for_ms)
            case "deafen":
                cluster.deafen(target, for_ms)
            case "broker_down":
                cluster.broker_down(for_ms)
            case "loss" | "duplicate" | "reorder" | "ack_loss":
                return self._rate(fault.kind, amount)
            case "slow_network":
                return self._rate("slow_ms", amount)
            case "redeliver":
                cluster.network.redeliver(target, int(amount))
            case "power_off":
                cluster.power_off(target, for_ms, disk=amount > 0)
            case "broken_start":
                cluster.machines[target].broken_starts += int(amount)
            case "device_lost":
                started = self._started(target)
                if started is not None and started.engine is not None:
                    started.engine.fails.set()
            case "stuck" | "slow" | "stubborn" | "torn":
                return self._handicap(fault)
            case "stale":
                self._publish_again(target, int(amount))
            case "old_commands":
                self._arrive_again(target, int(amount))
            case "twin":
                cluster.twin(target)
            case other:
                raise AssertionError(f"no fault is called {other}")
        return None

    def _started(self, name: str) -> Started | None:
        return next((each for each in self._cluster.processes if each.process.name == name), None)

    def _rate(self, name: str, amount: float) -> Callable[[], None]:
        """The largest of the rates that hold now counts."""
        held, network = self._rates[name], self._cluster.network

        def changed() -> None:
            setattr(network, name, max(held, default=0.0))

        def mend() -> None:
            held.remove(amount)
            changed()

        held.append(amount)
        changed()
        return mend

    def _handicap(self, fault: Fault) -> Callable[[], None] | None:
        """Of whatever process lives in the slot now; its successor is healthy."""
        started = self._started(fault.target)
        if started is None:
            return None
        inner = started.engine or started.group
        if fault.kind == "stubborn":
            started.stubborn = True
        elif inner is None:
            return None
        elif fault.kind == "stuck":
            inner.stuck.add(fault.detail)
        elif fault.kind == "slow":
            inner.slow = max(inner.slow, fault.amount, 1.0)
        elif started.engine is not None:
            started.engine.torn = True

        def mend() -> None:
            started.stubborn = False
            if inner is not None:
                inner.stuck.discard(fault.detail)
                inner.slow = 1.0
            if started.engine is not None:
                started.engine.torn = False

        return mend

    def _publish_again(self, worker: str, count: int) -> None:
        """Facts of a worker, stored long ago, are stored once more: its connection repeated them too late for the broker."""
        cluster = self._cluster
        found = [message for message in cluster.events(Message) if getattr(message, "worker", "") == worker]
        for message in found[-count:][:: -1 if count == 3 else 1]:
            self._numbers += 1
            subject = subject_of(cluster.job.job.name, message)
            if ROUTES[type(message)].family == "ev":
                cluster.network.store(worker, subject, encode(message), f"again:{self._numbers}", None)

    def _arrive_again(self, target: str, count: int) -> None:
        """Commands that were on their way for long arrive now, whoever lives in the slot."""
        cluster = self._cluster
        receiver = target if target == "trainer" else f"worker/{target}"
        if target.startswith("node_agent-"):
            receiver = f"node/{target.removeprefix('node_agent-')}"
        found = [seen.message for seen in cluster.record if isinstance(seen, Arrived) and seen.receiver == receiver]
        for message in found[-count:]:
            subject = (
                subject_of(cluster.job.job.name, message) if hasattr(message, "worker") or target == "trainer" else ""
            )
            if subject:
                cluster.network.route(None, subject, encode(message), "", {})
