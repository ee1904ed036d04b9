"""The engine's tokenizer: text to token ids and back, from Hugging Face's ``tokenizer.json``."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from kvforge.errors import EngineError, RequestError, first_line

LONG_TEXT = 4096
"""Characters from which a text is better encoded beside an event loop."""


class Tokenizer:
    """A thin face of ``tokenizers.Tokenizer``; special tokens are added on encode and left out on decode."""

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
            backend = _Tokenizer.from_file(str(path))
        except Exception as error:
            raise EngineError(f"{path} cannot be read ({first_line(error)}); rebuild the engine.") from None
        backend.no_padding()
        backend.no_truncation()
        return cls(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised.

        Raises:
            RequestError: ``text`` holds lone surrogates, which bytes that are not UTF-8 are read as.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not Unicode at character {error.start}; give UTF-8 text.") from None
        if len(text) > LONG_TEXT:
            # Lets other threads run, which `encode` does not, and leaves out the offsets.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
