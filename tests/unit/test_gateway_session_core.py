"""The core of sessions under any harness: whatever it repeats, rewrites or forgets, contexts are what the engine saw."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from messages.agent import VersionSpan
from services.edge.request_state import Reply
from services.router.gateway.sessions import (
    NO_PARENT,
    Session,
    SessionBook,
    Turn,
    chat_digests,
    end_of,
    extended,
    turn_seed,
)
from tests.gateway_world import task_of


def session_of(**changes: object) -> Session:
    fields: dict = {"id": "s", "secret": b"k", "holding": "h", "task": task_of(), "opened_ms": 0, "touched_ms": 0}
    return Session(**{**fields, **changes})


def reply_of(tokens: list[int], version: int = 3) -> Reply:
    return Reply(
        tokens=tokens,
        logprobs=[-1.0] * len(tokens),
        spans=(VersionSpan(version, 0, len(tokens)),),
        finish="stop",
        attempts=1,
        worker="w",
        cached_tokens=0,
        queue_s=0.0,
        decode_s=0.0,
    )


Step = tuple[int, int, bool]
"""Which history to continue (an index into those there are), what to say, whether to change a word of it first."""


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.booleans()), min_size=1, max_size=14))
@settings(max_examples=150, deadline=None)
def test_contexts_are_what_the_engine_saw(steps: list[Step]) -> None:
    session = session_of()
    histories: list[tuple[list[dict], list[int]]] = [([], [])]  # a chat, and its tokens if the gateway made its replies
    for number, (which, word, rewritten) in enumerate(steps):
        chat, tokens = histories[which % len(histories)]
        chat = [dict(message) for message in chat]
        if rewritten and chat:
            chat[-1]["content"] += " rewritten"
        chat.append({"role": "user", "content": f"word {word}"})
        digests = chat_digests(chat, None)
        parent, covered = session.of_messages(digests)
        fresh = [1000 + word] if parent != NO_PARENT else [2000 + len(chat), 1000 + word]
        asked = session.ask(parent, fresh, number, digest=digests[-1])
        if rewritten or not tokens:
            assert covered <= max(0, len(chat) - 2)
        else:
            assert session.context(parent) == tokens and covered == len(chat) - 1, "history is as it was generated"
        context = [*session.context(parent), *fresh]
        made = [number, 7]
        text = f"reply {number}"
        session.took(
            Turn.of(asked, session.request_id(asked), reply_of(made), text, number),
            extended(asked.digest, {"role": "assistant", "content": text}),
        )
        session.stopped(number)
        assert session.context(len(session.turns) - 1) == [*context, *made]
        histories.append(([*chat, {"role": "assistant", "content": text}], [*context, *made]))
    trained = session.trained()
    records = session.records(99)
    assert [record.turn for record in records] == list(range(len(trained)))
    whole = [token for record in records for token in (*record.prompt_new, *record.reply)]
    assert whole == session.context(len(session.turns) - 1), "the journal says what the last turn's engine saw"
    result = session.result("completed", 1.0)
    assert result.turns + result.turns_off_path == len(session.turns) == len(steps)
    assert len({session.request_id(turn.asked) for turn in session.turns}) == len(steps)
    seeds = {(turn.asked.depth, turn.asked.repeat, turn.asked.parent) for turn in session.turns}
    assert len(seeds) == len(steps), "the same question twice is not the same draw twice"


def test_seeds_are_the_built_in_agents_and_differ_when_asked_again() -> None:
    from services.agent.episode import _turn_seed

    assert [turn_seed(9, depth, 0) for depth in range(5)] == [_turn_seed(9, depth) for depth in range(5)]
    assert len({turn_seed(9, depth, repeat) for depth in range(4) for repeat in range(4)}) == 16


def test_abandoned_sessions_end_as_failed_and_without_turns() -> None:
    session = session_of()
    asked = session.ask(NO_PARENT, [1], 0)
    session.took(Turn.of(asked, session.request_id(asked), reply_of([5]), "five", 1))
    assert session.task is not None
    end = end_of(session.task, session.result("abandoned", None, "gone"), (), ())
    assert (end.status, end.reward, end.turns, end.journal, end.reason) == ("failed", 0.0, 0, (), "gone")
    kept = end_of(session.task, session.result("truncated", 0.5), session.records(9), (4,))
    assert (kept.status, kept.reward, kept.turns, kept.generated_tokens) == ("truncated", 0.5, 1, 1)
    assert (kept.min_version, kept.max_version) == (3, 3)


def test_the_book_bounds_what_it_keeps() -> None:
    book = SessionBook(2)
    one, two = session_of(id="one"), session_of(id="two", touched_ms=50)
    book.open(one)
    book.open(two)
    assert book.idle(60, 20) == (one,) and book.of_task("b3-g0-m0", 0) is one
    one.running = 1
    assert book.idle(10_000, 20) == (two,)
    book.close(one, one.result("abandoned", None))
    book.close(one, one.result("completed", 1.0))
    assert (book.abandoned, book.rewarded, len(book)) == (1, 0, 1)
    assert book.knows("one", b"k") and not book.knows("one", b"other") and not book.knows("three", b"k")
