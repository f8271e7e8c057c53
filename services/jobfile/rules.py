"""What a well-typed job file may not say: values that contradict each other, or that no service could work with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from messages.ids import Zone
from messages.subjects import JOB_NAME, TOKEN
from services.jobfile.sections import WEIGHT_WAYS, JobFile, NatsSection

MOST_WORKERS: Final = 5000
"""The stated limit of workers in a job."""
MOST_AGENTS: Final = 1024
LEAST_LEASE_MS: Final = 1500
"""Three heartbeats of a node agent: a shorter lease takes a busy one for dead."""
LEAST_ACK_WAIT_MS: Final = 1000
MOST_PORT: Final = 2**16 - 1
ROUTES_ABOVE: Final = 2000
"""Servers of a cluster listen for one another at this much above the port for clients (4222 and 6222 by custom)."""

_STATIC_PD: Final = re.compile(r"static-pd:([1-9][0-9]{0,2}):([1-9][0-9]{0,2})")


def parse_bind(text: str) -> tuple[str, int]:
    """Address and port of `gateway.bind`; an IPv6 address stands in brackets. Raises ValueError."""
    address, colon, port = text.rpartition(":")
    address = address.removeprefix("[").removesuffix("]")
    if not colon or not address or not port.isdecimal() or int(port) >= 2**16:
        raise ValueError(f'{text!r}: write "address:port", such as "127.0.0.1:8000"')
    return address, int(port)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it."""
    return address == "localhost" or address == "::1" or address.startswith("127.")


def _gateway_problems(job: JobFile) -> Iterator[str]:
    gateway = job.gateway
    if not gateway.bind:
        if job.agent.processes == 0:
            yield "agent.processes = 0: nobody would roll out; set gateway.bind for sessions, or at least one agent"
        return
    try:
        address, port = parse_bind(gateway.bind)
    except ValueError as error:
        yield f"gateway.bind = {error}"
        return
    if port and port + gateway.instances > 2**16:
        yield f"gateway.instances = {gateway.instances}: there are not so many ports from {port} on"
    if not gateway.api_keys_file and not is_loopback(address):
        yield f"gateway.bind = {gateway.bind!r} is reached from other machines: set gateway.api_keys_file"
    if bool(gateway.tls_certificate) != bool(gateway.tls_key):
        yield "gateway.tls_certificate and gateway.tls_key: give both, or none"


def _harness_problems(job: JobFile) -> Iterator[str]:
    harness = job.harness
    if not harness.command:
        yield "harness.command is empty: name the program to run for each episode"
    if harness.reward not in ("tests", "program"):
        yield f'harness.reward = {harness.reward!r}: use "tests" or "program"'
    if harness.gateway and not re.fullmatch(r"https?://[^/]+/?", harness.gateway):
        yield f'harness.gateway = {harness.gateway!r}: write "http://host:port" or "https://host:port"'
    if harness.processes and not harness.gateway and not job.gateway.bind:
        yield f"harness.processes = {harness.processes}: harnesses speak to a gateway; set gateway.bind, or harness.gateway"
    if harness.processes > MOST_AGENTS:
        yield f"harness.processes = {harness.processes}: at most {MOST_AGENTS}; raise harness.concurrency instead"
    if harness.action_s >= harness.episode_s:
        yield f"harness.action_s = {harness.action_s:g} must be below harness.episode_s = {harness.episode_s:g}"


def _sglang_problems(job: JobFile) -> Iterator[str]:
    sglang = job.rollout.sglang
    if sglang.weights not in WEIGHT_WAYS:
        yield f"rollout.sglang.weights = {sglang.weights!r}: use {', '.join(map(repr, WEIGHT_WAYS))}"
    for worker, url in sorted(sglang.adopt.items()):
        try:
            host = urlsplit(url).hostname or ""
        except ValueError as error:
            yield f"rollout.sglang.adopt: {worker} = {url!r} is not a URL ({error})"
            continue
        if sglang.weights == "tensor" and not (is_loopback(host) or host in {node.address for node in job.nodes}):
            yield (
                f'rollout.sglang.weights = "tensor": the server of {worker} at {url} does not share memory with its worker, which '
                'is on a node of this job; use "distributed"'
            )


def parse_policy(text: str) -> tuple[int, int] | None:
    """The ratio (P, D) of "static-pd:P:D", (0, 0) for "colocated", None for "planner" and "paper". Raises ValueError."""
    if text in ("planner", "paper", "colocated"):
        return (0, 0) if text == "colocated" else None
    match = _STATIC_PD.fullmatch(text)
    if match is None:
        raise ValueError(
            f'{text!r}: use "planner", "paper", "colocated", or "static-pd:P:D" with P and D from 1 to 999'
        )
    return int(match[1]), int(match[2])


def _problems_of_cluster(nats: NatsSection) -> Iterator[str]:
    for each in nats.cluster:
        host, _, port = each.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) <= MOST_PORT - ROUTES_ABOVE:
            yield (
                f'nats.cluster: {each!r} is not "host:port" with a port from 1 to {MOST_PORT - ROUTES_ABOVE} '
                f"(servers reach each other {ROUTES_ABOVE} above it)"
            )
    if nats.cluster and (len(nats.cluster) < 3 or len(nats.cluster) % 2 == 0):
        yield f"nats.cluster has {len(nats.cluster)} servers: a majority must outlive one, so list three or five"
    if len(set(nats.cluster)) != len(nats.cluster):
        yield "nats.cluster lists a server twice"
    if nats.cluster and not nats.embedded:
        yield "nats.cluster is for servers that PEARL runs: leave nats.embedded = true, or put the addresses into nats.url"
    if nats.embedded and nats.replicas > max(1, len(nats.cluster)):
        yield f"nats.replicas = {nats.replicas} with {max(1, len(nats.cluster))} server(s): list so many in nats.cluster"


def problems_of(job: JobFile) -> Iterator[str]:
    """What is wrong with a well-typed job file, worst first."""
    if not JOB_NAME.fullmatch(job.job.name):
        yield f"job.name {job.job.name!r}: use a-z, 0-9 and '-', at most 32 characters"
    names = [node.name for node in job.nodes]
    for node in job.nodes:
        if not TOKEN.fullmatch(node.name):
            yield f"nodes: name {node.name!r} is not letters, digits, '_' or '-'"
        if names.count(node.name) > 1:
            yield f"nodes: {node.name!r} is listed twice"
        if node.zone not in (Zone.RESERVED, Zone.PREEMPTIBLE, Zone.TRAINING):
            yield f"nodes.{node.name}: zone must be reserved, preemptible or training"
        if node.gpus < job.rollout.gpus_per_worker:
            yield (
                f"nodes.{node.name}: {node.gpus} GPUs are not enough for one worker of "
                f"rollout.gpus_per_worker = {job.rollout.gpus_per_worker}"
            )
    if job.rollout.workers_per_process > 1 and job.rollout.engine != "emulated":
        yield (
            f"rollout.workers_per_process = {job.rollout.workers_per_process}: only emulated workers share a process; "
            'set it to 1, or rollout.engine = "emulated"'
        )
    workers = sum(node.gpus // job.rollout.gpus_per_worker for node in job.nodes)
    if workers > MOST_WORKERS:
        yield f"nodes: their GPUs make {workers} workers; a job has at most {MOST_WORKERS}"
    if job.agent.processes > MOST_AGENTS:
        yield f"agent.processes = {job.agent.processes}: at most {MOST_AGENTS}; raise agent.concurrency instead"
    if job.agent.task_ack_wait_ms < LEAST_ACK_WAIT_MS:
        yield f"agent.task_ack_wait_ms = {job.agent.task_ack_wait_ms}: an agent could not keep its tasks; set at least {LEAST_ACK_WAIT_MS}"
    if job.timeouts.lease_ms < LEAST_LEASE_MS:
        yield f"timeouts.lease_ms = {job.timeouts.lease_ms}: a busy node agent would be taken for dead; set at least {LEAST_LEASE_MS}"
    if job.model.device not in ("auto", "cpu", "cuda"):
        yield f'model.device = {job.model.device!r}: use "auto", "cpu" or "cuda"'
    training = sum(node.gpus for node in job.nodes if node.zone is Zone.TRAINING)
    if job.nodes and training < job.training.ranks:
        yield f"training.ranks = {job.training.ranks} but the training nodes have {training} GPUs: add GPUs or lower ranks"
    if job.pipeline.batch_trajectories % job.pipeline.group_size:
        yield (
            f"pipeline.batch_trajectories = {job.pipeline.batch_trajectories} is not a multiple of "
            f"pipeline.group_size = {job.pipeline.group_size}"
        )
    try:
        parse_policy(job.decision.policy)
    except ValueError as error:
        yield f"decision.policy: {error}"
    yield from _problems_of_cluster(job.nats)
    yield from _gateway_problems(job)
    yield from _harness_problems(job)
    yield from _sglang_problems(job)
    if not job.nats.embedded and not job.nats.url:
        yield "nats.url is missing: give the server's address, or set nats.embedded = true"
    if job.timeouts.drain_ms >= job.timeouts.apply_ms:
        yield "timeouts.drain_ms must be below timeouts.apply_ms: a drain is part of a plan's apply section"
    if job.timeouts.apply_ms <= job.timeouts.admission_pause_ms / 10:
        yield "timeouts.apply_ms is implausibly short beside timeouts.admission_pause_ms"
