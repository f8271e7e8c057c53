"""Every subcommand and option of `pearl`. Imports nothing heavy: `pearl --help` answers at once."""

from __future__ import annotations

import argparse

from services.cli import simulate_options

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
    demo.add_argument(
        "--engine",
        choices=("torch", "emulated", "sglang"),
        default="torch",
        help="what generates tokens; sglang: real servers, on CPUs (docs/sglang.md)",
    )
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

    up = command("up", "up", "run all services of a job file until Ctrl-C; says when its train steps are done")
    _job(up)
    up.add_argument("--view", action="store_true", help="show the live view")

    service = command("service", "service", "run one service (for systemd, containers, pods)")
    service.add_argument("name", metavar="NAME", help="a folder of services/, e.g. orchestrator")
    _job(service)
    service.add_argument("--node", help="node_agent: the node it is on")
    service.add_argument("--worker", help="rollout_worker, trainer: the worker slot")
    service.add_argument("--incarnation", type=int, help="rollout_worker, trainer: which process of the slot this is")
    service.add_argument(
        "--index",
        type=int,
        help="agent, harness, router, emulated_fleet, nats_server of nats.cluster: which of several (default: 0)",
    )

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

    simulate = command("simulate", "simulate", "the production code on a virtual clock")
    _simulations(simulate)

    bench = command("bench", "bench", "benchmarks on this machine")
    bench.add_argument(
        "name",
        nargs="?",
        choices=("all", *FIGURES, "scale", "policies", "pace", "calibrate"),
        default="all",
        metavar="NAME",
        help=f"{', '.join(FIGURES)}: each part beside its reference, all: all of these (default); "
        "scale: processors and memory of the control plane with a thousand emulated workers, for ten minutes; "
        "policies: rollout throughput, planner against fixed policies, same trace and seed; "
        "pace: paced workers beside the makespan model; calibrate: a hardware description for simulate run",
    )
    _json(bench)
    bench.add_argument(
        "--report", metavar="DIR", default=None, help="also leave bench.json and bench.svg there (not policies, pace)"
    )
    bench.add_argument("--workers", type=_positive, default=1000, help="scale: emulated workers (default: 1000)")
    bench.add_argument("--seed", type=_seed, default=0, help="of tasks, sampling, model and trace victims")
    bench.add_argument(
        "--minutes", type=_minutes, default=None, help="policies: for all together (default: 12); scale: default 10"
    )
    bench.add_argument(
        "--policies", default="", help="comma-separated decision.policy values; the first is the reference"
    )
    bench.add_argument("--data-dir", default=".pearl", help="where the runs leave their files (default: .pearl)")

    bench.add_argument("-c", "--config", default=None, metavar="FILE", help="calibrate: the job (default: the demo's)")
    bench.add_argument(
        "--out", default="hardware.json", metavar="FILE", help="calibrate: the description (default: hardware.json)"
    )
    bench.add_argument("--validate", action="store_true", help="calibrate: also run and simulate the same clients")

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


def _simulate_faults(simulations: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    text = "every service under seeded faults, watched by checkers (docs/fault-simulation.md)"
    faults = simulations.add_parser("faults", help=text, description=text)
    faults.add_argument("--seeds", type=_positive, default=None, help="how many seeds (default: 200)")
    faults.add_argument(
        "--start", type=_seed, default=0, metavar="SEED", help="the first, or the only one (default: 0)"
    )
    faults.add_argument("--jobs", type=_positive, default=0, help="processes (default: one a core)")
    faults.add_argument("--plan", metavar="FILE", default=None, help="run this fault plan instead of a seed's")
    faults.add_argument(
        "--until", type=_positive, metavar="EVENT", default=None, help="stop after so many events, and show"
    )
    faults.add_argument("--transcript", action="store_true", help="print the whole run in words")
    faults.add_argument("--tokens", action="store_true", help="in the transcript, requests and tokens too")
    faults.add_argument("--print-plan", action="store_true", help="print the seed's fault plan (JSON), and run nothing")
    _json(faults)


def _simulations(simulate: argparse.ArgumentParser) -> None:
    """The sub-commands of `pearl simulate`; `services.cli.simulate` has what runs them."""
    simulations = simulate.add_subparsers(dest="simulation", required=True, metavar="WHAT")

    def simulation(name: str, text: str) -> argparse.ArgumentParser:
        return simulations.add_parser(name, help=text, description=text)

    run = simulation("run", "policies side by side on a trace, a workload and a hardware description")
    simulate_options.add_run(run)
    simulate_options.add_output(run)
    _prices(run)
    _json(run)

    _simulate_faults(simulations)
    chosen = "how good the decision engine's choices are: regret over random workloads and budgets, simulated"
    simulate_options.add_selection(simulation("selection", chosen))
    simulate_options.add_selection(
        simulation("gate", "borrow decisions over random windows against hindsight, simulated")
    )
    simulate_options.add_table2(
        simulation("table2", "the paper's Table 2: the ratio chosen against the best one, simulated")
    )

    record = simulation("record", "write a workload file out of a job's journal, live or afterwards")
    _where(record)
    record.add_argument("--out", required=True, metavar="FILE.csv", help="the workload file to write")
    record.add_argument("--trajectories", type=_positive, default=500, help="stop after so many (default: 500)")
    record.add_argument("--once", action="store_true", help="take what is there now, and do not wait for more")
    _json(record)

    report = simulation("report", "a run's table, plots and page again, without simulating")
    report.add_argument(
        "result", metavar="RESULT.json", help="what `simulate run --out` kept, or a report's result.json"
    )
    report.add_argument(
        "--report", metavar="DIR", default=None, help="leave plots, JSON and one page (index.html) there"
    )
    report.add_argument(
        "--reference", metavar="POLICY", default="", help="what the others are compared with (default: roll)"
    )
    _prices(report)
    _json(report)

    paper = simulation("paper", "the paper's figures and tables, simulated, beside the paper's numbers")
    paper.add_argument(
        "--report", metavar="DIR", default=None, help="leave plots, JSON and one page (index.html) there"
    )
    paper.add_argument(
        "--only", metavar="NAMES", default="", help="comma-separated, e.g. figure5,table3 (default: everything)"
    )
    paper.add_argument("--seeds", type=_positive, default=1, help="seeds of each simulated run (default: 1)")
    paper.add_argument("--hours", type=_hours, default=2.0, help="of each segment (default: the paper's 2)")
    paper.add_argument("--processes", type=_positive, default=None, help="at a time (default: one a core)")
    _json(paper)

    matrix = simulation(
        "matrix", "every policy on every segment with both models, several seeds; goes on where it was interrupted"
    )
    matrix.add_argument("--out", metavar="DIR", required=True, help="keep each simulated cell and the table there")
    matrix.add_argument(
        "--policy", metavar="NAMES", default="", help="comma-separated, `oracle` among them (default: all)"
    )
    matrix.add_argument("--seeds", type=_positive, default=5, help="so many seeds, from --seed on (default: 5)")
    matrix.add_argument("--seed", type=_seed, default=0, help="the first one (default: 0)")
    matrix.add_argument("--hours", type=_hours, default=2.0, help="of each segment (default: the paper's 2)")
    _json(matrix)


def _prices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--spot-price", type=_price, default=None, metavar="X", help="of a preemptible GPU-hour, in any currency"
    )
    parser.add_argument("--reserved-price", type=_price, default=None, metavar="X", help="of any other GPU-hour")


def _price(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1000000")
    return value


def _hours(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1000")
    return value


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
