"""Requests to `tensorrt_llm` and its responses as KServe messages, without a detour over tensor objects."""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tritonclient.grpc import service_pb2

from kvforge.common.sampling_fields import SAMPLING_FIELDS
from kvforge.runtime.requests.outputs import TokenLogprobs
from kvforge.runtime.requests.params import SamplingParams
from kvforge.serving.contract.parameters import (
    DRAFT_SCOPE,
    ERRORS_AS_TENSORS,
    KEEP_END_TOKEN,
    STOP_TOKEN_IDS,
    STREAM_INTERVAL,
)

MODEL = "tensorrt_llm"
OUTPUTS = ("output_ids", "finish_reason", "stop_reason")
LOGPROB_OUTPUTS = ("output_log_probs", "top_log_probs_ids", "top_log_probs")
PROMPT_OUTPUTS = ("prompt_log_probs", "prompt_log_probs_ranks", "prompt_top_log_probs_ids", "prompt_top_log_probs")
_NO_END = -1


@dataclass(frozen=True)
class ResponseTokens:
    """What one response says of a sequence. `log_probs` has a number per token where asked for; `top_ids`, `top` have
    `k` entries per token, as they came: an id below 0 is none. `prompt` are the PROMPT_OUTPUTS, where they are there.

    Finish reason ERROR: the request failed, `stop_reason` has the outcome and the message.
    """

    sequence: int
    token_ids: Sequence[int]
    log_probs: Sequence[float] = ()
    top_ids: Sequence[int] = ()
    top: Sequence[float] = ()
    finish_reason: str | None = None
    stop_reason: Any = None
    reused_blocks: int | None = None
    prompt: tuple[Sequence[Any], ...] = ()

    def logprobs(self, start: int, end: int) -> list[TokenLogprobs]:
        """Of the tokens from `start` to before `end`."""
        tops = _tops(self.top_ids, self.top, len(self.token_ids), start, end)
        return [
            TokenLogprobs(self.token_ids[at], self.log_probs[at], 0, top)
            for at, top in zip(range(start, end), tops, strict=True)
        ]

    def prompt_logprobs(self, prompt: Sequence[int], start: int, end: int) -> list[TokenLogprobs]:
        """Of the prompt's tokens from `start`, at least 1, to before `end`."""
        log_probs, ranks, top_ids, top = self.prompt
        tops = _tops(top_ids, top, len(log_probs), start - 1, end - 1)
        return [
            TokenLogprobs(prompt[at], log_probs[at - 1], ranks[at - 1], top)
            for at, top in zip(range(start, end), tops, strict=True)
        ]


def _tops(
    ids: Sequence[int], values: Sequence[float], num_tokens: int, start: int, end: int
) -> Iterator[dict[int, float]]:
    """The most probable tokens at each of `num_tokens` places, from `start` to before `end`."""
    k = len(ids) // max(num_tokens, 1)
    for at in range(start, end):
        pairs = zip(ids[at * k : (at + 1) * k], values[at * k : (at + 1) * k], strict=True)
        yield {token: value for token, value in pairs if token >= 0}


def request_template(
    params: SamplingParams,
    vocab_size: int,
    streaming: bool,
    cache_stats: bool = False,
    timeout_s: float | None = None,
) -> bytes:
    """All that requests with these parameters have in common, serialized."""
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    _add(request, "request_output_len", "INT32", _one(params.max_tokens, np.int32))
    _add(request, "streaming", "BOOL", _one(streaming, np.bool_))
    _add(request, "seed", "UINT64", _one((params.seed or 0) % 2**64, np.uint64))
    _add_numbers(request, params)
    _add_ends(request, params)
    if params.stop:
        _add_texts(request, "stop_strings", params.stop)
    if params.logit_bias:
        bias = np.zeros((1, vocab_size), dtype=np.float32)
        bias[0, list(params.logit_bias)] = list(params.logit_bias.values())
        _add(request, "embedding_bias", "FP32", bias)
    if params.guided_decoding is not None:
        _add_texts(request, "guided_decoding_guide_type", [params.guided_decoding.kind])
        if params.guided_decoding.guide is not None:
            _add_texts(request, "guided_decoding_guide", [params.guided_decoding.guide])
    outputs: tuple[str, ...] = OUTPUTS
    if params.n > 1:
        outputs += ("sequence_index",)
    if params.logprobs is not None:
        outputs += LOGPROB_OUTPUTS if params.logprobs else LOGPROB_OUTPUTS[:1]
        _add(request, "return_log_probs", "BOOL", _one(True, np.bool_))
    if params.prompt_logprobs is not None:
        outputs += PROMPT_OUTPUTS
    if cache_stats:
        outputs += ("kv_cache_reused_blocks",)
        _add(request, "return_perf_metrics", "BOOL", _one(True, np.bool_))
    for name in outputs:
        request.outputs.add().name = name
    for name in (ERRORS_AS_TENSORS, KEEP_END_TOKEN):
        request.parameters[name].bool_param = True
    request.parameters[STREAM_INTERVAL].int64_param = 0
    if timeout_s is not None:
        request.parameters["timeout"].int64_param = int(timeout_s * 1e6)
    return request.SerializeToString()


def infer_request(
    template: bytes, request_id: str, prompt: bytes, draft_scope: str = ""
) -> service_pb2.ModelInferRequest:
    """The message for one prompt, int32 token ids. Costs a copy of what it holds."""
    request = service_pb2.ModelInferRequest.FromString(template)
    request.id = request_id
    if draft_scope:
        request.parameters[DRAFT_SCOPE].string_param = draft_scope
    num_tokens = len(prompt) // 4
    request.inputs.add(name="input_ids", datatype="INT32", shape=(1, num_tokens))
    request.raw_input_contents.append(prompt)
    _add(request, "input_lengths", "INT32", _one(num_tokens, np.int32))
    return request


def stop_request(request_id: str) -> service_pb2.ModelInferRequest:
    """The message that ends a request with the tokens it has; it has no response of its own."""
    request = service_pb2.ModelInferRequest(model_name=MODEL, id=request_id)
    _add(request, "stop", "BOOL", _one(True, np.bool_))
    for name in ("input_ids", "input_lengths", "request_output_len"):  # which the model requires
        _add(request, name, "INT32", _one(1, np.int32))
    return request


_ALWAYS = ("temperature", "top_p")
"""Without top-p TensorRT-LLM's choice is greedy, whatever the temperature."""


def _add_numbers(request: service_pb2.ModelInferRequest, params: SamplingParams) -> None:
    for name, field in SAMPLING_FIELDS.items():
        value = getattr(params, name)
        if name in _ALWAYS or value != field.neutral:
            dtype = np.int32 if field.is_whole else np.float32
            _add(request, field.tensor or name, field.datatype, _one(value, dtype))
    if params.n > 1:
        _add(request, "num_return_sequences", "INT32", _one(params.n, np.int32))
    for asked, tensor in ((params.logprobs, "num_top_log_probs"), (params.prompt_logprobs, "num_prompt_log_probs")):
        if asked is not None:
            _add(request, tensor, "INT32", _one(asked, np.int32))


def _add_ends(request: service_pb2.ModelInferRequest, params: SamplingParams) -> None:
    """What ends a sequence. Stop tokens are no stop words of one token: a guide leaves them, and a minimum length
    forbids them."""
    if params.ignore_eos:
        _add(request, "end_id", "INT32", _one(_NO_END, np.int32))
    if params.stop_token_ids:
        request.parameters[STOP_TOKEN_IDS].string_param = ",".join(map(str, dict.fromkeys(params.stop_token_ids)))


def _one(value: Any, dtype: Any) -> np.ndarray:
    return np.array([[value]], dtype=dtype)


def _add(request: service_pb2.ModelInferRequest, name: str, datatype: str, array: np.ndarray) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=array.shape)
    request.raw_input_contents.append(array.tobytes())


def _add_texts(request: service_pb2.ModelInferRequest, name: str, texts: Sequence[str]) -> None:
    encoded = [text.encode() for text in texts]
    request.inputs.add(name=name, datatype="BYTES", shape=(1, len(encoded)))
    request.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in encoded))


def read_response(response: service_pb2.ModelInferResponse) -> ResponseTokens | None:
    """The tokens in a response; None where it has no tensors, as a bare end of a request."""
    raw = {output.name: raw for output, raw in zip(response.outputs, response.raw_output_contents, strict=False)}
    if "output_ids" not in raw:
        return None
    reason = _text(raw.get("finish_reason"))
    detail = _text(raw.get("stop_reason"))
    return ResponseTokens(
        sequence=_int(raw.get("sequence_index")) or 0,
        token_ids=_numbers(raw, "output_ids", "i"),
        log_probs=_numbers(raw, "output_log_probs", "f"),
        top_ids=_numbers(raw, "top_log_probs_ids", "i"),
        top=_numbers(raw, "top_log_probs", "f"),
        finish_reason=reason or None,
        stop_reason=json.loads(detail) if detail else None,
        reused_blocks=_int(raw.get("kv_cache_reused_blocks")),
        prompt=_prompt_numbers(raw),
    )


def _prompt_numbers(raw: dict[str, bytes]) -> tuple[Sequence[Any], ...]:
    if PROMPT_OUTPUTS[0] not in raw:
        return ()
    kinds: tuple[Literal["i", "f"], ...] = ("f", "i", "i", "f")
    return tuple(_numbers(raw, name, kind) for name, kind in zip(PROMPT_OUTPUTS, kinds, strict=True))


def _numbers(raw: dict[str, bytes], name: str, kind: Literal["i", "f"]) -> Sequence[Any]:
    """A tensor's numbers without a copy: what they cost as objects, they cost where they are looked at."""
    return memoryview(raw.get(name, b"")).cast(kind)


def _int(raw: bytes | None) -> int | None:
    return int.from_bytes(raw[:4], "little", signed=True) if raw else None


def _text(raw: bytes | None) -> str:
    return raw[4:].decode() if raw else ""
