"""Completion of the command line, in the shells that are here."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvforge.cli import COMMANDS, main, make_parser
from kvforge.completion.scripts import SHELLS
from kvforge.completion.tree import commands_of

NAMES = [name.replace("_", "-") for name in COMMANDS]
CASES = {
    "kvforge ": set(NAMES),
    "kvforge do": {"doctor"},
    "kvforge -q cache ": {"list", "remove", "clear", "save", "load"},
    "kvforge cache list --": {"--help", "--json", "--prefix-dir", "--quiet", "--verbose"},
    "kvforge completion ": set(SHELLS),
    "kvforge serve ENGINE --log-level ": {"debug", "info", "warning", "error"},
    "kvforge serve ENGINE --log-format j": {"json"},
    "kvforge build CHECKPOINT --kv": {"--kv-dtype", "--kv-policy", "--kv-prediction", "--kv-scorer"},
    "kvforge build CHECKPOINT --no-": {"--no-early-exit", "--no-decoupled-mode"},
}
FILES = ["kvforge build ", "kvforge build CHECKPOINT -o ", "kvforge generate no-such-engine --json-schema ../f"]
BASH = """
source "$1"
read -ra COMP_WORDS <<< "$2"
[[ $2 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_kvforge
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'source $argv[1]; complete -C "$argv[2]"'


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell, script in SHELLS.items():
        (folder / shell).write_text(script(commands_of(make_parser())))
    return folder


def shell(name: str, *words: str) -> list[str]:
    """What the shell prints, line by line; a shell that is not here skips the test."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    result = subprocess.run([path, *words], capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return result.stdout.split("\n")[:-1]


def in_bash(scripts: Path, line: str) -> set[str]:
    return {word for word in shell("bash", "--norc", "-c", BASH, "bash", str(scripts / "bash"), line) if word}


@pytest.mark.parametrize("line", CASES)
def test_bash_offers_what_argparse_takes(line: str, scripts: Path) -> None:
    assert in_bash(scripts, line) == CASES[line]


@pytest.mark.parametrize("line", FILES)
def test_bash_offers_files_elsewhere(line: str, scripts: Path) -> None:
    assert in_bash(scripts, line) == set()  # then `-o default` has its turn
    registered = shell("bash", "--norc", "-c", f'source "{scripts / "bash"}"; complete -p kvforge')
    assert registered == ["complete -o default -F _kvforge kvforge"]


@pytest.mark.parametrize("line", CASES)
def test_fish_offers_the_same(line: str, scripts: Path) -> None:
    found = {text.partition("\t")[0] for text in shell("fish", "--no-config", "-c", FISH, str(scripts / "fish"), line)}
    assert CASES[line] <= found and found <= CASES[line] | {"-h", "-v", "-q", "--version"}


def test_zsh_takes_the_script_of_bash(scripts: Path) -> None:
    code = f'source "{scripts / "zsh"}"; print -- $_comps[kvforge] $functions[_kvforge]'
    assert "_bash_complete -o default -F _kvforge" in shell("zsh", "-f", "-c", code)[0]


def test_every_command_is_in_every_script(capsys: pytest.CaptureFixture[str]) -> None:
    for name in SHELLS:
        assert main(["completion", name]) == 0
        script = capsys.readouterr().out
        assert [command for command in NAMES if f"kvforge {command}" not in script] == []
        assert "--speculative-method" in script or "-l speculative-method" in script
