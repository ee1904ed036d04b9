"""Log-probabilities in OpenAI's two formats: that of completions and that of chat."""

import codecs
from collections.abc import Sequence
from typing import Any

from kvforge.gateway.token_bytes import TokenBytes
from kvforge.runtime.outputs import TokenLogprobs

LEAST = -9999.0
"""What stands for minus infinity, which JSON has not."""


def chat_logprobs(entries: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, Any]:
    """{"content": one entry per token}; a token that is no whole character is written as its escaped bytes."""
    return {
        "content": [
            {
                **_chat_entry(entry.token_id, entry.logprob, token_bytes),
                "top_logprobs": [_chat_entry(token, value, token_bytes) for token, value in entry.top.items()],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_entry(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    raw = token_bytes[token_id]
    return {"token": _text(raw, ""), "logprob": max(logprob, LEAST), "bytes": list(raw)}


class CompletionLogprobs:
    """One choice's log-probabilities in the format of completions.

    `text_offset` counts characters, from `offset` on; a token offset inside a character is that of its end.
    """

    def __init__(self, token_bytes: TokenBytes, offset: int = 0) -> None:
        self._token_bytes = token_bytes
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, entries: Sequence[TokenLogprobs]) -> dict[str, list]:
        """The four lists for these tokens, an entry per token; `top_logprobs` always holds the chosen one, too."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            if not self._token_bytes.is_special(entry.token_id):
                self._offset += len(self._decoder.decode(self._token_bytes[entry.token_id]))
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [max(entry.logprob, LEAST) for entry in entries],
            "top_logprobs": [
                {
                    self._name(token): max(value, LEAST)
                    for token, value in {**entry.top, entry.token_id: entry.logprob}.items()
                }
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        return _text(self._token_bytes[token_id], "bytes:")


def _text(raw: bytes, prefix: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)
