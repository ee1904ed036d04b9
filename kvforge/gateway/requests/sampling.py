"""From a request's fields to SamplingParams: the same names, the same checks as offline."""

import secrets
from collections.abc import Mapping
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.common.refusals import PROMPT
from kvforge.gateway.client_words import LENGTH, api_error
from kvforge.gateway.errors import ApiError, bad_field
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.requests.request_fields import SAMPLING, integer
from kvforge.runtime.requests.checks import check_prompt_length
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.runtime.requests.params import SamplingParams

MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1
MAX_STOP_CHARACTERS = 1 << 14
"""Of all stop strings together."""


def sampling_params(
    fields: dict[str, Any],
    options: GatewayOptions,
    vocab_size: int,
    max_tokens: int,
    logprobs: int | None,
    guide: GuidedDecoding | None,
    max_field: str,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    """What the engine is asked for, with `defaults` for what the fields do not say; without a seed of the client's own,
    one is drawn here.

    Raises ApiError (400) naming the field.
    """
    integer(fields, "n", 1, options.max_n)
    stop = fields.get("stop", ())
    if not isinstance(stop, str | list | tuple):
        raise bad_field("stop", "must be text or a list of texts")
    if isinstance(stop, list) and len(stop) > options.max_stop:
        raise bad_field("stop", f"holds {len(stop)} strings; {options.max_stop} are the most")
    num_characters = sum(len(text) for text in ([stop] if isinstance(stop, str) else stop) if isinstance(text, str))
    if num_characters > MAX_STOP_CHARACTERS:
        raise bad_field("stop", f"holds {num_characters} characters; {MAX_STOP_CHARACTERS} are the most")
    values = {name: value for name, value in fields.items() if name in SAMPLING and name != "stop"}
    values = {**defaults, **values}
    values.setdefault("seed", secrets.randbits(63))
    try:
        params = SamplingParams(
            **values,
            stop=[stop] if isinstance(stop, str) else stop,
            max_tokens=max_tokens,
            logprobs=logprobs,
            ignore_eos=fields.get("ignore_eos", False),
            guided_decoding=guide,
        )
    except RequestError as error:
        raise api_error(error.refusal, {LENGTH: max_field}) from None
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
        if any(token >= vocab_size for token in ids):
            raise bad_field(name, f"names ids that are none of the model's, 0 to {vocab_size - 1}")
    return params


def candidates(fields: dict[str, Any], max_n: int) -> tuple[int, int]:
    """How many sequences of a prompt are generated (`best_of`), and how many of them are returned (`n`). Raises
    ApiError."""
    n = integer(fields, "n", 1, max_n, 1)
    best_of = integer(fields, "best_of", 1, max_n, n)
    assert n is not None and best_of is not None
    if best_of < n:
        raise bad_field("best_of", f"is {best_of}, below 'n': of best_of sequences, n are returned")
    if best_of > n and fields.get("stream"):
        raise bad_field("best_of", "above 'n' excludes stream: the best are known only at the end")
    return best_of, n


def check_length(num_prompt: int, max_tokens: int, max_seq_len: int, param: str, max_field: str = "max_tokens") -> None:
    """Raise ApiError where prompt and generated tokens do not fit a sequence."""
    try:
        check_prompt_length(num_prompt, max_seq_len)
    except RequestError as error:
        raise api_error(error.refusal, {PROMPT: param}) from None
    if num_prompt + max_tokens > max_seq_len:
        raise ApiError(
            400,
            f"the prompt has {num_prompt} tokens and {max_tokens} are asked for, but the model's context is "
            f"{max_seq_len} tokens; lower {max_field} or shorten the prompt",
            param,
            "context_length_exceeded",
        )
