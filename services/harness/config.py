"""What a harness runner reads of the job file."""

from __future__ import annotations

import importlib.util
import shutil
import ssl
import sys
from pathlib import Path
from typing import Final

import msgspec

import services
from services.harness.sandbox import SHELL, Limits
from services.harness.tasks import BUILT_IN, Task, load_tasks
from services.jobfile import ConfigError, JobFile

MINI: Final = "services.harness.mini_swe_agent"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, times as named."""

    job: str
    index: int
    folder: Path  # of everything that this runner leaves on disk
    concurrency: int
    gateway: str  # URL; "": one of `gateway_files`
    gateway_files: tuple[Path, ...]
    api_key: str
    ca_file: str
    command: tuple[str, ...]
    options: dict[str, object]
    environment: dict[str, str]
    tasks: tuple[Task, ...]  # none: the program says the reward
    episode: Limits
    action: Limits
    test: Limits
    working_copy_bytes: int

    @staticmethod
    def of(job: JobFile, index: int = 0) -> Config:
        """The configuration of runner `index`. Raises ConfigError."""
        harness = job.harness
        _check_programs(harness.command)
        here = str(Path(__file__).parent)
        own_python = harness.command[0] == "{python}"
        bounds = {"memory_bytes": harness.action_memory_bytes, "file_bytes": harness.file_bytes}
        action = Limits(
            seconds=harness.action_s, output_bytes=harness.action_output_bytes, wrapper=harness.wrapper, **bounds
        )
        return Config(
            job=job.job.name,
            index=index,
            folder=(job.run_dir / f"harness-{index}").absolute(),
            concurrency=harness.concurrency,
            gateway=harness.gateway.rstrip("/"),
            gateway_files=tuple(job.gateway_file(each).absolute() for each in range(job.gateway.instances)),
            api_key=_first_key(harness.api_key_file, job.gateway.api_keys_file),
            ca_file=harness.ca_file,
            command=tuple(
                each.replace("{python}", sys.executable).replace("{harness}", here) for each in harness.command
            ),
            options=harness.options,
            # Of a program in Python of ours: where PEARL is. It is nobody else's: their packages would mix.
            environment={"PYTHONPATH": str(_root()), **harness.environment} if own_python else harness.environment,
            tasks=load_tasks(Path(harness.tasks or BUILT_IN)) if harness.reward == "tests" else (),
            episode=Limits(seconds=harness.episode_s, output_bytes=harness.episode_output_bytes),
            action=action,
            test=msgspec.structs.replace(action, seconds=harness.test_s),
            working_copy_bytes=harness.working_copy_bytes,
        )


def _check_programs(command: tuple[str, ...]) -> None:
    """What would fail every episode is said before the first. Raises ConfigError."""
    if shutil.which(SHELL) is None:
        raise ConfigError(f"harness: there is no {SHELL}, in which commands are run with limits")
    program = command[0].replace("{python}", sys.executable)
    if shutil.which(program) is None:
        raise ConfigError(f"harness.command: there is no program {program!r}; give a path, or install it")
    if MINI in command and importlib.util.find_spec("minisweagent") is None:
        raise ConfigError("harness.command: mini-swe-agent is not installed: pip install 'pearl-rl[harness]'")


def _root() -> Path:
    assert services.__file__ is not None
    return Path(services.__file__).parents[1]


def _first_key(own: str, gateways: str) -> str:
    path, key = (own, "harness.api_key_file") if own else (gateways, "gateway.api_keys_file")
    if not path:
        return ""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} = {path!r}: cannot be read ({error})") from error
    found = next((line.strip() for line in lines if line.strip() and not line.startswith("#")), "")
    if not found:
        raise ConfigError(f"{key} = {path!r}: has no key; write one a line")
    return found


def tls_of(ca_file: str) -> ssl.SSLContext | bool:
    """What the gateway's certificate is checked against. Raises ConfigError."""
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"harness.ca_file = {ca_file!r}: {error}") from error
