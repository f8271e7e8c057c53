"""A whole job of real processes that lends its training GPUs, while the processes concerned are killed one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from messages.envelope import Message, UndecodableMessage, decode
from messages.ids import Residency
from messages.subjects import stream
from services.jobfile import rollout_slots
from services.monitor import lending
from tests.integration.running_job import RunningJob, assert_zeros, running_job

LENDING = """
[decision]
lending = true
toggle_guess_s = 0.0
[rollout]
pace_decode_ms = 50.0
pace_decode_ms_per_sequence = 150.0
"""
VICTIMS = ("train-w0", "train-t0", "toggle_manager", "orchestrator", "node_agent-train", "cluster_rebuilder")


def lent(run: RunningJob) -> bool:
    table = run.board.table
    return table is not None and any(pair.residency is Residency.ROLLOUT for pair in table.pairs)


async def lending_of(run: RunningJob) -> lending.Lending:
    events: list[Message] = []
    async for delivery in run.bus.read(stream("test", "ev"), "pearl.test.ev.>"):
        try:
            events.append(decode(delivery.data, *lending.KINDS))
        except UndecodableMessage:
            continue
    return lending.lending_of(events, {slot.worker for slot in rollout_slots(run.job)} - {"reserved-w0"})


@pytest.mark.slow
async def test_lending_survives_the_death_of_whoever_takes_part(tmp_path: Path) -> None:
    async with running_job(tmp_path, steps=6 + 6 * len(VICTIMS), more=LENDING) as run:
        for victim in VICTIMS:
            await run.until(lambda: lent(run), f"GPUs are lent before {victim} dies")
            before = len(run.board.steps)
            await run.kill(victim)
            await run.until(lambda before=before: len(run.board.steps) > before, f"a train step after {victim} died")
        report = await run.finished()
        assert_zeros(report, run.job)
        found = await lending_of(run)
        assert found.count >= len(VICTIMS) and found.late_returns == 0
        assert found.memory["trainer"].freed_bytes > 0 and found.memory["workers"].freed_bytes > 0
        assert found.memory["workers"].restored_bytes > 0
