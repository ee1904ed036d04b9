"""Requests to /tokenize and /detokenize, in vLLM's fields or llama.cpp's."""

from typing import Any

import numpy as np

from kvforge.common.errors import RequestError
from kvforge.gateway.errors import ApiError, bad_field
from kvforge.gateway.model import ServedModel
from kvforge.gateway.parsed_request import ParsedRequest
from kvforge.gateway.requests.prompts import json_texts
from kvforge.gateway.requests.request_fields import Fields, Refused, screen

OF_MESSAGES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
          "reasoning_effort")  # fmt: skip
_OF_ALL = ("model", "add_special_tokens", "return_token_strs")
OF_CONTENT = ("content", "add_special", "with_pieces")
TOKENIZE = frozenset({*OF_MESSAGES, *_OF_ALL, *OF_CONTENT, "prompt"})
TOKENIZE_REFUSED = {
    "parse_special": Refused("special tokens that are written out in a text are always read as such", (True,)),
    "chat_template": Refused("the server's chat template cannot be replaced by a request"),
    "mm_processor_kwargs": Refused("the model reads only text", ({},)),
}
DETOKENIZE = frozenset({"model", "tokens"})
STRINGS, PIECES = "strings", "pieces"
"""Keys of what an answer shows beside the tokens."""


def read_tokenize_request(body: dict[str, Any]) -> Fields:
    """The fields of a chat, or `prompt` with its field's name (`from`); beside them what both answers know. Raises
    ApiError."""
    fields = screen(body, TOKENIZE, TOKENIZE_REFUSED, ())
    given = [name for name in ("prompt", "content", "messages") if name in fields]
    if len(given) != 1:
        raise bad_field("prompt", "or content or messages must be given, one of them")
    kind = given[0]
    for name in fields:
        if (name in OF_MESSAGES and kind != "messages") or (name in OF_CONTENT and kind != "content"):
            raise bad_field(name, f"is not for {kind}; leave it out")
    if kind == "messages":
        return fields
    if not isinstance(fields[kind], str):
        raise bad_field(kind, "must be text")
    if kind == "content":
        fields["add_special_tokens"] = fields.get("add_special", fields.get("add_special_tokens", False))
    return {**fields, "prompt": fields[kind], "from": kind}


def tokens_only(prompt: list[int], fields: Fields | None = None) -> ParsedRequest:
    """A prompt of which nothing is generated; `fields` say what the answer shows. Raises ApiError."""
    shown = {}
    if fields is not None:
        shown = {STRINGS: fields.get("return_token_strs", False), PIECES: fields.get("with_pieces", False)}
    return _without_answer((np.array(prompt, dtype=np.int32).tobytes(),), (), shown)


def read_detokenize_request(body: dict[str, Any]) -> Fields:
    """The fields. Raises ApiError."""
    fields = screen(body, DETOKENIZE, {}, ())
    if not isinstance(fields.get("tokens"), list):
        raise bad_field("tokens", "must be a list of token ids")
    return fields


def text_only(model: ServedModel, fields: Fields) -> ParsedRequest:
    """The text of `tokens`, special ones included. Raises ApiError."""
    tokens = fields["tokens"]
    if len(tokens) > model.max_seq_len:  # before the entries are looked at
        raise bad_field("tokens", f"holds {len(tokens)} ids; {model.max_seq_len}, the model's context, are the most")
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise bad_field("tokens", "must be a list of token ids")
    if tokens and not 0 <= min(tokens) <= max(tokens) < model.manifest.vocab_size:
        raise bad_field("tokens", f"holds ids that are none of the model's, 0 to {model.manifest.vocab_size - 1}")
    try:
        text = model.tokenizer.decode(tokens, skip_special_tokens=False)
    except RequestError as error:
        raise ApiError(400, error.refusal.reason, "tokens") from None
    return _without_answer((), tuple(json_texts(model, text, [])), {})


def _without_answer(prompts: tuple[bytes, ...], echoes: tuple[bytes, ...], shown: dict[str, Any]) -> ParsedRequest:
    return ParsedRequest(b"", prompts, 1, (), None, False, False, echoes, shown=shown, empty=True)
