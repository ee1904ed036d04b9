"""How texts are cut before their bytes are merged, by the names that llama.cpp's converter gives to it.

The patterns are those of the models' own ``tokenizer.json``, which llama.cpp approximates where it must.
"""

import reprlib
from dataclasses import dataclass

from kvforge.checkpoint.gguf.header import Header
from kvforge.checkpoint.gguf.vocabulary import pre_tokenizer_name
from kvforge.common.errors import CheckpointError

_ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_FIRST = rf"{_ENGLISH}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"


def _by_words(digits: str) -> str:
    return rf"(?i:{_ENGLISH})|{_WORDS}|{digits}|{_SYMBOLS}|{_SPACES}"


def _by_case(digits: str, ending: str = "") -> str:
    words = rf"{_BEFORE}{_UPPER}*{_LOWER}+{ending}|{_BEFORE}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}|{_SYMBOLS_AND_SLASHES}|{_SPACES}"


@dataclass(frozen=True)
class Cutting:
    """A text is cut by each of ``patterns`` in turn, in Unicode's form C where it ``composes``. Pieces that are tokens
    are not merged with ``whole_pieces``. A text begins with the token for it where ``adds_bos``, unless the file says
    something else."""

    patterns: tuple[str, ...]
    whole_pieces: bool = False
    adds_bos: bool = False
    composes: bool = False


_THREE_DIGITS = r"\p{N}{1,3}"
_FIRST_BY_DIGIT = Cutting((_DIGIT, _FIRST))
_BY_WORDS = Cutting((_by_words(_THREE_DIGITS),), whole_pieces=True, adds_bos=True)

CUTTINGS = {
    "gpt-2": Cutting((_FIRST,)),
    "smollm": _FIRST_BY_DIGIT,
    "starcoder": _FIRST_BY_DIGIT,
    "refact": _FIRST_BY_DIGIT,
    "command-r": Cutting((_DIGIT, _FIRST), composes=True),
    "llama-bpe": _BY_WORDS,
    "llama3": _BY_WORDS,
    "llama-v3": _BY_WORDS,
    "dbrx": Cutting((_by_words(_THREE_DIGITS),)),
    "chatglm-bpe": Cutting((_by_words(_THREE_DIGITS),)),
    "glm4": Cutting((_by_words(_THREE_DIGITS),), whole_pieces=True),
    "qwen2": Cutting((_by_words(_DIGIT),), composes=True),
    "deepseek-r1-qwen": Cutting((_by_words(_DIGIT),)),
    "deepseek-coder": Cutting(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "tekken": Cutting((_by_case(_DIGIT),), whole_pieces=True, adds_bos=True),
    "gpt-4o": Cutting((_by_case(_THREE_DIGITS, rf"(?i:{_ENGLISH})?"),)),
}
"""Every way that is known, by llama.cpp's name (``tokenizer.ggml.pre``)."""


def cutting_of(header: Header) -> Cutting:
    """Return how a file's texts are cut; raises CheckpointError where that is not known."""
    name = pre_tokenizer_name(header)
    if name not in CUTTINGS:
        raise CheckpointError(
            f"{header.path} has the pre-tokenizer {reprlib.repr(name)} (tokenizer.ggml.pre); supported are "
            f"{', '.join(CUTTINGS)}."
        )
    return CUTTINGS[name]
