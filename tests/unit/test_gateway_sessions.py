"""Sessions over HTTP: token-exact turns, branches, rewards, and what becomes of those that nobody ends."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec
import pytest

from messages.agent import RolloutTask
from messages.rollout_worker import Generate
from services.agent.config import Config as AgentConfig
from services.agent.episode import Episode
from services.edge.request import RequestEdge
from services.environments.guess_number import GuessNumber, GuessTokenizer
from services.environments.loading import load_tokenizer
from services.jobfile import EnvironmentSection, GatewaySection, JobFile, PipelineSection
from services.router.gateway.service import Gateway
from services.router.gateway.vocabulary import Vocabulary
from services.runtime.bus import BusUnavailable
from tests.gateway_world import MODEL, TOKENIZER, World, chat, said, task_of


def by_seed(message: Generate) -> list[int]:
    """Another word for each seed and prompt: what is resumed or asked again shows."""
    digest = hashlib.blake2b(repr((message.seed, message.prompt)).encode(), digest_size=4).hexdigest()
    return said(f"say {digest}")


async def opened(world: World, **body: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """A session, and the header of its key."""
    session = await world.post("/v1/sessions", {"wait_s": 1, **body}, status=201)
    return session, {"Authorization": f"Bearer {session['key']}"}


async def speak(world: World, header: dict[str, str], *texts: str, **more: Any) -> str:
    answer = await world.post("/v1/chat/completions", chat(*texts, **more), **header)
    return answer["choices"][0]["message"]["content"]


async def test_a_session_becomes_a_trajectory_token_for_token() -> None:
    async with World(by_seed, silence_ms=60) as world:
        await world.give(task_of())
        session, header = await opened(world)
        assert session["task"]["task_seed"] == 4 and session["trajectory"] == "b3-g0-m0"
        world.cluster.script.extend(["cut:3", "whole", "die:5"])
        first = await speak(world, header, "Hi", temperature=0.1, top_p=0.5, seed=1)
        second = await speak(world, header, "Hi", first, "More", max_tokens=1000)
        shown = await world.get(f"/v1/sessions/{session['id']}")
        assert (shown["turns"], shown["turns_off_path"]) == (2, 0)
        exact = await world.get(f"/v1/sessions/{session['id']}/trajectory")
        result = await world.post(f"/v1/sessions/{session['id']}/reward", {"reward": 0.5}, **header)
        assert (result["status"], result["turns"], result["trajectory"]) == ("completed", 2, "b3-g0-m0")
        turns, (end,) = await world.turns(), await world.ends()
        assert [turn.turn for turn in turns] == [0, 1] and [turn.action for turn in turns] == [first, second]
        assert turns[0].prompt_new == TOKENIZER.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert turns[1].prompt_new == TOKENIZER.encode("\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n")
        assert turns[0].reply == said(first) and turns[1].reply == said(second)
        assert world.cluster.generates[-1].prompt == turns[0].prompt_new + turns[0].reply + turns[1].prompt_new
        assert [turn["reply"] for turn in exact["turns"]] == [turn.reply for turn in turns]
        assert {generate.temperature for generate in world.cluster.generates} == {1.0}
        assert {generate.min_version for generate in world.cluster.generates} == {2}
        assert (end.reward, end.status, end.turns, end.group, end.batch) == (0.5, "completed", 2, "b3-g0", 3)
        report = await world.report()
        assert report.ok, report.violations
        assert report.regenerated == 0 and report.completed == 1 and report.interrupted >= 2
        again = await world.post(f"/v1/sessions/{session['id']}/reward", {"reward": 0.5}, **header)
        assert again == result and len(await world.ends()) == 1
        await world.post(f"/v1/sessions/{session['id']}/reward", {"reward": 1}, status=409, **header)
        answer = await world.post("/v1/chat/completions", chat("Hi"), status=409, **header)
        assert answer["error"]["code"] == "session_ended"
        assert (await world.post("/v1/sessions", {"wait_s": 0}, status=429))["error"]["code"] == "no_task"


async def test_a_session_is_named_by_header_and_its_key_opens_no_other() -> None:
    async with World(by_seed) as world:
        for member in range(2):
            await world.give(task_of(f"b3-g0-m{member}", sample_seed=member))
        (one, key), (two, _) = await opened(world), await opened(world)
        assert one["task"]["group"] == two["task"]["group"] and one["task"]["task_seed"] == two["task"]["task_seed"]
        first = await speak(world, {"X_Session_Id": two["id"]}, "Hi")
        assert first != await speak(world, key, "Hi"), "members of a group differ in their sample seed"
        async with world.http.get(f"/v1/sessions/{two['id']}", headers=key) as response:
            assert response.status == 403
        async with world.http.get("/metrics", headers=key) as response:
            assert response.status == 401
        bad = {"Authorization": key["Authorization"] + "x"}
        assert (await world.post("/v1/chat/completions", chat("Hi"), status=401, **bad))["error"]["code"]
        assert (await world.post("/v1/chat/completions", chat("Hi"), status=404, X_Session_Id="gw00000000-1-00000000"))[
            "error"
        ]["code"]
        await world.post("/v1/chat/completions", chat("Hi", n=2), status=400, **key)
        # Clients name their own sessions so, for routers: with a session's key, and without any session of ours.
        theirs = {"X_Session_Id": "0123456789abcdef"}
        await world.post("/v1/chat/completions", chat("Hi", n=2), **theirs)
        assert not world.cluster.generates[-1].request.startswith("b3-g0")
        await world.post("/v1/chat/completions", chat("Hi"), **theirs, **key)
        assert world.cluster.generates[-1].request.startswith(one["trajectory"])


async def test_a_rewritten_history_is_a_branch_and_only_the_last_path_is_trained_on() -> None:
    async with World(by_seed) as world:
        await world.give(task_of())
        session, header = await opened(world)
        first = await speak(world, header, "Hi")
        second = await speak(world, header, "Hi", first, "More")
        assert second != await speak(world, header, "Hi", first, "More"), "asked again, it is sampled again"
        await speak(world, header, "Hi", first + "!", "More")  # a reply that was never given: told anew
        assert (await world.get(f"/v1/sessions/{session['id']}"))["turns_off_path"] == 3
        last = await speak(world, header, "Hi", "  " + first + "\n", "Other")  # stripped or padded: still ours
        result = await world.post(
            f"/v1/sessions/{session['id']}/reward", {"reward": 1, "status": "truncated"}, **header
        )
        assert (result["turns"], result["turns_off_path"], result["status"]) == (2, 3, "truncated")
        turns = await world.turns()
        assert [turn.action for turn in turns] == [first, last] and [turn.turn for turn in turns] == [0, 1]
        report = await world.report()
        assert report.ok, report.violations
        assert report.lost_with_edge > 0  # what was generated off the path


async def test_tool_calls_in_a_history_are_recognised_however_they_are_written() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "add"}}
    async with World(lambda message: said(call)) as world:
        await world.give(task_of())
        session, header = await opened(world)
        body = chat("1+2?", tools=[tool])
        message = (await world.post("/v1/chat/completions", body, **header))["choices"][0]["message"]
        assert message["content"] is None
        message["tool_calls"][0]["function"]["arguments"] = '{"b": 2,  "a": 1}'
        message = {key: value for key, value in message.items() if key != "refusal"}
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        body["messages"] += [message, answer]
        await world.post("/v1/chat/completions", body, **header)
        assert (await world.get(f"/v1/sessions/{session['id']}"))["turns_off_path"] == 0
        exact = (await world.get(f"/v1/sessions/{session['id']}/trajectory"))["turns"]
        assert exact[1]["prompt_new"] == TOKENIZER.encode("\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")


async def test_text_and_token_prompts_continue_too() -> None:
    async with World(by_seed) as world:
        await world.give(task_of())
        session, header = await opened(world)
        body = {"model": MODEL, "prompt": "Hi ", "max_tokens": 50}
        first = (await world.post("/v1/completions", body, **header))["choices"][0]["text"]
        await world.post("/v1/completions", {**body, "prompt": f"Hi {first} and"}, **header)
        context = world.cluster.generates[-1].prompt
        assert context == [*TOKENIZER.encode("Hi "), *said(first), *TOKENIZER.encode(" and")]
        whole = [*context, *by_seed(world.cluster.generates[-1])]
        answer = await world.post("/generate", {"input_ids": [*whole, 33]}, **header)
        exact = (await world.get(f"/v1/sessions/{session['id']}/trajectory"))["turns"]
        assert [turn["prompt_new"] for turn in exact] == [TOKENIZER.encode("Hi "), TOKENIZER.encode(" and"), [33]]
        assert exact[2]["reply"] == answer["output_ids"]


async def test_a_stop_string_ends_a_turn_and_the_records_agree() -> None:
    async with World(lambda message: said("act: ls STOP and more words than that")) as world:
        await world.give(task_of())
        session, header = await opened(world)
        world.cluster.script.append("cut:5")
        assert await speak(world, header, "Hi", stop="STOP") == "act: ls "
        await world.post(f"/v1/sessions/{session['id']}/reward", {"reward": 1}, **header)
        assert (await world.turns())[0].reply == said("act: ls STOP", ended=False)
        report = await world.report()
        assert report.ok, report.violations


async def test_sessions_that_nobody_ends_are_abandoned_counted_and_never_trained_on() -> None:
    async with World(by_seed, session_idle_ms=1000) as world:
        for member in range(3):
            await world.give(task_of(f"b3-g0-m{member}"))
        (idle, key), (given, other), (busy, third) = [await opened(world) for _ in range(3)]
        await speak(world, key, "Hi")
        world.cluster.script.append("hold:3")
        running = asyncio.create_task(speak(world, third, "Hi"))
        await world.cluster.reached.wait()
        world.clock.advance(2000)
        await world.post(f"/v1/sessions/{given['id']}/reward", {"reward": 1}, status=409, **other)  # no turn
        async with world.http.delete(f"/v1/sessions/{given['id']}", headers=other) as response:
            assert (await response.json())["status"] == "abandoned"
        await world.gateway.trajectories.look_after()
        ends = await world.ends()
        assert sorted(end.trajectory for end in ends) == sorted([idle["trajectory"], given["trajectory"]])
        assert {end.status for end in ends} == {"failed"} and {end.journal for end in ends} == {()}
        assert not await world.turns()
        world.cluster.release.set()
        await running
        book = world.gateway.trajectories.book
        assert (book.abandoned, book.rewarded, len(book)) == (2, 0, 1)
        answer = await world.post(f"/v1/sessions/{idle['id']}/reward", {"reward": 1}, status=409, **key)
        assert "abandoned" in answer["error"]["message"]
        assert busy["status"] == "open"


async def test_a_session_with_an_owner_is_ended_by_its_key_alone_and_kept_by_it() -> None:
    async with World(by_seed, session_idle_ms=100_000) as world:
        for member in range(2):
            await world.give(task_of(f"b3-g0-m{member}"))
        session, key = await opened(world, owner_key=True, idle_s=10)
        _, other = await opened(world)
        path, owner = f"/v1/sessions/{session['id']}", {"X_Session_Owner": session["owner_key"]}
        await speak(world, key, "Hi")
        for wrong in (key, {}, {"X_Session_Owner": "guess"}, {"X_Session_Owner": ""}):
            answer = await world.post(f"{path}/reward", {"reward": 1}, status=403, **wrong)
            assert answer["error"]["code"] == "owner_key_needed"
        assert (await world.post(f"{path}/reward", {"reward": 1}, status=403, **owner, **other))["error"]
        async with world.http.delete(path) as response:
            assert response.status == 403
        for _ in range(3):  # kept by its owner, not by anybody else's looking
            world.clock.advance(6000)
            async with world.http.get(path, headers={"X-Session-Owner": session["owner_key"]}) as response:
                assert response.status == 200
            await world.gateway.trajectories.look_after()
        assert world.gateway.trajectories.book.abandoned == 0
        result = await world.post(f"{path}/reward", {"reward": 1}, **owner, **key)
        assert result["status"] == "completed"

        await world.give(task_of("b3-g0-m2"))
        session, _ = await opened(world, owner_key=True, idle_s=10)
        world.clock.advance(6000)
        await world.get(f"/v1/sessions/{session['id']}")
        world.clock.advance(6000)
        await world.gateway.trajectories.look_after()
        assert world.gateway.trajectories.book.abandoned == 1
        assert [end.reason for end in await world.ends() if end.status == "failed"] == [
            "nobody talked to its session for 12 s"
        ]


async def test_a_gateway_that_stops_gives_its_tasks_to_another() -> None:
    async with World(by_seed) as world:
        await world.give(task_of())
        session, header = await opened(world)
        await speak(world, header, "Hi")
        other = Gateway(
            world.config, world.broker.connect(), world.table, Vocabulary.load(world.job), ask_router=world.cluster.assign,
            clock=world.clock,
        )  # fmt: skip
        await other.start()
        try:
            await world.gateway.trajectories.stop()
            world.clock.advance(10)
            taken = await other.trajectories.open(train=True, wait_s=1, task=None)
            assert taken.trajectory == session["trajectory"] and taken.id != session["id"]
            key = other.trajectories.key_of(taken)
            async with world.http.post(
                f"{other.url}/v1/chat/completions", json=chat("Hi"), headers={"Authorization": f"Bearer {key}"}
            ) as response:
                assert response.status == 200
            assert (await other.trajectories.reward(taken, 1.0, "completed")).turns == 1
            # The first one's client learns that it is too late.
            answer = await world.post(f"/v1/sessions/{session['id']}/reward", {"reward": 0}, status=409, **header)
            assert answer["error"]["code"] == "session_superseded"
            assert [end.reward for end in await world.ends()] == [1.0]
        finally:
            await other.stop()


async def test_a_task_whose_turns_were_half_written_is_ended_and_not_continued() -> None:
    async with World(by_seed) as world:
        await world.give(task_of())
        session, header = await opened(world)
        await speak(world, header, "Hi")
        mine = world.gateway.trajectories.book.find(session["id"])
        record = mine.records(0)[0]
        await world.gateway.trajectories._write(mine, record)  # and then it died
        await world.gateway.trajectories.stop()
        world.gateway.trajectories._tasks._consumer = None
        world.gateway.trajectories.book._open.clear()
        world.clock.advance(10)
        await world.give(task_of("b3-g0-m1"))
        taken, _ = await opened(world)
        assert taken["trajectory"] == "b3-g0-m1", "the client is given the next task, and hears nothing of this"
        (end,) = await world.ends()
        assert end.status == "failed" and "replayed" in end.reason
        world.clock.advance(60_000)
        assert await world.left() == ["b3-g0-m1"]


@pytest.mark.parametrize("end", ["reward", "abandon"])
async def test_a_task_that_has_ended_is_acknowledged_by_whoever_is_given_it(end: str) -> None:
    """Its gateway died when the end was in the stream and the acknowledgement was not."""
    async with World(by_seed) as world:
        await world.give(task_of())
        session, header = await opened(world)
        await speak(world, header, "Hi")
        world.gateway.trajectories._tasks.held.pop(session["id"])
        if end == "reward":
            await world.post(f"/v1/sessions/{session['id']}/reward", {"reward": 1}, **header)
        else:
            await world.gateway.trajectories.abandon(world.gateway.trajectories.book.find(session["id"]), "no reason")
        assert await world.left() == ["b3-g0-m0"]
        world.clock.advance(60_000)
        await world.give(task_of("b3-g0-m1"))
        assert (await opened(world))[0]["trajectory"] == "b3-g0-m1"
        assert await world.left() == ["b3-g0-m1"] and len(await world.ends()) == 1
        body = {"task": msgspec.to_builtins(task_of())}
        assert (await world.post("/v1/sessions", body, status=409))["error"]["code"] == "task_ended"


async def test_a_session_whose_end_could_not_be_written_leaves_its_task_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with World(by_seed) as world:
        await world.give(task_of())
        session, header = await opened(world)
        await speak(world, header, "Hi")

        async def away(subject: str, data: bytes, **rest: Any) -> int:
            raise BusUnavailable(f"{subject}: the broker is away")

        bus = world.gateway.trajectories._bus
        monkeypatch.setattr(bus, "publish_durable", away)
        await world.gateway.trajectories.abandon(world.gateway.trajectories.book.find(session["id"]), "no reason")
        monkeypatch.undo()
        assert await world.left() == ["b3-g0-m0"] and not await world.ends()
        world.clock.advance(2000)
        again, _ = await opened(world)
        assert again["trajectory"] == "b3-g0-m0" and again["id"] != session["id"]


async def test_a_superseded_session_leaves_its_task_to_the_other_process() -> None:
    async with World(by_seed) as world:
        await world.give(task_of())
        session, header = await opened(world)
        await speak(world, header, "Hi")
        trajectories = world.gateway.trajectories
        other = trajectories._begin(task_of(), 0)
        other.turns = trajectories.book.find(session["id"]).turns
        await trajectories._write(other, other.records(0)[0])
        await world.post(f"/v1/sessions/{session['id']}/reward", {"reward": 1}, status=409, **header)
        assert await world.left() == ["b3-g0-m0"] and not trajectories._tasks.held


@pytest.mark.parametrize(
    "change",
    [{"trajectory": "a.>"}, {"group": "b c"}, {"batch": 99}, {"min_version": 4}, {"temperature": -1.0}, {"retry": -1}],
)
async def test_tasks_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    async with World(by_seed) as world:
        body = {"task": msgspec.to_builtins(task_of(**change))}
        answer = await world.post("/v1/sessions", body, status=400)
        assert answer["error"]["param"] == "task" and not len(world.gateway.trajectories.book)
        if "." not in change.get("trajectory", "") and " " not in change.get("group", ""):
            await world.give(task_of("bad", **change))
            await world.give(task_of("good"))
            session, _ = await opened(world)
            assert session["trajectory"] == "good"
            assert await world.bus.last("demo_DEAD", "pearl.demo.dead.gateway") is not None


async def test_a_session_without_a_task_is_recorded_and_trains_nothing() -> None:
    async with World(by_seed) as world:
        session, header = await opened(world, train=False)
        assert session["task"] is None
        await speak(world, header, "Hi", temperature=0.3, seed=5)
        assert world.cluster.generates[-1].temperature == 0.3
        exact = await world.get(f"/v1/sessions/{session['id']}/trajectory")
        assert len(exact["turns"]) == 1
        result = await world.post(f"/v1/sessions/{session['id']}/reward", {"reward": 1}, **header)
        assert result["status"] == "completed" and not await world.ends() and not await world.journal()


# --- beside the built-in agent


def guess_job() -> JobFile:
    return JobFile(
        environment=EnvironmentSection(options={"preamble_tokens": 2}),
        pipeline=PipelineSection(batch_trajectories=1, group_size=1, max_turns=4, max_new_tokens=3),
        gateway=GatewaySection(bind="127.0.0.1:0"),
    )


def guesses(message: Generate) -> list[int]:
    """Words and numbers, as the seed and all that was said have it."""
    tokenizer = GuessTokenizer()
    draw = hashlib.blake2b(repr((message.seed, message.prompt)).encode(), digest_size=8).digest()
    found: list[int] = []
    for byte in draw:
        found.append(byte % tokenizer.vocab_size)
        if found[-1] in message.stop_ids:
            break
    return found


async def play_by_http(world: World, task: RolloutTask) -> None:
    """The agent loop of somebody else: it knows a URL and a key, and an environment of its own."""
    session, header = await opened(world, task=msgspec.to_builtins(task))
    environment = GuessNumber(preamble_tokens=2)
    texts, reward, over = [await environment.reset(task.task_seed)], 0.0, False
    for _ in range(4):
        texts.append(await speak(world, header, *texts))
        result = await environment.step(texts[-1])
        reward, over = reward + result.reward, result.done
        if over:
            break
        texts.append(result.observation)
    status = "completed" if over else "truncated"
    await world.post(f"/v1/sessions/{session['id']}/reward", {"reward": reward, "status": status}, **header)


@pytest.mark.parametrize("script", [[], ["cut:1", "refuse", "die:1", "whole", "lose"]])
async def test_an_agent_over_http_makes_the_built_in_agents_trajectories(script: list[str]) -> None:
    job = guess_job()
    async with World(guesses, job=job, silence_ms=60) as world:
        edge = RequestEdge(world.broker.connect(), "demo", "agent", silence_ms=60, ask_router=world.cluster.assign)
        await edge.start()
        tasks = [
            task_of(f"b3-g0-m{member}", task_seed=member // 4, sample_seed=100 + member, min_version=2)
            for member in range(8)
        ]
        for task in tasks:
            world.cluster.script.extend(script)
            episode = Episode(
                task,
                bus=world.bus,
                edge=edge,
                make_environment=lambda: GuessNumber(preamble_tokens=2),
                tokenizer=load_tokenizer(job),
                config=AgentConfig.of(job),
                holding=f"built-in-{task.trajectory}",
                resumed=False,
            )
            await episode.run()
            world.cluster.script.clear()
            world.cluster.script.extend(script)
            await play_by_http(world, msgspec.structs.replace(task, trajectory=f"{task.trajectory}-http"))
            world.cluster.script.clear()
        await edge.stop()
        ends = {end.trajectory: end for end in await world.ends()}
        turns = {(turn.trajectory, turn.turn): turn for turn in await world.turns()}
        assert len(ends) == 16
        for task in tasks:
            ours, theirs = ends[task.trajectory], ends[f"{task.trajectory}-http"]
            assert (ours.reward, ours.status, ours.turns, ours.generated_tokens) == (
                theirs.reward, theirs.status, theirs.turns, theirs.generated_tokens,
            )  # fmt: skip
            for turn in range(ours.turns):
                one, two = turns[task.trajectory, turn], turns[f"{task.trajectory}-http", turn]
                assert (one.prompt_new, one.reply, one.logprobs, one.spans, one.finish, one.action) == (
                    two.prompt_new, two.reply, two.logprobs, two.spans, two.finish, two.action,
                )  # fmt: skip
        assert {end.turns for end in ends.values()} > {4}
        report = await world.report()
        assert report.ok, report.violations
