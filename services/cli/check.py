"""`pearl check`: hold a job's journals against its workers' attempt logs."""

from __future__ import annotations

import argparse
import asyncio

import msgspec

from services.checker.collect import check
from services.checker.core_report import Report
from services.cli.progress import progress
from services.cli.runs import connect_running, job_of
from services.jobfile import JobFile


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 if the checker finds a violation. The job's NATS must be up.

    Streams have limits: where one no longer begins with its first message, it is said from which moment on it was checked. That is
    no violation: the exit status is that of what could be seen.
    """
    with progress("holding every token against the journals"):
        report = asyncio.run(_check(job_of(arguments)))
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        for name in ("completed", "lost", "duplicated", "delivered", "regenerated", "lost_with_edge", "staleness_max"):
            print(f"{name:16} {getattr(report, name)}")
        for each in report.trimmed:
            print(f"not all seen: {each}")
        if report.unseen:
            print(f"not all seen: {report.unseen} trajectories of batches ended before that: neither lost nor checked")
        if report.unjudged:
            print(
                f"not all seen: {report.unjudged} ends and train steps may have been refused: the letters that say so are gone"
            )
        for violation in report.violations:
            print(f"violation: {violation}")
    return 1 if report.violations else 0


async def _check(job: JobFile) -> Report:
    bus = await connect_running(job, "monitor")
    try:
        return await check(bus, job)
    finally:
        await bus.close()
