"""What a step gave one sequence, as a row of the protocol's `tokens` message and back.

A row is [id, index, token_ids, finish_reason | null, extras | null]. The extras, each only where there is one:

    log_probs    one number per token
    top          [[token ids], [log-probabilities]] of the most probable tokens, one pair per token
    ranks        beside log_probs: 1 for the most probable token, one number per token
    stop_reason  with a finish reason: SequenceOutput.stop_reason, why for "error" and "abort"
    refusal      with "error", where it was the request's fault: a Refusal as data
    metrics      with a finish reason, or always where that was asked for: fields of RequestMetrics
    logits       [offset, rows, vocab] of float32 numbers in the message's blob
    prompt       [offset, rows, k] of a PromptScores there: its four arrays of 4-byte numbers, one after the other
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvforge.common.refusals import Refusal
from kvforge.runtime.requests.prompt_scores import PromptScores

Row = list[Any]
_NUMBER_BYTES = 4


@dataclass(frozen=True)
class StepOutput:
    """What a step gave one sequence; `top` is a (token ids, log-probabilities) pair per token."""

    engine_id: str
    index: int
    tokens: list[int]
    finish_reason: str | None = None
    log_probs: list[float] | None = None
    top: list[tuple[list[int], list[float]]] | None = None
    stop_reason: Any = None
    metrics: dict[str, int] | None = None
    logits: np.ndarray | None = None
    ranks: list[int] | None = None
    prompt_scores: PromptScores | None = None
    refusal: Refusal | None = None


def to_row(output: Any, blobs: list[bytes], offset: int, with_metrics: bool = False) -> Row:
    """The row of a kvforge.runtime.SequenceOutput; its arrays go to `blobs`, which end at `offset`. Metrics come with
    the end of a sequence, and `with_metrics` with every row."""
    extras: dict[str, Any] = {}
    if output.logprobs is not None:
        extras["log_probs"] = [entry.logprob for entry in output.logprobs]
        extras["ranks"] = [entry.rank for entry in output.logprobs]
        if output.logprobs and output.logprobs[0].top:
            extras["top"] = [[list(entry.top), list(entry.top.values())] for entry in output.logprobs]
    if output.logits:
        logits = np.stack([np.asarray(row, dtype=np.float32) for row in output.logits])
        extras["logits"] = [offset, *logits.shape]
        blobs.append(logits.tobytes())
        offset += logits.nbytes
    if output.prompt_scores is not None:
        extras["prompt"] = [offset, *output.prompt_scores.top.shape]
        blobs += [array.tobytes() for array in output.prompt_scores.arrays]
    if output.finished and output.stop_reason is not None:
        extras["stop_reason"] = output.stop_reason
        if output.refusal is not None:
            extras["refusal"] = output.refusal.to_json()
    if (output.finished or with_metrics) and output.metrics is not None:
        extras["metrics"] = asdict(output.metrics)
    reason = output.finish_reason if output.finished else None
    return [output.request_id, output.index, output.new_token_ids, reason, extras or None]


def error_row(output: Any, message: str) -> Row:
    """The row of a sequence that ends in an error, in place of what the step gave it."""
    return [output.request_id, output.index, [], "error", {"stop_reason": message}]


def from_row(row: Row, blob: bytes) -> StepOutput:
    """The inverse of `to_row`; arrays look into `blob`."""
    engine_id, index, tokens, reason, extras = row
    if not extras:
        return StepOutput(engine_id, index, tokens, reason)
    logits = None
    if "logits" in extras:
        offset, rows, vocab = extras["logits"]
        logits = np.frombuffer(blob, np.float32, rows * vocab, offset).reshape(rows, vocab)
    scores = PromptScores.from_bytes(blob, *extras["prompt"]) if "prompt" in extras else None
    return StepOutput(
        engine_id,
        index,
        tokens,
        reason,
        extras.get("log_probs"),
        extras.get("top"),
        extras.get("stop_reason"),
        extras.get("metrics"),
        logits,
        extras.get("ranks"),
        scores,
        Refusal.from_json(extras["refusal"]) if "refusal" in extras else None,
    )


def blob_bytes(output: Any) -> int:
    """Bytes that the arrays of a SequenceOutput take in a message."""
    arrays = output.prompt_scores.arrays if output.prompt_scores is not None else ()
    return sum(np.size(row) for row in (*(output.logits or ()), *arrays)) * _NUMBER_BYTES
