"""The state of one Triton request while the engine works on it: what has arrived and not been sent yet."""

import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvforge.runtime.requests.prompt_scores import PromptScores
from kvforge.serving.contract.failures import Failure
from kvforge.serving.contract.request import GenerationRequest
from kvforge.serving.engine.output_rows import StepOutput

CONTEXT_TOKENS = 6
STOPPED = "cancelled"
"""The finish reason of what a `stop` request ended."""


@dataclass
class Pending:
    """Output of a sequence that waits to be sent: log-probabilities as float32, `top_ids` as int32 and `top` as float32
    with `num_top` entries per token, fewer with a smaller vocabulary.

    Numbers are kept as bytes: millions of Python objects, when they are given back at once, hold up all threads.
    """

    num_top: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: "array[float]" = field(default_factory=lambda: array("f"))
    top_ids: "array[int]" = field(default_factory=lambda: array("i"))
    top: "array[float]" = field(default_factory=lambda: array("f"))
    logits: list[np.ndarray] = field(default_factory=list)

    def add(self, output: StepOutput) -> None:
        self.tokens.extend(output.tokens)
        self.log_probs.extend(output.log_probs or ())
        if self.num_top:
            for ids, log_probs in output.top or ():
                self.top_ids.extend(ids[: self.num_top])
                self.top.extend(log_probs[: self.num_top])
        if output.logits is not None:
            self.logits.append(output.logits)

    def range(self, start: int, end: int) -> "Pending":
        """What belongs to the tokens from `start` to before `end`."""
        if (start, end) == (0, len(self.tokens)):
            return self
        width = len(self.top_ids) // len(self.tokens)
        return Pending(
            self.num_top,
            self.tokens[start:end],
            self.log_probs[start:end],
            self.top_ids[start * width : end * width],
            self.top[start * width : end * width],
            list(_rows(self.logits, start, end)),
        )


@dataclass(eq=False)
class ActiveSequence:
    """One generated sequence: `batch_index` is the prompt's row, `sequence_index` counts its samples.

    `num_generated` and `cum_log_prob` have the token that ended it, `num_sent` where the client wants it.
    """

    batch_index: int
    sequence_index: int
    request: GenerationRequest
    pending: Pending = field(init=False)
    cum_log_prob: float = 0.0
    num_generated: int = 0
    num_sent: int = 0
    finish_reason: str | None = None
    stop_reason: Any = None
    metrics: dict[str, int] | None = None
    prompt_scores: PromptScores | None = None
    """What waits to be sent of the prompt's log-probabilities."""
    reported: bool = False

    def __post_init__(self) -> None:
        self.pending = Pending(self.request.num_top_log_probs)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def has_output(self, stream_interval: int) -> bool:
        """Whether enough tokens wait for a response; the first one does not wait for others."""
        num_tokens = len(self.pending.tokens) if self.request.streaming else 0
        return num_tokens >= max(stream_interval if self.num_sent else 1, 1)

    @property
    def ended_by_token(self) -> bool:
        """Its last token is an end token or a stop token; stop strings and stop words are part of the output."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str | list | tuple)


@dataclass(frozen=True)
class Chunk:
    """What one response carries: the sequence's new output, or all of it when not streaming.

    `tokens` are those of `new`, with the prompt before them where the answer repeats it; `context` is what the
    text is decoded after; `num_output_tokens` and `cum_log_prob` are of the sequence up to here. `prompt_scores` come
    with the first one.
    """

    sequence: ActiveSequence
    new: Pending
    tokens: list[int]
    cum_log_prob: float
    num_output_tokens: int
    context: list[int]
    end: bool
    final: bool
    prompt_scores: PromptScores | None = None


class ActiveRequest:
    """Collects engine output for one Triton request; the engine's reader adds, one thread at a time takes.

    `key` is unique among all requests; `engine_ids` are the engine's ids of the prompts in the batch. `lane` is that of
    the text model that the tokens go to, None where they are Triton's responses. Streamed responses have
    `stream_interval` tokens (parameters.STREAM_INTERVAL). `errors_as_tensors`: the request ends with a response where
    it fails (parameters.ERRORS_AS_TENSORS). `keeps_end`: the token that ends a sequence is part of the output. Exactly
    one of a final chunk or a failure ends the request.
    """

    def __init__(
        self, key: int, client_id: str, sender: Any, prompts: list[GenerationRequest], outputs: frozenset[str],
        lane: int | None = None, errors_as_tensors: bool = False, timeout_s: float | None = None,
        stream_interval: int = 1, keeps_end: bool = False,
    ) -> None:  # fmt: skip
        self.key = key
        self.client_id = client_id
        self.prompts = prompts
        self.sender = sender
        self.outputs = outputs
        self.lane = lane
        self.errors_as_tensors = errors_as_tensors
        self.timeout_s = timeout_s
        self.stream_interval = stream_interval
        self.keeps_end = keeps_end
        self.engine_ids = [f"{key}.{row}" for row in range(len(prompts))]
        self.sequences = [
            ActiveSequence(row, index, prompt) for row, prompt in enumerate(prompts)
            for index in range(prompt.num_sequences)
        ]  # fmt: skip
        self._by_index = {(f"{key}.{s.batch_index}", s.sequence_index): s for s in self.sequences}
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._ended = False
        self.arrived = self.last_asked = time.monotonic()
        self.sender_lock = threading.Lock()
        """Held in every call on `sender`: Triton crashes on a question about a request that has had its end."""
        self.closed = False
        """The end was sent, `sender` is not to be used any more; guarded by `sender_lock`."""
        self.was_greeted = False
        """A text model's call has had a first, empty response. Until then it holds one of the few threads with which
        Triton sends that model's own responses."""
        self.has_left = False
        """A text model has been given the last of it."""
        self.scheduled = False
        """True while a sender thread has or will get this request; guarded by the sender pool."""

    def add(self, output: StepOutput) -> bool:
        """Take in engine output; True when there is something to send now."""
        with self._lock:
            sequence = self._by_index.get((output.engine_id, output.index))
            if sequence is None or sequence.finished:
                return False
            sequence.pending.add(output)
            sequence.num_generated += len(output.tokens)
            if output.metrics is not None:
                sequence.metrics = output.metrics
            if output.prompt_scores is not None:
                sequence.prompt_scores = output.prompt_scores
            if output.finish_reason is not None:
                sequence.finish_reason, sequence.stop_reason = output.finish_reason, output.stop_reason
            return sequence.finished or sequence.has_output(self.stream_interval)

    def fail(self, failure: Failure) -> None:
        """End the request with an error, unless it has ended."""
        with self._lock:
            if self._failure is None:
                self._failure = failure

    def stop(self) -> None:
        """Its client has enough: what runs ends with the tokens it has. Where something else ended it, nothing."""
        with self._lock:
            for sequence in self.sequences:
                if not sequence.finished:
                    sequence.finish_reason = STOPPED

    @property
    def was_stopped(self) -> bool:
        return any(sequence.finish_reason == STOPPED for sequence in self.sequences)

    def break_off(self, failure: Failure) -> None:
        """End with an error, though everything may have been taken: it could not be sent."""
        with self._lock:
            self._failure, self._ended = failure, False

    def is_past_deadline(self, now: float) -> bool:
        return self.timeout_s is not None and now - self.arrived >= self.timeout_s

    @property
    def has_failed(self) -> bool:
        """Whether a failure will end it: `take_failure` gives that."""
        with self._lock:
            return self._failure is not None and not self._ended

    def take_failure(self) -> Failure | None:
        """What the request is to end with, once; None where it has ended, or nothing failed."""
        with self._lock:
            if self._ended or self._failure is None:
                return None
            self._ended = True
            return self._failure

    def take(self) -> list[Chunk]:
        """What is to be sent now; nothing after the end, and once something has failed."""
        with self._lock:
            if self._ended or self._failure is not None:
                return []
            chunks: list[Chunk] = []
            for sequence in self.sequences:
                if not sequence.reported and (sequence.finished or sequence.has_output(self.stream_interval)):
                    sequence.reported = sequence.finished
                    self._ended = all(s.reported for s in self.sequences)
                    chunks += self._chunks(sequence, self._ended)
            return chunks

    def _chunks(self, sequence: ActiveSequence, final: bool) -> Iterator[Chunk]:
        """Of what waits of one sequence, which then waits no more."""
        request = sequence.request
        pending, sequence.pending = sequence.pending, Pending(request.num_top_log_probs)
        scores, sequence.prompt_scores = sequence.prompt_scores, None
        num_tokens = len(pending.tokens)
        if num_tokens and sequence.reported and sequence.ended_by_token and not self.keeps_end:
            num_tokens -= 1
        size = 1 if request.streaming and self.stream_interval == 1 else max(num_tokens, 1)
        for start in range(0, max(num_tokens, 1), size):
            end = min(start + size, num_tokens)
            is_last = end == num_tokens
            new = pending.range(start, end) if pending.tokens else pending
            sequence.cum_log_prob += sum(pending.log_probs[start:] if is_last else new.log_probs)
            with_prompt = not request.streaming and not request.exclude_input
            context = [] if with_prompt or sequence.num_sent else request.prompt[-CONTEXT_TOKENS:]
            sequence.num_sent += end - start
            tokens = request.prompt + new.tokens if with_prompt else new.tokens
            yield Chunk(
                sequence, new, tokens, sequence.cum_log_prob, sequence.num_sent, context,
                sequence.reported and is_last, final and is_last, scores if start == 0 else None,
            )  # fmt: skip


def _rows(arrays: list[np.ndarray], start: int, end: int) -> Iterator[np.ndarray]:
    """The rows from `start` to before `end` of arrays that follow each other, without a copy."""
    for rows in arrays:
        if (part := rows[max(start, 0) : max(end, 0)]).size:
            yield part
        start, end = start - len(rows), end - len(rows)
