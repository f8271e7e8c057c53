"""A whole job that is rolled out by mini-swe-agent alone: real processes, real commands, hidden tests as the reward."""

from __future__ import annotations

from pathlib import Path

from messages.envelope import decode
from messages.pipeline_scheduler import TrajectoryCompleted
from services.harness.sandbox import sweep
from tests.integration.running_job import JOB, assert_zeros, running_job

HARNESS = (
    JOB.replace("batch_trajectories = 32", "batch_trajectories = 4")
    .replace("group_size = 8", "group_size = 2\nmax_turns = 8\nmax_new_tokens = 4000\nmax_context_tokens = 50000")
    .replace("{more}", "")
    + """
processes = 0
[rollout]
engine = "emulated"
kv_cache_tokens = 400000
prefill_chunk_tokens = 4096
[training]
engine = "emulated"
[emulation]
time_scale = 20.0
train_s = 1.0
replies = "services.harness.bug_fixer:Sometimes"
[environment]
tokenizer = "services.environments.byte_tokenizer:ByteTokenizer"
[gateway]
bind = "127.0.0.1:0"
[harness]
processes = 1
concurrency = 2
"""
)
"""Half of the replies repair nothing, so that groups have something to tell apart."""


async def test_a_job_whose_only_agent_is_mini_swe_agent(tmp_path: Path) -> None:
    async with running_job(tmp_path, steps=2, template=HARNESS) as run:
        await run.until(lambda: run.board.trajectories >= 1, "the first trajectory", 180)
        await run.kill("harness-0")
        await run.until(lambda: run.board.trajectories >= 3, "trajectories of the runner's successor", 180)
        await run.kill("reserved-w0")
        report = await run.finished(300)
        subject = f"pearl.{run.job.job.name}.ev.trajectory_completed.*"
        stream = f"{run.job.job.name}_EV"
        ends = [decode(each.data, TrajectoryCompleted) async for each in run.bus.read(stream, subject)]
        folder = run.job.run_dir / "harness-0"
    assert_zeros(report, run.job)
    good = [end for end in ends if end.status == "completed"]
    assert {end.turns for end in good} == {4} and {end.reward for end in good} == {0.0, 1.0}
    assert sweep(str(folder.absolute())) == 0, "no process of an episode outlived its runner"
