"""Tasks of a harness: a working copy to begin from, what is to be done, and hidden tests that decide. One TOML file each.

    statement = "What the agent is told."
    folder = "rangelib"                       # optional: begin from a copy of this folder, beside the file
    test = ["python", "-m", "pytest", "-q", "{tests}"]   # optional: passes if it ends with 0; else unittest, in `judge.py`

    [files]                                   # what the agent finds (after `folder`)
    "rangelib/__init__.py" = '''...'''

    [hidden]                                  # put beside its work, in a copy, when it has ended
    "test_rangelib.py" = '''...'''

    [solution]                                # optional: files of a fix, for the check that the task can be solved
    "rangelib/__init__.py" = '''...'''

`check_tasks` runs the hidden tests on the beginning, where they must fail, and on the solution, where they must pass.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from services.harness import judge, sandbox
from services.harness.sandbox import CopyError, Folders, Limits
from services.jobfile import ConfigError

BUILT_IN: Final = Path(__file__).parent / "tasks"


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    statement: str
    hidden: dict[str, str]
    files: dict[str, str] = {}
    folder: str = ""
    test: tuple[str, ...] = ()
    solution: dict[str, str] = {}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `folder`: None without one."""

    name: str
    statement: str
    files: dict[str, str]
    folder: Path | None
    hidden: dict[str, str]
    test: tuple[str, ...]
    solution: dict[str, str]


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """What the hidden tests say. `output`: of the tests, for people."""

    passed: bool
    output: str


def load_tasks(folder: Path) -> tuple[Task, ...]:
    """The tasks of a folder, by name. Raises ConfigError."""
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise ConfigError(
            f"harness.tasks: {folder} holds no *.toml; the form is described in services/harness/tasks.py"
        )
    return tuple(_load(path) for path in paths)


def _load(path: Path) -> Task:
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
    except (OSError, ValueError, RecursionError) as error:  # also of msgspec and tomllib
        raise ConfigError(f"harness.tasks: {path}: {error}") from error
    for section in (found.files, found.hidden, found.solution):
        for name in section:
            parts = PurePosixPath(name).parts
            if not parts or name.startswith("/") or ".." in parts:
                raise ConfigError(f"harness.tasks: {path}: {name!r} is no path inside the working copy")
    if not found.hidden and not found.test:
        raise ConfigError(f"harness.tasks: {path}: [hidden] is empty, so nothing would decide the reward; add a test")
    start = path.parent / found.folder if found.folder else None
    if start is not None and not start.is_dir():
        raise ConfigError(f"harness.tasks: {path}: folder = {found.folder!r}: there is no {start}")
    return Task(
        name=path.stem,
        statement=found.statement.strip(),
        files=found.files,
        folder=start,
        hidden=found.hidden,
        test=found.test,
        solution=found.solution,
    )


def task_of(tasks: tuple[Task, ...], task_seed: int) -> Task:
    """The task that a seed stands for."""
    return tasks[task_seed % len(tasks)]


def prepare(task: Task, folders: Folders, most_bytes: int) -> None:
    """Make the folders, and the working copy as the agent finds it. Raises OSError, CopyError."""
    folders.make()
    if task.folder is not None:
        folders.work.rmdir()
        sandbox.copy_tree(task.folder, folders.work, most_bytes)
    write(folders.work, task.files)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files below a folder. Raises OSError."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


async def grade(task: Task, folders: Folders, limits: Limits, most_bytes: int, marker: str) -> Grade:
    """Run the hidden tests on a copy of what was made, which is removed again. Raises OSError where nothing can be run."""
    copy, tests = folders.root / "graded", folders.root / "hidden"
    try:
        try:
            await asyncio.to_thread(sandbox.copy_tree, folders.work, copy, most_bytes)
        except CopyError as error:
            return Grade(passed=False, output=f"the working copy cannot be graded: {error}")
        write(tests, task.hidden)
        environment = folders.environment(marker)
        if task.test:
            command = [each.replace("{tests}", str(tests)) for each in task.test]
            ran = await sandbox.run(command, cwd=copy, environment=environment, limits=limits)
            return Grade(passed=ran.returncode == 0 and not ran.ended_by, output=ran.output)
        word = secrets.token_hex(16)
        command = [sys.executable, "-I", "-B", judge.__file__, str(copy), str(tests)]
        ran = await sandbox.run(command, cwd=copy, environment=environment, limits=limits, stdin=f"{word}\n".encode())
        return Grade(passed=_passed(ran.output, word) and not ran.ended_by, output=ran.output)
    finally:
        await asyncio.to_thread(sandbox.remove, copy)
        await asyncio.to_thread(sandbox.remove, tests)


def _passed(output: str, word: str) -> bool:
    for line in output.splitlines():
        said, _, counts = line.partition(" ")
        if said == word:
            passed, _, total = counts.partition(" ")
            return passed == total and total not in ("", "0")
    return False


async def check_tasks(tasks: tuple[Task, ...], root: Path, limits: Limits, most_bytes: int) -> list[str]:
    """What is wrong with tasks: their tests pass before anything was done, or fail on their own solution."""
    problems: list[str] = []
    for task in tasks:
        for solved in (False, True) if task.solution else (False,):
            folders = Folders(root / f"{task.name}-{'solved' if solved else 'begin'}")
            prepare(task, folders, most_bytes)
            write(folders.work, task.solution if solved else {})
            graded = await grade(task, folders, limits, most_bytes, "check-tasks")
            if graded.passed != solved:
                problems.append(
                    f"{task.name}: its hidden tests {'fail on its solution' if solved else 'pass at the start'}:\n"
                    f"{graded.output[-1000:]}"
                )
            sandbox.remove(folders.root)
    return problems
