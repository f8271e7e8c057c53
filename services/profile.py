"""Workload profiles as people write them: the keys of `pearl decide --profile`, checked, as a `workload.profile/1`.

The decision engine and the runtime tracker start cold from the same one, so the reading lives here, beside the job file.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from messages.decision_engine import WorkloadProfile
from services.jobfile import ConfigError, JobFile

KEYS: Final = (
    "B",
    "S",
    "r",
    "dL",
    "theta",
    "A_s",
    "b_s",
    "t_prefill_s",
    "T_over_s",
    "T_env_s",
    "kv_bytes_per_token",
    "bandwidth_bytes_per_s",
    "kv_bytes_per_trajectory",
    "kv_capacity_bytes_per_worker",
)
"""All keys of a profile file, all required, SI units, names as in the paper (4.3)."""
OPTIONAL: Final = ("retained",)
POSITIVE: Final = frozenset({"B", "bandwidth_bytes_per_s", "kv_capacity_bytes_per_worker"})
"""Parameters that a formula divides by, or that make no sense at 0."""
NOT_A_MEASURE: Final = frozenset({"train_step", "samples", "costs", "sample"})
LARGEST: Final = 1e18
"""No parameter in SI units is sensibly larger; below it no closed form overflows."""


class ProfileError(ConfigError):
    """A profile that cannot be used: the message names the key, what is wrong and what to do."""


def problem_of(profile: WorkloadProfile) -> str | None:
    """What makes a profile senseless (the closed forms need finite, non-negative numbers), or None."""
    for name in profile.__struct_fields__:
        if name in NOT_A_MEASURE:
            continue
        value = float(getattr(profile, name))
        if not abs(value) <= LARGEST:  # also false for NaN
            return f"{name} = {value} is not a finite number up to {LARGEST:g}"
        if value < 0:
            return f"{name} = {value:g} is negative"
        if value == 0 and name in POSITIVE:
            return f"{name} must be above 0"
    return None


def parse_profile(data: Mapping[str, Any]) -> WorkloadProfile:  # Any: whatever a JSON or TOML file holds
    """A profile from a file's top-level table. Raises ProfileError naming the key."""
    known = (*KEYS, *OPTIONAL)
    unknown = sorted(key for key in data if key not in known)
    if unknown:
        raise ProfileError(f"profile key {unknown[0]!r} is unknown; the keys are {', '.join(KEYS)}")
    missing = [key for key in KEYS if key not in data]
    if missing:
        raise ProfileError(f"profile key {missing[0]!r} is missing; all of {', '.join(KEYS)} are needed, in SI units")
    for key, value in data.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ProfileError(f"profile key {key!r} is {value!r}: give a number in SI units")
        if not abs(value) <= LARGEST:  # also false for NaN
            raise ProfileError(f"profile key {key!r} = {value}: give a finite number up to {LARGEST:g}")
    if float(data["B"]) != int(data["B"]):
        raise ProfileError(f"profile key 'B' = {data['B']}: a batch is a whole number of trajectories")
    values: dict[str, Any] = {**{key: float(value) for key, value in data.items()}, "B": int(data["B"])}
    profile = WorkloadProfile(train_step=-1, **values)
    problem = problem_of(profile)
    if problem is not None:
        raise ProfileError(f"profile: {problem}")
    return profile


def profile_of(values: Mapping[str, float]) -> WorkloadProfile:
    """The profile that a decision record keeps as numbers by key."""
    return WorkloadProfile(train_step=-1, **{**values, "B": int(values["B"])})  # pyright: ignore[reportArgumentType]


def read_profile(path: str | Path) -> WorkloadProfile:
    """A profile from a JSON or TOML file (by its ending; anything but `.toml` is read as JSON). Raises ProfileError."""
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8-sig")
        data: object = tomllib.loads(text) if source.suffix.lower() == ".toml" else json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{source}: cannot be read ({error})") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ProfileError(f"{source}: neither JSON nor TOML by its ending: {error}") from error
    if not isinstance(data, dict):
        raise ProfileError(f"{source}: holds a {type(data).__name__}; give one table of profile keys")
    try:
        return parse_profile(cast("dict[str, Any]", data))
    except ProfileError as error:
        raise ProfileError(f"{source}: {error}") from error


def built_in(job: JobFile) -> WorkloadProfile:
    """A description to begin with where nothing was measured: turn lengths from the job's limits, times of a small model.

    Of paced workers the pace is the description: it is A, b and t_prefill. Only the first budgets are decided on it;
    the tracker replaces it after one train step.
    """
    pipeline, rollout = job.pipeline, job.rollout
    kv_bytes_per_token = 4096.0  # a two-layer model of width 256 in float32; only ratios to the capacity matter
    context = min(pipeline.max_context_tokens, 2 * pipeline.max_new_tokens * pipeline.max_turns)
    return WorkloadProfile(
        train_step=-1,
        B=pipeline.batch_trajectories,
        S=float(pipeline.max_turns),
        r=float(pipeline.max_new_tokens) / 2,
        dL=float(pipeline.max_new_tokens),
        theta=0.5,
        A_s=max(rollout.pace_decode_ms / 1000, 0.005),
        b_s=max(rollout.pace_decode_ms_per_sequence / 1000, 0.0 if rollout.pace_decode_ms else 0.0002),
        t_prefill_s=max(rollout.pace_prefill_us_per_token / 1e6, 20e-6),
        T_over_s=0.005,
        T_env_s=0.1,
        kv_bytes_per_token=kv_bytes_per_token,
        bandwidth_bytes_per_s=1e9,
        kv_bytes_per_trajectory=kv_bytes_per_token * context,
        kv_capacity_bytes_per_worker=kv_bytes_per_token * rollout.kv_cache_tokens,
    )


def cold_start(job: JobFile) -> WorkloadProfile:
    """The profile before any measurement: `decision.profile` of the job file, else `built_in`. Raises ProfileError.

    The file's `B` gives way to `pipeline.batch_trajectories`: the batch is the job's, not the profile's.
    """
    if not job.decision.profile:
        return built_in(job)
    try:
        profile = read_profile(job.decision.profile)
    except ProfileError as error:
        raise ProfileError(f"decision.profile: {error}") from error
    return msgspec.structs.replace(profile, B=job.pipeline.batch_trajectories)
