"""A native library's panic becomes one sentence; what ends a program or a task passes."""

import asyncio
from types import SimpleNamespace

import pytest

from kvforge.cli import main
from kvforge.common.errors import EngineError, RequestError
from kvforge.common.native_calls import is_panic, panics_as
from tests.support.models.text_tokenizers import PANICKING_TEXT, panicking

SENTENCE = "the text cannot be read; send another one."


def test_a_panic_becomes_the_sentence():
    backend = panicking().backend
    with pytest.raises(BaseException) as panic:
        backend.encode(PANICKING_TEXT)
    assert is_panic(panic.value)
    assert not isinstance(panic.value, Exception)
    for kind, words in ((RequestError, ["the text cannot be read", "send another one"]), (EngineError, [SENTENCE])):
        with pytest.raises(kind) as error, panics_as(kind, *words):
            backend.encode(PANICKING_TEXT)
        assert str(error.value) == SENTENCE
        assert error.value.__suppress_context__


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, ValueError])
def test_other_errors_pass(kind):
    assert not is_panic(kind())
    with pytest.raises(kind), panics_as(RequestError, SENTENCE):
        raise kind


def test_no_error_passes():
    with panics_as(RequestError, SENTENCE):
        result = panicking().backend.encode("a fox").ids
    assert result


def test_a_command_prints_one_line_for_a_panic(monkeypatch, capsys):
    def run(args):
        panicking().backend.encode(PANICKING_TEXT)

    parser = SimpleNamespace(parse_args=lambda argv: SimpleNamespace(quiet=False, verbose=False, run=run))
    monkeypatch.setattr("kvforge.cli.make_parser", lambda: parser)
    assert main(["anything"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("kvforge: error: a library failed on this input")
