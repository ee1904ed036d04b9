"""What a request asks for, read and checked: small, and ready to be sent. Workers hand it over as bytes."""

import json
from dataclasses import dataclass

from kvforge.gateway.errors import ApiError


@dataclass(frozen=True)
class ParsedRequest:
    """One request to generate.

    Attributes:
        template: a serialized ModelInferRequest without id and prompt, see kvforge.gateway.tensors.
        prompts: token ids of each, int32.
        n, stop, logprobs: as in SamplingParams: what the way from tokens to an answer depends on.
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

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts)) // 4


def pack(asked: ParsedRequest | ApiError) -> bytes:
    """As bytes: a line of JSON, then what it gives the lengths of."""
    if isinstance(asked, ApiError):
        return json.dumps({"error": [asked.status, asked.message, asked.param, asked.code]}).encode() + b"\n"
    head = {
        "n": asked.n, "stop": asked.stop, "logprobs": asked.logprobs, "stream": asked.stream,
        "include_usage": asked.include_usage, "template": len(asked.template),
        "prompts": list(map(len, asked.prompts)), "echoes": list(map(len, asked.echoes)),
    }  # fmt: skip
    return b"".join((json.dumps(head).encode(), b"\n", asked.template, *asked.prompts, *asked.echoes))


def unpack(data: bytes) -> ParsedRequest:
    """The inverse of `pack`. Raises the ApiError where it was one."""
    line = data.index(b"\n")
    head = json.loads(data[:line])
    if "error" in head:
        raise ApiError(*head["error"])
    at = line + 1

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    return ParsedRequest(
        template=take(head["template"]),
        prompts=tuple(map(take, head["prompts"])),
        n=head["n"],
        stop=tuple(head["stop"]),
        logprobs=head["logprobs"],
        stream=head["stream"],
        include_usage=head["include_usage"],
        echoes=tuple(map(take, head["echoes"])),
    )
