"""Long texts are encoded as short ones are, and beside other threads; a panic of the library is a refusal."""

import threading
import time

import pytest

from kvforge.common.errors import EngineError, RequestError
from kvforge.runtime.text import tokenizer as module
from kvforge.runtime.text.detokenizer import Detokenizer
from kvforge.runtime.text.tokenizer import LONG_TEXT, Tokenizer
from tests.support.models.text_tokenizers import (
    PANICKING_TEXT,
    byte_fallback,
    byte_level,
    panicking,
    panicking_decoder,
)

WORDS = "The quick brown fox </s> naïve 日本語 😀\n"


def test_long_texts_have_the_same_tokens():
    for tokenizer in (byte_level(), byte_fallback()):
        text = WORDS * (LONG_TEXT // len(WORDS) + 1)
        for special in (False, True):
            expected = tokenizer.backend.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, special) == expected


def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer, started = byte_level(), threading.Event()
    text = WORDS * (400_000 // len(WORDS))

    def encode():
        started.set()
        tokenizer.encode(text)

    thread, num_turns = threading.Thread(target=encode), 0
    thread.start()
    started.wait()
    while thread.is_alive():
        num_turns += 1
        time.sleep(0.001)
    assert num_turns > 3


def test_a_list_of_texts_and_a_count_agree_with_encode():
    texts = [WORDS, "", " fox", WORDS * 500]
    for tokenizer in (byte_level(), byte_fallback()):
        expected = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        assert tokenizer.encode_all(texts) == expected
        assert [tokenizer.count(text) for text in texts] == list(map(len, expected))


def test_a_tokenizer_that_panics_refuses_the_text_and_goes_on():
    tokenizer = panicking()
    before = tokenizer.encode("a fox")
    long = "b" * LONG_TEXT + PANICKING_TEXT
    calls = [tokenizer.encode, tokenizer.count, lambda text: tokenizer.encode_all(["fox", text])]
    for text in (PANICKING_TEXT, long):
        for call in calls:
            with pytest.raises(RequestError, match=r"^the model's tokenizer fails on this text; change the text\.$"):
                call(text)
    assert tokenizer.encode("a fox") == before
    assert tokenizer.decode(before) == "a fox"


def test_a_decoder_that_panics_refuses_the_tokens_and_goes_on():
    tokenizer = panicking_decoder()
    fine, bad = tokenizer.encode("a fox"), tokenizer.encode(PANICKING_TEXT)
    for _ in range(2):
        with pytest.raises(RequestError, match="fails on these tokens"):
            tokenizer.decode(bad)
        assert tokenizer.decode(fine) == "a fox"
    detokenizer = Detokenizer(tokenizer)
    with pytest.raises(RequestError, match="fails on these tokens"):
        [detokenizer.push(token) for token in bad]


def test_lone_surrogates_are_refused_by_every_call():
    tokenizer = byte_level()
    for call in (tokenizer.encode, tokenizer.count, lambda text: tokenizer.encode_all([text])):
        with pytest.raises(RequestError, match="not Unicode at character 1"):
            call("a\ud800")


def test_a_tokenizer_file_that_panics_is_refused(tmp_path, monkeypatch):
    """Reading a file runs the library's own parsers; here it runs a panic."""
    (tmp_path / "tokenizer.json").write_text("{}")
    panic = panicking().backend.encode
    monkeypatch.setattr(module._Tokenizer, "from_file", staticmethod(lambda path: panic(PANICKING_TEXT)), raising=False)
    with pytest.raises(EngineError, match="rebuild the engine"):
        Tokenizer.from_dir(tmp_path)
