"""Every command says what it does in a sentence, shows a line to copy, and writes defaults in one way."""

import argparse
import re
import shlex
import subprocess
import sys

import pytest

from kvforge.cli import COMMANDS, main, make_parser
from kvforge.commands.parsers import HelpFormatter
from kvforge.kv_policies import policies

PARSER = make_parser()
NAMES = [name.replace("_", "-") for name in COMMANDS]


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command's, and of a command with commands of its own, theirs."""
    found, todo = {}, {"kvforge": PARSER}
    while todo:
        name, parser = todo.popitem()
        found[name] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo |= {f"{name} {command}": each for command, each in action.choices.items()}
    return found


ALL = parsers()


def helps(parser: argparse.ArgumentParser) -> dict[str, str]:
    """What the help says of each argument."""
    formatter = parser._get_formatter()
    shown = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    return {"/".join(each.option_strings) or each.dest: formatter._expand_help(each) for each in shown}


def test_all_commands_are_here() -> None:
    assert {f"kvforge {name}" for name in NAMES} < ALL.keys() and len(ALL) > len(NAMES)


@pytest.mark.parametrize("name", ALL)
def test_a_command_has_a_sentence_and_an_example(name: str) -> None:
    parser = ALL[name]
    assert parser.formatter_class is HelpFormatter
    assert parser.description is not None and re.match(r"[A-Z].+[^.]\.(\s|$)|[A-Z].*\.\.\.$", parser.description)
    assert parser.epilog is not None and parser.epilog.startswith("example:\n  kvforge ")
    for line in parser.epilog.splitlines()[1].split("&&"):
        words = shlex.split(line)
        args = PARSER.parse_args(words[1:])
        assert f"kvforge {args.command}".startswith(name) or name.startswith(f"kvforge {args.command}")


@pytest.mark.parametrize("name", ALL)
def test_every_argument_is_explained_and_defaults_have_one_form(name: str) -> None:
    texts = helps(ALL[name])
    assert [argument for argument, text in texts.items() if not text] == []
    outside = {argument: re.sub(r"\(default: [^()]+\)$", "", text) for argument, text in texts.items()}
    assert {argument: text for argument, text in outside.items() if "default" in text} == {}
    assert {argument: text for argument, text in outside.items() if re.search(r"\([\d.]+\)$", text)} == {}


def test_the_display_options_stand_before_a_command_or_after_it() -> None:
    for words in (["-q", "doctor"], ["doctor", "--quiet"]):
        args = PARSER.parse_args(words)
        assert args.quiet and not args.verbose
    assert PARSER.parse_args(["-v", "doctor", "-q"]).verbose
    assert not PARSER.parse_args(["doctor"]).quiet


def test_verbose_says_where_an_error_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "no-such-engine"]) == 1
    plain = capsys.readouterr().err
    assert main(["-v", "inspect", "no-such-engine"]) == 1
    verbose = capsys.readouterr().err
    assert len(plain.splitlines()) == 1 and "Traceback" in verbose and verbose.endswith(plain)


def test_help_needs_no_terminal() -> None:
    result = subprocess.run([sys.executable, "-m", "kvforge", "plan", "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and "(default: 256)" in result.stdout and result.stderr == ""


def test_policies_stand_whole_in_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = ALL["kvforge build"].format_help().splitlines()
    words = {word.strip(";,") for line in lines for word in line.split()}
    assert {*policies(), "docs/kv-policies.md"} <= words
    assert max(map(len, lines)) <= 80
