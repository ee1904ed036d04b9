"""Options spelt as vLLM, llama.cpp and TensorRT-LLM spell them are those of this project."""

import argparse

import pytest

from kvforge.cli import make_parser
from kvforge.foreign_options import ALIASES, ALWAYS_ON, NEAREST, OTHERWISE
from kvforge.suggesting_parser import aliases_of, commands_of

COMMANDS = commands_of(make_parser())
WORDS = {
    "generate": ["X"],
    "chat": ["X"],
    "serve": ["X"],
    "bench": ["X"],
    "build": ["X", "-o", "Y"],
    "plan": ["--model", "X"],
    "eval": ["X"],
    "demo": [],
}
"""What a command needs besides."""


def value_for(action: argparse.Action) -> list[str]:
    """A value that an option takes, and that is not its default."""
    if action.nargs == 0:
        return []
    return ["7"] if action.choices is None else [str(next(each for each in action.choices if each != action.default))]


CASES = [
    (command, option, alias)
    for command in WORDS
    for option, aliases in ALIASES.items()
    if option in COMMANDS[command]._option_string_actions
    for alias in aliases
]


@pytest.mark.parametrize(("command", "option", "alias"), CASES)
def test_an_alias_is_the_option(command: str, option: str, alias: str) -> None:
    parser = make_parser()
    values = value_for(COMMANDS[command]._option_string_actions[option])
    words = [command, *WORDS[command]]
    own = parser.parse_args([*words, option, *values])
    assert own == parser.parse_args([*words, alias, *values])
    assert own != parser.parse_args(words)


def test_every_alias_has_an_option_that_a_command_has() -> None:
    assert {option for _, option, _ in CASES} == set(ALIASES)


def test_a_spelling_means_one_thing_to_a_command() -> None:
    spellings = [alias for aliases in ALIASES.values() for alias in aliases]
    for parser in COMMANDS.values():
        own = [alias for action in parser._actions for alias in aliases_of(action)]
        assert len(set(own)) == len(own)
    hints = {f"--{name}" for name in (*NEAREST, *OTHERWISE)} - set(ALWAYS_ON)
    assert not hints & set(spellings)
    own = {option for parser in COMMANDS.values() for action in parser._actions for option in action.option_strings}
    assert not own & set(spellings)
    assert set(ALWAYS_ON) <= set(COMMANDS["serve"]._option_string_actions)
