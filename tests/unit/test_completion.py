"""`pearl completion`: the scripts name every command and option, and bash completes by its own."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from services.cli.__main__ import main
from services.cli.completion import bash, commands
from services.cli.parser import build_parser


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_name_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for command in commands(build_parser()):
        assert command.name in text
    assert "orchestrator" in text  # `pearl service NAME`


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pearl", "do"], ["doctor"]),
        (["pearl", "bench", "sn"], ["snapshot"]),
        (["pearl", "demo", "--engine", "em"], ["emulated"]),
        (["pearl", "demo", "--se"], ["--seed"]),
        (["pearl", "service", "orch"], ["orchestrator"]),
        (["pearl", "up", "-c", "x"], []),
    ],
)
def test_bash_completes(words: list[str], expected: list[str]) -> None:
    script = bash(commands(build_parser()))
    script += f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _pearl; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected
