"""Permissions follow from who sends what, as the comments in messages/ say; and the configuration's fixed choices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import messages
from messages import subjects
from messages.envelope import Message
from messages.ids import Zone
from services.durable import CTRL, durable_state
from services.jobfile import JobFile, JobSection, NodeSection
from services.nats_server.config import ServerPlace, server_config
from services.nats_server.permissions import FEED, MON, SENDS, said_on, users

JOB = JobFile(job=JobSection(name="j"), nodes=(NodeSection(name="n1", zone=Zone.RESERVED, gpus=1),))
SENDER = re.compile(r"^# ([^\n]+?) -> [^\n]*\n(?:#[^\n]*\n)*class (\w+)\(", re.MULTILINE)
SPELLED = {
    "executor": ("cluster_rebuilder", "toggle_manager"),
    "executors": ("cluster_rebuilder", "toggle_manager"),
    "anyone": ("cli",),
    "preemption_feed": ("feed",),
}
ELSEWHERE = {"Assignment", "NotNow", "TokenChunk", "AttemptLogged", "WorkerLost", "DeadLetter"}
"""Replies (they go where the request says), a file's records, an input that never travels, and what everyone sends."""
MORE = {("pipeline_scheduler", "Evaluated")}
"""Held-out episodes end at the pipeline scheduler, which may sum them up."""


def said_in_comments() -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for path in sorted(Path(messages.__file__ or "").parent.glob("*.py")):
        for senders, name in SENDER.findall(path.read_text(encoding="utf-8")):
            if name not in ELSEWHERE:
                for sender in senders.split(" | "):
                    found.update((user, name) for user in SPELLED.get(sender, (sender,)))
    return found


def test_each_user_sends_what_the_messages_say_it_sends() -> None:
    assert {
        (user, kind.__name__) for user, kinds in SENDS.items() for kind in kinds
    } - MORE == said_in_comments() - MORE


def test_every_kind_that_travels_by_itself_has_a_sender() -> None:
    sent = {kind for kinds in SENDS.values() for kind in kinds}
    travels = {kind for kind, route in subjects.ROUTES.items() if route.family not in ("reply", "dead")}
    assert travels == sent


@pytest.mark.parametrize("kind", [kind for kind, route in subjects.ROUTES.items() if route.family != "reply"])
def test_patterns_are_as_narrow_as_the_route(kind: type[Message]) -> None:
    pattern = said_on("j", kind)
    assert pattern.startswith("pearl.j.") and ">" not in pattern and pattern.count("*") <= 1


def test_only_the_table_writer_may_write_what_is_in_ctrl() -> None:
    ctrl = [entry.spec.name for entry in durable_state("j") if entry.account == CTRL]
    assert ctrl == ["j_roles", "j_lease"]
    for user in users(JOB):
        touches = [subject for subject in user.publish if any(f"$KV.{name}." in subject for name in ctrl)]
        # Reading goes by a subject that ends in the key; only a bare key is a write.
        writes = [subject for subject in touches if subject.startswith("$KV.")]
        assert bool(writes) is (user.name == "orchestrator_tables"), user
        assert not any(subject.startswith("pearl.j.roles") for subject in user.publish), user


def test_only_the_table_writer_asks_leaders_for_what_is_stored() -> None:
    asks = {(user.name, each) for user in users(JOB) for each in user.publish if ".STREAM.MSG.GET." in each}
    assert asks == {("orchestrator_tables", f"$JS.API.STREAM.MSG.GET.KV_{bucket}") for bucket in ("j_roles", "j_lease")}


def test_nobody_but_administrators_may_say_or_hear_everything() -> None:
    for user in users(JOB):
        assert user.admin or ">" not in (*user.publish, *user.subscribe), user
        own = f"_INBOX_{user.name}.>"
        assert user.admin or [each for each in user.subscribe if each.startswith("_INBOX")] == [own]
    assert {user.name: user.account for user in users(JOB) if user.account in (MON, FEED)} == {
        "monitor": MON,
        "feed": FEED,
    }


def test_the_fixed_choices_of_the_server() -> None:
    keys = {user.name: f"U{index}" for index, user in enumerate(users(JOB))}
    place = ServerPlace(port=4222, store_dir=Path("/s"), log_file=Path("/l"), pid_file=Path("/p"))
    text = server_config(JOB, keys, place)
    assert 'listen: "127.0.0.1:4222"' in text
    assert "sync_interval: always" in text
    assert "js_ack_fc_v2: false" in text
    assert "max_payload: 8388608" in text
    assert "allow_responses" not in text
    assert all(f"nkey: {key}" in text for key in keys.values())
    assert text == server_config(JOB, keys, place)
