"""Texts up to the context are encoded, longer ones refused, at a cost that does not grow with the text."""

import functools

import pytest
from tokenizers import normalizers, pre_tokenizers

from kvforge.common.errors import RequestError
from kvforge.runtime.text.limits import LEAST_TOKENS, MARGIN, ORDINARY_BYTES, PIECE, TextLimits
from kvforge.runtime.text.token_spans import most_bytes
from tests.support.models.text_tokenizers import TEXT, byte_fallback, byte_level, composing, doubling, dropping

KINDS = {f.__name__: functools.cache(f) for f in (byte_level, byte_fallback, composing, doubling, dropping)}
BOUNDED = ("byte_level", "byte_fallback", "composing", "doubling")
UNITS = ["fox ", "a", " ", "\0", "😀", "e\u0301\u0323", "\u1100\u1161\u11a8", "\U0001d6da\u0314\u0342\u0345", "\u212a",
         "שלום", "</s>", "▁", "\n", "ﷺ", *TEXT]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", UNITS)
def test_a_text_of_the_contexts_length_is_encoded_and_a_longer_one_refused(kind: str, unit: str) -> None:
    tokenizer = KINDS[kind]()
    for length in (40, 5 * PIECE):
        text = (unit * (length // len(unit) + 1))[:length]
        expected = tokenizer.encode(text)
        assert TextLimits.of(tokenizer, len(expected) + 1).encode(text) == expected
        if len(expected) > 1:  # one token of any length is what the least context takes
            with pytest.raises(RequestError, match="shorten it, or give a larger --max-seq-len, to the build too, if"):
                TextLimits.of(tokenizer, len(expected)).encode(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", UNITS)
def test_a_text_that_is_only_counted_may_be_longer(kind: str, unit: str) -> None:
    """Up to the cost of refusing it: three quarters of its tokens are context enough, the smallest one is not."""
    tokenizer = KINDS[kind]()
    text = (unit * (5 * PIECE // len(unit) + 1))[: 5 * PIECE]
    expected = tokenizer.encode(text)
    limits = TextLimits.of(tokenizer, max(3 * len(expected) // 4, 2))
    if len(text.encode()) // MARGIN <= limits.max_bytes:
        assert limits.encode(text, fits=False) == expected
    if len(expected) > 2 * MARGIN * LEAST_TOKENS:
        with pytest.raises(RequestError, match="shorten it, or give a larger --max-seq-len"):
            TextLimits.of(tokenizer, 2).encode(text, fits=False)


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_token_has_more_bytes_than_the_bound(kind: str) -> None:
    tokenizer = KINDS[kind]()
    bound = most_bytes(tokenizer.backend)
    assert bound is not None
    for unit in UNITS:
        for text in (unit, unit * 50):
            assert len(text.encode()) <= bound * len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(("normalizer", "factor"), [(normalizers.NFKC(), 8), (normalizers.Lowercase(), 3)])
def test_what_a_normalizer_makes_of_any_character(normalizer: normalizers.Normalizer, factor: int) -> None:
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    lengths = [(len(old.encode()), len(normalizer.normalize_str(old).encode())) for old in characters]
    assert min(new for _, new in lengths) > 0
    worst = max(old / new for old, new in lengths)
    assert 1 < worst <= factor


@pytest.mark.parametrize(
    ("normalizer", "splitter"),
    [
        (normalizers.Strip(), None),
        (normalizers.Replace(" ", ""), None),
        (normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()]), None),
        (None, pre_tokenizers.WhitespaceSplit()),
        (None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])),
    ],
)
def test_no_bound_where_text_may_vanish(normalizer: object, splitter: object) -> None:
    backend = byte_level().backend
    assert most_bytes(backend) is not None
    if normalizer is not None:
        backend.normalizer = normalizer
    if splitter is not None:
        backend.pre_tokenizer = splitter
    assert most_bytes(backend) is None
    assert most_bytes(dropping().backend) is None


def test_no_bound_where_a_token_takes_the_spaces_beside_it() -> None:
    from tokenizers import AddedToken

    backend = byte_level().backend
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert most_bytes(backend) is None


class Counting:
    """A tokenizer that remembers how many characters it was given."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self.backend, self.num_seen = tokenizer, tokenizer.backend, 0

    def encode(self, text: str, *options: bool) -> list[int]:
        self.num_seen += len(text)
        return self._tokenizer.encode(text, *options)

    def count(self, text: str) -> int:
        self.num_seen += len(text)
        return self._tokenizer.count(text)


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("unit", ["fox dog ", "😀", "e\u0301", "b", "ﷺ"])
def test_the_cost_of_a_refusal_is_bounded_by_the_context(kind: str, unit: str) -> None:
    max_seq_len = 1 << 13
    seen = []
    for size in (1 << 18, 1 << 20):
        tokenizer = Counting(KINDS[kind]())
        with pytest.raises(RequestError):
            TextLimits.of(tokenizer, max_seq_len).encode(unit * (size // len(unit)))
        seen.append(tokenizer.num_seen)
    assert seen[0] == seen[1] or seen[1] == 0
    assert max(seen) <= ORDINARY_BYTES * MARGIN * max_seq_len


def test_a_text_whose_bytes_cannot_fit_is_not_looked_at() -> None:
    tokenizer = Counting(byte_level())
    limits = TextLimits.of(tokenizer, 100)
    with pytest.raises(RequestError, match=r"has \d+ bytes of text, but no text of more than \d+ bytes"):
        limits.encode("a" * (limits.max_bytes + 1))
    assert tokenizer.num_seen == 0


def test_a_piece_of_many_tokens_ends_the_count() -> None:
    """Pieces of long tokens first, then dense text: given up where it is clear, not at the end."""
    tokenizer = Counting(doubling())
    max_seq_len = 1 << 12
    text = "a" * (1 << 16) + "b" * (4 * MARGIN * max_seq_len) + "a" * (1 << 17)
    with pytest.raises(RequestError, match=f"more than {MARGIN * max_seq_len} tokens"):
        TextLimits.of(tokenizer, max_seq_len).encode(text)
    assert (1 << 16) < tokenizer.num_seen < len(text) - (1 << 17)
