"""The job files that demos run, as changes to the ones in this folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from services.environments import workload as workloads
from services.environments.workload import Workload
from services.jobfile import ConfigError
from services.rollout_worker.engines.sglang import cpu
from services.timing import hardware as descriptions
from services.timing.hardware import Hardware

SPOT_WORKERS: Final = 6
"""As many as the trace's 12 GPUs make."""
LEAST_WORKERS: Final = 16
TRAJECTORIES_PER_WORKER: Final = 4
BIG_STEPS: Final = 3
"""Train steps with more workers than `LEAST_WORKERS`, where none are asked for: each takes longer, since time is scaled less."""
WORKERS_PER_PROCESS: Final = 16
"""With more workers than `LEAST_WORKERS`: processes by the dozen would mostly wait for each other's start."""
SCALE: Final = re.compile(r"(?m)^time_scale = ([0-9.]+)")


def template(engine: str) -> str:
    """The text of a demo's job file."""
    name = "demo.toml" if engine == "torch" else f"demo_{engine}.toml"
    return resources.files("services.cli").joinpath(name).read_text(encoding="utf-8")


def changed(text: str, changes: Mapping[str, str]) -> str:
    """With other values (as TOML) of keys that are there once."""
    for key, value in changes.items():
        text, count = re.subn(rf"(?m)^{key} = [^#\n]*", f"{key} = {value} ", text)
        assert count == 1, f"the demo's job file has {count} lines of {key}"
    return text


def with_workers(text: str, workers: int, steps_given: bool) -> str:
    """The emulated demo with another number of workers, half of them overlap. Raises ConfigError.

    The trace gives no more preemptible ones, so the rest is reserved. The batch grows alike, and time is scaled less, by the root
    of as much: the run takes longer, and the machine has more to do in a second of it.
    """
    if workers < LEAST_WORKERS or workers % 2:
        raise ConfigError(f"--workers {workers}: an even number from {LEAST_WORKERS} on")
    if workers == LEAST_WORKERS:
        return text
    text = text.replace('zone = "reserved"\ngpus = 4', f'zone = "reserved"\ngpus = {workers - 2 * SPOT_WORKERS}')
    text = text.replace('zone = "training"\ngpus = 8\n', f'zone = "training"\ngpus = {workers}\n', 1)
    begin = text.index('[[nodes]]\nname = "train2"')
    text = text[:begin] + text[text.index("[rollout]") :]
    text = SCALE.sub(lambda found: f"time_scale = {float(found[1]) * (LEAST_WORKERS / workers) ** 0.5:g}", text)
    text = text.replace("[emulation]", f"workers_per_process = {WORKERS_PER_PROCESS}\n\n[emulation]", 1)
    changes = {"batch_trajectories": str(TRAJECTORIES_PER_WORKER * workers)}
    if not steps_given:
        changes["train_steps"] = str(BIG_STEPS)
    return changed(text, changes)


def with_servers(text: str, run_dir: Path, python: str) -> str:
    """With servers that this interpreter runs, and the coming and going of the preemptible worker, in the run's folder."""
    trace = run_dir / "trace.csv"
    trace.write_text(
        resources.files("services.cli").joinpath("demo_sglang.csv").read_text(encoding="utf-8"), encoding="utf-8"
    )
    text = text.replace("[rollout.sglang]\n", f"[rollout.sglang]\n{cpu.as_toml(cpu.settings(python))}\n", 1)
    return text.replace("[feed]\n", f"[feed]\ntrace = {json.dumps(str(trace), ensure_ascii=False)}\n", 1)


def with_profile(text: str, run_dir: Path) -> str:
    """With a description of workload and hardware to decide on until something was measured, in the run's folder."""
    found = SCALE.search(text)
    name = re.search(r'(?m)^hardware = "(.*?)"', text)
    assert found is not None and name is not None
    path = run_dir / "profile.json"
    profile = profile_of(descriptions.load(name[1]), workloads.load("swebench-mini"), float(found[1]))
    path.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    return text.replace(
        'policy = "planner"\n', f'policy = "planner"\nprofile = {json.dumps(str(path), ensure_ascii=False)}\n', 1
    )


def profile_of(hardware: Hardware, workload: Workload, time_scale: float, batch: int = 64) -> dict[str, Any]:
    """What `pearl decide --profile` takes, of a recorded workload on described hardware; real seconds at this scale.

    The slowest trajectory's turns are the 95th percentile's: of 64, that is about the longest within the context limit.
    """
    turns = [turn for each in workload.trajectories for turn in each.turns]
    lengths = sorted(len(each.turns) for each in workload.trajectories)
    reply = fmean(turn.completion_tokens for turn in turns)
    growth = fmean(
        max(0, each.turns[-1].prompt_tokens - sum(turn.completion_tokens for turn in each.turns[:-1])) / len(each.turns)
        for each in workload.trajectories
    )
    context = fmean(turn.prompt_tokens for turn in turns)
    env_s = fmean(turn.env_time_s for turn in turns) * workload.delay_share
    slowest = float(lengths[int(0.95 * len(lengths))])
    fixed_s, each_s = hardware.fixed_decode_s(), hardware.decode_s_per_sequence(context)
    decode_s = reply * (fixed_s + 8 * each_s)
    return {
        "B": batch,
        "S": slowest,
        "r": reply,
        "dL": growth,
        "theta": env_s / decode_s,
        "A_s": fixed_s / time_scale,
        "b_s": each_s / time_scale,
        "t_prefill_s": hardware.prefill_s_per_token(max(1, round(growth)), round(context)) / time_scale,
        "T_over_s": 0.02,
        "T_env_s": slowest * env_s / time_scale,
        "kv_bytes_per_token": hardware.kv_bytes_per_token,
        "bandwidth_bytes_per_s": hardware.transfer_bytes_per_s.value * time_scale,
        "kv_bytes_per_trajectory": context * hardware.kv_bytes_per_token,
        "kv_capacity_bytes_per_worker": hardware.kv_capacity_tokens * hardware.kv_bytes_per_token,
    }
