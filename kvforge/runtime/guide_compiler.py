"""Guides of requests made ready for their sequences; needs llguidance only once a request asks for one."""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvforge.errors import RequestError, first_line
from kvforge.runtime.guide import Guide
from kvforge.runtime.guided_decoding import GuidedDecoding
from kvforge.runtime.tokenizer import Tokenizer

_MAX_CACHED = 16


class GuideCompiler:
    """Compiles guides for one model and tokenizer and remembers the last 16.

    llguidance reads the tokenizer once, which takes up to seconds with a vocabulary of 128k: with ``prepare``, or for
    the first guide.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._limits: dict[str, Any] = {"max_lexer_states": 12_000, "max_grammar_size": 20_000}
        self._vocabulary: Any = None
        self._cache: OrderedDict[GuidedDecoding, Guide] = OrderedDict()

    def prepare(self) -> None:
        """Read the tokenizer now, so that no request waits for it; does nothing where guides cannot be used."""
        if self._tokenizer is not None and self._vocabulary is None:
            with contextlib.suppress(ImportError, RequestError):
                self._vocabulary = _vocabulary(self._tokenizer, self._eos_token_ids)

    def compile(self, guided: GuidedDecoding) -> Guide:
        """Return the guide at its start; every sequence takes its own with ``Guide.start``.

        Raises:
            RequestError: llguidance is missing, cannot use the tokenizer, or does not accept the guide.
        """
        known = self._cache.get(guided)
        if known is not None and known.start().is_sound():
            self._cache.move_to_end(guided)
            return known
        if self._tokenizer is None:
            raise RequestError("guided_decoding needs a tokenizer and this engine has none; leave it out.")
        try:
            from llguidance import LLMatcher, LLParserLimits

            from kvforge.runtime.guide_text import grammar_of
        except ImportError:
            raise RequestError("guided_decoding needs llguidance; install kvforge[serve].") from None
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer, self._eos_token_ids)
        limits = LLParserLimits(verbose_errors=False, **self._limits)
        try:
            grammar = grammar_of(guided, self._is_special)
        except RequestError:
            raise
        except Exception as error:  # llguidance's converters raise nothing more precise
            words = " ".join(str(error).split()).rstrip(".")[:300]
            raise RequestError(f"the guide of {guided.kind} cannot be used: {words}.") from None
        make_matcher = functools.partial(LLMatcher, self._vocabulary, grammar, log_level=0, limits=limits)
        guide = Guide(make_matcher, self._vocabulary.vocab_size, self._vocabulary.eos_tokens, self._vocab_size)
        if not guide.is_sound():
            raise RequestError(f"the guide of {guided.kind} cannot be used: {guide.message()}.")
        self._cache[guided] = guide
        if len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)
        return guide

    def _is_special(self, text: str) -> bool:
        assert self._tokenizer is not None
        added = self._tokenizer.backend.get_added_tokens_decoder().values()
        return any(token.special and token.content == text for token in added)


def _vocabulary(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Any:
    from llguidance import LLTokenizer

    known = [token for token in eos_token_ids if tokenizer.backend.id_to_token(token) is not None]
    try:
        return LLTokenizer(tokenizer.backend.to_str(), eos_token=known or None)
    except Exception as error:  # the library raises nothing more precise
        raise RequestError(f"guided_decoding cannot use this tokenizer ({first_line(error)}); leave it out.") from None
