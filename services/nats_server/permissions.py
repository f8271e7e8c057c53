"""Who may say and hear what: one user a kind of service, with exactly the subjects it needs.

Derived from one table, `SENDS` (who sends which kinds, as the comments in `messages/` say), and the routes in
`messages.subjects`. `allow_responses` is never used.

Permissions do not bind what the server itself sends on a user's behalf: an acknowledgement or a stored message goes
to whatever reply subject the request named, within the user's account. So accounts draw the hard lines:

A stream also takes a message for a repetition by its id alone, whatever its subject: so the client seals ids with its user's
key (`bus_nats`), and no user can make another one's message look repeated.

- CTRL holds the role table and the lease. Nothing of another account can land there.
- MON (the monitor) and FEED (the preemption feed) are for those who look in from outside: they reach single subjects
  of APP as imports, and no answer to them can land among APP's events.
- APP is everyone else. Its services are trusted this far: one that stores messages and reads them could have the
  server repeat one on another subject of APP. A worker reads nothing, so it could not.
"""

from __future__ import annotations

from typing import Final

import msgspec

from messages import (
    agent,
    decision_engine,
    elastic_scheduler,
    executors,
    monitor,
    node_agent,
    orchestrator,
    pipeline_scheduler,
    rollout_worker,
    router,
    runtime_tracker,
    subjects,
    toggle_manager,
    trainer,
)
from messages.envelope import Message
from services.durable import APP, CTRL, durable_state
from services.jobfile import JobFile

MON: Final = "MON"
FEED: Final = "FEED"
SYS: Final = "SYS"

TABLES_USER: Final = "orchestrator_tables"
"""The orchestrator's second user: the role table's only writer."""
ADMIN: Final = {CTRL: "admin_ctrl", APP: "admin_app"}
"""Users that create streams and buckets; no service runs as one."""
SYS_USER: Final = "sys"

SENDS: Final[dict[str, tuple[type[Message], ...]]] = {
    "pipeline_scheduler": (
        elastic_scheduler.TrainingBegin,
        elastic_scheduler.TrainingFinished,
        decision_engine.BatchProgress,
        pipeline_scheduler.BatchReady,
        pipeline_scheduler.Evaluated,
        agent.RolloutTask,
        rollout_worker.UpdateWeights,
        orchestrator.TableAhead,
    ),
    "elastic_scheduler": (decision_engine.BudgetChanged,),
    "decision_engine": (orchestrator.TargetConfiguration, monitor.DecisionRecord, orchestrator.TableAhead),
    "orchestrator": (executors.ReconfigurationPlan, monitor.StoreRewound),
    "cluster_rebuilder": (
        orchestrator.PlanProgress,
        node_agent.Launch,
        node_agent.Kill,
        rollout_worker.UpdateWeights,
        rollout_worker.SetRole,
        rollout_worker.Drain,
        runtime_tracker.OperationTimed,
        orchestrator.TableAhead,
    ),
    "toggle_manager": (
        orchestrator.PlanProgress,
        node_agent.Launch,
        node_agent.Kill,
        rollout_worker.UpdateWeights,
        rollout_worker.SetRole,
        rollout_worker.Drain,
        rollout_worker.Deactivate,
        rollout_worker.Activate,
        trainer.TrainerResume,
        trainer.TrainerRelease,
        monitor.GpusReturned,
        runtime_tracker.OperationTimed,
        orchestrator.TableAhead,
    ),
    "node_agent": (
        elastic_scheduler.NodeUp,
        orchestrator.WorkerGone,
        orchestrator.GpuFree,
        runtime_tracker.NodeHeartbeat,
    ),
    "runtime_tracker": (decision_engine.WorkloadProfile,),
    "router": (orchestrator.TableAhead,),
    "gateway": (
        pipeline_scheduler.TrajectoryCompleted,
        agent.TurnFinished,
        agent.RequestInterrupted,
        rollout_worker.Generate,
        rollout_worker.CancelRequest,
        router.AssignRequest,
        runtime_tracker.RequestFinished,
    ),
    "rollout_worker": (
        orchestrator.WorkerReady,
        orchestrator.WeightsApplied,
        orchestrator.RoleSet,
        orchestrator.WorkerDrained,
        orchestrator.WorkerReleased,
        orchestrator.WorkerActivated,
        runtime_tracker.WorkerHeartbeat,
    ),
    "trainer": (
        toggle_manager.TrainerReleased,
        toggle_manager.TrainerResumed,
        toggle_manager.TrainerReady,
        pipeline_scheduler.WeightsPublished,
        pipeline_scheduler.StepFinished,
        pipeline_scheduler.Evaluated,
    ),
    "agent": (
        pipeline_scheduler.TrajectoryCompleted,
        agent.TurnFinished,
        agent.RequestInterrupted,
        rollout_worker.Generate,
        rollout_worker.CancelRequest,
        router.AssignRequest,
        runtime_tracker.RequestFinished,
        orchestrator.TableAhead,
    ),
    "feed": (elastic_scheduler.GpuAvailable, elastic_scheduler.GpuReclaimed),
    "cli": (elastic_scheduler.GpuAvailable, elastic_scheduler.GpuReclaimed),
    "monitor": (),
}
"""Which kinds each user publishes. Every user but `monitor` and `feed` also publishes dead letters."""

FEED_STATE_KEY: Final = "feed"
"""Key of the state bucket under which the feed keeps its position in a trace."""

_SAYS_MORE: Final[dict[str, tuple[str, ...]]] = {
    # replies, which have no subject of their own: where they may go
    "router": ("_INBOX_agent.>", "_INBOX_gateway.>", "_INBOX_cli.>"),
    "rollout_worker": ("pearl.{job}.tok.>",),
}

_HEARS: Final[dict[str, tuple[str, ...]]] = {
    # core subjects; all but workers, trainer and feed hear the role table's feed too
    "orchestrator": ("pearl.{job}.tel.>",),
    "runtime_tracker": ("pearl.{job}.tel.>",),
    "cluster_rebuilder": ("pearl.{job}.tel.>",),
    "toggle_manager": ("pearl.{job}.tel.>",),
    "elastic_scheduler": ("pearl.{job}.tel.>",),
    "node_agent": ("pearl.{job}.cmd.node.*", "pearl.{job}.tel.>"),
    "router": ("pearl.{job}.assign", "pearl.{job}.tel.>"),
    "gateway": ("pearl.{job}.tok.>",),
    "rollout_worker": ("pearl.{job}.cmd.worker.*", "pearl.{job}.gen.*"),
    "trainer": ("pearl.{job}.cmd.trainer",),
    "agent": ("pearl.{job}.tok.>",),
    "cli": ("pearl.{job}.>",),
    "monitor": ("pearl.{job}.>",),
}

_CONTROL: Final = (
    "pipeline_scheduler",
    "elastic_scheduler",
    "decision_engine",
    "orchestrator",
    "cluster_rebuilder",
    "toggle_manager",
    "runtime_tracker",
    "router",
    "node_agent",
    "trainer",
)
"""Services that consume EV with a durable consumer of their own and keep a checkpoint in the state bucket."""

_NO_TABLE: Final = ("rollout_worker", "feed")
"""Users that get no replica of the role table: workers get commands."""


class User(msgspec.Struct, frozen=True, kw_only=True):
    """One login. Empty `publish` and `subscribe` with `admin` set: everything within the account."""

    name: str
    account: str
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    admin: bool = False


def inbox_prefix(user: str) -> str:
    """Inbox of a user: nobody else may listen on it."""
    return f"_INBOX_{user}"


def users(job: JobFile) -> tuple[User, ...]:
    """Every user of a job, sorted by account and name."""
    name = job.job.name
    found = [_service_user(job, service) for service in SENDS]
    roles, lease = subjects.roles_bucket(name), subjects.lease_bucket(name)
    found.append(
        User(
            name=TABLES_USER,
            account=CTRL,
            publish=(
                f"$KV.{roles}.>",
                f"$KV.{lease}.>",
                *reading(f"KV_{roles}"),
                *reading(f"KV_{lease}"),
                # of the leader, and not of a replica that may lag behind it
                f"$JS.API.STREAM.MSG.GET.KV_{roles}",
                f"$JS.API.STREAM.MSG.GET.KV_{lease}",
            ),
            subscribe=(f"{inbox_prefix(TABLES_USER)}.>",),
        )
    )
    found.extend(User(name=user, account=account, admin=True) for account, user in ADMIN.items())
    found.append(User(name=SYS_USER, account=SYS, admin=True))
    return tuple(sorted(found, key=lambda user: (user.account, user.name)))


def reading(stream: str, api: str = "$JS.API") -> tuple[str, ...]:
    """API subjects that read a stream. Nothing is left on the server, and nothing is asked of account MON's JetStream."""
    return (f"{api}.DIRECT.GET.{stream}", f"{api}.DIRECT.GET.{stream}.>")


def informing(stream: str, api: str = "$JS.API") -> str:
    """API subject that tells how far a stream has come, and how much of its beginning is gone."""
    return f"{api}.STREAM.INFO.{stream}"


def role_reading(job: str, api: str) -> tuple[str, ...]:
    """API subjects that read the role bucket, as account CTRL exports them."""
    return reading(f"KV_{subjects.roles_bucket(job)}", api)


def consuming(stream: str, durable: str) -> tuple[str, ...]:
    """API subjects of one durable pull consumer, its acknowledgements included."""
    return (
        f"$JS.API.CONSUMER.CREATE.{stream}.{durable}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}",
        f"$JS.ACK.{stream}.{durable}.>",
    )


def feed_state(job: str) -> tuple[str, ...]:
    """Subjects by which the preemption feed writes and reads its own key of the state bucket, and no other."""
    bucket = subjects.state_bucket(job)
    key = f"$KV.{bucket}.{FEED_STATE_KEY}"
    return (key, f"$JS.API.DIRECT.GET.KV_{bucket}.{key}")


def feed_events(job: str) -> tuple[str, ...]:
    """Subjects of the events a preemption feed publishes."""
    return tuple(said_on(job, kind) for kind in SENDS["feed"])


def app_streams(job: str) -> tuple[str, ...]:
    """Streams (buckets included) of account APP."""
    return tuple(entry.stream for entry in durable_state(job) if entry.account == APP)


def said_on(job: str, kind: type[Message]) -> str:
    """The narrowest subject pattern that all messages of a kind travel on."""
    route = subjects.ROUTES[kind]
    if route.family in ("ev", "tel"):
        key = "-" if route.key is None else "*"
        return f"pearl.{job}.{route.family}.{subjects.noun_verb(kind)}.{key}"
    if route.family in ("cmd.trainer", "assign"):
        return f"pearl.{job}.{route.family}"
    assert route.family != "reply", f"{kind.__name__} is a reply and has no subject of its own"
    return f"pearl.{job}.{route.family}.*"


def durables(job: JobFile, service: str) -> tuple[str, ...]:
    """Names of a service's durable consumers on EV: its own, or one a node where each node has a process."""
    if service == "node_agent":
        return tuple(f"node_agent-{node.name}" for node in job.nodes)
    return (service,)


def _service_user(job: JobFile, service: str) -> User:
    name = job.job.name
    ev, tasks, journal = (subjects.stream(name, family) for family in ("ev", "task", "journal"))
    state = subjects.state_bucket(name)
    publish = [said_on(name, kind) for kind in SENDS[service]]
    publish += [pattern.format(job=name) for pattern in _SAYS_MORE.get(service, ())]
    subscribe = [f"{inbox_prefix(service)}.>", *(pattern.format(job=name) for pattern in _HEARS.get(service, ()))]
    if service not in ("monitor", "feed"):
        publish.append(f"pearl.{name}.dead.*")
    if service not in _NO_TABLE:
        publish += role_reading(name, subjects.ROLES_API_PREFIX)
        subscribe.append(f"pearl.{name}.roles.>")
    if service in _CONTROL:
        for durable in durables(job, service):
            publish += consuming(ev, durable)
            publish.append(f"$KV.{state}.{durable}")
        publish += [*reading(ev), *reading(f"KV_{state}")]
    if service == "pipeline_scheduler":
        publish += [*reading(tasks), *reading(journal)]
        publish += [f"$JS.API.STREAM.PURGE.{journal}", f"$JS.API.STREAM.PURGE.{tasks}"]
    elif service == "trainer":
        publish += reading(journal)
    elif service in ("agent", "gateway"):
        publish += [*consuming(tasks, "agents"), *reading(tasks), *reading(journal), *reading(ev)]
    elif service in ("cli", "monitor"):
        for stream in app_streams(name):
            publish += [
                *reading(stream),
                informing(stream, subjects.APP_API_PREFIX if service == "monitor" else "$JS.API"),
            ]
    elif service == "feed":
        publish += feed_state(name)
    account = {"monitor": MON, "feed": FEED}.get(service, APP)
    return User(
        name=service, account=account, publish=tuple(dict.fromkeys(publish)), subscribe=tuple(dict.fromkeys(subscribe))
    )
