"""Harness episodes: the sandbox's limits, the tasks' hidden tests, and what becomes of a session."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from services import jobfile
from services.harness import sandbox
from services.harness.config import Config
from services.harness.core import GiveUp, Post, Ran, outcome, pause_after
from services.harness.mini_swe_agent import Sandboxed
from services.harness.sandbox import MARKER, CopyError, Folders, Limits, copy_tree
from services.harness.tasks import BUILT_IN, Task, check_tasks, grade, load_tasks, prepare, task_of
from services.jobfile import ConfigError

LIMITS = Limits(seconds=60, output_bytes=10_000, memory_bytes=2 << 30, file_bytes=1 << 20)
MOST = 1 << 20


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path / "episode")
    made.make()
    return made


async def bash(folders: Folders, command: str, limits: Limits = LIMITS, marker: str = "test") -> Ran:
    return await sandbox.run(
        ["/bin/bash", "-c", command], cwd=folders.work, environment=folders.environment(marker), limits=limits
    )


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


async def gone(pid: int) -> None:
    """Returns when a killed process is no more."""
    async with asyncio.timeout(20):
        while alive(pid):  # noqa: ASYNC110 - the kernel has no event for it
            await asyncio.sleep(0.01)


async def test_a_command_runs_in_the_working_copy_and_inherits_nothing(folders: Folders, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    ran = await bash(folders, "pwd; echo to stderr >&2; env; exit 3")
    assert ran.returncode == 3 and ran.ended_by == ""
    assert ran.output.startswith(f"{folders.work}\nto stderr\n")
    names = {line.partition("=")[0] for line in ran.output.splitlines()[2:]}
    assert names <= {*folders.environment("x"), "PWD", "OLDPWD", "SHLVL", "_"}, names
    assert "secret" not in ran.output


async def test_limits_of_time_output_memory_and_file_size(folders: Folders) -> None:
    slow = await bash(folders, "echo begun; sleep 1000", Limits(seconds=0.5, output_bytes=1000))
    assert (slow.ended_by, slow.output) == ("time", "begun\n") and slow.returncode < 0
    loud = await bash(folders, "yes", Limits(seconds=60, output_bytes=1000))
    assert loud.ended_by == "output" and len(loud.output) == 1000
    greedy = await bash(folders, f"{sys.executable} -c 'b = bytes(3 << 30); print(len(b))'")
    assert greedy.returncode != 0 and "MemoryError" in greedy.output
    large = await bash(folders, f'{sys.executable} -c \'open("f", "wb").write(bytes(3 << 20))\'')
    assert large.returncode != 0 and (folders.work / "f").stat().st_size <= 1 << 20


async def test_no_process_outlives_its_command_or_else_the_episode(folders: Folders) -> None:
    inside = await bash(folders, "sleep 1000 & echo $!; sleep 1000 > /dev/null 2>&1 & echo $!")
    assert inside.ended_by == "", "what runs in the background does not keep the command"
    for pid in map(int, inside.output.split()):
        await gone(pid)
    leave = "setsid bash -c 'echo $$ > left; exec sleep 1000' > /dev/null 2>&1 < /dev/null &"
    escaped = await bash(folders, f"{leave} while [ ! -s left ]; do sleep 0.01; done; cat left", marker="a/b")
    pid = int(escaped.output)
    try:
        assert alive(pid), "it left the group"
        assert sandbox.sweep("a/bb") == 0 and sandbox.sweep("a") == 1
        await gone(pid)
    finally:
        sandbox.sweep("a/b")


async def test_a_cancelled_command_is_ended_first(folders: Folders) -> None:
    running = asyncio.create_task(bash(folders, "echo $$ > pid; sleep 1000"))
    async with asyncio.timeout(30):
        while not (folders.work / "pid").is_file() or not (folders.work / "pid").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    pid = int((folders.work / "pid").read_text())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await gone(pid)


async def test_a_wrapper_goes_around_each_command(folders: Folders) -> None:
    wrapped = Limits(seconds=60, output_bytes=1000, wrapper=("/usr/bin/env", "INSIDE={folder}"))
    assert (await bash(folders, "echo $INSIDE", wrapped)).output == f"{folders.root}\n"


async def test_a_wrapper_may_take_the_network_away(folders: Folders) -> None:
    """As docs/harnesses.md says; with what every Linux has instead of bubblewrap."""
    alone = ("unshare", "--map-root-user", "--net")
    if (await bash(folders, "true", Limits(seconds=30, output_bytes=1000, wrapper=alone))).returncode:
        pytest.skip("no new network namespaces here")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        reach = f"exec 3<>/dev/tcp/127.0.0.1/{listening.getsockname()[1]} && echo reached"
        assert "reached" in (await bash(folders, reach)).output
        wrapped = await bash(folders, reach, Limits(seconds=30, output_bytes=1000, wrapper=alone))
    assert wrapped.returncode != 0 and "reached\n" not in wrapped.output


def test_a_copy_follows_no_links_and_has_a_size(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "file").write_text("x" * 100)
    (source / "link").symlink_to("/etc")
    os.mkfifo(source / "fifo")
    copy_tree(source, tmp_path / "copy", 100)
    assert (tmp_path / "copy" / "a" / "b" / "file").read_text() == "x" * 100
    assert (tmp_path / "copy" / "link").is_symlink() and not (tmp_path / "copy" / "fifo").exists()
    with pytest.raises(CopyError, match="99 bytes"):
        copy_tree(source, tmp_path / "other", 99)


# --- tasks


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_built_in_tasks_fail_at_the_start_and_pass_on_their_solution(tmp_path: Path) -> None:
    tasks = load_tasks(BUILT_IN)
    assert len(tasks) >= 4 and all(task.solution for task in tasks)
    assert await check_tasks(tasks, tmp_path, LIMITS, MOST) == []
    assert left_in(tmp_path) == []
    assert {task_of(tasks, seed).name for seed in range(len(tasks))} == {task.name for task in tasks}


async def test_the_test_that_an_agent_sees_fails_at_the_start(tmp_path: Path) -> None:
    for task in load_tasks(BUILT_IN):
        for solved in (False, True):
            folders = Folders(tmp_path / f"{task.name}{solved}")
            prepare(task, folders, MOST)
            for name, text in (task.solution if solved else {}).items():
                (folders.work / name).write_text(text)
            assert ((await bash(folders, "python -m unittest")).returncode == 0) == solved, task.name


FORGERIES = {
    "leaves early": "import os; os._exit(0)",
    "leaves politely": "import sys; sys.exit(0)",
    "says so": "print('\\nOK'); print('deadbeef 4 4'); import os; os._exit(0)",
    "other unittest": "import sys, types; sys.modules['unittest.main'] = types.ModuleType('x')",
    "closes": "import os; os.close(1); os.close(2)",
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_test_run_that_proves_nothing_is_no_pass(folders: Folders, forgery: str) -> None:
    task = next(task for task in load_tasks(BUILT_IN) if task.name == "merge_intervals")
    (folders.work / "intervals").mkdir()
    (folders.work / "intervals" / "__init__.py").write_text(
        FORGERIES[forgery] + "\ndef merge(intervals):\n    return []\n"
    )
    (folders.work / "unittest.py").write_text("raise SystemExit(0)\n")
    (folders.work / "test_hidden_intervals.py").write_text("")
    (folders.root / "work" / "sitecustomize.py").write_text("raise SystemExit(0)\n")
    graded = await grade(task, folders, LIMITS, MOST, "test")
    assert not graded.passed, graded.output
    assert not (folders.root / "graded").exists() and not (folders.root / "hidden").exists()


async def test_a_working_copy_that_cannot_be_copied_and_tests_that_never_end(folders: Folders) -> None:
    task = Task(name="t", statement="s", files={}, folder=None, hidden={"test_a.py": ""}, test=(), solution={})
    assert not (await grade(task, folders, LIMITS, MOST, "test")).passed, "no test is no pass"
    own = Task(
        name="t", statement="s", files={}, folder=None, hidden={"a": "b"}, test=("/bin/cat", "{tests}/a"), solution={}
    )
    assert (await grade(own, folders, LIMITS, MOST, "test")).passed
    endless = Task(name="t", statement="s", files={}, folder=None, hidden={}, test=("sleep", "1000"), solution={})
    assert not (await grade(endless, folders, Limits(seconds=0.2, output_bytes=10), MOST, "test")).passed
    (folders.work / "big").write_bytes(bytes(MOST + 1))
    graded = await grade(own, folders, LIMITS, MOST, "test")
    assert not graded.passed and "cannot be graded" in graded.output


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("statement = 3", "statement"),
        ("x = [", "Invalid value"),
        ('statement = "s"\n[hidden]\n"../x" = ""', "no path inside"),
        ('statement = "s"\n[hidden]\n"/x" = ""', "no path inside"),
        ('statement = "s"\n[hidden]\n', "nothing would decide"),
        ('statement = "s"\nfolder = "none"\n[hidden]\n"test_a.py" = ""', "there is no"),
        ('statement = "s"\nhints = "h"\n[hidden]\n"test_a.py" = ""', "hints"),
    ],
)
def test_a_task_file_that_is_wrong_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"no \*.toml"):
        load_tasks(tmp_path)
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_tasks(tmp_path)
    assert "bad.toml" in str(caught.value)


async def test_a_task_may_begin_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "a.py").write_text("A = 1\n")
    (tmp_path / "task.toml").write_text(
        'statement = "s"\nfolder = "start"\n[files]\n"b.py" = "B = 2"\n[hidden]\n"test_it.py" = """\nimport unittest, a, b\n'
        'class T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(a.A + b.B, 4)\n"""\n'
        '[solution]\n"a.py" = "A = 2"\n'
    )
    assert await check_tasks(load_tasks(tmp_path), tmp_path / "run", LIMITS, MOST) == []


# --- outcomes


DONE = Ran(returncode=0, output="")


@pytest.mark.parametrize(
    ("ran", "result", "passed", "what"),
    [
        (DONE, None, True, Post(reward=1.0, status="completed")),
        (DONE, None, False, Post(reward=0.0, status="completed")),
        (DONE, b'{"status": "truncated"}', True, Post(reward=1.0, status="truncated")),
        (Ran(returncode=-9, output="", ended_by="time"), None, True, Post(reward=1.0, status="truncated")),
        (Ran(returncode=-9, output="", ended_by="output"), None, False, Post(reward=0.0, status="truncated")),
        (Ran(returncode=1, output=""), None, None, GiveUp(reason="the harness ended with status 1")),
        (Ran(returncode=-11, output=""), b'{"reward": 1}', None, GiveUp(reason="the harness ended with status -11")),
        (DONE, b'{"reward": 0.25}', None, Post(reward=0.25, status="completed")),
        (DONE, b'{"reward": 0.25}', False, Post(reward=0.0, status="completed")),
        (DONE, b'{"reward": NaN}', None, GiveUp(reason="the harness wrote no valid PEARL_RESULT")),
        (DONE, b'{"status": "great"}', True, GiveUp(reason="the harness wrote no valid PEARL_RESULT")),
        (DONE, b"", True, GiveUp(reason="the harness wrote no valid PEARL_RESULT")),
        (Ran(returncode=-9, output="", ended_by="time"), None, None, Post(reward=0.0, status="truncated")),
    ],
)
def test_what_becomes_of_a_session(ran: Ran, result: bytes | None, passed: bool | None, what: object) -> None:
    assert outcome(ran, result, passed) == what


def test_failures_one_after_another_are_waited_out() -> None:
    pauses = [0.0]
    for _ in range(9):
        pauses.append(pause_after(False, pauses[-1]))
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert pause_after(True, 30.0) == 0.0


def test_a_program_that_should_say_its_reward_must() -> None:
    assert isinstance(outcome(DONE, b"{}", None), GiveUp)
    assert MARKER == "PEARL_SANDBOX"


@pytest.mark.parametrize(
    ("harness", "problem"),
    [
        ({"command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"command": []}, "harness.command is empty"),
        ({"reward": "fame"}, "harness.reward"),
        ({"gateway": "gateway:8000"}, "harness.gateway"),
        ({"processes": 1}, "set gateway.bind"),
        ({"action_s": 600.0}, "must be below harness.episode_s"),
        ({"tasks": "/nowhere"}, r"no \*.toml"),
        ({"api_key_file": "/nowhere/key"}, "harness.api_key_file"),
        ({"limits": 3}, "limits"),
    ],
)
def test_a_harness_section_that_is_wrong_is_named(tmp_path: Path, harness: dict[str, object], problem: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[harness]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in harness.items()))
    with pytest.raises(ConfigError, match=problem):
        Config.of(jobfile.load(path))


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minisweagent", None)
    with pytest.raises(ConfigError, match=r"pearl-rl\[harness\]"):
        Config.of(jobfile.JobFile())


# --- mini-swe-agent's place for commands


def test_what_mini_swe_agents_commands_are_answered(folders: Folders, monkeypatch) -> None:
    from minisweagent.exceptions import Submitted

    monkeypatch.setenv("OPENAI_API_KEY", "pearl-key")
    limits = msgspec.json.encode(Limits(seconds=30, output_bytes=100)).decode()
    place = Sandboxed(folder=str(folders.root), limits=limits, marker="test")
    assert place.execute({"command": "echo one; echo two > f"}) == {
        "output": "one\n",
        "returncode": 0,
        "exception_info": "",
    }
    assert place.execute({"command": "cat f", "other": 1})["output"] == "two\n"
    assert "more than 100 bytes" in place.execute({"command": "yes"})["exception_info"]
    assert "could not be run" in place.execute({"command": "echo \0"})["exception_info"]
    assert place.execute({})["returncode"] == 0
    assert "pearl-key" not in repr(place.get_template_vars()) + repr(place.serialize()) + repr(
        place.execute({"command": "env"})
    )
    place.execute({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; exit 1"})
    with pytest.raises(Submitted):
        place.execute({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo all"})
    (folders.work / "f").unlink()
    folders.work.rmdir()
    assert "could not be run" in place.execute({"command": "true"})["exception_info"]
