"""The state of one Triton request while the engine works on it: what has arrived and not been sent yet."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from kvforge.serving.request import GenerationRequest

CONTEXT_TOKENS = 6
ACK_TIMEOUT_S = 10.0
"""Only a broken postprocessing takes this long; going on earlier would risk what acks.py is there for."""
CANCELLED, UNAVAILABLE, INVALID_ARG, INTERNAL = "CANCELLED", "UNAVAILABLE", "INVALID_ARG", "INTERNAL"


@dataclass
class Sequence:
    """One generated sequence: `batch_index` is the prompt's row, `sequence_index` counts its samples."""

    batch_index: int
    sequence_index: int
    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cum_log_prob: float = 0.0
    num_generated: int = 0
    num_sent: int = 0
    finished: bool = False
    reported: bool = False


@dataclass(frozen=True)
class Chunk:
    """What one response carries: the sequence's new tokens, or all of them when not streaming."""

    sequence: Sequence
    tokens: list[int]
    log_probs: list[float]
    cum_log_prob: float
    num_generated: int
    context: list[int]
    final: bool


class ActiveRequest:
    """Collects engine output for one Triton request; the engine's reader adds, one sender thread takes.

    `key` is unique among all requests; `engine_ids` are the engine's ids of the prompts in the batch.
    `in_ensemble` says that preprocessing made the key, so that postprocessing acknowledges every response and
    watches for a cancel; the next response then waits for the ack, at most ACK_TIMEOUT_S.
    Exactly one of a final chunk or an error ends the request.
    """

    def __init__(
        self, key: int, client_id: str, sender: Any, prompts: list[GenerationRequest], outputs: frozenset[str],
        in_ensemble: bool,
    ) -> None:  # fmt: skip
        self.key = key
        self.client_id = client_id
        self.sender = sender
        self.outputs = outputs
        self.in_ensemble = in_ensemble
        self.engine_ids = [f"{key}.{row}" for row in range(len(prompts))]
        self.sequences = [
            Sequence(row, index, prompt) for row, prompt in enumerate(prompts)
            for index in range(prompt.num_sequences)
        ]  # fmt: skip
        self._by_index = {(f"{key}.{s.batch_index}", s.sequence_index): s for s in self.sequences}
        self._lock = threading.Lock()
        self._error: tuple[str, str] | None = None
        self._ended = False
        self._heartbeat = False
        self._acked = True
        self.last_sent = time.monotonic()
        self.sender_lock = threading.Lock()
        """Held in every call on `sender`: Triton crashes on a question about a request that has had its end."""
        self.closed = False
        """The end was sent, `sender` is not to be used any more; guarded by `sender_lock`."""
        self.scheduled = False
        """True while a sender thread has or will get this request; guarded by the sender pool."""

    def add(self, engine_id: str, index: int, tokens: list[int], log_probs: list[float] | None, end: bool) -> bool:
        """Take in engine output; True when there is something to send now."""
        with self._lock:
            sequence = self._by_index.get((engine_id, index))
            if sequence is None or sequence.finished:
                return False
            sequence.tokens.extend(tokens)
            sequence.num_generated += len(tokens)
            if log_probs is not None:
                sequence.log_probs.extend(log_probs)
                sequence.cum_log_prob += sum(log_probs)
            sequence.finished = end
            return end or (sequence.request.streaming and bool(tokens))

    def fail(self, message: str, code: str) -> None:
        """End the request with an error, unless it has ended."""
        with self._lock:
            if self._error is None:
                self._error = (message, code)

    def beat(self) -> None:
        """Ask for an empty response, which lets postprocessing see whether the client is still there."""
        with self._lock:
            self._heartbeat = True

    def acknowledge(self) -> None:
        """The last response went through the ensemble."""
        with self._lock:
            self._acked = True

    def take(self) -> tuple[list[Chunk], tuple[str, str] | None, bool]:
        """(chunks to send, error to end with, send a heartbeat). After the end there is never anything more."""
        with self._lock:
            if self._ended or not self._may_send():
                return [], None, False
            if self._error is not None:
                self._ended = True
                return [], self._error, False
            ready = [s for s in self.sequences if not s.reported and (s.finished or _has_news(s))]
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
        return self._acked or time.monotonic() - self.last_sent > ACK_TIMEOUT_S


def _has_news(sequence: Sequence) -> bool:
    return sequence.request.streaming and bool(sequence.tokens)


def _chunk(sequence: Sequence, final: bool) -> Chunk:
    request = sequence.request
    tokens, log_probs = sequence.tokens, sequence.log_probs
    sequence.tokens, sequence.log_probs = [], []
    with_prompt = not request.streaming and not request.exclude_input
    context = [] if with_prompt or sequence.num_sent else request.prompt[-CONTEXT_TOKENS:]
    sequence.num_sent += len(tokens)
    if with_prompt:
        tokens = request.prompt + tokens
    return Chunk(sequence, tokens, log_probs, sequence.cum_log_prob, sequence.num_generated, context, final)
