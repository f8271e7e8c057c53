"""The server's configuration as text: accounts, users, exports, bounds. Pure.

For the embedded server, and (`accounts_config`) to be included in the configuration of a server of one's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from messages.envelope import MAX_MESSAGE_BYTES
from messages.subjects import APP_API_PREFIX, ROLES_API_PREFIX
from services.durable import APP, CTRL, MIB, durable_state
from services.jobfile import JobFile
from services.nats_server.permissions import (
    FEED,
    MON,
    SYS,
    User,
    app_streams,
    feed_events,
    feed_state,
    informing,
    reading,
    role_reading,
    users,
)

OLDEST: Final = (2, 12)
NEWEST: Final = (2, 15)
"""Server releases that were tried. 2.16 changes the acknowledgement subjects, which the client does not follow."""

_SPARE_STORE: Final = 256 * MIB
"""Store beyond the sum of all bounds, for indexes and consumers' state."""

_TAPPED: Final = ("ev", "task", "journal", "dead", "cmd", "gen", "tok", "tel", "assign")
"""Families of subjects that the monitor may listen to."""


class ClusterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What one server of a cluster knows of the others."""

    index: int
    routes: tuple[str, ...]  # host:port at which each server listens for the others, this one's included
    secret: str  # without it no other server is let in


class ServerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where one embedded server listens and keeps its files."""

    host: str = "127.0.0.1"
    port: int
    cluster: ClusterPlace | None = None
    store_dir: Path
    log_file: Path
    pid_file: Path


def server_name(job: str, index: int | None = None) -> str:
    """The embedded server's name, by which it is recognised when it answers. `index`: its place in a cluster."""
    return f"pearl-{job}" if index is None else f"pearl-{job}-{index}"


def server_config(job: JobFile, keys: Mapping[str, str], place: ServerPlace) -> str:
    """The whole configuration of the embedded server. `keys`: each user's public nkey."""
    store = sum(entry.spec.max_bytes for entry in durable_state(job.job.name)) + _SPARE_STORE
    cluster = place.cluster
    return "\n".join(
        [
            f"server_name: {_quoted(server_name(job.job.name, None if cluster is None else cluster.index))}",
            f"listen: {_quoted(f'{place.host}:{place.port}')}",
            f"max_payload: {MAX_MESSAGE_BYTES}",
            f"max_pending: {8 * MAX_MESSAGE_BYTES}",
            f"log_file: {_quoted(str(place.log_file))}",
            f"pid_file: {_quoted(str(place.pid_file))}",
            "jetstream {",
            f"  store_dir: {_quoted(str(place.store_dir))}",
            "  sync_interval: always  # acknowledged means on disk",
            f"  max_file_store: {store}",
            "}",
            *(() if cluster is None else _cluster(job, cluster)),
            "feature_flags { js_ack_fc_v2: false }",
            accounts_config(job, keys),
        ]
    )


def _cluster(job: JobFile, cluster: ClusterPlace) -> list[str]:
    """The routes between the servers. They carry everything and are not encrypted: a private network, or one's own server."""
    others = [route for index, route in enumerate(cluster.routes) if index != cluster.index]
    return [
        "cluster {",
        f"  name: {_quoted(server_name(job.job.name))}",
        f"  listen: {_quoted(cluster.routes[cluster.index])}",
        f"  authorization {{ user: route, password: {_quoted(cluster.secret)} }}",
        f"  routes: [{', '.join(_quoted(f'nats://route:{cluster.secret}@{route}') for route in others)}]",
        "}",
    ]


def accounts_config(job: JobFile, keys: Mapping[str, str]) -> str:
    """Accounts and users of a job: all that another server needs beside its listener, TLS and JetStream."""
    everyone = users(job)

    def members(account: str) -> list[str]:
        return [line for user in everyone if user.account == account for line in _user(user, keys[user.name])]

    return "\n".join(
        [
            f"system_account: {SYS}",
            "accounts {",
            f"  {SYS} {{",
            "    users: [",
            *members(SYS),
            "    ]",
            "  }",
            f"  {CTRL} {{  # the role table and the lease; no reply of another account can land here",
            "    jetstream: enabled",
            "    users: [",
            *members(CTRL),
            "    ]",
            "    exports: [",
            *(
                f"      {{ service: {_quoted(subject)}, {_STREAMED}accounts: [{APP}, {MON}] }}"
                for subject in role_reading(job.job.name, "$JS.API")
            ),
            f"      {{ stream: {_quoted(_feed(job))}, accounts: [{APP}, {MON}] }}",
            "    ]",
            "  }",
            f"  {APP} {{",
            "    jetstream: enabled",
            "    users: [",
            *members(APP),
            "    ]",
            "    imports: [",
            *_role_imports(job),
            "    ]",
            "    exports: [",
            *(f"      {{ stream: {_quoted(subject)}, accounts: [{MON}] }}" for subject in _tapped(job)),
            *(
                f"      {{ service: {_quoted(subject)}, {_STREAMED}accounts: [{MON}] }}"
                for subject in _read_by_monitor(job)
            ),
            *(
                f"      {{ service: {_quoted(informing(stream))}, accounts: [{MON}] }}"
                for stream in app_streams(job.job.name)
            ),
            *(
                f"      {{ service: {_quoted(subject)}, accounts: [{FEED}] }}"
                for subject in (*feed_events(job.job.name), *feed_state(job.job.name))
            ),
            "    ]",
            "  }",
            f"  {FEED} {{  # capacity events and its own position; nothing else of it arrives anywhere",
            "    users: [",
            *members(FEED),
            "    ]",
            "    imports: [",
            *(
                f"      {{ service: {{ account: {APP}, subject: {_quoted(subject)} }} }}"
                for subject in (*feed_events(job.job.name), *feed_state(job.job.name))
            ),
            "    ]",
            # What enters APP as a service is not handed on to MON as a stream: the monitor hears it here.
            "    exports: [",
            *(f"      {{ stream: {_quoted(subject)}, accounts: [{MON}] }}" for subject in feed_events(job.job.name)),
            "    ]",
            "  }",
            f"  {MON} {{  # hears and reads everything; nothing it sends arrives anywhere",
            "    users: [",
            *members(MON),
            "    ]",
            "    imports: [",
            *_role_imports(job),
            *(f"      {{ stream: {{ account: {APP}, subject: {_quoted(subject)} }} }}" for subject in _tapped(job)),
            *(
                f"      {{ stream: {{ account: {FEED}, subject: {_quoted(subject)} }} }}"
                for subject in feed_events(job.job.name)
            ),
            *(
                f"      {{ service: {{ account: {APP}, subject: {_quoted(subject)} }} }}"
                for subject in _read_by_monitor(job)
            ),
            *(
                f"      {{ service: {{ account: {APP}, subject: {_quoted(informing(stream))} }}, "
                f"to: {_quoted(informing(stream, APP_API_PREFIX))} }}"
                for stream in app_streams(job.job.name)
            ),
            "    ]",
            "  }",
            "}",
            "",
        ]
    )


_STREAMED: Final = "response: stream, "
"""A direct get may answer with many messages."""


def _feed(job: JobFile) -> str:
    return f"pearl.{job.job.name}.roles.>"


def _tapped(job: JobFile) -> tuple[str, ...]:
    prefix = f"pearl.{job.job.name}"
    return tuple(f"{prefix}.{family}" if family == "assign" else f"{prefix}.{family}.>" for family in _TAPPED)


def _read_by_monitor(job: JobFile) -> tuple[str, ...]:
    return tuple(subject for stream in app_streams(job.job.name) for subject in reading(stream))


def _role_imports(job: JobFile) -> list[str]:
    pairs = zip(role_reading(job.job.name, "$JS.API"), role_reading(job.job.name, ROLES_API_PREFIX), strict=True)
    return [
        *(
            f"      {{ service: {{ account: {CTRL}, subject: {_quoted(theirs)} }}, to: {_quoted(ours)} }}"
            for theirs, ours in pairs
        ),
        f"      {{ stream: {{ account: {CTRL}, subject: {_quoted(_feed(job))} }} }}",
    ]


def _user(user: User, public_key: str) -> list[str]:
    if user.admin:
        return [f"      {{ nkey: {public_key} }}  # {user.name}"]
    return [
        f"      {{ nkey: {public_key}, permissions: {{  # {user.name}",
        "          publish: { " + ('deny: [">"]' if not user.publish else f"allow: [{_list(user.publish)}]") + " }",
        f"          subscribe: {{ allow: [{_list(user.subscribe)}] }}",
        "      } }",
    ]


def _list(subjects: tuple[str, ...]) -> str:
    return ", ".join(_quoted(subject) for subject in subjects)


def _quoted(text: str) -> str:
    """A string of the server's configuration language: JSON's escapes are understood."""
    return json.dumps(text, ensure_ascii=False)
