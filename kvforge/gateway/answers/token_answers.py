"""Answers of /tokenize, /detokenize and /tokenizer_info."""

from collections.abc import Iterator
from typing import Any

from kvforge.gateway.answers.response_formats import dumps
from kvforge.gateway.model import ServedModel
from kvforge.gateway.parsed_request import ParsedRequest
from kvforge.gateway.requests.token_requests import PIECES, STRINGS
from kvforge.tokenization.template_files import DEFAULT

AT_ONCE = 4096
"""Tokens written before other requests get their turn."""


def tokens_answer(asked: ParsedRequest, model: ServedModel) -> Iterator[bytes]:
    """The JSON of an answer to /tokenize, a bounded part at a time. A token is its id; with PIECES its id and its text,
    which is a list of bytes where it is no text."""
    tokens = memoryview(asked.prompts[0]).cast("i").tolist()
    yield b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(tokens), model.max_seq_len)
    yield from _parts(
        [_piece(model, token) for token in part] if asked.shown[PIECES] else part for part in _cut(tokens)
    )
    yield b'],"token_strs":'
    if asked.shown[STRINGS]:
        yield b"["
        yield from _parts([model.tokenizer.backend.id_to_token(token) for token in part] for part in _cut(tokens))
        yield b"]}"
    else:
        yield b"null}"


def text_answer(asked: ParsedRequest) -> bytes:
    """The JSON of an answer to /detokenize, the text under vLLM's name and llama.cpp's."""
    return b'{"prompt":"%b","content":"%b"}' % (asked.echoes[0], asked.echoes[0])


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """What a client must know to write conversations by itself: the chat template, and the texts of the special tokens
    that it may name. Nothing of them where the engine has no template."""
    template = model.chat_template
    if template is None:
        return {"chat_template": None}
    return {**template.special_tokens, "chat_template": template.sources.get(DEFAULT)}


def _piece(model: ServedModel, token: int) -> dict[str, Any]:
    raw = model.token_bytes[token]
    try:
        return {"id": token, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(raw)}


def _cut(tokens: list[int]) -> Iterator[list[int]]:
    return (tokens[at : at + AT_ONCE] for at in range(0, len(tokens), AT_ONCE))


def _parts(lists: Iterator[list[Any]]) -> Iterator[bytes]:
    """The insides of lists as one."""
    for index, entries in enumerate(lists):
        yield ("," if index else "").encode() + dumps(entries)[1:-1].encode()
