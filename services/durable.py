"""The one table of durable state: every stream and bucket of a job, who owns it, who writes it, what it is for.

`services.nats_server.admin` creates what is listed here, and `docs/durable-state.md` is generated from
it. Nothing else of a job survives the death of all its processes,
except files below the run directory: snapshots, checkpoints, attempt logs.
"""

from __future__ import annotations

from typing import Final

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
            restores="nobody; people and the checker read it",
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


LOSS: Final = """
## When the broker loses its last moments

A server acknowledges before its disk has a write unless it is told otherwise, and a power cut then takes acknowledged writes back
(up to two minutes by default). The servers that PEARL configures run with `sync_interval: always`: acknowledged is on disk. A server
of one's own without it, a disk that lies, or a backup that is put back can still bring an older store under a running cluster. That
is noticed, and everyone begins again from what is there:

| who | notices by | then |
|---|---|---|
| control service | its checkpoint's revision, and the message at its cursor (by sequence and time), after each reconnection and at its start | ends, and begins anew from the store, so that all agree. A cursor beyond the stream moves back to where stream and checkpoint part |
| orchestrator | an epoch that it, or any holder of a replica (`table.ahead/1`), has seen above the bucket's; its cursor beyond the stream's end; an incarnation that a node agent speaks of and the table never gave out | listens to the workers for 4 s and writes the table anew, in one epoch above all that were seen: dedicated workers that serve go on under the role and generation that they report, every other slot begins above all incarnations and generations that may have been given out; no plan, and the stream's newest target as the next input. It says `store.rewound/1` |
| training GPUs | - | nobody is believed: each overlap slot gets a new process, which says that it holds nothing, after its node agent has ended the old one; the trainer is asked for its memory before the next borrow |
| rollout worker, node agent | the reconnection; a capacity event that is gone | say again what holds: ready, version, role; the node; launches of what has ended are answered with its end |
| trainer | its newest `weights.published/1` is gone | says it again, with the step that made it |
| pipeline scheduler | a version above the one that was due (and tokens of such a version, which it does not count); tasks in flight that are neither in the queue nor ended (looked for every 10 s) | batches below the version are trained: what is under way for them is in vain. Lost tasks are given out again, ends that came while nobody waited for them are counted |
| agent | its next journal write fails its guard | gives the task back; whoever takes it resumes from the journal that is left. Turns whose record was lost are generated again under new request ids |
| replicas, monitor | an older snapshot; a sequence that is given out again | keep what they have for five refreshes, by when the epoch is above it; read on from where the stream parts |

So no epoch falls for any watcher, no incarnation, generation or plan id means two things, no process runs twice in a slot, and no batch is
trained twice. The checker counts what was lost and done again apart: `redone` (tokens of turns whose record was lost) and `forgotten`
(train steps whose record was). `tests/integration/test_power_loss.py` puts a store back that is some seconds older, under a
running job, and holds the run against all of this.

What is not made good: an event that a person published by hand in the lost moments (publish it again); a decision's record; and a store
whose streams were put back from different moments, such that ends of trajectories are there without their turns (copy all of it
from one moment, with the server stopped).
"""


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
    return "\n".join(lines) + "\n" + LOSS
