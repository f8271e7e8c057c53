"""The configuration of a cluster of servers that PEARL runs: what the job file says, and what each server is given."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.connect import server_url
from services.jobfile import ConfigError, JobFile, NatsSection, load
from services.nats_server.config import ClusterPlace, ServerPlace, server_config
from services.nats_server.keys import KeyFileError, ensure_secret
from services.nats_server.permissions import users
from services.nats_server.process import EmbeddedServer, ServerError, running_file

SERVERS = ("10.0.0.1:4222", "10.0.0.2:4222", "10.0.0.3:4222")
JOB = msgspec.structs.replace(JobFile(), nats=NatsSection(cluster=SERVERS, replicas=3))
NODES = '\n[[nodes]]\nname = "r"\nzone = "reserved"\ngpus = 1\n[[nodes]]\nname = "t"\nzone = "training"\ngpus = 1\n'


def text_of(index: int) -> str:
    place = ServerPlace(
        host=f"10.0.0.{index + 1}",
        port=4222,
        cluster=ClusterPlace(index=index, routes=tuple(f"10.0.0.{n}:6222" for n in (1, 2, 3)), secret="s3cret"),
        store_dir=Path("/store"),
        log_file=Path("/log"),
        pid_file=Path("/pid"),
    )
    return server_config(JOB, {user.name: f"U{user.name}" for user in users(JOB)}, place)


def test_each_server_listens_at_its_address_and_knows_the_other_two():
    for index in range(3):
        text = text_of(index)
        assert f'server_name: "pearl-demo-{index}"' in text
        assert f'listen: "10.0.0.{index + 1}:4222"' in text
        assert f'listen: "10.0.0.{index + 1}:6222"' in text
        others = [n for n in (1, 2, 3) if n != index + 1]
        routes = next(line for line in text.splitlines() if line.strip().startswith("routes:"))
        assert all(f"10.0.0.{n}:6222" in routes for n in others)
        assert f"10.0.0.{index + 1}:6222" not in routes
        assert 'password: "s3cret"' in text


async def test_clients_are_given_all_servers():
    assert await server_url(JOB) == ",".join(f"nats://{each}" for each in SERVERS)
    assert not JOB.nats.local and JobFile().nats.local


def test_a_server_of_a_cluster_keeps_its_files_apart_and_must_be_named(tmp_path: Path):
    assert running_file(JOB, 1) != running_file(JOB, 2) != running_file(JOB)
    EmbeddedServer(JOB, 2)
    for index in (None, 3, -1):
        with pytest.raises(ServerError):
            EmbeddedServer(JOB, index)
    with pytest.raises(ServerError, match=r"has no nats\.cluster"):
        EmbeddedServer(JobFile(), 0)


def test_the_secret_of_the_routes_is_made_once_and_kept(tmp_path: Path):
    first = ensure_secret(tmp_path, "routes")
    assert first == ensure_secret(tmp_path, "routes") and len(first) == 32
    assert (tmp_path / "routes.secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "routes.secret").write_text('x" }')
    with pytest.raises(KeyFileError, match=r"routes\.secret"):
        ensure_secret(tmp_path, "routes")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('cluster = ["a:4222", "b:4222"]', ("nats.cluster has 2 servers", "three or five")),
        ('cluster = ["a:4222", "b:4222", "c:4222", "d:4222"]', ("nats.cluster has 4 servers", "three or five")),
        ('cluster = ["a:4222", "b:4222", "c:63536"]', ("port from 1 to 63535",)),
        ('cluster = ["a:4222", "b:4222", "c"]', ("'c' is not \"host:port\"",)),
        ('cluster = ["a:4222", "b:4222", "c:64000"]', ("port from 1 to 63535",)),
        ('cluster = ["a:4222", "a:4222", "c:4222"]', ("twice",)),
        ('embedded = false\nurl = "nats://a"\ncluster = ["a:1", "b:1", "c:1"]', ("nats.embedded = true",)),
        ("replicas = 3", ("nats.replicas = 3 with 1 server", "nats.cluster")),
        ('cluster = ["a:1", "b:1", "c:1"]\nreplicas = 5', ("nats.replicas = 5 with 3 server",)),
    ],
)
def test_what_makes_no_cluster_is_refused(tmp_path: Path, text: str, words: tuple[str, ...]):
    path = tmp_path / "job.toml"
    path.write_text(f"[nats]\n{text}\n{NODES}")
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        'cluster = ["a:1", "b:4222", "c:63535"]\nreplicas = 3',
        'embedded = false\nurl = "nats://a"\nreplicas = 3',  # of servers that are not ours it is not known how many there are
    ],
)
def test_what_makes_a_cluster_is_taken(tmp_path: Path, text: str):
    path = tmp_path / "job.toml"
    path.write_text(f"[nats]\n{text}\n{NODES}")
    assert load(path).nats.replicas == 3
