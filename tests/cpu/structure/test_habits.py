"""docs/habits.md: every option of the last column is one here, and its row's spellings are taken or hinted at."""

import re
import shlex
from pathlib import Path

import pytest

from kvforge.cli import make_parser
from kvforge.foreign_options import ALIASES, ALWAYS_ON, NEAREST, OTHERWISE
from kvforge.suggesting_parser import commands_of

PAGE = Path(__file__).parents[3] / "docs" / "habits.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| what")
]
COMMANDS = commands_of(make_parser())
TAKEN = {option for parser in COMMANDS.values() for option in parser._option_string_actions}
OPTION = re.compile(r"`(--?[A-Za-z][\w-]*)[^`]*`")
ELSEWHERE = {"--verbose", "--tensor-split", "--spec-type", "--json-schema-file", "--grammar-file", "--input-mean",
             "--output-mean"}  # fmt: skip
"""Options of programs that serve nothing, or that have no near one here."""


def test_there_are_sixty() -> None:
    assert len(ROWS) >= 60 and all(len(row) == 5 for row in ROWS)
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_is_named_here_is_here(row: list[str]) -> None:
    for code in re.findall(r"`([^`]+)`", row[4]):
        words = shlex.split(code)
        if words[0] == "kvforge":
            assert words[1] in COMMANDS
        assert {word for word in words if word.startswith("-")} <= TAKEN, code


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_is_typed_elsewhere_is_taken_or_answered(row: list[str]) -> None:
    """And a spelling that is taken stands for an option of its row."""
    here = set(re.findall(r"--[a-z-]+", row[4]))
    for cell in row[1:4]:
        for option in OPTION.findall(cell):
            spelt = option.replace("_", "-")
            name = spelt.lstrip("-")
            if spelt in TAKEN:
                owners = {own for own, aliases in ALIASES.items() if spelt in aliases}
                assert not owners or not here or owners & here or spelt in here or spelt in ALWAYS_ON, (option, owners)
            else:
                assert name in NEAREST or name in OTHERWISE or spelt in ELSEWHERE, option
