"""Sampling parameters in vLLM's words, and what vLLM cannot honour, refused by its name.

Stop words, stop strings, deadlines, the number of sequences and what ends one stay ours (``engine.py``).
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.common.sampling_fields import SAMPLING_FIELDS
from kvforge.runtime.guides.grammar import grammar_of
from kvforge.runtime.requests.guided_decoding import GuidedDecoding, guide_error
from kvforge.runtime.requests.params import MIN_TEMPERATURE, SamplingParams

MAX_TEMPERATURE = 2.0
LEAST_TEMPERATURE = 0.01
"""Below it vLLM takes 0.01."""
MAX_PENALTY = 2.0
_NO_SEED_EITHER = 2**63 - 1
"""In place of -1, which vLLM takes for no seed."""
_WHITESPACE = r" |\r?\n[ \t]{0,32}"
"""As in ``kvforge.runtime.guides.grammar``."""
_TARGET = "an engine of target vllm"


def check_honoured(params: SamplingParams) -> None:
    """Raise RequestError for what vLLM cannot do, with the parameter's name."""
    if params.draft_token_ids:
        raise RequestError(f"is not offered by {_TARGET}", "leave it out", field="draft_token_ids")
    if params.return_logits:
        raise RequestError(f"is not offered by {_TARGET}", "ask for logprobs", field="return_logits")
    if params.prompt_logprobs is not None:
        raise RequestError(f"is not offered by {_TARGET}", "leave it out", field="prompt_logprobs")
    if params.retention:
        raise RequestError(
            f"is not offered by {_TARGET}, whose prefix cache keeps what was used last", field="retention"
        )
    for name, number in SAMPLING_FIELDS.items():
        if not number.is_in_vllm and getattr(params, name) != number.neutral:
            raise RequestError(f"is not offered by {_TARGET}", "leave it out", field=name)
    if params.guided_decoding is not None and params.logprobs is not None:
        raise RequestError(
            f"beside guided_decoding are not offered by {_TARGET}, where a guide changes them",
            "leave one out",
            field="logprobs",
        )
    if not params.greedy and not LEAST_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        raise RequestError(
            f"is {params.temperature}, but {_TARGET} takes 0 or {LEAST_TEMPERATURE} to {MAX_TEMPERATURE}",
            field="temperature",
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if abs(getattr(params, name)) > MAX_PENALTY:
            raise RequestError(
                f"is {getattr(params, name)}, but {_TARGET} takes {-MAX_PENALTY} to {MAX_PENALTY}", field=name
            )


def vllm_fields(
    params: SamplingParams, max_tokens: int, stop_ids: Collection[int], bad_words: Sequence[Sequence[int]], index: int
) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams for sequence ``index`` of a request, all but its guide.

    ``max_tokens`` are those that fit; ``stop_ids`` end the sequence, end-of-text tokens included.
    ``_bad_words_token_ids`` are what vLLM makes of strings.
    """
    fields: dict[str, Any] = {
        **{name: getattr(params, name) for name, number in SAMPLING_FIELDS.items() if number.is_in_vllm},
        "temperature": 0.0 if params.temperature < MIN_TEMPERATURE else params.temperature,
        "top_k": max(params.top_k, 0),
        "max_tokens": max_tokens,
        "min_tokens": min(params.min_tokens, max_tokens),
        "stop_token_ids": sorted(stop_ids),
        "ignore_eos": True,  # the end-of-text tokens are among the stop ids
        "logprobs": params.logprobs,
        "detokenize": False,
    }
    if params.greedy:
        fields |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    if params.seed is not None:
        fields["seed"] = _wrapped(params.seed + index)
    if params.logit_bias:
        fields["logit_bias"] = dict(params.logit_bias)
    if bad_words:
        fields["_bad_words_token_ids"] = [list(word) for word in bad_words]
    return fields


def guide_fields(guided: GuidedDecoding, special: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of vLLM's StructuredOutputsParams, such that llguidance gets the grammar that ours gets;
    its release 1.7 takes any whitespace in JSON all the same. ``special`` are the texts of special tokens.

    Raises:
        RequestError: the guide is a schema that is no object, or a tag that is none.
    """
    if guided.kind == "json":
        return {"json": _schema({"type": "object"})}
    if guided.kind == "json_schema":
        return {"json": _schema(json.loads(guided.guide or ""))}
    if guided.kind == "regex":
        return {"regex": guided.guide}
    if guided.kind == "ebnf_grammar":
        return {"grammar": guided.guide}
    # vLLM takes a trigger in angle brackets for a special token, and its engine ends where the tokenizer has none such.
    return {"grammar": grammar_of(guided, special.__contains__)}


def _schema(schema: Any) -> str:
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise guide_error("cannot be used: the schema is no JSON object", "give one")
    options = {**schema.get("x-guidance", {}), "whitespace_pattern": _WHITESPACE}
    return json.dumps({**schema, "x-guidance": options})


def _wrapped(seed: int) -> int:
    """A seed of 64 bits with a sign, and none that vLLM takes for no seed."""
    wrapped = (seed + 2**63) % 2**64 - 2**63
    return _NO_SEED_EITHER if wrapped == -1 else wrapped
