"""`pearl completion SHELL`: a completion script, from the command line's own description."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from services.cli.parser import build_parser


class Option(msgspec.Struct, frozen=True):
    """One option of a command."""

    flags: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


class Command(msgspec.Struct, frozen=True):
    """One subcommand: its options, and the words that its positional argument may be."""

    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...]


def commands(parser: argparse.ArgumentParser) -> tuple[Command, ...]:
    """Every subcommand, in order."""
    untyped: Any = parser  # argparse describes itself in private attributes only
    for action in untyped._actions:
        if hasattr(action, "_choices_actions"):  # the subcommands
            helps: dict[str, str] = {each.dest: each.help or "" for each in action._choices_actions}
            return tuple(_command(name, helps.get(name, ""), sub) for name, sub in action.choices.items())
    raise AssertionError("the parser has subcommands")


def _command(name: str, text: str, parser: argparse.ArgumentParser) -> Command:
    options: list[Option] = []
    words: list[str] = []
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        choices = tuple(str(choice) for choice in action.choices or ())
        if action.option_strings:
            options.append(Option(tuple(action.option_strings), action.help or "", action.nargs != 0, choices))
        else:
            words += choices
    if name == "service":
        from services.cli.service import names

        words += names()
    return Command(name, text, tuple(options), tuple(words))


def bash(found: Iterable[Command]) -> str:
    """For bash; zsh takes it through `bashcompinit`."""
    found = tuple(found)
    lines = [
        "_pearl() {",
        '  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(each.name for each in found)} --help" -- "$current")); return',
        "  fi",
        '  case "${COMP_WORDS[1]}:$previous" in',
    ]
    for command in found:
        for option in command.options:
            if not option.takes_value:
                continue
            pattern = "|".join(f"{command.name}:{flag}" for flag in option.flags)
            # Without words, bash completes file names (-o default).
            lines.append(
                f'    {pattern}) COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$current")); return;;'
            )
    lines += ["  esac", '  case "${COMP_WORDS[1]}" in']
    for command in found:
        flags = " ".join(flag for option in command.options for flag in option.flags)
        lines.append(f'    {command.name}) words="{" ".join((*command.words, flags))}";;')
    lines += [
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _pearl pearl",
    ]
    return "\n".join(lines) + "\n"


def zsh(found: Iterable[Command]) -> str:
    """For zsh."""
    return "autoload -U +X compinit bashcompinit\ncompinit\nbashcompinit\n" + bash(found)


def fish(found: Iterable[Command]) -> str:
    """For fish."""
    lines: list[str] = []
    for command in found:
        lines.append(f"complete -c pearl -n __fish_use_subcommand -f -a {command.name} -d {_quoted(command.help)}")
        inside = f"-n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"complete -c pearl {inside} -f -a {_quoted(' '.join(command.words))}")
        for option in command.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            value = " -r" if option.takes_value else ""
            value += f" -f -a {_quoted(' '.join(option.choices))}" if option.choices else ""
            lines.append(f"complete -c pearl {inside} {flags}{value} -d {_quoted(option.help)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    write = {"bash": bash, "zsh": zsh, "fish": fish}[arguments.shell]
    sys.stdout.write(write(commands(build_parser())))
    return 0
