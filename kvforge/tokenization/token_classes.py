"""Which tokens of a vocabulary are special, which are punctuation, and those of a text."""

import unicodedata

from tokenizers import Tokenizer

from kvforge.common.errors import CheckpointError
from kvforge.common.native_calls import panics_as


def special_ids(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Return the ids below ``vocab_size`` of the tokens that the tokenizer calls special, ascending."""
    added = tokenizer.get_added_tokens_decoder()
    return tuple(sorted(token for token, what in added.items() if what.special and token < vocab_size))


def punctuation_ids(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Return the ids below ``vocab_size`` of the tokens that are not special and whose text is Unicode's punctuation
    (categories P) and nothing else but space around it, ascending."""
    known = {token for token in tokenizer.get_vocab().values() if token < vocab_size}
    others = sorted(known.difference(special_ids(tokenizer, vocab_size)))
    with panics_as(CheckpointError, "the tokenizer cannot decode single tokens; save tokenizer.json again."):
        texts = tokenizer.decode_batch([[token] for token in others], skip_special_tokens=False)
    return tuple(token for token, text in zip(others, texts, strict=True) if _is_punctuation(text.strip()))


def text_ids(tokenizer: Tokenizer, text: str, vocab_size: int) -> tuple[int, ...]:
    """Return the ids below ``vocab_size`` of a text's tokens, without special ones."""
    with panics_as(CheckpointError, "the tokenizer cannot encode a text; save tokenizer.json again."):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
    return tuple(token for token in ids if token < vocab_size)


def _is_punctuation(text: str) -> bool:
    return text != "" and all(unicodedata.category(letter).startswith("P") for letter in text)
