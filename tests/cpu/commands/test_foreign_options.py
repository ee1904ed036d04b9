"""Hints for options that a command does not have: near in meaning, and of options that are there."""

import re

import pytest

from kvforge.cli import main, make_parser
from kvforge.foreign_options import NEAREST, OTHERWISE
from kvforge.suggesting_parser import commands_of, nearest_option, options_below

COMMANDS = {name: set(options_below(parser)) for name, parser in commands_of(make_parser()).items()}
EVERY = set().union(*COMMANDS.values())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serve", "X", "--enable-lora"], "; LoRA adapters are not supported: merge them into the checkpoint\n"),
        (["serve", "X", "--cache-type-k", "q8_0"], "; the nearest option here is --kv-dtype\n"),
        (["serve", "X", "--spec-type", "ngram"], "; the nearest option here is --speculative-method\n"),
        (["serve", "X", "-ngl", "99"], "; an engine is for one target, which kvforge build --target chooses\n"),
        (["generate", "X", "-n", "4"], "; the nearest option here is --max-tokens\n"),
        (["generate", "X", "-ctk", "q8_0"], "; the nearest option here is --kv-dtype\n"),
        (["serve", "X", "-cb"], "; this is always on\n"),
        (["serve", "X", "-fa"], "; operators are chosen by the target\n"),
        (["serve", "-m", "X"], "; name the engine or checkpoint without an option\n"),
        (["build", "X", "--enable-prefix-caching"], "; this is always on\n"),
        (["serve", "X", "--max_model_len=8"], "; did you mean --max-model-len?\n"),
        (["build", "X", "--max_seq_len", "8"], "; did you mean --max-seq-len?\n"),
        (["build", "X", "--max-seq", "8"], "; did you mean --max-seq-len?\n"),
        (["build", "X", "--port", "1"], "; --port is an option of kvforge serve\n"),
        (["build", "X", "--batch-size", "1"], "; the nearest option here is --max-num-tokens\n"),
        (
            ["serve", "X", "--override-generation-config", "{}"],
            "; give --temperature, --top-p, --top-k, --min-p or --repetition-penalty\n",
        ),
        (["build", "X", "--no-openai"], "; --no-openai is an option of kvforge serve\n"),
        (["serve", "X", "--page"], "; did you mean --page-size?\n"),
        (["serve", "X", "--max-logprobs", "3"], "unrecognized arguments: --max-logprobs 3\n"),
    ],
)
def test_a_hint_is_near_in_meaning_or_absent(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    first, second = capsys.readouterr().err.splitlines(keepends=True)
    assert first.endswith(hint) and "--help lists" in second


@pytest.mark.parametrize("words", [["serve", "X", "-n", "4"], ["serve", "X", "-p", "4"], ["build", "X", "-n", "4"]])
def test_a_short_option_is_not_the_beginning_of_another(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"unrecognized arguments: {' '.join(words[2:])}" in capsys.readouterr().err


def test_short_options_are_taken_with_their_values_and_together() -> None:
    parsed = make_parser().parse_args(["serve", "X", "-vc2048", "-np", "4"])
    assert (parsed.max_seq_len, parsed.max_num_seqs) == (2048, 4)
    parsed = make_parser().parse_args(["bench", "X", "-p", "8", "-n", "4"])
    assert (parsed.input_len, parsed.output_len) == (8, 4)


def test_no_hint_means_the_opposite_or_something_else() -> None:
    options = COMMANDS["serve"]
    for option in options:
        negated = option.replace("--no-", "--") if option.startswith("--no-") else f"--no-{option[2:]}"
        assert nearest_option(negated, options - {negated}) != option
    for word in ("--enable-lora", "--root-path", "--seed", "--response-role", "--p", "-x"):
        assert nearest_option(word, options) is None, word


@pytest.mark.parametrize("name", NEAREST)
def test_the_nearest_option_is_one(name: str) -> None:
    owners = [command for command, options in COMMANDS.items() if NEAREST[name] in options]
    assert owners
    word = f"-{name}" if len(name) == 1 else f"--{name}"
    assert not [command for command in owners if word in COMMANDS[command]], "the row is never read"
    assert not set(NEAREST) & set(OTHERWISE)


@pytest.mark.parametrize("said", sorted(set(OTHERWISE.values())))
def test_what_is_said_of_options_is_there(said: str) -> None:
    assert set(re.findall(r"--[a-z-]+", said)) <= EVERY
    assert set(re.findall(r"kvforge ([a-z-]+)", said)) <= COMMANDS.keys()
    assert not said.endswith(".")


def test_names_are_written_as_they_are_looked_up() -> None:
    assert all(re.fullmatch(r"[a-z][a-z0-9-]*", name) for name in (*NEAREST, *OTHERWISE))
