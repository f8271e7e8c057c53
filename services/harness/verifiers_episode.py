"""One episode of an environment written for `verifiers` (0.4: `verifiers.v1`), as the program of an episode.

    [harness]
    command = ["/path/to/its/environment/bin/python", "{harness}/verifiers_episode.py"]
    reward = "program"
    options = { env = { taskset = { id = "my-taskset" }, agent = { max_turns = 8 } } }

A file by itself: it needs `verifiers` and imports nothing of PEARL, since the two want different versions of the same libraries.
`options.env` is a verifiers run's `[env]` block. The task is that of the seed: its position in the taskset, or among the first
`options.tasks` (1000) of one that has no end. Its agent speaks through verifiers' own relay to the gateway, with the session's key. The
reward is the trace's. Environments of several agents are refused: a session is one conversation.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast


async def play(options: dict[str, Any]) -> dict[str, Any]:
    """What is written to PEARL_RESULT. Raises RuntimeError where the episode failed."""
    # Any: verifiers is not in PEARL's environment, so nothing is known of its types
    vf: Any = importlib.import_module("verifiers.v1")
    loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    env = loaders.load_environment(loaders.resolve_env_config(options["env"]))
    task = task_of(env.taskset, int(os.environ["PEARL_TASK_SEED"]), int(options.get("tasks", 1000)))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(model=os.environ["PEARL_MODEL"], client=client)
    async with env.serving():
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, context)
    traces: list[Any] = list(episode.traces)
    if len(traces) != 1:
        raise RuntimeError(f"the episode has {len(traces)} agents' traces; a session can train one")
    if not episode.ok:
        raise RuntimeError(f"the episode failed: {[*episode.errors, *traces[0].errors]}")
    return {"reward": float(traces[0].reward), "status": "truncated" if traces[0].is_truncated else "completed"}


def task_of(taskset: Any, seed: int, most: int) -> Any:
    """The task that a seed stands for. Raises RuntimeError where there is none."""
    if not taskset.bounded:
        return next(cast("Iterator[Any]", itertools.islice(taskset, seed % most, None)))
    tasks: list[Any] = list(taskset)
    if not tasks:
        raise RuntimeError("the taskset is empty")
    return tasks[seed % len(tasks)]


def main() -> int:
    """0: played, and the result is written. 1: the episode failed and is tried again. 3: verifiers is not installed."""
    options: dict[str, Any] = json.loads(os.environ["PEARL_OPTIONS"])
    if "env" not in options:
        print(
            'harness.options has no env: give verifiers\' [env] block, e.g. { taskset = { id = "..." } }',
            file=sys.stderr,
        )
        return 2
    try:
        said = asyncio.run(play(options))
    except ModuleNotFoundError as error:
        print(f"{error}: install verifiers and the taskset in the environment of {sys.executable}", file=sys.stderr)
        return 3
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    Path(os.environ["PEARL_RESULT"]).write_text(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
