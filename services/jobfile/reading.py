"""A job file is read once, and checked; what is wrong with it is said in its own terms."""

from __future__ import annotations

import difflib
import re
import stat
import tomllib
from pathlib import Path
from typing import Final

import msgspec

from messages.envelope import brief
from services.jobfile.rules import problems_of
from services.jobfile.sections import JobFile, NodeSection

LONGEST_PROBLEM: Final = 1000
"""Characters of a ConfigError: some of it may be quoted from a file that holds anything."""


class ConfigError(Exception):
    """The configuration is wrong: one message that says what, where and what to do."""

    def __init__(self, problem: str) -> None:
        super().__init__(brief(problem, LONGEST_PROBLEM))


def load(path: str | Path) -> JobFile:
    """Read and check a job file. Raises ConfigError."""
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null character
        raise ConfigError(f"{source}: cannot be read ({error}); give the path of a job file, see examples/") from error
    try:
        data = tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # not TOML; or an integer of thousands of digits, or a thousand brackets
        raise ConfigError(f"{source}: not TOML: {error}") from error
    try:
        job = msgspec.convert(data, JobFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explained(str(error))}") from error
    problem = next(problems_of(job), None) or _problem_of_folder(job.run_dir)
    if problem:
        raise ConfigError(f"{source}: {problem}")
    return job


def _problem_of_folder(run_dir: Path) -> str:
    """Why a run cannot leave its files there, "" if it perhaps can: what exists of the path must be a folder."""
    wrong = f"job.data_dir: {str(run_dir)!r} cannot be a run's folder"
    for each in (run_dir, *run_dir.parents):
        try:
            mode = each.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:  # a loop of links, a name too long, a null character
            return f"{wrong} ({error}); choose another folder"
        return "" if stat.S_ISDIR(mode) else f"{wrong}: {str(each)!r} is no folder; choose another folder"
    return ""


_UNKNOWN_KEY: Final = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `\$\.?(.*)`)?")
_WRONG_VALUE: Final = re.compile(r"(.*) - at `\$\.?(.*)`")


def _explained(error: str) -> str:
    """msgspec's complaint in the job file's own terms: which key, and the one that was perhaps meant."""
    unknown = _UNKNOWN_KEY.fullmatch(error)
    if unknown is not None:
        key, where = unknown[1], (unknown[2] or "").split("[", 1)[0]
        known = _keys(where)
        close = difflib.get_close_matches(key, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return f"unknown key {f'{where}.' if where else ''}{key}: {hint} (docs/configuration.md)"
    wrong = _WRONG_VALUE.fullmatch(error)
    if wrong is None:
        return f"{error}; every key and its type is in docs/configuration.md"
    what, where = wrong[1], wrong[2]
    return f"{where}: {what[:1].lower()}{what[1:]}; see docs/configuration.md"


def _keys(section: str) -> tuple[str, ...]:
    """The keys of a section; of the whole file for ""."""
    if not section:
        return JobFile.__struct_fields__
    if section == "nodes":
        return NodeSection.__struct_fields__
    default = getattr(JobFile(), section, None)
    return default.__struct_fields__ if isinstance(default, msgspec.Struct) else ()
