"""Which texts a guide lets be written. A guide is judged once for all of a module's texts."""

import functools
from typing import Any

from kvforge.runtime.guides.judgement import judged
from kvforge.runtime.guides.matchers import make_matcher, make_vocabulary
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.runtime.text.tokenizer import Tokenizer

EOS = 2


def walked(tokenizer: Tokenizer, guide: GuidedDecoding, text: str, special: frozenset[str]) -> tuple[bool, bool]:
    """Whether a guide lets a text be written, and whether it may end there. ``special`` are tokens that count as
    special for the guide. The tokenizer has all its tokens."""
    matcher = _matcher(tokenizer, guide, special).deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids), matcher.is_accepting()


@functools.lru_cache(maxsize=64)
def _matcher(tokenizer: Tokenizer, guide: GuidedDecoding, special: frozenset[str]) -> Any:
    grammar, limits = judged(guide, _vocabulary(tokenizer), special.__contains__).accepted()
    return make_matcher(_vocabulary(tokenizer), grammar, limits)


@functools.lru_cache(maxsize=2)
def _vocabulary(tokenizer: Tokenizer) -> Any:
    return make_vocabulary(tokenizer, [EOS])
