"""`pearl status`: what a job is doing now."""

from __future__ import annotations

import argparse
import asyncio
import json

import msgspec
from rich.console import Console

from services.cli.progress import progress
from services.cli.runs import connect_running, job_of
from services.jobfile import JobFile
from services.monitor.board import Board
from services.monitor.collector import Collector
from services.monitor.view import decision_text, workers_table
from services.runtime.clock import now_ms

LISTEN_S = 1.0
"""So long heartbeats are listened to, for load and rates."""


def run(arguments: argparse.Namespace) -> int:
    """Prints role table, budget, plan, profile, version and rates."""
    with progress("reading the job's events"):
        board = asyncio.run(_collect(job_of(arguments)))
    if arguments.json:
        print(json.dumps(describe(board)))
        return 0
    console = Console()
    table = board.table
    if table is None:
        console.print("no role table yet: the orchestrator has not started")
        return 0
    console.print(f"epoch {table.epoch}   policy version {table.policy_version}   {board.tokens_per_s:.0f} tokens/s")
    console.print(workers_table(board, now_ms()))
    if table.plan is not None:
        console.print(f"plan {table.plan.plan_id} {table.plan.stage}")
    if board.latest_budget is not None:
        console.print(
            f"budget {board.latest_budget.budget_id}: {len(board.latest_budget.dedicated)} slots ({board.latest_budget.cause})"
        )
    if board.decisions:
        console.print(f"last decision: {decision_text(board.decisions[-1][1])}")
    return 0


async def _collect(job: JobFile) -> Board:
    bus = await connect_running(job, "monitor")
    try:
        collector = Collector(bus, job)
        await collector.start()
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(LISTEN_S, stop.set)
        await collector.follow(stop)
        return collector.board
    finally:
        await bus.close()


def describe(board: Board) -> dict[str, object]:
    """The same as plain data."""
    return {
        "table": msgspec.to_builtins(board.table),
        "plan": msgspec.to_builtins(board.table.plan) if board.table else None,
        "budget": msgspec.to_builtins(board.latest_budget),
        "profile": msgspec.to_builtins(board.profile),
        "policy_version": board.table.policy_version if board.table else None,
        "train_steps": len(board.steps),
        "tokens_per_s": {worker: round(rate, 1) for worker, rate in board.rates.items()},
        "load": {worker: seen.running + seen.queued for worker, (_, seen) in board.heartbeats.items()},
    }
