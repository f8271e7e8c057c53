"""Malformed and senseless messages on every subject, as every user, while a job runs: each is refused, nothing changes."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import Counter
from pathlib import Path

import pytest

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import decode, encode
from messages.ids import Activity, NodeId, Role
from messages.monitor import DeadLetter
from messages.subjects import state_bucket, stream, subject_of
from pearl_state.model import RoleTable
from services.connect import connect
from services.nats_server.permissions import SENDS
from services.runtime.bus import Bus, BusError
from services.runtime.dead_letters import DEAD_BYTES, LONGEST_SUBJECT
from tests.integration.hostile_messages import (
    JOB,
    LETTER,
    LOGGED,
    REFUSED,
    STRAY,
    Attack,
    chunks,
    garbage,
    misplaced,
    nonsense,
    too_large,
)
from tests.integration.running_job import RunningJob, assert_zeros, running_job

CORE_PAUSE_S = 0.06
"""Between two core messages: receivers keep four dead letters of those a tick (200 ms), and count the others."""


SPOT = NodeId("spot1")


def active(run: RunningJob) -> set[str]:
    table = run.board.table
    return {row.worker for row in table.rows if row.activity is Activity.ACTIVE} if table else set()


def shape(table: RoleTable | None, only: str = "") -> object:
    """All of a table that must stay as it is while a job trains: not its epoch, and not versions. `only`: a node's rows."""
    assert table is not None
    rows = [
        (row.worker, row.zone, row.role, str(row.activity), str(row.stage), row.incarnation, row.role_generation)
        for row in table.rows
        if row.role is not Role.TRAINING and row.worker.startswith(only)  # active while it trains
    ]
    if only:
        return rows
    writer = table.writer
    return rows, table.plan, table.admission_paused, writer.plans, writer.failed_plans, writer.backoffs


def budget(run: RunningJob) -> object:
    latest = run.board.latest_budget
    assert latest is not None
    # Overlap slots leave whenever a batch is trained, hostile messages or not.
    return latest.dedicated, tuple(leave for leave in latest.leaving if not leave.worker.startswith("train"))


async def settled(run: RunningJob) -> None:
    await run.until(lambda: {"reserved-w0", "reserved-w1"} <= active(run), "reserved workers")
    await run.until(lambda: run.board.table is not None and run.board.table.plan is None, "no plan")
    await run.until(lambda: bool(run.board.steps), "a first train step")


def durable(attack: Attack) -> bool:
    return attack.subject.split(".")[2] in ("ev", "task", "journal", "dead")


async def fire(buses: dict[str, Bus], attack: Attack, number: int) -> str:
    """Send one message; returns what happened to it on the way, "" for nothing."""
    bus = buses[attack.user]
    try:
        if durable(attack):
            await bus.publish_durable(attack.subject, attack.data, msg_id=f"hostile:{number}")
        else:
            # Requests have somebody who waits for the answer: here nobody.
            reply = "_INBOX_agent.nobody" if attack.subject.endswith(".assign") else ""
            await bus.publish(attack.subject, attack.data, reply=reply)
            await asyncio.sleep(CORE_PAUSE_S)
    except BusError as error:
        return str(error)
    return ""


def told(attack: Attack) -> tuple[str, int, str]:
    """How a letter names a message."""
    subject = attack.subject[:LONGEST_SUBJECT]
    return subject, len(attack.data), base64.b64encode(attack.data[:DEAD_BYTES]).decode()


async def letters(bus: Bus) -> list[DeadLetter]:
    return [decode(each.data, DeadLetter) async for each in bus.read(stream(JOB, "dead"), f"pearl.{JOB}.dead.*")]


def log_lines(run: RunningJob) -> list[dict[str, str]]:
    lines: list[dict[str, str]] = []
    for path in (run.job.run_dir / "logs").glob("*.log"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("{"):
                lines.append({"file": path.name, **json.loads(line)})
    return lines


async def test_nothing_that_a_peer_can_say_disturbs_a_job(tmp_path: Path) -> None:
    async with running_job(tmp_path, steps=40) as run:
        run.commands = None  # this test sends commands that no plan asked for
        await settled(run)
        before = shape(run.board.table), budget(run)
        shape_before = shape(run.board.table, only="reserved")
        pids = {(each.name, each.pid) for each in run.supervisor.processes()}
        listener = await run.bus.subscribe(f"pearl.{JOB}.tok.>")
        chunk = await listener.next(30)
        assert chunk is not None
        await listener.stop()
        edge = chunk.subject.rpartition(".")[2]

        attacks = [*nonsense(), *misplaced(), *too_large(), *chunks(edge), *garbage()]
        buses = {user: await connect(run.job, user) for user in SENDS if user != "monitor"}
        problems: list[str] = []
        refused = 0
        begun = time.monotonic()
        for number, attack in enumerate(attacks):
            problem = await fire(buses, attack, number)
            if bool(problem) is not (attack.outcome == REFUSED):
                problems.append(f"{attack.user} {attack.subject} ({attack.what}): {problem or 'not refused'}")
            refused += bool(problem)
        # Headers that would let one user's message touch another's.
        for user in ("feed", "router"):
            key = f"$KV.{state_bucket(JOB)}.{user}"
            await buses[user].publish(key, b"x", headers={"Nats-Rollup": "all"})
        took_s = time.monotonic() - begun

        wanted = {told(attack): attack for attack in attacks if attack.outcome == LETTER}
        missing: dict[object, Attack] = {}
        for _ in range(100):
            kept = await letters(run.bus)
            have = {(letter.subject, letter.size, letter.data) for letter in kept}
            missing = {key: attack for key, attack in wanted.items() if key not in have}
            if not missing:
                break
            await asyncio.sleep(0.2)
        problems += [f"no dead letter: {each.user} {each.subject}: {each.what}" for each in missing.values()]
        problems += [f"no reason: {letter}" for letter in kept if not letter.reason or len(letter.reason) > 300]

        lines = log_lines(run)
        texts = "\n".join(str(line.get("text", "")) for line in lines if line["level"] in ("warning", "error"))
        for attack in attacks:
            if attack.outcome in (LETTER, LOGGED) and attack.subject not in texts:
                problems.append(f"no log line names {attack.subject} ({attack.what})")
        problems += [f"traceback in {path.name}" for path in tracebacks(run)]
        after = shape(run.board.table), budget(run)
        if after != before:
            problems.append(f"changed from {before} to {after}")
        now = {(each.name, each.pid) for each in run.supervisor.processes()}
        if now != pids or run.supervisor.restarts:
            problems.append(f"processes: {pids ^ now}; restarts {run.supervisor.restarts}")
        assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:60])

        # Nothing of it lies in wait: not for those that restart and read the streams, nor for what is really meant.
        for victim in ("node_agent-reserved", "orchestrator", "cluster_rebuilder", "agent-0"):
            await run.kill(victim)
        for number, event in enumerate((GpuAvailable(node=SPOT, gpus=(0,)), GpuReclaimed(node=SPOT, gpus=(0,)))):
            subject = subject_of(JOB, event)
            await buses["cli"].publish_durable(subject, encode(event), msg_id=f"meant:{number}")
            wanted_active = isinstance(event, GpuAvailable)
            what = "the spot worker comes" if wanted_active else "the spot worker goes"
            await run.until(lambda wanted=wanted_active: ("spot1-w0" in active(run)) is wanted, what)
        assert shape(run.board.table, only="reserved") == shape_before

        for bus in buses.values():
            await bus.close()
        report = await run.finished(240)
        assert_zeros(report, run.job)
        strays = [attack for attack in attacks if attack.outcome == STRAY]
        assert report.strays >= len(strays)
        print(
            f"{len(attacks)} attacks in {took_s:.0f} s: {Counter(each.outcome for each in attacks)}, {len(kept)} letters"
        )


def tracebacks(run: RunningJob) -> list[Path]:
    logs = (run.job.run_dir / "logs").glob("*.log")
    return [path for path in logs if "Traceback" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("user", sorted(SENDS))
def test_every_user_that_may_publish_is_in_the_catalogue(user: str) -> None:
    """A user or kind that is added later is attacked too: garbage follows from the permissions."""
    sent = {attack.user for attack in garbage()} | {attack.user for attack in nonsense()}
    assert user in sent or not SENDS[user]
