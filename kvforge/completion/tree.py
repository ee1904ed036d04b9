"""What can stand on a command line, read from argparse."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """One option with all its spellings; ``choices`` are its values where only these are allowed."""

    flags: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """``path`` are the words up to it, ``parts`` the commands that may follow with what each does, ``words`` the
    arguments that may, where only these are allowed."""

    path: str
    options: tuple[Option, ...]
    parts: tuple[tuple[str, str], ...]
    words: tuple[str, ...]


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """Return the command of a parser and all commands below it."""
    return list(_walk(parser.prog, parser))


def _walk(path: str, parser: argparse.ArgumentParser) -> Iterator[Command]:
    options: list[Option] = []
    words: list[str] = []
    below: dict[str, argparse.ArgumentParser] = {}
    helps: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            helps = {each.dest: each.help or "" for each in action._choices_actions}
        elif action.option_strings:
            flags, choices = tuple(action.option_strings), tuple(map(str, action.choices or ()))
            options.append(Option(flags, _text(action.help), action.nargs != 0, choices))
        else:
            words += map(str, action.choices or ())
    yield Command(path, tuple(options), tuple((name, _text(helps[name])) for name in below), tuple(words))
    for name, each in below.items():
        yield from _walk(f"{path} {name}", each)


def _text(help: str | None) -> str:
    """The first clause of a help, as one plain line."""
    line = " ".join((help or "").replace("%%", "%").split())
    return line.split("; ")[0].split(" (default")[0].split(": ")[0]
