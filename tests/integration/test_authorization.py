"""Who may write what, on a real server: every way of getting a byte into the role table without being its writer.

The forbidden users here speak raw NATS, since the point is what the server lets through, not what our client offers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from messages.ids import Epoch, Gpu, NodeId, PolicyVersion, Role, WorkerId, Zone
from messages.subjects import LEASE_KEY, TABLE_KEY, lease_bucket, roles_bucket, roles_feed
from pearl_state.codec import encode_table
from pearl_state.model import RoleTable, Row
from pearl_state.store import Deposed, Lease, TableStore
from pearl_state.watch import Replica
from services.connect import connect, connect_tables
from services.jobfile import ConfigError, JobFile, JobSection, NatsSection, NodeSection
from services.nats_server.keys import seed_path
from services.nats_server.permissions import SENDS, inbox_prefix
from services.nats_server.process import EmbeddedServer, ServerError, keys_dir

JOB = "auth"
KEY = f"$KV.{roles_bucket(JOB)}.{TABLE_KEY}"
FEED = roles_feed(JOB)
EVENT = f"pearl.{JOB}.ev.gpu_available.n1"
GET_TABLE = f"roles.api.DIRECT.GET.KV_{roles_bucket(JOB)}.{KEY}"
GET_EVENT = f"$JS.API.DIRECT.GET.{JOB}_EV.{EVENT}"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def table(epoch: int, version: int = 0) -> RoleTable:
    row = Row(worker=WorkerId("n1-w0"), gpus=(Gpu(NodeId("n1"), 0),), zone=Zone.RESERVED, role=Role.COLOCATED)
    return RoleTable(job=JOB, epoch=Epoch(epoch), rows=(row,), policy_version=PolicyVersion(version))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def job(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[JobFile]:
    """A running server with everything a job needs, and a first table in it."""
    made = JobFile(
        job=JobSection(name=JOB, data_dir=str(tmp_path_factory.mktemp("auth"))),
        nodes=(NodeSection(name="n1", zone=Zone.RESERVED, gpus=2),),
    )
    server = EmbeddedServer(made)
    await server.start()
    try:
        await server.prepare()
        bus = await connect_tables(made)
        store = TableStore(bus, JOB)
        await store.restore()
        await store.write(table(1))
        await bus.close()
        yield made
    finally:
        await server.stop()


class Intruder:
    """A raw connection as one user, and what the server refused it."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.client = Client()

    async def note(self, error: Exception) -> None:
        self.refused.append(str(error).lower())

    async def settle(self) -> None:
        """All that was sent has been judged. nats-py's ping overtakes what is still in its buffer: only the second is behind it."""
        await self.client.flush()
        await self.client.flush()

    async def publish(self, subject: str, data: bytes = b"{}", reply: str = "", headers: dict | None = None) -> bool:
        """Whether the server let it through. A round trip afterwards brings back any refusal."""
        before = len(self.refused)
        await self.client.publish(subject, data, reply=reply, headers=headers)
        await self.settle()
        return len(self.refused) == before


@asynccontextmanager
async def as_user(job: JobFile, user: str) -> AsyncIterator[Intruder]:
    intruder = Intruder()
    intruder.client = await nats.connect(
        (await EmbeddedServer(job).start()).url,
        nkeys_seed=str(seed_path(keys_dir(job), user)),
        inbox_prefix=inbox_prefix(user).encode(),
        error_cb=intruder.note,
        allow_reconnect=False,
    )
    try:
        yield intruder
    finally:
        await intruder.client.close()


@asynccontextmanager
async def table_untouched(job: JobFile) -> AsyncIterator[None]:
    """The bucket's revision and bytes are the same afterwards."""
    bus = await connect_tables(job)
    try:
        before = await bus.get(roles_bucket(JOB), TABLE_KEY)
        assert before is not None
        yield
        assert await bus.get(roles_bucket(JOB), TABLE_KEY) == before
    finally:
        await bus.close()


@pytest.mark.parametrize("user", sorted(SENDS))
async def test_no_service_can_put_the_table_or_speak_on_its_feed(job: JobFile, user: str) -> None:
    async with table_untouched(job), as_user(job, user) as intruder:
        assert not await intruder.publish(KEY, encode_table(table(99)))
        assert not await intruder.publish(FEED, encode_table(table(99)))
        assert not await intruder.publish(f"$JS.API.STREAM.PURGE.KV_{roles_bucket(JOB)}")
        assert not await intruder.publish(f"$JS.API.STREAM.DELETE.KV_{roles_bucket(JOB)}")
        assert not await intruder.publish(f"$JS.API.STREAM.MSG.GET.KV_{roles_bucket(JOB)}", reply=KEY)


async def test_a_request_to_oneself_with_the_key_as_reply_is_refused(job: JobFile) -> None:
    async with table_untouched(job), as_user(job, "agent") as intruder:
        heard = await intruder.client.subscribe(f"pearl.{JOB}.tok.me")
        # No user may both send and hear here; a worker sends, the agent answers to the reply subject it is given.
        async with as_user(job, "rollout_worker") as worker:
            assert await worker.publish(f"pearl.{JOB}.tok.me", reply=KEY)
        message = await heard.next_msg(timeout=2)
        assert message.reply == KEY
        assert not await intruder.publish(message.reply, encode_table(table(99)))


@pytest.mark.parametrize("target", [KEY, FEED])
async def test_a_publish_acknowledgement_cannot_be_steered_into_the_table(job: JobFile, target: str) -> None:
    async with table_untouched(job), replica(job) as copy, as_user(job, "feed") as intruder:
        assert await intruder.publish(EVENT, reply=target)
        # A second one, to an inbox: once it is back, the first was processed.
        await intruder.client.request(EVENT, b"{}", timeout=2)
        assert copy.table == table(1)


@pytest.mark.parametrize("target", [KEY, FEED])
@pytest.mark.parametrize("source", [GET_TABLE, GET_EVENT])
async def test_a_direct_get_cannot_be_steered_into_the_table(job: JobFile, source: str, target: str) -> None:
    async with table_untouched(job), replica(job) as copy, as_user(job, "agent") as intruder:
        await intruder.publish(source, b"", reply=target)
        await intruder.client.request(GET_TABLE, b"", timeout=2)
        assert copy.table == table(1)


async def test_a_stored_message_with_forged_headers_does_not_pass_for_the_table(job: JobFile) -> None:
    """An agent stores a table with the headers of the bucket, and lets a direct get deliver it on the feed's subject."""
    subject = f"pearl.{JOB}.ev.trajectory_completed.-"
    forged = encode_table(table(99))
    async with table_untouched(job), replica(job) as copy, as_user(job, "agent") as intruder:
        headers = {"Nats-Subject": KEY, "Nats-Stream": f"KV_{roles_bucket(JOB)}"}
        assert await intruder.publish(subject, forged, headers=headers)
        get = f"$JS.API.DIRECT.GET.{JOB}_EV.{subject}"
        assert (await intruder.client.request(get, b"", timeout=2)).data == forged
        await intruder.publish(get, b"", reply=FEED)
        await intruder.client.request(get, b"", timeout=2)
        # The broker's own headers take the place of the forged ones, so that the replica sees where it comes from.
        assert copy.refused == 1
        assert copy.table == table(1)


async def test_a_preemption_feed_publishes_its_events_and_nothing_else(job: JobFile) -> None:
    async with as_user(job, "feed") as intruder:
        assert await intruder.publish(EVENT)
        assert await intruder.publish(f"pearl.{JOB}.ev.gpu_reclaimed.n1")
        for subject in (
            f"pearl.{JOB}.ev.budget_changed.-",
            f"pearl.{JOB}.ev.gpu_free.n1",
            f"pearl.{JOB}.cmd.node.n1",
            f"pearl.{JOB}.task.0",
            f"$KV.{JOB}_state.elastic_scheduler",
            f"$JS.API.STREAM.INFO.{JOB}_EV",
            "anything",
        ):
            assert not await intruder.publish(subject), subject


async def test_what_the_server_sends_for_a_feed_cannot_become_an_event(job: JobFile) -> None:
    """It stores what it likes under its own key; a direct get of it, or an acknowledgement, stays out of APP."""
    key = f"$KV.{JOB}_state.feed"
    budget = f"pearl.{JOB}.ev.budget_changed.-"
    bus = await connect(job, "feed")
    assert await bus.put(f"{JOB}_state", "feed", b"forged", last_revision=None)
    assert (await bus.get(f"{JOB}_state", "feed") or pytest.fail()).data == b"forged"
    await bus.close()
    async with as_user(job, "feed") as intruder:
        get = f"$JS.API.DIRECT.GET.KV_{JOB}_state.{key}"
        assert await intruder.publish(get, b"", reply=budget)
        assert await intruder.publish(EVENT, reply=budget)
        await intruder.client.request(get, b"", timeout=2)
        await intruder.client.request(EVENT, b"{}", timeout=2)
    reader = await connect(job, "agent")
    assert await reader.last(f"{JOB}_EV", budget) is None
    assert await reader.last(f"{JOB}_EV", EVENT) is not None
    await reader.close()


async def test_a_writer_of_one_key_cannot_wipe_the_bucket(job: JobFile) -> None:
    """A roll-up header under one's own key would purge all the others' checkpoints, where a bucket allows it."""
    router = await connect(job, "router")
    await router.put(f"{JOB}_state", "router", b"checkpoint", last_revision=None)
    async with as_user(job, "feed") as intruder:
        for scope in ("all", "sub"):
            await intruder.publish(f"$KV.{JOB}_state.feed", b"mine", headers={"Nats-Rollup": scope})
    assert (await router.get(f"{JOB}_state", "router") or pytest.fail()).data == b"checkpoint"
    await router.close()


async def test_a_guessed_message_id_cannot_make_an_event_look_repeated(job: JobFile) -> None:
    """The stream knows a message by its id, whoever sent it: so ids are sealed with their user's key."""
    subject = f"pearl.{JOB}.ev.training_begin.-"
    async with as_user(job, "feed") as intruder:
        assert await intruder.publish(EVENT, b"{}", headers={"Nats-Msg-Id": "training.begin/1:3"})
        await intruder.client.request(EVENT, b"{}", timeout=2)
    pipeline = await connect(job, "pipeline_scheduler")
    seq = await pipeline.publish_durable(subject, b"begin", msg_id="training.begin/1:3")
    assert await pipeline.publish_durable(subject, b"begin", msg_id="training.begin/1:3") == seq
    stored = await pipeline.last(f"{JOB}_EV", subject)
    await pipeline.close()
    assert stored is not None and (stored.data, stored.seq) == (b"begin", seq)


async def test_a_monitor_hears_and_reads_what_a_feed_publishes(job: JobFile) -> None:
    monitor, feed = await connect(job, "monitor"), await connect(job, "preemption_feed")
    heard = await monitor.subscribe(f"pearl.{JOB}.ev.>")
    assert await monitor.last(f"{JOB}_EV", "pearl.none") is None  # an answer: the subscription before it is in force
    seq = await feed.publish_durable(f"pearl.{JOB}.ev.gpu_reclaimed.n2", b"{}", msg_id="once")
    assert await feed.publish_durable(f"pearl.{JOB}.ev.gpu_reclaimed.n2", b"{}", msg_id="once") == seq
    operator = await connect(job, "cli")
    await operator.publish_durable(f"pearl.{JOB}.ev.gpu_reclaimed.n3", b"{}", msg_id="by hand")
    deliveries = [await heard.next(2) for _ in range(3)]
    # Live, a repeated publish is heard again; the stream keeps it once.
    assert [each and each.subject.rpartition(".")[2] for each in deliveries] == ["n2", "n2", "n3"]
    read = [each.seq async for each in monitor.read(f"{JOB}_EV", f"pearl.{JOB}.ev.gpu_reclaimed.n2")]
    assert read == [seq]
    assert (await monitor.bounds(f"{JOB}_EV")).last_seq == (await operator.bounds(f"{JOB}_EV")).last_seq == seq + 1
    await operator.close()
    await monitor.close()
    await feed.close()


async def test_a_monitor_publishes_nothing_and_its_reads_write_nothing(job: JobFile) -> None:
    async with as_user(job, "feed") as feed:
        await feed.client.request(EVENT, b"{}", timeout=2)
    async with table_untouched(job), replica(job, "monitor") as copy, as_user(job, "monitor") as intruder:
        for subject in (EVENT, f"pearl.{JOB}.tel.node_heartbeat.n1", f"pearl.{JOB}.dead.monitor", "_INBOX_agent.x"):
            assert not await intruder.publish(subject), subject
        before = await intruder.client.request(GET_EVENT, b"", timeout=2)
        info = f"app.api.STREAM.INFO.{JOB}_EV"
        assert b'"first_seq"' in (await intruder.client.request(info, b"", timeout=2)).data
        assert await intruder.publish(info, b"", reply=EVENT)
        # It may read; but a reply steered to a stream's subject stays in its own account.
        assert await intruder.publish(GET_EVENT, b"", reply=EVENT)
        assert await intruder.publish(GET_TABLE, b"", reply=EVENT)
        after = await intruder.client.request(GET_EVENT, b"", timeout=2)
        assert (after.headers or {})["Nats-Sequence"] == (before.headers or {})["Nats-Sequence"]
        assert copy.table == table(1)


async def test_a_worker_reads_nothing_and_reports_only_as_a_worker(job: JobFile) -> None:
    async with as_user(job, "rollout_worker") as intruder:
        assert await intruder.publish(f"pearl.{JOB}.ev.worker_ready.n1-w0")
        for subject in (
            GET_TABLE,
            GET_EVENT,
            EVENT,
            f"pearl.{JOB}.cmd.worker.n1-w1",
            f"pearl.{JOB}.ev.worker_gone.n1-w0",
        ):
            assert not await intruder.publish(subject), subject


@pytest.mark.parametrize("user", ["agent", "monitor", "router"])
async def test_nobody_listens_on_another_ones_inbox(job: JobFile, user: str) -> None:
    async with as_user(job, user) as intruder:
        await intruder.client.subscribe("_INBOX_orchestrator.>")
        await intruder.settle()
        assert any("subscription" in refusal for refusal in intruder.refused)


async def test_one_checkpoint_key_each(job: JobFile) -> None:
    async with as_user(job, "router") as intruder:
        assert await intruder.publish(f"$KV.{JOB}_state.router")
        assert not await intruder.publish(f"$KV.{JOB}_state.orchestrator")


@asynccontextmanager
async def replica(job: JobFile, user: str = "agent") -> AsyncIterator[Replica]:
    bus = await connect(job, user)
    copy = Replica()
    await copy.start(bus, JOB)
    try:
        yield copy
    finally:
        await copy.stop()
        await bus.close()


async def test_a_write_reaches_the_replicas_and_a_stale_writer_is_deposed(job: JobFile) -> None:
    first, second = await connect_tables(job), await connect_tables(job)
    try:
        async with replica(job) as copy, replica(job, "monitor") as seen_by_monitor:
            old, new = TableStore(first, JOB), TableStore(second, JOB)
            assert await old.restore() == await new.restore()
            await new.write(table(2, version=7))
            async with asyncio.timeout(2):
                assert (await copy.wait_changed(1)).policy_version == 7
                assert (await seen_by_monitor.wait_changed(1)).policy_version == 7
            with pytest.raises(Deposed):
                await old.write(table(2, version=8))
            assert (await new.restore()) == table(2, version=7)
            for bucket, key in ((roles_bucket(JOB), TABLE_KEY), (lease_bucket(JOB), LEASE_KEY)):
                assert await first.get(bucket, key, from_leader=True) == await first.get(bucket, key)
            with pytest.raises(AssertionError):
                await new.write(table(4))
    finally:
        await first.close()
        await second.close()


async def test_a_standby_takes_over_after_the_holder_dies_and_epochs_go_on(job: JobFile) -> None:
    first, second = await connect_tables(job), await connect_tables(job)
    try:
        a, b = Lease(first, JOB, "a", ttl_s=1), Lease(second, JOB, "b", ttl_s=1)
        assert await a.acquire()
        assert not await b.acquire()
        await a.renew()
        store_a = TableStore(first, JOB)
        held = await store_a.restore()
        assert held is not None
        await store_a.write(table(held.epoch + 1, held.policy_version))
        # `a` is killed: it renews no more. The standby looks again and again.
        async with asyncio.timeout(5):
            assert await b.wait_acquire(asyncio.Event(), poll_s=0.1)
        store_b = TableStore(second, JOB)
        restored = await store_b.restore()
        assert restored is not None and restored.epoch == held.epoch + 1
        await store_b.write(table(restored.epoch + 1, restored.policy_version))
        # `a` was only slow: it learns that it is out, from either guard.
        with pytest.raises(Deposed):
            await store_a.write(table(restored.epoch + 1, version=9))
        with pytest.raises(Deposed):
            await a.renew()
        await b.release()
    finally:
        await first.close()
        await second.close()


async def test_the_server_comes_back_with_the_same_port_and_store(tmp_path: Path) -> None:
    made = JobFile(job=JobSection(name="again", data_dir=str(tmp_path)))
    server = EmbeddedServer(made)
    try:
        first = await server.start()
        await server.prepare()
        assert seed_path(keys_dir(made), "agent").stat().st_mode & 0o777 == 0o600
        bus = await connect_tables(made)
        revision = await bus.put("again_roles", TABLE_KEY, b"kept", last_revision=0)
        await bus.close()
        await server.stop()
        assert server.pid is None
        second = await server.start()
        assert second.url == first.url and second.pid != first.pid
        bus = await connect_tables(made)
        entry = await bus.get("again_roles", TABLE_KEY)
        await bus.close()
        assert entry is not None and (entry.data, entry.revision) == (b"kept", revision)
        # With another node in the job file there are other permissions: it is restarted, not adopted.
        assert await EmbeddedServer(made).start() == second
        more = JobFile(job=made.job, nodes=(NodeSection(name="n1", zone=Zone.RESERVED, gpus=1),))
        third = await EmbeddedServer(more).start()
        assert third.url == second.url and third.pid != second.pid
    finally:
        await server.stop()


async def test_a_taken_port_and_an_unknown_service_are_clear_errors(job: JobFile, tmp_path: Path) -> None:
    port = int((await EmbeddedServer(job).start()).url.rpartition(":")[2])
    other = JobFile(job=JobSection(name="other", data_dir=str(tmp_path)), nats=NatsSection(port=port))
    with pytest.raises(ServerError, match=f"port {port} is taken"):
        await EmbeddedServer(other).start()
    with pytest.raises(ConfigError, match="no user for service 'nobody'"):
        await connect(job, "nobody")
