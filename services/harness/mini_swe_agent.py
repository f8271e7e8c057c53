"""mini-swe-agent, unmodified, as the program of an episode: `python -m services.harness.mini_swe_agent`.

Its agent and its model class are its own, with its own `mini.yaml`; its place for commands (`environment`) is `Sandboxed`, which
runs each in the working copy with limits. PEARL_OPTIONS are laid over its configuration, e.g.
`{"agent": {"step_limit": 20}, "model": {"model_class": "litellm_textbased"}, "config": "mini_textbased.yaml"}`.

Needs `pip install pearl-rl[harness]`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from services.harness import sandbox
from services.harness.sandbox import MARKER, Folders, Limits

SUBMITTED: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""First line of the output of a command by which the model says that it is done, as mini-swe-agent has it."""
SILENT: Final = {"PAGER": "cat", "MANPAGER": "cat", "LESS": "-R", "PIP_PROGRESS_BAR": "off", "TQDM_DISABLE": "1"}

MODULES: Final = (
    "litellm",
    "minisweagent.agents.default",
    "minisweagent.config",
    "minisweagent.models",
    "minisweagent.utils.serialize",
)
"""Loaded late, since they take seconds. `Any` here: only the first has types, and none is in a job without a harness."""


class SandboxedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What mini-swe-agent's environments are asked for."""

    cwd: str
    timeout: float


class Sandboxed:
    """mini-swe-agent's `Environment`: where the model's commands run."""

    def __init__(self, folder: str = "", limits: str = "", marker: str = "", **_: object) -> None:
        self._folders = Folders(Path(folder or os.environ["PEARL_FOLDER"]))
        self._limits = msgspec.json.decode(limits or os.environ["PEARL_ACTION_LIMITS"], type=Limits)
        self._environment = {**self._folders.environment(marker or os.environ.get(MARKER, "")), **SILENT}
        self.config = SandboxedConfig(cwd=str(self._folders.work), timeout=self._limits.seconds)

    def execute(self, action: Mapping[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run one command. Raises minisweagent.exceptions.Submitted where it says that the task is done."""
        command = str(action.get("command", ""))
        place = Path(cwd) if cwd else self._folders.work
        try:
            ran = asyncio.run(
                sandbox.run(["/bin/bash", "-c", command], cwd=place, environment=self._environment, limits=self._limits)
            )
        except (OSError, ValueError) as error:  # its folder is gone; a null byte in it; too long for the system
            return {"output": "", "returncode": -1, "exception_info": f"the command could not be run: {error}"}
        said = {
            "": "",
            "time": f"the command took more than {self._limits.seconds:g} s and was ended",
            "output": f"the command printed more than {self._limits.output_bytes} bytes and was ended",
        }[ran.ended_by]
        self._check_submitted(ran.output, ran.returncode)
        return {"output": ran.output, "returncode": ran.returncode, "exception_info": said}

    @staticmethod
    def _check_submitted(output: str, returncode: int) -> None:
        from minisweagent.exceptions import Submitted

        lines = output.lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == SUBMITTED and returncode == 0:
            text = "".join(lines[1:])
            extra = {"exit_status": "Submitted", "submission": text}
            raise Submitted({"role": "exit", "content": text, "extra": extra})

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """For its prompts: the machine and the folder; of the process's environment, which holds the session's key, nothing."""
        return {**msgspec.structs.asdict(self.config), **platform.uname()._asdict(), **kwargs}

    def serialize(self) -> dict[str, Any]:
        """For its trajectory files."""
        return {"info": {"config": {"environment": msgspec.structs.asdict(self.config)}}}


def main() -> int:
    """0: the agent ended, or a limit of its own ended it; else the episode failed."""
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    os.environ.setdefault("MSWEA_CONFIGURED", "1")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would be fetched
    try:
        loaded = [importlib.import_module(name) for name in MODULES]
    except ImportError as error:
        print(f"mini-swe-agent is not installed ({error}): pip install 'pearl-rl[harness]'", file=sys.stderr)
        return 3
    litellm, agents, configs, models, merging = cast("list[Any]", loaded)
    options: dict[str, Any] = json.loads(os.environ.get("PEARL_OPTIONS", "{}"))
    config: dict[str, Any] = merging.recursive_merge(
        configs.get_config_from_spec(options.pop("config", "mini.yaml")),
        {"agent": {"cost_limit": 0.0}, "model": {"model_name": f"openai/{os.environ['PEARL_MODEL']}"}},
        {"model": {"cost_tracking": "ignore_errors"}},
        options,
    )
    agent_config = {
        key: value for key, value in config["agent"].items() if key not in ("mode", "confirm_exit", "agent_class")
    }
    agent = agents.DefaultAgent(models.get_model(config=config["model"]), Sandboxed(), **agent_config)
    try:
        status = agent.run(Path(os.environ["PEARL_TASK"]).read_text(encoding="utf-8")).get("exit_status", "")
    except litellm.ContextWindowExceededError:
        status = "ContextWindowExceeded"
    print(f"mini-swe-agent: {status} after {agent.n_calls} calls")
    said = "completed" if status == "Submitted" else "truncated"
    Path(os.environ["PEARL_RESULT"]).write_text(json.dumps({"status": said}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
