"""One chaos run: start the job on its hosts, inject what the seed drew, watch it recover, let the checker judge."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, NodeUp
from messages.envelope import UndecodableMessage, encode
from messages.ids import Activity, NodeId, Role, Zone
from messages.monitor import GpusReturned
from messages.orchestrator import GpuFree, WorkerReady
from messages.subjects import decode_on, event_subject, stream, subject_of
from pearl_state.model import RoleTable
from services import jobfile
from services.checker.collect import check
from services.connect import connect
from services.jobfile import rollout_slots
from services.monitor.collector import Collector
from services.runtime.bus import Bus, BusError
from tests.integration.chaos.faults import KILLS, Fault, Inventory, draw
from tests.integration.chaos.hosts import Hosts
from tests.integration.chaos.job import HOST_OF_NODE, job_text, outage_nodes, specs
from tests.integration.chaos.keeper import Keeper
from tests.integration.chaos.report import LATE_ALLOWED_MS, ChaosReport, Injected, Late
from tests.integration.chaos.returns import Occupied, Outage, Reclaim, Return, deducted_ms, ended, returns_of
from tests.integration.running_job import write_workload

RECOVERY_S = 300.0
"""Longest time that a recovery may take; what is slower counts as none."""
POLL_S = 0.1
START_S = 90.0


class ChaosRun:
    """The job and what a fault needs of it. Made by `chaos_run`."""

    def __init__(self, keeper: Keeper, hosts: Hosts, bus: Bus, cli: Bus, collector: Collector) -> None:
        self.keeper = keeper
        self.job = keeper.job
        self.hosts = hosts
        self.bus = bus
        self.cli = cli
        self.collector = collector
        self.outages: list[Outage] = []
        self.epochs_back = 0
        self._epoch = 0
        self._begun = time.monotonic()

    # -- what can be seen

    @property
    def table(self) -> RoleTable | None:
        return self.collector.board.table

    def watch(self, _at_ms: int, message: object) -> None:
        """Each table that the harness's own replica takes in."""
        if isinstance(message, RoleTable):
            self.epochs_back += message.epoch < self._epoch
            self._epoch = message.epoch

    @property
    def ends(self) -> int:
        """Trajectories that have ended, as the stream says."""
        board = self.collector.board
        return board.trajectories + board.failed

    def active(self) -> set[str]:
        """Rollout workers that serve."""
        rows = self.table.rows if self.table is not None else ()
        return {row.worker for row in rows if row.activity is Activity.ACTIVE and row.role is not Role.TRAINING}

    def at_target(self) -> bool:
        """No plan is under way, and what serves is what the newest target for the newest budget wants."""
        table, budget = self.table, self.collector.board.latest_budget
        if table is None or table.plan is not None or table.writer.target is None or budget is None:
            return False
        target = table.writer.target
        if target.budget_id < budget.budget_id or target.training_batch != table.training_batch:
            return False
        roles = [row.role for row in table.rows if row.activity is Activity.ACTIVE and row.role is not Role.TRAINING]
        wanted = (target.prefill, target.decode, target.colocated)
        return tuple(roles.count(role) for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED)) == wanted

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it came true in time."""
        give_up = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > give_up:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def publish(self, message: GpuAvailable | GpuReclaimed) -> None:
        """An event of the outside world, until it is stored."""
        identity = f"chaos:{secrets.token_hex(8)}"
        while True:
            try:
                await self.cli.publish_durable(subject_of(self.job.job.name, message), encode(message), msg_id=identity)
                return
            except BusError:
                await asyncio.sleep(0.5)

    # -- faults

    async def inject(self, fault: Fault) -> Injected:
        """Inject, wait, mend, and wait until rollout goes on, at its target, with the process back."""
        done = Injected(
            number=fault.number, kind=fault.kind, target=fault.target, at_s=round(time.monotonic() - self._begun, 2)
        )
        begun, begun_ms = time.monotonic(), _now_ms()
        try:
            back = await self._break(fault, done)
        except BusError as error:
            done.skipped = str(error)
        if done.skipped:
            return done
        ended = time.monotonic()
        done.lasted_s = round(ended - begun, 2)
        for node in self._cut_off(fault):
            killed = fault.kind in ("agent_stopped", "kill_service")
            self.outages.append(Outage(node, begun_ms, _now_ms(), until_up=killed))
        ends = self.ends
        recovered = await self.until(lambda: back() and self.ends > ends and self.at_target(), RECOVERY_S)
        if recovered:
            done.recovered_s = round(time.monotonic() - ended, 2)
        else:
            target = self.table.writer.target if self.table is not None else None
            done.detail = (
                f"process back: {back()}, ends since: {self.ends - ends}, at target: {self.at_target()}, "
                f"active {sorted(self.active())}, target {target}, plan {self.table.plan if self.table else None}"
            )
        return done

    def _cut_off(self, fault: Fault) -> tuple[str, ...]:
        """Nodes whose agent was stopped or cut off by a fault."""
        match fault.kind:
            case "agent_stopped" | "pause" | "kill_service" if fault.target.startswith("node_agent-"):
                return (fault.target.removeprefix("node_agent-"),)
            case "partition":
                return outage_nodes(self.job, int(fault.target))
            case "nats_restart_all":
                return tuple(HOST_OF_NODE)
            case _:
                return ()

    async def _break(self, fault: Fault, done: Injected) -> Callable[[], bool]:
        """Break and mend; returns how to tell that what was broken is back."""
        keeper = self.keeper
        match fault.kind:
            case kind if kind in KILLS:
                pid = keeper.kill(fault.target)
                if pid is None:
                    done.skipped = "does not run now"
                return lambda: self._is_back(fault.target, pid)
            case "pause":
                pid = keeper.signal(fault.target, signal.SIGSTOP)
                if pid is None:
                    done.skipped = "does not run now"
                    return _yes
                await asyncio.sleep(fault.lasts_s)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                return _yes
            case "agent_stopped":
                keeper.hold(fault.target)
                pid = keeper.kill(fault.target)
                await asyncio.sleep(fault.lasts_s)
                keeper.release(fault.target)
                return lambda: self._is_back(fault.target, pid)
            case "nats_kill":
                pid = await self._kill_server(fault.target, fault.lasts_s)
                return lambda: self._is_back(f"server-{fault.target}", pid)
            case "nats_pause":
                pid = keeper.signal(f"server-{fault.target}", signal.SIGSTOP)
                await asyncio.sleep(fault.lasts_s)
                if pid is not None:
                    os.kill(pid, signal.SIGCONT)
                return _yes
            case "nats_restart_all":
                pids = {host.index: keeper.kill(f"server-{host.index}") for host in self.hosts.all}
                return lambda: all(self._is_back(f"server-{index}", pid) for index, pid in pids.items())
            case "partition":
                host = self.hosts.all[int(fault.target)]
                self.hosts.cut(host)
                try:
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    self.hosts.join(host)
                return _yes
            case "preempt_notice" | "preempt_sudden":
                return await self._preempt(fault)
            case other:
                raise AssertionError(f"no fault {other}")

    async def _kill_server(self, index: str, lasts_s: float) -> int | None:
        """A server and whoever would start it again, for so long."""
        self.keeper.hold(f"nats-{index}")
        self.keeper.kill(f"nats-{index}")
        pid = self.keeper.kill(f"server-{index}")
        await asyncio.sleep(lasts_s)
        self.keeper.release(f"nats-{index}")
        return pid

    async def _preempt(self, fault: Fault) -> Callable[[], bool]:
        """A node's GPUs go, and come back. Its processes die with them where there is no notice."""
        node = NodeId(fault.target)
        gpus = tuple(range(next(each.gpus for each in self.job.nodes if each.name == node)))
        sudden = fault.kind == "preempt_sudden"
        notice_ms = 0 if sudden else round(fault.lasts_s * 1000) - 2000
        await self.publish(GpuReclaimed(node=node, gpus=gpus, notice_ms=max(0, notice_ms)))
        if sudden:
            for slot in rollout_slots(self.job):
                if slot.node == node:
                    self.keeper.kill(slot.worker)
        await asyncio.sleep(fault.lasts_s)
        await self.publish(GpuAvailable(node=node, gpus=gpus))
        slots = {slot.worker for slot in rollout_slots(self.job) if slot.node == node}
        return lambda: slots <= self.active()

    def _is_back(self, name: str, before: int | None) -> bool:
        now = self.keeper.pid(name)
        if now is not None and now != before:
            return True
        # A worker that is wanted no more (its GPUs are lent no more, or reclaimed) does not come back.
        slots = {slot.worker: slot for slot in rollout_slots(self.job)}
        if name not in slots or self.table is None or self.table.writer.target is None:
            return False
        return slots[name].zone is not Zone.OVERLAP and name not in self.table.writer.target.usable

    # -- the whole run

    def inventory(self) -> Inventory:
        """What there is to break."""
        names = tuple(name for name in self.keeper.specs if not name.startswith("nats-"))
        slots = tuple(slot.worker for slot in rollout_slots(self.job))
        return Inventory(
            services=names,
            agents=tuple(name for name in names if name.startswith("node_agent-")),
            workers=slots,
            trainers=tuple(f"{node.name}-t0" for node in self.job.nodes if node.zone is Zone.TRAINING),
            hosts=tuple(str(host.index) for host in self.hosts.all),
            preemptible=tuple(node.name for node in self.job.nodes if node.zone is Zone.PREEMPTIBLE),
            partitions=not self.hosts.why_not,
        )

    async def execute(self, faults: tuple[Fault, ...], say: Callable[[str], None]) -> list[Injected]:
        """All faults at their times; returns them in order, each with its recovery."""
        tasks: list[asyncio.Task[Injected]] = []
        self._begun = time.monotonic()

        async def one(fault: Fault) -> Injected:
            done = await self.inject(fault)
            outcome = done.skipped or ("NOT RECOVERED" if done.recovered_s is None else f"{done.recovered_s:.1f} s")
            say(f"{done.at_s:7.1f} s  #{done.number} {done.kind} {done.target} for {done.lasted_s:.1f} s: {outcome}")
            return done

        for fault in faults:
            await asyncio.sleep(max(0.0, self._begun + fault.at_s - time.monotonic()))
            tasks.append(asyncio.create_task(one(fault)))
        return list(await asyncio.gather(*tasks))

    async def returns(self) -> list[Return]:
        """Every mandatory return of the run."""
        spans: dict[tuple[str, int], Occupied] = {}
        gpus_of = {slot.worker: slot for slot in rollout_slots(self.job)}
        reclaims: list[Reclaim] = []
        arrivals: list[Reclaim] = []
        lent: list[Return] = []
        ups: list[tuple[str, int]] = []
        kinds = (GpuReclaimed, GpuAvailable, WorkerReady, GpuFree, GpusReturned, NodeUp)
        wanted = {event_subject(self.job.job.name, kind).rpartition(".")[0] for kind in kinds}
        name = self.job.job.name
        async for delivery in self.bus.read(stream(name, "ev"), f"pearl.{name}.ev.>"):
            if delivery.subject.rpartition(".")[0] not in wanted:
                continue
            try:
                message = decode_on(name, delivery.subject, delivery.data, *kinds)
            except UndecodableMessage:
                continue
            match message:
                case GpuReclaimed():
                    reclaims.append(Reclaim(message.node, message.gpus, delivery.at_ms, message.notice_ms))
                case NodeUp():
                    ups.append((message.node, delivery.at_ms))
                case GpuAvailable():
                    arrivals.append(Reclaim(message.node, message.gpus, delivery.at_ms, 0))
                case WorkerReady() if message.worker in gpus_of:
                    slot = gpus_of[message.worker]
                    held = Occupied(slot.node, tuple(g.index for g in slot.gpus), message.worker, delivery.at_ms, None)
                    spans.setdefault((message.worker, message.incarnation), held)
                case GpuFree():
                    key = (message.worker, message.incarnation)
                    if key in spans and spans[key].end_ms is None:
                        old = spans[key]
                        spans[key] = Occupied(old.node, old.gpus, old.worker, old.begin_ms, delivery.at_ms)
                case GpusReturned():
                    node = gpus_of[message.workers[0]].node if message.workers else NodeId("train")
                    asked = message.deadline_ms - self.job.timeouts.return_ms
                    lent.append(
                        Return(
                            what=f"{', '.join(message.workers)} to training for batch {message.batch}",
                            node=node,
                            asked_ms=asked,
                            deadline_ms=message.deadline_ms,
                            done_ms=message.at_ms,
                        )
                    )
                case _:
                    pass
        self.outages = ended(self.outages, ups)
        return [*returns_of(reclaims, list(spans.values()), arrivals), *lent]


def _yes() -> bool:
    return True


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@contextlib.asynccontextmanager
async def chaos_run(folder: Path, seed: int, time_scale: float) -> AsyncIterator[ChaosRun]:
    """A running job; everything is ended and removed at the end, whatever happened."""
    hosts = Hosts()
    keeper: Keeper | None = None
    try:
        path = folder / "job.toml"
        path.write_text(job_text(folder, hosts.all, seed, time_scale))
        write_workload(folder)
        job = jobfile.load(path)
        keeper = Keeper(job, path, hosts.all, specs())
        keeper.start()
        begun = time.monotonic()
        while not (job.run_dir / "nats" / "keys" / "monitor.nk").exists():
            assert time.monotonic() - begun < START_S, f"no NATS server came up; logs: {job.run_dir}/logs"
            await asyncio.sleep(POLL_S)
        bus, cli = await connect(job, "monitor"), await connect(job, "cli")
        collector = Collector(bus, job)
        run = ChaosRun(keeper, hosts, bus, cli, collector)
        stop = asyncio.Event()
        while True:
            try:
                await collector.start()
                break
            except BusError:  # its streams are not there yet
                assert time.monotonic() - begun < START_S, f"no streams; logs: {job.run_dir}/logs"
                collector = Collector(bus, job)
                run.collector = collector
                await asyncio.sleep(1.0)
        collector._on_message = run.watch
        following = asyncio.create_task(collector.follow(stop))
        try:
            yield run
        finally:
            stop.set()
            await asyncio.wait([following], timeout=10)
            for each in (bus, cli):
                with contextlib.suppress(BusError, TimeoutError):
                    await asyncio.wait_for(each.close(), 5)
    finally:
        if keeper is not None:
            await keeper.stop()
        hosts.close()


async def chaos(
    folder: Path, *, seed: int, minutes: float, count: int, time_scale: float, say: Callable[[str], None] = print
) -> ChaosReport:
    """A whole run. `count` faults over `minutes`; then everything must come to rest, two train steps go by, and it is judged."""
    async with chaos_run(folder, seed, time_scale) as run:
        await run.publish(GpuAvailable(node=NodeId("spot"), gpus=(0, 1)))
        assert await run.until(lambda: len(run.active()) >= 4 and run.ends > 0 and run.at_target(), START_S), (
            f"the job did not start: active {run.active()}, {run.ends} ends; logs: {run.job.run_dir}/logs"
        )
        say(
            f"running: {len(run.keeper.specs)} services, {len(run.active())} workers; {minutes:g} minutes of faults follow"
        )
        faults = draw(seed, minutes * 60, count, run.inventory())
        begun, began_ms, processor = time.monotonic(), _now_ms(), psutil.cpu_times()
        injected = await run.execute(faults, say)
        seconds = time.monotonic() - begun
        used = psutil.cpu_times()
        calm = time.monotonic()
        steps = len(run.collector.board.steps)
        at_target = await run.until(lambda: len(run.collector.board.steps) >= steps + 2 and run.at_target(), RECOVERY_S)
        settled_s = time.monotonic() - calm if at_target else None
        found = await check(run.bus, run.job)
        mandatory = await run.returns()
        late: list[Late] = []
        for each in mandatory:
            late_ms = each.late_ms(run.outages)
            over = each.deadline_ms < _now_ms() - LATE_ALLOWED_MS
            if (late_ms is None and over) or (late_ms or 0) > LATE_ALLOWED_MS:
                late.append(Late(each.what, late_ms, deducted_ms(each, run.outages)))
        busy = sum(
            getattr(used, kind) - getattr(processor, kind) for kind in ("user", "system", "nice", "softirq")
        ) / max(1.0, seconds)
        return ChaosReport(
            seed=seed,
            began_ms=began_ms,
            minutes=minutes,
            seconds=round(seconds, 1),
            faults=injected,
            impossible={"partition": run.hosts.why_not} if run.hosts.why_not else {},
            zeros={"lost": found.lost, "duplicated": found.duplicated, "regenerated": found.regenerated},
            violations=[str(each) for each in found.violations],
            staleness_max=found.staleness_max,
            staleness_allowed=run.job.pipeline.staleness,
            completed=found.completed,
            trained=found.trained,
            tokens={
                "delivered": found.delivered,
                "undelivered": found.undelivered,
                "lost_with_edge": found.lost_with_edge,
            },
            returns=len(mandatory),
            late=late,
            at_target=at_target,
            settled_s=None if settled_s is None else round(settled_s, 1),
            epochs=int(run.table.epoch) if run.table is not None else 0,
            epochs_back=run.epochs_back,
            restarts=dict(sorted(run.keeper.restarts.items())),
            unasked=dict(sorted(run.keeper.unasked.items())),
            load={"cpus_busy_on_this_machine": round(busy, 2), "cpus": float(psutil.cpu_count() or 0)},
        )
