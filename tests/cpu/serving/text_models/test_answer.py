"""Rows of tokens become responses of text: whole characters, in order, one by one or together."""

import random
from pathlib import Path

import numpy as np
import pytest

from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.contract.failures import CANCELLED, SHUTTING_DOWN
from kvforge.serving.contract.text_rows import REQUEST_END, SEQUENCE_END, TextRow
from kvforge.serving.text_models.answer import Answer
from tests.support.models.checkpoints import write_byte_tokenizer

TEXT = "añb 日本 🙂 end"
BOTH_ENDS = SEQUENCE_END | REQUEST_END


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    loaded = Tokenizer.from_dir(path)
    assert loaded is not None
    return loaded


def add(answer: Answer, tokens: list[int], flags: int = 0, sequence: int = 0, **arrays: np.ndarray) -> None:
    answer.add(TextRow(answer.key, sequence, flags, tokens, [], arrays))


def texts(answer: Answer) -> list[str]:
    return [piece.text.decode() for piece in answer.pieces()]


@pytest.mark.parametrize("interval", [0, 1, 8])
def test_pieces_join_to_the_text_and_never_split_a_character(tokenizer: Tokenizer, interval: int) -> None:
    ids = tokenizer.encode(TEXT)
    assert len(ids) > len(TEXT)
    for seed in range(20):
        rng = random.Random(seed)
        answer, pieces = Answer(1, None, tokenizer, interval), list[str]()
        for at, token in enumerate(ids):
            add(answer, [token], BOTH_ENDS if at == len(ids) - 1 else 0)
            if rng.random() < 0.5:
                pieces += texts(answer)
        pieces += texts(answer)
        assert "".join(pieces) == TEXT and "\ufffd" not in "".join(pieces)
        assert (len(pieces) == len(ids)) == (interval == 1)


def test_sequences_do_not_mix(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("é")
    answer = Answer(1, None, tokenizer, 0)
    for sequence in (0, 1):
        add(answer, [first], sequence=sequence)
    assert texts(answer) == ["", ""]
    add(answer, [second], SEQUENCE_END, sequence=1)
    add(answer, [], BOTH_ENDS)
    last = list(answer.pieces())
    assert [(piece.text.decode(), piece.final) for piece in last] == [("é", False), ("\ufffd", True)]


def test_rows_with_arrays_stay_apart(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    answer = Answer(1, None, tokenizer, 0)
    log_probs = np.array([[[-1.0]]], np.float32)
    add(answer, [a])
    add(answer, [b], output_log_probs=log_probs)
    add(answer, [a])
    add(answer, [b], BOTH_ENDS)
    pieces = list(answer.pieces())
    assert [piece.text for piece in pieces] == [b"a", b"b", b"ab"]
    assert [list(piece.arrays) for piece in pieces] == [[], ["output_log_probs"], []]


def test_a_failure_comes_behind_what_is_there(tokenizer: Tokenizer) -> None:
    answer = Answer(1, None, tokenizer)
    add(answer, tokenizer.encode("a"))
    answer.fail(SHUTTING_DOWN)
    assert answer.take_failure() is None
    assert texts(answer) == ["a"]
    assert answer.take_failure() == SHUTTING_DOWN


def test_a_row_that_comes_while_an_end_is_looked_for_comes_before_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, look = Answer(1, None, tokenizer), Answer.waits.fget
    assert look is not None

    def then_more_comes(of: Answer) -> bool:
        found = bool(look(of))
        if not answer.complete.is_set():
            add(answer, tokenizer.encode("a"))
            answer.fail(SHUTTING_DOWN)
        return found

    monkeypatch.setattr(Answer, "waits", property(then_more_comes))
    assert answer.take_failure() is None
    assert texts(answer) == ["a"] and answer.take_failure() == SHUTTING_DOWN


def test_a_client_that_has_gone_is_sent_nothing_more(tokenizer: Tokenizer) -> None:
    answer = Answer(1, None, tokenizer)
    for token in tokenizer.encode("abc"):
        add(answer, [token])
    pieces = answer.pieces()
    assert next(pieces).text == b"a"
    answer.fail(CANCELLED)
    assert list(pieces) == [] and answer.take_failure() == CANCELLED


def test_nothing_fails_behind_the_last_row(tokenizer: Tokenizer) -> None:
    answer = Answer(1, None, tokenizer)
    add(answer, tokenizer.encode("a"), BOTH_ENDS)
    answer.fail(CANCELLED)
    assert texts(answer) == ["a"] and answer.take_failure() is None


def test_the_prompt_is_what_the_first_tokens_are_decoded_after(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("é")
    answer = Answer(1, None, tokenizer)
    answer.add(TextRow(1, 0, BOTH_ENDS, tokenizer.encode("b"), [first, second], {}))
    assert texts(answer) == ["b"]
