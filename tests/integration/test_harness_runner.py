"""The runner against the real gateway, on the in-memory bus: mini-swe-agent and small programs, and what they cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from messages.rollout_worker import Generate
from services.harness import sandbox
from services.harness.bug_fixer import BugFixer, Sometimes
from services.harness.config import Config
from services.harness.episode import marker_of
from services.harness.service import Runner
from services.harness.tasks import BUILT_IN, load_tasks
from services.jobfile import GatewaySection, HarnessSection, JobFile, JobSection
from tests.gateway_world import KEY, TOKENIZER, World, job_of, said, task_of
from tests.waiting import until

CURL = """
import json, os, sys, urllib.error, urllib.request
def ask(path, body, key=os.environ["OPENAI_API_KEY"], method="POST", **headers):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), method=method,
        headers={"Authorization": "Bearer " + key, "Content-Type": "application/json", **headers})
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}
def chat(*texts):
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    return ask("/chat/completions", {"model": os.environ["PEARL_MODEL"], "messages": messages})
def result(**said):
    open(os.environ["PEARL_RESULT"], "w").write(json.dumps(said))
"""
"""What a program of a dozen lines needs."""


def program(text: str, **more: Any) -> dict[str, Any]:
    return {"command": ("{python}", "-c", CURL + text), **more}


class Many:
    """A world with a model, and the tasks of a group."""

    def __init__(self, world: World, folder: Path, harness: dict[str, Any]) -> None:
        self.world = world
        job = JobFile(
            job=JobSection(name="demo", data_dir=str(folder)),
            gateway=GatewaySection(bind="127.0.0.1:1"),
            harness=HarnessSection(gateway=world.gateway.url, **{"concurrency": 2, **harness}),
        )
        self.config = msgspec.structs.replace(Config.of(job), api_key=KEY)
        self.runner = Runner(self.config)

    async def give(self, count: int) -> None:
        for member in range(count):
            await self.world.give(task_of(f"b3-g0-m{member}", task_seed=member, sample_seed=10 + member))

    async def ended(self, count: int) -> list[Any]:
        """Run until so many sessions have ended; the ends of their trajectories."""
        stop = asyncio.Event()
        running = asyncio.create_task(self.runner.run(stop))
        try:
            async with asyncio.timeout(240):
                while self.runner.rewarded + self.runner.given_up < count:
                    assert not running.done(), running.result()
                    await asyncio.sleep(0.05)
        finally:
            stop.set()
            await running
        assert sandbox.sweep(marker_of(self.config)) == 0, "a process was left"
        assert not list(self.config.folder.glob("*")), "a folder was left"
        return sorted(await self.world.ends(), key=lambda end: end.trajectory)


def replies(model: BugFixer) -> Callable[[Generate], list[int]]:
    return lambda message: model.reply(message.prompt, message.seed)


@contextlib.asynccontextmanager
async def many(
    folder: Path, answer: Callable[[Generate], list[int]], harness: dict[str, Any], **config: Any
) -> AsyncIterator[Many]:
    job = job_of()
    job = msgspec.structs.replace(
        job, pipeline=msgspec.structs.replace(job.pipeline, max_context_tokens=50_000, max_new_tokens=4000)
    )
    async with World(answer, job=job, **config) as world:
        yield Many(world, folder, harness)


async def test_mini_swe_agent_solves_the_built_in_tasks_through_the_gateway(tmp_path: Path) -> None:
    """Real commands in a real working copy; its model's replies are cut short, refused and lost on the way."""
    count = len(load_tasks(BUILT_IN))
    async with many(tmp_path, replies(BugFixer()), {}, silence_ms=300) as run:
        run.world.cluster.script.extend(["cut:30", "whole", "refuse", "die:7", "whole", "lose", "cut:1"])
        await run.give(count)
        ends = await run.ended(count)
        assert [(end.status, end.reward, end.turns) for end in ends] == [("completed", 1.0, 4)] * count
        turns = await run.world.turns()
        assert {turn.retry for turn in turns} == {0} and all("<tool_call>" in turn.action for turn in turns)
        heard = [bytes(i for i in turn.prompt_new if i < 256).decode() for turn in turns if turn.turn == 3]
        assert len(heard) == count and all("OK" in text and '"returncode": 0' in text for text in heard)
        report = await run.world.report()
        assert report.ok, report.violations
        assert report.regenerated == 0 and report.interrupted >= 4 and report.completed == count


async def test_a_group_has_the_rewards_that_its_members_earned(tmp_path: Path) -> None:
    model = Sometimes()
    async with many(tmp_path, replies(model), {}) as run:
        await run.give(4)
        ends = await run.ended(4)
        second = {turn.trajectory: turn for turn in await run.world.turns() if turn.turn == 1}
        assert {end.reward for end in ends} == {0.0, 1.0}
        for end in ends:
            assert (end.reward == 1.0) == ("cat >" in second[end.trajectory].action)


async def test_replies_that_mini_swe_agent_forgets_are_a_branch(tmp_path: Path) -> None:
    """One without a command is left out of its history: docs/harnesses.md."""

    class Vague(BugFixer):
        def reply(self, prompt: Any, seed: int) -> list[int]:
            if "Tool call error" not in TOKENIZER.decode(prompt):
                return said("I shall look.")
            return super().reply(prompt, seed)

    async with many(tmp_path, replies(Vague()), {}) as run:
        await run.give(1)
        (end,) = await run.ended(1)
        assert (end.status, end.reward, end.turns) == ("completed", 1.0, 4)
        turns = await run.world.turns()
        assert not any("I shall look" in turn.action for turn in turns)
        assert "Tool call error" in TOKENIZER.decode(turns[0].prompt_new)
        assert len(run.world.cluster.generates) == 5


async def test_mini_swe_agents_limits_truncate_and_are_graded(tmp_path: Path) -> None:
    options = {"agent": {"step_limit": 2}}
    async with many(tmp_path, replies(BugFixer()), {"options": options}) as run:
        await run.give(1)
        (end,) = await run.ended(1)
        assert (end.status, end.reward, end.turns) == ("truncated", 1.0, 2), "it was repaired, and never submitted"


async def test_the_models_commands_see_neither_key_nor_secrets_and_have_limits(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    class Curious(BugFixer):
        commands = ("env", "sleep 1000", "yes", "cd / && sleep 1000 & echo left it running")

        def said(self, turn: int, task: object, seed: int) -> str:
            command = self.commands[turn] if turn < 4 else "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
            return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"

    harness = {"action_s": 1.0, "action_output_bytes": 20_000}
    async with many(tmp_path, replies(Curious()), harness) as run:
        await run.give(1)
        (end,) = await run.ended(1)
        assert (end.status, end.reward, end.turns) == ("completed", 0.0, 5)
        heard = [bytes(i for i in turn.prompt_new if i < 256).decode() for turn in await run.world.turns()]
        assert "PATH=" in heard[1] and "pearl-" not in heard[1] and "OPENAI" not in heard[1]
        assert "secret" not in heard[1] and "PEARL_RESULT" not in heard[1]
        assert "took more than 1 s" in heard[2] and "more than 20000 bytes" in heard[3]
        assert "left it running" in heard[4]


# --- other programs


async def test_a_program_of_a_dozen_lines_that_says_its_own_reward(tmp_path: Path) -> None:
    text = 'answer = chat("Hi")["choices"][0]["message"]["content"]\nchat("Hi", answer, "More")\n'
    text += 'result(reward=float(len(answer)), status="truncated")'
    async with many(tmp_path, lambda message: said("Hello"), program(text, reward="program")) as run:
        await run.give(2)
        ends = await run.ended(2)
        assert [(end.reward, end.status, end.turns) for end in ends] == [(5.0, "truncated", 2)] * 2


async def test_what_speaks_with_the_sessions_key_cannot_reward_or_end_it(tmp_path: Path) -> None:
    text = """
chat("Hi")
session = os.environ["OPENAI_API_KEY"].removeprefix("pearl-").rpartition(".")[0]
path = "/sessions/" + session
tries = [ask(path + "/reward", {"reward": 9}), ask(path + "/reward", {"reward": 9}, **{"X-Session-Owner": "guess"}),
         ask(path, {}, method="DELETE"), ask("/sessions", {})]
open("tries.json", "w").write(json.dumps([(each["status"], each["error"]["code"]) for each in tries]))
"""
    refused = json.dumps([*[[403, "owner_key_needed"]] * 3, [401, "invalid_api_key"]])
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "a.toml").write_text(
        f'statement = "Try."\ntest = ["grep", "-Fx", {json.dumps(refused)}, "tries.json"]\n[hidden]\n'
    )
    async with many(tmp_path, lambda message: said("Hello"), program(text, tasks=str(tasks))) as run:
        await run.give(1)
        (end,) = await run.ended(1)
        assert end.reward == 1.0, "it was refused, as the task's test found"
        book = run.world.gateway.trajectories.book
        assert (book.rewarded, book.abandoned, book.opened) == (1, 0, 1)


async def test_a_program_that_takes_too_long_is_ended_and_its_work_is_graded(tmp_path: Path) -> None:
    text = 'chat("Hi")\nopen("done", "w")\nos.system("sleep 1000 & setsid sleep 1000 &")\nimport time; time.sleep(1000)'
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "a.toml").write_text('statement = "Try."\ntest = ["test", "-f", "done"]\n[hidden]\n')
    harness = program(text, tasks=str(tasks), episode_s=5.0, action_s=1.0)
    async with many(tmp_path, lambda message: said("Hello"), harness) as run:
        await run.give(1)
        (end,) = await run.ended(1)
        assert (end.status, end.reward, end.turns) == ("truncated", 1.0, 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('chat("Hi")\nsys.exit("it broke")', "status 1"),
        ("result(reward=1.0)", "no finished turn"),
        ('chat("Hi")\nresult(status="great")', "no valid PEARL_RESULT"),
        ('chat("Hi")', "no reward"),
    ],
)
async def test_a_program_that_fails_has_its_task_tried_again(tmp_path: Path, text: str, reason: str, capsys) -> None:
    async with many(tmp_path, lambda message: said("Hello"), program(text, reward="program")) as run:
        await run.give(1)
        (end,) = await run.ended(1)
        assert end.status == "failed" and not await run.world.turns()
        assert (run.runner.rewarded, run.runner.given_up) == (0, 1)
    assert reason in capsys.readouterr().err


async def test_a_runner_that_stops_gives_its_sessions_up(tmp_path: Path) -> None:
    text = 'chat("Hi")\nopen(os.environ["PEARL_FOLDER"] + "/../begun", "w")\nimport time; time.sleep(1000)'
    async with many(tmp_path, lambda message: said("Hello"), program(text, reward="program")) as run:
        await run.give(1)
        stop = asyncio.Event()
        running = asyncio.create_task(run.runner.run(stop))
        await until((run.config.folder / "begun").exists)
        stop.set()
        await running
        (end,) = await run.world.ends()
        assert end.status == "failed" and "given up" in end.reason
        assert sandbox.sweep(marker_of(run.config)) == 0


async def test_a_runner_without_gateway_or_task_waits(tmp_path: Path) -> None:
    async with many(tmp_path, lambda message: said("Hello"), {}) as run:
        config = msgspec.structs.replace(run.config, gateway="", gateway_files=(tmp_path / "gateway-0.json",))
        runner = Runner(config)
        assert runner._find() == ""
        (tmp_path / "gateway-0.json").write_text("{")
        assert runner._find() == ""
        (tmp_path / "gateway-0.json").write_text('{"url": "http://127.0.0.1:7", "model": "x", "pid": 1}')
        assert runner._find() == "http://127.0.0.1:7"
