"""The exact bytes of single tokens, which log-probabilities are reported with."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvforge.runtime.text.tokenizer import Tokenizer

T = TypeVar("T")


class TokenBytes:
    """Token id to bytes, by the kind of decoder that `tokenizer.json` names; computed when first asked for."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._kinds = _kinds(decoder)
        self._added = {
            index: token.content.encode() for index, token in tokenizer.backend.get_added_tokens_decoder().items()
        }
        self._special = {
            index for index, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special
        }
        self._known: dict[int, bytes] = {}
        self._derived: dict[str, Derived[Any]] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._compute(token_id)
        return found

    def derived(self, name: str, make: "Callable[[bytes], T]") -> "Derived[T]":
        """What `make` makes of tokens' bytes, remembered under a name."""
        return self._derived.setdefault(name, Derived(self, make))

    def is_special(self, token_id: int) -> bool:
        """Special tokens are no part of the text."""
        return token_id in self._special

    def is_blank(self, token_id: int) -> bool:
        """The text shows white space of a token, or nothing."""
        return self.is_special(token_id) or not self[token_id].strip()

    def _compute(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece = self._tokenizer.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if "ByteLevel" in self._kinds and all(char in _BYTE_OF for char in piece):
            return bytes(_BYTE_OF[char] for char in piece)
        if "ByteFallback" in self._kinds and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if self._kinds & {"ByteFallback", "Metaspace"}:
            return piece.replace("▁", " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class Derived(Generic[T]):
    """Token id to what is made of its bytes; made when first asked for, kept for all answers."""

    def __init__(self, token_bytes: TokenBytes, make: Callable[[bytes], T]) -> None:
        self._token_bytes = token_bytes
        self._make = make
        self._known: dict[int, T] = {}

    def __getitem__(self, token_id: int) -> T:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._make(self._token_bytes[token_id])
        return found


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    """The types of a decoder and of those it is made of."""
    if not decoder:
        return set()
    return {str(decoder.get("type"))}.union(*(_kinds(part) for part in decoder.get("decoders", ())))


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet (GPT-2): printable Latin-1 stands for itself, other bytes for U+0100 and above."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
