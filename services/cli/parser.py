"""Every subcommand and option of `pearl`. Imports nothing heavy: `pearl --help` answers at once."""

from __future__ import annotations

import argparse

FIGURES = ("table", "plan", "router", "stream", "turn", "engine", "snapshot", "memory", "gateway")
"""Benchmarks that give figures beside references; the code is in `services.bench`."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; each subcommand names the module of `services.cli` that runs it."""
    parser = argparse.ArgumentParser(
        prog="pearl", description="Control plane for asynchronous agentic RL on elastic GPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, module: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(module=module)
        return sub

    demo = command("demo", "demo", "train an agent on this machine while workers come and go; prints a report")
    _json(demo)
    demo.add_argument(
        "--seed", type=_seed, default=0, help="of tasks, sampling, the initial model and the trace's victims"
    )
    demo.add_argument("--engine", choices=("torch", "emulated"), default="torch", help="what generates tokens")
    demo.add_argument(
        "--workers",
        type=_positive,
        default=None,
        help="emulated only: rollout workers, half of them overlap (default: 16)",
    )
    demo.add_argument("--steps", type=_positive, default=None, help="train steps (default: the demo job's)")
    demo.add_argument("--data-dir", default=".pearl", help="where the run leaves its files (default: .pearl)")
    demo.add_argument("--record", metavar="FILE.svg", default=None, help="keep a picture of the live view there")
    demo.add_argument("--port", type=_port, default=0, help="of the embedded NATS server (default: any free port)")

    up = command("up", "up", "run all services of a job file until Ctrl-C")
    _job(up)
    up.add_argument("--view", action="store_true", help="show the live view")

    service = command("service", "service", "run one service (for systemd, containers, pods)")
    service.add_argument("name", metavar="NAME", help="a folder of services/, e.g. orchestrator")
    _job(service)
    service.add_argument("--node", help="node_agent: the node it is on")
    service.add_argument("--worker", help="rollout_worker, trainer: the worker slot")
    service.add_argument("--incarnation", type=int, help="rollout_worker, trainer: which process of the slot this is")
    service.add_argument("--index", type=int, default=0, help="agent, router, emulated_fleet: which of several")

    status = command("status", "status", "role table, budget, plan, profile, version, rates")
    _where(status)
    _json(status)

    tap = command("tap", "tap", "live messages, decoded")
    tap.add_argument(
        "pattern", nargs="?", default=">", help="subject filter below pearl.<job>., e.g. 'ev.>' (default: all)"
    )
    tap.add_argument("--count", type=_positive, default=None, help="stop after so many")
    _where(tap)
    _json(tap)

    events = command("events", "events", "publish an availability event by hand")
    events.add_argument("event", choices=("available", "reclaim"))
    events.add_argument("--node", required=True)
    events.add_argument("--gpus", required=True, help="indices, e.g. 0,1")
    events.add_argument("--notice-s", type=float, default=0.0, help="reclaim: seconds until the GPUs are gone (0: now)")
    _where(events)
    _json(events)

    decide = command("decide", "decide", "what the decision engine would choose, and every candidate's prediction")
    decide.add_argument("--profile", required=True, help="JSON or TOML file")
    decide.add_argument("--workers", type=int, required=True)
    _json(decide)

    plan = command("plan", "plan", "the minimal-change plan from a table to a target")
    plan.add_argument("--table", required=True, help="JSON file")
    plan.add_argument("--target", required=True, help="JSON file")
    _json(plan)

    bench = command("bench", "bench", "benchmarks on this machine")
    bench.add_argument(
        "name",
        nargs="?",
        choices=("all", *FIGURES, "policies", "pace"),
        default="all",
        metavar="NAME",
        help=f"{', '.join(FIGURES)}: each part beside its reference, all: all of these (default); "
        "policies: rollout throughput, planner against fixed policies, same trace and seed; "
        "pace: paced workers beside the makespan model",
    )
    _json(bench)
    bench.add_argument(
        "--report", metavar="DIR", default=None, help="also leave bench.json and bench.svg there (not policies, pace)"
    )
    bench.add_argument("--seed", type=_seed, default=0, help="of tasks, sampling, model and trace victims")
    bench.add_argument("--minutes", type=_minutes, default=12.0, help="for all policies together (default: 12)")
    bench.add_argument(
        "--policies", default="", help="comma-separated decision.policy values; the first is the reference"
    )
    bench.add_argument("--data-dir", default=".pearl", help="where the runs leave their files (default: .pearl)")

    check = command("check", "check", "check a finished or running job's journals: nothing lost, nothing regenerated")
    _where(check)
    _json(check)

    doctor = command("doctor", "doctor", "what is wrong with this machine, NATS, the job file; says what to do")
    doctor.add_argument(
        "-c", "--config", default=None, metavar="FILE", help="the job file (default: the newest run's, or the demo's)"
    )
    _json(doctor)

    completion = command("completion", "completion", "a shell's completion script: source it in the shell's start file")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def _job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the job file")


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c",
        "--config",
        default=None,
        metavar="FILE",
        help="the job file (default: that of the newest run below .pearl)",
    )


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {2**32 - 1}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {2**16 - 1}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most a day")
    return value
