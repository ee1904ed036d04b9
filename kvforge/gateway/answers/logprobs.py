"""Log-probabilities in OpenAI's two formats, as JSON that grows token by token: completions' and chat's."""

import codecs
import json
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvforge.gateway.token_bytes import TokenBytes
from kvforge.runtime.requests.outputs import TokenLogprobs

MIN_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON has not."""


class Logprobs(Protocol):
    """One choice's log-probabilities."""

    def add(self, entries: Sequence[TokenLogprobs]) -> None: ...

    @property
    def num_bytes(self) -> int:
        """Held."""

    def take(self) -> Iterator[bytes | bytearray]:
        """The JSON of all entries since the last time, in parts; they are no longer held afterwards."""


class ChatLogprobs:
    """{"content": one entry per token}; a token that is no whole character is written as its escaped bytes."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._names = token_bytes.derived("chat", _chat_name)
        self._content = bytearray()

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            top = ",".join([f"{{{self._entry(token, value)}}}" for token, value in entry.top.items()])
            text = f'{{{self._entry(entry.token_id, entry.logprob)},"top_logprobs":[{top}]}}'
            _append(self._content, text)

    @property
    def num_bytes(self) -> int:
        return len(self._content)

    def take(self) -> Iterator[bytes | bytearray]:
        content, self._content = self._content, bytearray()
        yield from (b'{"content":[', content, b'],"refusal":null}')

    def _entry(self, token_id: int, logprob: float) -> str:
        name, raw = self._names[token_id]
        return f'"token":{name},"logprob":{max(logprob, MIN_LOGPROB)!r},"bytes":{raw}'


class CompletionLogprobs:
    """One choice's log-probabilities in the format of completions: four lists with an entry per token.

    `top_logprobs` always holds the chosen one, too. `text_offset` counts characters; a token offset inside a character
    is that of its end.
    """

    def __init__(self, token_bytes: TokenBytes, echo: str = "") -> None:
        """`echo` begins the text: the prompt, where its tokens come first."""
        self._token_bytes = token_bytes
        self._names = token_bytes.derived("completions", _completion_name)
        self._offset = 0
        self._echo = echo
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._clear()

    def add_first(self, token_id: int) -> None:
        """Add the first token of a prompt that is repeated: nothing comes before it, so that it has no number."""
        for name, text in (
            ("tokens", self._names[token_id]),
            ("token_logprobs", "null"),
            ("top_logprobs", "null"),
            ("text_offset", f"{self._offset}"),
        ):
            _append(self._lists[name], text)
        self._advance(token_id)

    def _clear(self) -> None:
        self._lists = {name: bytearray() for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        lists, names = self._lists, self._names
        for entry in entries:
            _append(lists["tokens"], names[entry.token_id])
            _append(lists["token_logprobs"], f"{max(entry.logprob, MIN_LOGPROB)!r}")
            _append(lists["text_offset"], f"{self._offset}")
            # By name, of which the last number counts: different tokens may have the same one.
            top = {names[token]: value for token, value in {**entry.top, entry.token_id: entry.logprob}.items()}
            written = ",".join([f"{name}:{max(value, MIN_LOGPROB)!r}" for name, value in top.items()])
            _append(lists["top_logprobs"], f"{{{written}}}")
            self._advance(entry.token_id)

    def _advance(self, token_id: int) -> None:
        raw = self._token_bytes[token_id]
        if self._token_bytes.is_special(token_id):
            # Text where a prompt has it written out. What begins a prompt by itself is not.
            self._offset += len(raw.decode()) if self._echo.startswith(raw.decode(), self._offset) else 0
            return
        text = self._decoder.decode(raw)
        if not self._offset and self._echo and not self._echo.startswith(" "):
            text = text.removeprefix(" ")  # of the tokenizer, not of the prompt
        self._offset += len(text)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._lists.values()))

    def take(self) -> Iterator[bytes | bytearray]:
        lists = self._lists
        self._clear()
        before = b"{"
        for name, entries in lists.items():
            yield from (before, f'"{name}":['.encode(), entries, b"]")
            before = b","
        yield b"}"


class PromptLogprobs:
    """Those of a prompt alone, as vLLM writes them: for each token an object that has, by token id, the token itself
    and the most probable ones; null for the first."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._names = token_bytes.derived("completions", _completion_name)
        self._entries = bytearray(b"null")

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            ranked = {token: (value, rank) for rank, (token, value) in enumerate(entry.top.items(), start=1)}
            ranked = {entry.token_id: (entry.logprob, entry.rank), **ranked}
            _append(self._entries, "{" + ",".join([self._written(t, *known) for t, known in ranked.items()]) + "}")

    @property
    def num_bytes(self) -> int:
        return len(self._entries)

    def take(self) -> Iterator[bytes | bytearray]:
        """The JSON of all."""
        yield from (b"[", self._entries, b"]")

    def _written(self, token_id: int, logprob: float, rank: int) -> str:
        value = max(logprob, MIN_LOGPROB)
        return f'"{token_id}":{{"logprob":{value!r},"rank":{rank},"decoded_token":{self._names[token_id]}}}'


def _append(entries: bytearray, text: str) -> None:
    if entries:
        entries += b","
    entries += text.encode()


def _chat_name(raw: bytes) -> tuple[str, str]:
    return _json_text(_text(raw, "")), "[" + ",".join(map(str, raw)) + "]"


def _completion_name(raw: bytes) -> str:
    return _json_text(_text(raw, "bytes:"))


def _json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _text(raw: bytes, prefix: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)
