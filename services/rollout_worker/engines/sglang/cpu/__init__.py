"""SGLang on a machine without a GPU: for tests, and for `pearl demo --engine sglang`. Not for production.

`setup.sh` builds an environment in which SGLang 0.5.23 runs beside the CPU build of torch; `shim` is what it needs for that, in every
process of a server.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import msgspec

from services.jobfile import ConfigError, SglangSection

HERE: Final = Path(__file__).parent
SETUP: Final = HERE / "setup.sh"
VARIABLE: Final = "PEARL_SGLANG_PYTHON"
ARGS: Final = (
    *("--attention-backend", "torch_native", "--dtype", "float32"),
    *("--disable-overlap-schedule", "--sleep-on-idle"),
)
DECODE_ARGS: Final = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
ENV: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE / "shim"),
}
LOOK_S: Final = 30.0


def find_python() -> str:
    """The interpreter that $PEARL_SGLANG_PYTHON names, or that of the environment which `setup.sh` has built. Raises ConfigError."""
    given = os.environ.get(VARIABLE, "")
    if given:
        if not os.access(given, os.X_OK):
            raise ConfigError(
                f"{VARIABLE} = {given!r}: there is no interpreter; correct it, or unset it and run {SETUP}"
            )
        return given
    try:
        done = subprocess.run(["bash", str(SETUP), "--built"], capture_output=True, text=True, timeout=LOOK_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"{SETUP} cannot be run ({error}); set {VARIABLE} to an interpreter that has SGLang"
        ) from error
    if done.returncode != 0:
        raise ConfigError(
            f"engine sglang: no environment with SGLang is there; build one by running {SETUP} (3.5 GB, some minutes, once a machine), or "
            f"set {VARIABLE} to the interpreter of one"
        )
    return done.stdout.strip()


def settings(python: str) -> SglangSection:
    """Of servers that this interpreter runs."""
    return SglangSection(
        python=python,
        args=ARGS,
        decode_args=DECODE_ARGS,
        env=ENV,
        transfer_backend="mooncake_tcp",
        memory_saver=False,
    )


def as_toml(section: SglangSection) -> str:
    """The keys of [rollout.sglang] in a job file, but those that have their default."""
    default = msgspec.to_builtins(SglangSection())
    given = {key: value for key, value in msgspec.to_builtins(section).items() if value != default[key]}
    return "\n".join(f"{key} = {_toml(value)}" for key, value in given.items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        items: Any = value  # pyright: ignore[reportUnknownVariableType] - of a section made to builtins: keys are strings
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in items.items()) + " }"
    return json.dumps(value, ensure_ascii=False)  # strings, numbers, booleans and lists of them are the same in both
