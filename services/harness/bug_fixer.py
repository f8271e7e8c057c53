"""A model that repairs the built-in tasks: what an emulated engine says where a harness needs replies that make sense.

It has the solutions from the task files and learns nothing: for trying a set-up, and for its tests, where no model is at hand.
Named in a job file as `emulation.replies`, with `environment.tokenizer = "services.environments.byte_tokenizer:ByteTokenizer"`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from services.environments.byte_tokenizer import SPECIAL, ByteTokenizer
from services.harness.tasks import BUILT_IN, Task, load_tasks

TOKENIZER: Final = ByteTokenizer()
TURNS: Final = 4
BEGIN: Final = 256 + SPECIAL.index("<|im_start|>")


def call(reason: str, command: str) -> str:
    """A reply with one command, as mini-swe-agent's tool."""
    arguments = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{reason}\n<tool_call>\n{arguments}\n</tool_call>"


class BugFixer:
    """Looks, repairs, tests, submits: a command a turn, which one follows from the prompt alone."""

    def __init__(self) -> None:
        self.tasks = load_tasks(BUILT_IN)

    def reply(self, prompt: Sequence[int], seed: int) -> list[int]:
        """The next command of the conversation that a prompt is."""
        assistant = TOKENIZER.encode("assistant\n")
        turn = sum(
            list(prompt[index + 1 : index + 1 + len(assistant)]) == assistant
            for index, token in enumerate(prompt)
            if token == BEGIN
        )
        text = TOKENIZER.decode(prompt)
        task = next((task for task in self.tasks if task.statement in text), None)
        return [*TOKENIZER.encode(self.said(turn - 1, task, seed)), TOKENIZER.eos_id]

    def said(self, turn: int, task: Task | None, seed: int) -> str:
        """The reply of a turn, counted from 0."""
        if task is None:
            return call("There is no task that I know.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
        repair = "\n".join(f"cat > {name} <<'END'\n{text.strip()}\nEND" for name, text in task.solution.items())
        return [
            call("Let me look at what is there.", "ls -R . && cat */__init__.py && python -m unittest"),
            call("The package is to be corrected.", repair if self.knows(seed) else "python -c 'pass'"),
            call("Now the test.", "python -m unittest"),
            call("That is all.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ][min(turn, TURNS - 1)]

    def knows(self, seed: int) -> bool:
        """Whether it repairs anything, in a turn with this seed."""
        return True


class Sometimes(BugFixer):
    """The same, but every second time, by the seed, it changes nothing."""

    def knows(self, seed: int) -> bool:
        return seed % 2 == 0
