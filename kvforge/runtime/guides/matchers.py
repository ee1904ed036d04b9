"""llguidance's vocabulary and matchers. Whoever imports this needs llguidance."""

from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvforge.common.errors import first_line
from kvforge.runtime.guides.limits import MAX_GRAMMAR_SIZE, MAX_LEXER_STATES, ParserLimits
from kvforge.runtime.requests.guided_decoding import guide_error
from kvforge.runtime.text.tokenizer import Tokenizer


def make_vocabulary(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Any:
    """An ``LLTokenizer`` whose texts end with those of ``eos_token_ids`` that the tokenizer knows; takes up to seconds
    with a vocabulary of 128k.

    Raises:
        RequestError: llguidance cannot use the tokenizer.
    """
    known = [token for token in eos_token_ids if tokenizer.backend.id_to_token(token) is not None]
    try:
        return LLTokenizer(tokenizer.backend.to_str(), eos_token=known or None)
    except Exception as error:  # the library raises nothing more precise
        raise guide_error(
            "cannot use this tokenizer", "leave it out", f"correct the tokenizer ({first_line(error)})"
        ) from None


def make_matcher(vocabulary: Any, grammar: str, limits: ParserLimits, max_lexer_states: int = MAX_LEXER_STATES) -> Any:
    """An ``LLMatcher`` at the start of a grammar; its errors are in its state."""
    bounds = LLParserLimits(
        verbose_errors=False,
        max_lexer_states=max_lexer_states,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        max_items_in_row=limits.max_items_in_row,
        step_max_items=limits.step_max_items,
    )
    return LLMatcher(vocabulary, grammar, log_level=0, limits=bounds)
