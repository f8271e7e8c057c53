"""The job that is broken: which services run on which host. Time-outs are above a fail-over of three NATS servers (5-9 s)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from services.jobfile import JobFile
from tests.integration.chaos.hosts import Host

JOB = """
[job]
name = "chaos"
data_dir = "{data_dir}"
seed = {seed}
[nats]
cluster = [{servers}]
replicas = 3
[model]
device = "cpu"
[[nodes]]
name = "reserved"
zone = "reserved"
gpus = 2
address = "{address0}"
[[nodes]]
name = "spot"
zone = "preemptible"
gpus = 2
address = "{address1}"
[[nodes]]
name = "train"
zone = "training"
gpus = 1
address = "{address2}"
[rollout]
engine = "emulated"
kv_cache_tokens = 200000
prefill_chunk_tokens = 4096
heartbeat_ms = 500
[training]
engine = "emulated"
[emulation]
time_scale = {time_scale}
train_s = 8.0
[environment]
entry = "services.environments.replay:Replay"
tokenizer = "services.environments.replay:ReplayTokenizer"
options = {{ workload = "{data_dir}/workload.csv" }}
time_scale = {time_scale}
[pipeline]
batch_trajectories = 32
group_size = 8
train_steps = 100000
max_turns = 10
max_new_tokens = 500
max_context_tokens = 8192
keep_journal = true
[agent]
processes = 2
silence_ms = 5000
task_ack_wait_ms = 12000
[decision]
lending = true
toggle_guess_s = 0.5
[timeouts]
drain_ms = 12000
apply_ms = 60000
return_ms = 20000
lease_ms = 6000
prepare_ms = 60000
admission_pause_ms = 20000
"""


class Spec(msgspec.Struct, frozen=True):
    """One process to keep: `arguments` follow `pearl service`."""

    name: str
    host: int
    arguments: tuple[str, ...]


SPREAD = (
    ("orchestrator", 0),
    ("pipeline_scheduler", 0),
    ("router", 0),
    ("elastic_scheduler", 0),
    ("decision_engine", 1),
    ("cluster_rebuilder", 1),
    ("toggle_manager", 2),
    ("runtime_tracker", 2),
)


def specs() -> tuple[Spec, ...]:
    """Every service process, and where it runs."""
    servers = [Spec(f"nats-{index}", index, ("nats_server", "--index", str(index))) for index in range(3)]
    control = [Spec(name, host, (name,)) for name, host in SPREAD]
    twice = [Spec("orchestrator-standby", 1, ("orchestrator",)), Spec("router-second", 2, ("router",))]
    agents = [Spec(f"agent-{index}", index + 1, ("agent", "--index", str(index))) for index in range(2)]
    nodes = [
        Spec(f"node_agent-{node}", index, ("node_agent", "--node", node))
        for index, node in enumerate(("reserved", "spot", "train"))
    ]
    return (*servers, *control, *twice, *agents, *nodes)


HOST_OF_NODE = {"reserved": 0, "spot": 1, "train": 2}


def job_text(folder: Path, hosts: tuple[Host, ...], seed: int, time_scale: float) -> str:
    """The job file."""
    servers = ", ".join(f'"{host.address}:{host.nats_port}"' for host in hosts)
    addresses = {f"address{host.index}": host.address for host in hosts}
    return JOB.format(data_dir=folder, seed=seed, servers=servers, time_scale=time_scale, **addresses)


def outage_nodes(job: JobFile, host: int) -> tuple[str, ...]:
    """Nodes whose agent runs on a host."""
    return tuple(node.name for node in job.nodes if HOST_OF_NODE[node.name] == host)
