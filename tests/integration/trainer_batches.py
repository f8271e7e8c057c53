"""Small random batches for the trainer's tests, and one rank of a learner as a process of its own.

`python -m tests.integration.trainer_batches JOB_FILE`, with RANK and its like in the environment, trains the first
batches, with a checkpoint and a snapshot after each.
"""

from __future__ import annotations

import random
import sys

from messages.agent import TurnFinished, VersionSpan
from messages.ids import GroupId, PolicyVersion, RequestId, TrajectoryId, WorkerId
from messages.pipeline_scheduler import BatchItem, BatchReady
from services import jobfile
from services.jobfile import JobFile

BATCHES = 2
GROUPS = 3
MEMBERS = 5


def job_toml(data_dir: str, ranks: int, name: str) -> str:
    """A job file whose minibatches do not divide evenly among two ranks."""
    return f"""
[job]
name = "{name}"
data_dir = "{data_dir}"
seed = 3
[model]
device = "cpu"
[training]
ranks = {ranks}
minibatch_trajectories = 7
epochs = 2
[[nodes]]
name = "t0"
zone = "training"
gpus = 2
"""


def make_batch(number: int) -> tuple[list[TurnFinished], list[BatchItem]]:
    """Turns in journal order (first sequence 1), and the items that refer to them."""
    rng = random.Random(number)
    turns: list[TurnFinished] = []
    items: list[BatchItem] = []
    for member in range(GROUPS * MEMBERS):
        group = GroupId(f"b{number}-g{member // MEMBERS}")
        trajectory = TrajectoryId(f"{group}-m{member % MEMBERS}")
        first = len(turns) + 1
        for turn in range(rng.randint(1, 3)):
            version = max(0, number - rng.randint(0, 1))
            reply = [rng.randrange(16) for _ in range(rng.randint(1, 2))]
            turns.append(
                TurnFinished(
                    trajectory=trajectory,
                    group=group,
                    batch=number,
                    retry=0,
                    turn=turn,
                    request=RequestId(f"{trajectory}/{turn}"),
                    attempts=1,
                    prompt_new=[1] if turn == 0 else [rng.choice((3, 4))],
                    reply=reply,
                    logprobs=[-2.7] * len(reply),
                    spans=(VersionSpan(PolicyVersion(version), 0, len(reply)),),
                    finish="length",
                    action="",
                    env_s=0.0,
                    wall_s=0.0,
                    worker=WorkerId("n0-w0"),
                )
            )
        journal = tuple(range(first, len(turns) + 1))
        reward = 0.0 if member < MEMBERS else float(rng.random() < 0.5)  # the first group has no variance
        items.append(BatchItem(trajectory, group, reward, "completed", journal))
    return turns, items


def train(job: JobFile, batches: range) -> None:
    """Train `batches` on this rank, with all that lasts."""
    from services.models.files import initial_model
    from services.trainer.config import Config
    from services.trainer.data import build
    from services.trainer.learner import Learner

    learner = Learner(Config.of(job), initial_model(job))
    learner.restore()
    for number in batches:
        turns, items = make_batch(number)
        batch = build(BatchReady(batch=number, items=tuple(items)), dict(enumerate(turns, 1)))
        learner.train(number, batch)
        learner.checkpoint()
        learner.snapshot()


if __name__ == "__main__":
    train(jobfile.load(sys.argv[1]), range(BATCHES))

    from services.trainer.learner import leave_ranks

    leave_ranks()
