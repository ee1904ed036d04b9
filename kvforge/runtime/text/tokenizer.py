"""The engine's tokenizer: text to token ids and back, from Hugging Face's ``tokenizer.json``."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from kvforge.common.errors import EngineError, RequestError, first_line
from kvforge.common.native_calls import panics_as

_ENCODING = panics_as(RequestError, "the model's tokenizer fails on this text", "change the text")
_DECODING = panics_as(RequestError, "the model's tokenizer fails on these tokens, so they cannot be shown as text")
LONG_TEXT = 4096
"""Characters from which a text is better encoded beside an event loop."""


class Tokenizer:
    """A thin wrapper of ``tokenizers.Tokenizer``; special tokens are added on encode and left out on decode."""

    def __init__(self, backend: _Tokenizer) -> None:
        self.backend = backend

    @classmethod
    def from_dir(cls, directory: Path) -> "Tokenizer | None":
        """Read ``directory/tokenizer.json``; None if there is no such file.

        Raises:
            EngineError: the file cannot be read.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            with panics_as(EngineError, f"{path} makes the tokenizers library fail; rebuild the engine."):
                backend = _Tokenizer.from_file(str(path))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{path} cannot be read ({first_line(error)}); rebuild the engine.") from None
        backend.no_padding()
        backend.no_truncation()
        return cls(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised.

        Raises:
            RequestError: ``text`` holds lone surrogates, which bytes that are not UTF-8 are read as, or the tokenizer
                cannot read it.
        """
        check_unicode(text)
        with _ENCODING:
            if len(text) > LONG_TEXT:
                # Lets other threads run, which `encode` does not, and leaves out the offsets.
                return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text without special tokens, beside other threads. Raises as ``encode`` does."""
        for text in texts:
            check_unicode(text)
        with _ENCODING:
            return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def count(self, text: str) -> int:
        """Number of tokens of ``text`` without special ones, found beside other threads. Raises as ``encode`` does."""
        check_unicode(text)
        with _ENCODING:
            return len(self.backend.encode_batch_fast([text], add_special_tokens=False)[0])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; bytes that are not UTF-8 become U+FFFD. Raises RequestError where the tokenizer
        fails on them."""
        with _DECODING:
            return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def check_unicode(text: str) -> None:
    """Raise RequestError for lone surrogates."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is not Unicode at character {error.start}", "give UTF-8 text") from None
