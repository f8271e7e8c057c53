"""`pearl doctor` and SGLang: which version is installed or runs, and whether it has the calls and options that PEARL uses.

An installed one is read, not started: its version from its metadata, its calls and options from its source. One that runs is asked.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from messages.ids import Role
from services.cli.finding import Finding
from services.jobfile import JobFile, rollout_slots
from services.rollout_worker.engines.sglang.api import NEEDED, OPTIONAL, TESTED, UPDATES, Api, ApiError, ServerGoneError
from services.rollout_worker.engines.sglang.server import command

CHECK: Final = "sglang"
ANSWER_S: Final = 60.0
"""An interpreter with many packages on a slow disk; or a server under load."""
TRY: Final = "PEARL_SGLANG_PYTHON=<that interpreter> pytest tests/engine_contract -k '[sglang]'"
LOOK: Final = r"""
import importlib.metadata as metadata, importlib.util as util, json, pathlib, re, sys
found = util.find_spec("sglang")
if found is None:
    print("null")
    raise SystemExit
srt = pathlib.Path(found.submodule_search_locations[0]) / "srt"
served = "\n".join(file.read_text(errors="replace") for file in (srt / "entrypoints").glob("*.py"))
files = [srt / "server_args.py", *(srt / "arg_groups").rglob("*.py")]
options = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
print(json.dumps({
    "version": metadata.version("sglang"),
    "calls": re.findall(r'@(?:app|router)\.\w+\(\s*"(/[\w/]*)"', served),
    "lacks": [each for each in sys.argv[1:] if not re.search(rf"\b{each[2:].replace('-', '_')}\b|{each}\b", options)],
    "packages": [each for each in ("torch_memory_saver", "mooncake") if util.find_spec(each) is not None],
}))
"""


class Installed(msgspec.Struct, frozen=True):
    """What `LOOK` prints. `lacks`: options of ours that it does not know."""

    version: str
    calls: list[str]
    lacks: list[str]
    packages: list[str]


def look_at_sglang(job: JobFile) -> list[Finding]:
    """Of a job with the engine "sglang"; nothing for others. Starts an interpreter, and asks servers."""
    if job.rollout.engine != "sglang":
        return []
    findings = asyncio.run(_adopted(job))
    if {str(slot.worker) for slot in rollout_slots(job)} - job.rollout.sglang.adopt.keys():
        findings += _installed(job)
    return findings


def _installed(job: JobFile) -> Iterator[Finding]:
    python = job.rollout.sglang.python or sys.executable
    where = f"rollout.sglang.python = {job.rollout.sglang.python!r}"
    role = Role.PREFILL if job.decision.disaggregation else Role.COLOCATED
    line = command(job.rollout, role, "", "cpu", "127.0.0.1", 0, 0)
    ours = line[: len(line) - len(job.rollout.sglang.args)]
    options = sorted({word for word in ours if word.startswith("--")})
    install = (
        f"install sglang=={TESTED} into an environment of its own, and name its interpreter there (docs/sglang.md)"
    )
    try:
        said = subprocess.run([python, "-c", LOOK, *options], capture_output=True, timeout=ANSWER_S, check=True)
        installed = msgspec.json.decode(said.stdout, type=Installed | None)
    except OSError as error:
        yield Finding(check=CHECK, what=f"{python} cannot be run ({error.strerror or error})", where=where, do=install)
        return
    except (subprocess.SubprocessError, msgspec.DecodeError) as error:
        what = f"{python} does not say which SGLang it has ({error})"
        yield Finding(check=CHECK, what=what, where=where, do=install)
        return
    if installed is None:
        yield Finding(check=CHECK, what=f"{python} has no SGLang", where=where, do=install)
        return
    yield from of_version(installed.version, where)
    yield from of_surface(installed.version, installed.calls, where, install, job.rollout.sglang.weights)
    if installed.lacks:
        what = f"SGLang {installed.version} does not know {', '.join(installed.lacks)}, with which workers start it"
        yield Finding(check=CHECK, what=what, where=where, do=install)
    yield from _of_packages(job, installed, where)


def _of_packages(job: JobFile, installed: Installed, where: str) -> Iterator[Finding]:
    section = job.rollout.sglang
    if section.memory_saver and "torch_memory_saver" not in installed.packages:
        yield Finding(
            check=CHECK,
            what="the package torch-memory-saver is missing, without which memory cannot be released",
            where=where,
            do="install it there, or set rollout.sglang.memory_saver = false where no GPU is lent",
        )
    if job.decision.lending and not section.memory_saver:
        yield Finding(
            check=CHECK,
            what="GPUs are lent, but a server would keep its memory when one goes back to training",
            where="rollout.sglang.memory_saver = false, decision.lending = true",
            do="set rollout.sglang.memory_saver = true, or decision.lending = false",
        )
    moved = section.transfer_backend.startswith("mooncake")
    if job.decision.disaggregation and moved and "mooncake" not in installed.packages:
        yield Finding(
            check=CHECK,
            what="the package of Mooncake is missing, which moves KV caches between prefill and decode servers",
            where=where,
            do="install mooncake-transfer-engine there, or set rollout.sglang.transfer_backend to what is there (nixl)",
        )


async def _adopted(job: JobFile) -> list[Finding]:
    findings: list[Finding] = []
    for worker, url in sorted(job.rollout.sglang.adopt.items()):
        where = f"rollout.sglang.adopt: {worker} = {url!r}"
        api = Api(url)
        try:
            async with asyncio.timeout(ANSWER_S):
                described, info = await api.get("/openapi.json"), await api.get("/server_info")
        except (ApiError, ServerGoneError, TimeoutError) as error:
            what = f"no SGLang server answers there ({error or 'too slow'})"
            findings.append(Finding(check=CHECK, what=what, where=where, do="start it, or correct the address"))
            continue
        finally:
            await api.close()
        version, paths = str(info.get("version")), list(described.get("paths", {}))
        findings += of_version(version, where)
        findings += of_surface(version, paths, where, f"run SGLang {TESTED} there", job.rollout.sglang.weights)
        findings += _of_settings(info, where)
    return findings


def _of_settings(info: dict[str, Any], where: str) -> Iterator[Finding]:
    if info.get("incremental_streaming_output") is not True:
        yield Finding(
            check=CHECK,
            what="it streams each reply from its beginning again and again",
            where=where,
            do="start it with --incremental-streaming-output",
        )


def of_version(version: str, where: str) -> Iterator[Finding]:
    """It is the one that was tested."""
    if version != TESTED:
        yield Finding(
            check=CHECK,
            what=f"SGLang {version} was not tried with PEARL; {TESTED} was",
            where=where,
            do=f"use {TESTED}, or try this one: {TRY}",
        )


def of_surface(version: str, calls: list[str], where: str, install: str, weights: str = "disk") -> Iterator[Finding]:
    """It has the calls that PEARL makes; of those that it can do without, what is done instead."""
    missing = [path for path in (*NEEDED, *UPDATES[weights]) if path not in calls]
    if missing:
        what = f"SGLang {version} has no {', '.join(missing)}, without which it cannot be driven"
        yield Finding(check=CHECK, what=what, where=where, do=install)
    for path, consequence in OPTIONAL.items():
        if path not in calls:
            what = f"SGLang {version} has no {path}: {consequence}"
            yield Finding(check=CHECK, what=what, where=where, do=f"nothing, or {install}")
