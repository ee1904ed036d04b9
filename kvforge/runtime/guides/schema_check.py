"""Whether a guide can be made of a JSON schema by itself, asked without a model's tokenizer."""

import functools
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from kvforge.common.errors import RequestError
from kvforge.common.native_calls import is_panic
from kvforge.runtime.guides.grammar import grammar_of
from kvforge.runtime.guides.limits import WIDE_JSON
from kvforge.runtime.guides.matchers import make_matcher
from kvforge.runtime.guides.messages import message_of
from kvforge.runtime.requests.guided_decoding import GuidedDecoding

_END = 256


def schema_problem(schema: Any) -> str | None:
    """Why llguidance makes no guide of a JSON schema; None where it does. The judge of a whole guide may refuse for its
    cost what this lets pass."""
    try:
        grammar = grammar_of(GuidedDecoding("json_schema", schema), lambda text: False)
        matcher = make_matcher(_bytes(), grammar, WIDE_JSON)
        allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
    except RequestError as error:
        return str(error)
    except RecursionError:
        return "it is nested too deeply"
    except BaseException as error:
        if isinstance(error, ValueError) or is_panic(error):
            return "llguidance fails on it"
        raise
    if matcher.is_error():
        return message_of(matcher)
    return None if any(allowed) else "it allows no text"


class _ByteTokenizer:
    """Every byte is a token, as llguidance's wrapper asks for them."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(_END)), b"<end>")
    special_token_ids = (_END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.lru_cache(1)
def _bytes() -> Any:
    return LLTokenizer(TokenizerWrapper(_ByteTokenizer()))
