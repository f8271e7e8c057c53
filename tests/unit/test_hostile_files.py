"""Two hundred hostile variants of every kind of file that users supply: taken for what it says, or refused in words.

Refused means: a ConfigError (exit status 2) with a reason that fits on a line and is not endless; never another exception.
What is taken must be fit for use: it is used here.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl_state.plan_files import plan_from_files
from services import jobfile
from services.cli.decide import read_mapping
from services.cli.demo_jobs import template
from services.cli.service import names
from services.decision_engine.command import decide
from services.environments import workload
from services.jobfile import LONGEST_PROBLEM, ConfigError
from services.models.config import ModelConfig
from services.models.files import INDEX, weight_files
from services.preemption_feed import traces
from services.profile import problem_of, read_profile
from services.simulator.faults import plan as fault_plan
from services.simulator.faults.run import LIMIT_MS, Run, limit_ms
from services.supervisor.roster import roster
from services.timing import hardware
from tests.unit.mutations import data, texts
from tests.unit.test_wrong_configuration import PROFILE

T = TypeVar("T")

EXAMPLES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
LONGEST = LONGEST_PROBLEM + 1

WORKLOAD = """traj,turn,prompt_tokens,completion_tokens,env_time_s,reward
a,0,100,20,0.5,1
a,1,150,30,0.1,1
# a comment
b,0,90,10,,0
"""
COUNTS = "time_s,available_gpus\n0,4\n10,6\n20,\n30,0\n"
EVENTS = "time_s,event,instance_id,gpus\n0,add,i1,2\n5,add,i2,2\n9,remove,i1,2\n"
HARDWARE = (Path(hardware.__file__).parent / "hardware" / "h800-qwen3-8b.json").read_text(encoding="utf-8")
TABLE: dict[str, Any] = {
    "epoch": 3,
    "rows": [
        {"worker": "n-w0", "gpus": [["n", 0]], "zone": "reserved", "role": "prefill", "activity": "active"},
        {"worker": "n-w1", "gpus": [["n", 1]], "zone": "reserved", "role": "decode", "activity": "active"},
        {
            "worker": "s-w0",
            "gpus": [["s", 0]],
            "zone": "preemptible",
            "role": "decode",
            "activity": "inactive",
            "stage": "none",
        },
    ],
}
TARGET: dict[str, Any] = {"workers": ["n-w0", "n-w1", "s-w0"], "prefill": 1, "decode": 2, "colocated": 0}
FAULTS: dict[str, Any] = {
    "seed": 7,
    "shape": {"reserved": 2, "spot": [2, 1], "training": 1, "steps": 3, "batch": 8, "group": 2, "staleness": 1, "lending": True,
              "disaggregation": True, "policy": "planner", "toggle_guess_s": 0.01, "gpus_per_worker": 1, "evaluate": False},
    "faults": [{"at_ms": 300, "kind": "available", "target": "s0", "gpus": [0, 1]},
               {"at_ms": 2000, "kind": "crash_at_call", "target": "toggle_manager", "amount": 3},
               {"at_ms": 3000, "kind": "loss", "amount": 0.3, "for_ms": 2000}],
}  # fmt: skip
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "dtype": "float32",
}
SHARDS: dict[str, Any] = {"metadata": {"total_size": 8}, "weight_map": {"lm_head.weight": "model-1.safetensors"}}


def taken(read: Callable[[], T]) -> T | None:
    """What `read` makes of its input; None if it refuses it as it should."""
    try:
        return read()
    except ConfigError as error:
        assert str(error).strip() and len(str(error)) < LONGEST, str(error)[:300]
        return None


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def as_json(value: Any) -> str:
    """With NaN and Infinity, as Python's own writer writes them."""
    return json.dumps(value)


JOBS = [template("torch"), template("emulated")]
FILES: dict[str, st.SearchStrategy[str]] = {
    "workload.csv": texts(WORKLOAD),
    "counts.csv": texts(COUNTS),
    "events.csv": texts(EVENTS),
    "hardware.json": st.one_of(texts(HARDWARE), data(json.loads(HARDWARE)).map(as_json)),
    "profile.json": st.one_of(texts(as_json(PROFILE)), data(PROFILE).map(as_json)),
    "profile.toml": texts("\n".join(f"{key} = {value}" for key, value in PROFILE.items())),
    "table.json": st.one_of(texts(as_json(TABLE)), data(TABLE).map(as_json)),
    "target.json": st.one_of(texts(as_json(TARGET)), data(TARGET).map(as_json)),
    "faults.json": st.one_of(texts(as_json(FAULTS)), data(FAULTS).map(as_json)),
    "job.toml": st.sampled_from(JOBS).flatmap(texts),
    "config.json": st.one_of(texts(as_json(MODEL)), data(MODEL).map(as_json)),
    INDEX: st.one_of(texts(as_json(SHARDS)), data(SHARDS).map(as_json)),
}
"""Every kind of file, and hostile variants of a good one."""


def use_workload(path: Path) -> None:
    found = workload.load(str(path))
    assert found.trajectories
    for turn in (turn for each in found.trajectories for turn in each.turns):
        assert turn.prompt_tokens >= 1 and turn.completion_tokens >= 0 and 0 <= turn.env_time_s < math.inf


def use_trace(path: Path) -> None:
    steps = traces.load(str(path)).steps
    assert steps and all(step.gpus >= 0 for step in steps)
    assert [step.time_s for step in steps] == sorted({step.time_s for step in steps})


def use_hardware(path: Path) -> None:
    found = hardware.load(str(path))
    assert 0 <= found.decode_s(3, 1000.0) < math.inf and 0 <= found.prefill_s_per_token(100, 1000) < math.inf


def use_profile(path: Path) -> None:
    assert problem_of(read_profile(path)) is None
    found = decide(read_mapping(str(path)), 6)
    assert found["candidates"]


def use_table(path: Path, target: dict[str, Any] | None = None) -> None:
    try:
        plan_from_files(read_mapping(str(path)), TARGET if target is None else target)
    except ValueError as error:  # as `pearl plan` does
        raise ConfigError(str(error)) from error


def use_target(path: Path) -> None:
    try:
        found = plan_from_files(TABLE, read_mapping(str(path)))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    assert found["d_worker"] >= 0


def use_job(path: Path) -> None:
    job = jobfile.load(path)
    assert len(jobfile.rollout_slots(job)) <= jobfile.MOST_WORKERS
    assert roster(job)


def use_faults(path: Path) -> None:
    run = Run(fault_plan.load(str(path)))
    try:
        run.to_event(20)
        assert not run.violations
    finally:
        run.close()


def use_model(path: Path) -> None:
    found = ModelConfig.load(path.parent)
    assert found.hidden_size > 0 and found.num_hidden_layers > 0


def use_index(path: Path) -> None:
    for file in weight_files(path.parent):
        assert file.is_file()


USES: dict[str, Callable[[Path], None]] = {
    "workload.csv": use_workload,
    "counts.csv": use_trace,
    "events.csv": use_trace,
    "hardware.json": use_hardware,
    "profile.json": use_profile,
    "profile.toml": use_profile,
    "table.json": use_table,
    "target.json": use_target,
    "faults.json": use_faults,
    "job.toml": use_job,
    "config.json": use_model,
    INDEX: use_index,
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_variants(name: str, tmp_path: Path) -> None:
    refused = 0

    @EXAMPLES
    @given(FILES[name])
    def check(text: str) -> None:
        nonlocal refused
        workload.load.cache_clear()
        path = written(tmp_path, name, text)
        refused += taken(lambda: USES[name](path) or path) is None

    check()
    assert refused > settings().max_examples / 10, "the variants are hostile"


@pytest.mark.parametrize("name", FILES)
@EXAMPLES
@given(content=st.binary(max_size=200))
def test_bytes_that_are_no_such_file(name: str, tmp_path: Path, content: bytes) -> None:
    workload.load.cache_clear()
    path = written(tmp_path, name, content)
    taken(lambda: USES[name](path))


DEEP = "[" * 100_000


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        DEEP.encode(),
        ('{"a":' * 100000).encode(),
        b"x = " + DEEP.encode(),
        b"B = " + b"9" * 10000,
        b"9" * 10000,
        b"\xff\xfe" + "name".encode("utf-16-le"),
        b"{}",
        b"null",
        b"\x00" * 1000,
    ],
    ids=[
        "empty",
        "deep",
        "deep objects",
        "deep TOML",
        "long TOML integer",
        "long integer",
        "UTF-16",
        "{}",
        "null",
        "NUL",
    ],
)
def test_known_traps_of_parsers(name: str, content: bytes, tmp_path: Path) -> None:
    workload.load.cache_clear()
    path = written(tmp_path, name, content)
    found = taken(lambda: USES[name](path) or path)
    whole = (("job.toml", b""), ("faults.json", b"{}"))  # everything in them has a default
    assert found is None or (name, content) in whole, "none of these is any such file"


def test_a_shard_with_a_name_too_long_for_the_system_is_missing(tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "9" * 5000}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"9999"):
        weight_files(tmp_path)


SIZES = ("reserved", "training", "steps", "batch", "group", "staleness", "gpus_per_worker", "toggle_guess_s")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [-1, 3000, 10**6, 2**62])
def test_no_size_of_a_fault_plan_is_without_bound(name: str, value: int, tmp_path: Path) -> None:
    if (name, value) == ("toggle_guess_s", 3000):
        return
    path = written(tmp_path, "faults.json", as_json({"shape": {"batch": 8, "group": 1, name: value}}))
    with pytest.raises(ConfigError, match=name):
        fault_plan.load(str(path))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shape": {"policy": "bogus"}}, "policy 'bogus'"),
        ({"shape": {"spot": [1] * 9}}, "spot"),
        ({"shape": {"spot": [2**62]}}, "spot"),
        ({"shape": {"reserved": 0, "spot": []}}, "reserved and spot"),
        ({"shape": {"steps": 100, "batch": 200}}, "20000 trajectories"),
        ({"seed": -1}, "seed -1"),
        ({"faults": [{"at_ms": 0, "kind": "broker_down"}] * 1001}, "1001 faults"),
        ({"faults": [{"at_ms": 0, "kind": "slow_network", "amount": 1e9}]}, "amount 1e+09 is above 10000"),
        ({"faults": [{"at_ms": 0, "kind": "slow", "target": "trainer", "amount": 1e9}]}, "above 100"),
        ({"faults": [{"at_ms": 0, "kind": "broken_start", "target": "r0", "amount": 1e9}]}, "above 100"),
        ({"faults": [{"at_ms": 0, "kind": "loss", "amount": 1.5}]}, "above 1"),
    ],
)
def test_a_fault_plan_that_cannot_be_run_says_why(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = written(tmp_path, "faults.json", as_json(change))
    with pytest.raises(ConfigError) as refused:
        fault_plan.load(str(path))
    assert told in str(refused.value)


def test_a_long_run_is_given_the_time_it_needs() -> None:
    assert limit_ms(fault_plan.Shape(steps=3, batch=8)) == LIMIT_MS
    assert limit_ms(fault_plan.Shape(steps=100, batch=10)) == 2_000_000


STAGES = ("none", "launching", "prepared", "draining", "switching")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("activity", ["active", "inactive", "transitioning"])
def test_a_row_of_a_table_is_in_a_legal_condition(activity: str, stage: str, tmp_path: Path) -> None:
    """Any other was planned with: an assertion failed, or a worker was removed that the target named."""
    rows = [{**row, "activity": activity, "stage": stage} if row["worker"] == "n-w1" else row for row in TABLE["rows"]]
    path = written(tmp_path, "table.json", as_json({"epoch": 3, "rows": rows}))
    legal = (stage == "none") if activity != "transitioning" else True
    if legal and stage != "draining":
        use_table(path)
        return
    if legal:
        with pytest.raises(ConfigError, match="is draining"):
            use_table(path)
        return
    with pytest.raises(ConfigError, match=f"rows.1. .n-w1.: stage {stage} does not go with activity {activity}"):
        use_table(path)


def test_a_leaving_worker_is_in_no_target() -> None:
    rows = [{**row, "activity": "transitioning", "stage": "draining"} for row in TABLE["rows"]]
    with pytest.raises(ValueError, match="n-w0 is draining"):
        plan_from_files({"rows": rows}, TARGET)


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    row = {**TABLE["rows"][0], "worker": "\ud800"}
    path = written(tmp_path, "table.json", as_json({"rows": [row]}))
    with pytest.raises(ConfigError, match="half a character"):
        use_table(path, {"workers": ["\ud800"], "prefill": 0, "decode": 0, "colocated": 1})


def test_a_key_that_a_target_does_not_have_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "target.json", as_json({"workers": [], "prefil": 0}))
    with pytest.raises(ConfigError, match="prefil"):
        use_target(path)


def test_only_what_serves_is_a_service() -> None:
    found = names()
    assert "orchestrator" in found and "cli" not in found
    assert all(hasattr(importlib.import_module(f"services.{name}.service"), "serve") for name in found)
