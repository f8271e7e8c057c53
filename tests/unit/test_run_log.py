"""What a person is told by commands that run a job: words; log lines go to the run's files."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from messages.pipeline_scheduler import StepFinished
from services.cli import __main__ as command
from services.cli.run_log import run_log
from services.cli.up import EDGE_STEPS, EVERY_S, TrainSteps
from services.jobfile import ConfigError, JobFile, JobSection, PipelineSection
from services.runtime.log import get_logger, told
from tests.contract.samples import sample


def job_of(folder: Path, train_steps: int = 12) -> JobFile:
    return JobFile(job=JobSection(data_dir=str(folder)), pipeline=PipelineSection(train_steps=train_steps))


def test_log_lines_go_to_the_runs_folder_and_warnings_are_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    log = get_logger("supervisor").bind(epoch=3)
    with run_log(job_of(tmp_path), said.append) as path:
        log.debug("nothing")
        log.info("feed is done", action="service_done")
        log.warning("agent-0 ended", action="service_restart", pid=7)
        log.error("refused")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["text"] for line in lines] == ["feed is done", "agent-0 ended", "refused"]
    assert lines[1] | {"action": "service_restart", "pid": 7, "epoch": 3, "actor": "supervisor"} == lines[1]
    assert said == ["warning: agent-0 ended", "error: refused"]
    assert path.parent == tmp_path / "demo" / "logs" and capsys.readouterr() == ("", "")
    log.info("afterwards")
    assert json.loads(capsys.readouterr().err)["text"] == "afterwards", "a service logs to its standard error"


def test_the_inner_one_hears_and_one_that_no_longer_reads_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    outer: list[str] = []

    def nobody(_: str) -> None:
        raise BrokenPipeError

    with told(outer.append):
        with told(nobody):
            get_logger("bus").warning("lost the connection")
        assert outer == []
        get_logger("bus").warning("lost it again")
    assert outer == ["warning: lost it again"] and capsys.readouterr() == ("", "")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("a file", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"pearl\.log: cannot be written"), run_log(job_of(tmp_path), print):
        pass


@pytest.mark.parametrize("name", ["status", "service"])
def test_commands_say_warnings_in_words_and_services_log_them(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> int:
        get_logger("bus").info("connected")
        get_logger("bus").warning("lost the connection", action="bus.disconnected")
        return 0

    monkeypatch.setattr(f"services.cli.{name}.run", run)
    arguments = ["service", "router", "-c", "job.toml"] if name == "service" else [name]
    assert command.main(arguments) == 0
    said = capsys.readouterr().err
    if name == "service":
        assert [json.loads(line)["text"] for line in said.splitlines()] == ["connected", "lost the connection"]
    else:
        assert said == "warning: lost the connection\n"


def step(batch: int, reward: float) -> StepFinished:
    return msgspec.structs.replace(sample(StepFinished), batch=batch, reward_mean=reward)


def test_train_steps_are_told_now_and_then_and_their_end_at_once(tmp_path: Path) -> None:
    steps = TrainSteps(job_of(tmp_path, 12), tmp_path / "my job.toml")
    assert steps.news(0.0) == ""
    steps.take(step(0, 0.25))
    assert steps.news(100.0) == "train step 1 of 12 done, reward 0.250"
    steps.take(step(0, 0.25))  # told of again
    steps.take(step(1, 0.5))
    assert steps.news(100.0 + EVERY_S / 2) == ""
    assert steps.news(100.0 + EVERY_S) == "train step 2 of 12 done, reward 0.500"
    (tmp_path / "demo" / "metrics").mkdir(parents=True)
    for batch in range(2, 12):
        steps.take(step(batch, 1.0))
    steps.take(step(12, 9.0))  # there is no such batch
    steps.take(step(-1, 9.0))
    first = (0.25 + 0.5 + 3 * 1.0) / EDGE_STEPS
    assert steps.news(100.0 + EVERY_S).splitlines() == [
        f"the job is done: all 12 train steps, reward {first:.3f} -> 1.000",
        f"it left {tmp_path}/demo/metrics",
        "its services stay up until Ctrl-C: "
        f"look with pearl status -c '{tmp_path}/my job.toml', or pearl check -c '{tmp_path}/my job.toml'",
    ]
    steps.take(step(3, 1.0))
    assert steps.news(1e9) == "", "once"


def test_a_job_that_was_done_before_is_said_to_be(tmp_path: Path) -> None:
    steps = TrainSteps(job_of(tmp_path, 2), tmp_path / "job.toml")
    steps.take(step(0, 0.0))
    steps.take(step(1, 1.0))
    assert steps.news(0.0).startswith("the job is done: all 2 train steps")


def test_the_end_is_told_though_the_first_train_steps_are_in_the_stream_no_more(tmp_path: Path) -> None:
    steps = TrainSteps(job_of(tmp_path, 3), tmp_path / "job.toml")
    steps.take(step(1, 0.5))
    assert steps.news(0.0) == "train step 2 of 3 done, reward 0.500"
    steps.take(step(2, 1.0))
    said = "the job is done: all 3 train steps, reward 0.750 -> 0.750 over the 2 that are still in the event stream"
    assert steps.news(0.0).splitlines()[0] == said
    assert steps.news(1e9) == "", "once"
