"""The state of one Triton request while the engine works on it: what has arrived and not been sent yet."""

import threading
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvforge.serving.contract.failures import Failure
from kvforge.serving.contract.request import GenerationRequest
from kvforge.serving.engine.output_rows import StepOutput

CONTEXT_TOKENS = 6
STOPPED = "cancelled"
"""The finish reason of what a `stop` request ended."""
MAX_UNHEARD_BEATS = 300
"""Half a minute and more in which this process ran and no ack came: only a broken postprocessing takes this long. Going
on earlier would risk what acks.py is there for. Not by the clock, because a machine that stood still is no silence."""


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


@dataclass
class ActiveSequence:
    """One generated sequence: `batch_index` is the prompt's row, `sequence_index` counts its samples."""

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
    reported: bool = False

    def __post_init__(self) -> None:
        self.pending = Pending(self.request.num_top_log_probs)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_output(self) -> bool:
        return self.request.streaming and bool(self.pending.tokens)


@dataclass(frozen=True)
class Chunk:
    """What one response carries: the sequence's new output, or all of it when not streaming.

    `tokens` are those of `new`, with the prompt before them where the answer repeats it; `context` is what the
    text is decoded after; the totals are of the moment the chunk was taken.
    """

    sequence: ActiveSequence
    new: Pending
    tokens: list[int]
    cum_log_prob: float
    num_generated: int
    context: list[int]
    end: bool
    final: bool


class ActiveRequest:
    """Collects engine output for one Triton request; the engine's reader adds, one sender thread takes.

    `key` is unique among all requests; `engine_ids` are the engine's ids of the prompts in the batch.
    `in_ensemble` says that a text model comes after, which acknowledges every response and watches for a
    cancel; the next response then waits for the ack. When MAX_UNHEARD_BEATS go without one there is no such model.
    Unless `decoupled`, there is exactly one response, so there are no empty ones by which to watch for a cancel.
    `errors_as_tensors`: the request ends with a response where it fails (parameters.ERRORS_AS_TENSORS).
    Exactly one of a final chunk or a failure ends the request.
    """

    def __init__(
        self, key: int, client_id: str, sender: Any, prompts: list[GenerationRequest], outputs: frozenset[str],
        in_ensemble: bool = False, errors_as_tensors: bool = False, timeout_s: float | None = None,
        decoupled: bool = True,
    ) -> None:  # fmt: skip
        self.key = key
        self.client_id = client_id
        self.prompts = prompts
        self.sender = sender
        self.outputs = outputs
        self.in_ensemble = in_ensemble
        self.has_heartbeats = in_ensemble and decoupled
        self.errors_as_tensors = errors_as_tensors
        self.timeout_s = timeout_s
        self.engine_ids = [f"{key}.{row}" for row in range(len(prompts))]
        self.sequences = [
            ActiveSequence(row, index, prompt) for row, prompt in enumerate(prompts)
            for index in range(prompt.num_sequences)
        ]  # fmt: skip
        self._by_index = {(f"{key}.{s.batch_index}", s.sequence_index): s for s in self.sequences}
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._ended = False
        self._heartbeat = False
        self._acked = True
        self._unheard_beats = 0
        self.arrived = self.last_sent = self.last_asked = self.last_beat = time.monotonic()
        self.sender_lock = threading.Lock()
        """Held in every call on `sender`: Triton crashes on a question about a request that has had its end."""
        self.closed = False
        """The end was sent, `sender` is not to be used any more; guarded by `sender_lock`."""
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
            if output.log_probs is not None:
                sequence.cum_log_prob += sum(output.log_probs)
            if output.metrics is not None:
                sequence.metrics = output.metrics
            if output.finish_reason is not None:
                sequence.finish_reason, sequence.stop_reason = output.finish_reason, output.stop_reason
            return sequence.finished or sequence.has_output

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

    def finish(self) -> None:
        """Nothing is taken any more: the end was sent in another way."""
        with self._lock:
            self._ended = True

    def beat(self) -> None:
        """Ask for an empty response, which lets postprocessing see whether the client is still there."""
        with self._lock:
            self._heartbeat = True
            self._unheard_beats += not self._acked

    def acknowledge(self) -> None:
        """The last response went through the ensemble."""
        with self._lock:
            self._acked = True
            self._unheard_beats = 0

    def is_past_deadline(self, now: float) -> bool:
        return self.timeout_s is not None and now - self.arrived >= self.timeout_s

    def take(self) -> tuple[list[Chunk], Failure | None, bool]:
        """(chunks to send, failure to end with, send a heartbeat). After the end there is never anything more."""
        with self._lock:
            if self._ended or not self._may_send():
                return [], None, False
            if self._failure is not None:
                self._ended = True
                return [], self._failure, False
            ready = [s for s in self.sequences if not s.reported and (s.finished or s.has_output)]
            if self.in_ensemble:
                ready = ready[:1]
            chunks = []
            for sequence in ready:
                sequence.reported = sequence.finished
                last = sequence is ready[-1] and all(s.reported for s in self.sequences)
                chunks.append(_chunk(sequence, last))
                self._ended = self._ended or last
            heartbeat, self._heartbeat = self._heartbeat and not chunks, False
            if chunks or heartbeat:
                self._acked = not self.in_ensemble
                self.last_sent = time.monotonic()
            return chunks, None, heartbeat

    def _may_send(self) -> bool:
        if self._acked:
            return True
        if self._unheard_beats < MAX_UNHEARD_BEATS:
            return False
        self.in_ensemble, self._acked = False, True
        return True


def _chunk(sequence: ActiveSequence, final: bool) -> Chunk:
    request = sequence.request
    new, sequence.pending = sequence.pending, Pending(request.num_top_log_probs)
    with_prompt = not request.streaming and not request.exclude_input
    context = [] if with_prompt or sequence.num_sent else request.prompt[-CONTEXT_TOKENS:]
    sequence.num_sent += len(new.tokens)
    tokens = request.prompt + new.tokens if with_prompt else new.tokens
    return Chunk(
        sequence, new, tokens, sequence.cum_log_prob, sequence.num_generated, context, sequence.reported, final
    )
