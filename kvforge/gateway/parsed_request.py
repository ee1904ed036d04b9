"""What a request asks for, read and checked: small, and ready to be sent. Workers hand it over as bytes."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from kvforge.gateway.errors import ApiError, too_deep
from kvforge.gateway.languages.asked_forms import Calls, Thinking
from kvforge.gateway.languages.marked_text import TOKEN


@dataclass(frozen=True)
class ParsedRequest:
    """One request to generate, or to tell tokens.

    Attributes:
        template: a serialized ModelInferRequest without id and prompt, see kvforge.gateway.engine.tensors; empty where
            tokens are only counted or shown.
        prompts: token ids of each, int32.
        n, stop, logprobs: as in SamplingParams: what the way from tokens to an answer depends on.
        calls: how tool calls are read from the answer, None where there can be none.
        thinking: how reasoning is, likewise.
        kept: so many of a prompt's sequences are returned, the most probable ones; 0 for all.
        silent: log-probabilities are for that choice only and not returned.
        empty: nothing is generated, or not returned where the prompt's log-probabilities are asked for.
        prompt_logprobs: as in SamplingParams. Where `echoes` and `logprobs` are asked for, they are these of the
            prompt; otherwise a part of the answer of their own.
        model: the name that the request calls the model by.
        shown: what the answer repeats of the request, or what it says of the answer's form.
        names: what the request calls the fields of kvforge.gateway.client_words.
        looser: the template of the same request with a looser guide, to be sent where the engine refuses that of the
            first; None where there is none.
        continuous_usage: the counts come with every event of a stream.
        left_tools: types of tools that only another server could run, and that the model is not told of.
        left, left_by_looser: tools by name, and the keywords of their schemas that the guides leave to the model.
        echoes: the prompts' texts where they are to be repeated, as JSON writes them, without quotation marks.
    """

    template: bytes
    prompts: tuple[bytes, ...]
    n: int
    stop: tuple[str, ...]
    logprobs: int | None
    stream: bool
    include_usage: bool
    echoes: tuple[bytes, ...] = ()
    calls: Calls | None = None
    thinking: Thinking | None = None
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    kept: int = 0
    silent: bool = False
    empty: bool = False
    shown: dict[str, Any] = dataclasses.field(default_factory=dict)
    looser: bytes | None = None
    continuous_usage: bool = False
    left_tools: tuple[str, ...] = ()
    left: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    left_by_looser: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    prompt_logprobs: int | None = None
    model: str = ""

    @property
    def echoes_logprobs(self) -> bool:
        """The prompt is repeated with its log-probabilities."""
        return bool(self.echoes) and self.logprobs is not None and not self.silent

    def marks(self, known: dict[int, str]) -> dict[int, str]:
        """Of the marks that a model's text can have those that the answer is read by."""
        tokens = {*(() if self.calls is None else self.calls.tokens), *(self.thinking.tokens if self.thinking else ())}
        return {index: mark for index, mark in known.items() if mark.removeprefix(TOKEN) in tokens}

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts)) // 4


def pack(asked: ParsedRequest | ApiError) -> bytes:
    """As bytes: a line of JSON, then what it gives the lengths of."""
    if isinstance(asked, ApiError):
        return (
            json.dumps({"error": [asked.status, asked.message, asked.param, asked.code, asked.detail]}).encode() + b"\n"
        )
    head = vars(asked) | {
        "template": len(asked.template),
        "prompts": list(map(len, asked.prompts)),
        "echoes": list(map(len, asked.echoes)),
        "looser": None if asked.looser is None else len(asked.looser),
        "calls": None if asked.calls is None else dataclasses.asdict(asked.calls),
        "thinking": None if asked.thinking is None else dataclasses.asdict(asked.thinking),
    }
    parts = (asked.template, *asked.prompts, *asked.echoes, asked.looser or b"")
    return b"".join((json.dumps(head).encode(), b"\n", *parts))


def unpack(data: bytes) -> ParsedRequest:
    """The inverse of `pack`. Raises the ApiError where it was one."""
    line = data.index(b"\n")
    try:
        head = json.loads(data[:line])
    except RecursionError:
        raise too_deep() from None
    if "error" in head:
        raise ApiError(*head["error"])
    at = line + 1

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    for name in ("template", "prompts", "echoes", "looser"):  # as pack puts them one behind the other
        sizes = head[name]
        head[name] = tuple(map(take, sizes)) if isinstance(sizes, list) else None if sizes is None else take(sizes)
    if head["calls"] is not None:
        head["calls"] = Calls(**head["calls"] | {"tokens": tuple(head["calls"]["tokens"])})
    if head["thinking"] is not None:
        head["thinking"] = Thinking(**head["thinking"])
    return ParsedRequest(**head | {name: tuple(head[name]) for name in ("stop", "left_tools")})
