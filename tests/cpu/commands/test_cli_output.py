"""The command line when its output cannot be written, and when a word of it is misspelt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.cli import COMMANDS, main
from tests.support.sessions.fake import fake_manifest

COMMAND = [sys.executable, "-m", "kvforge.cli", "plan", "--model", "llama-3.1-8b", "--json"]


def test_a_reader_that_goes_away_is_no_error_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(COMMAND, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_full_disk_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(COMMAND, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode != 0
    assert result.stderr.splitlines()[0] == "kvforge: error: [Errno 28] No space left on device."
    assert "Traceback" not in result.stderr


def test_a_letter_that_the_terminal_lacks_is_escaped_and_ends_nothing() -> None:
    text = r"'Gr\xfc\xdfe \udcff'"
    program = f"from kvforge import cli; cli.make_parser = lambda: print({text}); cli.main(['plan'])"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.stdout == text.strip("'") + "\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["biuld", "X"], "; did you mean build?"),
        (["build", "X", "--kv-dtipe", "fp8"], "unrecognized arguments: --kv-dtipe fp8; did you mean --kv-dtype?"),
        (["build", "X", "--ouptut=Y"], "unrecognized arguments: --ouptut=Y; did you mean --output?"),
        (["build", "X", "--kv-dtyp", "fp8"], "; did you mean --kv-dtype?"),
        (["serve", "X", "--kv-prediction", "P"], "; --kv-prediction is an option of kvforge build\n"),
        (["plan", "--model", "X", "--weight-dtype", "flaot32"], "; did you mean float32?"),
        (["--verion", "doctor"], "unrecognized arguments: --verion"),
        (["build", "X", "--zzz"], "unrecognized arguments: --zzz\n"),
    ],
)
def test_a_misspelt_word_gets_a_suggestion(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    listed = capsys.readouterr().err
    assert all(f"    {name.replace('_', '-')} " in listed for name in COMMANDS)


@pytest.mark.parametrize(("cut", "said"), [(1, "cut 1 of 2 layers"), (2, "parameters, 2 layers")])
def test_a_build_speaks_of_a_cut_where_there_is_one(
    cut: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = fake_manifest(cut=cut)
    monkeypatch.setattr("kvforge.compiler.build_engine", lambda *_, **__: manifest)
    assert main(["build", str(tmp_path), "-o", "Y"]) == 0
    assert said in capsys.readouterr().out
