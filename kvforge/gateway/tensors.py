"""Requests to `tensorrt_llm` and its responses as KServe messages, without a detour over tensor objects."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from kvforge.runtime.sampling_params import SamplingParams
from kvforge.serving.parameters import ERRORS_AS_TENSORS

MODEL = "tensorrt_llm"
OUTPUTS = ("output_ids", "finish_reason", "stop_reason")
LOGPROB_OUTPUTS = ("output_log_probs", "top_log_probs_ids", "top_log_probs")
_NO_END = -1


@dataclass(frozen=True)
class Piece:
    """What one response says of a sequence; `log_probs` and `top` have an entry per token, where asked for.

    Finish reason ERROR: the request failed, `stop_reason` has the outcome and the message.
    """

    sequence: int
    token_ids: list[int]
    log_probs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    reused_blocks: int | None = None


def infer_request(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    vocab_size: int,
    streaming: bool,
    cache_stats: bool = False,
    timeout_s: float | None = None,
) -> service_pb2.ModelInferRequest:
    """The message for one prompt. Top-p is always sent: without it TensorRT-LLM's choice is greedy."""
    request = service_pb2.ModelInferRequest(model_name=MODEL, id=request_id)
    _add(request, "input_ids", "INT32", np.array([prompt], dtype=np.int32))
    _add(request, "input_lengths", "INT32", _one(len(prompt), np.int32))
    _add(request, "request_output_len", "INT32", _one(params.max_tokens, np.int32))
    _add(request, "streaming", "BOOL", _one(streaming, np.bool_))
    _add(request, "temperature", "FP32", _one(params.temperature, np.float32))
    _add(request, "runtime_top_p", "FP32", _one(params.top_p, np.float32))
    _add(request, "seed", "UINT64", _one((params.seed or 0) % 2**64, np.uint64))
    for name, tensor, datatype, dtype, neutral in _OPTIONAL:
        value = getattr(params, name)
        if value != neutral:
            _add(request, tensor, datatype, _one(value, dtype))
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
    if cache_stats:
        outputs += ("kv_cache_reused_blocks",)
        _add(request, "return_perf_metrics", "BOOL", _one(True, np.bool_))
    for name in outputs:
        request.outputs.add().name = name
    request.parameters[ERRORS_AS_TENSORS].bool_param = True
    if timeout_s is not None:
        request.parameters["timeout"].int64_param = int(timeout_s * 1e6)
    return request


# Field of SamplingParams, tensor, datatype, numpy's, and the value that need not be sent.
_OPTIONAL: tuple[tuple[str, str, str, Any, Any], ...] = (
    ("n", "num_return_sequences", "INT32", np.int32, 1),
    ("top_k", "runtime_top_k", "INT32", np.int32, 0),
    ("min_p", "min_p", "FP32", np.float32, 0.0),
    ("min_tokens", "min_tokens", "INT32", np.int32, 0),
    ("repetition_penalty", "repetition_penalty", "FP32", np.float32, 1.0),
    ("presence_penalty", "presence_penalty", "FP32", np.float32, 0.0),
    ("frequency_penalty", "frequency_penalty", "FP32", np.float32, 0.0),
    ("logprobs", "num_top_log_probs", "INT32", np.int32, None),
)


def _add_ends(request: service_pb2.ModelInferRequest, params: SamplingParams) -> None:
    """Stop tokens: as words of one token; without end-of-text, a single one takes its place."""
    stops = list(params.stop_token_ids)
    if params.ignore_eos:
        end = stops.pop(0) if len(stops) == 1 else _NO_END
        _add(request, "end_id", "INT32", _one(end, np.int32))
    if stops:
        ends = range(1, len(stops) + 1)
        _add(request, "stop_words_list", "INT32", np.array([[stops, ends]], dtype=np.int32))


def _one(value: Any, dtype: Any) -> np.ndarray:
    return np.array([[value]], dtype=dtype)


def _add(request: service_pb2.ModelInferRequest, name: str, datatype: str, array: np.ndarray) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=array.shape)
    request.raw_input_contents.append(array.tobytes())


def _add_texts(request: service_pb2.ModelInferRequest, name: str, texts: Sequence[str]) -> None:
    encoded = [text.encode() for text in texts]
    request.inputs.add(name=name, datatype="BYTES", shape=(1, len(encoded)))
    request.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in encoded))


def read_response(response: service_pb2.ModelInferResponse) -> Piece | None:
    """The news in a response; None where it has no tensors, as a bare end of a request."""
    raw = {output.name: raw for output, raw in zip(response.outputs, response.raw_output_contents, strict=False)}
    if "output_ids" not in raw:
        return None
    tokens = memoryview(raw["output_ids"]).cast("i").tolist()
    log_probs: list[float] = []
    top: list[dict[int, float]] = []
    if "output_log_probs" in raw:
        log_probs = memoryview(raw["output_log_probs"]).cast("f").tolist()  # type: ignore[assignment]
        top = _top(raw, len(tokens))
    reason = _text(raw.get("finish_reason"))
    detail = _text(raw.get("stop_reason"))
    return Piece(
        sequence=_int(raw.get("sequence_index")) or 0,
        token_ids=tokens,
        log_probs=log_probs,
        top=top,
        finish_reason=reason or None,
        stop_reason=json.loads(detail) if detail else None,
        reused_blocks=_int(raw.get("kv_cache_reused_blocks")),
    )


def _top(raw: dict[str, bytes], num_tokens: int) -> list[dict[int, float]]:
    if not raw.get("top_log_probs_ids") or not num_tokens:
        return [{} for _ in range(num_tokens)]
    ids = memoryview(raw["top_log_probs_ids"]).cast("i").tolist()
    values = memoryview(raw["top_log_probs"]).cast("f").tolist()
    k = len(ids) // num_tokens
    return [
        {token: value for token, value in zip(ids[at : at + k], values[at : at + k], strict=True) if token >= 0}
        for at in range(0, num_tokens * k, max(k, 1))
    ]


def _int(raw: bytes | None) -> int | None:
    return int.from_bytes(raw[:4], "little", signed=True) if raw else None


def _text(raw: bytes | None) -> str:
    return raw[4:].decode() if raw else ""
