"""The tokens of a GGUF file, and those that end a text."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvforge.checkpoint.gguf.header import Header
from kvforge.common.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""What ``tokenizer.ggml.token_type`` says of a token."""

SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"
"""Values of ``tokenizer.ggml.model``: SentencePiece's merges by score, and merges of bytes by rank."""

_PREFIX = "tokenizer.ggml."
_DEFAULTS = {SENTENCEPIECE: {"bos": 1, "eos": 2, "unknown": 0}}
"""The special tokens of files that do not name them."""

_ENDINGS = frozenset({
    *("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"),
    *("<|return|>", "<|call|>", "<end_of_turn>", "<EOT>"),
})  # fmt: skip
"""Control tokens that end a text by what they are called: files name one or two, where generation_config.json names
all."""

_MESSAGE_END, _CALLS = "<|end|>", {"<|return|>", "<|call|>"}
"""Where both of the latter are tokens, the first ends a message and not the answer."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens by their ids, with their types and scores; ``special`` are ids by their names, such as ``eos``."""

    model: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    special: dict[str, int]


def read_vocabulary(header: Header) -> Vocabulary:
    """Return a file's tokens; raises CheckpointError where there are none, or some that do not go together."""
    model = _text(header, "model")
    if model not in (SENTENCEPIECE, BYTE_LEVEL):
        raise CheckpointError(
            f"{header.path} has a tokenizer of the kind {reprlib.repr(model)}; supported are {BYTE_LEVEL} and "
            f"{SENTENCEPIECE}."
        )
    tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(_texts(header, "tokens"))]
    types = header.metadata.get(f"{_PREFIX}token_type", [NORMAL] * len(tokens))
    scores = header.metadata.get(f"{_PREFIX}scores", [0.0] * len(tokens))
    for key, values in (("token_type", types), ("scores", scores)):
        if not isinstance(values, list) or len(values) != len(tokens):
            raise CheckpointError(f"{header.path} has not one {_PREFIX}{key} for each of {len(tokens)} tokens.")
    if len(set(tokens)) < len(tokens):
        twice = next(text for text in tokens if tokens.count(text) > 1)
        raise CheckpointError(f"{header.path} has the token {reprlib.repr(twice)} twice; convert the model again.")
    return Vocabulary(model, tokens, types, scores, _special(header, model, len(tokens)))


def ending_tokens(header: Header) -> list[int]:
    """Return the ids of the tokens that end a text: those that the file names, and control tokens that are called as
    such. Raises CheckpointError as ``read_vocabulary`` does."""
    vocabulary = read_vocabulary(header)
    found = [vocabulary.special[name] for name in ("eos", "eot", "eom") if name in vocabulary.special]
    texts = {
        text: number
        for number, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == CONTROL and text in _ENDINGS
    }
    left_out = _MESSAGE_END if texts.keys() >= _CALLS else None
    found += [number for text, number in texts.items() if text != left_out]
    return list(dict.fromkeys(found))


def flag(header: Header, name: str, otherwise: bool) -> bool:
    """Return a boolean below ``tokenizer.ggml``; raises CheckpointError where it is something else."""
    value = header.metadata.get(f"{_PREFIX}{name}", otherwise)
    if not isinstance(value, bool):
        raise CheckpointError(f"{header.path} says {_PREFIX}{name} {reprlib.repr(value)}; it must be true or false.")
    return value


def merges_of(header: Header) -> list[tuple[str, str]]:
    """Return the pairs that are merged, the first ones first; raises CheckpointError where there are none."""
    pairs = []
    for text in _texts(header, "merges"):
        at = text.find(" ", 1)
        if at < 0:
            raise CheckpointError(f"{header.path} has {reprlib.repr(text)} among its merges, which is no pair.")
        pairs.append((text[:at], text[at + 1 :]))
    return pairs


def pre_tokenizer_name(header: Header) -> str:
    """Return what llama.cpp calls the way in which texts are cut before they are merged; raises CheckpointError where
    the file does not say it."""
    return _text(header, "pre")


def _special(header: Header, model: str, count: int) -> dict[str, int]:
    found = dict(_DEFAULTS.get(model, {}))
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        number = header.metadata.get(f"{_PREFIX}{name}_token_id", found.get(name))
        if number is None:
            continue
        if not isinstance(number, int) or not 0 <= number < count:
            raise CheckpointError(
                f"{header.path} says {_PREFIX}{name}_token_id {reprlib.repr(number)}, and has {count} tokens."
            )
        found[name] = number
    return found


def _text(header: Header, name: str) -> str:
    value = _value(header, name)
    if not isinstance(value, str):
        raise CheckpointError(f"{header.path} has a {_PREFIX}{name} that is no text; it is damaged.")
    return value


def _texts(header: Header, name: str) -> list[str]:
    value = _value(header, name)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise CheckpointError(f"{header.path} has a {_PREFIX}{name} that is no list of texts; it is damaged.")
    return value


def _value(header: Header, name: str) -> Any:
    value = header.metadata.get(f"{_PREFIX}{name}")
    if value is None:
        raise CheckpointError(f"{header.path} has no {_PREFIX}{name}; convert the model again, with its tokenizer.")
    return value
