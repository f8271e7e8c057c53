"""Wrong input to every command: one message on standard error that says what, where and what to do, and exit status 2."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from messages.ids import Incarnation
from services.cli import up
from services.cli.__main__ import main
from services.cli.demo_jobs import template
from services.cli.progress import progress
from services.jobfile import ConfigError, JobFile, load
from services.node_agent.config import Config as NodeConfig
from services.node_agent.config import command_line
from services.supervisor.roster import roster

ROOT = Path(__file__).parents[2]
NODES = """
[[nodes]]
name = "r"
zone = "reserved"
gpus = 2
[[nodes]]
name = "t"
zone = "training"
gpus = 1
"""
PROFILE = {
    "B": 64,
    "S": 10,
    "r": 100,
    "dL": 100,
    "theta": 0.5,
    "A_s": 0.01,
    "b_s": 0.001,
    "t_prefill_s": 1e-4,
    "T_over_s": 0.1,
    "T_env_s": 1,
    "kv_bytes_per_token": 1e5,
    "bandwidth_bytes_per_s": 1e10,
    "kv_bytes_per_trajectory": 1e9,
    "kv_capacity_bytes_per_worker": 1e11,
}


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a job file below an empty folder: the text given, a data folder, and two nodes unless it has its own."""

    def write(text: str, nodes: str = NODES) -> Path:
        path = tmp_path / "job.toml"
        if "[job]" not in text:
            text = f"[job]\ndata_dir = {json.dumps(str(tmp_path / 'data'))}\n" + text
        path.write_text(text + ("" if "nodes" in text else nodes), encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine it would be said what takes so long."""
    monkeypatch.setitem(progress.__wrapped__.__kwdefaults__, "first_s", 600.0)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that is overlooked fails the test; it does not run a job."""

    def start(job: JobFile, *_: object, **__: object) -> None:
        raise AssertionError(f"job {job.job.name} was started")

    monkeypatch.setattr(up, "Supervisor", start)


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a command that must refuse its input; returns what it said."""
    status = main([str(each) for each in argv])
    said = capsys.readouterr()
    assert status == 2, (status, said)
    assert said.out == "" and said.err.startswith(f"pearl {argv[0]}: "), said
    assert "Traceback" not in said.err and said.err.count("\n") == 1, said.err
    assert len(said.err) < 700
    return said.err


# --- the job file itself

FILES = [
    ("[rollout]\nmax_runing = 3\n", ("unknown key rollout.max_runing", "max_running")),
    ("[rolout]\nmax_running = 3\n", ("unknown key rolout", "rollout")),
    ("max_running = 3\n" + "[job]\n", ("unknown key max_running", "there are job, nats")),
    ("[rollout]\nmax_running = '3'\n", ("rollout.max_running", "expected `int`, got `str`")),
    ("[rollout]\nmax_running = 3.0\n", ("rollout.max_running", "expected `int`, got `float`")),
    ("[rollout]\nmax_running = 0\n", ("rollout.max_running", ">= 1")),
    (f"[rollout]\nmax_running = {10**40}\n", ("rollout.max_running", "<=")),
    ("[training]\nlr = inf\n", ("training.lr", "<=")),
    ("[training]\nlr = nan\n", ("training.lr", "> 0")),
    ("[feed]\nno_notice_fraction = 1.5\n", ("feed.no_notice_fraction", "<= 1")),
    ("[model]\npath = ['a']\n", ("model.path", "expected `str`")),
    ('[model]\ndevice = "gpu"\n', ("model.device = 'gpu'", '"cuda"')),
    ('[job]\nname = "Big Job"\n', ("job.name 'Big Job'", "a-z")),
    ("[job]\nseed = -1\n", ("job.seed", ">= 0")),
    ("[nats]\nport = 70000\n", ("nats.port", "<= 65535")),
    ("[nats]\nembedded = false\n", ("nats.url is missing",)),
    ("[pipeline]\nbatch_trajectories = 30\n", ("pipeline.batch_trajectories = 30", "pipeline.group_size = 16")),
    ("[training]\nranks = 5\n", ("training.ranks = 5", "1 GPUs", "lower ranks")),
    ("[rollout]\ngpus_per_worker = 2\n", ("nodes.t: 1 GPUs are not enough", "rollout.gpus_per_worker = 2")),
    ("[timeouts]\ndrain_ms = 60000\n", ("timeouts.drain_ms must be below timeouts.apply_ms",)),
    ("[timeouts]\ndrain_ms = 7000\napply_ms = 7000\n", ("timeouts.drain_ms must be below timeouts.apply_ms",)),
    ("[timeouts]\ndrain_ms = 500\napply_ms = 1000\n", ("timeouts.apply_ms", "timeouts.admission_pause_ms")),
    ("[timeouts]\nlease_ms = 1\n", ("timeouts.lease_ms = 1", "at least")),
    ("[agent]\nprocesses = 100000\n", ("agent.processes = 100000", "at most")),
    ("[agent]\ntask_ack_wait_ms = 1\n", ("agent.task_ack_wait_ms = 1", "at least")),
    ('[[nodes]]\nname = "a"\nzone = "spot"\ngpus = 1\n', ("nodes.a: zone must be reserved, preemptible or training",)),
    ('[[nodes]]\nname = "a.b"\nzone = "reserved"\ngpus = 1\n', ("nodes: name 'a.b'", "letters")),
    ('[[nodes]]\nname = "a"\nzone = "reserved"\n', ("nodes[0]", "missing required field `gpus`")),
    ('[[nodes]]\nname = "a"\nzone = "reserved"\ngpu = 1\n', ("unknown key nodes.gpu", "gpus")),
    ('[[nodes]]\nname = "a"\nzone = "reserved"\ngpus = 0\n', ("nodes[0].gpus", ">= 1")),
    (f'[[nodes]]\nname = "a"\nzone = "reserved"\ngpus = {10**11}\n', ("workers", "at most 5000")),
    (2 * '[[nodes]]\nname = "a"\nzone = "reserved"\ngpus = 1\n', ("nodes: 'a' is listed twice",)),
    ("nodes = 3\n[job]\n", ("nodes: expected `array`",)),
    ("[job]\nname = \n", ("not TOML", "line 2")),
    ("{}", ("not TOML",)),
]


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("text", "parts"), FILES, ids=[parts[0] for _, parts in FILES])
def test_a_wrong_job_file_is_refused(
    text: str, parts: tuple[str, ...], job_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_file(text)
    said = refused(capsys, "up", "-c", path)
    assert str(path) in said
    for part in parts:
        assert part in said, said


@pytest.mark.parametrize(
    "command", ["up", "status", "tap", "check", "service orchestrator", "events available --node r --gpus 0"]
)
def test_every_command_refuses_a_wrong_job_file(
    command: str, job_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *command.split(), "-c", job_file("[rollout]\nmax_runing = 3\n"))
    assert "unknown key rollout.max_runing" in said


def test_a_missing_an_unreadable_and_a_binary_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read" in refused(capsys, "up", "-c", tmp_path / "nowhere.toml")
    assert "cannot be read" in refused(capsys, "up", "-c", tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00name = 3")
    assert "cannot be read" in refused(capsys, "up", "-c", binary)
    binary.write_text("[job]\n")
    binary.chmod(0)
    if not os.access(binary, os.R_OK):
        assert "cannot be read" in refused(capsys, "up", "-c", binary)


def test_the_job_files_we_ship_are_right(tmp_path: Path) -> None:
    for engine in ("torch", "emulated", "sglang"):
        path = tmp_path / f"{engine}.toml"
        path.write_text(template(engine))
        assert load(path).nodes
    assert load(ROOT / "examples/my_environment/job.toml").nodes


@pytest.mark.parametrize(
    "text",
    [
        "[timeouts]\ndrain_ms = 6999\napply_ms = 7000\n",
        "[timeouts]\ndrain_ms = 500\napply_ms = 1001\n",
        '[rollout.sglang]\nweights = "tensor"\n[rollout.sglang.adopt]\nr-w0 = "http://localhost:30000"\n',
        '[rollout.sglang]\nweights = "tensor"\n[rollout.sglang.adopt]\nr-w0 = "http://10.0.0.7:30000"\n'
        '[[nodes]]\nname = "r"\nzone = "reserved"\ngpus = 1\naddress = "10.0.0.7"\n'
        '[[nodes]]\nname = "t"\nzone = "training"\ngpus = 1\n',
        '[rollout.sglang]\nweights = "distributed"\n[rollout.sglang.adopt]\nr-w0 = "http://10.0.0.7:30000"\n',
    ],
    ids=["drain", "apply", "same machine", "same node", "another machine"],
)
def test_a_job_file_just_within_the_rules_is_taken(text: str, job_file: Callable[..., Path]) -> None:
    assert load(job_file(text)).nodes


def test_a_demo_on_sglang_needs_sglang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEARL_SGLANG_ENV", str(tmp_path / "nothing"))
    monkeypatch.setenv("PEARL_SGLANG_PYTHON", "")
    said = refused(capsys, "demo", "--engine", "sglang", "--data-dir", tmp_path / "runs")
    assert "sglang/cpu/setup.sh" in said and "PEARL_SGLANG_PYTHON" in said
    monkeypatch.setenv("PEARL_SGLANG_PYTHON", "/nowhere/python")
    assert "/nowhere/python" in refused(capsys, "demo", "--engine", "sglang", "--data-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    if importlib.util.find_spec("sglang") is None:
        monkeypatch.setenv("PEARL_SGLANG_PYTHON", sys.executable)
        said = refused(capsys, "demo", "--engine", "sglang", "--data-dir", tmp_path / "runs")
        assert "has no SGLang" in said and "install sglang==" in said
    assert not list((tmp_path / "runs").glob("*"))


# --- what the job file names

MORE = [
    ("", "", ("nodes: there is none", "[[nodes]]")),
    ("", '[[nodes]]\nname = "r"\nzone = "reserved"\ngpus = 1\n[training]\n', ("training.ranks = 1", "0 GPUs")),
    ("", '[[nodes]]\nname = "t"\nzone = "training"\ngpus = 1\n', ("nothing generates", "decision.lending")),
    ('[rollout]\nengine = "vllm"\n', NODES, ("rollout.engine = 'vllm'", "torch")),
    ('[rollout]\nupdate_pause = "never"\n', NODES, ("rollout.update_pause = 'never'", "'retract'")),
    ('[training]\nengine = "jax"\n', NODES, ("training.engine = 'jax'", "torch")),
    ('[rollout]\nengine = "emulated"\n', NODES, ("training.engine", "set rollout.engine")),
    ("[agent]\nsilence_ms = 100\n", NODES, ("agent.silence_ms = 100", "2000")),
    ('[decision]\npolicy = "guess"\n', NODES, ("decision.policy", '"planner"')),
    ('[rollout.sglang]\nweights = "nccl"\n', NODES, ("rollout.sglang.weights", "'distributed'")),
    (
        '[rollout.sglang]\nweights = "tensor"\n[rollout.sglang.adopt]\nr-w0 = "http://10.0.0.7:30000"\n',
        NODES,
        ("r-w0 at http://10.0.0.7:30000", 'use "distributed"'),
    ),
    ('[rollout.sglang.adopt]\nr-w0 = "http://[::1"\n', NODES, ("rollout.sglang.adopt: r-w0", "not a URL")),
    ('[decision]\npolicy = "static-pd:1:1"\n', NODES, ("decision.policy", "disaggregation = true")),
    ('[decision]\nprofile = "/nowhere.json"\n', NODES, ("/nowhere.json", "cannot be read")),
    ('[feed]\ntrace = "bamboo-segment9"\n', NODES, ("bamboo-segment9", "bamboo-segment1")),
    ('[model]\npath = "builtin:huge"\n', NODES, ("model.path = 'builtin:huge'", "builtin:tiny")),
    ('[model]\npath = "/nowhere"\n', NODES, ("/nowhere/config.json", "model.path must be")),
    ('[nats]\nserver = "/nowhere/nats-server"\n', NODES, ("nats.server = '/nowhere/nats-server'", "leave it out")),
    (f'[nats]\nserver = "{sys.executable}"\n', NODES, ("2.12", "nats.server")),
    ('[nats]\nembedded = false\nurl = "nats://127.0.0.1:1"\n', NODES, ("nats.url = 'nats://127.0.0.1:1'", "start it")),
    ('[nats]\nembedded = false\nurl = "nats://[::"\n', NODES, ("nats.url = 'nats://[::'", "correct the address")),
    (
        '[environment]\nentry = "nowhere:Environment"\n',
        NODES,
        ("environment.entry = 'nowhere:Environment'", "PYTHONPATH"),
    ),
    ('[environment]\nentry = "nowhere"\n', NODES, ("environment.entry = 'nowhere'", "module:Class")),
    ('[environment]\nentry = "json:Nothing"\n', NODES, ("json has no class Nothing",)),
    ('[environment]\nentry = "pathlib:Path"\n', NODES, ("environment.entry = 'pathlib:Path'", "reset", "base.py")),
    ('[environment]\nentry = "nowhere.py:Environment"\n', NODES, ("nowhere.py", "no file")),
    ("[environment.options]\nnumber = 3\n", NODES, ("environment.options", "takes no number", "numbers")),
    ('[environment.options]\nnumbers = "3"\n', NODES, ("environment.options",)),
    ("[environment.options]\nnumbers = 1\n", NODES, ("numbers = 1", "at least 2")),
    ('[environment]\ntokenizer = "/nowhere"\n', NODES, ("environment.tokenizer = '/nowhere'", "tokenizer.json")),
    (
        '[environment]\ntokenizer = "json:JSONDecoder"\n',
        NODES,
        ("environment.tokenizer = 'json:JSONDecoder'", "eos_id"),
    ),
]


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("text", "nodes", "parts"), MORE, ids=[parts[0] for _, _, parts in MORE])
def test_what_a_job_file_names_is_looked_at_before_anything_starts(
    text: str,
    nodes: str,
    parts: tuple[str, ...],
    job_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    said = refused(capsys, "up", "-c", job_file(text, nodes))
    for part in parts:
        assert part in said, said
    assert not list(tmp_path.glob("data/*/nats.json")) and not list(tmp_path.glob("data/*/logs/*")), (
        "something was started"
    )


def test_a_folder_that_cannot_be_written(
    job_file: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    said = refused(capsys, "up", "-c", job_file(f'[job]\ndata_dir = "{tmp_path}/file"\n'))
    assert "job.data_dir" in said and "choose another folder" in said
    assert "--data-dir" in refused(capsys, "demo", "--data-dir", tmp_path / "file")


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_port_that_is_taken(
    job_file: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with taken_port() as port:
        assert f"nats.port = {port} is taken" in refused(capsys, "up", "-c", job_file(f"[nats]\nport = {port}\n"))
        said = refused(capsys, "demo", "--port", port, "--data-dir", tmp_path / "demos")
        assert f"nats.port = {port} is taken" in said
    assert not list((tmp_path / "demos").iterdir()), "a demo that was refused leaves no run behind"


def test_a_traces_lines_are_looked_at(
    job_file: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    text = f'[feed]\ntrace = "{trace}"\n'
    trace.write_text("time_s,available_gpus\n0,4\n10,many\n")
    assert f"{trace}: line 3: available_gpus 'many'" in refused(capsys, "up", "-c", job_file(text))
    trace.write_text("when,what\n0,4\n")
    assert "neither time_s,available_gpus nor" in refused(capsys, "up", "-c", job_file(text))
    trace.write_bytes(b"\xff\x00")
    assert "not UTF-8" in refused(capsys, "up", "-c", job_file(text))


def test_an_environment_that_raises(
    job_file: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = tmp_path / "mine.py"
    text = f'[environment]\nentry = "{module}:Mine"\n'
    module.write_text("raise RuntimeError('half written')\n")
    said = refused(capsys, "up", "-c", job_file(text))
    assert "environment.entry" in said and "RuntimeError: half written" in said
    members = "replayable = True\n    def reset(self): ...\n    def step(self): ...\n    def close(self): ...\n"
    module.write_text(f"class Mine:\n    {members}    def __init__(self): raise KeyError('x')\n")
    said = refused(capsys, "up", "-c", job_file(text))
    assert "cannot be made" in said and "KeyError" in said


def test_keys_that_are_missing_or_damaged(
    job_file: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    text = f'[nats]\nembedded = false\nurl = "nats://127.0.0.1:1"\nkeys_dir = "{keys}"\n'
    assert "there is no agent.nk" in refused(capsys, "up", "-c", job_file(text))
    (keys / "agent.nk").write_text("open sesame")
    said = refused(capsys, "up", "-c", job_file(f'[nats]\nkeys_dir = "{keys}"\n'))
    assert "agent.nk is not an nkey seed" in said and "sesame" not in said


# --- the model's files


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder that is right."""
    from services.jobfile import JobFile, JobSection
    from services.models.files import initial_model

    folder = tmp_path_factory.mktemp("model")
    return initial_model(JobFile(job=JobSection(data_dir=str(folder))))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])


def not_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nothing of the kind")


def other_architecture(folder: Path) -> None:
    change_config(folder, architectures=["GPT2LMHeadModel"])


def no_architecture(folder: Path) -> None:
    change_config(folder, architectures=None)


def other_shapes(folder: Path) -> None:
    change_config(folder, hidden_size=128)


def other_layers(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)


def odd_heads(folder: Path) -> None:
    change_config(folder, num_key_value_heads=3)


def smaller_vocabulary(folder: Path) -> None:
    """The model is right by itself, and another one's than the tokenizer's."""
    from services.jobfile import EnvironmentSection, JobFile, JobSection
    from services.models.files import initial_model

    small = EnvironmentSection(options={"numbers": 2})
    made = initial_model(JobFile(job=JobSection(data_dir=str(folder / "small")), environment=small))
    for file in made.iterdir():
        shutil.copy(file, folder / file.name)


def missing_shard(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


FAULTS = [
    (no_config, ("config.json: cannot be read",)),
    (bad_config, ("config.json: not a JSON object",)),
    (no_weights, ("model.safetensors: missing",)),
    (truncated, ("model.safetensors: not a complete safetensors file",)),
    (not_weights, ("model.safetensors: not a complete safetensors file",)),
    (other_architecture, ("'GPT2LMHeadModel' is not supported", "Qwen3ForCausalLM")),
    (no_architecture, ("'none' is not supported",)),
    (other_shapes, ("has shape", "config.json says")),
    (other_layers, ("do not fit config.json", "model.layers.2")),
    (odd_heads, ("not a multiple of num_key_value_heads = 3",)),
    (smaller_vocabulary, ("16 ids", "only 10", "do not belong together")),
    (missing_shard, ("model-00001-of-00002.safetensors: missing",)),
]


@pytest.mark.parametrize(("spoil", "parts"), FAULTS, ids=[spoil.__name__ for spoil, _ in FAULTS])
def test_model_files_are_looked_at(
    spoil: Callable[[Path], None],
    parts: tuple[str, ...],
    model: Path,
    job_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    spoil(folder)
    said = refused(capsys, "up", "-c", job_file(f'[model]\npath = "{folder}"\n'))
    assert str(folder) in said
    for part in parts:
        assert part in said, said


# --- the other commands


def test_a_service_that_there_is_not_and_options_that_are_missing(
    job_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_file("")
    assert "no service 'nobody'; there are agent" in refused(capsys, "service", "nobody", "-c", path)
    assert "needs --node" in refused(capsys, "service", "node_agent", "-c", path)
    foreign = job_file('[nats]\nembedded = false\nurl = "nats://127.0.0.1:1"\n')
    assert "there is none to run" in refused(capsys, "service", "nats_server", "-c", foreign)


FLEET = '[rollout]\nengine = "emulated"\nworkers_per_process = 2\n'
CLUSTER = '[nats]\ncluster = ["127.0.0.1:4001", "127.0.0.1:4002", "127.0.0.1:4003"]\nreplicas = 3\n'
GATEWAY = '[gateway]\nbind = "127.0.0.1:0"\ninstances = 2\n'
ODD_OPTIONS = [
    ("", "agent --index -1", "--index -1: agent.processes = 1 allows 0"),
    ("[agent]\nprocesses = 3\n", "agent --index 3", "--index 3: agent.processes = 3 allows from 0 to 2"),
    (GATEWAY + "[agent]\nprocesses = 0\n", "agent --index 0", "agent.processes = 0 makes no agent in this job"),
    (GATEWAY + "[agent]\nprocesses = 0\n", "agent", "agent.processes = 0 makes no agent in this job"),
    (GATEWAY, "router --index 2", "--index 2: gateway.instances = 2 allows from 0 to 1"),
    ("", "router --index -1", "--index -1: use 0 or more"),
    (GATEWAY + "[harness]\nprocesses = 2\n", "harness --index 2", "harness.processes = 2 allows from 0 to 1"),
    (GATEWAY, "harness --index -2", "--index -2: use 0 or more"),
    (FLEET, "emulated_fleet --index 9", "--index 9: rollout.workers_per_process = 2 allows from 0 to 1"),
    ("", "emulated_fleet --index 0", "rollout.workers_per_process = 1 makes no emulated_fleet"),
    ("", "emulated_fleet", "rollout.workers_per_process = 1 makes no emulated_fleet"),
    (CLUSTER, "nats_server --index 3", "--index 3: nats.cluster, of 3 servers, allows from 0 to 2"),
    ("", "nats_server --index 1", "--index 1: a job without nats.cluster allows 0"),
    ("", "rollout_worker --worker nosuch --incarnation 1", "--worker nosuch: not one of the slots"),
    ("", "rollout_worker --worker r-w2 --incarnation 1", "(r-w0, r-w1, t-w0)"),
    ("", "rollout_worker --worker t-t0 --incarnation 1", "(r-w0, r-w1, t-w0)"),
    ("", "rollout_worker --worker r-w0 --incarnation -5", "--incarnation -5: the first process of a slot is 1"),
    ("", "rollout_worker --worker r-w0 --incarnation 0", "--incarnation 0"),
    ("", f"rollout_worker --worker r-w0 --incarnation {2**63}", f"at most {2**63 - 1}"),
    ("", "rollout_worker --worker r-w0", "needs --incarnation"),
    ("", "trainer --worker r-w0", "--worker r-w0: not one of the slots of service trainer in this job file (t-t0)"),
    ("", "trainer --worker t-t0 --incarnation 0", "--incarnation 0"),
    ("", "node_agent --node x9", "--node x9: not one of the nodes of the job file (r, t)"),
    ("", "orchestrator --index 1", "service orchestrator takes no --index (it takes no option but -c)"),
    ("", "agent --node r", "service agent takes no --node (it takes --index)"),
]


@pytest.mark.parametrize(
    ("text", "command", "part"), ODD_OPTIONS, ids=[f"{each[1]} {each[0][:12]}" for each in ODD_OPTIONS]
)
def test_options_of_a_service_that_the_job_file_does_not_know(
    text: str,
    command: str,
    part: str,
    job_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_service(*_: object, **__: object) -> int:
        raise AssertionError("nothing is to be started")

    monkeypatch.setattr("services.cli.service.run_service", run_service)
    name, *options = command.split()
    assert part in refused(capsys, "service", name, "-c", job_file(text), *options)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("[agent]\nprocesses = 3\n", "agent --index 2"),
        ("", "agent"),
        ("", "router --index 7"),
        (GATEWAY, "router --index 1"),
        (GATEWAY, "harness --index 7"),
        (FLEET, "emulated_fleet --index 1"),
        (CLUSTER, "nats_server --index 2"),
        ("", "nats_server --index 0"),
        ("", "nats_server"),
        ("", "rollout_worker --worker r-w1 --incarnation 3"),
        ("", "trainer --worker t-t0 --incarnation 1"),
        ("", "trainer"),
        ("", "node_agent --node t"),
    ],
)
def test_options_of_a_service_that_the_job_file_knows(
    text: str, command: str, job_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.service.run_service", lambda *_, **__: 7)
    name, *options = command.split()
    assert main(["service", name, "-c", str(job_file(text)), *options]) == 7


def test_what_a_supervisor_and_node_agents_start_is_not_refused(
    job_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole roster of a job, and each worker slot as its node agent would launch it."""
    monkeypatch.setattr("services.cli.service.run_service", lambda *_, **__: 7)
    for text in ("", FLEET, GATEWAY + "[harness]\nprocesses = 2\n", "[agent]\nprocesses = 3\n"):
        path = job_file(text)
        job = load(path)
        for process in roster(job):
            assert main(["service", process.service, "-c", str(path), *process.arguments]) == 7
        for node in job.nodes:
            config = NodeConfig.of(job, node.name, path)
            for worker in config.workers:
                service = "trainer" if worker == config.trainer else "rollout_worker"
                line = command_line(config, service, worker, Incarnation(1))
                assert main(list(line[line.index("service") :])) == 7


@pytest.mark.parametrize("command", ["status", "tap", "check", "events available --node r --gpus 0"])
def test_a_job_that_does_not_run(
    command: str,
    job_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = refused(capsys, *command.split(), "-c", job_file(""))
    assert "is not running" in said and "pearl up" in said
    # The server's file outlives a server that was killed.
    (tmp_path / "data/demo").mkdir(parents=True)
    (tmp_path / "data/demo/nats.json").write_text('{"url":"nats://127.0.0.1:1","pid":1}')
    assert "is not running" in refused(capsys, *command.split(), "-c", job_file(""))
    monkeypatch.chdir(tmp_path)
    assert "no run found below" in refused(capsys, *command.split())
    foreign = job_file('[nats]\nembedded = false\nurl = "nats://127.0.0.1:1"\n')
    assert "no NATS server there" in refused(capsys, *command.split(), "-c", foreign)


EVENTS = [
    ("available --node x9 --gpus 0", "--node 'x9'"),
    ("available --node r --gpus 2", "has no GPU 2"),
    ("available --node r --gpus=-1", "has no GPU -1"),
    ("available --node r --gpus 0,x", "--gpus '0,x'"),
    ("available --node r --gpus ,", "--gpus ','"),
    ("reclaim --node r --gpus 0", "only preemptible"),
    ("available --node t --gpus 0", "training node"),
    ("reclaim --node p --gpus 0 --notice-s nan", "--notice-s nan"),
    ("reclaim --node p --gpus 0 --notice-s 1e30", "longer than a day"),
    ("reclaim --node p --gpus 0 --notice-s=-3", "negative"),
]


@pytest.mark.parametrize(("arguments", "part"), EVENTS)
def test_events_that_make_no_sense_are_refused_here(
    arguments: str, part: str, job_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_file("", NODES + '[[nodes]]\nname = "p"\nzone = "preemptible"\ngpus = 1\n')
    assert part in refused(capsys, "events", *arguments.split(), "-c", path)


@pytest.mark.parametrize("pattern", ["a b", "ev..x", "", "ev.>.x", "pearl.other.>"])
def test_tap_refuses_what_is_no_subject(
    pattern: str, job_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "subject" in refused(capsys, "tap", pattern, "-c", job_file(""))


def test_decide_and_plan_refuse_wrong_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "input.json"

    def decide(content: object, workers: object = 4) -> str:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return refused(capsys, "decide", "--profile", file, "--workers", workers)

    assert "cannot be read" in refused(capsys, "decide", "--profile", tmp_path / "nowhere", "--workers", 3)
    assert "not JSON" in decide("{")
    assert "expected an object" in decide("[1]")
    assert "'S' is missing" in decide({key: value for key, value in PROFILE.items() if key != "S"})
    assert "'s' is unknown" in decide({**PROFILE, "s": 1})
    assert "give a number" in decide({**PROFILE, "S": "ten"})
    assert "negative" in decide({**PROFILE, "S": -1})
    assert "workers = -1" in decide(PROFILE, -1)
    assert "workers = 1000000" in decide(PROFILE, 1000000)
    assert "not JSON" in decide("[" * 100_000)

    def plan(table: object, target: object) -> str:
        (tmp_path / "table.json").write_text(json.dumps(table))
        (tmp_path / "target.json").write_text(json.dumps(target))
        return refused(capsys, "plan", "--table", tmp_path / "table.json", "--target", tmp_path / "target.json")

    row = {"worker": "a-w0", "gpus": [["a", 0]], "zone": "reserved", "role": "colocated", "activity": "active"}
    good = {"workers": ["a-w0"], "prefill": 0, "decode": 0, "colocated": 1}
    for table, target, part in (
        ({}, good, "rows"),
        ({"rows": 3}, good, "rows"),
        ({"rows": [{**row, "zone": "moon"}]}, good, "zone"),
        ({"rows": [{**row, "gpus": [["a"]]}]}, good, "gpu"),
        ({"rows": [row, row]}, good, "row already"),
        ({"rows": [row]}, {}, "workers"),
        ({"rows": [row]}, {**good, "workers": ["b-w0"]}, "b-w0"),
        ({"rows": [row]}, {**good, "colocated": 2}, "colocated = 2"),
        ({"rows": [row]}, {**good, "colocated": -1}, "colocated is -1"),
        ({"rows": [row]}, {**good, "colocated": "1"}, "colocated"),
    ):
        assert part in plan(table, target).lower()


@pytest.mark.parametrize(
    "arguments",
    [
        "demo --seed=-1",
        "demo --seed x",
        f"demo --seed {10**30}",
        "demo --port 70000",
        "demo --steps 0",
        "demo --engine x",
        "nothing",
        "",
    ],
)
def test_options_that_are_none(
    arguments: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "error: " in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


# --- as a process of its own: nothing is started, nothing is printed but the message


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("up -c {job}", "unknown key rollout.max_runing"),
        ("service orchestrator -c {job}", "unknown key rollout.max_runing"),
        ("status -c {job}", "unknown key rollout.max_runing"),
        ("up -c nowhere.toml", "cannot be read"),
        ("status", "no run found"),
        ("decide --profile nowhere.json --workers 3", "cannot be read"),
        ("plan --table nowhere.json --target nowhere.json", "cannot be read"),
    ],
)
def test_as_a_process(command: str, part: str, job_file: Callable[..., Path], tmp_path: Path) -> None:
    job = job_file("[rollout]\nmax_runing = 3\n")
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", *command.format(job=job).split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert part in done.stderr and time.monotonic() - begun < 30


def test_a_service_in_a_process_says_what_is_wrong_and_exits_with_2(
    job_file: Callable[..., Path], tmp_path: Path
) -> None:
    """What only the service itself finds out: systemd must not start it again and again (see deploy/)."""
    job = job_file(
        '[environment]\nentry = "nowhere:Environment"\n[nats]\nembedded = false\nurl = "nats://127.0.0.1:1"\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "service", "nats_server", "-c", str(job)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    with pytest.raises(ConfigError):
        load(tmp_path / "nowhere")
