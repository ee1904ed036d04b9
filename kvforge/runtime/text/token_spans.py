"""How many bytes of a text one token can stand for, where a tokenizer's parts allow to say so."""

import json
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

_BYTE_PIECES = {f"<0x{byte:02X}>" for byte in range(256)}
_UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
_KEEPING_NORMALIZERS = {"ByteLevel", "Prepend"}
_KEEPING_SPLITTERS = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}


def most_bytes(tokenizer: Tokenizer) -> int | None:
    """Return a number of UTF-8 bytes of text that no token exceeds; None where text may vanish, or any amount of it
    become one token.

    A token's piece of the vocabulary is at least as long as the normalized text it stands for: an alphabet of bytes, a
    mark for a space or for the inside of a word only make it longer. What a normalizer makes shorter is a
    factor on top.
    """
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None  # takes all spaces beside it
    normalizer, splitter = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
    factor = _shrinking(normalizer)
    if factor is None or not _keeps(splitter) or not _covers(tokenizer, _types(normalizer) | _types(splitter)):
        return None
    return factor * max(4, *(len(piece.encode()) for piece in tokenizer.get_vocab()))


def _shrinking(part: dict[str, Any] | None) -> int | None:
    """By what factor a normalizer can shorten a text at most; None where there is no bound."""
    kind = part["type"] if part else None
    if part is None or kind in _KEEPING_NORMALIZERS:
        return 1
    if kind == "Lowercase":
        return 3  # the sign for kelvin
    if kind in _UNICODE_FORMS:
        # ASCII comes of one character of up to 4 bytes. Whatever else, at least 2 bytes, decomposes into 4 at most.
        return 8
    if kind == "Replace" and "String" in part["pattern"]:
        old, new = part["pattern"]["String"].encode(), part["content"].encode()
        return -(-len(old) // len(new)) or 1 if new else None
    if kind != "Sequence":
        return None
    factor = 1
    for inner in part["normalizers"]:
        shrinking = _shrinking(inner)
        if shrinking is None:
            return None
        factor *= shrinking
    return factor


def _keeps(part: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer passes on all of the text."""
    if part is None or part["type"] in _KEEPING_SPLITTERS:
        return True
    if part["type"] in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return part["type"] == "Sequence" and all(map(_keeps, part["pretokenizers"]))


def _covers(tokenizer: Tokenizer, types: set[str]) -> bool:
    """Whether the model drops nothing and makes no run of unknown characters one token."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    pieces = tokenizer.get_vocab(with_added_tokens=False).keys()
    if model.byte_fallback and pieces >= _BYTE_PIECES:
        return True
    return "ByteLevel" in types and pieces >= set(ByteLevel.alphabet())


def _state(part: Any) -> dict[str, Any] | None:
    """What a part of a tokenizer is made of, as in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _types(part: dict[str, Any] | None) -> set[str]:
    if part is None:
        return set()
    inner = part.get("normalizers", []) + part.get("pretokenizers", [])
    return {part["type"]}.union(*map(_types, inner))
