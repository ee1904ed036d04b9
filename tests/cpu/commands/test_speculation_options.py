"""Options of speculation that do not go together are one sentence, before anything is loaded."""

import argparse
from pathlib import Path

import pytest

from kvforge.cli import main
from kvforge.common.errors import EngineError
from kvforge.runtime import LLMEngine
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.options import add_speculation_options, speculation_options
from tests.support.sessions.fake import FakeSession


def read(*arguments: str) -> dict:
    parser = argparse.ArgumentParser()
    add_speculation_options(parser)
    return speculation_options(parser.parse_args(arguments))


def test_what_is_left_out_has_the_defaults() -> None:
    assert read() == {"speculative": None, "early_exit_threshold": None}
    assert read("--speculative-method", "ngram")["speculative"] == SpeculativeConfig("ngram", 4, 2, 4)
    given = read("--speculative-method", "ngram", "--prompt-lookup-max", "6", "--num-speculative-tokens", "8")
    assert given["speculative"] == SpeculativeConfig("ngram", 8, 2, 6)
    given = read("--speculative-method", "suffix", "--suffix-sharing", "all", "--suffix-max-tokens", "9")
    assert given["speculative"] == SpeculativeConfig("suffix", suffix_sharing="all", suffix_max_tokens=9)
    exits = read("--early-exit-threshold", "0.9", "--early-exit-prompts")
    assert exits == {"speculative": None, "early_exit_threshold": 0.9, "early_exit_prompts": True}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--num-speculative-tokens", "4"], "--num-speculative-tokens goes with --speculative-method"),
        (["--prompt-lookup-min", "2"], "--prompt-lookup-min goes with --speculative-method ngram"),
        (
            ["--speculative-method", "early_exit", "--prompt-lookup-max", "3"],
            "--prompt-lookup-max goes with --speculative-method ngram",
        ),
        (["--draft-engine", "x"], "--draft-engine goes with --speculative-method draft_model"),
        (["--speculative-method", "ngram", "--draft-engine", "x"], "--draft-engine goes with"),
        (["--speculative-method", "draft_model"], "add --draft-engine"),
        (["--speculative-method", "ngram", "--num-speculative-tokens", "0"], "give 1 or more"),
        (["--speculative-method", "ngram", "--prompt-lookup-min", "5"], "give 1 <= min <= max"),
        (["--speculative-method", "ngram", "--prompt-lookup-max", "65"], "max <= 64"),
        (
            ["--speculative-method", "ngram", "--suffix-sharing", "all"],
            "--suffix-sharing goes with --speculative-method",
        ),
        (["--speculative-method", "suffix", "--suffix-max-tokens", "0"], "suffix_max_tokens is 0; give 1 to"),
        (
            ["--speculative-method", "suffix", "--suffix-max-tokens", "9", "--suffix-sharing", "off"],
            "--suffix-max-tokens does not go with --suffix-sharing off",
        ),
        (["--early-exit-prompts"], "--early-exit-prompts goes with --early-exit-threshold; add that"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "serve", "bench"])
def test_refused(command: str, arguments: list, sentence: str, tmp_path: Path, capsys) -> None:
    prompt = ["--prompt", "x"] if command == "generate" else []
    assert main([command, str(tmp_path), *arguments, *prompt]) == 1
    errors = capsys.readouterr().err
    assert sentence in errors and errors.startswith("kvforge: error: ") and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "manifest", "sentence"),
    [
        ({"speculative": SpeculativeConfig("ngram", 5)}, {"max_draft_len": 4}, "--max-draft-len 5"),
        ({"speculative": "ngram"}, {"max_draft_len": 4}, "give a SpeculativeConfig"),
        ({"speculative": SpeculativeConfig("early_exit")}, {"max_draft_len": 4}, "has no early exit"),
        ({"early_exit_threshold": 0.9}, {}, "has no early exit"),
        ({"early_exit_prompts": True}, {"early_exit": True}, "goes with early_exit_threshold; give a threshold"),
        ({"early_exit_threshold": 0.0}, {"early_exit": True}, "give a probability"),
        ({"early_exit_threshold": float("nan")}, {"early_exit": True}, "give a probability"),
        (
            {"early_exit_threshold": 0.9, "speculative": SpeculativeConfig("ngram")},
            {"early_exit": True, "max_draft_len": 4},
            "leave one of them out",
        ),
    ],
)
def test_an_engine_that_cannot_speculate_so_says_so(options: dict, manifest: dict, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        LLMEngine(session=FakeSession(**manifest), num_pages=64, **options)


def test_unknown_methods_and_engines_that_nobody_drafts_with() -> None:
    with pytest.raises(EngineError, match="ngram, suffix, draft_model, early_exit, eagle3"):
        SpeculativeConfig("medusa")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="suffix_sharing is 'mine'; give scope, all, off"):
        SpeculativeConfig("suffix", suffix_sharing="mine")  # type: ignore[arg-type]
    for config in ({"method": "draft_model"}, {"method": "ngram", "draft_engine": Path("x")}):
        with pytest.raises(EngineError, match="go together"):
            SpeculativeConfig(**config)  # type: ignore[arg-type]
