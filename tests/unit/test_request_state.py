"""The request edge's decisions: no token twice, none lost, one attempt at a time (DESIGN 7)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from messages.agent import Assignment, NotNow, TokenChunk, VersionSpan
from messages.ids import Activity, Role, Zone
from pearl_state.model import RoleTable, Row
from services.edge.request_state import (
    LIVES,
    Ask,
    Cancel,
    Elapsed,
    Journal,
    NoAnswer,
    RequestSpec,
    RequestState,
    Run,
    Unreadable,
    WorkerLost,
    is_lost,
)

TRUE_REPLY = [100 + index for index in range(11)] + [7]
"""What any worker generates: token i is a function of the seed and i (engines/base.py)."""


def spec(**changes) -> RequestSpec:
    fields = {
        "request": "b0-g0-m0/0/x",
        "session": "b0-g0-m0",
        "prompt": [1, 2, 3],
        "max_new_tokens": 50,
        "temperature": 1.0,
        "seed": 5,
        "stop_ids": [7],
        "min_version": 3,
    }
    return RequestSpec(**{**fields, **changes})


def begun(**changes) -> RequestState:
    state = RequestState(spec(**changes), reply_to="pearl.demo.tok.e", silence_ms=5000)
    (ask,) = state.begin(0)
    assert isinstance(ask, Ask) and ask.message.attempt == 1 and ask.message.context_tokens == 3
    return state


def assignment(state, worker="a-w0", **changes) -> Assignment:
    fields = {"request": state.spec.request, "attempt": state.attempt, "worker": worker}
    return Assignment(**{**fields, "incarnation": 1, "role_generation": 4, **changes})


def running(worker="a-w0", **changes) -> RequestState:
    state = begun(**changes)
    (run,) = state.step(assignment(state, worker), 0)
    assert isinstance(run, Run)
    return state


def chunk(state, offset, tokens, finish="", *, attempt=None, worker="a-w0", incarnation=1, version=3, **more):
    return TokenChunk(
        request=state.spec.request,
        attempt=state.attempt if attempt is None else attempt,
        worker=worker,
        incarnation=incarnation,
        offset=offset,
        tokens=tokens,
        logprobs=[-float(token) for token in tokens],
        version=version,
        finish=finish,
        **more,
    )


def test_a_reply_without_incident():
    state = running()
    assert state.step(chunk(state, 0, [10, 11], cached_tokens=2), 1000) == ()
    assert state.step(chunk(state, 2, [7], "stop", version=4), 3000) == ()
    reply = state.reply
    assert reply is not None
    assert (reply.tokens, reply.logprobs, reply.finish) == ([10, 11, 7], [-10, -11, -7], "stop")
    assert reply.spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    assert (reply.attempts, reply.worker, reply.cached_tokens) == (1, "a-w0", 2)
    assert (reply.queue_s, reply.decode_s) == (1.0, 2.0)
    assert state.deadline_ms is None and state.cancellation() is None


def test_the_generate_carries_the_fence_and_the_prefix():
    state = running()
    state.step(chunk(state, 0, [10, 11]), 1)
    journal, ask = state.step(chunk(state, 2, [12], "interrupted"), 2)
    assert isinstance(journal, Journal) and isinstance(ask, Ask)
    cut = journal.interruption
    assert (cut.attempt, cut.worker, cut.prefix_len, cut.received, cut.cause) == (1, "a-w0", 0, 3, "interrupted")
    assert (ask.message.attempt, ask.message.context_tokens, ask.message.last_worker) == (2, 6, "a-w0")
    assert ask.message.avoid == ("a-w0",)
    (run,) = state.step(assignment(state, "b-w0", incarnation=9, role_generation=2), 3)
    assert isinstance(run, Run)
    (generate,) = run.messages
    assert (generate.worker, generate.incarnation, generate.role_generation, generate.attempt) == ("b-w0", 9, 2, 2)
    assert (generate.prefix, generate.max_new_tokens, generate.reply) == ([10, 11, 12], 50, "pearl.demo.tok.e")


def test_one_generate_is_outstanding_at_a_time():
    state = running()
    assert state.step(assignment(state, "b-w0"), 1) == ()
    assert state.assignment is not None and state.assignment.worker == "a-w0"


def test_without_a_first_token_in_time_it_fails_and_the_attempt_is_cancelled():
    state = running(queue_ms=700)
    assert state.due_ms == 700
    assert state.step(Elapsed(), 699) == () and not state.failed
    (cancel,) = state.step(Elapsed(), 700)
    assert isinstance(cancel, Cancel) and cancel.workers == ("a-w0",)
    assert state.overdue and state.failed == "no token within 0.7 s" and state.done


def test_it_waits_so_long_for_a_worker_too_but_no_longer_than_a_pause():
    state = begun(queue_ms=700)
    assert state.step(NotNow(request=state.spec.request, attempt=1, retry_after_ms=500, reason="no worker"), 100) == ()
    assert state.due_ms == 600
    (ask,) = state.step(Elapsed(), 600)
    assert isinstance(ask, Ask)
    state.step(NotNow(request=state.spec.request, attempt=1, retry_after_ms=500, reason="no worker"), 601)
    assert state.due_ms == 700
    assert state.step(Elapsed(), 701) == () and state.overdue


def test_with_the_first_token_it_is_in_time():
    state = running(queue_ms=700)
    assert state.step(chunk(state, 0, TRUE_REPLY[:2]), 650) == ()
    assert state.due_ms == 5650 and state.step(Elapsed(), 701) == () and not state.failed


def test_late_chunks_of_other_attempts_are_dropped_and_counted():
    state = running()
    state.step(chunk(state, 0, [10], "interrupted"), 1)
    assert state.step(chunk(state, 1, [66], attempt=1), 2) == ()  # while asking
    state.step(assignment(state, "b-w0"), 3)
    assert state.step(chunk(state, 1, [66], attempt=1), 4) == ()
    assert state.step(chunk(state, 1, [66]), 4) == ()  # the current attempt's number, from the old worker
    assert state.step(chunk(state, 1, [66], worker="b-w0", incarnation=2), 4) == ()
    assert (state.tokens, state.late) == ([10], 4)
    state.step(chunk(state, 1, [7], "stop", worker="b-w0"), 5)
    assert state.reply is not None and state.reply.tokens == [10, 7]
    assert state.step(chunk(state, 2, [66], worker="b-w0"), 6) == () and state.late == 5


def test_silence_ends_an_attempt_and_a_sign_of_life_does_not():
    state = running()
    assert state.step(Elapsed(), 4999) == ()
    state.step(chunk(state, 0, []), 4999)  # queued
    assert state.step(Elapsed(), 9998) == ()
    cancel, journal, ask = state.step(Elapsed(), 9999)
    assert isinstance(cancel, Cancel) and cancel.workers == ("a-w0",) and cancel.message.attempt == 1
    assert isinstance(journal, Journal) and journal.interruption.cause == "silence"
    assert isinstance(ask, Ask) and ask.message.attempt == 2


def test_a_gap_ends_an_attempt_and_keeps_what_came_before():
    state = running()
    state.step(chunk(state, 0, [10]), 1)
    _, journal, _ = state.step(chunk(state, 2, [12]), 2)
    assert isinstance(journal, Journal)
    assert (journal.interruption.cause, journal.interruption.received) == ("gap", 1)
    assert state.tokens == [10] and state.gaps == 1


def unreadable(state, worker="a-w0", incarnation=1, attempt=None) -> Unreadable:
    attempt = state.attempt if attempt is None else attempt
    return Unreadable("token.chunk/1", state.spec.request, attempt, worker, incarnation)


def test_a_chunk_that_cannot_be_read_is_a_gap_at_once():
    state = running()
    state.step(chunk(state, 0, [10]), 1)
    for other in (unreadable(state, "b-w0"), unreadable(state, incarnation=2), unreadable(state, attempt=2)):
        assert state.step(other, 2) == ()
    cancel, journal, ask = state.step(unreadable(state), 2)
    assert isinstance(cancel, Cancel) and cancel.workers == ("a-w0",)
    assert isinstance(journal, Journal) and isinstance(ask, Ask)
    assert (journal.interruption.cause, journal.interruption.received) == ("gap", 1)
    assert (state.tokens, state.gaps, state.late) == ([10], 1, 3)
    assert state.step(unreadable(state, attempt=1), 3) == () and state.attempt == 2


def test_a_prefill_side_that_cannot_be_read_matters_before_the_first_token():
    def paired() -> RequestState:
        state = begun()
        state.step(assignment(state, prefill_worker="p-w0", prefill_incarnation=3, prefill_endpoint="h:1"), 0)
        return state

    state = paired()
    _, journal, ask = state.step(unreadable(state, "p-w0", 3), 1)
    assert isinstance(journal, Journal) and journal.interruption.cause == "gap"
    assert isinstance(ask, Ask) and ask.message.avoid == ("p-w0",)
    state = paired()
    state.step(chunk(state, 0, [10]), 1)
    assert state.step(unreadable(state, "p-w0", 3), 2) == () and state.attempt == 1


def test_duplicates_add_nothing():
    state = running()
    state.step(chunk(state, 0, [10, 11]), 1)
    assert state.step(chunk(state, 0, [10, 11]), 2) == ()
    assert state.step(chunk(state, 1, [11, 12]), 3) == ()
    assert state.tokens == [10, 11, 12] and state.duplicates == 1


def test_a_refusal_is_not_journalled_and_the_worker_is_avoided():
    state = running()
    (ask,) = state.step(chunk(state, 0, [], "refused", reason="role generation"), 1)
    assert isinstance(ask, Ask)
    assert (ask.message.attempt, ask.message.avoid, ask.message.last_worker) == (2, ("a-w0",), "")
    state.step(assignment(state, "b-w0"), 2)
    assert state.step(chunk(state, 0, [], "refused", worker="b-w0"), 3) == ()  # the second in a row waits
    assert state.deadline_ms == 23
    (ask,) = state.step(Elapsed(), 23)
    assert isinstance(ask, Ask) and ask.message.avoid == ("a-w0", "b-w0") and ask.message.attempt == 3


def test_not_now_waits_and_asks_for_the_same_attempt_with_nobody_avoided():
    state = running()
    state.step(chunk(state, 0, [], "refused"), 1)
    message = NotNow(request=state.spec.request, attempt=2, retry_after_ms=50, reason="no worker")
    assert state.step(message, 10) == () and state.deadline_ms == 60
    (ask,) = state.step(Elapsed(), 60)
    assert isinstance(ask, Ask) and ask.message.attempt == 2 and ask.message.avoid == ()


def test_no_router_backs_off_within_a_bound_and_never_gives_up():
    state = begun()
    pauses = []
    now = 0.0
    for _ in range(300):
        assert state.step(NoAnswer(), now) == ()
        assert state.deadline_ms is not None
        pauses.append(state.deadline_ms - now)
        now = state.deadline_ms
        (ask,) = state.step(Elapsed(), now)
        assert isinstance(ask, Ask) and ask.message.attempt == 1
    assert pauses[:5] == [100, 200, 400, 800, 1000] and set(pauses[5:]) == {1000}


def test_an_answer_to_another_question_is_no_answer():
    state = begun()
    assert state.step(assignment(state, attempt=9), 0) == ()
    assert state.assignment is None and state.deadline_ms == 100


def test_a_lost_worker_ends_the_attempt_at_once():
    state = running()
    state.step(chunk(state, 0, [10]), 1)
    effects = state.step(WorkerLost(), 2)
    assert [type(effect) for effect in effects] == [Cancel, Journal, Ask]
    assert state.step(WorkerLost(), 3) == ()  # nothing runs now


def test_when_only_the_end_was_lost_nothing_is_asked_again():
    state = running()
    state.step(chunk(state, 0, [10, 7]), 1)
    effects = state.step(WorkerLost(), 2)
    assert [type(effect) for effect in effects] == [Cancel, Journal]
    assert state.reply is not None and state.reply.finish == "stop"
    state = running(max_new_tokens=2)
    state.step(chunk(state, 0, [10, 11]), 1)
    state.step(WorkerLost(), 2)
    assert state.reply is not None and state.reply.finish == "length"


def test_tokens_below_the_least_version_are_not_taken():
    state = running()
    state.step(chunk(state, 0, [10]), 1)
    _, journal, _ = state.step(chunk(state, 1, [11], version=2), 2)
    assert isinstance(journal, Journal) and journal.interruption.cause == "stale" and state.tokens == [10]


def test_a_request_that_gets_nowhere_is_given_up():
    state = running()
    now = 0.0
    for _ in range(LIVES):
        assert not state.failed
        if state.assignment is None:
            now = state.deadline_ms if state.deadline_ms is not None else now
            state.step(Elapsed(), now)
            state.step(assignment(state), now)
        state.step(chunk(state, 0, [], "refused", reason="context too long"), now)
    assert "context too long" in state.failed and state.reply is None and state.done


def test_disaggregated_both_sides_get_the_request_and_only_decode_counts():
    state = begun()
    pair = {
        "prefill_worker": "p-w0",
        "prefill_incarnation": 2,
        "prefill_role_generation": 6,
        "prefill_endpoint": "10.0.0.1:8998",
        "room": 77,
    }
    (run,) = state.step(assignment(state, "d-w0", **pair), 0)
    assert isinstance(run, Run)
    decode, prefill = run.messages
    assert (decode.worker, prefill.worker, prefill.incarnation, prefill.role_generation) == ("d-w0", "p-w0", 2, 6)
    for side in (decode, prefill):
        assert (side.bootstrap_host, side.bootstrap_port, side.bootstrap_room) == ("10.0.0.1", 8998, 77)
    assert state.step(chunk(state, 0, [55], "length", worker="p-w0", incarnation=2), 1) == ()
    assert state.tokens == []
    effects = state.step(chunk(state, 0, [], "refused", worker="p-w0", incarnation=2), 2)
    assert [type(effect) for effect in effects] == [Cancel, Ask]
    assert isinstance(effects[1], Ask) and effects[1].message.avoid == ("p-w0",)


def paired() -> RequestState:
    state = begun()
    state.step(assignment(state, "d-w0", prefill_worker="p-w0", prefill_incarnation=2, prefill_role_generation=6), 0)
    return state


def test_whom_a_disaggregated_attempt_avoids_next():
    """Until the first token the decode side speaks of its prefill side too; after it, and of itself, for itself."""
    for finish in ("refused", "interrupted"):
        state = paired()
        *_, ask = state.step(chunk(state, 0, [], finish, worker="d-w0"), 1)
        assert isinstance(ask, Ask) and ask.message.avoid == ("d-w0", "p-w0")
        state = paired()
        *_, ask = state.step(chunk(state, 0, [], finish, worker="p-w0", incarnation=2), 1)
        assert isinstance(ask, Ask) and ask.message.avoid == ("p-w0",)
    state = paired()
    state.step(chunk(state, 0, [10], worker="d-w0"), 1)
    assert state.step(chunk(state, 0, [], "interrupted", worker="p-w0", incarnation=2), 1) == ()  # its part is done
    cancel, journal, ask = state.step(chunk(state, 1, [], "interrupted", worker="d-w0"), 2)
    assert isinstance(cancel, Cancel) and cancel.workers == ("d-w0", "p-w0")
    assert isinstance(journal, Journal) and (journal.interruption.worker, journal.interruption.received) == ("d-w0", 1)
    assert isinstance(ask, Ask) and ask.message.avoid == ("d-w0",)
    state = paired()
    *_, ask = state.step(WorkerLost(), 1)
    assert isinstance(ask, Ask) and ask.message.avoid == ("d-w0", "p-w0")


def row(**changes) -> Row:
    fields = {"worker": "a-w0", "gpus": (), "zone": Zone.RESERVED, "role": Role.COLOCATED}
    return Row(**{**fields, "activity": Activity.ACTIVE, "incarnation": 3, "role_generation": 5, **changes})


def test_what_the_table_says_about_an_attempt():
    def lost(**changes):
        return is_lost(RoleTable(job="demo", epoch=1, rows=(row(**changes),)), "a-w0", 3, 5)

    assert not lost()
    assert lost(incarnation=4, activity=Activity.TRANSITIONING)
    assert lost(activity=Activity.INACTIVE)
    assert lost(activity=Activity.ACTIVE, role_generation=6)  # it has come back in another role
    assert not lost(activity=Activity.TRANSITIONING, role_generation=6)  # it drains, and will say so
    assert not lost(incarnation=2, activity=Activity.INACTIVE)  # an older table than the router's
    assert not lost(role_generation=4, activity=Activity.INACTIVE)
    assert not is_lost(RoleTable(job="demo", epoch=1, rows=()), "a-w0", 3, 5)


def test_a_prefill_worker_matters_until_the_first_token():
    state = begun()
    state.step(assignment(state, "d-w0", prefill_worker="a-w0", prefill_incarnation=3, prefill_role_generation=5), 0)
    table = RoleTable(job="demo", epoch=1, rows=(row(activity=Activity.INACTIVE),))
    assert state.lost_in(table)
    state.step(chunk(state, 0, [10], worker="d-w0"), 1)
    assert not state.lost_in(table)


# --- any interleaving

MISHAPS = st.sampled_from(
    ["chunk", "chunk", "chunk", "duplicate", "overlap", "gap", "interrupt", "silence", "lost", "refuse", "late", "idle"]
)


@settings(max_examples=300, deadline=None)
@given(mishaps=st.lists(st.tuples(MISHAPS, st.integers(1, 4)), max_size=60), length=st.integers(1, len(TRUE_REPLY)))
def test_whatever_happens_the_reply_is_the_uninterrupted_one(mishaps, length):
    """DESIGN 7: a reply is delivered once and whole, and no token that arrived is asked for again."""
    truth = TRUE_REPLY if length == len(TRUE_REPLY) else TRUE_REPLY[:length]
    state = running(max_new_tokens=length)
    now, starts, received, sent = 0.0, [0], 0, 0
    script = [*mishaps, *[("chunk", 4)] * (len(TRUE_REPLY) + 2)]

    def end_of(offset):
        if offset < len(truth):
            return ""
        return "stop" if truth[-1] == 7 else "length"

    for mishap, size in script:
        if state.done:
            break
        now += 1
        if state.assignment is None:  # asking or pausing: the router answers
            if state.deadline_ms is not None:
                now = max(now, state.deadline_ms)
                state.step(Elapsed(), now)
            (run,) = state.step(assignment(state), now)
            assert isinstance(run, Run)
            (generate,) = run.messages
            assert generate.prefix == truth[: len(generate.prefix)]
            assert len(generate.prefix) == len(state.tokens) == received, "starts where the client's prefix ends"
            starts.append(len(generate.prefix))
            sent = len(generate.prefix)
        take = truth[sent : sent + size]
        effects = ()
        match mishap:
            case "chunk":
                effects = state.step(chunk(state, sent, take, end_of(sent + len(take))), now)
                sent += len(take)
            case "duplicate":
                effects = state.step(chunk(state, starts[-1], truth[starts[-1] : sent]), now)
            case "overlap":
                back = max(starts[-1], sent - 1)
                tokens = truth[back : sent + size]
                effects = state.step(chunk(state, back, tokens, end_of(back + len(tokens))), now)
                sent = back + len(tokens)
            case "gap" if sent + 1 < len(truth):
                effects = state.step(chunk(state, sent + 1, truth[sent + 1 : sent + 1 + size]), now)
            case "interrupt":
                effects = state.step(chunk(state, sent, take, "interrupted"), now)
            case "silence":
                assert state.deadline_ms is not None
                now = state.deadline_ms
                effects = state.step(Elapsed(), now)
            case "lost":
                effects = state.step(WorkerLost(), now)
            case "refuse" if sent == starts[-1]:
                effects = state.step(chunk(state, sent, [], "refused"), now)
            case "late":
                effects = state.step(chunk(state, 0, [999] * size, attempt=state.attempt - 1), now)
            case _:
                pass
        received = len(state.tokens)
        for effect in effects:
            if isinstance(effect, Journal):
                cut = effect.interruption
                assert cut.prefix_len == starts[-1] and cut.prefix_len + cut.received == received
    assert state.reply is not None
    assert state.reply.tokens == truth
    assert state.reply.logprobs == [-float(token) for token in truth]
    assert state.reply.spans == (VersionSpan(3, 0, len(truth)),)
    assert state.reply.finish == ("stop" if truth[-1] == 7 else "length")
