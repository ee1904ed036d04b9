"""Incremental text: equal to the whole, never half a character, at a bounded cost."""

import random

import pytest

from kvforge.runtime.text.detokenizer import Detokenizer
from tests.support.models.text_tokenizers import TEXT, byte_fallback, byte_level

TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
SAMPLES = [*TEXT, "😀", "a😀b", "👩‍👩‍👧‍👦 family", "é" * 40, "漢" * 70, "\n\t  spaces   ", "mixed ñ 😀 漢 end."]


def pieces(tokenizer, ids, context=()):
    detokenizer = Detokenizer(tokenizer, context)
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", SAMPLES)
def test_pieces_join_to_the_text_without_half_characters(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == text
    assert "\ufffd" not in "".join(parts)
    assert parts[-1] == "", "whole characters need no flush"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_character_comes_with_its_last_token(kind):
    tokenizer = TOKENIZERS[kind]
    text = "a😀漢é."
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer, given = Detokenizer(tokenizer), ""
    for i, token in enumerate(ids):
        given += detokenizer.push(token)
        whole = next(n for n in range(len(text), -1, -1) if tokenizer.decode(ids[: i + 1]).startswith(text[:n]))
        assert text.startswith(given) and len(given) >= whole, "a finished character is held back"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_literal_replacement_character_survives(kind):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("a\ufffdb\ufffd", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == "a\ufffdb\ufffd"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_random_tokens_end_as_text_and_stay_cheap(kind, monkeypatch):
    """Random bytes are mostly no UTF-8: characters among them must still come out whole, in a bounded window."""
    tokenizer = TOKENIZERS[kind]
    rng = random.Random(0)
    longest = 0
    decode = tokenizer.backend.decode
    for _ in range(20):
        ids = [rng.randrange(3, 259) for _ in range(300)] + tokenizer.encode("a😀a漢", add_special_tokens=False)
        detokenizer, text = Detokenizer(tokenizer), ""
        for token in ids:
            text += detokenizer.push(token)
            longest = max(longest, len(detokenizer._window))
        text += detokenizer.flush()
        assert text.endswith("a😀a漢")
        readable = [c for c in decode(ids) if c != "\ufffd" and ord(c) < 128]
        if kind == "byte_level":
            assert [c for c in text if c != "\ufffd" and ord(c) < 128] == readable
    assert longest <= 65


def test_special_tokens_leave_no_text():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("fox", add_special_tokens=False)
    assert "".join(pieces(tokenizer, [1] * 200 + ids + [2] * 200 + ids)) == "foxfox"


def test_text_goes_on_where_the_prompt_ends():
    """A piece at the start of a text loses its space; after a prompt it keeps it."""
    tokenizer = TOKENIZERS["byte_fallback"]
    prompt = tokenizer.encode("The", add_special_tokens=False)
    fox = tokenizer.encode("fox", add_special_tokens=False)
    assert "".join(pieces(tokenizer, fox, context=prompt)) == " fox"
    assert "".join(pieces(tokenizer, fox)) == "fox"


def test_prompt_that_ends_within_a_character():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("x🦊", add_special_tokens=False)
    assert tokenizer.decode(ids[:-1]).endswith("\ufffd")
    later = tokenizer.encode(" fox", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids[-1:] + later, context=ids[:-1])).endswith(" fox")
