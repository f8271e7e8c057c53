"""The one table of durable state: every stream and bucket of a job, who owns it, who writes it, what it is for.

`services.nats_server.admin` creates what is listed here, and `docs/durable-state.md` is generated from
it. Nothing else of a job survives the death of all its processes,
except files below the run directory: snapshots, checkpoints, attempt logs.
"""

from __future__ import annotations

import msgspec

from messages import subjects
from services.runtime.bus import BucketSpec, StreamSpec

MIB = 1 << 20
GIB = 1 << 30

CTRL = "CTRL"
"""The account that holds the role table and the lease: only the orchestrator's table writer logs in there."""
APP = "APP"
"""The account of everyone else."""


class Durable(msgspec.Struct, frozen=True, kw_only=True):
    """One stream or bucket. `owner` decides what is in it, `writers` may write it, `restores` says who reads it back."""

    spec: StreamSpec | BucketSpec
    account: str
    owner: str
    writers: str
    keeps: str
    restores: str

    @property
    def stream(self) -> str:
        """Name of the JetStream stream: a bucket `b` is the stream `KV_b`."""
        return self.spec.name if isinstance(self.spec, StreamSpec) else f"KV_{self.spec.name}"


def durable_state(job: str, replicas: int = 1) -> tuple[Durable, ...]:
    """Everything durable of job `job`. Sizes are bounds, not what a run uses."""
    return (
        Durable(
            spec=StreamSpec(
                name=subjects.stream(job, "ev"), subjects=(f"pearl.{job}.ev.>",), max_bytes=GIB, replicas=replicas
            ),
            account=APP,
            owner="each event kind's sender",
            writers="every service but the monitor, each its own kinds only",
            keeps="the newest events that fit",
            restores="every control service, from the cursor of its last checkpoint; trainer: `batch.ready` of its batch",
        ),
        Durable(
            spec=StreamSpec(
                name=subjects.stream(job, "task"),
                subjects=(f"pearl.{job}.task.*",),
                retention="workqueue",
                max_bytes=256 * MIB,
                replicas=replicas,
            ),
            account=APP,
            owner="pipeline_scheduler",
            writers="pipeline_scheduler",
            keeps="each task until an agent, or the gateway for a session, acknowledges it (after the trajectory's end is in EV)",
            restores="agents, gateways: the tasks of one that died are delivered again",
        ),
        Durable(
            spec=StreamSpec(
                name=subjects.stream(job, "journal"),
                subjects=(f"pearl.{job}.journal.*",),
                max_bytes=8 * GIB,
                replicas=replicas,
            ),
            account=APP,
            owner="agents and gateways, one writer a trajectory",
            writers="agent, gateway; purged by pipeline_scheduler",
            keeps="turns until the version trained from them is committed (all of them with pipeline.keep_journal)",
            restores="agents: resume a trajectory; trainer: the tokens of a batch",
        ),
        Durable(
            spec=StreamSpec(
                name=subjects.stream(job, "dead"),
                subjects=(f"pearl.{job}.dead.*",),
                max_bytes=64 * MIB,
                max_age_s=7 * 86400.0,
                replicas=replicas,
            ),
            account=APP,
            owner="each receiver",
            writers="every service but the monitor",
            keeps="refused messages for 7 days, the newest that fit",
            restores="nobody; people read it",
        ),
        Durable(
            spec=BucketSpec(name=subjects.state_bucket(job), max_bytes=256 * MIB, replicas=replicas),
            account=APP,
            owner="each control service, its own key",
            writers="control services, each its own key only",
            keeps="the last checkpoint (state, outbox, cursor) of each",
            restores="each control service at its start",
        ),
        Durable(
            spec=BucketSpec(
                name=subjects.roles_bucket(job),
                max_bytes=64 * MIB,
                republish=subjects.roles_feed(job).rpartition(".")[0],
                replicas=replicas,
            ),
            account=CTRL,
            owner="orchestrator",
            writers="the orchestrator's table writer, by compare-and-set",
            keeps="the last role table",
            restores="orchestrator: the table and its own cursor; every replica: its first copy",
        ),
        Durable(
            spec=BucketSpec(name=subjects.lease_bucket(job), max_bytes=MIB, ttl_allowed=True, replicas=replicas),
            account=CTRL,
            owner="the orchestrator that is in charge",
            writers="the orchestrators' table writer",
            keeps="the lease for as long as it is renewed (seconds)",
            restores="a standing-by orchestrator: it takes over when the lease ends",
        ),
    )


def to_markdown() -> str:
    """The text of docs/durable-state.md."""
    lines = [
        "# Durable state",
        "",
        "Every stream and bucket of a job, from `services/durable.py`. `JOB` is the job's name.",
        "",
        "| stream or bucket | account | owner | writers | keeps | at most | who restores what from it |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in durable_state("JOB"):
        kind = "stream" if isinstance(entry.spec, StreamSpec) else "bucket"
        size = entry.spec.max_bytes
        bound = f"{size // GIB} GiB" if size >= GIB else f"{size // MIB} MiB"
        lines.append(
            f"| {kind} `{entry.spec.name}` | {entry.account} | {entry.owner} | {entry.writers} | {entry.keeps} | {bound} | {entry.restores} |"
        )
    return "\n".join(lines) + "\n"
