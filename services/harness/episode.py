"""One episode: a working copy, the harness's program in it with the session's key, and what its work is worth."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from services.harness import sandbox
from services.harness.client import Session
from services.harness.config import Config
from services.harness.core import GiveUp, Post, Ran, is_graded, outcome
from services.harness.sandbox import CopyError, Folders
from services.harness.tasks import Task, grade, prepare, task_of

RESULT_LIMIT: Final = 65536
"""Bytes of a result file."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode ended. `output`: of the program and then of the tests, for people."""

    what: Post | GiveUp
    task: str
    output: str


async def play(config: Config, session: Session) -> Ended:
    """Run one episode. Its processes and folders are gone on return, also when cancelled."""
    folders = Folders(config.folder / session.id)
    marker = f"{marker_of(config)}/{session.id}"
    task = task_of(config.tasks, session.task.task_seed) if config.tasks else None
    try:
        try:
            return await _play(config, session, folders, marker, task)
        except (OSError, CopyError) as error:  # no room on the disk, no bash: not the policy's fault
            return Ended(what=GiveUp(reason=f"the working copy: {error}"), task=task.name if task else "", output="")
    finally:
        await asyncio.to_thread(sandbox.sweep, marker)
        await asyncio.to_thread(sandbox.remove, folders.root)


async def _play(config: Config, session: Session, folders: Folders, marker: str, task: Task | None) -> Ended:
    if task is not None:
        await asyncio.to_thread(prepare, task, folders, config.working_copy_bytes)
        (folders.root / "task.md").write_text(task.statement + "\n", encoding="utf-8")
    else:
        folders.make()
    ran = await sandbox.run(
        [each.replace("{folder}", str(folders.root)) for each in config.command],
        cwd=folders.work,
        environment={**folders.environment(marker), **told(config, session, folders, task)},
        limits=config.episode,
    )
    await asyncio.to_thread(
        sandbox.sweep, marker
    )  # nothing of the program may change its work, or use its session, while it is judged
    name, output, passed = task.name if task else "", ran.output, None
    if task is not None and is_graded(ran):
        graded = await grade(task, folders, config.test, config.working_copy_bytes, marker)
        passed, output = graded.passed, f"{output}\n{graded.output}"
    return Ended(what=outcome(ran, _result(folders, ran), passed), task=name, output=output)


def told(config: Config, session: Session, folders: Folders, task: Task | None) -> Mapping[str, str]:
    """What the program learns: everything it needs, by environment variables. Its commands are not to inherit it."""
    base = f"{session.url}/v1"
    found = {
        "OPENAI_BASE_URL": base,
        "OPENAI_API_BASE": base,
        "OPENAI_API_KEY": session.key,
        "PEARL_MODEL": session.model,
        "PEARL_TASK_SEED": str(session.task.task_seed),
        "PEARL_EVALUATION": "1" if session.task.evaluation else "",
        "PEARL_RESULT": str(folders.root / "result.json"),
        "PEARL_OPTIONS": json.dumps(config.options),
        "PEARL_FOLDER": str(folders.root),
        "PEARL_ACTION_LIMITS": msgspec.json.encode(config.action).decode(),
        **config.environment,
    }
    if task is not None:
        found["PEARL_TASK"] = str(folders.root / "task.md")
    if config.ca_file:
        path = str(Path(config.ca_file).absolute())
        found |= {"SSL_CERT_FILE": path, "REQUESTS_CA_BUNDLE": path}
    return found


def _result(folders: Folders, ran: Ran) -> bytes | None:
    """The result file, if it is one."""
    path = folders.root / "result.json"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return b""
        with path.open("rb") as file:
            return file.read(RESULT_LIMIT)
    except OSError:
        return None


def marker_of(config: Config) -> str:
    """By which the processes of this runner's episodes are found."""
    return str(config.folder)
