"""`pearl demo`: the main job on this machine, start to report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import psutil

from services import jobfile
from services.cli import demo_jobs
from services.cli.doctor_sglang import look_at_sglang
from services.cli.preflight import preflight
from services.cli.progress import progress
from services.cli.run_log import run_log
from services.cli.runs import RUN_FILE
from services.connect import connect
from services.jobfile import ConfigError, JobFile
from services.monitor.collector import Collector
from services.monitor.picture import record
from services.monitor.report import DemoReport, make_report, print_report
from services.nats_server.process import ServerError
from services.rollout_worker.engines.sglang import cpu
from services.runtime.bus import Bus
from services.runtime.clock import now_ms
from services.supervisor.service import Started, Supervisor, on_interrupt

LIMIT_S = 285.0
"""A demo that has not finished its train steps by then stops and reports what it reached (exit 1)."""
SERVERS_LIMIT_S = 585.0
"""And one with SGLang servers, which take half a minute and more to start, three times."""
RUN_NAME: Final = re.compile(r"demo-\d{8}-\d{6}-\d+")
KEEP_RUNS = 5
"""Older demo runs below the data directory are deleted."""


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if the run finished with all zeros, 1 otherwise."""
    picture = None if arguments.record is None else Path(os.path.abspath(arguments.record))  # noqa: PTH100 - see `new_run`
    if picture is not None and not picture.parent.is_dir():
        raise ConfigError(f"--record {picture}: there is no folder {picture.parent}")
    path = prepare(arguments)
    job = jobfile.load(path)
    try:
        with progress("looking at what the demo needs"):
            preflight(job, path)
            for finding in look_at_sglang(job):
                raise ConfigError(f"{finding.where}: {finding.what}; {finding.do}")
    except ConfigError:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise
    report = asyncio.run(_demo(job, path, quiet=arguments.json, picture=picture))
    if report is None:
        return 130
    if arguments.json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        print_report(report, job)
    return 0 if report.clean(job) else 1


def prepare(arguments: argparse.Namespace) -> Path:
    """Make a fresh run folder with its job file; earlier demos' files are left alone, the oldest deleted."""
    changes = {} if arguments.steps is None else {"train_steps": str(arguments.steps)}
    if arguments.workers is not None and arguments.engine != "emulated":
        raise ConfigError(
            f"--workers {arguments.workers}: only with --engine emulated; a demo with real models has few workers"
        )
    return new_run(
        Path(arguments.data_dir),
        seed=arguments.seed,
        port=arguments.port,
        changes=changes,
        engine=arguments.engine,
        workers=arguments.workers,
    )


def new_run(
    data_dir: Path,
    *,
    seed: int,
    changes: Mapping[str, str],
    port: int = 0,
    engine: str = "torch",
    workers: int | None = None,
) -> Path:
    """The job file of a fresh run below `data_dir`: the demo's, with these keys' values (as TOML) changed. Raises ConfigError."""
    python = cpu.find_python() if engine == "sglang" else ""
    data_dir = Path(os.path.abspath(data_dir))  # noqa: PTH100 - of a loop of links, Path.resolve raises RuntimeError
    run_dir = data_dir / (time.strftime("demo-%Y%m%d-%H%M%S-") + str(os.getpid()))
    try:
        run_dir.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--data-dir {data_dir}: cannot make a run folder there ({error})") from error
    try:
        text = demo_jobs.template(engine)
        if workers is not None:
            text = demo_jobs.with_workers(text, workers, "train_steps" in changes)
        text = text.replace(
            'name = "demo"\n',
            f'name = "demo"\ndata_dir = {json.dumps(str(run_dir), ensure_ascii=False)}\nseed = {seed}\n',
            1,
        )
        text = text.replace("[model]\n", f"[nats]\nport = {port}\n\n[model]\n", 1)
        text = demo_jobs.changed(text, changes)
        path = run_dir / RUN_FILE
        try:
            if engine == "emulated":
                text = demo_jobs.with_profile(text, run_dir)
            elif engine == "sglang":
                text = demo_jobs.with_servers(text, run_dir, python)
            path.write_text(text, encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{path}: the job file cannot be written ({error}); choose another --data-dir") from error
        jobfile.load(path)
    except ConfigError:
        shutil.rmtree(run_dir, ignore_errors=True)  # else `pearl status` would take it for the newest run
        raise
    _forget_old(data_dir)
    return path


def _forget_old(data_dir: Path) -> None:
    """Delete all but the newest demo runs there, and nothing else whose name begins alike."""
    runs = sorted(
        each
        for each in data_dir.iterdir()
        if RUN_NAME.fullmatch(each.name) and not each.is_symlink() and (each / RUN_FILE).is_file()
    )
    for old in runs[: -KEEP_RUNS - 1]:
        if not _alive(old):
            shutil.rmtree(old, ignore_errors=True)


def _alive(run_dir: Path) -> bool:
    """Whether a supervisor still runs in this run folder (its pid is the folder name's last part)."""
    pid = run_dir.name.rpartition("-")[2]
    return pid.isdigit() and Path(f"/proc/{pid}").exists()


async def _demo(job: JobFile, path: Path, *, quiet: bool, picture: Path | None) -> DemoReport | None:
    stop, interrupted = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        interrupted.set()
        stop.set()

    on_interrupt(loop, interrupt)
    begun = time.monotonic()
    limit_s = SERVERS_LIMIT_S if job.rollout.engine == "sglang" else LIMIT_S
    supervisor = Supervisor(job, path)
    collector: Collector | None = None
    bus: Bus | None = None
    seen_processes: dict[str, int] = {}
    cpu_s: dict[tuple[str, int], float] = {}  # by process; the last look at one that ended is within half a second

    def tell(text: str) -> None:
        """In the live view among what happened, else as a line."""
        if collector is not None and sys.stdout.isatty() and not quiet and not stop.is_set():
            collector.board.say(now_ms(), text)
        else:
            _progress(quiet, text)

    logs = contextlib.ExitStack()
    try:
        logs.enter_context(run_log(job, tell))
        _progress(quiet, "starting NATS and the services ...")
        with progress("starting NATS and the services"):
            await supervisor.start()
        bus = await connect(job, "monitor")
        collector = Collector(bus, job)
        await collector.start()
        following = asyncio.create_task(collector.follow(stop))
        watching = [asyncio.create_task(_watch(job, stop, collector, quiet))]
        if picture is not None:
            watching.append(asyncio.create_task(record(collector.board, job, stop, picture)))
        while not stop.is_set():
            running = supervisor.processes()
            seen_processes.update((each.name, each.pid) for each in running)
            cpu_s.update(_processor_seconds(running))
            over_time = time.monotonic() - begun > limit_s
            if len(collector.board.steps) >= job.pipeline.train_steps or over_time:
                stop.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.5)
        await asyncio.gather(following, *watching)
        if interrupted.is_set():
            _progress(quiet, "interrupted: stopping all processes ...")
            return None
        _progress(quiet, "checking every token of the run against the journals ...")
        with progress("checking"):
            report = await make_report(
                bus,
                job,
                processes=seen_processes,
                cpu_s=_by_name(cpu_s),
                serving=collector.board.serving,
                wall_s=time.monotonic() - begun,
            )
        return None if interrupted.is_set() else report
    except ServerError:
        if interrupted.is_set():  # a server being started hears Ctrl-C too, until it has a session of its own
            return None
        raise
    finally:
        if bus is not None:
            await bus.close()  # before its server goes, which it would complain of
        with logs, progress("stopping all processes"):
            await supervisor.stop()


def _processor_seconds(processes: Iterable[Started]) -> dict[tuple[str, int], float]:
    """What each has used so far."""
    found: dict[tuple[str, int], float] = {}
    for each in processes:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(each.pid).cpu_times()
            found[each.name, each.pid] = times.user + times.system
    return found


def _by_name(cpu_s: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """Over all processes that had a name."""
    found: dict[str, float] = {}
    for (name, _), seconds in cpu_s.items():
        found[name] = found.get(name, 0.0) + seconds
    return found


async def _watch(job: JobFile, stop: asyncio.Event, collector: Collector, quiet: bool) -> None:
    """The live view on a terminal; a line every few seconds elsewhere; with --json that line on standard error."""
    if sys.stdout.isatty() and not quiet:
        from services.monitor.view import watch

        await watch(job, stop, collector=collector)
        return
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 10.0)
        board = collector.board
        reward = f"{board.rewards[-1][1]:.2f}" if board.rewards else "-"
        _progress(
            quiet,
            f"train step {len(board.steps)}/{job.pipeline.train_steps}  reward {reward}  "
            f"workers {board.budget[-1][2] if board.budget else 0}  {board.tokens_per_s:.0f} tokens/s  "
            f"{board.preemptions} preemptions",
        )


def _progress(quiet: bool, text: str) -> None:
    print(text, file=sys.stderr if quiet else sys.stdout, flush=True)
